"""Group normalization."""

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyArray, AnyFloats, Floats
from jaxbp.common.numerics import mean_and_rest, upcast
from jaxbp.ops._defaults import fused_pair, xla_and_pallas
from jaxbp.pairing import Implementation, batched, in_dtypes_of
from pallas_kernels.norm.statistics import inverse_root

AnyChannels = Float[AnyArray, "channels"]
Channels = Float[Array, "channels"]

# Below, x has two axes for the channels: `axis` for the groups, and `axis + 1` for the channels of a group.


def _over(x, axis):
    return tuple(i for i in range(1, x.ndim) if i != axis)


def _summed(x, axis):
    return tuple(i for i in range(x.ndim) if i not in (axis, axis + 1))


def _save(x, scale, bias, *, axis, epsilon):
    mean, rest = mean_and_rest(x, _over(x, axis))
    centered = (upcast(x) - mean) - rest
    inv_std = inverse_root(jnp.mean(jnp.square(centered), axis=_over(x, axis), keepdims=True), epsilon)
    y = centered * inv_std * upcast(scale) + upcast(bias)
    return y.astype(x.dtype), (x, scale, mean, rest, inv_std)


def _backward(elementwise, sum_over, dy, x, scale, mean, rest, inv_std, *, axis, epsilon):
    arrays, count = (dy, x, scale, mean, rest, inv_std), math.prod(x.shape[1:]) // x.shape[axis]
    means = (a / count for a in sum_over(_terms, *arrays, axes=_over(x, axis)))
    sums = sum_over(_parameter_terms, *arrays, axes=_summed(x, axis))
    return tuple(a.astype(x.dtype) for a in (elementwise(_combine, *arrays, *means), *sums))


def _terms(dy, x, scale, mean, rest, inv_std):
    t = dy * scale
    return t, t * (((x - mean) - rest) * inv_std)


def _parameter_terms(dy, x, scale, mean, rest, inv_std):
    return dy * (((x - mean) - rest) * inv_std), dy


def _combine(dy, x, scale, mean, rest, inv_std, mean_t, mean_t_x):
    return inv_std * (dy * scale - mean_t - ((x - mean) - rest) * inv_std * mean_t_x)


_GROUP_NORM = fused_pair(
    lambda *arrays, **options: _save(*arrays, **options)[0],
    xla_and_pallas(_backward),
    save=_save,
    name="group_norm",
    batch_axes=batched("dy", "x", "mean", "rest", "inv_std"),
)


def group_norm(
    x: AnyFloats,
    scale: AnyChannels | None = None,
    bias: AnyChannels | None = None,
    num_groups: int = 32,
    *,
    epsilon: float = 1e-6,
    channel_axis: int = 1,
    implementation: Implementation = None,
) -> Floats:
    """Group normalization, `y = scale (x - mean) / √(var + epsilon) + bias`, with the mean and variance of each example
    over the channels of a group and the spatial axes. y has the promoted dtype of the arguments.

    With one group per channel, this is instance normalization.

    Args:
      scale, bias: one value per channel; None for ones and zeros.
      num_groups: a divisor of the number of channels. Neighboring channels form a group.

    Source: Y. Wu and K. He, "Group normalization", ECCV 2018.
    """
    arrays, options = _check("group_norm", num_groups, epsilon, channel_axis, x, scale, bias)
    return _GROUP_NORM(*arrays, **options, implementation=implementation).reshape(x.shape)


def group_norm_backward(
    dy: AnyFloats,
    x: AnyFloats,
    scale: AnyChannels | None = None,
    num_groups: int = 32,
    *,
    epsilon: float = 1e-6,
    channel_axis: int = 1,
    implementation: Implementation = None,
) -> tuple[Floats, Channels, Channels]:
    """Gradients of `group_norm`. With `s = 1/√(var + epsilon)`, `x̂ = s (x - mean)`, and `t = dy scale`,

        dx = s (t - mean(t) - x̂ mean(t x̂)),    dscale = Σ dy x̂,    dbias = Σ dy,

    with means over each group of an example, and sums over the examples and the spatial axes.

    Dtypes are as in `layer_norm_backward`.
    """
    (*arrays, dy), options = _check("group_norm_backward", num_groups, epsilon, channel_axis, x, scale, dy=dy)
    dx, dscale, dbias = _GROUP_NORM.vjp(dy, *arrays, **options, implementation=implementation)
    scale = x if scale is None else scale
    return in_dtypes_of((x, scale, scale), (dx.reshape(x.shape), dscale.ravel(), dbias.ravel()))


def _check(op, num_groups, epsilon, channel_axis, x, scale, bias=None, **dy):
    x, scale, bias, *dy = checks.floating(op, ("scale", "bias"), x=x, scale=scale, bias=bias, **dy)
    if x.ndim < 2:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (batch, channels, ...)")
    axis = checks.one_axis(op, "channel_axis", channel_axis, x.ndim)
    if axis == 0:
        raise ValueError(f"{op}: channel_axis is {channel_axis}; wants an axis other than axis 0, the batch axis")
    channels, groups = x.shape[axis], checks.count(op, "num_groups", num_groups)
    if channels % groups:
        raise ValueError(f"{op}: num_groups is {groups}; wants a divisor of the number of channels, {channels}")
    if dy:
        checks.shape(op, "dy", *dy, *x.shape)

    def grouped(a):
        sizes = a.shape if a.ndim == x.ndim else [channels if i == axis else 1 for i in range(x.ndim)]
        return a.reshape(*sizes[:axis], groups, channels // groups, *sizes[axis + 1 :])

    arrays = x, *checks.scale_and_bias(op, x, (channels,), scale, bias), *dy
    return [grouped(a) for a in arrays], dict(axis=axis, epsilon=checks.number(op, "epsilon", epsilon, 0.0))


ENTRIES = pair_entries(
    group_norm,
    case_of((2, 4, 3), (2, 4, 3), (4,), (4,), num_groups=2),
    {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,), num_groups=4)},
    takes=slice(2),
    like="divide",
)
