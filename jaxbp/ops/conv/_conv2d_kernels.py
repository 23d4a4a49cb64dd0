"""Kernels of `conv2d` and its gradients, or products with a matrix of the filters where they are faster."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxbp.common import checks
from jaxbp.common.numerics import on_tensor_cores
from jaxbp.ops.conv import _filter_matrix
from jaxbp.ops.conv._conv2d_geometry import flip_and_swap, full_padding, reached_padding
from jaxbp.ops.dense import _products as products
from pallas_kernels.conv import conv2d as kernels
from pallas_kernels.conv import conv2d_weights_gradient_sm90 as weights_gradient_sm90
from pallas_kernels.core.launch import batch_first, batch_last, on_gpu
from pallas_kernels.core.layouts import LANES


def forward_product(x, w, b, output_size, **options):
    matrix = _matrix(w, x.shape[2:], output_size, **options)
    y = products.formula(x.reshape(len(x), -1), matrix, precision=options["precision"], dtype=x.dtype)
    y = y if b is None else y + jnp.repeat(b, math.prod(output_size))[None]
    return y.reshape(x.shape[0], w.shape[0], *output_size)


def _matrix(w, input_size, output_size, *, stride, padding, dilation, **options):
    before = tuple(p for p, _ in padding)
    return _filter_matrix.filter_matrix(
        w, input_size=input_size, output_size=output_size, stride=stride, before=before, dilation=dilation
    )


def product_pays(w, input_size, output_size, precision):
    if checks.is_symbolic(*w.shape, *input_size, *output_size):
        return False
    return on_tensor_cores(w.dtype, precision) and _filter_matrix.pays(w.shape, input_size, output_size)


def input_gradient(dy, w, *, input_size, **options):
    pays = product_pays(w, input_size, dy.shape[2:], options["precision"])
    if not pays or not products.has_tensor_core_kernel(dy.dtype):
        return _input_gradient_exact(dy, w, input_size=input_size, **options)
    return input_gradient_product(dy, w, product=products.kernel, input_size=input_size, **options)


def input_gradient_product(dy, w, *, product=products.formula, input_size, **options):
    # `len` does not return a symbolic batch.
    matrix, rows = _matrix(w, input_size, dy.shape[2:], **options), dy.reshape(dy.shape[0], math.prod(dy.shape[1:]))
    dx = product(rows, matrix, transposed=(False, True), precision=options["precision"], dtype=dy.dtype)
    return dx.reshape(dy.shape[0], w.shape[1], *input_size)


def _input_gradient_exact(dy, w, *, input_size, stride, padding, dilation, groups, precision):
    full = full_padding(dy.shape[2:], w.shape[2:], input_size, stride, padding, dilation)
    spread = [(0, 0, 0), *((low, high, s - 1) for (low, high), s in zip(full, stride, strict=True)), (0, 0, 0)]
    dy_last = lax.pad(batch_last(dy), jnp.zeros((), dy.dtype), spread)
    return batch_first(kernels.correlate(dy_last, flip_and_swap(w, groups)), dy.shape[0])


def weights_gradient(dy, x, **options):
    if one_pass_pays(dy, x, **options):
        return parameter_gradients(dy, x, **options)[0]
    dw = kernels.correlate_batch(batch_last(dy), _reached(dy, x, **options), stride=options["stride"])
    return dw.astype(dy.dtype)


def parameter_gradients(dy, x, **options):
    arrays = batch_last(dy), _reached(dy, x, **options)
    dw, db = on_gpu(weights_gradient_sm90.correlate_batch, _parameter_gradients_exact, *arrays)
    return dw.astype(dy.dtype), db.astype(dy.dtype)


def _parameter_gradients_exact(dy_last, x_batch_last):
    dw = kernels.correlate_batch(dy_last, x_batch_last)
    return dw, kernels.sum_batch(dy_last.reshape(dy_last.shape[0], -1, dy_last.shape[-1]))


def one_pass_pays(dy, x, *, filter_size, stride, precision, **options):
    """Return whether one kernel on the tensor cores should compute dw and db together."""
    reached = [out + f - 1 for out, f in zip(dy.shape[2:], filter_size, strict=True)]
    dy_last = jax.ShapeDtypeStruct((*dy.shape[1:], LANES), dy.dtype)
    x_batch_last = jax.ShapeDtypeStruct((x.shape[1], *reached, LANES), x.dtype)
    allowed = stride == (1, 1) and on_tensor_cores(dy.dtype, precision)
    return allowed and weights_gradient_sm90.correlate_batch.unsupported(dy_last, x_batch_last) is None


def _reached(dy, x, *, filter_size, stride, padding, dilation, **options):
    reached = reached_padding(dy.shape[2:], x.shape[2:], filter_size, stride, padding, dilation)
    return lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *((*r, 0) for r in reached), (0, 0, 0)])


def bias_gradient(dy):
    dy_last = batch_last(dy)
    return kernels.sum_batch(dy_last.reshape(dy.shape[1], -1, dy_last.shape[-1])).astype(dy.dtype)
