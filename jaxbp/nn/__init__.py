"""Flax NNX layers and models on the ops of jaxbp."""

from jaxbp.nn.layers import Conv2d, Linear
from jaxbp.nn.lenet import LeNet, MemoryRow, lenet_memory_table, lenet_saved_tensors
from jaxbp.nn.logic import LogicLayer, LogicNetwork, thermometer

__all__ = [
    "Conv2d",
    "LeNet",
    "Linear",
    "LogicLayer",
    "LogicNetwork",
    "MemoryRow",
    "lenet_memory_table",
    "lenet_saved_tensors",
    "thermometer",
]
