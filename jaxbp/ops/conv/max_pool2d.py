"""Max-pooling: the forward keeps the position of each maximum, and the backward adds the gradient there."""

from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.export import is_symbolic_dim
from jaxtyping import Float, Integer

from jaxbp.common import barriers, checks
from jaxbp.common.cases import ANY_POOL, BATCH, Argument, Entry, block_cases, case_of, indices_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import limit, wide
from jaxbp.common.windows import PoolOptions, Size, arange, dilated, pool_windows, unsupported, with_pool_options
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, formula_and_kernel, transpose
from pallas_kernels.conv import max_pool2d as kernels
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.pointwise.elementwise import unsupported_indices


def _at_place(place, x, windows, fill):
    # JAX cannot slice an axis of symbolic size with a stride, and gathers only along axes that cannot be empty.
    symbolic = any(map(is_symbolic_dim, windows.output_size))
    padding = [(before, after + symbolic) for before, after in windows.padding]
    x = jnp.pad(x, ((0, 0), (0, 0), *padding), constant_values=fill)
    sides = list(zip(place, windows.output_size, windows.stride, windows.dilation, strict=True))
    if symbolic:
        rows, columns = (at * d + jnp.arange(n) * s for at, n, s, d in sides)
        return x[:, :, rows[:, None], columns]
    rows, columns = (slice(at * d, at * d + (n - 1) * s + 1, s) for at, n, s, d in sides)
    return x[:, :, rows, columns]


def max_and_indices(x, *, windows):
    places = list(np.ndindex(windows.window))
    index_dtype = jnp.uint8 if len(places) <= 256 else jnp.int32
    least = limit(x.dtype, -jnp.inf)
    values = [_at_place(place, x, windows, least) for place in places]
    # On a mesh with explicit axes, indices that are computed from a value have the value's sharding.
    index = jnp.zeros_like(values[0], index_dtype) + jnp.asarray(_first_inside(windows)[None, None], index_dtype)
    largest = jnp.full_like(values[0], least)
    for i, value in enumerate(values):
        larger = ~(value <= largest) & ~jnp.isnan(largest)
        largest = jnp.where(larger, value, largest)
        index = jnp.where(larger, jnp.asarray(i, index_dtype), index)
    return largest, index


def _first_inside(windows):
    """Return the row-major index of each window's first position outside of the padding, `(out_height, out_width)`."""
    # A window of only -inf selects this position.
    first = [
        (-(-(before - arange(n) * s) // d)).clip(0, f - 1)
        for n, f, s, d, (before, _) in zip(
            windows.output_size, windows.window, windows.stride, windows.dilation, windows.padding, strict=True
        )
    ]
    return first[0][:, None] * windows.window[1] + first[1][None, :]


def autodiff(x, *, windows, channels_last=False):
    _, indices = max_and_indices(lax.stop_gradient(x), windows=windows)
    least = limit(x.dtype, -jnp.inf)
    if windows.dilation == (1, 1):
        return lax.reduce_window(x, least, lax.max, **windows.arguments()), indices
    return select(x, indices, windows=windows, fill=least), indices  # JAX has no gradient of dilated windows


def _save(x, *, windows, channels_last):
    y, indices = barriers.on_cpu(max_and_indices(x, windows=windows))
    return (y, indices), (indices,)


def select(x, indices, *, windows, fill=0):
    """Return the element of x at the position that `indices` gives for each window, or 0 if a window has no such
    position. `fill` pads x."""
    places = enumerate(np.ndindex(windows.window))
    return sum(jnp.where(indices == i, _at_place(place, x, windows, fill), 0) for i, place in places)


def _scatter_by_autodiff(dy, indices, *, windows, channels_last):
    return transpose(lambda x: select(x, indices, windows=windows), (*dy.shape[:2], *windows.input_size), dy)


def scatter_formula(dy, indices, *, windows, channels_last=False):
    if windows.nonoverlapping:
        return _fetch_from_windows(dy, indices, windows.window)
    return _send_to_places(dy, indices, windows)


def _send_to_places(dy, indices, windows):
    zero = jnp.zeros((), dy.dtype)
    sizes = [size + sum(p) for size, p in zip(windows.input_size, windows.padding, strict=True)]
    # Windows may overlap, so dx is a sum over windows, in float32 or wider.
    dx = jnp.zeros((*dy.shape[:2], *sizes), wide(dy.dtype))
    sides = list(zip(sizes, dilated(dy.shape[2:], windows.stride), windows.stride, windows.dilation, strict=True))
    for i, place in enumerate(np.ndindex(windows.window)):
        spread = [(at * d, size - at * d - reach, s - 1) for at, (size, reach, s, d) in zip(place, sides, strict=True)]
        dx += lax.pad(jnp.where(indices == i, dy, zero), zero, [(0, 0, 0), (0, 0, 0), *spread]).astype(dx.dtype)
    # If the loop's paddings were negative, XLA would fail on a mesh that divides the image.
    crop = [(-before, -after, 0) for before, after in windows.padding]
    return lax.pad(dx.astype(dy.dtype), zero, [(0, 0, 0), (0, 0, 0), *crop])


def _fetch_from_windows(dy, indices, window):
    place = np.arange(window[0] * window[1], dtype=np.int32).reshape(1, 1, 1, window[0], 1, window[1])
    dy, indices = (a[:, :, :, None, :, None] for a in (dy, indices.astype(jnp.int32)))
    dx = jnp.where(indices == place, dy, jnp.zeros((), dy.dtype))
    N, C, P, R, Q, S = dx.shape
    return dx.reshape(N, C, P * R, Q * S)


def _scatter_kernel(dy, indices, *, windows, channels_last):
    options = dict(input_size=windows.input_size, window=windows.window)
    if not windows.adjacent:
        before = tuple(before for before, _ in windows.padding)
        arrays = batch_last(dy), batch_last(indices)
        dx_last = kernels.scatter_gradients(*arrays, stride=windows.stride, padding=before, **options)
        return batch_first(dx_last, dy.shape[0])
    if not channels_last:
        return kernels.scatter_to_windows(dy, indices, **options)
    # XLA cancels these transposes against the transposes of the op's arguments and result.
    dy, indices = (jnp.moveaxis(a, 1, -1) for a in (dy, indices))
    return jnp.moveaxis(kernels.scatter_to_windows(dy, indices, **options, channels_last=True), -1, 1)


def _unsupported(*arrays, windows, channels_last):
    return (
        unsupported(windows)
        or checks.unsupported_dtype(*arrays)
        or unsupported_indices((*arrays[0].shape[:2], *windows.input_size))
    )


_MAX_POOL2D_BACKWARD = Op(
    "max_pool2d_backward",
    {"autodiff": _scatter_by_autodiff} | formula_and_kernel(scatter_formula, _scatter_kernel, "dy", "indices"),
    unsupported=_unsupported,
    # Unless windows are adjacent, the kernel transposes NCHW images, which takes more time than the kernel saves.
    default=DefaultImplementation(gpu="xla"),
    jit=True,
)


_MAX_POOL2D = Pair(
    autodiff,
    _MAX_POOL2D_BACKWARD,
    save=_save,
    has_aux=True,
    name="max_pool2d",
    unsupported=_unsupported,
    default=_MAX_POOL2D_BACKWARD.default,
    jit=True,
)


@with_pool_options
def max_pool2d(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> Float[Array, "batch channels out_height out_width"]:
    """Max-pooling: `y[n, c, i, j] = max over u, v of x[n, c, i s + u d - p, j s + v d - p]`, where s is the stride, d
    the dilation, and p the padding before the first element.

    Args:
      window, stride, dilation: an int, or a pair for rows and columns. A stride of None means the window's size.
      padding: rows and columns of -inf around the image, as in `conv2d`, fewer than `d (window - 1) + 1` on each side.
      ceil_mode: whether the last window may reach beyond the padded input, if it starts in the input or in the padding
        before the input.
      channel_axis: 1 for NCHW, and -1 for NHWC.
      implementation: "pallas" supports no dilation.

    Returns:
      y, in x's dtype and layout. Its height is `(height + padding before and after - d (window - 1) - 1) / s + 1`,
      rounded down, or up if `ceil_mode`. A window's gradient goes to its first NaN, or else to its first maximum in
      row-major order. With `implementation="autodiff"`, XLA chooses the position if the window has a NaN.

    Source: K. Yamaguchi et al., "A neural network for speaker-independent isolated word recognition", ICSLP 1990.
    """
    return pool("max_pool2d", x, window, implementation, **options)[0]


@with_pool_options
def max_pool2d_with_indices(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> tuple[Float[Array, "batch channels out_height out_width"], Integer[Array, "batch channels out_height out_width"]]:
    """Return (y, indices): the result of `max_pool2d`, and the position of each window's first maximum (or NaN).

    A position is `u * window_width + v` for row u and column v of the window: uint8 for windows of up to 256 positions,
    else int32. It has no gradient.
    """
    return pool("max_pool2d_with_indices", x, window, implementation, **options)


@with_pool_options
def max_pool2d_backward(
    dy: Float[AnyArray, "batch channels out_height out_width"],
    indices: Integer[AnyArray, "batch channels out_height out_width"],
    input_size: tuple[int, int],
    window: Size,
    *,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> Float[Array, "batch channels height width"]:
    """Gradient of `max_pool2d`: `dx[n, c, h, l] = Σ dy[n, c, i, j]` over the windows whose maximum is at (h, l), in
    dy's dtype.

    `indices` come from `max_pool2d_with_indices`. Where an index is outside of its window, dy is ignored. `input_size`
    is the height and width of x.

    Source: M. Zeiler et al., "Adaptive deconvolutional networks", ICCV 2011 (switches).
    """
    op = "max_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    windows, _ = pool_windows(op, checks.pair(op, "input_size", input_size), window, **options)
    layout = layouts.of_images(op, **options)
    dy = layouts.arrange(op, "dy", dy, layout, "batch", "channels", *windows.output_size)
    indices = layouts.arrange(op, "indices", integers(op, "indices", indices), layout, *dy.shape)
    of_pool = dict(windows=windows, channels_last=layouts.is_channels_last(layout))
    dx = _MAX_POOL2D_BACKWARD(dy, indices, implementation=implementation, **of_pool)
    return layouts.restore(dx, layout)


def pool(op, x, window, implementation, **options):
    (x,) = checks.numeric(op, x=x)
    layout = layouts.of_images(op, **options)
    x = layouts.arrange(op, "x", x, layout, "batch", "channels", "height", "width")
    windows, _ = pool_windows(op, x.shape, window, **options)
    of_pool = dict(windows=windows, channels_last=layouts.is_channels_last(layout))
    y, indices = _MAX_POOL2D.named(op)(x, implementation=implementation, **of_pool)
    return layouts.restore(y, layout), layouts.restore(indices, layout)


def check_indices(op, name, indices, shape):
    indices = integers(op, name, indices)
    checks.shape(op, name, indices, *shape)
    return indices


def integers(op, name, indices):
    if not hasattr(indices, "dtype") or not jnp.issubdtype(indices.dtype, jnp.integer):
        came = f"has dtype {indices.dtype}" if hasattr(indices, "dtype") else f"is a {type(indices).__name__}"
        raise TypeError(f"{op}: {name} {came}; wants an array of integers")
    return jnp.asarray(indices)


ENTRIES = (
    *(
        Entry(
            function,
            case_of(Argument((1, 2, 5, 6), apart=True), **ANY_POOL),
            block_cases("pool", lambda x, w, z, y: case_of(z, window=2)),
        )
        for function in (max_pool2d, max_pool2d_with_indices)
    ),
    Entry(
        max_pool2d_backward,
        case_of((2, 2, 3, 5), indices_of(2, 2, 3, 5, below=6), input_size=(5, 6), **ANY_POOL),
        {
            **block_cases("pool", lambda x, w, z, y: case_of(y, indices_of(*y, below=4), input_size=z[2:], window=2)),
            "overlapping": case_of(
                *((BATCH, 16, 4, 4), indices_of(BATCH, 16, 4, 4, below=9)),
                **dict(input_size=(8, 8), window=3, stride=2, padding=1),
            ),
        },
    ),
)
