"""Normalization of each row over its last axis: LayerNorm and RMSNorm."""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries, row_cases
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.pairing import DefaultImplementation, Implementation, Pair, batched, differentiable, in_dtypes_of
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.norm import layer_norm as kernels
from pallas_kernels.norm import layer_norm_streamed
from pallas_kernels.norm.statistics import inverse_root

AnyRows = Float[AnyArray, "*batch hidden"]
Rows = Float[Array, "*batch hidden"]
AnyParameter = Float[AnyArray, "hidden"]
Parameter = Float[Array, "hidden"]


def rows(a):
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def _first(x):
    # In exact arithmetic, subtracting this element changes no result, so it needs no gradient.
    return lax.stop_gradient(upcast(x[..., :1]))


def row_statistics(x, *, epsilon, center):
    """Return (offset, inv_std) per row. Without `center`, for RMSNorm, offset is None.

    inv_std is `1 / sqrt(var + epsilon)`. The offset is the mean minus the row's first element, because a mean far from
    zero is rounded to too few digits.
    """
    if not center:
        return None, _inv_std(upcast(x), epsilon)
    x = upcast(x) - _first(x)
    offset = jnp.mean(x, axis=-1)
    return offset, _inv_std(x - offset[..., None], epsilon)


def _inv_std(centered, epsilon):
    return inverse_root(jnp.mean(jnp.square(centered), axis=-1), epsilon)


def _normalized(x, offset, inv_std):
    centered = upcast(x) if offset is None else upcast(x) - _first(x) - offset[..., None]
    return centered * inv_std[..., None]


def _scaled(normalized, scale, bias, dtype):
    y = normalized * _along_rows(scale, normalized)
    return (y if bias is None else y + _along_rows(bias, normalized)).astype(dtype)


def sharded_like(x, scale, bias):
    # On a mesh with explicit axes, JAX cannot slice a row that is divided among devices.
    return _scaled(upcast(x), scale, bias, x.dtype)


def _along_rows(parameter, x):
    return lax.broadcast_to_rank(upcast(parameter), x.ndim)


def normalize(x, scale, bias, *, epsilon, center):
    # After one conversion, autodiff rounds the gradient once. After several, it would add rounded gradients.
    dtype, x = x.dtype, upcast(x)
    offset, inv_std = row_statistics(x, epsilon=epsilon, center=center)
    return _scaled(_normalized(x, offset, inv_std), scale, bias, dtype), offset, inv_std


def normalize_kernel(x, scale, bias, *, epsilon, center):
    if x.size == 0:
        return normalize(x, scale, bias, epsilon=epsilon, center=center)
    arrays, options = (rows(x), scale, bias), dict(epsilon=epsilon, center=center)
    y, *statistics = _streamed_if_faster(layer_norm_streamed.normalize, kernels.normalize, *arrays, **options)
    return y.reshape(x.shape), *(a if a is None else a.reshape(x.shape[:-1]) for a in statistics)


def gradients(dy, x, scale, bias, offset, inv_std, *, epsilon, center, with_y=False):
    """Return (dx, dscale, dbias, y), with dscale and dbias in float32 or wider. y is the normalization's result, or
    None without `with_y`. (offset, inv_std) are from `row_statistics`, or None."""
    # After one conversion, a second derivative rounds the gradient once.
    dtype, dy, x, scale = x.dtype, *map(upcast, (dy, x, scale))
    if inv_std is None:
        offset, inv_std = row_statistics(x, epsilon=epsilon, center=center)
    normalized = _normalized(x, offset, inv_std)
    dx = input_gradient(dy * _along_rows(scale, dy), normalized, inv_std, center=center).astype(dtype)
    dscale, dbias = jnp.sum(rows(dy * normalized), axis=0), jnp.sum(rows(dy), axis=0) if center else None
    return dx, dscale, dbias, _scaled(normalized, scale, bias, dtype) if with_y else None


def gradients_kernel(dy, x, scale, bias, offset, inv_std, *, epsilon, center, with_y=False):
    options = dict(epsilon=epsilon, center=center, with_y=with_y)
    if x.size == 0:
        return gradients(dy, x, scale, bias, offset, inv_std, **options)
    if inv_std is None and epsilon < jnp.finfo(jnp.float32).tiny:
        # The streamed kernel pads with rows of zeros, whose inv_std would be infinite with a small epsilon.
        offset, inv_std = row_statistics(x, epsilon=epsilon, center=center)
    statistics = (a if a is None else a.ravel() for a in (offset, inv_std))
    arrays = rows(dy), rows(x), scale, bias, *statistics
    dx, *sums, y = _streamed_if_faster(layer_norm_streamed.gradients, kernels.gradients, *arrays, **options)
    return dx.reshape(x.shape), *sums, y if y is None else y.reshape(x.shape)


def input_gradient(t, normalized, inv_std, *, center=True):
    """Return dx, given `t = dy * scale`, the normalized rows x̂, and inv_std."""
    dtype, t, normalized = normalized.dtype, upcast(t), upcast(normalized)
    dx = t - normalized * jnp.mean(t * normalized, axis=-1, keepdims=True)
    if center:
        dx -= jnp.mean(t, axis=-1, keepdims=True)
    return (dx * inv_std[..., None]).astype(dtype)


def input_gradient_from_x(t, x, *, epsilon):
    """Return dx and the normalized rows x̂ in x's dtype, given `t = dy * scale`."""
    offset, inv_std = row_statistics(x, epsilon=epsilon, center=True)
    normalized = _normalized(x, offset, inv_std).astype(x.dtype)
    return input_gradient(t, normalized, inv_std), normalized


def _streamed_if_faster(streamed, plain, *arrays, **options):
    unsupported = streamed.unsupported(*arrays, **options)
    streamed, plain = (functools.partial(kernel, **options) for kernel in (streamed, plain))
    return plain(*arrays) if unsupported else on_gpu(streamed, plain, *arrays)


def default(x, scale, bias, *, epsilon, center=True):
    arrays, options = (x, x, scale, bias, None, None), dict(epsilon=epsilon, center=center)
    gpu = "autodiff" if layer_norm_streamed.gradients.unsupported(*arrays, **options) else "pallas"
    return DefaultImplementation(gpu=gpu, older_gpu="autodiff", elsewhere="autodiff")


def _save(normalize, x, scale, bias, **options):
    y, *statistics = normalize(x, scale, bias, **options)
    return y, (x, scale, *statistics)


def _backward(gradients, dy, x, scale, offset, inv_std, **options):
    dx, dscale, dbias, _ = gradients(dy, x, scale, None, offset, inv_std, **options)
    return dx, dscale.astype(x.dtype), dbias if dbias is None else dbias.astype(x.dtype)


_LAYER_NORM, _RMS_NORM = (
    Pair(
        lambda *arrays, **options: normalize(*arrays, **options)[0],
        {"xla": functools.partial(_backward, gradients), "pallas": functools.partial(_backward, gradients_kernel)},
        save={
            "xla": functools.partial(_save, normalize),
            "pallas": functools.partial(_save, differentiable(normalize_kernel, normalize, batched("x"))),
        },
        # Without a forward, the backward computes offset and inv_std from x.
        residuals=lambda x, scale, bias, **options: (x, scale, None, None),
        batch_axes=batched("dy", "x", "offset", "inv_std"),
        name=name,
        unsupported=checks.unsupported_dtype,
        default=default,
        sharded_like=sharded_like,
        jit=True,
    )
    for name in ("layer_norm", "rms_norm")
)


def layer_norm(
    x: AnyRows,
    scale: AnyParameter | None = None,
    bias: AnyParameter | None = None,
    epsilon: float = 1e-5,
    *,
    axis: int | Sequence[int] = -1,
    implementation: Implementation = None,
) -> Rows:
    """LayerNorm, `y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias`, with the mean and the variance over each
    row, in the promoted dtype of the arguments.

    Args:
      scale, bias: one value per element of a row; None for ones and zeros.
      axis: the last axis, or several last axes, which form one row.

    Source: J. Ba et al., "Layer normalization", 2016.
    """
    shape, (x, scale, bias) = _check("layer_norm", axis, epsilon, x, scale, bias)
    y = _LAYER_NORM(x, scale, bias, epsilon=float(epsilon), center=True, implementation=implementation)
    return y.reshape(shape)


def layer_norm_backward(
    dy: AnyRows,
    x: AnyRows,
    scale: AnyParameter | None = None,
    epsilon: float = 1e-5,
    *,
    axis: int | Sequence[int] = -1,
    implementation: Implementation = None,
) -> tuple[Rows, Parameter, Parameter]:
    """Gradients of `layer_norm`. With `t = dy * scale`, `x̂ = (x - mean) * inv_std`, and
    `inv_std = 1 / sqrt(var(x) + epsilon)`,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,    dbias = Σ dy,

    with means over each row and sums over all rows.

    dscale and dbias have the dtype of scale, or of x if scale is None.

    Source: docs/layer_norm.md.
    """
    shape, (*arrays, dy) = _check("layer_norm_backward", axis, epsilon, x, scale, dy=dy)
    dx, *parameters = _LAYER_NORM.vjp(dy, *arrays, epsilon=float(epsilon), center=True, implementation=implementation)
    gradients = dx.reshape(shape), *(a.reshape(_row_shape(axis, shape)) for a in parameters)
    scale = x if scale is None else scale
    return in_dtypes_of((x, scale, scale), gradients)


def rms_norm(
    x: AnyRows,
    scale: AnyParameter | None = None,
    epsilon: float = 1e-5,
    *,
    axis: int | Sequence[int] = -1,
    implementation: Implementation = None,
) -> Rows:
    """RMSNorm, `y = x / sqrt(mean(x²) + epsilon) * scale`, with the mean over each row.

    Arguments and dtypes are as in `layer_norm`.

    Source: B. Zhang and R. Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """
    shape, (x, scale, _) = _check("rms_norm", axis, epsilon, x, scale)
    return _RMS_NORM(x, scale, None, epsilon=float(epsilon), center=False, implementation=implementation).reshape(shape)


def rms_norm_backward(
    dy: AnyRows,
    x: AnyRows,
    scale: AnyParameter | None = None,
    epsilon: float = 1e-5,
    *,
    axis: int | Sequence[int] = -1,
    implementation: Implementation = None,
) -> tuple[Rows, Parameter]:
    """Gradients of `rms_norm`. With `t = dy * scale`, `x̂ = x * inv_rms` and `inv_rms = 1 / sqrt(mean(x²) + epsilon)`,

        dx = inv_rms * (t - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,

    with means over each row and the sum over all rows.

    Dtypes are as in `layer_norm_backward`.
    """
    shape, (*arrays, _, dy) = _check("rms_norm_backward", axis, epsilon, x, scale, dy=dy)
    dx, dscale = _RMS_NORM.vjp(dy, *arrays, None, epsilon=float(epsilon), center=False, implementation=implementation)
    gradients = dx.reshape(shape), dscale.reshape(_row_shape(axis, shape))
    return in_dtypes_of((x, x if scale is None else scale), gradients)


def _check(op, axis, epsilon, x, scale, bias=None, **dy):
    x, scale, bias, *dy = checks.floating(op, ("scale", "bias"), x=x, scale=scale, bias=bias, **dy)
    axes = checks.axes(op, axis, x.ndim) if x.ndim else (0,)
    if not axes or (x.ndim and axes[0] != x.ndim - len(axes)):
        raise ValueError(f"{op}: axis is {axis!r}; wants the last axis, or several adjacent axes up to the last one")
    if dy:
        checks.shape(op, "dy", *dy, *x.shape)
    size, arrays = x.shape[axes[0] :] if x.ndim else (1,), [x, *dy]
    if len(axes) > 1:
        arrays = [a.reshape(*a.shape[: axes[0]], math.prod(size)) for a in arrays]
    _check_rows(op, epsilon, arrays[0])
    parameters = (a.reshape(math.prod(size)) for a in checks.scale_and_bias(op, x, size, scale, bias))
    return x.shape, (arrays[0], *parameters, *arrays[1:])


def _row_shape(axis, shape):
    return [shape[i] for i in checks.axes("layer_norm", axis, len(shape))]


def check(op, epsilon, **arrays):
    values = dict(zip(arrays, checks.floating(op, **arrays), strict=True))
    _check_rows(op, epsilon, values["x"])
    for name in ("scale", "bias"):
        checks.shape(op, name, values[name], values["x"].shape[-1])
    return tuple(values.values())


def _check_rows(op, epsilon, x):
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., hidden), at least one element per row")
    if isinstance(epsilon, AnyArray):
        epsilon = checks.number(op, "epsilon", epsilon)
    if not checks.is_number(epsilon) or not 0 <= epsilon < math.inf:
        raise ValueError(f"{op}: epsilon is {epsilon!r}; wants a finite number of at least 0")


_SIZES = (65536, 1024), (32768, 4096), (262144, 256)
_PUBLISHED_SIZE = 16384, 4096  # cuDNN publishes times of RMSNorm for it

ENTRIES = (
    *pair_entries(
        layer_norm,
        case_of((2, 3, 5), (2, 3, 5), (5,), (5,)),
        row_cases(*_SIZES, of=lambda hidden: case_of((BATCH, hidden), (BATCH, hidden), (hidden,), (hidden,))),
        takes=slice(2),
    ),
    *pair_entries(
        rms_norm,
        case_of((2, 3, 5), (2, 3, 5), (5,)),
        row_cases(*_SIZES, _PUBLISHED_SIZE, of=lambda hidden: case_of((BATCH, hidden), (BATCH, hidden), (hidden,))),
    ),
)
