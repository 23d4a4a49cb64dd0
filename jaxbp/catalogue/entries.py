"""The table of ops, with small cases for checks and realistic cases for lowering and timing.

An op in this table is checked against finite differences in every implementation. It is also simulated, lowered for
CUDA in every dtype that its kernels take, and timed.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxbp.catalogue.schema import BATCH, Argument, AutomatonArgument, Case, Entry, TreeWiresArgument, WiresArgument
from jaxbp.logic.gates import PASS_THROUGH
from jaxbp.ops.conv import avg_pool2d, conv1d, conv2d, conv2d_relu_max_pool2d, max_pool2d
from jaxbp.ops.dense import embedding, linear, linear_algebra, softmax_cross_entropy
from jaxbp.ops.dense import linear_softmax_cross_entropy as fused_loss
from jaxbp.ops.dense import mlp_softmax_cross_entropy as mlp
from jaxbp.ops.logic import automaton_rollout, gate_layer, logic_conv2d
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


def _case(*arguments: Any, **options: Any) -> Case:
    return Case(tuple(Argument(a) if isinstance(a, tuple) else a for a in arguments), options)


_ANY = dict(stride=(2, 1), padding=(1, 0))
_POOL_ANY = dict(window=(3, 2), stride=(2, 1), padding=(1, 0))
# The values are so far apart that the step of a finite difference does not change which element is the maximum.
_APART = Argument((1, 2, 5, 6), apart=True)
_CLASS = Argument((BATCH,), below=10)

_LABELS = Argument((2, 3), below=4)
_LAYERS = ((6, 5), (6,), (4, 6), (4,))
# The weights are scaled so that activations neither grow nor shrink from layer to layer. Otherwise, the softmax would
# give one class nearly all the probability.
_LENET_TAIL = (
    (BATCH, 256),
    _CLASS,
    *(a for n, m in ((256, 120), (120, 84), (84, 10)) for a in (Argument((m, n), scale=n**-0.5), (m,))),
)

_BLOCKS = (
    ((BATCH, 1, 28, 28), (6, 1, 5, 5), (BATCH, 6, 24, 24), (BATCH, 6, 12, 12)),
    ((BATCH, 6, 12, 12), (16, 6, 5, 5), (BATCH, 16, 8, 8), (BATCH, 16, 4, 4)),
)
"""The shapes of four arrays in each of LeNet's two blocks of convolution, ReLU, and pool: the images x, the filters w,
the result z of the convolution, and the result y of the pool."""


def _blocks(name: str, of: Callable[..., Case]) -> dict[str, Case]:
    """Return one case per block of `_BLOCKS`: `of(x, w, z, y)`, where x, w, z, and y are shapes. Its key is `name` and
    the number of the block."""
    return {f"{name}{i}": of(*shapes) for i, shapes in enumerate(_BLOCKS, 1)}


_FUSED_ANY = dict(window=(2, 3), padding=(1, 0))


def _indices(*shape: int | str, below: int) -> Argument:
    """Return an argument for the positions of maxima in their windows: random integers from 0 to `below - 1`."""
    return Argument(shape, below=below, dtype=jnp.uint8)


def _pair(
    function: Callable, small: Case, real: Mapping[str, Case], takes: Any = slice(None), like: str = ""
) -> tuple[Entry, Entry]:
    """Return the entries of a function and of its public backward.

    Args:
      small, real: the cases. Their first argument is `dy`, the gradient with respect to the result. The arguments of
        the function follow.
      takes: selects the arguments of the function that the backward takes after `dy`.
      like: the field `like` of both entries. If it is the function's own name, only the backward gets it.
    """
    backward = getattr(sys.modules[function.__module__], f"{function.__name__}_backward")

    def without_dy(case):
        return dataclasses.replace(case, arguments=case.arguments[1:])

    def with_dy(case):
        dy, *arguments = case.arguments
        return dataclasses.replace(case, arguments=(dy, *arguments[takes]))

    forward_cases, backward_cases = ({place: of(case) for place, case in real.items()} for of in (without_dy, with_dy))
    forward_like = "" if like == function.__name__ else like
    return (
        Entry(function, without_dy(small), forward_cases, like=forward_like),
        Entry(backward, with_dy(small), backward_cases, like=like),
    )


_SMALL_APART = Argument((2, 3, 4), apart=True)


def _unary(function: Callable, small: Argument = _SMALL_APART, **options: Any) -> tuple[Entry, ...]:
    real = dataclasses.replace(small, shape=(BATCH, 1024))
    small_case, real_case = (_case(a.shape, a, **options) for a in (small, real))
    return _pair(function, small_case, {"hidden": real_case}, like="relu")


def _binary(function: Callable, **of: Mapping[str, Any]) -> tuple[Entry, ...]:
    """Return the entries of a function of two arrays, x1 and x2, and of its backward. In the cases, x2 is broadcast. In
    most small cases, x1 is broadcast, too."""
    x1, x2 = (functools.partial(Argument, **of.get(name, {})) for name in ("x1", "x2"))
    rows = 2 if function is arithmetic.divide else 1
    small = _case((3, 2, 4), x1((3, rows, 4)), x2((2, 1)))
    real = _case((BATCH, 1024), x1((BATCH, 1024)), x2((1024,)))
    return _pair(function, small, {"bias": real}, like="divide")


def _loss(function: Callable, *of: Mapping[str, Any], dy: Callable = lambda *shape: shape, **options: Any):
    shapes = (2, 3, 4), (BATCH, 1024)
    small, real = (_case(dy(*shape), *(Argument(shape, **a) for a in of), **options) for shape in shapes)
    return _pair(function, small, {"hidden": real}, like="divide")


def _reduction(function: Callable, axis: Any, keepdims: bool, dy: tuple, of: Mapping[str, Any] = {}, **options: Any):
    small = _case(dy, Argument((2, 3, 4), **of), axis=axis, keepdims=keepdims, **options)
    real = _case((BATCH,), Argument((BATCH, 1024), **of), axis=-1, **options)
    return _pair(function, small, {"rows": real}, like="divide")


def _rowwise(function: Callable) -> tuple[Entry, ...]:
    return _pair(function, _case((2, 3, 4), (2, 3, 4)), {"rows": _case((BATCH, 1024), (BATCH, 1024))}, like="divide")


def _without_convention(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Return the entries with `kink_convention=False`, for ops whose gradient goes to the first of several equal
    numbers. Autodiff divides the gradient among these numbers."""
    return tuple(dataclasses.replace(entry, kink_convention=False) for entry in entries)


_SMOOTH = Argument((2, 3, 4))
_KEY = Argument((2,), below=2**31 - 1, dtype=jnp.uint32)


_VOCABULARY = (4096, 4096, 128256)
"""Rows, features, and classes of the last layer of a language model."""


def _large_vocabulary(features: int, classes: int) -> tuple[Any, ...]:
    """Return the arguments x, w, labels, b. The weights are scaled so that the logits have about the scale of x."""
    w, labels = Argument((classes, features), scale=features**-0.5), Argument((BATCH,), below=classes)
    return (BATCH, features), w, labels, (classes,)


def _rows(*sizes: tuple[int, ...], of: Callable[..., Case]) -> dict[str, Case]:
    """Return one case per tuple `(rows, *size)` in `sizes`: the case `of(*size)`, with `rows` as its batch size."""
    return {f"{rows}x{'x'.join(map(str, size))}": dataclasses.replace(of(*size), batch=rows) for rows, *size in sizes}


def _tokens(num_embeddings: int, features: int) -> Case:
    indices = Argument((BATCH,), below=num_embeddings)
    return _case((BATCH, features), indices, (num_embeddings, features))


_NORMALISED_ROWS = (65536, 1024), (32768, 4096), (262144, 256)
_PROJECTED_ROWS = (65536, 1024, 4096), (65536, 1024, 1024), (32768, 4096, 4096), (262144, 256, 256)


def _gates(inputs: int, gates: int, *dy: tuple) -> Case:
    case = _case(*dy, (gates, 16), WiresArgument(inputs, gates), (BATCH, inputs))
    return dataclasses.replace(case, batch=8192)


_TREES = TreeWiresArgument(2, 2, (2, 2), depth=2)


def _trees(channels: int, size: int, kernels: int, *dy: Argument | tuple, window: int = 3, **options: Any) -> Case:
    """Return the case of one layer of the published networks: a layer with a 3 x 3 window and padding, or the first
    layer of the network for MNIST."""
    wires, x = TreeWiresArgument(channels, kernels, (window, window)), (BATCH, channels, size, size)
    case = _case(*dy, (kernels, 7, 16), wires, x, padding=1 if window == 3 else 0, **options)
    return dataclasses.replace(case, batch=128)


_CELL = AutomatonArgument(2, 1, (8, 4, 2), (4, 2))
CHECKERBOARD = AutomatonArgument(8, 16, (8, 4, 2), (*[256] * 10, 128, 64, 32, 16, 8, 8), periodic=False)
"""The wires of the published automaton that grows a checkerboard."""


def _ticks(function: Callable, **options: int) -> tuple[Entry, Entry]:
    """Return the entries of a function of an automaton and of its backward. The small case has a grid of few cells, and
    the real case has the published automaton and grid."""

    def at(automaton, grid, logits):
        state = automaton.state(*grid)
        return _case(state.shape, logits, automaton, state, **options)

    # Most gates pass one input through. If the gates had random functions, the gradient would vanish in the twenty
    # layers.
    passing = CHECKERBOARD.logits(offset=tuple(6.0 * (i == PASS_THROUGH) for i in range(16)))
    published = dataclasses.replace(at(CHECKERBOARD, (BATCH, 16, 16), passing), batch=2)
    return _pair(function, at(_CELL, (BATCH, 2, 3), _CELL.logits()), {"checkerboard": published}, like="automaton_step")


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        conv2d.conv2d,
        _case((2, 2, 5, 6), (3, 2, 3, 2), (3,), **_ANY),
        _blocks("conv", lambda x, w, z, y: _case(x, w, w[:1])),
    ),
    Entry(
        conv2d.conv2d_backward_input,
        _case((2, 3, 3, 5), (3, 2, 3, 2), input_size=(5, 6), **_ANY),
        _blocks("conv", lambda x, w, z, y: _case(z, w, input_size=x[2:])),
    ),
    Entry(
        conv2d.conv2d_backward_weights,
        _case((2, 3, 3, 5), (2, 2, 5, 6), filter_size=(3, 2), **_ANY),
        _blocks("conv", lambda x, w, z, y: _case(z, x, filter_size=w[2:])),
    ),
    Entry(conv2d.conv2d_backward_bias, _case((2, 3, 3, 5)), _blocks("conv", lambda x, w, z, y: _case(z))),
    *_pair(
        conv1d.conv1d,
        _case((2, 3, 6), (2, 2, 6), (3, 2, 3), (3,), padding="CAUSAL"),
        {"sequences": _case((BATCH, 8, 128), (BATCH, 8, 128), (8, 8, 4), (8,), padding="CAUSAL")},
        takes=slice(2),
        like="conv2d",
    ),
    *_pair(
        activations.relu,
        _case((3, 7), (3, 7)),
        {
            **_blocks("relu", lambda x, w, z, y: _case(z, z)),
            "relu3": _case((BATCH, 120), (BATCH, 120)),
            "relu4": _case((BATCH, 84), (BATCH, 84)),
        },
    ),
    *(
        Entry(function, _case(_APART, **_POOL_ANY), _blocks("pool", lambda x, w, z, y: _case(z, window=2)))
        for function in (max_pool2d.max_pool2d, max_pool2d.max_pool2d_with_indices)
    ),
    Entry(
        max_pool2d.max_pool2d_backward,
        _case((2, 2, 3, 5), _indices(2, 2, 3, 5, below=6), input_size=(5, 6), **_POOL_ANY),
        {
            **_blocks("pool", lambda x, w, z, y: _case(y, _indices(*y, below=4), input_size=z[2:], window=2)),
            "overlapping": _case(
                (BATCH, 16, 4, 4),
                _indices(BATCH, 16, 4, 4, below=9),
                input_size=(8, 8),
                window=3,
                stride=2,
                padding=1,
            ),
        },
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d,
        _case((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_FUSED_ANY),
        _blocks("block", lambda x, w, z, y: _case(x, w, w[:1], window=2)),
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_with_indices,
        _case((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_FUSED_ANY),
        {"block1": _case((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,), window=2)},
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_backward,
        _case((1, 3, 2, 2), _indices(1, 3, 2, 2, below=7), (1, 2, 5, 7), (3, 2, 3, 2), **_FUSED_ANY),
        _blocks("block", lambda x, w, z, y: _case(y, _indices(*y, below=5), x, w, window=2)),
    ),
    *_pair(
        linear.linear,
        _case((2, 3, 4), (2, 3, 5), (4, 5), (4,)),
        {
            "fc1": _case((BATCH, 120), (BATCH, 256), (120, 256), (120,)),
            "fc2": _case((BATCH, 84), (BATCH, 120), (84, 120), (84,)),
            "fc3": _case((BATCH, 10), (BATCH, 84), (10, 84), (10,)),
        },
        takes=slice(2),
    ),
    *_pair(
        layer_norm.layer_norm,
        _case((2, 3, 5), (2, 3, 5), (5,), (5,)),
        _rows(*_NORMALISED_ROWS, of=lambda hidden: _case((BATCH, hidden), (BATCH, hidden), (hidden,), (hidden,))),
        takes=slice(2),
    ),
    *_pair(
        layer_norm.rms_norm,
        _case((2, 3, 5), (2, 3, 5), (5,)),
        _rows(
            *_NORMALISED_ROWS,
            (16384, 4096),  # the size of the published times of cuDNN's RMSNorm
            of=lambda hidden: _case((BATCH, hidden), (BATCH, hidden), (hidden,)),
        ),
    ),
    *_pair(
        layer_norm_linear.layer_norm_linear,
        _case((2, 3, 4), (2, 3, 5), (5,), (5,), (4, 5), (4,)),
        _rows(
            *_PROJECTED_ROWS,
            of=lambda hidden, out: _case((BATCH, out), (BATCH, hidden), (hidden,), (hidden,), (out, hidden), (out,)),
        ),
        takes=slice(4),
    ),
    Entry(
        softmax_cross_entropy.softmax_cross_entropy,
        _case((2, 3, 5), Argument((2, 3, 5), weights=True)),
        {
            "classes": _case((BATCH, 10), _CLASS),
            "weights": _case((BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        softmax_cross_entropy.softmax_cross_entropy_backward,
        _case((2, 3), (2, 3, 5), Argument((2, 3), below=5)),
        {
            "classes": _case((BATCH,), (BATCH, 10), _CLASS),
            "weights": _case((BATCH,), (BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        fused_loss.linear_softmax_cross_entropy,
        _case((2, 3, 5), (4, 5), _LABELS, (4,), label_smoothing=0.1, z_loss=0.01, softcap=5.0),
        _rows(_VOCABULARY, of=lambda *size: _case(*_large_vocabulary(*size))),
        kernel_dtypes=(),
    ),
    Entry(
        fused_loss.linear_softmax_cross_entropy_backward,
        _case((2, 3), (2, 3, 5), (4, 5), _LABELS, (4,), label_smoothing=0.1, z_loss=0.01, reduction=None),
        _rows(_VOCABULARY, of=lambda *size: _case((), *_large_vocabulary(*size))),
        kernel_dtypes=(),
    ),
    *(
        Entry(function, _case((2, 3, 5), _LABELS, *_LAYERS), {"fc1 to fc3": _case(*_LENET_TAIL)})
        for function in (mlp.mlp_softmax_cross_entropy, mlp.mlp_softmax_cross_entropy_with_classes)
    ),
    Entry(
        mlp.mlp_softmax_cross_entropy_backward,
        _case((2, 3), (2, 3, 5), _LABELS, *_LAYERS),
        {"fc1 to fc3": _case((BATCH,), *_LENET_TAIL)},
    ),
    *_unary(activations.leaky_relu, negative_slope=0.1),
    *_pair(
        activations.prelu,
        _case((2, 3, 4), (2, 3, 4), (3, 1)),
        {"images": _case((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16, 1, 1))},
        like="divide",
    ),
    *_unary(activations.elu, alpha=0.7),
    *_unary(activations.sigmoid, _SMOOTH),
    *_unary(activations.tanh, _SMOOTH),
    *_unary(activations.gelu, _SMOOTH, approximate=False),
    *_unary(activations.silu, _SMOOTH),
    *_unary(activations.mish, _SMOOTH),
    *_unary(activations.softplus, _SMOOTH),
    *_rowwise(activations.softmax),
    *_rowwise(activations.log_softmax),
    *_binary(arithmetic.add),
    *_binary(arithmetic.subtract),
    *_binary(arithmetic.multiply),
    *_binary(arithmetic.divide, x2=dict(positive=True)),
    *_binary(arithmetic.power, x1=dict(positive=True)),
    *_binary(arithmetic.maximum),
    *_binary(arithmetic.minimum),
    *_pair(
        arithmetic.negative,
        _case((2, 3, 4), (2, 3, 4)),
        {"hidden": _case((BATCH, 1024), (BATCH, 1024))},
        takes=slice(0),
        like="relu",
    ),
    *_unary(elementwise.exp, _SMOOTH),
    *_unary(elementwise.log, Argument((2, 3, 4), positive=True)),
    *_unary(elementwise.sqrt, Argument((2, 3, 4), positive=True)),
    *_unary(elementwise.abs),
    *_unary(elementwise.sin, _SMOOTH),
    *_unary(elementwise.cos, _SMOOTH),
    *_unary(elementwise.clip, min=-1.1, max=0.5),
    *_pair(
        linear_algebra.matmul,
        _case((2, 2, 3, 5), (2, 1, 3, 4), (2, 4, 5)),
        {"fc1": _case((BATCH, 120), (BATCH, 256), (256, 120))},
        like="linear",
    ),
    *_pair(
        linear_algebra.dot,
        _case((2, 3, 2, 5), (2, 3, 4), (2, 4, 5)),
        {"fc1": _case((BATCH, 120), (BATCH, 256), (256, 120))},
        like="linear",
    ),
    *_pair(
        linear_algebra.outer,
        _case((6, 4), (2, 3), (4,)),
        {"columns": _case((BATCH, 256), (BATCH,), (256,))},
        like="divide",
    ),
    *_pair(
        linear_algebra.transpose,
        _case((4, 2, 3), (2, 3, 4), axes=(2, 0, 1)),
        {"images": _case((64, BATCH, 16), (BATCH, 16, 64), axes=(2, 0, 1))},
        takes=slice(0),
        like="relu",
    ),
    *_reduction(reductions.sum, axis=(0, 2), keepdims=True, dy=(1, 3, 1)),
    *_reduction(reductions.mean, axis=1, keepdims=False, dy=(2, 4)),
    *_reduction(reductions.var, axis=(-1, 0), keepdims=False, dy=(3,), ddof=1),
    *_without_convention(_reduction(reductions.max, axis=(0, 2), keepdims=False, dy=(3,), of=dict(apart=True))),
    *_without_convention(_reduction(reductions.min, axis=None, keepdims=False, dy=(), of=dict(apart=True))),
    *_reduction(reductions.logsumexp, axis=(0, 1), keepdims=True, dy=(1, 1, 4)),
    *_loss(losses.mean_squared_error, {}, {}, dy=lambda *shape: ()),
    *_loss(losses.mean_absolute_error, {}, {}, dy=lambda *shape: ()),
    *_loss(losses.huber, {}, {}, delta=0.8),
    *_loss(losses.binary_cross_entropy, dict(weights=True), dict(weights=True)),
    *_loss(losses.sigmoid_binary_cross_entropy, {}, dict(weights=True)),
    *_loss(losses.kl_divergence, {}, dict(weights=True), dy=lambda *shape: shape[:-1]),
    Entry(
        avg_pool2d.avg_pool2d,
        _case((1, 2, 5, 6), **_POOL_ANY),
        {"pool1": _case((BATCH, 6, 24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(
        avg_pool2d.avg_pool2d_backward,
        _case((1, 2, 3, 5), input_size=(5, 6), **_POOL_ANY),
        {"pool1": _case((BATCH, 6, 12, 12), input_size=(24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(
        avg_pool2d.global_avg_pool2d,
        _case((2, 3, 2, 4)),
        {"images": _case((BATCH, 16, 8, 8))},
        like="divide",
    ),
    Entry(
        avg_pool2d.global_avg_pool2d_backward,
        _case((2, 3), input_size=(2, 4)),
        {"images": _case((BATCH, 16), input_size=(8, 8))},
        like="divide",
    ),
    *_pair(
        batch_norm.batch_norm,
        _case((4, 3, 2), (4, 3, 2), (3,), (3,)),
        {"images": _case((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,))},
        takes=slice(2),
        like="divide",
    ),
    *_pair(
        group_norm.group_norm,
        _case((2, 4, 3), (2, 4, 3), (4,), (4,), num_groups=2),
        {"images": _case((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,), num_groups=4)},
        takes=slice(2),
        like="divide",
    ),
    *_pair(
        dropout.dropout,
        _case((2, 3, 4), (2, 3, 4), _KEY, rate=0.3),
        {"hidden": _case((BATCH, 1024), (BATCH, 1024), _KEY, rate=0.3)},
        takes=slice(1, None),
        like="relu",
    ),
    Entry(
        gate_layer.gate_layer,
        _case((6, 16), WiresArgument(5, 6), (2, 3, 5)),
        {
            "4096->8192": _gates(4096, 8192),
            "8000->8000": _gates(8000, 8000),
        },
    ),
    Entry(
        gate_layer.gate_layer_backward,
        _case((2, 3, 6), (6, 16), WiresArgument(6, 6), (2, 3, 6)),  # each input has equally many consumers
        {"4096->8192": _gates(4096, 8192, (BATCH, 8192))},
    ),
    *_pair(
        logic_conv2d.logic_conv2d,
        _case((2, 2, 3, 4), (2, 3, 16), _TREES, (2, 2, 4, 5), **_ANY),
        {"mnist-m2": _trees(64, 12, 192, (BATCH, 192, 12, 12))},
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d,
        _case((2, 3, 16), _TREES, (2, 2, 4, 5), pool=(2, 1), padding=(1, 0)),
        {
            "mnist-m1": _trees(1, 28, 64, pool=2, window=5),
            "mnist-m2": _trees(64, 12, 192, pool=2),
            "cifar-m2": _trees(256, 16, 1024, pool=2),
        },
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d_with_indices,
        _case((2, 3, 16), _TREES, (2, 2, 4, 5), pool=(2, 1), padding=(1, 0)),
        {"mnist-m2": _trees(64, 12, 192, pool=2)},
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d_backward,
        _case(
            *((2, 2, 2, 4), _indices(2, 2, 2, 4, below=2)),
            *((2, 3, 16), _TREES, (2, 2, 4, 5)),
            pool=(2, 1),
            padding=(1, 0),
        ),
        {
            "mnist-m2": _trees(
                *(64, 12, 192),
                (BATCH, 192, 6, 6),
                _indices(BATCH, 192, 6, 6, below=4),
                pool=2,
            ),
        },
    ),
    Entry(
        logic_conv2d.logic_or_pool2d,
        _case(_APART, pool=2),
        {"pool1": _case((BATCH, 64, 24, 24), pool=2)},
    ),
    *_pair(
        embedding.embedding,
        _case((2, 3, 4), Argument((2, 3), below=5), (5, 4)),
        {
            "characters": _tokens(65, 384),
            # a vocabulary of a language model
            **_rows((32768, 128256, 2560), of=_tokens),
        },
    ),
    *_pair(
        rotary_embedding.rotary_embedding,
        _case((2, 3, 2, 4), (2, 3, 2, 4), Argument((2, 3, 1), below=50)),
        {"heads": _case((BATCH, 16, 4, 64), (BATCH, 16, 4, 64), Argument((1, 16, 1), below=2048))},
        takes=slice(1, None),
        like="relu",
    ),
    *_pair(
        gated_linear_unit.gated_linear_unit,
        _case((2, 3, 4), (2, 3, 4), (2, 3, 4), activation="gelu"),
        {"hidden": _case((BATCH, 1024), (BATCH, 1024), (BATCH, 1024))},
        like="divide",
    ),
    *_ticks(automaton_rollout.automaton_step),
    *_ticks(automaton_rollout.automaton_rollout, steps=2),
)
"""The entries of all ops: one per public function and one per public backward."""
