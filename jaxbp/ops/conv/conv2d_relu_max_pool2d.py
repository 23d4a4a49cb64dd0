"""Convolution, ReLU, and max-pooling as one op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Float, Integer

from jaxbp.common import barriers, checks
from jaxbp.common.cases import BATCH, Entry, block_cases, case_of, indices_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import on_tensor_cores
from jaxbp.common.windows import Padding, Size, Windows, output_size, pool_windows
from jaxbp.ops.conv import _conv2d_formulas as formulas
from jaxbp.ops.conv import max_pool2d
from jaxbp.ops.conv.conv2d import check_shapes
from jaxbp.pairing import Implementation, Op, Pair, batched, differentiable, formula_and_kernel, in_dtypes_of
from pallas_kernels.conv import conv2d_relu_max_pool2d_forward_sm90 as forward_sm90
from pallas_kernels.conv import conv2d_relu_max_pool2d_forward_tf32_sm90 as forward_tf32_sm90
from pallas_kernels.conv import conv2d_relu_max_pool2d_input_gradient_sm90 as input_gradient_sm90
from pallas_kernels.conv import conv2d_weights_gradient_sm90 as weights_gradient_sm90
from pallas_kernels.conv.conv2d_relu_max_pool2d_forward import forward as exact_forward
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import input_gradient as exact_input_gradient
from pallas_kernels.conv.conv2d_relu_max_pool2d_weights_gradient import weights_gradient as exact_weights_gradient
from pallas_kernels.conv.filters_and_windows import taps
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.core.layouts import LANES

_MIN_FORWARD_BATCH = {"float32": 1024, "bfloat16": 2048, "float16": 2048}
"""Smallest batch for the forward on the tensor cores. In float32, it then makes LeNet's training step faster. In half
precision, it is then no slower than the exact kernel: docs/lab/2026-11-23-forward.md."""
_MIN_GRADIENT_BATCH = 2048
"""Smallest batch for gradients on the tensor cores. Adding up the sums of smaller batches takes longer than the tensor
cores save: docs/lab/2026-11-23-lenet.md."""
_KERNEL_BATCH = 4096
"""If `banded_input_gradient` pays, the tensor-core kernel for dx replaces it from this batch size on
(docs/lab/2026-11-25-lenet.md)."""
_MAX_BAND_ELEMENTS = 1 << 20
_MIN_FLOAT32_PRODUCTS = 100_000_000
"""In float32, the four launches of `banded_input_gradient` pay only from this number of multiplications on."""
_MAX_BAND_RATIO = {4: 4, 2: 8}
"""Maps bytes per element to the most multiplications of the band per multiplication of the exact kernel. Only float32
is measured."""


def _split(x_size, w_size, *, window, stride, padding, precision):
    convolution = dict(stride=stride, padding=padding, dilation=(1, 1), groups=1, precision=precision)
    size = output_size(x_size, w_size, **convolution)
    return convolution, Windows(size, window, stride=window)


def _forward(x, w, b, **options):
    convolution, windows = _split(x.shape[2:], w.shape[2:], **options)
    z = formulas.forward(x, w, b, **convolution)
    return max_pool2d.autodiff(jax.nn.relu(z), windows=windows)[0], _max_and_indices(
        lax.stop_gradient(z), windows=windows
    )[1]


def _forward_and_indices(x, w, b, **options):
    convolution, windows = _split(x.shape[2:], w.shape[2:], **options)
    return barriers.on_cpu(_max_and_indices(formulas.forward_formula(x, w, b, **convolution), windows=windows))


def _max_and_indices(z, *, windows):
    largest, indices = max_pool2d.max_and_indices(z, windows=windows)
    off = windows.positions
    indices = indices.astype(jnp.uint8 if off <= 255 else jnp.int32)
    return jax.nn.relu(largest), jnp.where(largest > 0, indices, jnp.asarray(off, indices.dtype))


def _forward_and_indices_kernel(x, w, b, *, window, stride, padding, precision):
    x_batch_last = lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *((*p, 0) for p in padding), (0, 0, 0)])
    b = jnp.zeros(w.shape[:1], w.dtype) if b is None else b
    y, indices = _forward_kernel(x_batch_last, w, b, on_tensor_cores(x.dtype, precision), window=window)
    return batch_first(y, x.shape[0]), batch_first(indices, x.shape[0])


def _forward_kernel(x, w, b, tensor_cores, **options):
    arrays, exact = (x, w, b), functools.partial(exact_forward, **options)
    kernel = forward_tf32_sm90.forward if x.dtype == jnp.float32 else forward_sm90.forward
    pays = tensor_cores and x.shape[-1] >= _MIN_FORWARD_BATCH[x.dtype.name]
    if pays and kernel.unsupported(*arrays, **options) is None:
        return on_gpu(functools.partial(kernel, **options), exact, *arrays)
    return exact(*arrays)


def _gradients_autodiff(dy, indices, x, w, b, **options):
    convolution, windows = _split(x.shape[2:], w.shape[2:], **options)
    maxima = lambda x, w, b: max_pool2d.select(formulas.forward(x, w, b, **convolution), indices, windows=windows)  # noqa: E731
    return jax.vjp(maxima, x, w, b)[1](dy)


def _gradients_formula(dy, indices, x, w, b, **options):
    convolution, windows = _split(x.shape[2:], w.shape[2:], **options)
    dz = max_pool2d.scatter_formula(dy, indices, windows=windows)
    dx = formulas.input_gradient_formula(dz, w, input_size=x.shape[2:], **convolution)
    dw = formulas.weights_gradient_formula(dz, x, filter_size=w.shape[2:], **convolution)
    return dx, dw, None if b is None else formulas.bias_gradient_formula(dz)


def _gradients_kernel(dy, indices, x, w, b, *, window, stride, padding, precision):
    dy_last, indices_last = batch_last(dy), batch_last(indices)
    # The size of the padded input that the pool's windows reach.
    used = [n * size + f - 1 for n, size, f in zip(dy.shape[2:], window, w.shape[2:], strict=True)]
    reached = [(p, u - size - p, 0) for (p, _), u, size in zip(padding, used, x.shape[2:], strict=True)]
    x_batch_last = lax.pad(batch_last(x), jnp.zeros((), x.dtype), [(0, 0, 0), *reached, (0, 0, 0)])
    arrays, tensor_cores = (dy_last, indices_last), on_tensor_cores(x.dtype, precision)
    dw, db = _weights_gradient_kernel(*arrays, x_batch_last, tensor_cores, window=window)
    dx_last = _input_gradient_kernel(*arrays, w, tensor_cores, precision, input_size=tuple(used), window=window)
    dx_last = lax.pad(dx_last, jnp.zeros((), dy.dtype), [(0, 0, 0), *((-p, -q, 0) for p, q, _ in reached), (0, 0, 0)])
    return batch_first(dx_last, x.shape[0]), dw.astype(w.dtype), None if b is None else db.astype(b.dtype)


def _weights_gradient_kernel(dy, indices, x, tensor_cores, **options):
    arrays, kernel = (dy, indices, x), weights_gradient_sm90.weights_gradient
    exact = functools.partial(exact_weights_gradient, **options)
    if tensor_cores and dy.shape[-1] >= _MIN_GRADIENT_BATCH and kernel.unsupported(*arrays, **options) is None:
        return on_gpu(functools.partial(kernel, **options), exact, *arrays)
    return exact(*arrays)


def _input_gradient_kernel(dy, indices, w, tensor_cores, precision, *, input_size, window):
    arrays, options = (dy, indices, w), dict(input_size=input_size, window=window)
    kernel, exact = input_gradient_sm90.input_gradient, functools.partial(exact_input_gradient, **options)
    banded = tensor_cores and band_pays(w, dy, input_size[1], window)
    pays = tensor_cores and dy.shape[-1] >= (_KERNEL_BATCH if banded else _MIN_GRADIENT_BATCH)
    if pays and kernel.unsupported(*arrays, **options) is None:
        return on_gpu(functools.partial(kernel, **options), exact, *arrays)
    if banded:
        return banded_input_gradient(*arrays, precision=precision, **options)
    return exact(*arrays)


def band_pays(w, dy, width, window):
    """Return whether `banded_input_gradient` is faster than the Pallas kernel that does not use tensor cores
    (docs/lab/2026-11-25-lenet.md). `width` is the width of x."""
    (K, C, F, G), (_, P, Q, N), (R, S) = w.shape, dy.shape, window
    if dy.dtype.itemsize not in _MAX_BAND_RATIO:
        return False
    # Multiplications per example and per row of windows.
    exact = K * C * F * G * R * S * Q
    band = C * (F + R - 1) * width * K * R * S * Q
    if dy.dtype == jnp.float32 and exact * P * N < _MIN_FLOAT32_PRODUCTS:
        return False
    return band <= min(_MAX_BAND_ELEMENTS, _MAX_BAND_RATIO[dy.dtype.itemsize] * exact)


def banded_input_gradient(dy, place, w, *, input_size, window, precision=None):
    """Return dx, `(C, H, W, N)`, for dy and the positions of the maxima, `(K, P, Q, N)`. For each row of Q windows, dy
    is put at the maxima, and one matrix product convolves it with the filters.

    The matrix maps (k, r, s, q) of dy, row r and column s of window q, to (c, i, j) of dx, in the `height` rows to
    which the row of windows contributes. Its elements are `w[k, c, i - r, j - (q * S + s)]`, or 0 outside of the
    filter.
    """
    (K, P, Q, N), (_, C, F, _), (R, S), (H, W) = dy.shape, w.shape, window, input_size
    height = F + R - 1
    i, j, r, s, q = np.ix_(*map(range, (height, W, R, S, Q)))
    matrix = taps(w, i - r, j - (q * S + s)).transpose(1, 2, 3, 0, 4, 5, 6).reshape(C * height * W, K * R * S * Q)
    places = jnp.arange(R * S, dtype=place.dtype)[None, None, :, None, None]
    dy, place = dy.swapaxes(0, 1)[:, :, None], place.swapaxes(0, 1)[:, :, None]
    routed = jnp.where(place == places, dy, 0).reshape(P, K * R * S * Q, N)
    products = lax.dot_general(
        jnp.broadcast_to(matrix, (P, *matrix.shape)),
        routed,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).reshape(P, C, height, W, N)
    below = [(p * R, H - height - p * R) for p in range(P)]
    rows = [jnp.pad(products[p], ((0, 0), below[p], (0, 0), (0, 0))) for p in range(P)]
    return sum(rows[1:], rows[0]).astype(dy.dtype)


def _save(forward_and_indices, x, w, b, **options):
    y, indices = forward_and_indices(x, w, b, **options)
    return (y, indices), (indices, x, w, b)


def _unsupported(*arrays, window, stride, **options):
    *_, x, w, b = arrays
    if stride != (1, 1):
        return f"stride={stride}"
    x_batch_last = jax.ShapeDtypeStruct((*x.shape[1:], LANES), x.dtype)
    return exact_forward.unsupported(x_batch_last, w, b, window=window) or checks.unsupported_dtype(*arrays)


_CONV2D_RELU_MAX_POOL2D = Pair(
    _forward,
    Op(
        "conv2d_relu_max_pool2d_backward",
        {"autodiff": _gradients_autodiff}
        | formula_and_kernel(_gradients_formula, _gradients_kernel, "dy", "indices", "x"),
        unsupported=_unsupported,
        partitioned=True,
        jit=True,
    ),
    save={
        "xla": functools.partial(_save, _forward_and_indices),
        "pallas": functools.partial(
            _save, differentiable(_forward_and_indices_kernel, _forward_and_indices, batched("x"))
        ),
    },
    has_aux=True,
    name="conv2d_relu_max_pool2d",
    unsupported=_unsupported,
    partitioned=True,
    jit=True,
)


def conv2d_relu_max_pool2d(
    x: Float[AnyArray, "batch in_channels height width"],
    w: Float[AnyArray, "out_channels in_channels filter_height filter_width"],
    b: Float[AnyArray, "out_channels"] | None = None,
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "batch out_channels out_height out_width"]:
    """`max_pool2d(relu(conv2d(x, w, b, stride=stride, padding=padding)), window)`, with far fewer residuals: x, w, b,
    and the position of each window's maximum.

    Args:
      window: height and width of the pool's windows, which do not overlap.
      implementation: "pallas" supports stride 1, filters of up to 64 positions, and windows of up to 16 positions. It
        may call cuBLAS for dx.
      Other arguments and dtype: as in `conv2d`.
    """
    op = "conv2d_relu_max_pool2d"
    return _call(op, x, w, b, window, stride, padding, precision, implementation)[0]


def conv2d_relu_max_pool2d_with_indices(
    x: Float[AnyArray, "batch in_channels height width"],
    w: Float[AnyArray, "out_channels in_channels filter_height filter_width"],
    b: Float[AnyArray, "out_channels"] | None = None,
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "batch out_channels out_height out_width"], Integer[Array, "batch out_channels out_height out_width"]
]:
    """Return (y, indices): the result of `conv2d_relu_max_pool2d`, and the position of each window's maximum, as in
    `max_pool2d_with_indices`. If the maximum is not above 0, the index is `window_height * window_width`. Indices are
    uint8 for windows of up to 255 positions, else int32."""
    op = "conv2d_relu_max_pool2d_with_indices"
    return _call(op, x, w, b, window, stride, padding, precision, implementation)


def conv2d_relu_max_pool2d_backward(
    dy: Float[AnyArray, "batch out_channels out_height out_width"],
    indices: Integer[AnyArray, "batch out_channels out_height out_width"],
    x: Float[AnyArray, "batch in_channels height width"],
    w: Float[AnyArray, "out_channels in_channels filter_height filter_width"],
    *,
    window: Size,
    stride: Size = 1,
    padding: Padding = 0,
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[
    Float[Array, "batch in_channels height width"],
    Float[Array, "out_channels in_channels filter_height filter_width"],
    Float[Array, "out_channels"],
]:
    """Gradients of `conv2d_relu_max_pool2d` with respect to x, w, and b.

    `indices` come from `conv2d_relu_max_pool2d_with_indices`. Let dz have, in each window, dy at the position that the
    index gives, and 0 elsewhere. Where ReLU's derivative is 0, the index is outside of the window, so dz is 0.
    The gradients are `conv2d_backward_input(dz, w)`, `conv2d_backward_weights(dz, x)`, and `conv2d_backward_bias(dz)`.

    db has the dtype of w.
    """
    op = "conv2d_relu_max_pool2d_backward"
    arguments = x, w, w
    dy, x, w = checks.floating(op, dy=dy, x=x, w=w)
    options = _options(op, x, w, None, window, stride, padding, precision)
    _, windows = _split(x.shape[2:], w.shape[2:], **options)
    checks.shape(op, "dy", dy, x.shape[0], w.shape[0], *windows.output_size)
    indices = max_pool2d.check_indices(op, "indices", indices, dy.shape)
    b = jnp.zeros(w.shape[:1], w.dtype)
    backward = _CONV2D_RELU_MAX_POOL2D.backward
    return in_dtypes_of(arguments, backward(dy, indices, x, w, b, implementation=implementation, **options))


def _call(op, x, w, b, window, stride, padding, precision, implementation):
    x, w, b = checks.floating(op, x=x, w=w, b=b)
    options = _options(op, x, w, b, window, stride, padding, precision)
    return _CONV2D_RELU_MAX_POOL2D.named(op)(x, w, b, implementation=implementation, **options)


def _options(op, x, w, b, window, stride, padding, precision):
    *_, convolution = check_shapes(op, x, w, b, stride=stride, padding=padding, precision=precision)
    options = {name: convolution[name] for name in ("stride", "padding", "precision")}
    size = output_size(x.shape[2:], w.shape[2:], **convolution)
    windows, _ = pool_windows(op, size, window)
    return options | dict(window=windows.window)


_ANY = dict(window=(2, 3), padding=(1, 0))

ENTRIES = (
    Entry(
        conv2d_relu_max_pool2d,
        case_of((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_ANY),
        block_cases("block", lambda x, w, z, y: case_of(x, w, w[:1], window=2)),
    ),
    Entry(
        conv2d_relu_max_pool2d_with_indices,
        case_of((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_ANY),
        {"block1": case_of((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,), window=2)},
    ),
    Entry(
        conv2d_relu_max_pool2d_backward,
        case_of((1, 3, 2, 2), indices_of(1, 3, 2, 2, below=7), (1, 2, 5, 7), (3, 2, 3, 2), **_ANY),
        block_cases("block", lambda x, w, z, y: case_of(y, indices_of(*y, below=5), x, w, window=2)),
    ),
)
