"""Average-pooling. The backward divides the gradient of each window equally among the positions of the window."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.common.windows import Padding, Size, output_size, pool_options
from jaxbp.ops._defaults import fused_pair
from jaxbp.pairing import Implementation
from pallas_kernels.conv.conv2d import correlate
from pallas_kernels.core.launch import batch_first, batch_last
from pallas_kernels.pointwise.elementwise import elementwise


def _forward(x, *, window, stride, padding, shape):
    dimensions = (1, 1, *window), (1, 1, *stride), ((0, 0), (0, 0), *padding)
    total = lax.reduce_window(upcast(x), 0.0, lax.add, *dimensions)
    return (total / (window[0] * window[1])).astype(x.dtype)


def _spread(dy, window, stride, padding, shape):
    """Return dy, spaced out by the stride, so that summing it over one window per input position gives dx."""
    sides = zip(window, stride, padding, shape[2:], dy.shape[2:], strict=True)
    edges = []
    for f, s, (before, _), size, out in sides:
        low = f - 1 - before
        edges.append((low, size + f - 1 - low - ((out - 1) * s + 1), s - 1))
    return lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), (0, 0, 0), *edges])


def _gradient(dy, *, window, stride, padding, shape):
    share = upcast(dy) / (window[0] * window[1])
    spread = _spread(share, window, stride, padding, shape)
    dx = lax.reduce_window(spread, 0.0, lax.add, (1, 1, *window), (1, 1, 1, 1), "VALID")
    return dx.astype(dy.dtype)


def _gradient_kernel(dy, *, window, stride, padding, shape):
    N, C = dy.shape[:2]
    spread = _spread(dy, window, stride, padding, shape)
    images = batch_last(spread.reshape(N * C, 1, *spread.shape[2:]))
    weights = jnp.full((1, 1, *window), 1 / (window[0] * window[1]), jnp.float32)
    return batch_first(correlate(images, weights), N * C).reshape(shape)


def _global_forward(x, *, shape):
    return jnp.mean(upcast(x), axis=(2, 3)).astype(x.dtype)


def _global_gradient(dy, *, shape):
    share = upcast(dy) / (shape[2] * shape[3])
    return jnp.broadcast_to(share[:, :, None, None], shape).astype(dy.dtype)


def _global_gradient_kernel(dy, *, shape):
    return elementwise(lambda dy: dy / (shape[2] * shape[3]), dy[:, :, None, None], shape=shape)


_AVG_POOL2D = fused_pair(_forward, {"xla": _gradient, "pallas": _gradient_kernel}, linear=True, name="avg_pool2d")
_GLOBAL_AVG_POOL2D = fused_pair(
    _global_forward, {"xla": _global_gradient, "pallas": _global_gradient_kernel}, linear=True, name="global_avg_pool2d"
)


def avg_pool2d(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    stride: Size | None = None,
    padding: Padding = 0,
    implementation: Implementation = None,
) -> Float[Array, "batch channels out_height out_width"]:
    """Average-pooling, `y[n, c, i, j] = 1/(F G) Σ over u < F, v < G of x[n, c, i s + u - p, j s + v - p]`.

    Args:
      x: images, NCHW.
      window: F and G, the height and width of the windows, as an int or a pair.
      stride: s, an int or a pair. None means the size of the window.
      padding: p, the number of zeros on each side, as an int or a pair; or "SAME" or "VALID". The zeros count in the
        average. The padding must be less than the window.
      implementation: "pallas", "xla", "autodiff", or None for the fastest.

    Returns:
      y, in x's dtype. Its height is `(height + 2 p - F) // s + 1`, and its width follows in the same way.

    Raises:
      TypeError: x is not floating.
      ValueError: shapes or options do not fit.

    Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    (x,) = checks.floating("avg_pool2d", x=x)
    checks.shape("avg_pool2d", "x", x, "batch", "channels", "height", "width")
    options = _options("avg_pool2d", x.shape[2:], window, stride, padding)
    return _AVG_POOL2D(x, implementation=implementation, shape=x.shape, **options)


def avg_pool2d_backward(
    dy: Float[AnyArray, "batch channels out_height out_width"],
    input_size: tuple[int, int],
    window: Size,
    *,
    stride: Size | None = None,
    padding: Padding = 0,
    implementation: Implementation = None,
) -> Float[Array, "batch channels height width"]:
    """Gradient of `avg_pool2d`: `dx[n, c, h, l] = 1/(F G) Σ dy[n, c, i, j]` over the windows that contain (h, l).

    Args:
      dy: gradient with respect to y.
      input_size: height and width of x, which y does not determine.
      window, stride, padding: as in the forward.

    Raises:
      TypeError, ValueError: as in `avg_pool2d`.
    """
    op = "avg_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    input_size = checks.pair(op, "input_size", input_size)
    options = _options(op, input_size, window, stride, padding)
    size = output_size(input_size=input_size, **options)
    checks.shape(op, "dy", dy, "batch", "channels", *size)
    shape = (*dy.shape[:2], *input_size)
    return _AVG_POOL2D.vjp(dy, implementation=implementation, shape=shape, **options)


def global_avg_pool2d(
    x: Float[AnyArray, "batch channels height width"], *, implementation: Implementation = None
) -> Float[Array, "batch channels"]:
    """Mean of each channel's image, `y[n, c] = 1/(H W) Σ over h, l of x[n, c, h, l]`.

    Raises:
      TypeError, ValueError: x is not floating, or is not a batch of images.

    Source: M. Lin, Q. Chen and S. Yan, "Network in network", ICLR 2014.
    """
    (x,) = checks.floating("global_avg_pool2d", x=x)
    checks.shape("global_avg_pool2d", "x", x, "batch", "channels", "height", "width")
    return _GLOBAL_AVG_POOL2D(x, implementation=implementation, shape=x.shape)


def global_avg_pool2d_backward(
    dy: Float[AnyArray, "batch channels"], input_size: tuple[int, int], *, implementation: Implementation = None
) -> Float[Array, "batch channels height width"]:
    """Gradient of `global_avg_pool2d`: `dx[n, c, h, l] = dy[n, c] / (H W)`, where H and W are the `input_size`."""
    op = "global_avg_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    checks.shape(op, "dy", dy, "batch", "channels")
    shape = (*dy.shape, *checks.pair(op, "input_size", input_size))
    return _GLOBAL_AVG_POOL2D.vjp(dy, implementation=implementation, shape=shape)


def _options(op, input_size, window, stride, padding):
    options = pool_options(op, input_size, window, stride, padding)
    return {name: value for name, value in options.items() if name != "input_size"}
