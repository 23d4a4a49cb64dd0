"""Products of vectors and matrices, and the transpose.

Arguments and dtypes are as in `jax.numpy`. With `implementation="pallas"`, cuBLAS computes `matmul` and `dot`, and
kernels compute their gradients. Kernels multiply float32 arrays in TF32 unless precision is "highest".
"""

import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import cast_like, wide
from jaxbp.ops._defaults import AUTODIFF_ON_GPU, XLA_ON_GPU, fused_pair, in_float32, xla_and_pallas
from jaxbp.ops.dense._products import PRODUCT
from jaxbp.pairing import Implementation, Pair, in_dtypes_of, per_implementation


def _matrices(a, b):
    a, b = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    ndim = max(a.ndim, b.ndim)
    return tuple(x.reshape((1,) * (ndim - x.ndim) + x.shape) for x in (a, b))


def _matmul_gradients(dy, a, b, **options):
    if b.ndim <= 2:
        return _dot_gradients(dy, a, b, **options)
    (m, n), to_shapes = jax.vjp(_matrices, a, b)
    dy = dy.reshape(*jnp.broadcast_shapes(m.shape[:-2], n.shape[:-2]), m.shape[-2], n.shape[-1])
    dm = _over_batch((dy, n), m, transposed=(False, True), **options)
    return to_shapes((dm, _over_batch((m, dy), n, transposed=(True, False), **options)))


def _over_batch(factors, matrices, **options):
    """Return the product of `factors` in the dtype of `matrices`, summed over the axes along which `matrices` is
    broadcast."""
    batch = jnp.broadcast_shapes(*(x.shape[:-2] for x in factors))
    axes = tuple(i for i, size in enumerate(batch) if matrices.shape[i] != size)
    if not axes:
        return PRODUCT(*factors, dtype=matrices.dtype, **options)
    # The sum of the products is rounded once.
    return jnp.sum(PRODUCT(*factors, **options), axis=axes, keepdims=True).astype(matrices.dtype)


def _dot_matrices(a, b):
    b = jnp.moveaxis(b, -2 if b.ndim > 1 else 0, 0)
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b.reshape(b.shape[0], math.prod(b.shape[1:]))


def _dot_gradients(dy, a, b, **options):
    (m, n), to_shapes = jax.vjp(_dot_matrices, a, b)
    dy = dy.reshape(m.shape[0], n.shape[1])
    dm = PRODUCT(dy, n, transposed=(False, True), dtype=a.dtype, **options)
    return to_shapes((dm, PRODUCT(m, dy, transposed=(True, False), dtype=b.dtype, **options)))


def _in_float32(function):
    def forward(a, b, *, precision):
        # A `preferred_element_type` would lose a weak type.
        summed_in = None if checks.is_discrete(a) or a.dtype == wide(a.dtype) else wide(a.dtype)
        return cast_like(function(a, b, precision=precision, preferred_element_type=summed_in), a)

    return forward


_MATMUL = fused_pair(_in_float32(jnp.matmul), per_implementation(_matmul_gradients), name="matmul")
_DOT = fused_pair(
    _in_float32(jnp.dot),
    per_implementation(_dot_gradients),
    name="dot",
    # Autodiff's gradients took 30 us instead of 44 us for LeNet's layer fc1. With the forward in the program, the
    # formula took 42 us instead of 44 us (commit 2539551).
    default_vjp=in_float32(AUTODIFF_ON_GPU),
)


def _outer_gradients(elementwise, sum_over, dy, a, b):
    da = sum_over(operator.mul, dy, b.reshape(1, b.size), axes=(1,))
    db = sum_over(operator.mul, dy, a.reshape(a.size, 1), axes=(0,))
    return da.reshape(a.shape).astype(a.dtype), db.reshape(b.shape).astype(b.dtype)


_OUTER = fused_pair(jnp.outer, xla_and_pallas(_outer_gradients), name="outer")
_TRANSPOSE = Pair(
    lambda a, *, axes, shape: a.transpose(axes),
    {"xla": lambda dy, *, axes, shape: dy.transpose(sorted(range(len(axes)), key=axes.__getitem__))},
    linear=True,
    name="transpose",
    unsupported=lambda a, **options: "any array, because no kernel is faster than XLA's transpose",
    default=XLA_ON_GPU,
    jit=True,
)


def matmul(
    a: Float[AnyArray, "*batch_a rows inner"],
    b: Float[AnyArray, "*batch_b inner columns"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch rows columns"]:
    """Matrix product, `yᵢⱼ = Σₖ aᵢₖ bₖⱼ`, for each index of the batch axes, which broadcast.

    A vector a is treated as a row, and a vector b as a column.
    """
    return _product_of(_MATMUL, implementation, precision, a=a, b=b)


def matmul_backward(
    dy: Float[AnyArray, "*batch rows columns"],
    a: Float[AnyArray, "*batch_a rows inner"],
    b: Float[AnyArray, "*batch_b inner columns"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch_a rows inner"], Float[Array, "*batch_b inner columns"]]:
    """Gradients of `matmul`: `da = dy bᵀ`, `db = aᵀ dy`, summed over the axes along which a or b is broadcast."""
    return _product_of(_MATMUL.vjp, implementation, precision, dy=dy, a=a, b=b)


def dot(
    a: Float[AnyArray, "*rows inner"],
    b: Float[AnyArray, "*batch inner columns"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*rows_and_columns"]:
    """Inner product, `y = Σₖ a[..., k] b[..., k, :]`, of every row of a with every column of b. y has the shape
    `(*rows, *batch, columns)`.

    Unlike in `matmul`, batch axes do not broadcast against each other.
    """
    return _product_of(_DOT, implementation, precision, a=a, b=b)


def dot_backward(
    dy: Float[AnyArray, "*rows_and_columns"],
    a: Float[AnyArray, "*rows inner"],
    b: Float[AnyArray, "*batch inner columns"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*rows inner"], Float[Array, "*batch inner columns"]]:
    """Gradients of `dot`: `da = Σ dy b`, summed over all axes of b except `inner`, and `db = Σ a dy`, summed over all
    axes of a except `inner`."""
    return _product_of(_DOT.vjp, implementation, precision, dy=dy, a=a, b=b)


def outer(
    a: Float[AnyArray, "*shape_a"], b: Float[AnyArray, "*shape_b"], *, implementation: Implementation = None
) -> Float[Array, "size_a size_b"]:
    """Outer product, `yᵢⱼ = aᵢ bⱼ`, of the flattened arrays."""
    return _OUTER(*checks.numeric("outer", a=a, b=b), implementation=implementation)


def outer_backward(
    dy: Float[AnyArray, "size_a size_b"],
    a: Float[AnyArray, "*shape_a"],
    b: Float[AnyArray, "*shape_b"],
    *,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*shape_a"], Float[Array, "*shape_b"]]:
    """Gradients of `outer`: `daᵢ = Σⱼ dyᵢⱼ bⱼ`, `dbⱼ = Σᵢ dyᵢⱼ aᵢ`."""
    arguments = a, b
    dy, a, b = checks.floating("outer_backward", dy=dy, a=a, b=b)
    checks.shape("outer_backward", "dy", dy, a.size, b.size)
    return in_dtypes_of(arguments, _OUTER.vjp(dy, a, b, implementation=implementation))


def transpose(
    a: Float[AnyArray, "*shape"], axes: Sequence[int] | None = None, *, implementation: Implementation = None
) -> Float[Array, "*permuted"]:
    """Permutation of the axes, `y.shape[i] = a.shape[axes[i]]`. By default, the order of the axes is reversed.

    There is no kernel, because none is faster than XLA's transpose. `implementation="pallas"` raises
    NotImplementedError.
    """
    (a,) = checks.numeric("transpose", a=a)
    return _TRANSPOSE(a, axes=_order("transpose", axes, a.ndim), shape=a.shape, implementation=implementation)


def transpose_backward(
    dy: Float[AnyArray, "*permuted"], axes: Sequence[int] | None = None, *, implementation: Implementation = None
) -> Float[Array, "*shape"]:
    """Gradient of `transpose`: dy with the inverse permutation, `da.shape[axes[i]] = dy.shape[i]`."""
    (dy,) = checks.floating("transpose_backward", dy=dy)
    axes = _order("transpose_backward", axes, dy.ndim)
    shape = tuple(size for _, size in sorted(zip(axes, dy.shape, strict=True)))
    return _TRANSPOSE.vjp(dy, axes=axes, shape=shape, implementation=implementation)


def _order(op, axes, ndim):
    axes = tuple(range(ndim))[::-1] if axes is None else axes
    if not isinstance(axes, tuple | list) or len(axes) != ndim or len(checks.axes(op, axes, ndim)) != ndim:
        raise ValueError(f"{op}: axes is {axes!r}; wants None or each of the {ndim} axes once")
    return tuple(axis % ndim for axis in axes)


def _product_of(op, implementation, precision, **arrays):
    *dy, a, b = (checks.floating if "dy" in arrays else checks.numeric)(op.name, **arrays)
    shapes = f"a has shape {a.shape} and b has shape {b.shape}"
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(
                f"{op.name}: {name} has shape (); wants at least one axis; for a factor of shape (), use jaxbp.multiply"
            )
    if a.shape[-1] != b.shape[max(0, b.ndim - 2)]:
        axis = "b.shape[0]" if b.ndim == 1 else "b.shape[-2]"
        raise ValueError(f"{op.name}: {shapes}; wants a.shape[-1] == {axis}")
    function = jnp.matmul if op.name.startswith("matmul") else jnp.dot
    if function is jnp.matmul:
        try:
            jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise ValueError(f"{op.name}: {shapes}; wants batch axes (all but the last two) that broadcast") from None
    if dy:
        checks.shape(op.name, "dy", *dy, *jax.eval_shape(function, a, b).shape)
    precision = checks.precision(op.name, precision)
    found = op(*dy, a, b, precision=precision, implementation=implementation)
    return in_dtypes_of((arrays["a"], arrays["b"]), found) if dy else found


_FC1 = {"fc1": case_of((BATCH, 120), (BATCH, 256), (256, 120))}

ENTRIES = (
    *pair_entries(matmul, case_of((2, 2, 3, 5), (2, 1, 3, 4), (2, 4, 5)), _FC1, like="linear"),
    *pair_entries(dot, case_of((2, 3, 2, 5), (2, 3, 4), (2, 4, 5)), _FC1, like="linear"),
    *pair_entries(
        outer, case_of((6, 4), (2, 3), (4,)), {"columns": case_of((BATCH, 256), (BATCH,), (256,))}, like="divide"
    ),
    *pair_entries(
        transpose,
        case_of((4, 2, 3), (2, 3, 4), axes=(2, 0, 1)),
        {"images": case_of((64, BATCH, 16), (BATCH, 16, 64), axes=(2, 0, 1))},
        takes=slice(0),
        like="relu",
        kernel_dtypes=(),
    ),
)
