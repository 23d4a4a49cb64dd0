"""Batch normalization."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyArray, AnyFloats, Floats
from jaxbp.common.numerics import mean_and_rest, upcast
from jaxbp.ops._defaults import fused_pair, xla_and_pallas
from jaxbp.ops.pointwise._elementwise import Elementwise
from jaxbp.pairing import Implementation, in_dtypes_of
from pallas_kernels.norm.statistics import inverse_root

AnyChannels = Float[AnyArray, "channels"]
Results = tuple[Floats, Float[Array, "channels"], Float[Array, "channels"]]


def _over(x, channel_axis):
    return tuple(axis for axis in range(x.ndim) if axis != channel_axis)


def _along(a, x, channel_axis):
    return a.reshape([-1 if axis == channel_axis else 1 for axis in range(x.ndim)])


def _normalize(x, scale, bias, *, epsilon, channel_axis, wide):
    over = _over(x, channel_axis)
    mean, rest = mean_and_rest(x, over)
    centered = (upcast(x) - mean) - rest
    var = jnp.mean(jnp.square(centered), axis=over)
    factor = upcast(scale) * inverse_root(var, epsilon)
    y = centered * _along(factor, x, channel_axis) + _along(upcast(bias), x, channel_axis)
    statistics = (a if wide else a.astype(x.dtype) for a in ((mean + rest).reshape(var.shape), var))
    return (y.astype(x.dtype), *statistics), (x, scale, mean, rest, var)


def _forward(x, scale, bias, **options):
    return _normalize(x, scale, bias, **options)[0]


def _backward(elementwise, sum_over, dys, x, scale, mean, rest, var, *, epsilon, channel_axis, wide):
    """Compute `dx = a dy + b (x - mean) + c`, with (a, b, c) per channel. dys are the cotangents of y, mean, and
    var."""
    dy, dmean, dvar = dys
    count = x.size // len(scale)
    sums = sum_over(_terms, dy, x, mean, rest, axes=_over(x, channel_axis))
    dy_sum, deviation_sum = (a.reshape(-1) for a in sums)
    s = inverse_root(var, epsilon)
    dscale = deviation_sum * s
    a = upcast(scale) * s
    b = (2 * upcast(dvar) - a * s * dscale) / count
    c = (upcast(dmean) - a * dy_sum) / count
    dx = elementwise(_combine, dy, x, mean, rest, *(_along(a, x, channel_axis) for a in (a, b, c)))
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dy_sum.astype(scale.dtype)


def _terms(dy, x, mean, rest):
    return dy, dy * ((x - mean) - rest)


def _combine(dy, x, mean, rest, a, b, c):
    return a * dy + b * ((x - mean) - rest) + c


def _given(x, mean, var, scale, bias, *, epsilon):
    return (x - mean) * (scale * inverse_root(var, epsilon)) + bias


def _given_gradients(dy, x, mean, var, scale, bias, *, epsilon):
    s = inverse_root(var, epsilon)
    dx, normalized = dy * scale * s, (x - mean) * s
    return dx, -dx, -0.5 * s * (dx * normalized), dy * normalized, dy


_BATCH_NORM = fused_pair(_forward, xla_and_pallas(_backward), save=_normalize, name="batch_norm")
_WITH_GIVEN = Elementwise("batch_norm", _given, _given_gradients)


def _statistics(x, channel_axis, axis_name, use_fast_variance):

    def mean_of(a):
        mean = jnp.mean(a, axis=_over(x, channel_axis))
        return mean if axis_name is None else lax.pmean(mean, axis_name)

    wide = upcast(x)
    mean = mean_of(wide)
    if use_fast_variance:
        return mean, jnp.maximum(mean_of(jnp.square(wide)) - jnp.square(mean), 0.0)
    return mean, mean_of(jnp.square(wide - _along(mean, x, channel_axis)))


def batch_norm(
    x: AnyFloats,
    scale: AnyChannels | None = None,
    bias: AnyChannels | None = None,
    running: tuple[AnyChannels, AnyChannels] | None = None,
    *,
    use_running_average: bool = False,
    momentum: float = 0.99,
    epsilon: float = 1e-5,
    channel_axis: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
    use_fast_variance: bool = False,
    implementation: Implementation = None,
) -> Results:
    """Batch normalization, `y = scale (x - mean) / √(var + epsilon) + bias`, with the mean and variance of each channel
    over the batch and the spatial axes.

    Args:
      scale, bias: one value per channel; None for ones and zeros.
      running: running averages (mean, var), in any floating dtype, or None.
      use_running_average: whether to normalize with `running`, as in evaluation, and to return it unchanged.
      axis_name: mapped axes that the mean and variance also cover, as in `jax.lax.pmean`.
      use_fast_variance: whether to compute the variance as `mean(x²) - mean(x)²`, which loses digits if a channel's
        mean is far from zero.

    Returns:
      (y, mean, var). y has the promoted dtype of x, scale, and bias. Without `running`, mean and var are the statistics
      of the batch, in y's dtype, and differentiable. var is the mean of squared deviations. With `running`, mean and
      var are the new running averages, `momentum * running + (1 - momentum) * batch`, without gradient. An empty batch
      does not change them.

    Source: S. Ioffe and C. Szegedy, "Batch normalization", ICML 2015.
    """
    op, use_running_average = "batch_norm", checks.boolean("batch_norm", "use_running_average", use_running_average)
    x, scale, bias, options = _check(op, epsilon, channel_axis, x, scale, bias)
    momentum = checks.number(op, "momentum", momentum, 0.0, 1.0)
    if running is not None:
        running = [checks.array(op, f"running[{i}]", a) for i, a in enumerate(running)]
        for i, a in enumerate(running):
            checks.only_floating(op, **{f"running[{i}]": a})
            checks.shape(op, f"running[{i}]", a, len(scale))
    elif use_running_average:
        raise ValueError(f"{op}: running is None; wants (mean, var), because use_running_average is True")
    is_empty, fast = 0 in x.shape, checks.boolean(op, "use_fast_variance", use_fast_variance)
    use_running_average |= is_empty and running is not None
    if not (use_running_average or is_empty or fast) and axis_name is None:
        wide = running is not None
        y, *statistics = _BATCH_NORM(x, scale, bias, **options, wide=wide, implementation=implementation)
    else:
        channel_axis = options["channel_axis"]
        if is_empty and running is None:  # statistics of NaN would make the scale's gradient NaN, not 0
            statistics = jnp.zeros((2, len(scale)), x.dtype)
        else:
            statistics = running if use_running_average else _statistics(x, channel_axis, axis_name, fast)
        parameters = (_along(a, x, channel_axis) for a in (*statistics, scale, bias))
        y = _WITH_GIVEN(x, *parameters, epsilon=options["epsilon"], implementation=implementation)
    if running is None:
        return y, *(jnp.full_like(a, jnp.nan) if is_empty else a.astype(x.dtype) for a in statistics)
    if not use_running_average:
        pairs = zip(running, statistics, strict=True)
        new = (lax.stop_gradient(momentum * old + (1 - momentum) * new).astype(old.dtype) for old, new in pairs)
        return y, *new
    return y, *running


def batch_norm_backward(
    dy: AnyFloats,
    x: AnyFloats,
    scale: AnyChannels | None = None,
    *,
    epsilon: float = 1e-5,
    channel_axis: int = 1,
    implementation: Implementation = None,
) -> Results:
    """Gradients of `batch_norm` for a loss that depends on y, not on mean and var. With `s = 1/√(var + epsilon)`,
    `x̂ = s (x - mean)`, and n elements per channel,

        dbias = Σ dy,  dscale = Σ dy x̂,  dx = scale s (dy - dbias/n - x̂ dscale/n),

    with sums over the batch and the spatial axes.

    Return (dx, dscale, dbias), with dtypes as in `layer_norm_backward`.
    """
    op = "batch_norm_backward"
    arguments = (x, x, x) if scale is None else (x, scale, scale)
    x, scale, none, options, dy = _check(op, epsilon, channel_axis, x, scale, dy=dy)
    checks.shape(op, "dy", dy, *x.shape)
    dys = dy, jnp.zeros_like(scale), jnp.zeros_like(scale)
    if 0 in x.shape:
        gradients = x, jnp.zeros_like(scale), jnp.zeros_like(scale)
    else:
        gradients = _BATCH_NORM.vjp(dys, x, scale, none, **options, wide=False, implementation=implementation)
    return in_dtypes_of(arguments, gradients)


def _check(op, epsilon, channel_axis, x, scale, bias=None, **dy):
    x, scale, bias, *dy = checks.floating(op, ("scale", "bias"), x=x, scale=scale, bias=bias, **dy)
    if x.ndim < 2:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (batch, channels, ...)")
    axis = checks.one_axis(op, "channel_axis", channel_axis, x.ndim)
    scale, bias = checks.scale_and_bias(op, x, (x.shape[axis],), scale, bias)
    return x, scale, bias, dict(epsilon=checks.number(op, "epsilon", epsilon, 0.0), channel_axis=axis), *dy


ENTRIES = pair_entries(
    batch_norm,
    case_of((4, 3, 2), (4, 3, 2), (3,), (3,)),
    {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,))},
    takes=slice(2),
    like="divide",
)
