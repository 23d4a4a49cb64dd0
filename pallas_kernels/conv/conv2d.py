"""The two products a convolution and its backward are made of, on arrays with the batch last.

Both are exact float32 arithmetic on the CUDA cores: an example a lane, weights broadcast to all lanes. Small images are
here also as one matrix product for the tensor cores, with the filters laid out by `filter_matrix`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.lax import PrecisionLike

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, vector_length, zeros_like

# A program keeps its sums in registers: a thread has 255, and needs some for operands and addresses.
_MAX_ACCUMULATORS = 160
_MAX_UNROLLED_TAPS = 64
# Enough programs to fill the multiprocessors of any current GPU several times over.
_WANTED_PROGRAMS = 1024

# Where `filter_matrix` pays: small enough to make anew in every call, and not too many zeros a tap. Measured up to 2.6
# million elements and 31 positions a tap (28 x 28 images, 5 x 5 filters), which takes a quarter of the library's time.
_MAX_MATRIX_ELEMENTS = 1 << 22
_MAX_POSITIONS_PER_TAP = 32


def correlate(x: Array, w: Array, *, stride: tuple[int, int] = (1, 1)) -> Array:
    """`y[k, i, j, n] = sum over c, u, v of x[c, i * stride + u, j * stride + v, n] * w[k, c, u, v]`.

    Args:
      x: `(C, H, W, N)`, the batch N a multiple of `LANES`.
      w: `(K, C, F, G)`.

    Returns:
      `(K, (H - F) // stride + 1, (W - G) // stride + 1, N)` in x's dtype, summed in float32.
    """
    C, H, W, N = x.shape
    K, _, F, G = w.shape
    rows, columns = (H - F) // stride[0] + 1, (W - G) // stride[1] + 1
    length = vector_length(x)
    ks = largest_divisor(K, 8)
    taps = _tap_block(C, F, G)

    def body(x_ref, w_ref, y_ref, *, block, i, k):
        lanes = pl.ds(block * length, length)

        def position(j, _):
            def add_taps(t, sums):
                sums = list(sums)
                for c, u, v in taps(t):
                    value = x_ref[c, i * stride[0] + u, j * stride[1] + v, lanes].astype(jnp.float32)
                    for q in range(ks):
                        sums[q] += value * w_ref[k * ks + q, c, u, v]
                return tuple(sums)

            zero = zeros_like(x_ref[0, 0, 0, lanes])
            sums = lax.fori_loop(0, taps.blocks, add_taps, (zero,) * ks)
            for q in range(ks):
                y_ref[k * ks + q, i, j, lanes] = sums[q].astype(y_ref.dtype)

        lax.fori_loop(0, columns, position, None)

    return launch(
        body,
        x,
        w.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((K, rows, columns, N), x.dtype),
        grid={"block": N // length, "i": rows, "k": K // ks},
        name="correlate",
    )


def correlate_batch(dy: Array, x: Array, *, stride: tuple[int, int] = (1, 1)) -> Array:
    """`dw[k, c, u, v] = sum over i, j, n of dy[k, i, j, n] * x[c, i * stride + u, j * stride + v, n]`.

    Each program sums a part of the rows and the batch in a fixed order; the parts are then summed in a fixed order.

    Args:
      dy: `(K, I, J, N)`, the batch N a multiple of `LANES`.
      x: `(C, H, W, N)`; H and W give the filter's size, `F = H - (I - 1) * stride`.

    Returns:
      `(K, C, F, G)` in float32.
    """
    K, rows, columns, N = dy.shape
    C, H, W, _ = x.shape
    F, G = H - (rows - 1) * stride[0], W - (columns - 1) * stride[1]
    # A tile of the filter, of channels in and out, whose sums fit into the registers.
    fs = F if F * G <= _MAX_ACCUMULATORS else 1
    gs = G if fs * G <= _MAX_ACCUMULATORS else 1
    ks = largest_divisor(K, min(8, _MAX_ACCUMULATORS // (fs * gs)))
    cs = largest_divisor(C, min(8, _MAX_ACCUMULATORS // (fs * gs * ks)))
    tile = [(k, c, u, v) for k in range(ks) for c in range(cs) for u in range(fs) for v in range(gs)]
    tiles = (K // ks, C // cs, F // fs, G // gs)
    # The work to share out: pairs of a row and a vector of the batch.
    units = (N // LANES) * rows
    parts = min(units, -(-_WANTED_PROGRAMS // math.prod(tiles)))
    per_part = -(-units // parts)

    def body(dy_ref, x_ref, dw_ref, *, part, k, c, u, v):
        def add_position(n, sums):
            unit, j = n // columns, n % columns
            i, lanes = unit % rows, pl.ds((unit // rows) * LANES, LANES)
            d = [dy_ref[k * ks + q, i, j, lanes].astype(jnp.float32) for q in range(ks)]
            sums = list(sums)
            loaded = {}
            for s, (kt, ct, ut, vt) in enumerate(tile):
                at = (c * cs + ct, i * stride[0] + u * fs + ut, j * stride[1] + v * gs + vt)
                if (ct, ut, vt) not in loaded:
                    loaded[ct, ut, vt] = x_ref[*at, lanes].astype(jnp.float32)
                sums[s] += d[kt] * loaded[ct, ut, vt]
            return tuple(sums)

        zero = zeros_like(dy_ref[0, 0, 0, pl.ds(0, LANES)])
        first, last = part * per_part, jnp.minimum((part + 1) * per_part, units)
        sums = lax.fori_loop(first * columns, last * columns, add_position, (zero,) * len(tile))
        for s, (kt, ct, ut, vt) in enumerate(tile):
            dw_ref[part, k * ks + kt, c * cs + ct, u * fs + ut, v * gs + vt] = jnp.sum(sums[s])

    partial_sums = launch(
        body,
        dy,
        x,
        out=jax.ShapeDtypeStruct((parts, K, C, F, G), jnp.float32),
        grid={"part": parts, "k": tiles[0], "c": tiles[1], "u": tiles[2], "v": tiles[3]},
        name="correlate_batch",
    )
    return jnp.sum(partial_sums, axis=0)


def sum_batch(dy: Array) -> Array:
    """`db[k] = sum over r, n of dy[k, r, n]`: `(K, R, N) -> (K,)` in float32, in a fixed order."""
    K, R, N = dy.shape

    def body(dy_ref, db_ref, *, k, block):
        lanes = pl.ds(block * LANES, LANES)
        zero = zeros_like(dy_ref[k, 0, lanes])
        total = lax.fori_loop(0, R, lambda r, total: total + dy_ref[k, r, lanes].astype(jnp.float32), zero)
        db_ref[k, block] = jnp.sum(total)

    blocks = N // LANES
    out = jax.ShapeDtypeStruct((K, blocks), jnp.float32)
    return jnp.sum(launch(body, dy, out=out, grid={"k": K, "block": blocks}, name="sum_batch"), axis=1)


def matrix_pays(w_shape: tuple[int, ...], input_size: tuple[int, int], output_size: tuple[int, int]) -> bool:
    """Whether a product with the `filter_matrix` is faster than the convolution; that of one tap is itself one."""
    K, C, F, G = w_shape
    positions = math.prod(input_size)
    elements = C * positions * K * math.prod(output_size)
    return F * G > 1 and elements <= _MAX_MATRIX_ELEMENTS and positions <= _MAX_POSITIONS_PER_TAP * F * G


def filter_matrix(
    w: Array,
    *,
    input_size: tuple[int, int],
    output_size: tuple[int, int],
    stride: tuple[int, int],
    before: tuple[int, int],
    dilation: tuple[int, int],
) -> Array:
    """A convolution as a matrix: `matrix[(c, h, l), (k, i, j)] = w[k, c, u, v]` where input (h, l) meets output (i, j),
    that is `h = i * stride + u * dilation - before` and l likewise, and 0 elsewhere.

    Args:
      w: `(K, C, F, G)`.
      input_size: H and W.
      output_size: I and J.
      before: rows of padding above and columns to the left of the input.

    Returns:
      `(C * H * W, K * I * J)` in w's dtype.
    """
    K, C, *window = w.shape
    taps, exists = [], []
    for size, out, f, s, p, d in zip(input_size, output_size, window, stride, before, dilation, strict=True):
        ahead = np.arange(size)[:, None] + p - np.arange(out) * s
        exists.append((ahead >= 0) & (ahead < f * d) & (ahead % d == 0))
        taps.append(np.where(exists[-1], ahead // d, 0))
    (u, v), (in_rows, in_columns) = taps, exists
    meet = in_rows[:, None, :, None] & in_columns[None, :, None, :]
    matrix = jnp.where(meet, w[:, :, u[:, None, :, None], v[None, :, None, :]], 0)  # (K, C, H, W, I, J)
    return matrix.transpose(1, 2, 3, 0, 4, 5).reshape(C * math.prod(input_size), K * math.prod(output_size))


def times_matrix(images: Array, matrix: Array, *, transposed: bool = False, precision: PrecisionLike = None) -> Array:
    """Each example's `(C, H, W)`, laid out flat, times a `filter_matrix`: `(N, K * I * J)` in its dtype.

    With `transposed` it is `(N, K, I, J) -> (N, C * H * W)`, the gradient of that in its images.
    """
    flat = images.reshape(images.shape[0], math.prod(images.shape[1:]))
    contracted = ((1,), (int(transposed),)), ((), ())
    y = lax.dot_general(flat, matrix, contracted, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(images.dtype)


class _tap_block:
    """Splits the taps (c, u, v) of a filter into equal blocks: a loop over blocks, unrolled within one."""

    def __init__(self, C: int, F: int, G: int):
        self.F = F
        self.fs = F if F * G <= _MAX_UNROLLED_TAPS else 1
        self.gs = G if self.fs * G <= _MAX_UNROLLED_TAPS else 1
        self.cs = largest_divisor(C, 8) if F * G == 1 else 1
        self.shape = (C // self.cs, F // self.fs, G // self.gs)
        self.blocks = math.prod(self.shape)

    def __call__(self, block):
        _, us, vs = self.shape
        c, u, v = block // (us * vs), block // vs % us, block % vs
        return [
            (c * self.cs + ct, u * self.fs + ut, v * self.gs + vt)
            for ct in range(self.cs)
            for ut in range(self.fs)
            for vt in range(self.gs)
        ]
