"""Matrix products of backward passes, as a formula and as kernels."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxbp.common.numerics import on_tensor_cores, wide
from jaxbp.pairing import Op
from pallas_kernels.conv.conv2d import correlate, correlate_batch, sum_batch
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.dense import linear_sm90 as tensor_cores


def formula(a, b, *, transposed=(False, False), precision=None, dtype=None):
    """Return `yᵢⱼ = Σₖ aᵢₖ bₖⱼ` for each index of the batch axes, which broadcast.

    `transposed` says whether the last two axes of a and of b are swapped. The result has the given `dtype`, by default
    float32 or wider.
    """
    a, b = (jnp.swapaxes(x, -1, -2) if swapped else x for x, swapped in zip((a, b), transposed, strict=True))
    y = jnp.matmul(a, b, precision=precision, preferred_element_type=wide(a.dtype))
    return y.astype(dtype or y.dtype)


def kernel(a, b, *, transposed=(False, False), precision=None, dtype=None):
    """Compute `formula` for a and b with the same number of axes. The tensor cores multiply in half precision and in
    TF32, and the CUDA cores multiply in float32."""
    options = dict(transposed=transposed, dtype=dtype or wide(a.dtype))
    library = functools.partial(formula, precision=precision, **options)
    if 0 in (*a.shape, *b.shape):
        return library(a, b)
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (_with_one_batch_axis(x, batch) for x in (a, b))
    if on_tensor_cores(a.dtype, precision) and has_tensor_core_kernel(a.dtype):
        y = on_gpu(functools.partial(tensor_cores.product, **options), library, a, b)
    else:
        axes = tuple(0 if len(x) > 1 else None for x in (a, b))
        a, b = (x if len(x) > 1 else x[0] for x in (a, b))
        multiply = functools.partial(_on_cuda_cores, transposed=transposed)
        y = (jax.vmap(multiply, axes) if 0 in axes else multiply)(a, b).astype(options["dtype"])
    return y.reshape(*batch, *y.shape[-2:])


def _with_one_batch_axis(x, batch):
    if math.prod(x.shape[:-2]) not in (1, math.prod(batch)):
        x = jnp.broadcast_to(x, (*batch, *x.shape[-2:]))
    return x.reshape(-1, *x.shape[-2:])


def has_tensor_core_kernel(dtype: DTypeLike) -> bool:
    one = jax.ShapeDtypeStruct((1, 1), dtype)
    return tensor_cores.product.unsupported(one, one) is None


def _on_cuda_cores(a, b, *, transposed):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if transposed == (True, False):
        return correlate_batch(batch_last(a)[:, None, None], batch_last(b)[:, None, None])[:, :, 0, 0]
    a, b = a.T if transposed[0] else a, b.T if transposed[1] else b
    # One operand's columns are lanes, and the other operand is a filter of 1 x 1.
    if len(a) < b.shape[1]:
        return batch_first(correlate(batch_last(b.T)[:, None, None], a[:, :, None, None])[:, 0, 0], b.shape[1]).T
    return batch_first(correlate(batch_last(a)[:, None, None], b.T[:, :, None, None])[:, 0, 0], len(a))


PRODUCT = Op("product", {"xla": formula, "pallas": kernel}, jit=True)


def parameter_gradients_in_float32(dy, x, *, dtype=None):
    """Return dw `(out_features, in_features)` in `dtype` (x's dtype if None), and db `(out_features,)` in float32, both
    summed in float32, for dy `(rows, out_features)` and x `(rows, in_features)`."""
    dw = jnp.matmul(dy.T, x, preferred_element_type=jnp.float32)
    return dw.astype(dtype or x.dtype), jnp.sum(dy, axis=0, dtype=jnp.float32)


def parameter_gradients_kernel(dy, x, *, precision=None, dtype=None):
    """Compute `parameter_gradients_in_float32`, but multiply float32 arrays in TF32 if `precision` permits it."""
    options = dict(dtype=dtype or x.dtype)
    library = functools.partial(parameter_gradients_in_float32, **options)
    if 0 in (*dy.shape, *x.shape):
        return library(dy, x)
    if dy.dtype == jnp.float32 or not has_tensor_core_kernel(dy.dtype):
        dw = kernel(dy, x, transposed=(True, False), precision=precision, **options)
        return dw, sum_batch(batch_last(dy)[:, None])
    return on_gpu(functools.partial(tensor_cores.weights_gradient, **options), library, dy, x)
