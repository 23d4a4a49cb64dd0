"""Convolution, bias, ReLU and max-pooling in one kernel each way, on arrays with the batch last.

The forward keeps the pooled output and a byte a window: the place of its maximum, or one past the last place where
ReLU was off. From these and the input the backward makes every gradient, so nothing of the convolution's full
resolution is ever in memory. Windows do not overlap: the pool's stride is its size, the convolution's is 1.

The kernels compute in exact float32 on the CUDA cores: an example a lane, weights broadcast to all lanes. One gradient
is also here as matrix products for the tensor cores, `input_gradient_banded`, where a row of the filter bank fits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.lax import PrecisionLike

from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import LANES, SUMMED_ROWS, largest_divisor, sums_over_lanes, zeros_like
from pallas_kernels.core.tiles import check_divides, tunable

# Of an H200, for which the tiles below were chosen; right anywhere, and close on its neighbours.
_MULTIPROCESSORS = 132
_REGISTERS = 65536
_OTHER_REGISTERS = 64
# A program keeps its sums in registers: a thread has 255, and needs some for operands and addresses.
_MAX_ACCUMULATORS = 160
# Enough programs to fill the multiprocessors several times over.
_WANTED_PROGRAMS = 6 * _MULTIPROCESSORS

MAX_TAPS = 64
"""The largest filter, in places, that these kernels unroll."""

MAX_PLACES = 16
"""The largest window."""


def _vector(N: int, longest: int) -> int:
    return max(length for length in (LANES, 2 * LANES) if N % length == 0 and length <= longest)


@tunable(
    ks=(2, 3, 4, 6, 8),
    qs=(1, 2, 4),
    length=(LANES, 2 * LANES),
    # One program a multiprocessor takes ks and qs as they are; more make them smaller.
    wanted=(_MULTIPROCESSORS, 6 * _MULTIPROCESSORS),
)
def forward(
    x: Array,
    w: Array,
    b: Array,
    *,
    window: tuple[int, int],
    ks: int | None = None,
    qs: int | None = None,
    length: int = 2 * LANES,
    wanted: int = _WANTED_PROGRAMS,
) -> tuple[Array, Array]:
    """`y[k, p, q, n] = max(0, b[k] + max over the window of conv(x, w)[k, p * R + r, q * S + s, n])`.

    Args:
      x: `(C, H, W, N)`, the batch N a multiple of `LANES`.
      w: `(K, C, F, G)`.
      b: `(K,)`.
      window: R and S.
      ks, qs: output channels, and windows beside each other, of which a program keeps the sums in registers, at most:
        a weight is loaded once for all the places of these windows. By default what a sweep on an H200 found.
      length: of vectors of the batch, at most.
      wanted: programs to launch, at least, where there is work for so many.

    Returns:
      y `(K, (H - F + 1) // R, (W - G + 1) // S, N)` in x's dtype, and the places `r * S + s`, uint8 of that shape,
      R * S where y = 0.
    """
    C, H, W, N = x.shape
    K, _, F, G = w.shape
    R, S = window
    P, Q = (H - F + 1) // R, (W - G + 1) // S
    length = _vector(N, length)
    rows = (N // length) * P
    # Fewer channels and columns a program where the batch alone does not keep the GPU busy.
    ks, qs = ks or (8 if C == 1 else 2), qs or (1 if C == 1 else 4)
    qs = next((d for d in range(largest_divisor(Q, qs), 1, -1) if Q % d == 0 and rows * K * (Q // d) >= wanted), 1)
    steps = Q // qs
    ks = next((d for d in range(largest_divisor(K, ks), 1, -1) if K % d == 0 and rows * (K // d) * steps >= wanted), 1)
    turns = steps // next((d for d in range(1, steps) if steps % d == 0 and rows * (K // ks) * d >= wanted), steps)
    places = [(r, s) for r in range(R) for s in range(S)]
    windows = [(o, n) for o in range(ks) for n in range(qs)]

    def body(x_ref, w_ref, b_ref, y_ref, place_ref, *, block, p, step, k):
        lanes = pl.ds(block * length, length)

        def turn(turn, _):
            q = (step * turns + turn) * qs

            def add_channel(c, sums):
                sums = dict(zip(windows, sums, strict=True))
                patch = {
                    (i, j): x_ref[c, p * R + i, q * S + j, lanes].astype(jnp.float32)
                    for i in range(F + R - 1)
                    for j in range(G + qs * S - 1)
                }
                for u in range(F):
                    for v in range(G):
                        for o in range(ks):
                            weight = w_ref[k * ks + o, c, u, v]
                            for n in range(qs):
                                values = (patch[u + r, v + n * S + s] for r, s in places)
                                sums[o, n] = [
                                    total + value * weight for total, value in zip(sums[o, n], values, strict=True)
                                ]
                return [sums[at] for at in windows]

            zero = zeros_like(x_ref[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero] * len(places)] * len(windows)
            sums = add_channel(0, sums) if C == 1 else lax.fori_loop(0, C, add_channel, sums)
            for (o, n), (largest, *others) in zip(windows, sums, strict=True):
                place = jnp.where(largest != largest, 0, 0)
                for t, value in enumerate(others, start=1):
                    place = jnp.where(value > largest, t, place)
                    largest = jnp.maximum(largest, value)
                largest += b_ref[k * ks + o]
                y_ref[k * ks + o, p, q + n, lanes] = jnp.maximum(largest, 0.0).astype(y_ref.dtype)
                place = jnp.where(largest > 0, place, len(places))
                place_ref[p, k * ks + o, q + n, lanes] = place.astype(jnp.uint8)

        lax.fori_loop(0, turns, turn, None)

    y, place = launch(
        body,
        x,
        w.astype(jnp.float32),
        b.astype(jnp.float32),
        # The places by rows of windows, as the backward wants them.
        out=(jax.ShapeDtypeStruct((K, P, Q, N), x.dtype), jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8)),
        grid={"block": N // length, "p": P, "step": steps // turns, "k": K // ks},
        name="conv2d_relu_max_pool2d",
    )
    return y, place.swapaxes(0, 1)


@tunable(ks=(1, 2, 3, 4, 6), parts=tuple(n * _MULTIPROCESSORS // 4 for n in (1, 2, 4, 8, 16, 32)))
def weights_gradient(
    dy: Array,
    place: Array,
    x: Array,
    *,
    window: tuple[int, int],
    ks: int | None = None,
    parts: int | None = None,
) -> tuple[Array, Array]:
    """Gradients of `forward` in w and b, each part of the rows and the batch summed in a fixed order.

    Args:
      dy: `(K, P, Q, N)`, the gradient in y.
      place: as `forward` gives it.
      x: `(C, H, W, N)`, of H = P * R + F - 1 and W = Q * S + G - 1.
      ks, parts: output channels a program, and parts of the rows and the batch, at most; both or neither.

    Returns:
      dw `(K, C, F, G)` and db `(K,)` in float32.
    """
    K, P, Q, N = dy.shape
    C, H, W, _ = x.shape
    F, G = H - P * window[0] + 1, W - Q * window[1] + 1
    units = (N // LANES) * P * Q
    if ks is None or parts is None:
        ks, parts = _weights_gradient_tile(units, C, K, F * G)
    check_divides("conv2d_relu_max_pool2d.weights_gradient", "ks", ks, K)
    per_part = -(-units // min(parts, units))
    here, elsewhere = (
        functools.partial(_weights_gradient, window=window, ks=ks, per_part=per_part, through_shared_memory=through)
        for through in (True, False)
    )
    return on_gpu(here, elsewhere, dy, place, x)


def _weights_gradient(dy, place, x, *, window, ks, per_part, through_shared_memory):
    K, P, Q, N = dy.shape
    C, H, W, _ = x.shape
    R, S = window
    F, G = H - P * R + 1, W - Q * S + 1
    units = (N // LANES) * P * Q
    parts = -(-units // per_part)
    taps = ks * F * G
    rows = -(-(taps + ks) // SUMMED_ROWS) * SUMMED_ROWS

    def body(dy_ref, place_ref, x_ref, sums_ref, *scratch, part, k, c):
        def add_position(n, sums):
            p, q, lanes = n // Q % P, n % Q, pl.ds(n // (P * Q) * LANES, LANES)
            patch = {
                (i, j): x_ref[c, p * R + i, q * S + j, lanes].astype(jnp.float32)
                for i in range(F + R - 1)
                for j in range(G + S - 1)
            }
            weights, biases = list(sums[:taps]), list(sums[taps:])
            for o in range(ks):
                gradient = dy_ref[k * ks + o, p, q, lanes].astype(jnp.float32)
                at = place_ref[p, k * ks + o, q, lanes].astype(jnp.int32)
                biases[o] += jnp.where(at < R * S, gradient, 0.0)
                for t in range(R * S):
                    here = jnp.where(at == t, gradient, 0.0)
                    for u in range(F):
                        for v in range(G):
                            weights[(o * F + u) * G + v] += here * patch[u + t // S, v + t % S]
            return (*weights, *biases)

        zero = zeros_like(x_ref[0, 0, 0, pl.ds(0, LANES)].astype(jnp.float32))
        first, last = part * per_part, jnp.minimum((part + 1) * per_part, units)
        sums = lax.fori_loop(first, last, add_position, (zero,) * (taps + ks))
        totals = [*sums, *[zero] * (rows - len(sums))]
        if not scratch:
            for n, total in enumerate(totals):
                sums_ref[part, k, c, n] = jnp.sum(total)
            return
        (lanes_ref,) = scratch
        for n, total in enumerate(totals):
            lanes_ref[n] = total
        sums_over_lanes(lanes_ref, sums_ref.at[part, k, c])

    sums = launch(
        body,
        dy,
        # As the forward wrote them, without a transpose.
        place.swapaxes(0, 1),
        x,
        out=jax.ShapeDtypeStruct((parts, K // ks, C, rows), jnp.float32),
        grid={"part": parts, "k": K // ks, "c": C},
        scratch=[plgpu.SMEM((rows, LANES), jnp.float32)] if through_shared_memory else (),
        barriers=False,
        name="conv2d_relu_max_pool2d_backward_weights",
    )
    sums = jnp.sum(sums, axis=0)
    dw = sums[:, :, :taps].reshape(K // ks, C, ks, F, G).swapaxes(1, 2).reshape(K, C, F, G)
    # Every input channel's program saw the same gradients: the first one's sum is the bias's.
    return dw, sums[:, 0, taps : taps + ks].reshape(K)


def _weights_gradient_tile(units: int, C: int, K: int, taps: int) -> tuple[int, int]:
    """Output channels a program, and parts of the batch: chosen by a sweep on an H200."""
    # An image of one channel is loaded by every program: six channels share it, at two programs a multiprocessor.
    largest = max(1, min(6 if C == 1 else 2, _MAX_ACCUMULATORS // taps))
    for ks in (d for d in range(largest_divisor(K, largest), 0, -1) if K % d == 0):
        resident = max(1, _REGISTERS // (LANES * (ks * (taps + 1) + _OTHER_REGISTERS)))
        parts = min(units, -(-2 * resident * _MULTIPROCESSORS // (C * (K // ks))))
        # Fewer channels a program where the batch does not give each enough windows to sum over.
        if units >= 12 * parts:
            break
    return ks, parts


@tunable(cs=(1, 2, 3, 6), length=(LANES, 2 * LANES))
def input_gradient(
    dy: Array,
    place: Array,
    w: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    cs: int = 6,
    length: int = 2 * LANES,
) -> Array:
    """Gradient of `forward` in x.

    A program owns a row of cells, the size of a window, of one or more input channels.

    Args:
      dy, place: `(K, P, Q, N)`.
      w: `(K, C, F, G)`.
      input_size: H and W.
      cs: input channels a program, at most.
      length: of vectors of the batch, at most.

    Returns:
      dx `(C, H, W, N)` in dy's dtype.
    """
    K, P, Q, N = dy.shape
    _, C, F, G = w.shape
    R, S = window
    rows, columns = -(-input_size[0] // R), -(-input_size[1] // S)
    length, cs = _vector(N, length), largest_divisor(C, cs)
    cell = [(i, j) for i in range(R) for j in range(S)]
    # Windows whose filters reach into a cell start up to this many cells above it and to its left.
    reach_p, reach_q = (F + R - 2) // R + 1, (G + S - 2) // S + 1

    def body(dy_ref, place_ref, w_ref, dx_ref, *, block, row, c):
        lanes = pl.ds(block * length, length)

        def column(q0, _):
            def add_channel(k, sums):
                # The gradient at the convolution's resolution, around this cell: zero but at each window's maximum.
                around = {}
                for back_p in range(reach_p):
                    for back_q in range(reach_q):
                        p, q = row - back_p, q0 - back_q
                        exists = (p >= 0) & (p < P) & (q >= 0) & (q < Q)
                        p, q = jnp.clip(p, 0, P - 1), jnp.clip(q, 0, Q - 1)
                        gradient = dy_ref[k, p, q, lanes].astype(jnp.float32)
                        places = jnp.where(exists, place_ref[p, k, q, lanes].astype(jnp.int32), -1)
                        for t in range(R * S):
                            here = (t // S - back_p * R, t % S - back_q * S)
                            around[here] = jnp.where(places == t, gradient, 0.0)
                sums = list(sums)
                for o in range(cs):
                    for u in range(F):
                        for v in range(G):
                            weight = w_ref[k, c * cs + o, u, v]
                            for n, (i, j) in enumerate(cell):
                                sums[o * len(cell) + n] += around[i - u, j - v] * weight
                return tuple(sums)

            zero = zeros_like(dy_ref[0, 0, 0, lanes].astype(jnp.float32))
            sums = lax.fori_loop(0, K, add_channel, (zero,) * (cs * len(cell)))
            for n, total in enumerate(sums):
                o, (i, j) = n // len(cell), cell[n % len(cell)]
                dx_ref[c * cs + o, row * R + i, q0 * S + j, lanes] = total.astype(dx_ref.dtype)

        lax.fori_loop(0, columns, column, None)

    dx = launch(
        body,
        dy,
        place.swapaxes(0, 1),
        w.astype(jnp.float32),
        out=jax.ShapeDtypeStruct((C, rows * R, columns * S, N), dy.dtype),
        grid={"block": N // length, "row": rows, "c": C // cs},
        name="conv2d_relu_max_pool2d_backward_input",
    )
    return dx[:, : input_size[0], : input_size[1]]


_MAX_BAND_ELEMENTS = 1 << 20


def band_fits(w_shape: tuple[int, ...], dy_shape: tuple[int, ...], width: int, window: tuple[int, int]) -> bool:
    """Whether the matrix of `input_gradient_banded` is small enough to pay."""
    _, C, F, _ = w_shape
    K, _, Q, _ = dy_shape
    R, S = window
    return C * (F + R - 1) * width * K * R * S * Q <= _MAX_BAND_ELEMENTS


def input_gradient_banded(
    dy: Array,
    place: Array,
    w: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    precision: PrecisionLike = None,
) -> Array:
    """`input_gradient` as one matrix product a row of windows, all with the same banded matrix of filters.

    It multiplies more (the band's zeros, and three zeros in four of the routed gradient), at the tensor cores' rate.
    """
    K, P, Q, N = dy.shape
    _, C, F, G = w.shape
    R, S = window
    H, W = input_size
    band = F + R - 1
    # band[(c, i, j), (k, r, s, q)] = w[k, c, i - r, j - (q * S + s)] where that is in the filter.
    i, j = np.arange(band)[:, None, None, None, None], np.arange(W)[None, :, None, None, None]
    r, s, q = np.arange(R)[:, None, None], np.arange(S)[:, None], np.arange(Q)
    u, v = np.broadcast_arrays(i - r, j - (q * S + s))
    inside = (u >= 0) & (u < F) & (v >= 0) & (v < G)
    taps = w[:, :, np.where(inside, u, 0), np.where(inside, v, 0)]
    matrix = jnp.where(inside, taps, 0).transpose(1, 2, 3, 0, 4, 5, 6).reshape(C * band * W, K * R * S * Q)
    # The gradient at the convolution's resolution, a row of windows at a time.
    places = jnp.arange(R * S, dtype=place.dtype)[:, None, None]
    dy, place = dy.swapaxes(0, 1)[:, :, None], place.swapaxes(0, 1)[:, :, None]
    routed = jnp.where(place == places, dy, 0).reshape(P, K * R * S * Q, N)
    products = lax.dot_general(
        jnp.broadcast_to(matrix, (P, *matrix.shape)),
        routed,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).reshape(P, C, band, W, N)
    below = [(p * R, H - band - p * R) for p in range(P)]
    rows = [jnp.pad(products[p], ((0, 0), below[p], (0, 0), (0, 0))) for p in range(P)]
    return sum(rows[1:], rows[0]).astype(dy.dtype)
