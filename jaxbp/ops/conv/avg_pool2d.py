"""Average-pooling."""

from typing import Unpack

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import ANY_POOL, BATCH, Entry, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import cast_like, upcast
from jaxbp.common.windows import PoolOptions, Size, arange, pool_windows, unsupported, with_pool_options
from jaxbp.ops._defaults import fused_pair, xla_and_pallas
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv._conv2d_formulas import full_padding
from jaxbp.pairing import Implementation
from pallas_kernels.conv.conv2d import correlate
from pallas_kernels.core.arrays import batch_first, batch_last


def _forward(x, *, windows, counted, shape):
    total = lax.reduce_window(upcast(x), 0.0, lax.add, **windows.arguments())
    return cast_like(total / _counts(windows, counted, total.dtype), x)


def _counts(windows, counted, dtype):
    """Return how many positions of each window are inside of the input, extended by the padding `counted`."""
    if counted == windows.padding:
        return windows.positions
    rows, columns = (
        ((at >= -before) & (at < size + after)).sum(1)
        for at, size, (before, after) in zip(_positions(windows), windows.input_size, counted, strict=True)
    )
    counts = rows[:, None] * columns
    # If no position of a dilated window counts, its mean is NaN.
    is_constant = isinstance(counts, np.ndarray) and (counts == counts[0, 0]).all()
    return int(counts[0, 0]) if is_constant else jnp.asarray(counts[None, None], dtype)


def _positions(windows):
    sides = zip(windows.output_size, windows.window, windows.stride, windows.padding, windows.dilation, strict=True)
    return [arange(n)[:, None] * s - before + np.arange(f) * d for n, f, s, (before, _), d in sides]


def _spread(dy, windows):
    """Return dy, spaced out by the stride, so that summing it over one window per input position gives dx."""
    options = dict(stride=windows.stride, padding=windows.padding, dilation=windows.dilation)
    sides = full_padding(dy.shape[2:], windows.window, windows.input_size, **options)
    edges = [(low, high, s - 1) for (low, high), s in zip(sides, windows.stride, strict=True)]
    return lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), (0, 0, 0), *edges])


def _gradient(dy, *, windows, counted, shape):
    share = upcast(dy)
    spread = _spread(share / _counts(windows, counted, share.dtype), windows)
    sums = windows.arguments() | dict(window_strides=(1, 1, 1, 1), padding="VALID")
    return lax.reduce_window(spread, 0.0, lax.add, **sums).astype(dy.dtype)


def _gradient_kernel(dy, *, windows, counted, shape):
    counts = _counts(windows, counted, jnp.float32)
    # With weights 1 / counts, the kernel reads dy without a copy in float32.
    share, weight = (dy, 1 / counts) if isinstance(counts, int) else (upcast(dy) / counts, 1.0)
    spread = _spread(share, windows)
    images = batch_last(spread.reshape(-1, 1, *spread.shape[2:]))
    dx = correlate(images, jnp.full((1, 1, *windows.window), weight, jnp.float32))
    return batch_first(dx, dy.shape[0] * dy.shape[1]).reshape(shape).astype(dy.dtype)


def _unsupported(*arrays, windows, **options):
    return unsupported(windows) or checks.unsupported(*arrays)


def _global_forward(x, *, shape):
    return jnp.mean(upcast(x), axis=(2, 3)).astype(x.dtype)


def _global_gradient(elementwise, sum_over, dy, *, shape):
    return elementwise(lambda dy: dy / (shape[2] * shape[3]), dy[:, :, None, None], shape=shape)


_AVG_POOL2D = fused_pair(
    _forward, {"xla": _gradient, "pallas": _gradient_kernel}, linear=True, name="avg_pool2d", unsupported=_unsupported
)
_GLOBAL_AVG_POOL2D = fused_pair(
    _global_forward, xla_and_pallas(_global_gradient), linear=True, name="global_avg_pool2d"
)


@with_pool_options
def avg_pool2d(
    x: Float[AnyArray, "batch channels height width"],
    window: Size,
    *,
    count_include_pad: bool = True,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> Float[Array, "batch channels out_height out_width"]:
    """Average-pooling, `y[n, c, i, j] = 1/m Σ over u, v of x[n, c, i s + u d - p, j s + v d - p]`, with s, d, and p as
    in `max_pool2d`, and m the number of positions that count.

    Args:
      count_include_pad: whether positions in the padding count. Positions that `ceil_mode` adds never count.
      Other arguments, dtype, and shape: as in `max_pool2d`, but the padding is 0 instead of -inf.

    Source: Y. LeCun et al., "Gradient-based learning applied to document recognition", 1998.
    """
    op = "avg_pool2d"
    checks.refuse_booleans(op, "x", x)  # JAX does not sum booleans in windows
    (x,) = checks.floating(op, x=x)
    layout = layouts.of_images(op, **options)
    x = layouts.arrange(op, "x", x, layout, "batch", "channels", "height", "width")
    options_of_pair = _options(op, x.shape, window, count_include_pad, options)
    y = _AVG_POOL2D(x, implementation=implementation, shape=x.shape, **options_of_pair)
    return layouts.restore(y, layout)


@with_pool_options
def avg_pool2d_backward(
    dy: Float[AnyArray, "batch channels out_height out_width"],
    input_size: tuple[int, int],
    window: Size,
    *,
    count_include_pad: bool = True,
    implementation: Implementation = None,
    **options: Unpack[PoolOptions],
) -> Float[Array, "batch channels height width"]:
    """Gradient of `avg_pool2d`: `dx[n, c, h, l] = Σ 1/m dy[n, c, i, j]` over the windows (i, j) that contain (h, l),
    where m counts the positions of window (i, j) as in `avg_pool2d`. `input_size` is the height and width of x."""
    op = "avg_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    options_of_pair = _options(op, checks.pair(op, "input_size", input_size), window, count_include_pad, options)
    windows = options_of_pair["windows"]
    layout = layouts.of_images(op, **options)
    dy = layouts.arrange(op, "dy", dy, layout, "batch", "channels", *windows.output_size)
    shape = (*dy.shape[:2], *windows.input_size)
    dx = _AVG_POOL2D.vjp(dy, implementation=implementation, shape=shape, **options_of_pair)
    return layouts.restore(dx, layout)


def _options(op, shape, window, count_include_pad, options):
    windows, padding = pool_windows(op, shape, window, **options)
    include = checks.boolean(op, "count_include_pad", count_include_pad)
    return dict(windows=windows, counted=padding if include else ((0, 0), (0, 0)))


def global_avg_pool2d(
    x: Float[AnyArray, "batch channels height width"], *, channel_axis: int = 1, implementation: Implementation = None
) -> Float[Array, "batch channels"]:
    """Mean of each channel's image, `y[n, c] = 1/(H W) Σ over h, l of x[n, c, h, l]`.

    `channel_axis` is as in `max_pool2d`.

    Source: M. Lin et al., "Network in network", ICLR 2014.
    """
    op = "global_avg_pool2d"
    (x,) = checks.floating(op, x=x)
    layout = layouts.of_images(op, channel_axis=channel_axis)
    x = layouts.arrange(op, "x", x, layout, "batch", "channels", "height", "width")
    return _GLOBAL_AVG_POOL2D(x, implementation=implementation, shape=x.shape)


def global_avg_pool2d_backward(
    dy: Float[AnyArray, "batch channels"],
    input_size: tuple[int, int],
    *,
    channel_axis: int = 1,
    implementation: Implementation = None,
) -> Float[Array, "batch channels height width"]:
    """Gradient of `global_avg_pool2d`: `dx[n, c, h, l] = dy[n, c] / (H W)`, where H and W are the `input_size`."""
    op = "global_avg_pool2d_backward"
    (dy,) = checks.floating(op, dy=dy)
    checks.shape(op, "dy", dy, "batch", "channels")
    layout = layouts.of_images(op, channel_axis=channel_axis)
    shape = (*dy.shape, *checks.pair(op, "input_size", input_size))
    return layouts.restore(_GLOBAL_AVG_POOL2D.vjp(dy, implementation=implementation, shape=shape), layout)


ENTRIES = (
    Entry(
        avg_pool2d,
        case_of((1, 2, 5, 6), **ANY_POOL),
        {"pool1": case_of((BATCH, 6, 24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(
        avg_pool2d_backward,
        case_of((1, 2, 3, 5), input_size=(5, 6), **ANY_POOL),
        {"pool1": case_of((BATCH, 6, 12, 12), input_size=(24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(global_avg_pool2d, case_of((2, 3, 2, 4)), {"images": case_of((BATCH, 16, 8, 8))}, like="divide"),
    Entry(
        global_avg_pool2d_backward,
        case_of((2, 3), input_size=(2, 4)),
        {"images": case_of((BATCH, 16), input_size=(8, 8))},
        like="divide",
    ),
)
