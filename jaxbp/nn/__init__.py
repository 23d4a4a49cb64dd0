"""Flax NNX layers and models on the ops of jaxbp."""

from jaxbp.nn.automaton import LogicAutomaton
from jaxbp.nn.layers import Conv2d, LayerNorm, LayerNormLinear, Linear
from jaxbp.nn.lenet import LeNet, MemoryRow, lenet_memory_table, lenet_saved_tensors
from jaxbp.nn.logic import LogicLayer, LogicNetwork, thermometer
from jaxbp.nn.mixer import Mixer, MixerBlock

__all__ = [
    "Conv2d",
    "LayerNorm",
    "LayerNormLinear",
    "LeNet",
    "Linear",
    "LogicAutomaton",
    "LogicLayer",
    "LogicNetwork",
    "MemoryRow",
    "Mixer",
    "MixerBlock",
    "lenet_memory_table",
    "lenet_saved_tensors",
    "thermometer",
]
