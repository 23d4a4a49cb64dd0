"""Layers with the constructors, parameters, and layouts of `flax.nnx`, whose calls run ops of jaxbp."""

from jaxbp.nnx.conv import Conv as Conv
from jaxbp.nnx.dropout import Dropout as Dropout
from jaxbp.nnx.linear import Embed as Embed
from jaxbp.nnx.linear import Linear as Linear
from jaxbp.nnx.normalization import BatchNorm as BatchNorm
from jaxbp.nnx.normalization import GroupNorm as GroupNorm
from jaxbp.nnx.normalization import LayerNorm as LayerNorm
from jaxbp.nnx.normalization import RMSNorm as RMSNorm
