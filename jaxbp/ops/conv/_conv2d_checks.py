from typing import Any

from jax import Array

from jaxbp.common import checks
from jaxbp.common.windows import dilated, per_axis, require_fit, window_padding
from jaxbp.ops.conv import _layouts as layouts

IMAGE_AXES = ("batch", "in_channels", "height", "width")
FILTER_AXES = ("out_channels", "in_channels/groups", "filter_height", "filter_width")


def check(op, x, w, b, layout=None, **options) -> tuple[Array, Array, dict]:
    layout = layouts.dimension_numbers(op, None) if layout is None else layout
    _, _, options = check_shapes(op, x, w, b, layout, **options)
    return layouts.arranged(x, layout.lhs_spec), layouts.arranged(w, layout.rhs_spec), options


def check_shapes(op, x, w, b, layout, *, stride, padding, precision, dilation=1, groups=1) -> tuple[tuple, tuple, dict]:
    spatial = len(layout.lhs_spec) - 2
    w_shape = layouts.check_shape(op, "w", w, layout.rhs_spec, *FILTER_AXES[:2], *FILTER_AXES[-spatial:])
    x_shape = layouts.check_shape(op, "x", x, layout.lhs_spec, *IMAGE_AXES[:2], *IMAGE_AXES[-spatial:])
    check_channels(op, x_shape, w_shape, checks.count(op, "groups", groups), x.shape)
    options = options_of(op, x_shape[2:], w_shape[2:], stride, padding, dilation, groups, precision)
    if b is not None:
        checks.shape(op, "b", b, w_shape[0])
    return x_shape, w_shape, options


def options_of(op, input_size, filter_size, stride, padding, dilation, groups, precision) -> dict[str, Any]:
    stride = per_axis(op, "stride", stride, len(input_size))
    dilation = per_axis(op, "dilation", dilation, len(input_size))
    groups = checks.count(op, "groups", groups)
    extent = dilated(filter_size, dilation)
    padding = window_padding(op, padding, input_size, extent, stride)
    require_fit(op, "filter with its dilation", extent, input_size, padding)
    precision = checks.precision(op, precision)
    return dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)


def check_channels(op, x_shape, w_shape, groups, given=()):
    """Raise an error unless the channels of x (axis 1) and w (axes 0 and 1) fit `groups`.

    `given` is x's shape before a transpose to NCHW, so that the error may suggest NHWC.
    """
    if x_shape[1] != w_shape[1] * groups or w_shape[0] % groups:
        like_nhwc = tuple(given) == tuple(x_shape) and given[-1] in (w_shape[1] * groups, w_shape[-2] * groups)
        names = ("NHWC", "HWIO", "NHWC") if len(w_shape) == 4 else ("NWC", "WIO", "NWC")
        hint = f". If x is {names[0]}, pass dimension_numbers, say {names}" if like_nhwc else ""
        raise ValueError(
            f"{op}: x has {x_shape[1]} channels, w has shape {tuple(w_shape)} and groups is {groups}; wants "
            f"in_channels = groups * w.shape[1], and out_channels a multiple of groups{hint}"
        )
