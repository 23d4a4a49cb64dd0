"""One-dimensional convolution over sequences. It is `conv2d` on images with one row, unless it is depthwise."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.windows import Padding, output_size
from jaxbp.ops.conv import _depthwise_conv1d as depthwise
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv import conv2d
from jaxbp.ops.conv._conv2d_checks import check_shapes
from jaxbp.ops.conv._layouts import DimensionNumbers
from jaxbp.pairing import Implementation
from jaxbp.pairing.gradients import in_dtypes_of


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
    layout = layouts.dimension_numbers(op, dimension_numbers, spatial_axes=1)
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    x_shape, w_shape, options = check_shapes(op, x, w, b, layout, **given)
    if depthwise.applies(x_shape, w_shape, **options):
        return depthwise.convolve(op, x, w, b, layout, implementation, **options)
    x, w = layouts.arranged(x, layout.lhs_spec), layouts.arranged(w, layout.rhs_spec)
    y = conv2d.CONV2D.named(op)(_row(x), _row(w), b, implementation=implementation, **_of_row(options))
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
    layout = layouts.dimension_numbers(op, dimension_numbers, spatial_axes=1)
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    x_shape, w_shape, options = check_shapes(op, x, w, None, layout, **given)
    size = output_size(x_shape[2:], w_shape[2:], **options)
    layouts.check_shape(op, "dy", dy, layout.out_spec, x_shape[0], w_shape[0], *size)
    if depthwise.applies(x_shape, w_shape, **options):
        gradients = depthwise.gradients(op, dy, x, w, layout, implementation, **options)
        return in_dtypes_of(arguments, gradients)
    dy, x, w = map(layouts.arranged, (dy, x, w), (layout.out_spec, layout.lhs_spec, layout.rhs_spec))
    arrays = _row(dy), _row(x), _row(w), jnp.zeros(w.shape[:1], w.dtype)
    dx, dw, db = conv2d.CONV2D.vjp.named(op)(*arrays, implementation=implementation, **_of_row(options))
    dx, dw = lax.squeeze(dx, (2,)), lax.squeeze(dw, (2,))
    gradients = layouts.restore(dx, layout.lhs_spec), layouts.restore(dw, layout.rhs_spec), db
    return in_dtypes_of(arguments, gradients)


def _row(a):
    return a.reshape(*a.shape[:2], 1, *a.shape[2:])  # the gradient of `lax.expand_dims` would sum over the new axis


def _of_row(options: dict[str, Any]) -> dict[str, Any]:
    one_row = dict(stride=(1,), dilation=(1,), padding=((0, 0),))
    return options | {name: (*row, *options[name]) for name, row in one_row.items()}
