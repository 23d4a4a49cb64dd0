"""Circuits of gates with fixed functions, and netlists. They write C and Verilog."""

from jaxbp.logic.circuits.cellular_circuit import CellularCircuit as CellularCircuit
from jaxbp.logic.circuits.circuit import Circuit as Circuit
from jaxbp.logic.circuits.convolutional_circuit import ConvolutionalCircuit as ConvolutionalCircuit
from jaxbp.logic.circuits.netlist import Netlist as Netlist
