"""Convolution, ReLU and max-pooling as one op, which keeps a byte a window where three ops keep three activations."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float, Integer

from jaxbp.ops import _checks, conv2d, max_pool2d
from jaxbp.ops._numerics import on_tensor_cores
from jaxbp.ops.conv2d import Padding, Size
from jaxbp.pairing import Implementation, Op, Pair, differentiable
from pallas_kernels.conv import conv2d_relu_max_pool2d as kernels
from pallas_kernels.conv import input_gradient_sm90 as input_tensor_cores
from pallas_kernels.conv import weights_gradient_sm90 as tensor_cores
from pallas_kernels.core.launch import batch_first, batch_last


def _split(x_size, w_size, *, window, stride, padding, precision):
    """The options of the convolution and of the pool."""
    convolution = dict(stride=stride, padding=padding, dilation=(1, 1), groups=1, precision=precision)
    size = conv2d.output_size(x_size, w_size, convolution)
    return convolution, dict(window=window, stride=window, padding=((0, 0), (0, 0)), input_size=size)


def _forward(x, w, b, **options):
    convolution, pool = _split(x.shape[2:], w.shape[2:], **options)
    z = conv2d.forward(x, w, b, **convolution)
    return max_pool2d.native(jax.nn.relu(z), **pool)[0], _places(lax.stop_gradient(z), **pool)[1]


def _forward_and_places(x, w, b, **options):
    convolution, pool = _split(x.shape[2:], w.shape[2:], **options)
    return max_pool2d.keep(*_places(conv2d.forward_formula(x, w, b, **convolution), **pool))


def _places(z, **pool):
    """The pooled ReLU of z, and where each maximum lay or that ReLU was off, in bytes if they go into them."""
    largest, places = max_pool2d.max_and_indices(z, **pool)
    off = pool["window"][0] * pool["window"][1]
    places = places.astype(jnp.uint8 if off <= 255 else jnp.int32)
    return jax.nn.relu(largest), jnp.where(largest > 0, places, jnp.asarray(off, places.dtype))


def _forward_and_places_kernel(x, w, b, *, window, stride, padding, precision):
    x_last = lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in padding), (0, 0, 0)])
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    y, places = kernels.forward(x_last, w, b, window=window)
    return batch_first(y, x.shape[0]), batch_first(places, x.shape[0])


def _gradients_autodiff(dy, places, x, w, b, **options):
    convolution, pool = _split(x.shape[2:], w.shape[2:], **options)
    maxima = lambda x, w, b: max_pool2d.select(conv2d.forward(x, w, b, **convolution), places, **pool)  # noqa: E731
    return jax.vjp(maxima, x, w, b)[1](dy)


def _gradients_formula(dy, places, x, w, b, **options):
    convolution, pool = _split(x.shape[2:], w.shape[2:], **options)
    # Where ReLU was off the place is in no window: the pool's backward sends nothing there.
    dz = max_pool2d.route_formula(dy, places, **pool)
    dx = conv2d.input_gradient_formula(dz, w, input_size=x.shape[2:], **convolution)
    dw = conv2d.weights_gradient_formula(dz, x, filter_size=w.shape[2:], **convolution)
    return dx, dw, None if b is None else conv2d.bias_gradient_formula(dz)


def _gradients_kernel(dy, places, x, w, b, *, window, stride, padding, precision):
    dy_last, places_last = batch_last(dy), batch_last(places)
    # What the pool's windows reach of the padded input: the last rows and columns may be beyond them.
    used = [n * size + f - 1 for n, size, f in zip(dy.shape[2:], window, w.shape[2:], strict=True)]
    reached = [(p, u - size - p, 0) for (p, _), u, size in zip(padding, used, x.shape[2:], strict=True)]
    x_last = lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *reached, (0, 0, 0)])
    exact = not on_tensor_cores(x.dtype, precision)
    pays = not exact and tensor_cores.pays(dy_last.shape, x_last.shape, window, x.dtype.itemsize)
    weights_gradient = (tensor_cores if pays else kernels).weights_gradient
    dw, db = weights_gradient(dy_last, places_last, x_last, window=window)
    size = dict(input_size=tuple(used), window=window)
    if not exact and x.dtype == jnp.float32 and input_tensor_cores.pays(dy_last.shape, w.shape, window):
        dx_last = input_tensor_cores.input_gradient(dy_last, places_last, w, **size)
    elif not exact and kernels.band_fits(w.shape, dy_last.shape, used[1], window):
        dx_last = kernels.input_gradient_banded(dy_last, places_last, w, precision=precision, **size)
    else:
        dx_last = kernels.input_gradient(dy_last, places_last, w, **size)
    dx_last = lax.pad(dx_last, jnp.zeros((), dy.dtype), [(0, 0, 0), *((-p, -q, 0) for p, q, _ in reached), (0, 0, 0)])
    return batch_first(dx_last, x.shape[0]), dw.astype(w.dtype), None if b is None else db.astype(b.dtype)


def _save(forward_and_places):
    def save(x, w, b, **options):
        y, places = forward_and_places(x, w, b, **options)
        return (y, places), (places, x, w, b)

    return save


def _unsupported(*arrays, window, stride, **options):
    if stride != (1, 1):
        return f"stride={stride}"
    *_, w, _ = arrays
    if w.shape[2] * w.shape[3] > kernels.MAX_TAPS:
        return f"filters of {w.shape[2]} x {w.shape[3]}, more than {kernels.MAX_TAPS} places"
    if window[0] * window[1] > kernels.MAX_PLACES:
        return f"window={window}, more than {kernels.MAX_PLACES} places"
    return _checks.unsupported_dtype(*arrays)


_BACKWARD = Op(
    "conv2d_relu_max_pool2d_backward",
    {
        "autodiff": _gradients_autodiff,
        "xla": _gradients_formula,
        "pallas": differentiable(_gradients_kernel, _gradients_formula),
    },
    unsupported=_unsupported,
)


def _pair_backward(implementation):
    backward = _BACKWARD.implementations[implementation]
    return lambda gradients, *saved, **options: backward(gradients[0], *saved, **options)


_CONV2D_RELU_MAX_POOL2D = Pair(
    _forward,
    Op("conv2d_relu_max_pool2d_backward", {name: _pair_backward(name) for name in ("pallas", "xla")}),
    save={
        "xla": _save(_forward_and_places),
        "pallas": _save(differentiable(_forward_and_places_kernel, _forward_and_places)),
    },
    name="conv2d_relu_max_pool2d",
    unsupported=_unsupported,
)


def conv2d_relu_max_pool2d(
    x: Float[Array, "batch in_channels height width"],
    w: Float[Array, "out_channels in_channels filter_height filter_width"],
    b: Float[Array, "out_channels"] | None = None,
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "batch out_channels out_height out_width"]:
    """`max_pool2d(relu(conv2d(x, w, b, stride=stride, padding=padding)), window)`, with much less to remember.

    The backward needs the input, and for each window the place of its maximum or that ReLU was off: a byte. The
    activations at the convolution's resolution are neither kept nor, by the kernels, ever written.

    Args:
      x, w, b, stride, padding, precision: as in `conv2d`.
      window: height and width of the pool's windows, which do not overlap.
      implementation: "pallas" (stride 1, filters of at most 64 places, windows of at most 16), "xla", "autodiff" or
        None.

    Returns:
      y, in x's dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `conv2d` and `max_pool2d`.
    """
    op = "conv2d_relu_max_pool2d"
    return _call(op, x, w, b, window, stride, padding, precision, implementation)[0]


def conv2d_relu_max_pool2d_with_places(
    x: Float[Array, "batch in_channels height width"],
    w: Float[Array, "out_channels in_channels filter_height filter_width"],
    b: Float[Array, "out_channels"] | None = None,
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "batch out_channels out_height out_width"], Integer[Array, "batch out_channels out_height out_width"]
]:
    """`conv2d_relu_max_pool2d`, and what its backward remembers of the windows.

    Args:
      As in `conv2d_relu_max_pool2d`.

    Returns:
      (y, places): each window's maximum lay at `u * window_width + v`, or ReLU was off: `window_height * window_width`.
      uint8 for windows of up to 255 places, else int32. They have no gradient.

    Raises:
      As in `conv2d_relu_max_pool2d`.
    """
    op = "conv2d_relu_max_pool2d_with_places"
    return _call(op, x, w, b, window, stride, padding, precision, implementation)


def conv2d_relu_max_pool2d_backward(
    dy: Float[Array, "batch out_channels out_height out_width"],
    places: Integer[Array, "batch out_channels out_height out_width"],
    x: Float[Array, "batch in_channels height width"],
    w: Float[Array, "out_channels in_channels filter_height filter_width"],
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "batch in_channels height width"],
    Float[Array, "out_channels in_channels filter_height filter_width"],
    Float[Array, "out_channels"],
]:
    """Gradients of `conv2d_relu_max_pool2d` in x, w and b.

    With dz the gradient at the convolution's resolution, dy at each window's place and zero elsewhere, they are
    `conv2d_backward_input(dz, w)`, `conv2d_backward_weights(dz, x)` and `conv2d_backward_bias(dz)`; the kernels never
    make dz.

    Args:
      dy: gradient of the loss in y.
      places: as `conv2d_relu_max_pool2d_with_places` gives them.
      x, w: the forward's inputs.
      The rest as in `conv2d_relu_max_pool2d`.

    Returns:
      (dx, dw, db), each in the shape and dtype of what it is the gradient of; half precisions are summed in float32.

    Raises:
      As in `conv2d_relu_max_pool2d`.
    """
    op = "conv2d_relu_max_pool2d_backward"
    dy, x, w = _checks.floating(op, dy=dy, x=x, w=w)
    options = _options(op, x, w, None, window, stride, padding, precision)
    _, pool = _split(x.shape[2:], w.shape[2:], **options)
    _checks.shape(op, "dy", dy, x.shape[0], w.shape[0], *max_pool2d.output_size(**pool))
    places = max_pool2d.check_indices(op, "places", places, dy.shape)
    b = jnp.zeros(w.shape[:1], w.dtype)
    return _BACKWARD(dy, places, x, w, b, implementation=implementation, **options)


def _call(op, x, w, b, window, stride, padding, precision, implementation):
    x, w, b = _checks.floating(op, x=x, w=w, b=b)
    options = _options(op, x, w, b, window, stride, padding, precision)
    return _CONV2D_RELU_MAX_POOL2D.named(op)(x, w, b, implementation=implementation, **options)


def _options(op, x, w, b, window, stride, padding, precision):
    convolution = conv2d.check(op, x, w, b, stride=stride, padding=padding, precision=precision)
    options = {name: convolution[name] for name in ("stride", "padding", "precision")}
    size = conv2d.output_size(x.shape[2:], w.shape[2:], convolution)
    # The pool has checks of its own, of its window against what the convolution leaves it.
    return options | dict(window=max_pool2d.check_options(op, size, window, None, 0)["window"])
