"""Dropout. Only the key is saved, because the backward draws the same mask from the same key."""

import jax
import jax.numpy as jnp

from jaxbp.common import checks
from jaxbp.common.checks import AnyFloats, AnyKey, Floats
from jaxbp.common.numerics import upcast
from jaxbp.ops._defaults import fused_pair
from jaxbp.pairing import Implementation
from pallas_kernels.pointwise.elementwise import elementwise


def _keep(key, shape, rate):
    # The probability is a float32, so that the mask is the same whether or not JAX's 64-bit mode is on.
    return jax.random.bernoulli(key, jnp.float32(1 - rate), shape)


def _forward(x, key, *, rate):
    # A rate of 1 drops every element. The condition then avoids a division by 0.
    scale = 1 / (1 - rate) if rate < 1 else 0.0
    return jnp.where(_keep(key, x.shape, rate), (upcast(x) * scale).astype(x.dtype), jnp.zeros((), x.dtype))


def _gradient(dy, key, *, rate):
    return _forward(dy, key, rate=rate), None


def _gradient_kernel(dy, key, *, rate):
    scale = 1 / (1 - rate) if rate < 1 else 0.0
    keep = _keep(key, dy.shape, rate).astype(jnp.int8)
    return elementwise(lambda dy, keep: jnp.where(keep != 0, dy * scale, 0.0), dy, keep), None


def _save(x, key, *, rate):
    return _forward(x, key, rate=rate), (key,)


_DROPOUT = fused_pair(_forward, {"xla": _gradient, "pallas": _gradient_kernel}, save=_save, name="dropout")


def dropout(x: AnyFloats, key: AnyKey, rate: float, *, implementation: Implementation = None) -> Floats:
    """Dropout, `y = x / (1 - rate)` with probability `1 - rate`, else 0, drawn independently for each element.

    Args:
      x: any shape and floating dtype.
      key: a key of `jax.random`. The same key drops the same elements, also in the backward.
      rate: the probability of a 0, a number in [0, 1].
      implementation: "pallas", "xla", "autodiff", or None for the fastest.

    Raises:
      TypeError: x is not floating, or key is not a key.
      ValueError: rate is not in [0, 1].

    Source: N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 2014.
    """
    x, key, rate = _check("dropout", "x", x, key, rate)
    return _DROPOUT(x, key, rate=rate, implementation=implementation)


def dropout_backward(dy: AnyFloats, key: AnyKey, rate: float, *, implementation: Implementation = None) -> Floats:
    """Gradient of `dropout`: `dx = dy / (1 - rate)` where x was kept, else 0. This is `dropout(dy, key, rate)`."""
    dy, key, rate = _check("dropout_backward", "dy", dy, key, rate)
    # The forward is linear in x, so the gradient does not depend on x. `vjp` therefore gets dy in place of x.
    return _DROPOUT.vjp(dy, dy, key, rate=rate, implementation=implementation)


def _check(op, name, x, key, rate):
    (x,) = checks.floating(op, **{name: x})
    key = checks.array(op, "key", key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not (typed and key.shape == ()) and not (key.dtype == jnp.uint32 and key.shape == (2,)):
        raise TypeError(f"{op}: key has dtype {key.dtype} and shape {key.shape}; wants one key, say jax.random.key(0)")
    return x, key, checks.number(op, "rate", rate, 0.0, 1.0)
