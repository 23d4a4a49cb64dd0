"""One-dimensional convolution over sequences: `conv2d` on images with one row, unless the convolution is depthwise.

A depthwise convolution with stride 1 and without dilation is

    y[n, t, c] = b[c] + Σ_u w[u, c] x[n, t + u - before, c]

where `padding` is `(before, after)`, the zeros at both ends of x's width. `width_axis` is 1 for `(batch, width,
channels)`, which the kernels need, and 2 for `(batch, channels, width)`. On a CPU, sums of shifted sequences are
several times faster than XLA's convolution.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, Argument, Case, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast
from jaxbp.common.windows import Padding, output_size
from jaxbp.ops._defaults import AUTODIFF_ON_GPU, in_float32
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv._layouts import DimensionNumbers
from jaxbp.ops.conv.conv2d import CONV2D, check_shapes
from jaxbp.pairing import DefaultImplementation, Implementation, Pair, differentiable, given_arguments, saving_arguments
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.pairing.mesh import batched
from pallas_kernels.conv import depthwise_conv1d as kernels
from pallas_kernels.core.layouts import LANES


def _forward(x, w, b, *, width_axis, padding):
    y = _sum_of_shifts(upcast(x), upcast(w), width_axis, padding)
    return (y if b is None else y + _along_channels(upcast(b), width_axis)).astype(x.dtype)


def _gradients_formula(dy, x, w, b, *, width_axis, padding):
    (before, after), taps, wide_dy = padding, w.shape[0], upcast(dy)
    dx = _sum_of_shifts(wide_dy, jnp.flip(upcast(w), 0), width_axis, (taps - 1 - before, taps - 1 - after))
    shifts = _shifts(upcast(x), taps, width_axis, padding)
    dw = jnp.stack([jnp.sum(wide_dy * shifted, axis=(0, width_axis)) for shifted in shifts])
    db = None if b is None else jnp.sum(wide_dy, axis=(0, width_axis)).astype(b.dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype), db


def _sum_of_shifts(x, w, width_axis, padding):
    shifts = _shifts(x, w.shape[0], width_axis, padding)
    first, *others = (_along_channels(w[u], width_axis) * shifted for u, shifted in enumerate(shifts))
    return sum(others, first)


def _shifts(x, taps, width_axis, padding):
    x = lax.pad(x, jnp.zeros((), x.dtype), [(*padding, 0) if axis == width_axis else (0, 0, 0) for axis in range(3)])
    size = x.shape[width_axis] - taps + 1
    return [lax.slice_in_dim(x, u, u + size, axis=width_axis) for u in range(taps)]


def _along_channels(a, width_axis):
    return lax.expand_dims(a, (0, width_axis))


def _forward_kernel(x, w, b, *, width_axis, padding):
    if x.size == 0:
        return _forward(x, w, b, width_axis=width_axis, padding=padding)
    before, after = padding
    y = kernels.convolve(_arranged(x, width_axis), _filled(w), _filled(b), before=before, after=after)
    return _restored(y, width_axis, w)


def _gradients_kernel(dy, x, w, b, *, width_axis, padding):
    if x.size == 0:
        return _gradients_formula(dy, x, w, b, width_axis=width_axis, padding=padding)
    (before, after), channels = padding, w.shape[1]
    arrays = _arranged(dy, width_axis), _arranged(x, width_axis), _filled(w), _filled(b)
    dx, dw, db = kernels.gradients(*arrays, before=before, after=after)
    db = None if b is None else db[:channels].astype(b.dtype)
    return _restored(dx, width_axis, w), dw[:, :channels].astype(w.dtype), db


def _arranged(x, width_axis):
    return _filled(x if width_axis == 1 else x.swapaxes(1, 2))


def _restored(y, width_axis, w):
    y = y[..., : w.shape[1]]
    return y if width_axis == 1 else y.swapaxes(1, 2)


def _filled(a):
    return a if a is None else jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % LANES)])


def _unsupported(x, w, b, **options):
    if w.shape[0] > kernels.MAX_FILTER_WIDTH:
        return f"filters of width {w.shape[0]}, only up to {kernels.MAX_FILTER_WIDTH}"
    if reason := checks.unsupported_dtype(x):
        return reason
    channels = w.shape[1]
    is_large = x.size // channels * (channels + -channels % LANES) >= 2**31  # indices have 32 bits
    return "2^31 or more elements" if is_large else None


def _default(*arrays, width_axis, **options):
    # If the width is the last axis, the kernels' transposes take longer than the formula. With the forward in the
    # program, autodiff takes 371 us instead of 429 us for 8 x 5120 x 2048 in float32, but equally long in bfloat16.
    # Without the forward, it takes 314 us instead of 283 us (docs/benchmarks/none.md, docs/benchmarks/conv.md).
    return DefaultImplementation() if width_axis == 1 else in_float32(AUTODIFF_ON_GPU)(*arrays)


def _default_vjp(*arrays, width_axis, **options):
    return DefaultImplementation(gpu="pallas" if width_axis == 1 else "xla")


_DEPTHWISE_CONV1D = Pair(
    _forward,
    {"xla": _gradients_formula, "pallas": _gradients_kernel},
    save={
        "xla": functools.partial(saving_arguments, _forward),
        "pallas": functools.partial(saving_arguments, differentiable(_forward_kernel, _forward, batched("x"))),
    },
    residuals=given_arguments,
    batch_axes=batched("dy", "x"),
    name="conv1d",
    unsupported=_unsupported,
    default=_default,
    default_vjp=_default_vjp,
    jit=True,
)


def _is_depthwise(x_shape, w_shape, *, stride, dilation, groups, **options):
    return 1 < groups == x_shape[1] == w_shape[0] and stride == dilation == (1,)


def _depthwise(op, dy, x, w, b, layout, implementation, padding):
    """Return y, or if dy is given, the gradients."""
    width_axis, (x_layout, y_layout) = 1, ((n, t, c) for n, c, t in (layout.lhs_spec, layout.out_spec))
    if layout.lhs_spec == (0, 1, 2):
        width_axis, x_layout, y_layout = 2, layout.lhs_spec, layout.out_spec
    out_channels, in_channels, width = layout.rhs_spec
    w_layout = width, in_channels, out_channels
    x, w = layouts.arranged(x, x_layout), lax.squeeze(layouts.arranged(w, w_layout), (1,))
    options = dict(width_axis=width_axis, padding=padding[0], implementation=implementation)
    if dy is None:
        return layouts.restore(_DEPTHWISE_CONV1D.named(op)(x, w, b, **options), y_layout)
    dy, b = layouts.arranged(dy, y_layout), jnp.zeros(w.shape[1:], w.dtype)
    dx, dw, db = _DEPTHWISE_CONV1D.vjp.named(op)(dy, x, w, b, **options)
    return layouts.restore(dx, x_layout), layouts.restore(lax.expand_dims(dw, (1,)), w_layout), db


def conv1d(
    x: Float[AnyArray, "batch in_channels width"],
    w: Float[AnyArray, "out_channels in_channels/groups filter_width"],
    b: Float[AnyArray, "out_channels"] | None = None,
    *,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    groups: int = 1,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "batch out_channels out_width"]:
    """Convolution over one axis, without flipping the filter:
    `y[n, k, t] = b[k] + Σ_{c, u} x[n, c, t s + u d - p] w[k, c, u]`, with s, d, and p as in `conv2d`.

    If `groups` equals the numbers of input and output channels, the convolution is depthwise. With stride and dilation
    1, a depthwise convolution is summed in float32 or wider, whatever `precision` is. On a GPU, its kernel is the
    default only with the channels last.

    Args:
      padding: zeros around the sequence: one int; a sequence of one int or one pair (before, after); "SAME",
        "SAME_LOWER", or "VALID"; or "CAUSAL", which adds `d (filter_width - 1)` zeros before the sequence.
      dimension_numbers: the layouts of x, w, and y, by default ("NCW", "OIW", "NCW").
      implementation: "pallas" supports no dilation. It supports groups only if the convolution is depthwise with stride
        1 and a filter_width up to 8.
      Other arguments, dtype, and width: as in `conv2d`.

    Source: as in `conv2d`; A. van den Oord et al., "WaveNet", arXiv:1609.03499 (causal padding).
    """
    op = "conv1d"
    x, w, b = checks.floating(op, x=x, w=w, b=b)
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    layout, x_shape, w_shape, options = check_shapes(op, x, w, b, dimension_numbers, **given, spatial_axes=1)
    if _is_depthwise(x_shape, w_shape, **options):
        return _depthwise(op, None, x, w, b, layout, implementation, options["padding"])
    x, w = layouts.arranged(x, layout.lhs_spec), layouts.arranged(w, layout.rhs_spec)
    y = CONV2D.named(op)(_row(x), _row(w), b, implementation=implementation, **_of_row(options))
    return layouts.restore(lax.squeeze(y, (2,)), layout.out_spec)


def conv1d_backward(
    dy: Float[AnyArray, "batch out_channels out_width"],
    x: Float[AnyArray, "batch in_channels width"],
    w: Float[AnyArray, "out_channels in_channels/groups filter_width"],
    *,
    stride: int = 1,
    padding: Padding = 0,
    dilation: int = 1,
    groups: int = 1,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "batch in_channels width"],
    Float[Array, "out_channels in_channels/groups filter_width"],
    Float[Array, "out_channels"],
]:
    """Gradients of `conv1d` with respect to x, w, and b.

    `dx[n, c, h] = Σ_{k, u} dy[n, k, t] w[k, c, u]` over all u and t with `t s + u d - p = h` (letters as in `conv1d`),
    `dw[k, c, u] = Σ_{n, t} dy[n, k, t] x[n, c, t s + u d - p]`, and `db[k] = Σ_{n, t} dy[n, k, t]`.

    db has the dtype of w.

    Source: Dumoulin and Visin (see `conv2d`), chapter 4.
    """
    op = "conv1d_backward"
    arguments = x, w, w
    dy, x, w = checks.floating(op, dy=dy, x=x, w=w)
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    layout, x_shape, w_shape, options = check_shapes(op, x, w, None, dimension_numbers, **given, spatial_axes=1)
    size = output_size(x_shape[2:], w_shape[2:], **options)
    layouts.check_shape(op, "dy", dy, layout.out_spec, x_shape[0], w_shape[0], *size)
    if _is_depthwise(x_shape, w_shape, **options):
        gradients = _depthwise(op, dy, x, w, None, layout, implementation, options["padding"])
        return in_dtypes_of(arguments, gradients)
    dy, x, w = map(layouts.arranged, (dy, x, w), (layout.out_spec, layout.lhs_spec, layout.rhs_spec))
    arrays = _row(dy), _row(x), _row(w), jnp.zeros(w.shape[:1], w.dtype)
    dx, dw, db = CONV2D.vjp.named(op)(*arrays, implementation=implementation, **_of_row(options))
    dx, dw = lax.squeeze(dx, (2,)), lax.squeeze(dw, (2,))
    gradients = layouts.restore(dx, layout.lhs_spec), layouts.restore(dw, layout.rhs_spec), db
    return in_dtypes_of(arguments, gradients)


def _row(a):
    return a.reshape(*a.shape[:2], 1, *a.shape[2:])  # the gradient of `lax.expand_dims` would sum over the new axis


def _of_row(options: dict[str, Any]) -> dict[str, Any]:
    one_row = dict(stride=(1,), dilation=(1,), padding=((0, 0),))
    return options | {name: (*row, *options[name]) for name, row in one_row.items()}


def _depthwise_case(layout: str, batch: int | str, *sizes: int) -> Case:
    x, channels = (BATCH, *sizes), sizes[layout.index("C") - 1]
    filters, w = ("WIO", (4, 1, channels)) if layout == "NWC" else ("OIW", (channels, 1, 4))
    options = dict(padding="CAUSAL", groups=channels, dimension_numbers=(layout, filters, layout))
    return Case(tuple(map(Argument, (x, x, w, (channels,)))), options, None if batch == BATCH else batch)


# Layouts and sizes in the Mamba models with 130 million and 2.8 billion parameters.
_MAMBA = ("NWC", 8, 2048, 1536), ("NWC", 8, 2048, 5120), ("NCW", 8, 5120, 2048)

ENTRIES = pair_entries(
    conv1d,
    _depthwise_case("NWC", BATCH, 6, 3),
    {
        "sequences": _depthwise_case("NWC", BATCH, 8, 128),
        **{f"{layout} {'x'.join(map(str, size))}": _depthwise_case(layout, *size) for layout, *size in _MAMBA},
    },
    takes=slice(2),
)
