"""Two-dimensional convolution."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.export import is_symbolic_dim
from jax.lax import PrecisionLike
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import ANY_CONVOLUTION, Entry, block_cases, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import on_tensor_cores
from jaxbp.common.windows import Padding, Size, dilated, output_size, require_fit, window_padding
from jaxbp.ops.conv import _conv2d_formulas as formulas
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.ops.conv._layouts import DimensionNumbers
from jaxbp.ops.dense import _products as products
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, formula_and_kernel, per_implementation
from pallas_kernels.conv import conv2d as kernels
from pallas_kernels.conv import conv2d_weights_gradient_sm90 as weights_gradient_sm90
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.core.layouts import LANES

_MAX_ELEMENTS = 1 << 22
_MAX_POSITIONS_PER_TAP = 32
"""A tap is a position of the filter. Up to 2.6 million elements and 31 input positions per tap, the product with the
matrix of the filters was faster than cuDNN."""


def product_pays(w, input_size, output_size, precision):
    K, C, F, G = w.shape
    # A convolution with 1 x 1 filters already is a matrix product.
    positions = math.prod(input_size)
    elements = C * positions * K * math.prod(output_size)
    small = elements <= _MAX_ELEMENTS and positions <= _MAX_POSITIONS_PER_TAP * F * G
    return F * G > 1 and small and on_tensor_cores(w.dtype, precision)


def _forward_kernel(x, w, b, **options):
    size = output_size(x.shape[2:], w.shape[2:], **options)
    if not product_pays(w, x.shape[2:], size, options["precision"]):
        return formulas.forward(x, w, b, **options)
    matrix = formulas.filter_matrix(w, x.shape[2:], size, **options)
    y = products.formula(
        x.reshape(x.shape[0], math.prod(x.shape[1:])), matrix, precision=options["precision"], dtype=x.dtype
    )
    y = y if b is None else y + jnp.repeat(b, math.prod(size))[None]
    return y.reshape(x.shape[0], w.shape[0], *size)


def _input_gradient_kernel(dy, w, *, input_size, **options):
    pays = product_pays(w, input_size, dy.shape[2:], options["precision"])
    if pays and products.has_tensor_core_kernel(dy.dtype):
        return formulas.input_gradient_product(dy, w, product=products.kernel, input_size=input_size, **options)
    full = formulas.full_padding(dy.shape[2:], w.shape[2:], input_size, **options)
    spread = [(0, 0, 0), *((*sides, s - 1) for sides, s in zip(full, options["stride"], strict=True)), (0, 0, 0)]
    dy_last = lax.pad(batch_last(dy), jnp.zeros((), dy.dtype), spread)
    return batch_first(kernels.correlate(dy_last, formulas.flip_and_swap(w, options["groups"])), dy.shape[0])


def _weights_gradient_kernel(dy, x, **options):
    if _one_pass_pays(dy, x, **options):
        return _parameter_gradients_kernel(dy, x, **options)[0]
    dw = kernels.correlate_batch(batch_last(dy), _reached(dy, x, **options), stride=options["stride"])
    return dw.astype(dy.dtype)


def _bias_gradient_kernel(dy):
    return _sum_batch(batch_last(dy)).astype(dy.dtype)


def _parameter_gradients_kernel(dy, x, **options):
    exact = lambda dy, x: (kernels.correlate_batch(dy, x), _sum_batch(dy))  # noqa: E731
    arrays = batch_last(dy), _reached(dy, x, **options)
    dw, db = on_gpu(weights_gradient_sm90.correlate_batch, exact, *arrays)
    return dw.astype(dy.dtype), db.astype(dy.dtype)


def _one_pass_pays(dy, x, *, filter_size, stride, precision, **options):
    """Return whether one kernel on the tensor cores should compute dw and db together."""
    reached = [out + f - 1 for out, f in zip(dy.shape[2:], filter_size, strict=True)]
    dy_last = jax.ShapeDtypeStruct((*dy.shape[1:], LANES), dy.dtype)
    x_batch_last = jax.ShapeDtypeStruct((x.shape[1], *reached, LANES), x.dtype)
    allowed = stride == (1, 1) and on_tensor_cores(dy.dtype, precision)
    return allowed and weights_gradient_sm90.correlate_batch.unsupported(dy_last, x_batch_last) is None


def _reached(dy, x, *, filter_size, **options):
    reached = formulas.reached_padding(dy.shape[2:], x.shape[2:], filter_size, **options)
    return lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *((*r, 0) for r in reached), (0, 0, 0)])


def _sum_batch(dy_last):
    return kernels.sum_batch(dy_last.reshape(dy_last.shape[0], -1, dy_last.shape[-1]))


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
    pays = product_pays(w, x.shape[2:], size, options["precision"])
    return DefaultImplementation() if pays else _LIBRARY


def _default_input_gradient(dy, w, **options):
    formula = functools.partial(formulas.input_gradient_formula, **options)
    sizes = options["input_size"], dy.shape[2:]
    unsupported = options["groups"] != 1 or any(map(is_symbolic_dim, itertools.chain(w.shape, *sizes)))
    if unsupported or not product_pays(w, *sizes, options["precision"]):
        return formula(dy, w)
    # cuBLAS computes this product faster than the kernel.
    product = functools.partial(formulas.input_gradient_product, **options)
    return lax.platform_dependent(dy, w, cuda=product, default=formula)


_part = functools.partial(Op, unsupported=_unsupported, partitioned=True, jit=True)
_FORWARD = _part("conv2d", formula_and_kernel(formulas.forward_formula, _forward_kernel, "x"), default=_default_forward)
_INPUT_GRADIENT = _part(
    "conv2d_backward_input",
    formula_and_kernel(formulas.input_gradient_formula, _input_gradient_kernel, "dy")
    | {"autodiff": formulas.input_gradient_autodiff, None: _default_input_gradient},
)
_WEIGHTS_GRADIENT = _part(
    "conv2d_backward_weights",
    formula_and_kernel(formulas.weights_gradient_formula, _weights_gradient_kernel, "dy", "x")
    | {"autodiff": formulas.weights_gradient_autodiff},
)
_BIAS_GRADIENT = _part(
    "conv2d_backward_bias",
    formula_and_kernel(formulas.bias_gradient_formula, _bias_gradient_kernel, "dy")
    | {"autodiff": formulas.bias_gradient_autodiff},
    default=_LIBRARY,
)
_PARAMETER_GRADIENTS = _part(
    "conv2d_backward_parameters",
    formula_and_kernel(formulas.parameter_gradients_formula, _parameter_gradients_kernel, "dy", "x"),
)


def _save(x, w, b, *, implementation, **options):
    return _FORWARD(x, w, b, implementation=implementation, **options), (x, w, b)


def _gradients(dy, x, w, b, *, implementation, **options):
    of_weights = dict(filter_size=w.shape[2:], implementation=implementation, **options)
    supported = _PARAMETER_GRADIENTS.unsupported(dy, x, **options) is None
    if b is not None and supported and _one_pass_pays(dy, x, **of_weights):
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


IMAGE_AXES = ("batch", "in_channels", "height", "width")
FILTER_AXES = ("out_channels", "in_channels/groups", "filter_height", "filter_width")


def check_shapes(op, x, w, b, dimension_numbers=None, *, groups=1, dilation=1, spatial_axes=2, **options) -> tuple:
    """Return the layouts, the shapes of x and w in NCHW and OIHW, and the convolution's options."""
    layout = layouts.dimension_numbers(op, dimension_numbers, spatial_axes)
    w_shape = layouts.check_shape(op, "w", w, layout.rhs_spec, *FILTER_AXES[:2], *FILTER_AXES[-spatial_axes:])
    x_shape = layouts.check_shape(op, "x", x, layout.lhs_spec, *IMAGE_AXES[:2], *IMAGE_AXES[-spatial_axes:])
    check_channels(op, x_shape, w_shape, checks.count(op, "groups", groups), x.shape)
    options = options_of(op, x_shape[2:], w_shape[2:], dilation=dilation, groups=groups, **options)
    if b is not None:
        checks.shape(op, "b", b, w_shape[0])
    return layout, x_shape, w_shape, options


def options_of(op, input_size, filter_size, stride, padding, dilation, groups, precision) -> dict[str, Any]:
    stride = checks.per_axis(op, "stride", stride, len(input_size))
    dilation = checks.per_axis(op, "dilation", dilation, len(input_size))
    groups, precision = checks.count(op, "groups", groups), checks.precision(op, precision)
    extent = dilated(filter_size, dilation)
    padding = window_padding(op, padding, input_size, extent, stride)
    require_fit(op, "filter with its dilation", extent, input_size, padding)
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
    given = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, precision=precision)
    layout, _, _, options = check_shapes("conv2d", x, w, b, dimension_numbers, **given)
    x, w = layouts.arranged(x, layout.lhs_spec), layouts.arranged(w, layout.rhs_spec)
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


ENTRIES = (
    Entry(
        conv2d,
        case_of((2, 2, 5, 6), (3, 2, 3, 2), (3,), **ANY_CONVOLUTION),
        block_cases("conv", lambda x, w, z, y: case_of(x, w, w[:1])),
    ),
    Entry(
        conv2d_backward_input,
        case_of((2, 3, 3, 5), (3, 2, 3, 2), input_size=(5, 6), **ANY_CONVOLUTION),
        block_cases("conv", lambda x, w, z, y: case_of(z, w, input_size=x[2:])),
    ),
    Entry(
        conv2d_backward_weights,
        case_of((2, 3, 3, 5), (2, 2, 5, 6), filter_size=(3, 2), **ANY_CONVOLUTION),
        block_cases("conv", lambda x, w, z, y: case_of(z, x, filter_size=w[2:])),
    ),
    Entry(conv2d_backward_bias, case_of((2, 3, 3, 5)), block_cases("conv", lambda x, w, z, y: case_of(z))),
)
