"""Formulas of convolutions and their gradients, for NCHW images and OIHW filters, also as products with a matrix of the
filters."""

import functools
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import is_symbolic_dim

from jaxbp.common import numerics
from jaxbp.common.windows import dilated
from jaxbp.ops.dense import _products as products
from jaxbp.pairing import transpose


def forward(x, w, b, **options):
    return _add_bias(_convolve_images(x, w, **options), b)


def forward_formula(x, w, b, **options):
    convolve = functools.partial(_convolve_images, channels_last_on_cpu=True, **options)
    if _is_product(x, w):
        return _add_bias(convolve(x, w), b)
    multiply = functools.partial(_multiply_columns, **options)
    return _add_bias(lax.platform_dependent(x, w, cpu=multiply, default=convolve), b)


def _add_bias(y, b):
    return y if b is None else y + b[None, :, None, None]


def _convolve_images(x, w, *, stride, padding, dilation, groups, precision, channels_last_on_cpu=False):
    return _convolve(
        x,
        w,
        channels_last_on_cpu,
        window_strides=stride,
        padding=padding,
        rhs_dilation=dilation,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=groups,
        precision=precision,
    )


def _is_product(x, w):
    # XLA's CPU convolution is slow with one channel. JAX cannot slice columns of symbolic sizes.
    return any(map(is_symbolic_dim, (w.shape[1], *x.shape[2:]))) or w.shape[1] > 1


def _multiply_columns(x, w, *, stride, padding, dilation, groups, precision):
    x = jnp.pad(x, ((0, 0), (0, 0), *padding)).swapaxes(0, 1)
    spans = [size - (f - 1) * d for size, f, d in zip(x.shape[2:], w.shape[2:], dilation, strict=True)]
    columns = []
    for place in np.ndindex(w.shape[2:]):
        start = [at * d for at, d in zip(place, dilation, strict=True)]
        stop = [at + span for at, span in zip(start, spans, strict=True)]
        columns.append(lax.slice(x, (0, 0, *start), (*x.shape[:2], *stop), (1, 1, *stride)))
    terms, (batch, *out) = math.prod(w.shape[1:]), columns[0].shape[1:]
    filters = w.reshape(groups, w.shape[0] // groups, terms)
    y = jnp.matmul(filters, jnp.stack(columns, 1).reshape(groups, terms, batch * math.prod(out)), precision=precision)
    return y.reshape(w.shape[0], batch, *out).swapaxes(0, 1)


def _convolve(x, w, channels_last_on_cpu=True, *, padding, dimension_numbers, lhs_dilation=(1, 1), **options):
    """Convolve x with w. On a CPU, transpose to NHWC, because XLA is slow with other layouts inside of loops."""
    if any(map(is_symbolic_dim, itertools.chain(*padding))):  # which JAX refuses
        of_axes = {axis: (*p, s - 1) for axis, p, s in zip("HW", padding, lhs_dilation, strict=True)}
        x = lax.pad(x, jnp.zeros((), x.dtype), [of_axes.get(axis, (0, 0, 0)) for axis in dimension_numbers[0]])
        padding, lhs_dilation = "VALID", (1, 1)
    convolve = functools.partial(lax.conv_general_dilated, padding=padding, lhs_dilation=lhs_dilation, **options)
    as_laid_out = functools.partial(convolve, dimension_numbers=dimension_numbers)
    if not channels_last_on_cpu:
        return as_laid_out(x, w)

    def channels_last(x, w):
        x_axes, w_axes, y_axes = dimension_numbers
        x = x.transpose([x_axes.index(axis) for axis in "NHWC"])
        w = w.transpose([w_axes.index(axis) for axis in "HWIO"])
        y = convolve(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return y.transpose(["NHWC".index(axis) for axis in y_axes])

    return lax.platform_dependent(x, w, cpu=channels_last, default=as_laid_out)


def input_gradient_autodiff(dy, w, *, input_size, groups, **options):
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
        of_sums = numerics.wide(dy.dtype)
        multiply = functools.partial(
            _multiply_columns, w=w.astype(of_sums), groups=groups, precision=precision, **options
        )
        return transpose(multiply, (dy.shape[0], groups, *input_size), dy.astype(of_sums)).astype(dy.dtype)

    return convolve(dy, w) if _is_product(dy, w) else lax.platform_dependent(dy, w, cpu=sum_columns, default=convolve)


def input_gradient_product(dy, w, *, product=products.formula, input_size, **options):
    matrix = filter_matrix(w, input_size, dy.shape[2:], **options)
    rows = dy.reshape(dy.shape[0], math.prod(dy.shape[1:]))  # `len` does not return a symbolic batch
    dx = product(rows, matrix, transposed=(False, True), precision=options["precision"], dtype=dy.dtype)
    return dx.reshape(dy.shape[0], w.shape[1], *input_size)


def weights_gradient_autodiff(dy, x, *, filter_size, groups, **options):
    shape = (dy.shape[1], x.shape[1] // groups, *filter_size)
    return transpose(lambda w: forward(x, w, None, groups=groups, **options), shape, dy)


def weights_gradient_formula(dy, x, *, filter_size, stride, padding, dilation, groups, precision):
    # dw correlates x with dy, with channel and batch axes exchanged.
    return _convolve(
        x,
        dy,
        window_strides=dilation,
        padding=reached_padding(
            dy.shape[2:], x.shape[2:], filter_size, stride=stride, padding=padding, dilation=dilation
        ),
        rhs_dilation=stride,
        dimension_numbers=("CNHW", "IOHW", "CNHW"),
        batch_group_count=groups,
        precision=precision,
    )


def parameter_gradients_formula(dy, x, **options):
    return weights_gradient_formula(dy, x, **options), bias_gradient_formula(dy)


def bias_gradient_autodiff(dy):
    return transpose(lambda b: jnp.broadcast_to(b[:, None, None], dy.shape), dy.shape[1:2], dy)


def bias_gradient_formula(dy):
    return jnp.sum(dy, axis=(0, 2, 3))


def flip_and_swap(w, groups):
    out_channels, in_channels, *window = w.shape
    w = jnp.flip(w, (2, 3)).reshape(groups, out_channels // groups, in_channels, *window)
    return w.swapaxes(1, 2).reshape(groups * in_channels, out_channels // groups, *window)


def full_padding(output_size, filter_size, input_size, *, stride, padding, dilation, **options):
    """Return the padding of dy for the gradient dx, the convolution of dy with the rotated filters.

    Before the padding, dy is spaced out by the stride.
    """
    sides = zip(input_size, filter_size, dilation, padding, dilated(output_size, stride), strict=True)
    return [((f - 1) * d - p, size - spread + p) for size, f, d, (p, _), spread in sides]


def reached_padding(output_size, input_size, filter_size, *, stride, padding, dilation, **options):
    """Return the padding of x per axis, negative to crop, so that x ends at the last element that filters read."""
    sides = zip(dilated(output_size, stride), input_size, filter_size, padding, dilation, strict=True)
    return [(p, spread + (f - 1) * d - size - p) for spread, size, f, (p, _), d in sides]


def filter_matrix(w, input_size, output_size, *, stride, padding, dilation, **options):
    """Return the `matrix[(c, h, l), (k, i, j)]` with `y = x matrix` for flattened images x and their convolutions y.

    An element is `w[k, c, u, v]` if `h = i * stride + u * dilation - before`, and the same for l, j, and v, else 0.
    """
    K, C, *window = w.shape
    taps, exists = [], []
    for size, out, f, s, (p, _), d in zip(input_size, output_size, window, stride, padding, dilation, strict=True):
        ahead = np.arange(size)[:, None] + p - np.arange(out) * s
        exists.append((ahead >= 0) & (ahead < f * d) & (ahead % d == 0))
        taps.append(np.where(exists[-1], ahead // d, 0))
    (u, v), (in_rows, in_columns) = taps, exists
    meet = in_rows[:, None, :, None] & in_columns[None, :, None, :]
    matrix = jnp.where(meet, w[:, :, u[:, None, :, None], v[None, :, None, :]], 0)  # (K, C, H, W, I, J)
    return matrix.transpose(1, 2, 3, 0, 4, 5).reshape(C * math.prod(input_size), K * math.prod(output_size))
