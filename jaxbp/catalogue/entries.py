from jaxbp.common.cases import Entry
from jaxbp.logic.ops import automaton_rollout, gate_layer, logic_conv2d, lut_layer, wire_layer
from jaxbp.ops.attention import dot_product_attention
from jaxbp.ops.conv import avg_pool2d, conv1d, conv2d, conv2d_relu_max_pool2d, max_pool2d
from jaxbp.ops.dense import (
    embedding,
    grouped_linear,
    linear,
    linear_algebra,
    linear_softmax_cross_entropy,
    mlp_softmax_cross_entropy,
    softmax_cross_entropy,
)
from jaxbp.ops.norm import batch_norm, group_norm, layer_norm, layer_norm_linear
from jaxbp.ops.pointwise import (
    activations,
    arithmetic,
    dropout,
    elementwise,
    gated_linear_unit,
    losses,
    reductions,
    rotary_embedding,
)

CATALOGUE: tuple[Entry, ...] = (
    *conv2d.ENTRIES,
    *conv1d.ENTRIES,
    *activations.RELU_ENTRIES,
    *max_pool2d.ENTRIES,
    *conv2d_relu_max_pool2d.ENTRIES,
    *linear.ENTRIES,
    *grouped_linear.ENTRIES,
    *layer_norm.ENTRIES,
    *layer_norm_linear.ENTRIES,
    *softmax_cross_entropy.ENTRIES,
    *linear_softmax_cross_entropy.ENTRIES,
    *mlp_softmax_cross_entropy.ENTRIES,
    *activations.ENTRIES,
    *arithmetic.ENTRIES,
    *elementwise.ENTRIES,
    *linear_algebra.ENTRIES,
    *reductions.ENTRIES,
    *losses.ENTRIES,
    *avg_pool2d.ENTRIES,
    *batch_norm.ENTRIES,
    *group_norm.ENTRIES,
    *dropout.ENTRIES,
    *gate_layer.ENTRIES,
    *lut_layer.ENTRIES,
    *wire_layer.ENTRIES,
    *logic_conv2d.ENTRIES,
    *embedding.ENTRIES,
    *rotary_embedding.ENTRIES,
    *dot_product_attention.ENTRIES,
    *gated_linear_unit.ENTRIES,
    *automaton_rollout.ENTRIES,
)
