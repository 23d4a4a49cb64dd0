"""Flax NNX layers and models on the ops of jaxbp."""

from jaxbp.nn.automaton import LogicAutomaton
from jaxbp.nn.layers import Conv2d, LayerNorm, LayerNormLinear, Linear
from jaxbp.nn.lenet import LeNet, MemoryRow, lenet_memory_table, lenet_saved_tensors
from jaxbp.nn.logic import LogicLayer, LogicNetwork, thermometer
from jaxbp.nn.logic_conv import LogicConv2d, LogicConvNetwork, LogicConvolution, image_thermometer
from jaxbp.nn.mixer import Mixer, MixerBlock

__all__ = [
    "Conv2d",
    "LayerNorm",
    "LayerNormLinear",
    "LeNet",
    "Linear",
    "LogicAutomaton",
    "LogicConv2d",
    "LogicConvNetwork",
    "LogicConvolution",
    "LogicLayer",
    "LogicNetwork",
    "MemoryRow",
    "Mixer",
    "MixerBlock",
    "image_thermometer",
    "lenet_memory_table",
    "lenet_saved_tensors",
    "thermometer",
]
