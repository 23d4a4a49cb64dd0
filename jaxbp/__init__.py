"""jaxbp: pure functions paired with hand-written backward passes, as Pallas kernels, as formulas, or as JAX's own."""

from jaxbp.implementations import IMPLEMENTATIONS, Fastest, Implementation, Op
from jaxbp.logic_circuit import Circuit, bitwise_gate_layer, pack_bits, unpack_bits
from jaxbp.ops.activations import relu, relu_backward
from jaxbp.ops.conv2d import conv2d, conv2d_backward_bias, conv2d_backward_input, conv2d_backward_weights
from jaxbp.ops.conv2d_relu_max_pool2d import (
    conv2d_relu_max_pool2d,
    conv2d_relu_max_pool2d_backward,
    conv2d_relu_max_pool2d_with_places,
)
from jaxbp.ops.linear import linear, linear_backward
from jaxbp.ops.logic_gates import (
    gate_layer,
    gate_layer_backward,
    group_sum,
    hard_logits,
    harden,
    initial_logits,
)
from jaxbp.ops.losses import softmax_cross_entropy, softmax_cross_entropy_backward
from jaxbp.ops.max_pool2d import max_pool2d, max_pool2d_backward, max_pool2d_with_indices
from jaxbp.ops.shapes import flatten
from jaxbp.pairing import Pair, differentiable
from jaxbp.wires import Wires

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "Circuit",
    "Fastest",
    "Implementation",
    "Op",
    "Pair",
    "Wires",
    "bitwise_gate_layer",
    "conv2d",
    "conv2d_backward_bias",
    "conv2d_backward_input",
    "conv2d_backward_weights",
    "conv2d_relu_max_pool2d",
    "conv2d_relu_max_pool2d_backward",
    "conv2d_relu_max_pool2d_with_places",
    "differentiable",
    "flatten",
    "gate_layer",
    "gate_layer_backward",
    "group_sum",
    "hard_logits",
    "harden",
    "initial_logits",
    "linear",
    "linear_backward",
    "max_pool2d",
    "max_pool2d_backward",
    "max_pool2d_with_indices",
    "pack_bits",
    "relu",
    "relu_backward",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "unpack_bits",
]
