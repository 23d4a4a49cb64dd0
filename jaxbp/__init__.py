"""jaxbp: pure functions paired with hand-written backward passes, as Pallas kernels, as formulas, or as JAX's own."""

import importlib
from typing import TYPE_CHECKING

from jaxbp.checkpointing import checkpointed, checkpointed_scan
from jaxbp.logic.automaton import Automaton
from jaxbp.logic.cellular_circuit import CellularCircuit
from jaxbp.logic.circuit import Circuit, bitwise_gate_layer, pack_bits, unpack_bits
from jaxbp.logic.convolution import TreeWires
from jaxbp.logic.convolutional_circuit import ConvolutionalCircuit
from jaxbp.logic.gates import group_sum, hard_logits, harden, initial_logits
from jaxbp.logic.netlist import Netlist
from jaxbp.logic.wires import Wires
from jaxbp.ops.activations import (
    elu,
    elu_backward,
    gelu,
    gelu_backward,
    leaky_relu,
    leaky_relu_backward,
    log_softmax,
    log_softmax_backward,
    mish,
    mish_backward,
    prelu,
    prelu_backward,
    relu,
    relu_backward,
    sigmoid,
    sigmoid_backward,
    silu,
    silu_backward,
    softmax,
    softmax_backward,
    softplus,
    softplus_backward,
    tanh,
    tanh_backward,
)
from jaxbp.ops.arithmetic import (
    add,
    add_backward,
    divide,
    divide_backward,
    maximum,
    maximum_backward,
    minimum,
    minimum_backward,
    multiply,
    multiply_backward,
    negative,
    negative_backward,
    power,
    power_backward,
    subtract,
    subtract_backward,
)
from jaxbp.ops.automaton import (
    automaton_rollout,
    automaton_rollout_backward,
    automaton_step,
    automaton_step_backward,
)
from jaxbp.ops.avg_pool2d import (
    avg_pool2d,
    avg_pool2d_backward,
    global_avg_pool2d,
    global_avg_pool2d_backward,
)
from jaxbp.ops.batch_norm import (
    batch_norm,
    batch_norm_backward,
)
from jaxbp.ops.conv2d import conv2d, conv2d_backward_bias, conv2d_backward_input, conv2d_backward_weights
from jaxbp.ops.conv2d_relu_max_pool2d import (
    conv2d_relu_max_pool2d,
    conv2d_relu_max_pool2d_backward,
    conv2d_relu_max_pool2d_with_places,
)
from jaxbp.ops.dropout import (
    dropout,
    dropout_backward,
)
from jaxbp.ops.elementwise import (
    abs,
    abs_backward,
    clip,
    clip_backward,
    cos,
    cos_backward,
    exp,
    exp_backward,
    log,
    log_backward,
    sin,
    sin_backward,
    sqrt,
    sqrt_backward,
)
from jaxbp.ops.gate_layer import gate_layer, gate_layer_backward
from jaxbp.ops.layer_norm import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from jaxbp.ops.layer_norm_linear import layer_norm_linear, layer_norm_linear_backward
from jaxbp.ops.linear import linear, linear_backward
from jaxbp.ops.linear_algebra import (
    dot,
    dot_backward,
    matmul,
    matmul_backward,
    outer,
    outer_backward,
    transpose,
    transpose_backward,
)
from jaxbp.ops.logic_conv2d import (
    logic_conv2d,
    logic_conv2d_backward,
    logic_conv2d_or_pool2d,
    logic_conv2d_or_pool2d_backward,
    logic_conv2d_or_pool2d_with_places,
    logic_or_pool2d,
)
from jaxbp.ops.losses import (
    binary_cross_entropy,
    binary_cross_entropy_backward,
    huber,
    huber_backward,
    kl_divergence,
    kl_divergence_backward,
    mean_absolute_error,
    mean_absolute_error_backward,
    mean_squared_error,
    mean_squared_error_backward,
    sigmoid_binary_cross_entropy,
    sigmoid_binary_cross_entropy_backward,
)
from jaxbp.ops.max_pool2d import max_pool2d, max_pool2d_backward, max_pool2d_with_indices
from jaxbp.ops.mlp_softmax_cross_entropy import (
    mlp_softmax_cross_entropy,
    mlp_softmax_cross_entropy_backward,
    mlp_softmax_cross_entropy_with_classes,
)
from jaxbp.ops.reductions import (
    logsumexp,
    logsumexp_backward,
    max,
    max_backward,
    mean,
    mean_backward,
    min,
    min_backward,
    sum,
    sum_backward,
    var,
    var_backward,
)
from jaxbp.ops.shapes import flatten
from jaxbp.ops.softmax_cross_entropy import softmax_cross_entropy, softmax_cross_entropy_backward
from jaxbp.pairing import IMPLEMENTATIONS, Fastest, Implementation, Op, Pair, differentiable

__version__ = "0.1.0"

# What needs more than jax and jaxtyping, or takes time to import, is imported when it is asked for.
if TYPE_CHECKING:
    from jaxbp import catalogue as catalogue
    from jaxbp import nn as nn
    from jaxbp import precision as precision
    from jaxbp import verify as verify
else:

    def __getattr__(name):
        if name in ("catalogue", "nn", "precision", "verify"):
            return importlib.import_module(f"jaxbp.{name}")
        raise AttributeError(f"module 'jaxbp' has no attribute {name!r}")


__all__ = [
    "IMPLEMENTATIONS",
    "Automaton",
    "CellularCircuit",
    "Circuit",
    "ConvolutionalCircuit",
    "Fastest",
    "Implementation",
    "Netlist",
    "Op",
    "Pair",
    "TreeWires",
    "Wires",
    "abs",
    "abs_backward",
    "add",
    "add_backward",
    "automaton_rollout",
    "automaton_rollout_backward",
    "automaton_step",
    "automaton_step_backward",
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm",
    "batch_norm_backward",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "bitwise_gate_layer",
    "checkpointed",
    "checkpointed_scan",
    "clip",
    "clip_backward",
    "conv2d",
    "conv2d_backward_bias",
    "conv2d_backward_input",
    "conv2d_backward_weights",
    "conv2d_relu_max_pool2d",
    "conv2d_relu_max_pool2d_backward",
    "conv2d_relu_max_pool2d_with_places",
    "cos",
    "cos_backward",
    "differentiable",
    "divide",
    "divide_backward",
    "dot",
    "dot_backward",
    "dropout",
    "dropout_backward",
    "elu",
    "elu_backward",
    "exp",
    "exp_backward",
    "flatten",
    "gate_layer",
    "gate_layer_backward",
    "gelu",
    "gelu_backward",
    "global_avg_pool2d",
    "global_avg_pool2d_backward",
    "group_sum",
    "hard_logits",
    "harden",
    "huber",
    "huber_backward",
    "initial_logits",
    "kl_divergence",
    "kl_divergence_backward",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_linear",
    "layer_norm_linear_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "linear",
    "linear_backward",
    "log",
    "log_backward",
    "log_softmax",
    "log_softmax_backward",
    "logic_conv2d",
    "logic_conv2d_backward",
    "logic_conv2d_or_pool2d",
    "logic_conv2d_or_pool2d_backward",
    "logic_conv2d_or_pool2d_with_places",
    "logic_or_pool2d",
    "logsumexp",
    "logsumexp_backward",
    "matmul",
    "matmul_backward",
    "max",
    "max_backward",
    "max_pool2d",
    "max_pool2d_backward",
    "max_pool2d_with_indices",
    "maximum",
    "maximum_backward",
    "mean",
    "mean_absolute_error",
    "mean_absolute_error_backward",
    "mean_backward",
    "mean_squared_error",
    "mean_squared_error_backward",
    "min",
    "min_backward",
    "minimum",
    "minimum_backward",
    "mish",
    "mish_backward",
    "mlp_softmax_cross_entropy",
    "mlp_softmax_cross_entropy_backward",
    "mlp_softmax_cross_entropy_with_classes",
    "multiply",
    "multiply_backward",
    "negative",
    "negative_backward",
    "outer",
    "outer_backward",
    "pack_bits",
    "power",
    "power_backward",
    "prelu",
    "prelu_backward",
    "relu",
    "relu_backward",
    "rms_norm",
    "rms_norm_backward",
    "sigmoid",
    "sigmoid_backward",
    "sigmoid_binary_cross_entropy",
    "sigmoid_binary_cross_entropy_backward",
    "silu",
    "silu_backward",
    "sin",
    "sin_backward",
    "softmax",
    "softmax_backward",
    "softmax_cross_entropy",
    "softmax_cross_entropy_backward",
    "softplus",
    "softplus_backward",
    "sqrt",
    "sqrt_backward",
    "subtract",
    "subtract_backward",
    "sum",
    "sum_backward",
    "tanh",
    "tanh_backward",
    "transpose",
    "transpose_backward",
    "unpack_bits",
    "var",
    "var_backward",
    "verify",
]
