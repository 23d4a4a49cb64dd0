"""Convolutions of differentiable logic gates. A kernel of the convolution is a tree of two-input gates.

A tree of depth d reads `2^d` leaves, which are positions in a window of its input.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Integer

from jaxbp.common import barriers, checks
from jaxbp.common.cases import ANY_CONVOLUTION, BATCH, Argument, Case, Entry, case_of, indices_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.common.windows import (
    Padding,
    PoolOptions,
    Size,
    Windows,
    fits,
    output_size,
    require_fit,
    window_padding,
    with_pool_options,
)
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.ops.gate_layer import COEFFICIENTS
from jaxbp.logic.wires.tree_wires import TreeWires, TreeWiresArgument
from jaxbp.ops.conv import max_pool2d
from jaxbp.pairing import Implementation, Op, Pair, cast_once, differentiable, per_implementation
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.pairing.mesh import batched
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.logic import trees
from pallas_kernels.logic.tree import gradients_of_tree, levels_of_tree


def _padded(x, padding):
    """Return x with padding, and with the examples last: `(channels, height, width, N)`."""
    return jnp.moveaxis(jnp.pad(x, ((0, 0), (0, 0), *padding)), 0, -1)


def _leaves(wires, x, stride, pool):
    """Return the positions in a pooling window, and the functions `read` and `add` for padded images x."""
    (s, t), (p, q), N = stride, pool, x.shape[-1]
    height, width = output_size(x.shape[1:3], wires.window, stride=stride, padding=((0, 0), (0, 0)))
    rows, columns = height // p, width // q

    def read(leaf, u, v):
        """Return the pixels that a leaf reads if its tree is at position (u, v) of each pooling window: one per pooling
        window and example, `(rows, columns, N)`. `leaf` is a channel, and a row and a column in the tree's window."""
        channel, row, column = leaf
        span = (1, (rows - 1) * p * s + 1, (columns - 1) * q * t + 1, N)
        begin = (channel, row + u * s, column + v * t, jnp.zeros_like(channel))
        return lax.dynamic_slice(x, begin, span)[0, :: p * s, :: q * t]

    def add(dx, leaf, dleaf, places):
        """Return dx plus `dleaf`, the gradients of the pixels that `leaf` reads. `places` has the row-major position of
        the leaf's tree in each pooling window, or is None for windows of size 1."""
        if places is not None:
            window = jnp.arange(p * q, dtype=places.dtype).reshape(1, p, 1, q, 1)
            chosen = places[:, None, :, None] == window
            dleaf = jnp.where(chosen, dleaf[:, None, :, None], 0).reshape(rows * p, columns * q, N)
        spread = lax.pad(dleaf, jnp.zeros((), dleaf.dtype), [(0, 0, s - 1), (0, 0, t - 1), (0, 0, 0)])[None]
        begin = (*leaf, jnp.zeros_like(leaf[0]))
        return lax.dynamic_update_slice(dx, lax.dynamic_slice(dx, begin, spread.shape) + spread, begin)

    return list(itertools.product(range(p), range(q))), read, add


def _forward(coefficients, wires, x, *, stride, padding, pool):
    """Return the maximum of each tree in each pooling window, and its row-major position in the window, or None for
    windows of size 1."""
    window, read, _ = _leaves(wires, upcast(_padded(x, padding)), stride, pool)
    dtype = jnp.uint8 if len(window) <= 256 else jnp.int32

    def of_kernel(_, kernel):
        c, leaves = kernel
        largest = place_of_largest = None
        for place, (u, v) in enumerate(window):
            *_, (value,) = levels_of_tree(c, [read(leaf, u, v) for leaf in leaves])
            if place == 0:
                largest, place_of_largest = value, jnp.zeros(value.shape, dtype)
            else:
                # Keep the first maximum, or the first NaN.
                is_larger = ~(value <= largest) & (largest == largest)
                largest = jnp.where(is_larger, value, largest)
                place_of_largest = jnp.where(is_larger, jnp.asarray(place, dtype), place_of_largest)
        return None, (largest, place_of_largest if len(window) > 1 else None)

    y, indices = lax.scan(of_kernel, None, (coefficients, wires.leaves))[1]
    return jax.tree.map(lambda a: jnp.moveaxis(a, -1, 0), (y.astype(x.dtype), indices))


def _gradients(dy, indices, coefficients, wires, x, *, stride, padding, pool):
    dy, indices = jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), (dy, indices))
    dy, padded = upcast(dy), upcast(_padded(x, padding))
    window, read, add = _leaves(wires, padded, stride, pool)

    def at_place(places, leaf):
        if places is None:
            return read(leaf, 0, 0)
        found = ((i, read(leaf, u, v)) for i, (u, v) in enumerate(window))
        return functools.reduce(lambda chosen, new: jnp.where(places == new[0], new[1], chosen), found, 0.0)

    def of_kernel(dx, kernel):
        dy, places, c, leaves = kernel
        values = [at_place(places, leaf) for leaf in leaves]
        # Without the barrier, XLA would recompute the values in each sum below.
        levels = levels_of_tree(c, barriers.optimization_barrier(values))
        dc, dleaves = gradients_of_tree(c, _kept(levels), dy)
        for leaf, dleaf in zip(leaves, dleaves, strict=True):
            dx = add(dx, leaf, dleaf, places)
        return dx, jnp.stack([jnp.stack([_sum(t) for t in terms]) for terms in dc])

    dx, dc = lax.scan(of_kernel, jnp.zeros_like(padded), (dy, indices, coefficients, wires.leaves))
    (top, _), (left, _) = padding
    dx = jnp.moveaxis(dx.astype(x.dtype), -1, 0)[:, :, top : top + x.shape[2], left : left + x.shape[3]]
    return dc.astype(coefficients.dtype), None, dx


@jax.custom_jvp
def _kept(arrays):
    return barriers.optimization_barrier(arrays)


@_kept.defjvp
def _(arrays, tangents):
    # JAX cannot differentiate a joint barrier of arrays that depend on the differentiated input and arrays that do not.
    return _kept(*arrays), jax.tree.map(barriers.optimization_barrier, *tangents)


def _sum(a: Array) -> Array:
    # One axis after the other is more accurate. Without the barriers, XLA would merge the sums.
    for _ in range(a.ndim):
        a = barriers.optimization_barrier(jnp.sum(a, axis=-1))
    return a


def _forward_kernel(coefficients, wires, x, *, stride, padding, pool):
    options = dict(window=wires.window, stride=stride, pool=pool)
    y, indices = trees.forward(coefficients, wires.leaves, _padded_last(x, padding), **options)
    return jax.tree.map(lambda a: batch_first(a, x.shape[0]), (y, indices))


def _gradients_kernel(dy, indices, coefficients, wires, x, *, stride, padding, pool):
    geometry = dict(stride=stride, pool=pool)
    dy, indices = jax.tree.map(batch_last, (dy, indices))
    arrays, leaves = (coefficients, wires.leaves, _padded_last(x, padding)), (wires.leaves, wires.readers)
    dc, dleaves = trees.leaf_gradients(dy, indices, *arrays, window=wires.window, **geometry)
    begins = tuple(before for before, _ in padding)
    dx = trees.input_gradient(
        dleaves, indices, *leaves, wires.reader_offsets, size=x.shape[1:], padding=begins, **geometry
    )
    return dc.astype(coefficients.dtype), None, batch_first(dx.astype(x.dtype), x.shape[0])


def _padded_last(x, padding):
    return jnp.pad(batch_last(x), ((0, 0), *padding, (0, 0)))


def _save(forward, coefficients, wires, x, **options):
    y, indices = forward(coefficients, wires, x, **options)
    return (y, indices), (indices, coefficients, wires, x)


# XLA would gather the examples, and add the gradients of each kernel over the devices within the loop.
_TREES_BACKWARD = Op(
    "trees_backward",
    {
        name: differentiable(gradients, _gradients, batched("dy", "indices", "x"))
        for name, gradients in (("xla", _gradients), ("pallas", _gradients_kernel))
    },
)
_FORWARDS = {
    name: differentiable(forward, _forward, batched("x"))
    for name, forward in (("xla", _forward), ("pallas", _forward_kernel))
}
_TREES = {
    name: Pair(forward, _TREES_BACKWARD, save=functools.partial(_save, forward), has_aux=True, name="trees")
    for name, forward in _FORWARDS.items()
}


def _convolution(parameters, wires, x, *, parametrization, implementation, **options):
    coefficients = COEFFICIENTS[parametrization](upcast(parameters), implementation=implementation)
    return _TREES[implementation](coefficients, wires, x, implementation=implementation, **options)


def _convolution_backward(dy, indices, parameters, wires, x, *, parametrization, implementation, **options):
    pair, wide = COEFFICIENTS[parametrization], upcast(parameters)  # as in `gate_layer`
    dc, _, dx = _TREES_BACKWARD(dy, indices, pair.forward(wide), wires, x, implementation=implementation, **options)
    return pair.backward(dc, wide, implementation=implementation).astype(parameters.dtype), dx


def _definition(parameters, wires, x, *, parametrization, stride, padding, pool):
    wide = upcast(jnp.pad(x, ((0, 0), (0, 0), *padding)))
    rows, columns = output_size(wide.shape[2:], wires.window, stride=stride, padding=((0, 0), (0, 0)))
    channel, row, column = jnp.moveaxis(wires.leaves, -1, 0)[..., None, None]
    row = row + stride[0] * jnp.arange(rows)[None, None, :, None]
    column = column + stride[1] * jnp.arange(columns)[None, None, None]
    values, first = wide[:, channel, row, column], 0  # (batch, kernels, leaves, rows, columns)
    while (count := values.shape[2] // 2) > 0:
        of_level = parameters[:, first : first + count, None, None]
        values, first = _gates(of_level, values[:, :, ::2], values[:, :, 1::2], parametrization), first + count
    y = values[:, :, 0].astype(x.dtype)
    if pool == (1, 1):
        return y, None
    return max_pool2d.autodiff(y, windows=_or_pool(y, pool))


def _gates(parameters, a, b, parametrization):
    if parametrization == "softmax":
        functions = jnp.stack(gates.relaxed_gates(a, b), axis=-1)
        weights = lax.broadcast_to_rank(jax.nn.softmax(upcast(parameters)), functions.ndim)
        return jnp.sum(weights * functions, axis=-1)
    coefficients = COEFFICIENTS[parametrization].forward(parameters)
    c0, c1, c2, c3 = jnp.moveaxis(lax.broadcast_to_rank(coefficients, a.ndim + 1), -1, 0)
    return c0 + c1 * a + (c2 + c3 * a) * b


def _definition_backward(dy, indices, parameters, wires, x, *, pool, **options):
    def at_indices(parameters, x):
        y, _ = _definition(parameters, wires, x, pool=(1, 1), **options)
        return y if indices is None else max_pool2d.select(y, indices, windows=_or_pool(y, pool))

    return jax.vjp(at_indices, parameters, x)[1](dy)


def _or_pool(y, pool):
    return Windows(y.shape[2:], pool, stride=pool)


def _unsupported(*arrays, stride, padding, pool, **options):
    wires, x = arrays[-2:]
    rows, columns = output_size(x.shape[2:], wires.window, stride=stride, padding=padding)
    if math.prod(wires.leaves.shape[:2]) * (rows // pool[0]) * (columns // pool[1]) * x.shape[0] >= 2**31:
        return "2^31 or more leaves of all trees, positions and examples"
    return trees.unsupported_trees(wires.leaves, pool) or checks.unsupported(*arrays)


_public_op = functools.partial(Op, unsupported=_unsupported, partitioned=True, jit=True)
_LOGIC_CONV2D = _public_op("logic_conv2d", {"autodiff": _definition, **per_implementation(_convolution)})
_LOGIC_CONV2D_BACKWARD = _public_op(
    "logic_conv2d_backward", {"autodiff": _definition_backward, **cast_once(per_implementation(_convolution_backward))}
)


def logic_conv2d(
    logits: Float[AnyArray, "kernels gates parameters"],
    wires: TreeWires,
    x: Float[AnyArray, "batch channels height width"],
    *,
    stride: Size = 1,
    padding: Padding = 0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> Float[Array, "batch kernels out_height out_width"]:
    """Convolution of relaxed logic gates: `y[n, k, i, j]` is the output of kernel k's tree of gates on its window at
    (i, j).

    Leaf l of kernel k reads `x[n, c, i s + u - p, j s + v - p]` with `(c, u, v) = wires.leaves[k, l]`, where s is the
    stride and p the padding. The r-th gate of a level takes the values 2 r and 2 r + 1 of the previous level as its
    inputs a and b. Gates are numbered level by level, with the root last. Gate g computes
    `Σ_i softmax(logits[k, g])_i op_i(a, b)`, as in `gate_layer`.

    Args:
      stride, padding: as in `conv2d`, also for y's height and width.
      implementation: "pallas" supports depths up to 4.
      Other arguments and dtype: as in `gate_layer`.

    Source: F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
    """
    return _call("logic_conv2d", logits, wires, x, 1, stride, padding, parametrization, implementation)[0]


def logic_conv2d_backward(
    dy: Float[AnyArray, "batch kernels out_height out_width"],
    logits: Float[AnyArray, "kernels gates parameters"],
    wires: TreeWires,
    x: Float[AnyArray, "batch channels height width"],
    *,
    stride: Size = 1,
    padding: Padding = 0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Float[Array, "kernels gates parameters"], Float[Array, "batch channels height width"]]:
    """Gradients of `logic_conv2d`, from the root of each tree to its leaves.

    For a gate with the coefficients c of `gate_layer`, whose value has the gradient dy,

        da = dy (c1 + c3 b)
        db = dy (c2 + c3 a)
        dc = Σ over examples and positions of dy (1, a, b, ab)

    dlogits follows from dc as in `gate_layer_backward`. dx at a position is the sum of the gradients of all leaves that
    read it.
    """
    options = 1, stride, padding, parametrization, implementation
    return _call_backward("logic_conv2d_backward", dy, logits, wires, x, *options)


def logic_conv2d_or_pool2d(
    logits: Float[AnyArray, "kernels gates parameters"],
    wires: TreeWires,
    x: Float[AnyArray, "batch channels height width"],
    *,
    pool: Size = 2,
    stride: Size = 1,
    padding: Padding = 0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> Float[Array, "batch kernels out_height out_width"]:
    """`logic_or_pool2d(logic_conv2d(logits, wires, x, stride=stride, padding=padding), pool)`, with fewer residuals.

    Args:
      pool: height and width of the pool's windows, which do not overlap. Incomplete windows are ignored.
        `implementation="pallas"` supports windows of up to 9 positions.
      Other arguments, dtype, and source: as in `logic_conv2d`.
    """
    op = "logic_conv2d_or_pool2d"
    return _call(op, logits, wires, x, pool, stride, padding, parametrization, implementation)[0]


def logic_conv2d_or_pool2d_with_indices(
    logits: Float[AnyArray, "kernels gates parameters"],
    wires: TreeWires,
    x: Float[AnyArray, "batch channels height width"],
    *,
    pool: Size = 2,
    stride: Size = 1,
    padding: Padding = 0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Float[Array, "batch kernels out_height out_width"], Integer[Array, "batch kernels out_height out_width"]]:
    """Return (y, indices): the result of `logic_conv2d_or_pool2d`, and the position of each window's first maximum, as
    in `max_pool2d_with_indices`."""
    op = "logic_conv2d_or_pool2d_with_indices"
    y, indices = _call(op, logits, wires, x, pool, stride, padding, parametrization, implementation)
    return y, jnp.zeros(y.shape, jnp.uint8) if indices is None else indices


def logic_conv2d_or_pool2d_backward(
    dy: Float[AnyArray, "batch kernels out_height out_width"],
    indices: Integer[AnyArray, "batch kernels out_height out_width"],
    logits: Float[AnyArray, "kernels gates parameters"],
    wires: TreeWires,
    x: Float[AnyArray, "batch channels height width"],
    *,
    pool: Size = 2,
    stride: Size = 1,
    padding: Padding = 0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Float[Array, "kernels gates parameters"], Float[Array, "batch channels height width"]]:
    """Gradients of `logic_conv2d_or_pool2d`: the result of `logic_conv2d_backward(dz, logits, wires, x)`, where dz has,
    in each window of the pool, dy at the position that `indices` gives, and 0 elsewhere.

    `indices` come from `logic_conv2d_or_pool2d_with_indices`. An index outside of its window gives an undefined result.
    """
    options = pool, stride, padding, parametrization, implementation
    return _call_backward("logic_conv2d_or_pool2d_backward", dy, logits, wires, x, *options, indices)


@with_pool_options
def logic_or_pool2d(
    x: Float[AnyArray, "batch channels height width"],
    pool: Size = 2,
    *,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> Float[Array, "batch channels out_height out_width"]:
    """Return the "or" of the bits in each window, relaxed to their maximum: `max_pool2d` with the window `pool`.

    Source: as in `logic_conv2d`.
    """
    return max_pool2d.pool("logic_or_pool2d", x, pool, implementation, **options)[0]


def _call(op, logits, wires, x, pool, stride, padding, parametrization, implementation):
    logits, x, options = _check(op, logits, wires, x, pool, stride, padding, parametrization)
    return _LOGIC_CONV2D.named(op)(logits, wires, x, implementation=implementation, **options)


def _call_backward(op, dy, logits, wires, x, pool, stride, padding, parametrization, implementation, *indices):
    arguments = logits, x
    logits, x, options = _check(op, logits, wires, x, pool, stride, padding, parametrization)
    dy, x = checks.floating(op, dy=dy, x=x)
    size = output_size(x.shape[2:], wires.window, stride=options["stride"], padding=options["padding"])
    checks.shape(op, "dy", dy, x.shape[0], wires.kernels, *(n // p for n, p in zip(size, options["pool"], strict=True)))
    indices = max_pool2d.check_indices(op, "indices", *indices, dy.shape) if indices else None
    if options["pool"] == (1, 1):
        indices = None
    backward = _LOGIC_CONV2D_BACKWARD.named(op)
    gradients = backward(dy, indices, logits, wires, x, implementation=implementation, **options)
    return in_dtypes_of(arguments, gradients)


def _check(op, logits, wires, x, pool, stride, padding, parametrization):
    if not isinstance(wires, TreeWires):
        raise TypeError(f"{op}: wires is a {type(wires).__name__}; wants a jaxbp.TreeWires")
    (logits,) = checks.only_floating(op, logits=logits)
    (x,) = checks.only_floating(op, x=x)
    gates.check_parameters(op, logits, wires.gates, parametrization, kernels=(wires.kernels,))
    checks.shape(op, "x", x, "batch", wires.channels, "height", "width")
    stride = checks.pair(op, "stride", stride)
    padding = window_padding(op, padding, x.shape[2:], wires.window, stride)
    require_fit(op, "window", wires.window, x.shape[2:], padding)
    size = output_size(x.shape[2:], wires.window, stride=stride, padding=padding)
    pool = checks.pair(op, "pool", pool)
    if not fits(pool, size, ((0, 0), (0, 0))):
        raise ValueError(
            f"{op}: pool is {pool[0]} x {pool[1]}; wants at most {size[0]} x {size[1]}, the number of positions"
        )
    return logits, x, dict(stride=stride, padding=padding, pool=pool, parametrization=parametrization)


def _tree_case(channels: int, size: int, kernels: int, *dy: Argument | tuple, window: int = 3, **options: Any) -> Case:
    wires, x = TreeWiresArgument(channels, kernels, (window, window)), (BATCH, channels, size, size)
    case = case_of(*dy, (kernels, 7, 16), wires, x, padding=1 if window == 3 else 0, **options)
    return dataclasses.replace(case, batch=128)


_SMALL = (2, 3, 16), TreeWiresArgument(2, 2, (2, 2), depth=2), (2, 2, 4, 5)
_ANY_OR_POOL = dict(pool=(2, 1), padding=(1, 0))
_M2 = 64, 12, 192

ENTRIES = (
    *pair_entries(
        logic_conv2d,
        case_of((2, 2, 3, 4), *_SMALL, **ANY_CONVOLUTION),
        {"mnist-m2": _tree_case(*_M2, (BATCH, 192, 12, 12))},
    ),
    Entry(
        logic_conv2d_or_pool2d,
        case_of(*_SMALL, **_ANY_OR_POOL),
        {
            "mnist-m1": _tree_case(1, 28, 64, pool=2, window=5),
            "mnist-m2": _tree_case(*_M2, pool=2),
            "cifar-m2": _tree_case(256, 16, 1024, pool=2),
        },
    ),
    Entry(
        logic_conv2d_or_pool2d_with_indices, case_of(*_SMALL, **_ANY_OR_POOL), {"mnist-m2": _tree_case(*_M2, pool=2)}
    ),
    Entry(
        logic_conv2d_or_pool2d_backward,
        case_of((2, 2, 2, 4), indices_of(2, 2, 2, 4, below=2), *_SMALL, **_ANY_OR_POOL),
        {"mnist-m2": _tree_case(*_M2, (BATCH, 192, 6, 6), indices_of(BATCH, 192, 6, 6, below=4), pool=2)},
    ),
    Entry(
        logic_or_pool2d,
        case_of(Argument((1, 2, 5, 6), apart=True), pool=2),
        {"pool1": case_of((BATCH, 64, 24, 24), pool=2)},
    ),
)
