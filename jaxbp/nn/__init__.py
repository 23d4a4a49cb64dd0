"""Flax NNX layers and models on the ops of jaxbp."""

from jaxbp.nn.layers import Conv2d, Linear
from jaxbp.nn.lenet import LeNet, MemoryRow, lenet_memory_table, lenet_saved_tensors

__all__ = ["Conv2d", "LeNet", "Linear", "MemoryRow", "lenet_memory_table", "lenet_saved_tensors"]
