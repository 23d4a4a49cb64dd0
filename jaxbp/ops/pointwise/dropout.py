"""Dropout. With the same key, the backward draws the mask of the forward again."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxbp.common import checks
from jaxbp.common.cases import SMOOTH, Argument, hidden_entries
from jaxbp.common.checks import AnyFloats, AnyKey, Floats, Number
from jaxbp.common.numerics import cast_like, upcast
from jaxbp.ops._defaults import fused_pair
from jaxbp.pairing import Implementation
from pallas_kernels.pointwise.elementwise import elementwise


def _keep(key, shape, rate, broadcast_dims):
    # A float32 probability makes the mask independent of JAX's 64-bit mode.
    sizes = [1 if axis in broadcast_dims else size for axis, size in enumerate(shape)]
    return jax.random.bernoulli(key, jnp.asarray(1 - rate, jnp.float32), sizes)


def _scale(rate):
    if isinstance(rate, float):
        return 1 / (1 - rate) if rate < 1 else 0.0
    kept = 1 - lax.stop_gradient(rate)
    return jnp.where(kept > 0, 1 / jnp.where(kept > 0, kept, 1.0), 0.0)


def _forward(x, key, rate_array, *, rate, broadcast_dims):
    rate = rate if rate_array is None else rate_array
    y = cast_like(upcast(x) * _scale(rate), x)
    return jnp.where(_keep(key, x.shape, rate, broadcast_dims), y, 0.0)


def _gradient(dy, key, rate_array, **options):
    return _forward(dy, key, rate_array, **options), None, _no_gradient(rate_array)


def _gradient_kernel(dy, key, rate_array, *, rate, broadcast_dims):
    rate = rate if rate_array is None else rate_array
    keep = _keep(key, dy.shape, rate, broadcast_dims).astype(jnp.int8)
    scale = _scale(rate)
    array = () if rate_array is None else (scale.astype(jnp.float32),)
    dx = elementwise(lambda dy, keep, scale=scale: jnp.where(keep != 0, dy * scale, 0.0), dy, keep, *array)
    return dx, None, _no_gradient(rate_array)


def _no_gradient(rate_array):
    return None if rate_array is None else jnp.zeros_like(rate_array)


_DROPOUT = fused_pair(
    _forward,
    {"xla": _gradient, "pallas": _gradient_kernel},
    residuals=lambda x, *key_and_rate, **options: key_and_rate,
    name="dropout",
)


def dropout(
    x: AnyFloats,
    key: AnyKey,
    rate: Number,
    broadcast_dims: Sequence[int] = (),
    *,
    implementation: Implementation = None,
) -> Floats:
    """Dropout, `y = x / (1 - rate)` with probability `1 - rate`, else 0, drawn independently for each element.

    Args:
      rate: the probability that an element is dropped, a number or an array of shape (), with gradient 0.
      broadcast_dims: axes along which all elements are dropped or kept together.

    Source: N. Srivastava et al., "Dropout", JMLR 2014.
    """
    arrays, options = _check("dropout", "x", x, key, rate, broadcast_dims)
    return _DROPOUT(*arrays, **options, implementation=implementation)


def dropout_backward(
    dy: AnyFloats,
    key: AnyKey,
    rate: Number,
    broadcast_dims: Sequence[int] = (),
    *,
    implementation: Implementation = None,
) -> Floats:
    """Gradient of `dropout`: `dx = dy / (1 - rate)` where x was kept, else 0."""
    arrays, options = _check("dropout_backward", "dy", dy, key, rate, broadcast_dims)
    # `vjp` of a linear op gets dy in place of x.
    gradients = _DROPOUT.vjp(arrays[0], *arrays, **options, implementation=implementation)
    return gradients[0] if isinstance(gradients, tuple) else gradients


def _check(op, name, x, key, rate, broadcast_dims):
    (x,) = checks.only_floating(op, **{name: x})
    key = checks.array(op, "key", key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not (typed and key.shape == ()) and not (key.dtype == jnp.uint32 and key.shape == (2,)):
        raise TypeError(f"{op}: key has dtype {key.dtype} and shape {key.shape}; wants one key, say jax.random.key(0)")
    rate = checks.number_or_array(op, "rate", rate, 0.0, 1.0)
    axes = tuple(checks.one_axis(op, "broadcast_dims", axis, x.ndim) for axis in broadcast_dims)
    array, number = (None, rate) if isinstance(rate, float) else (rate, None)
    return (x, key, array), dict(rate=number, broadcast_dims=tuple(sorted(axes)))


_KEY = Argument((2,), below=2**31 - 1, dtype=jnp.uint32)
ENTRIES = hidden_entries(dropout, SMOOTH, _KEY, takes=slice(1, None), rate=0.3)
