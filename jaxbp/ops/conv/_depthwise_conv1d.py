"""Depthwise convolution of sequences, with stride 1 and no dilation.

    y[n, t, c] = b[c] + Σ_u w[u, c] x[n, t + u - before, c]

`padding` is `(before, after)`, the zeros at both ends of x's width. `width_axis` is 1 for `(batch, width, channels)`,
which the kernels need, and 2 for `(batch, channels, width)`. On a CPU, sums of shifted sequences are several times
faster than XLA's convolution.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from jaxbp.common import checks
from jaxbp.common.numerics import upcast
from jaxbp.ops.conv import _layouts as layouts
from jaxbp.pairing import DefaultImplementation, Pair, differentiable, given_arguments, saving_arguments
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
    # If the width is the last axis, the kernels' transposes take longer than the formula.
    return DefaultImplementation(gpu="pallas" if width_axis == 1 else "xla")


DEPTHWISE_CONV1D = Pair(
    _forward,
    {"xla": _gradients_formula, "pallas": _gradients_kernel},
    save={
        "xla": functools.partial(saving_arguments, _forward),
        "pallas": functools.partial(saving_arguments, differentiable(_forward_kernel, _forward, batched(0))),
    },
    residuals=given_arguments,
    batch_axes=batched(0, 1),
    name="conv1d",
    unsupported=_unsupported,
    default=_default,
    jit=True,
)


def applies(x_shape, w_shape, *, stride, dilation, groups, **options) -> bool:
    return 1 < groups == x_shape[1] == w_shape[0] and stride == dilation == (1,)


def convolve(op, x, w, b, layout, implementation, *, padding, **options) -> Array:
    width_axis, x_layout, y_layout = _layouts_of_sequences(layout)
    options = dict(width_axis=width_axis, padding=padding[0], implementation=implementation)
    y = DEPTHWISE_CONV1D.named(op)(layouts.arranged(x, x_layout), _arranged_filters(w, layout), b, **options)
    return layouts.restore(y, y_layout)


def gradients(op, dy, x, w, layout, implementation, *, padding, **options) -> tuple[Array, Array, Array]:
    width_axis, x_layout, y_layout = _layouts_of_sequences(layout)
    options = dict(width_axis=width_axis, padding=padding[0], implementation=implementation)
    w = _arranged_filters(w, layout)
    arrays = layouts.arranged(dy, y_layout), layouts.arranged(x, x_layout), w, jnp.zeros(w.shape[1:], w.dtype)
    dx, dw, db = DEPTHWISE_CONV1D.vjp.named(op)(*arrays, **options)
    dw = layouts.restore(lax.expand_dims(dw, (1,)), _width_first(layout.rhs_spec))
    return layouts.restore(dx, x_layout), dw, db


def _layouts_of_sequences(layout):
    specs = layout.lhs_spec, layout.out_spec
    if layout.lhs_spec == (0, 1, 2):
        return 2, *specs
    return 1, *((batch, width, channels) for batch, channels, width in specs)


def _arranged_filters(w, layout):
    return lax.squeeze(layouts.arranged(w, _width_first(layout.rhs_spec)), (1,))


def _width_first(layout):
    out_channels, in_channels, width = layout
    return width, in_channels, out_channels
