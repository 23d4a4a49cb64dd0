"""The dense layer."""

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.ops._defaults import AUTODIFF_EVERYWHERE, XLA_ON_GPU, in_float32
from jaxbp.ops.dense import _products as products
from jaxbp.pairing import Axes, Implementation, Pair, in_dtypes_of


def _forward(x, w, b, *, precision):
    y = jnp.matmul(x, w.T, precision=precision)
    return y if b is None else y + lax.broadcast_to_rank(b, y.ndim)


def _rows(a):
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def _gradients(dy, x, w, b, *, precision):
    dx = jnp.matmul(dy, w, precision=precision)
    dw = jnp.matmul(_rows(dy).T, _rows(x), precision=precision)
    return dx, dw, None if b is None else jnp.sum(_rows(dy), axis=0)


def _gradients_kernel(dy, x, w, b, *, precision):
    options = dict(precision=precision, dtype=x.dtype)
    dx = products.kernel(_rows(dy), w, **options).reshape(x.shape)
    if b is None:
        return dx, products.kernel(_rows(dy), _rows(x), transposed=(True, False), **options), None
    dw, db = products.parameter_gradients_kernel(_rows(dy), _rows(x), **options)
    return dx, dw, db.astype(b.dtype)


_LINEAR = Pair(
    _forward,
    {"xla": _gradients, "pallas": _gradients_kernel},
    name="linear",
    batch_axes=lambda dy, x, *_: Axes(
        {"dy": 0, "x": 0},
        features=1,
        others=[Axes({"dy": dy.ndim - 1, "w": 0, "b": 0}), Axes({"x": x.ndim - 1, "w": 1}, sums=False)],
    ),
    unsupported=checks.unsupported_dtype,
    # cuBLAS is faster than the kernels: docs/kernels/dense.md. With the forward in the program, autodiff took 49 us
    # instead of 59 us for LeNet's layer fc1, and 40 us instead of 49 us for fc2. `linear_backward` took equally long,
    # 33 us for fc1 (all at commit 2539551). On a CPU, autodiff was faster for all three layers
    # (docs/benchmarks/cpu.md).
    default=in_float32(AUTODIFF_EVERYWHERE),
    default_vjp=XLA_ON_GPU,
    jit=True,
)


def linear(
    x: Float[AnyArray, "*batch in_features"],
    w: Float[AnyArray, "out_features in_features"],
    b: Float[AnyArray, "out_features"] | None = None,
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch out_features"]:
    """Dense layer, `y = x wᵀ + b`, in the promoted dtype of the arguments.

    Args:
      precision: as in `jax.lax.dot`.
      implementation: with "pallas", cuBLAS computes y, and kernels compute the gradients. Kernels multiply float32
        arrays in TF32 unless precision is "highest".
    """
    x, w, b = checks.floating("linear", x=x, w=w, b=b)
    _check_shapes("linear", x, w, b)
    precision = checks.precision("linear", precision)
    return _LINEAR(x, w, b, precision=precision, implementation=implementation)


def linear_backward(
    dy: Float[AnyArray, "*batch out_features"],
    x: Float[AnyArray, "*batch in_features"],
    w: Float[AnyArray, "out_features in_features"],
    *,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch in_features"], Float[Array, "out_features in_features"], Float[Array, "out_features"]]:
    """Gradients of `linear`: `dx = dy w`, `dw = dyᵀ x`, `db = Σ dy`, with sums over all leading axes.

    db has the dtype of w. `implementation="autodiff"` sums db in the dtype of the arguments.

    Source: D. Rumelhart et al., "Learning representations by back-propagating errors", 1986.
    """
    arguments = x, w, w
    dy, x, w = checks.floating("linear_backward", dy=dy, x=x, w=w)
    _check_shapes("linear_backward", x, w, None)
    checks.shape("linear_backward", "dy", dy, *x.shape[:-1], w.shape[0])
    precision = checks.precision("linear_backward", precision)
    b = jnp.zeros(w.shape[:1], w.dtype)
    gradients = _LINEAR.vjp(dy, x, w, b, precision=precision, implementation=implementation)
    return in_dtypes_of(arguments, gradients)


def _check_shapes(op, x, w, b):
    checks.shape(op, "w", w, "out_features", "in_features")
    if x.ndim == 0 or x.shape[-1] != w.shape[1]:
        hint = ". If w is (in_features, out_features), pass w.T" if x.shape[-1:] == w.shape[:1] else ""
        wanted = f"(..., {w.shape[1]}), the in_features of w {w.shape}{hint}"
        raise ValueError(f"{op}: x has shape {x.shape}; wants {wanted}")
    if b is not None:
        checks.shape(op, "b", b, w.shape[0])


def forward_in_float32(x, w, b):
    """Return `x wᵀ + b` in x's dtype, summed in float32."""
    z = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    return (z + lax.broadcast_to_rank(b.astype(jnp.float32), z.ndim)).astype(x.dtype)


ENTRIES = pair_entries(
    linear,
    case_of((2, 3, 4), (2, 3, 5), (4, 5), (4,)),
    {
        "fc1": case_of((BATCH, 120), (BATCH, 256), (120, 256), (120,)),
        "fc2": case_of((BATCH, 84), (BATCH, 120), (84, 120), (84,)),
        "fc3": case_of((BATCH, 10), (BATCH, 84), (10, 84), (10,)),
    },
    takes=slice(2),
)
