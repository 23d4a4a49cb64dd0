"""Two-dimensional convolution."""

import functools

from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.windows import Padding, Size, output_size
from jaxbp.ops.conv import _conv2d_formulas as formulas
from jaxbp.ops.conv import _conv2d_kernels as kernels
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv._conv2d_checks import FILTER_AXES, IMAGE_AXES, check, check_channels, options_of
from jaxbp.ops.conv._layouts import DimensionNumbers
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, per_implementation
from jaxbp.pairing.mesh import batched


def _forward_kernel(x, w, b, **options):
    size = output_size(x.shape[2:], w.shape[2:], **options)
    pays = kernels.product_pays(w, x.shape[2:], size, options["precision"])
    return kernels.forward_product(x, w, b, size, **options) if pays else formulas.forward(x, w, b, **options)


def _unsupported(*arrays, dilation=(1, 1), groups=1, **options):
    if dilation != (1, 1):
        return f"dilation={dilation}"
    if groups != 1:
        return f"groups={groups}"
    return checks.unsupported_dtype(*arrays)


# cuDNN is faster, because the kernels need transposes of the NCHW images.
_LIBRARY = DefaultImplementation(gpu="xla")


def _default_forward(x, w, b, **options):
    size = output_size(x.shape[2:], w.shape[2:], **options)
    pays = kernels.product_pays(w, x.shape[2:], size, options["precision"])
    return DefaultImplementation() if pays else _LIBRARY


def _default_input_gradient(dy, w, *, input_size, precision, **options):
    options |= dict(input_size=input_size, precision=precision)
    formula = functools.partial(formulas.input_gradient_formula, **options)
    if not kernels.product_pays(w, input_size, dy.shape[2:], precision):
        return formula(dy, w)
    # cuBLAS computes this product faster than the kernel.
    product = functools.partial(kernels.input_gradient_product, **options)
    return lax.platform_dependent(dy, w, cuda=product, default=formula)


_part = functools.partial(Op, unsupported=_unsupported, partitioned=True, jit=True)
_FORWARD = _part(
    "conv2d",
    {"xla": formulas.forward_formula, "pallas": differentiable(_forward_kernel, formulas.forward_formula, batched(0))},
    default=_default_forward,
)
_INPUT_GRADIENT = _part(
    "conv2d_backward_input",
    {
        "autodiff": formulas.input_gradient_autodiff,
        "xla": formulas.input_gradient_formula,
        "pallas": differentiable(kernels.input_gradient, formulas.input_gradient_formula, batched(0)),
        None: _default_input_gradient,
    },
)
_WEIGHTS_GRADIENT = _part(
    "conv2d_backward_weights",
    {
        "autodiff": formulas.weights_gradient_autodiff,
        "xla": formulas.weights_gradient_formula,
        "pallas": differentiable(kernels.weights_gradient, formulas.weights_gradient_formula, batched(0, 1)),
    },
)
_BIAS_GRADIENT = _part(
    "conv2d_backward_bias",
    {
        "autodiff": formulas.bias_gradient_autodiff,
        "xla": formulas.bias_gradient_formula,
        "pallas": differentiable(kernels.bias_gradient, formulas.bias_gradient_formula, batched(0)),
    },
    default=_LIBRARY,
)
_PARAMETER_GRADIENTS = _part(
    "conv2d_backward_parameters",
    {
        "xla": formulas.parameter_gradients_formula,
        "pallas": differentiable(kernels.parameter_gradients, formulas.parameter_gradients_formula, batched(0, 1)),
    },
)


def _save(x, w, b, *, implementation, **options):
    return _FORWARD(x, w, b, implementation=implementation, **options), (x, w, b)


def _gradients(dy, x, w, b, *, implementation, **options):
    of_weights = dict(filter_size=w.shape[2:], implementation=implementation, **options)
    supported = _PARAMETER_GRADIENTS.unsupported(dy, x, **options) is None
    if b is not None and supported and kernels.one_pass_pays(dy, x, **of_weights):
        dw, db = _PARAMETER_GRADIENTS(dy, x, **of_weights)
    else:
        dw = _WEIGHTS_GRADIENT(dy, x, **of_weights)
        db = None if b is None else _BIAS_GRADIENT(dy, implementation=implementation)
    return _INPUT_GRADIENT(dy, w, input_size=x.shape[2:], implementation=implementation, **options), dw, db


# With `implementation=None`, the forward and each gradient choose their defaults separately.
_EVERY = ("pallas", "xla", None)
CONV2D = Pair(
    formulas.forward,
    Op("conv2d_backward", per_implementation(_gradients, _EVERY), jit=True),
    save=per_implementation(_save, _EVERY),
    name="conv2d",
    unsupported=_unsupported,
    jit=True,
)


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
    """Convolution without flipping the filter:
    `y[n, k, i, j] = b[k] + Σ_{c, u, v} x[n, c, i s + u d - p, j s + v d - p] w[k, c, u, v]`, where s is the stride, d
    the dilation, and p the padding before the first element.

    Args:
      stride, dilation: one int, or a pair for rows and columns.
      padding: zeros around the image, as one int for all sides; as two entries for rows and columns, each an int or a
        pair (before, after); or as "SAME", "SAME_LOWER", or "VALID".
      groups: the number of groups of channels. An output reads only its group's input channels.
      dimension_numbers: the layouts of x, w, and y, by default ("NCHW", "OIHW", "NCHW").
      precision: by default, float32 may be rounded to TF32 for the tensor cores. A NaN or infinity in a small image may
        then spread over the image's whole result.
      implementation: "pallas" supports no dilation and no groups. cuDNN or cuBLAS computes y, and kernels compute
        the gradients.
      padding, dimension_numbers, precision: also as in `jax.lax.conv_general_dilated`.

    Returns:
      y, in the promoted dtype of the arguments. Its height is
      `(height + padding before and after - d (filter_height - 1) - 1) // s + 1`, and its width likewise.

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
    """Gradient of `conv2d` with respect to x: `dx[n, c, h, l] = Σ_{k, u, v} dy[n, k, i, j] w[k, c, u, v]` over the u
    and v for which y has a position (i, j) with `i s + u d - p = h` and `j s + v d - p = l`.

    dx has the promoted dtype of dy and w. `input_size` is the height and width of x. s, d, and p are as in `conv2d`.

    Source: Dumoulin and Visin (see `conv2d`), chapter 4.
    """
    op = "conv2d_backward_input"
    dy, w = checks.floating(op, dy=dy, w=w)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    w = layouts.arrange(op, "w", w, layout.rhs_spec, *FILTER_AXES)
    input_size = checks.pair(op, "input_size", input_size)
    options = options_of(op, input_size, w.shape[2:], stride, padding, dilation, groups, precision)
    size = output_size(input_size, w.shape[2:], **options)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, "batch", w.shape[0], *size)
    check_channels(op, (dy.shape[0], w.shape[1] * groups), w.shape, groups)
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
    `dw[k, c, u, v] = Σ_{n, i, j} dy[n, k, i, j] x[n, c, i s + u d - p, j s + v d - p]`.

    dw has the promoted dtype of dy and x. `filter_size` is the height and width of w. s, d, and p are as in `conv2d`.

    Source: Dumoulin and Visin (see `conv2d`), chapter 4.
    """
    op = "conv2d_backward_weights"
    dy, x = checks.floating(op, dy=dy, x=x)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    x = layouts.arrange(op, "x", x, layout.lhs_spec, *IMAGE_AXES)
    filter_size = checks.pair(op, "filter_size", filter_size)
    options = options_of(op, x.shape[2:], filter_size, stride, padding, dilation, groups, precision)
    size = output_size(x.shape[2:], filter_size, **options)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, x.shape[0], "out_channels", *size)
    check_channels(op, x.shape, (dy.shape[1], x.shape[1] // groups), groups)
    dw = _WEIGHTS_GRADIENT(dy, x, filter_size=filter_size, implementation=implementation, **options)
    return layouts.restore(dw, layout.rhs_spec)


def conv2d_backward_bias(
    dy: Float[AnyArray, "batch out_channels out_height out_width"],
    *,
    dimension_numbers: DimensionNumbers = None,
    implementation: Implementation = None,
) -> Float[Array, "out_channels"]:
    """Gradient of `conv2d` with respect to b: `db[k] = Σ_{n, i, j} dy[n, k, i, j]`, in dy's dtype.

    dy has the layout of y in `dimension_numbers`.
    """
    op = "conv2d_backward_bias"
    (dy,) = checks.floating(op, dy=dy)
    layout = layouts.dimension_numbers(op, dimension_numbers)
    dy = layouts.arrange(op, "dy", dy, layout.out_spec, "batch", "out_channels", "out_height", "out_width")
    return _BIAS_GRADIENT(dy, implementation=implementation)
