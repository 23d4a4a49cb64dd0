"""Two-dimensional convolution and its gradients with respect to x, w, and b. The first two are convolutions, too.

Throughout, `d` is the dilation, `s` the stride, and `p` the padding before the first element, per axis. Positions
outside of an array count as zero.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.windows import Padding, Size, dilated, output_size, per_axis, require_fit, window_padding
from jaxbp.ops.conv import _conv2d_kernels as kernels
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv._conv2d_geometry import flip_and_swap, full_padding, reached_padding
from jaxbp.ops.conv._layouts import DimensionNumbers
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, per_implementation, transpose
from jaxbp.sharding import batched


def forward(x, w, b, *, stride, padding, dilation, groups, precision):
    y = lax.conv_general_dilated(
        x,
        w,
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
        precision=precision,
    )
    return y if b is None else y + b[None, :, None, None]


def forward_formula(x, w, b, *, stride, padding, dilation, groups, precision):
    """Compute the same as `forward`, by operations that are fast on a CPU, too."""
    options = dict(padding=padding, precision=precision)
    convolve = functools.partial(
        _convolve,
        window_strides=stride,
        rhs_dilation=dilation,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
        **options,
    )
    if w.shape[1] > 1:
        y = convolve(x, w)
    else:
        multiply = functools.partial(_multiply_columns, stride=stride, dilation=dilation, groups=groups, **options)
        y = lax.platform_dependent(x, w, cpu=multiply, default=convolve)
    return y if b is None else y + b[None, :, None, None]


def _multiply_columns(x, w, *, stride, padding, dilation, groups, precision):
    """Compute the convolution as one matrix product of the filters and shifted copies of the images.

    There is one copy per filter position. It contains the inputs that this filter position is multiplied by.
    """
    out = output_size(x.shape[2:], w.shape[2:], stride=stride, padding=padding, dilation=dilation)
    x = jnp.pad(x, ((0, 0), (0, 0), *padding)).swapaxes(0, 1)
    columns = []
    for place in np.ndindex(w.shape[2:]):
        start = [at * d for at, d in zip(place, dilation, strict=True)]
        stop = [at + (n - 1) * s + 1 for at, n, s in zip(start, out, stride, strict=True)]
        columns.append(lax.slice(x, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *stride)))
    terms, positions = math.prod(w.shape[1:]), math.prod((x.shape[1], *out))
    filters = w.reshape(groups, w.shape[0] // groups, terms)
    y = jnp.matmul(filters, jnp.stack(columns, 1).reshape(groups, terms, positions), precision=precision)
    return y.reshape(w.shape[0], x.shape[1], *out).swapaxes(0, 1)


def _convolve(x, w, *, dimension_numbers, **options):
    """Call `lax.conv_general_dilated`. On a CPU, move the channels to the last axis first.

    Within a loop, a convolution on a CPU is fast only with the channels last.
    """

    def channels_last(x, w):
        x_axes, w_axes, y_axes = dimension_numbers
        x = x.transpose([x_axes.index(axis) for axis in "NHWC"])
        w = w.transpose([w_axes.index(axis) for axis in "HWIO"])
        y = lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
        return y.transpose(["NHWC".index(axis) for axis in y_axes])

    as_it_lies = functools.partial(lax.conv_general_dilated, dimension_numbers=dimension_numbers, **options)
    return lax.platform_dependent(x, w, cpu=channels_last, default=as_it_lies)


def _forward_kernel(x, w, b, **options):
    size = output_size(x.shape[2:], w.shape[2:], **options)
    pays = kernels.product_pays(w, x.shape[2:], size, options["precision"])
    return kernels.forward_product(x, w, b, size, **options) if pays else forward(x, w, b, **options)


# ----------------------------------------------------------------------------------------------- gradient in the input


def _input_gradient_autodiff(dy, w, *, input_size, groups, **options):
    shape = (dy.shape[0], w.shape[1] * groups, *input_size)
    return transpose(lambda x: forward(x, w, None, groups=groups, **options), shape, dy)


def input_gradient_formula(dy, w, *, input_size, stride, padding, dilation, groups, precision):
    options = dict(stride=stride, padding=padding, dilation=dilation)

    def convolve(dy, w):
        return _convolve(
            dy,
            flip_and_swap(w, groups),
            window_strides=(1, 1),
            padding=full_padding(dy.shape[2:], w.shape[2:], input_size, **options),
            lhs_dilation=stride,
            rhs_dilation=dilation,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
            feature_group_count=groups,
            precision=precision,
        )

    def sum_columns(dy, w):
        wide = jnp.promote_types(dy.dtype, jnp.float32)
        multiply = functools.partial(_multiply_columns, w=w.astype(wide), groups=groups, precision=precision, **options)
        return transpose(multiply, (dy.shape[0], groups, *input_size), dy.astype(wide)).astype(dy.dtype)

    return convolve(dy, w) if w.shape[1] > 1 else lax.platform_dependent(dy, w, cpu=sum_columns, default=convolve)


# --------------------------------------------------------------------------------------------- gradient in the weights


def _weights_gradient_autodiff(dy, x, *, filter_size, groups, **options):
    shape = (dy.shape[1], x.shape[1] // groups, *filter_size)
    return transpose(lambda w: forward(x, w, None, groups=groups, **options), shape, dy)


def weights_gradient_formula(dy, x, *, filter_size, stride, padding, dilation, groups, precision):
    # Exchange the channel and batch axes: dw is x correlated with dy, summed over the examples.
    return _convolve(
        x,
        dy,
        window_strides=dilation,
        padding=reached_padding(dy.shape[2:], x.shape[2:], filter_size, stride, padding, dilation),
        rhs_dilation=stride,
        dimension_numbers=("CNHW", "IOHW", "CNHW"),
        batch_group_count=groups,
        precision=precision,
    )


def _parameter_gradients_formula(dy, x, **options):
    return weights_gradient_formula(dy, x, **options), bias_gradient_formula(dy)


# ------------------------------------------------------------------------------------------------ gradient in the bias


def _bias_gradient_autodiff(dy):
    return transpose(lambda b: jnp.broadcast_to(b[:, None, None], dy.shape), dy.shape[1:2], dy)


def bias_gradient_formula(dy):
    return jnp.sum(dy, axis=(0, 2, 3))


# ------------------------------------------------------------------------------------------------------------- pairing


def _unsupported(*arrays, dilation=(1, 1), groups=1, **options):
    if dilation != (1, 1):
        return f"dilation={dilation}"
    if groups != 1:
        return f"groups={groups}"
    return checks.unsupported_dtype(*arrays)


# The default for ops whose kernels are slower than cuDNN, because they need transposes of the NCHW images.
_LIBRARY = DefaultImplementation(gpu="xla")


def _defaults(w, input_size, output_size, precision):
    """Return "pallas" as the default where a product with the filter matrix is faster, and else "xla", which calls
    cuDNN.

    On NCHW images, the kernel in full float32 is slower than cuDNN.
    """
    return DefaultImplementation() if kernels.product_pays(w, input_size, output_size, precision) else _LIBRARY


def _default_forward(x, w, b, **options):
    return _defaults(w, x.shape[2:], output_size(x.shape[2:], w.shape[2:], **options), options["precision"])


def _default_input_gradient(dy, w, *, input_size, precision, **options):
    return _defaults(w, input_size, dy.shape[2:], precision)


_part = functools.partial(Op, unsupported=_unsupported, partitioned=True, jit=True)
_FORWARD = _part(
    "conv2d",
    {"xla": forward_formula, "pallas": differentiable(_forward_kernel, forward_formula, batched(0))},
    default=_default_forward,
)
_INPUT_GRADIENT = _part(
    "conv2d_backward_input",
    {
        "autodiff": _input_gradient_autodiff,
        "xla": input_gradient_formula,
        "pallas": differentiable(kernels.input_gradient, input_gradient_formula, batched(0)),
    },
    default=_default_input_gradient,
)
_WEIGHTS_GRADIENT = _part(
    "conv2d_backward_weights",
    {
        "autodiff": _weights_gradient_autodiff,
        "xla": weights_gradient_formula,
        "pallas": differentiable(kernels.weights_gradient, weights_gradient_formula, batched(0, 1)),
    },
)
_BIAS_GRADIENT = _part(
    "conv2d_backward_bias",
    {
        "autodiff": _bias_gradient_autodiff,
        "xla": bias_gradient_formula,
        "pallas": differentiable(kernels.bias_gradient, bias_gradient_formula, batched(0)),
    },
    default=_LIBRARY,
)
# The gradients with respect to w and b as one op, for arrays where one kernel computes both on the tensor cores.
_PARAMETER_GRADIENTS = _part(
    "conv2d_backward_parameters",
    {
        "xla": _parameter_gradients_formula,
        "pallas": differentiable(kernels.parameter_gradients, _parameter_gradients_formula, batched(0, 1)),
    },
)


def _save(x, w, b, *, implementation, **options):
    return _FORWARD(x, w, b, implementation=implementation, **options), (x, w, b)


def _gradients(dy, x, w, b, *, implementation, **options):
    of_weights = dict(filter_size=w.shape[2:], implementation=implementation, **options)
    if b is not None and _unsupported(dy, **options) is None and kernels.one_pass_pays(dy, x, **of_weights):
        dw, db = _PARAMETER_GRADIENTS(dy, x, **of_weights)
    else:
        dw = _WEIGHTS_GRADIENT(dy, x, **of_weights)
        db = None if b is None else _BIAS_GRADIENT(dy, implementation=implementation)
    return _INPUT_GRADIENT(dy, w, input_size=x.shape[2:], implementation=implementation, **options), dw, db


# If `implementation` is None, the forward and each gradient choose their fastest implementations separately.
_EVERY = ("pallas", "xla", None)
CONV2D = Pair(
    forward,
    Op("conv2d_backward", per_implementation(_gradients, _EVERY), jit=True),
    save=per_implementation(_save, _EVERY),
    name="conv2d",
    linear_in=[(0, 2), (1, 2)],
    unsupported=_unsupported,
    jit=True,
)


IMAGE_AXES = ("batch", "in_channels", "height", "width")
FILTER_AXES = ("out_channels", "in_channels/groups", "filter_height", "filter_width")

# ------------------------------------------------------------------------------------------------------------- public


def conv2d(
    x: Float[AnyArray, "batch in_channels height width"],
    w: Float[AnyArray, "out_channels in_channels/groups filter_height filter_width"],
    b: Float[AnyArray, "out_channels"] | None = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "batch out_channels out_height out_width"]:
    """Convolution without flipping the filter, as usual in deep learning:
    `y[n, k, i, j] = b[k] + Σ_{c, u, v} x[n, c, i s + u d - p, j s + v d - p] w[k, c, u, v]`.

    Args:
      x: images, NCHW.
      w: filters, OIHW.
      b: one bias per output channel, or None.
      stride, dilation: one int, or a pair for rows and columns. `jax.lax.conv_general_dilated` calls them
        window_strides and rhs_dilation.
      padding: zeros around the image: one int; for rows and for columns an int or a pair (before, after); or "SAME",
        "SAME_LOWER", or "VALID". "SAME" gives the input's size divided by the stride, rounded up, with an odd zero
        last. "SAME_LOWER" puts an odd zero first. "VALID" adds none.
      groups: the number of separate groups into which input and output channels are split. JAX calls it
        feature_group_count.
      dimension_numbers: the layouts of x, w, and y, as in `jax.lax.conv_general_dilated`, for example ("NHWC", "HWIO",
        "NHWC"). None means ("NCHW", "OIHW", "NCHW").
      precision: of the products, as in `jax.lax.conv_general_dilated`. The kernels compute in full float32. But if the
        precision permits tensor cores, which it does by default, two things change. Small images are multiplied by a
        matrix of the filters, and a NaN or infinity spreads over its image. On compute capability 9.0, if the stride is
        1, a kernel computes dw and db of shapes that fit its tiles on the tensor cores. Both round float32 to TF32.
      implementation: "pallas" (no dilation, no groups), "xla", "autodiff", or None for the fastest on the platform.
        Under "pallas", cuDNN computes the convolution, and cuBLAS the products with a matrix of the filters.

    Returns:
      y, in x's dtype. Its height is `(height + padding before and after - d (filter_height - 1) - 1) // s + 1`. Its
      width follows in the same way.

    Raises:
      TypeError: arguments that are not of one floating dtype.
      ValueError: shapes or options that do not fit.
      NotImplementedError: "pallas" with arguments that its kernels do not support.

    Source: V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep learning", arXiv:1603.07285.
    """
    x, w, b = checks.floating("conv2d", x=x, w=w, b=b)
    layout = layouts.dimension_numbers("conv2d", dimension_numbers)
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    x, w, options = check("conv2d", x, w, b, layout, **given)
    return layouts.restore(CONV2D(x, w, b, implementation=implementation, **options), layout.out_spec)


def conv2d_backward_input(
    dy: Float[AnyArray, "batch out_channels out_height out_width"],
    w: Float[AnyArray, "out_channels in_channels/groups filter_height filter_width"],
    input_size: tuple[int, int],
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "batch in_channels height width"]:
    """Gradient of `conv2d` with respect to x: `dx[n, c, h, l] = Σ_{k, u, v} dy[n, k, i, j] w[k, c, u, v]` over all u, v
    with `i s + u d - p = h` and `j s + v d - p = l`. This convolves dy, spaced out by the stride, with the filter
    rotated by 180 degrees.

    Args:
      dy: gradient with respect to y.
      w: the filters.
      input_size: height and width of x, which y does not determine.
      Other arguments: as in `conv2d`.

    Returns:
      dx, in dy's dtype.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `conv2d`.

    Source: as in `conv2d`, chapter 4.
    """
    op = "conv2d_backward_input"
    dy, w = checks.floating(op, dy=dy, w=w)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    w = layouts.arrange(op, "w", w, layout.rhs_spec, *FILTER_AXES)
    input_size = checks.pair(op, "input_size", input_size)
    options = _options(op, input_size, w.shape[2:], stride, padding, dilation, groups, precision)
    size = output_size(input_size, w.shape[2:], **options)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, "batch", w.shape[0], *size)
    _check_channels(op, (dy.shape[0], w.shape[1] * groups), w.shape, groups)
    dx = _INPUT_GRADIENT(dy, w, input_size=input_size, implementation=implementation, **options)
    return layouts.restore(dx, layout.lhs_spec)


def conv2d_backward_weights(
    dy: Float[AnyArray, "batch out_channels out_height out_width"],
    x: Float[AnyArray, "batch in_channels height width"],
    filter_size: Size,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    dimension_numbers: DimensionNumbers = None,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "out_channels in_channels/groups filter_height filter_width"]:
    """Gradient of `conv2d` with respect to w:
    `dw[k, c, u, v] = Σ_{n, i, j} dy[n, k, i, j] x[n, c, i s + u d - p, j s + v d - p]`. This is x correlated with dy.

    Args:
      dy: gradient with respect to y.
      x: the input.
      filter_size: height and width of w, which x and y do not determine if the stride skips rows.
      Other arguments: as in `conv2d`.

    Returns:
      dw, in dy's dtype, summed in float32.

    Raises:
      TypeError, ValueError, NotImplementedError: as in `conv2d`.

    Source: as in `conv2d`, chapter 4.
    """
    op = "conv2d_backward_weights"
    dy, x = checks.floating(op, dy=dy, x=x)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    x = layouts.arrange(op, "x", x, layout.lhs_spec, *IMAGE_AXES)
    filter_size = checks.pair(op, "filter_size", filter_size)
    options = _options(op, x.shape[2:], filter_size, stride, padding, dilation, groups, precision)
    size = output_size(x.shape[2:], filter_size, **options)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, x.shape[0], "out_channels", *size)
    _check_channels(op, x.shape, (dy.shape[1], x.shape[1] // groups), groups)
    dw = _WEIGHTS_GRADIENT(dy, x, filter_size=filter_size, implementation=implementation, **options)
    return layouts.restore(dw, layout.rhs_spec)


def conv2d_backward_bias(
    dy: Float[AnyArray, "batch out_channels out_height out_width"],
    *,
    dimension_numbers: DimensionNumbers = None,
    implementation: Implementation = None,
) -> Float[Array, "out_channels"]:
    """Gradient of `conv2d` with respect to b: `db[k] = Σ_{n, i, j} dy[n, k, i, j]`.

    Args:
      dy: gradient with respect to y.
      dimension_numbers: as in `conv2d`. Only the layout of y is used.

    Returns:
      db, in dy's dtype, summed in float32.

    Raises:
      TypeError, ValueError: dy is not floating, or does not have four axes.
    """
    op = "conv2d_backward_bias"
    (dy,) = checks.floating(op, dy=dy)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, "batch", "out_channels", "out_height", "out_width")
    return _BIAS_GRADIENT(dy, implementation=implementation)


def check(op, x, w, b, layout=None, *, stride, padding, precision, dilation=1, groups=1) -> tuple[Array, Array, dict]:
    """Check the arguments of a convolution over one or two spatial axes. Return x and w with the channels
    before the spatial axes, and the options as `_options` does. `layout` is the result of `layouts.dimension_numbers`.
    """
    layout = layouts.dimension_numbers(op, None) if layout is None else layout
    given, spatial = x.shape, len(layout.lhs_spec) - 2
    w = layouts.arrange(op, "w", w, layout.rhs_spec, *FILTER_AXES[:2], *FILTER_AXES[-spatial:])
    x = layouts.arrange(op, "x", x, layout.lhs_spec, *IMAGE_AXES[:2], *IMAGE_AXES[-spatial:])
    _check_channels(op, x.shape, w.shape, checks.count(op, "groups", groups), given)
    options = _options(op, x.shape[2:], w.shape[2:], stride, padding, dilation, groups, precision)
    if b is not None:
        checks.shape(op, "b", b, w.shape[0])
    return x, w, options


def _options(op, input_size, filter_size, stride, padding, dilation, groups, precision) -> dict[str, Any]:
    """Return the options, with one stride, one dilation, and one padding (before, after) per axis."""
    stride = per_axis(op, "stride", stride, len(input_size))
    dilation = per_axis(op, "dilation", dilation, len(input_size))
    groups = checks.count(op, "groups", groups)
    extent = dilated(filter_size, dilation)
    padding = window_padding(op, padding, input_size, extent, stride)
    require_fit(op, "filter with its dilation", extent, input_size, padding)
    precision = checks.precision(op, precision)
    return dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)


def _check_channels(op, x_shape, w_shape, groups, given=()):
    """Require that the channels of x and w fit. If x, whose shape is `given` in the caller's layout, would fit with the
    channels on its last axis, the error says so."""
    if x_shape[1] != w_shape[1] * groups or w_shape[0] % groups:
        like_nhwc = tuple(given) == tuple(x_shape) and given[-1] in (w_shape[1] * groups, w_shape[-2] * groups)
        names = ("NHWC", "HWIO", "NHWC") if len(w_shape) == 4 else ("NWC", "WIO", "NWC")
        hint = f". If x is {names[0]}, pass dimension_numbers, say {names}" if like_nhwc else ""
        raise ValueError(
            f"{op}: x has {x_shape[1]} channels, w has shape {tuple(w_shape)} and groups is {groups}; wants "
            f"in_channels = groups * w.shape[1], and out_channels a multiple of groups{hint}"
        )
