"""Dense layers of groups of rows, as in a mixture of experts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, Argument, Case, FixedArgument, case_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import clipped_to_int32, upcast, wide
from jaxbp.pairing import Axes, Implementation, Op, Pair, by_autodiff, differentiable, in_dtypes_of
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.dense import grouped_linear_sm90 as kernels
from pallas_kernels.dense.group_tiles import group_ranges, row_tiles

_TILE_ROWS = 8, 128
"""Least and most rows of a product of the formula. Not tuned."""
_ONES_COLUMNS = 64
"""Columns of a matrix of ones whose products are sums: one row of a tile of the kernel."""


def _forward(x, w, bias, group_sizes, *, precision, dtype):
    y = lax.ragged_dot(x, w, group_sizes, precision=precision, preferred_element_type=dtype)
    if bias is None:
        return y
    row = jnp.arange(x.shape[0], dtype=jnp.int32)
    group = jnp.searchsorted(group_ranges(group_sizes, x.shape[0])[:, 1], row, side="right", method="compare_all")
    return y + bias.astype(dtype).at[group].get(mode="fill", fill_value=0)


def _multiply(a, b, precision):
    multiply = functools.partial(jnp.matmul, precision=precision, preferred_element_type=wide(a.dtype))
    in_wide = lambda a, b: multiply(upcast(a), upcast(b))  # noqa: E731
    # On a CPU, XLA lacks some products in half precision.
    return on_gpu(multiply, in_wide, a, b) if a.dtype == b.dtype != wide(a.dtype) else in_wide(a, b)


def _tiles(ranges, *arrays):
    """Return tiles, their number of rows, and a function from a tile to its rows of `arrays`, in which rows of other
    groups are 0."""
    (least, most), rows, groups = _TILE_ROWS, arrays[0].shape[0], ranges.shape[0]
    size = most if is_symbolic_dim(rows) else min(most, max(least, -(-rows // groups)))
    tiles = row_tiles(ranges, rows, size)
    # JAX would move a slice at the end.
    padded = [jnp.pad(a, ((0, size), (0, 0))) for a in arrays]

    def rows_of(tile):
        blocks = (lax.dynamic_slice_in_dim(a, tile.row, size) for a in padded)
        return [jnp.where(_in_group(tile, size), a, jnp.zeros_like(a)) for a in blocks]

    count, _ = tiles.counts
    has_group = jnp.arange(tiles.row.shape[0]) < count
    return tiles._replace(end=jnp.where(has_group, tiles.end, tiles.start), counts=has_group), size, rows_of


def _at(a, index):
    return lax.dynamic_index_in_dim(a, index, keepdims=False)


def _in_group(tile, size):
    row = tile.row + jnp.arange(size, dtype=jnp.int32)[:, None]
    return (row >= tile.start) & (row < tile.end)


def _product(x, w, bias, ranges, *, transposed=False, precision, dtype):
    """Return `x w + bias` or `x wᵀ`, row by row with w of the row's group, 0 for rows without a group."""
    tiles, size, rows_of = _tiles(ranges, x)

    # A derivative would save each tile's w.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_tile(tile, w, bias):
        (rows,) = rows_of(tile)
        of_group = _at(w, tile.group)
        y = _multiply(rows, of_group.T if transposed else of_group, precision)
        y = y if bias is None else y + _at(bias, tile.group).astype(y.dtype)[None]
        return y.astype(dtype)

    def visit(y, tile):
        others = lax.dynamic_slice_in_dim(y, tile.row, size)
        rows = jnp.where(_in_group(tile, size), of_tile(tile, w, bias), others)
        return lax.dynamic_update_slice_in_dim(y, rows, tile.row, 0), None

    zeros = jnp.zeros((x.shape[0] + size, w.shape[1 if transposed else 2]), dtype)
    return lax.scan(visit, zeros, tiles)[0][: x.shape[0]]


def _sums(x, dy, ranges, *, precision):
    """Return dw and dbias of each group, in float32 or wider. `ranges` is the result of `group_ranges`."""
    tiles, _, rows_of = _tiles(ranges, x, dy)

    def visit(sums, tile):
        rows, of_dy = rows_of(tile)
        dw, dbias = _multiply(rows.T, of_dy, precision), jnp.sum(of_dy, axis=0, dtype=wide(of_dy.dtype))
        add = lambda a, b: lax.dynamic_update_index_in_dim(a, _at(a, tile.group) + b, tile.group, 0)  # noqa: E731
        return jax.tree.map(add, sums, (dw, dbias)), None

    dtype, groups = wide(dy.dtype), ranges.shape[0]
    zeros = jnp.zeros((groups, x.shape[1], dy.shape[1]), dtype), jnp.zeros((groups, dy.shape[1]), dtype)
    return lax.scan(visit, zeros, tiles)[0]


def _gradients(dy, x, w, bias, ranges, *, precision, dtype):
    dx = _product(dy, w, None, ranges, transposed=True, precision=precision, dtype=x.dtype)
    dw, dbias = _sums(x, dy, ranges, precision=precision)
    return dx, dw.astype(w.dtype), None if bias is None else dbias.astype(bias.dtype), None


def _product_kernel(x, w, bias, ranges, *, precision, dtype):
    formula = functools.partial(_product, precision=precision, dtype=dtype)
    if 0 in (*x.shape, *w.shape):
        return formula(x, w, bias, ranges)
    return on_gpu(kernels.product, formula, x, w, bias, ranges)


def _gradients_kernel(dy, x, w, bias, ranges, *, precision, dtype):
    formula = functools.partial(_gradients, precision=precision, dtype=dtype)
    if 0 in (*x.shape, *w.shape):
        return formula(dy, x, w, bias, ranges)

    def by_kernels(dy, x, w, bias, ranges):
        dx = kernels.product(dy, w, None, ranges, transposed=True)
        dw = kernels.weights_gradient(x, dy, ranges)
        if bias is None:
            return dx, dw, None, None
        ones = jnp.ones((x.shape[0], _ONES_COLUMNS), x.dtype)
        return dx, dw, kernels.weights_gradient(ones, dy, ranges)[:, 0], None

    return on_gpu(by_kernels, formula, dy, x, w, bias, ranges)


_GROUPS = Axes({"w": 0, "bias": 0, "ranges": 0})
# On a mesh, each device multiplies the rows of its groups.
_PRODUCT = differentiable(_product, _product, _GROUPS)
_PRODUCT_KERNEL = differentiable(_product_kernel, _product, _GROUPS)
_GRADIENTS = differentiable(_gradients, _gradients, _GROUPS)


def _value(product, x, w, bias, group_sizes, **options):
    return product(x, w, bias, group_ranges(group_sizes, x.shape[0]), **options)


def _save(product, x, w, bias, group_sizes, **options):
    saved = _residuals(x, w, bias, group_sizes, **options)
    return product(*saved, **options), saved


def _residuals(x, w, bias, group_sizes, **options):
    return x, w, bias, group_ranges(group_sizes, x.shape[0])


# Two pairs, because a pair has one forward for calls without a gradient.
_PAIRS = {
    implementation: Pair(
        functools.partial(_value, product),
        {"xla": _GRADIENTS, "pallas": _gradients_kernel},
        save=functools.partial(_save, product),
        residuals=_residuals,
        name="grouped_linear",
        batch_axes=_GROUPS,
    )
    for implementation, product in (("xla", _PRODUCT), ("pallas", _PRODUCT_KERNEL))
}


def _unsupported(x, w, bias, group_sizes, *, precision, dtype):
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {x.dtype}, only bfloat16 and float16"
    if dtype != x.dtype:
        return f"preferred_element_type {dtype} of arrays in {x.dtype}, only the dtype of the arrays"
    one = jax.ShapeDtypeStruct((1, 1), x.dtype)
    return kernels.weights_gradient.unsupported(one, one, one)


_op = functools.partial(Op, partitioned=True, jit=True)
_GROUPED_LINEAR = _op(
    "grouped_linear",
    {"autodiff": _forward} | {name: functools.partial(pair, implementation=name) for name, pair in _PAIRS.items()},
    unsupported=_unsupported,
    sharded_like=lambda x, w, bias, group_sizes: jnp.matmul(x, jnp.sum(w, axis=0)),
)
_GROUPED_LINEAR_BACKWARD = _op(
    "grouped_linear_backward",
    {"autodiff": lambda dy, *arrays, **options: by_autodiff(functools.partial(_forward, **options), dy, *arrays)}
    | {name: functools.partial(pair.vjp, implementation=name) for name, pair in _PAIRS.items()},
    unsupported=lambda dy, *arrays, **options: _unsupported(*arrays, **options),
    sharded_like=lambda dy, x, w, bias, group_sizes: (x, w, bias),
)


def grouped_linear(
    x: Float[AnyArray, "rows in_features"],
    w: Float[AnyArray, "groups in_features out_features"],
    group_sizes: Int[AnyArray, "groups"],
    bias: Float[AnyArray, "groups out_features"] | None = None,
    *,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Float[Array, "rows out_features"]:
    """Dense layers of groups of rows, `y_r = x_r w_g + bias_g` for the rows r of group g.

    Group 0 has the first `group_sizes[0]` rows, and the other groups follow in order. Rows beyond the sum of the sizes
    give 0, and their gradient is 0. If the sum exceeds the number of rows, the last groups end at the last row. Sizes
    are data on the device, so this is no error. A group may have no rows; its gradients are then 0.

    With "pallas" and "xla", NaN in one group, or in a row without a group, does not reach the other groups. The
    order of each sum is fixed.

    Args:
      w: unlike in `linear`, in_features come before out_features, as in `jax.lax.ragged_dot`.
      group_sizes: nonnegative integers.
      precision: as in `jax.lax.dot`.
      preferred_element_type: the dtype of y, a floating dtype; None means the promoted dtype of x, w, and bias.
      implementation: "pallas" runs kernels for bfloat16 and float16 on compute capability 9.0. "xla" multiplies tiles
        of at most 128 rows of one group in a loop, and needs memory linear in the sizes of x, w, and y. "autodiff" is
        `jax.lax.ragged_dot`. On some platforms it multiplies all rows by the weights of all groups.

    Raises:
      TypeError: x, w, or bias is not floating, or `group_sizes` has no integer dtype.
      ValueError: shapes do not match, or `preferred_element_type` is not floating.
    """
    op = "grouped_linear"
    x, w, bias = checks.floating(op, ("bias",), x=x, w=w, bias=bias)
    group_sizes = _check(op, x, w, group_sizes)
    if bias is not None:
        checks.shape(op, "bias", bias, w.shape[0], w.shape[2])
    options = _options(op, x, precision, preferred_element_type)
    return _GROUPED_LINEAR(x, w, bias, group_sizes, **options, implementation=implementation)


def grouped_linear_backward(
    dy: Float[AnyArray, "rows out_features"],
    x: Float[AnyArray, "rows in_features"],
    w: Float[AnyArray, "groups in_features out_features"],
    group_sizes: Int[AnyArray, "groups"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "rows in_features"],
    Float[Array, "groups in_features out_features"],
    Float[Array, "groups out_features"],
]:
    """Gradients of `grouped_linear`: `dx_r = dy_r w_gᵀ`, `dw_g = Σ_r x_rᵀ dy_r`, and `dbias_g = Σ_r dy_r`, with sums
    over the rows r of group g.

    dbias has the dtype of w. `implementation="autodiff"` sums it in the dtype of the arguments.

    Source: T. Gale et al., "MegaBlocks: efficient sparse training with mixture-of-experts", MLSys 2023.
    """
    op = "grouped_linear_backward"
    arguments = x, w, w
    dy, x, w = checks.floating(op, dy=dy, x=x, w=w)
    group_sizes = _check(op, x, w, group_sizes)
    checks.shape(op, "dy", dy, x.shape[0], w.shape[2])
    bias = jnp.zeros((w.shape[0], w.shape[2]), w.dtype)
    options = _options(op, x, precision, None)
    gradients = _GROUPED_LINEAR_BACKWARD(dy, x, w, bias, group_sizes, **options, implementation=implementation)
    return in_dtypes_of(arguments, gradients)


def _check(op: str, x: Array, w: Array, group_sizes: Any) -> Array:
    checks.shape(op, "w", w, "groups", "in_features", "out_features")
    checks.shape(op, "x", x, "rows", w.shape[1])
    group_sizes = checks.integers(op, "group_sizes", group_sizes)
    checks.shape(op, "group_sizes", group_sizes, w.shape[0])
    return clipped_to_int32(group_sizes, 2**31 - 1)


def _options(op: str, x: Array, precision: PrecisionLike, dtype: DTypeLike | None) -> dict[str, Any]:
    try:
        dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    except TypeError:
        raise ValueError(f"{op}: preferred_element_type is {dtype!r}; wants a floating dtype, or None") from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{op}: preferred_element_type is {dtype}; wants a floating dtype of at least 16 bits, or None"
        )
    return dict(precision=checks.precision(op, precision), dtype=dtype)


@dataclasses.dataclass(frozen=True)
class GroupSizes(FixedArgument):
    """Sizes whose sum is the batch size: equal sizes, or with `zipf`, sizes proportional to 1 / rank."""

    groups: int
    zipf: bool = False

    def struct(self, batch: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.groups,), jnp.int32)

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Array:
        weights = np.arange(1, self.groups + 1) ** (-1.0 if self.zipf else 0.0)
        ends = np.round(batch * np.cumsum(weights) / np.sum(weights)).astype(np.int32)
        return jnp.asarray(np.diff(ends, prepend=np.int32(0)))


def _case(groups: int, inputs: int, outputs: int, rows: int | None = None, **options: bool) -> Case:
    arguments = (BATCH, outputs), (BATCH, inputs), (groups, inputs, outputs), GroupSizes(groups, **options)
    return dataclasses.replace(case_of(*arguments), batch=rows)


_LARGE = {
    # Mixtral 8x7B, and a model with many small experts
    "16384x8x4096x14336": (8, 4096, 14336, 16384),
    "65536x128x2048x768": (128, 2048, 768, 65536),
}
ENTRIES = pair_entries(
    grouped_linear,
    case_of((7, 4), (7, 5), (3, 5, 4), Argument((3,), below=4), (3, 4)),
    {
        "4x64x96": _case(4, 64, 96),
        **{place: _case(*sizes) for place, sizes in _LARGE.items()},
        **{f"{place} zipf": _case(*sizes, zipf=True) for place, sizes in _LARGE.items()},
    },
    takes=slice(3),
    like="linear",
    kernel_dtypes=("bfloat16", "float16"),
)
