"""Activation functions."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxbp.implementations import Fastest, Implementation, Op
from jaxbp.ops import _checks
from jaxbp.pairing import Pair, differentiable
from pallas_kernels.elementwise import elementwise


def _relu_backward(dy, x):
    return jnp.where(x > 0, dy, jnp.zeros_like(dy))


def _unsupported(*arrays):
    return _checks.unsupported_dtype(*arrays)


_RELU_BACKWARD = Op(
    "relu_backward",
    {
        "autodiff": lambda dy, x: jax.vjp(jax.nn.relu, x)[1](dy)[0],
        "xla": _relu_backward,
        "pallas": differentiable(functools.partial(elementwise, _relu_backward), _relu_backward),
    },
    unsupported=_unsupported,
    # XLA fuses the mask into its neighbours.
    fastest=Fastest(gpu="xla"),
)
_RELU = Pair(jax.nn.relu, _RELU_BACKWARD, name="relu", unsupported=_unsupported)


def relu(x: Float[Array, "..."], *, implementation: Implementation = None) -> Float[Array, "..."]:
    """Rectified linear unit, `y = max(x, 0)`, element by element.

    Args:
      x: any shape, any floating dtype (kernel: float32, bfloat16, float16).
      implementation: "pallas", "xla", "autodiff", or None for the fastest here.

    Returns:
      y, of x's shape and dtype. NaN stays NaN.

    Raises:
      TypeError: x is not floating.

    Source: V. Nair and G. Hinton, "Rectified linear units improve restricted Boltzmann machines", ICML 2010.
    """
    (x,) = _checks.floating("relu", x=x)
    return _RELU(x, implementation=implementation)


def relu_backward(
    dy: Float[Array, "..."], x: Float[Array, "..."], *, implementation: Implementation = None
) -> Float[Array, "..."]:
    """Gradient of `relu`: `dx = dy where x > 0, else 0`. At x = 0 it is 0.

    Args:
      dy: gradient of the loss in y.
      x: the forward's input, of dy's shape and dtype.

    Returns:
      dx, of the same shape and dtype.

    Raises:
      TypeError, ValueError: dtypes or shapes that differ.
    """
    dy, x = _checks.floating("relu_backward", dy=dy, x=x)
    _checks.shape("relu_backward", "x", x, *dy.shape)
    return _RELU_BACKWARD(dy, x, implementation=implementation)
