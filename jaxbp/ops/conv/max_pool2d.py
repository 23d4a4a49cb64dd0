"""Max-pooling. The forward keeps the position of the maximum in each window, and the backward adds the gradient of the
window at this position."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Integer

from jaxbp import barriers
from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import wide
from jaxbp.common.windows import Padding, Size, is_nonoverlapping, output_size, pool_options
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, transpose
from jaxbp.sharding import batched
from pallas_kernels.conv import max_pool2d as kernels
from pallas_kernels.core.launch import batch_first, batch_last


def _places(window):
    """Return the positions (row, column) in a window, in row-major order."""
    return [(u, v) for u in range(window[0]) for v in range(window[1])]


def _at_place(place, x, *, window, stride, padding, input_size, fill):
    """Return the elements of x at position `place`, a row and a column, of every window, `(N, C, P, Q)`."""
    x = jnp.pad(x, ((0, 0), (0, 0), *padding), constant_values=fill)
    rows, columns = output_size(input_size=input_size, window=window, stride=stride, padding=padding)
    (u, v), (s, t) = place, stride
    return x[:, :, u : u + (rows - 1) * s + 1 : s, v : v + (columns - 1) * t + 1 : t]


def max_and_indices(x, **options):
    places = _places(options["window"])
    index_dtype = jnp.uint8 if len(places) <= 256 else jnp.int32
    values = [_at_place(place, x, fill=-jnp.inf, **options) for place in places]
    # The indices are computed from a value, so that they have its sharding on a mesh with explicit axes.
    index = jnp.zeros_like(values[0], index_dtype) + jnp.asarray(_first_inside(**options)[None, None], index_dtype)
    largest = jnp.full_like(values[0], -jnp.inf)
    for i, value in enumerate(values):
        # Among equal maxima, the first one is kept. A NaN counts as larger than any number, and is kept.
        larger = ~(value <= largest) & ~jnp.isnan(largest)
        largest = jnp.where(larger, value, largest)
        index = jnp.where(larger, jnp.asarray(i, index_dtype), index)
    return largest, index


def _first_inside(*, window, stride, padding, input_size):
    """Return, for each window, the index of its first position that is not in the padding, `(P, Q)`.

    The search for the maximum starts with this index. A window in which every element is -inf then keeps it, and does
    not select a position in the padding.
    """
    rows, columns = output_size(input_size=input_size, window=window, stride=stride, padding=padding)
    first = [
        np.maximum(0, before - np.arange(n) * s)
        for n, s, (before, _) in zip((rows, columns), stride, padding, strict=True)
    ]
    return first[0][:, None] * window[1] + first[1][None, :]


def autodiff(x, *, window, stride, padding, input_size):
    y = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *window), (1, 1, *stride), ((0, 0), (0, 0), *padding))
    options = dict(window=window, stride=stride, padding=padding, input_size=input_size)
    return y, max_and_indices(lax.stop_gradient(x), **options)[1]


def _save(x, **options):
    y, indices = barriers.on_cpu(max_and_indices(x, **options))
    return (y, indices), (indices,)


def select(x, indices, **options):
    """Return the value at the selected position of each window, or 0 where the index lies outside of the window."""
    places = enumerate(_places(options["window"]))
    return sum(jnp.where(indices == i, _at_place(place, x, fill=0, **options), 0) for i, place in places)


def _scatter_by_autodiff(dy, indices, **options):
    return transpose(lambda x: select(x, indices, **options), (*dy.shape[:2], *options["input_size"]), dy)


def scatter_formula(dy, indices, **options):
    """Return dx, in which the gradient of each window is added at the position of the window's maximum."""
    if is_nonoverlapping(**options):
        return _fetch_from_windows(dy, indices, window=options["window"])
    return _send_to_places(dy, indices, **options)


def _send_to_places(dy, indices, *, window, stride, padding, input_size):
    zero = jnp.zeros((), dy.dtype)
    # Windows may overlap, so dx is a sum, in float32 or wider.
    dx = jnp.zeros((*dy.shape[:2], *input_size), wide(dy.dtype))
    for i, place in enumerate(_places(window)):
        # dy is spaced out by the stride and shifted, so that each gradient lies at position `place` of its window.
        spread = [
            (at - before, size - (at - before) - ((n - 1) * s + 1), s - 1)
            for at, (before, _), size, n, s in zip(place, padding, input_size, dy.shape[2:], stride, strict=True)
        ]
        dx += lax.pad(jnp.where(indices == i, dy, zero), zero, [(0, 0, 0), (0, 0, 0), *spread]).astype(dx.dtype)
    return dx.astype(dy.dtype)


def _fetch_from_windows(dy, indices, *, window):
    """Return dx for windows that do not overlap. Each element of dx is the gradient of the only window that contains
    its position, or 0 if the maximum is elsewhere.

    On a GPU, XLA compiles this to one pass, which is as fast as a copy.
    """
    place = np.arange(window[0] * window[1], dtype=np.int32).reshape(window[0], 1, window[1])
    dy, indices = (a[:, :, :, None, :, None] for a in (dy, indices.astype(jnp.int32)))
    dx = jnp.where(indices == place, dy, jnp.zeros((), dy.dtype))
    N, C, P, R, Q, S = dx.shape
    return dx.reshape(N, C, P * R, Q * S)


def _scatter_kernel(dy, indices, **options):
    if is_nonoverlapping(**options):  # XLA was faster than every kernel tried
        return _fetch_from_windows(dy, indices, window=options["window"])
    before = tuple(before for before, _ in options["padding"])
    dx_last = kernels.scatter_gradients(batch_last(dy), batch_last(indices), **options | dict(padding=before))
    return batch_first(dx_last, dy.shape[0])


_MAX_POOL2D_BACKWARD = Op(
    "max_pool2d_backward",
    {
        "autodiff": _scatter_by_autodiff,
        "xla": scatter_formula,
        "pallas": differentiable(_scatter_kernel, scatter_formula, batched(0, 1)),
    },
    unsupported=checks.unsupported_dtype,
    # On NCHW images, the kernel needs transposes of its arrays, which take more time than the kernel saves.
    default=DefaultImplementation(gpu="xla"),
    jit=True,
)


_MAX_POOL2D = Pair(
    autodiff,
    _MAX_POOL2D_BACKWARD,
    save=_save,
    has_aux=True,
    name="max_pool2d",
    unsupported=checks.unsupported_dtype,
    default=_MAX_POOL2D_BACKWARD.default,
    jit=True,
)


def max_pool2d(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    stride: Size | None = None,
    padding: Padding = 0,
    implementation: Implementation = None,
) -> Float[Array, "batch channels out_height out_width"]:
    """Max-pooling: `y[n, c, i, j] = max over u, v of x[n, c, i s + u - p, j s + v - p]`, where s is the stride and p
    the padding.

    Args:
      x: images, NCHW.
      window: height and width of the windows, an int or a pair.
      stride: an int or a pair. None means the size of the window.
      padding: the number of -inf on each side, as an int or as a pair for rows and columns; or "SAME" or "VALID". It
        must be less than the window.
      implementation: "pallas", "xla", "autodiff", or None for the fastest. If every position is in exactly one window,
        "pallas" uses XLA, which is as fast as a copy.

    Returns:
      y, in x's dtype. Its height is `(height + 2 p - window) // s + 1`, and its width follows in the same way. The
      maximum of a window with a NaN is NaN. The gradient goes to the first of equal maxima in row-major order, or to
      the first NaN. With "autodiff", XLA decides where the gradient of a window with NaN goes, which may be another
      position.

    Raises:
      TypeError: x is not floating.
      ValueError: shapes or options do not fit.

    Source: K. Yamaguchi et al., "A neural network for speaker-independent isolated word recognition", ICSLP 1990.
    """
    return pool("max_pool2d", x, window, stride, padding, implementation)[0]


def max_pool2d_with_indices(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    stride: Size | None = None,
    padding: Padding = 0,
    implementation: Implementation = None,
) -> tuple[Float[Array, "batch channels out_height out_width"], Integer[Array, "batch channels out_height out_width"]]:
    """Return the result of `max_pool2d` and the index of each maximum in its window.

    Args:
      As in `max_pool2d`.

    Returns:
      (y, indices). indices has the position of the first maximum (or NaN) in each window, as `u * window_width + v` for
      row u and column v of the window. It is uint8 for windows of up to 256 positions, else int32, and has no gradient.

    Raises:
      TypeError, ValueError: as in `max_pool2d`.
    """
    return pool("max_pool2d_with_indices", x, window, stride, padding, implementation)


def max_pool2d_backward(
    dy: Float[AnyArray, "batch channels out_height out_width"],
    indices: Integer[AnyArray, "batch channels out_height out_width"],
    input_size: tuple[int, int],
    window: Size,
    *,
    stride: Size | None = None,
    padding: Padding = 0,
    implementation: Implementation = None,
) -> Float[Array, "batch channels height width"]:
    """Gradient of `max_pool2d`: `dx[n, c, h, l] = Σ dy[n, c, i, j]` over the windows whose maximum is at (h, l).

    Args:
      dy: gradient with respect to y.
      indices: as returned by `max_pool2d_with_indices`. A gradient whose index lies outside of the window is dropped.
      input_size: height and width of x, which y does not determine.
      window, stride, padding: as in the forward.

    Returns:
      dx, in dy's dtype.

    Raises:
      TypeError, ValueError: as in `max_pool2d`.

    Source: M. Zeiler, G. Taylor and R. Fergus, "Adaptive deconvolutional networks", ICCV 2011 (switches).
    """
    op = "max_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    input_size = checks.pair(op, "input_size", input_size)
    options = pool_options(op, input_size, window, stride, padding)
    checks.shape(op, "dy", dy, "batch", "channels", *output_size(**options))
    indices = check_indices(op, "indices", indices, dy.shape)
    return _MAX_POOL2D_BACKWARD(dy, indices, implementation=implementation, **options)


def pool(op, x, window, stride, padding, implementation):
    (x,) = checks.floating(op, x=x)
    checks.shape(op, "x", x, "batch", "channels", "height", "width")
    return _MAX_POOL2D.named(op)(
        x, implementation=implementation, **pool_options(op, x.shape[2:], window, stride, padding)
    )


def check_indices(op, name, indices, shape):
    """Return the indices as an array, after checking that they are integers of `shape`."""
    if not hasattr(indices, "dtype") or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} is {getattr(indices, 'dtype', type(indices).__name__)}; wants integers")
    checks.shape(op, name, indices, *shape)
    return jnp.asarray(indices)
