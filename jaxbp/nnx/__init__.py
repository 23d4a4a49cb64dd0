"""Layers with the constructors, parameters, and layouts of the layers of the same name in `flax.nnx`.

docs/nnx.md lists the options for which Flax computes a call, and the differences from Flax.
"""

from jaxbp.nnx.activations import PReLU as PReLU
from jaxbp.nnx.activations import glu as glu
from jaxbp.nnx.activations import logsumexp as logsumexp
from jaxbp.nnx.attention import MultiHeadAttention as MultiHeadAttention
from jaxbp.nnx.attention import dot_product_attention as dot_product_attention
from jaxbp.nnx.conv import Conv as Conv
from jaxbp.nnx.conv import ConvTranspose as ConvTranspose
from jaxbp.nnx.dropout import Dropout as Dropout
from jaxbp.nnx.linear import Embed as Embed
from jaxbp.nnx.linear import Linear as Linear
from jaxbp.nnx.linear import LinearSoftmaxCrossEntropy as LinearSoftmaxCrossEntropy
from jaxbp.nnx.linear_general import Einsum as Einsum
from jaxbp.nnx.linear_general import LinearGeneral as LinearGeneral
from jaxbp.nnx.lora import LoRA as LoRA
from jaxbp.nnx.lora import LoRALinear as LoRALinear
from jaxbp.nnx.mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from jaxbp.nnx.normalization import BatchNorm as BatchNorm
from jaxbp.nnx.normalization import GroupNorm as GroupNorm
from jaxbp.nnx.normalization import LayerNorm as LayerNorm
from jaxbp.nnx.normalization import RMSNorm as RMSNorm
from jaxbp.nnx.pooling import avg_pool as avg_pool
from jaxbp.nnx.pooling import max_pool as max_pool
from jaxbp.ops.pointwise.activations import elu as elu
from jaxbp.ops.pointwise.activations import gelu as gelu
from jaxbp.ops.pointwise.activations import leaky_relu as leaky_relu
from jaxbp.ops.pointwise.activations import log_softmax as log_softmax
from jaxbp.ops.pointwise.activations import relu as relu
from jaxbp.ops.pointwise.activations import sigmoid as sigmoid
from jaxbp.ops.pointwise.activations import silu as silu
from jaxbp.ops.pointwise.activations import softmax as softmax
from jaxbp.ops.pointwise.activations import softplus as softplus
from jaxbp.ops.pointwise.activations import tanh as tanh

swish = silu
