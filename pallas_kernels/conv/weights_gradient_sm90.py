"""The weights' gradients of `conv2d` and `conv2d_relu_max_pool2d` on Hopper's tensor cores, with the batch last.

For each row p of windows the latter is one product over the batch,

    sums[(c, i, j), (t, k, q)] += sum over n of x[c, p * R + i, j, n] * routed[t, k, q, n],

x's rows under the windows' filters, and dy at the places t of the windows' maxima. The batch is the last axis of both,
as the tensor cores want float32, which they round to TF32. Of the sums, those of `j = q * S + s + v` and `i = r + u`
make the gradient of w[k, c, u, v]; the others, two in three for LeNet's second block, are waste.

For `conv2d` the t are R rows of its output, `routed` is the output's gradient, only rounded, and S = 1. A row of ones
among x's makes the bias's gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.conv import conv2d
from pallas_kernels.conv.conv2d_relu_max_pool2d import weights_gradient as exact_weights_gradient
from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import OPERAND_BYTES, load, operand, rounded_to_tf32, store

_MULTIPROCESSORS = 132
_SHARED_BYTES = 200 * 1024
# Rows of the tensor cores' tiles.
_TILE = 64
# A thread keeps half as many sums in its registers: with 144 it spills them.
_MAX_COLUMNS = 160
# Below, cutting the gradient out of the sums costs what the tensor cores save.
_LEAST_BATCH = 2048


@dataclasses.dataclass(frozen=True)
class Plan:
    """How programs divide the sums.

    Attributes:
      channels: input channels a program.
      places: places of a window a program.
      images_on_left: whether x's rows, not the routed gradient's, are the tiles of 64 rows, one a warpgroup.
      warpgroups: of a program.
      columns: sums a row.
      ones: the row of ones among x's.
      x_rows: of shared memory for x.
      bytes: of shared memory for each stage, and for the routed gradient.
    """

    channels: int
    places: int
    images_on_left: bool
    warpgroups: int
    columns: int
    ones: int
    x_rows: int
    bytes: tuple[int, int]

    @property
    def slots(self) -> int:
        """Stages in flight."""
        return min(4, (_SHARED_BYTES - self.bytes[1]) // self.bytes[0])


@functools.cache
def plan(
    dy_shape: tuple[int, ...],
    x_shape: tuple[int, ...],
    window: tuple[int, int],
    itemsize: int,
    pooled: bool = True,
) -> Plan | None:
    """The cheapest way to divide the sums, or None if there is none: rows must come in eights, and fit.

    Args:
      dy_shape: `(K, P, Q, N)`, P the rows of windows.
      x_shape: `(C, H, W, N)`.
      pooled: whether dy is that of the pool, to be routed, or that of all places of the windows.
    """
    K, P, Q, _ = dy_shape
    C, H, W, _ = x_shape
    R, S = window
    band = H - P * R + R
    if K * Q % 8 or band * W % 8 or R * W % 8 or H * W % 8:
        return None
    best, least = None, None
    for channels in (c for c in range(1, C + 1) if C % c == 0):
        ones = channels * band * W
        for places in (t for t in range(1, R * S + 1) if R * S % t == 0):
            routed = places * K * Q
            if not pooled and places * Q % 8:  # of each output channel, copied by itself
                continue
            for images_on_left in (False, True):
                warpgroups = -(-(ones + 8) // _TILE) if images_on_left else routed // _TILE
                columns = routed if images_on_left else ones + 8
                x_rows = warpgroups * _TILE if images_on_left else columns
                if not 1 <= warpgroups <= 4 or columns > _MAX_COLUMNS:
                    continue
                if (not images_on_left and routed % _TILE) or (K * Q if pooled else routed) % (8 * warpgroups):
                    continue
                if pooled:
                    stage, beside = OPERAND_BYTES * (x_rows + K * Q) + K * Q * OPERAND_BYTES // itemsize, 2 * routed
                else:
                    stage, beside = OPERAND_BYTES * (x_rows + routed), 0
                this = Plan(
                    channels, places, images_on_left, warpgroups, columns, ones, x_rows, (stage, OPERAND_BYTES * beside)
                )
                if this.slots < 2:
                    continue
                # Clocks: half a column a tensor-core instruction of 8 values, and 24 bytes from the cache.
                clocks = warpgroups * columns * OPERAND_BYTES // 64 + stage // 24
                programs = (C // channels) * (R * S // places)
                if least is None or clocks * programs < least:
                    best, least = this, clocks * programs
    return best


def pays(dy_shape: tuple[int, ...], x_shape: tuple[int, ...], window: tuple[int, int], itemsize: int) -> bool:
    """Whether `weights_gradient` takes these shapes, and is faster than the exact kernel."""
    return dy_shape[-1] >= _LEAST_BATCH and plan(dy_shape, x_shape, window, itemsize) is not None


def weights_gradient(dy: Array, place: Array, x: Array, *, window: tuple[int, int]) -> tuple[Array, Array]:
    """As `conv2d_relu_max_pool2d.weights_gradient`, for shapes that have a `plan`, float32 rounded to TF32.

    Where there is no GPU the exact kernel takes this one's place.
    """
    here, exact = (functools.partial(kernel, window=window) for kernel in (_weights_gradient, exact_weights_gradient))
    return on_gpu(here, exact, dy, place, x)


def _rows_at_once(dy_shape, x_shape) -> int | None:
    """Rows of a convolution's output in a product, so that x's rows and the gradient's come in eights."""
    (_, rows, Q, _), (_, _, W, _) = dy_shape, x_shape
    return next((R for R in (1, 2, 4) if rows % R == 0 and R * W % 8 == 0 and R * Q % 8 == 0), None)


def correlate_batch_plan(dy_shape: tuple[int, ...], x_shape: tuple[int, ...], itemsize: int) -> Plan | None:
    """The `plan` of `correlate_batch`, if it has one."""
    K, rows, Q, N = dy_shape
    R = _rows_at_once(dy_shape, x_shape)
    return R and plan((K, rows // R, Q, N), x_shape, (R, 1), itemsize, pooled=False)


def correlate_batch(dy: Array, x: Array) -> tuple[Array, Array]:
    """`conv2d.correlate_batch` with stride 1, and dy's sums, for shapes that have a plan.

    Of float32, dy is rounded to TF32 and x cut off. Where there is no GPU the exact kernels take this one's place.
    """

    def here(dy, x):
        return _weights_gradient(dy, None, x, window=(_rows_at_once(dy.shape, x.shape), 1))

    def exact(dy, x):
        return conv2d.correlate_batch(dy, x), conv2d.sum_batch(dy.reshape(dy.shape[0], -1, dy.shape[-1]))

    return on_gpu(here, exact, dy, x)


def _weights_gradient(dy, place, x, *, window):
    pooled = place is not None
    C, H, W, N = x.shape
    R, S = window
    K, P, Q, _ = dy.shape
    P = P if pooled else P // R
    F, G = H - P * R + 1, W - Q * S + 1
    band = F + R - 1
    tile = plan((K, P, Q, N), x.shape, window, dy.dtype.itemsize, pooled)
    slots, KQ = tile.slots, K * Q
    routed_rows = tile.places * KQ
    # Of the gradient, to be routed by each warpgroup.
    mine = (KQ if pooled else routed_rows) // tile.warpgroups
    examples = OPERAND_BYTES // dy.dtype.itemsize
    units = P * (N // examples)
    splits, turns = C // tile.channels, R * S // tile.places
    parts = min(units, -(-_MULTIPROCESSORS // (splits * turns)))
    per_part = -(-units // parts)
    parts = -(-units // per_part)
    # Two rows a warp, so that a warp's accesses to shared memory never meet in one bank.
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((8, examples), (2, examples), (examples // 16,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )

    def body(*refs, **ids):
        pl.run_scoped(functools.partial(accumulate, *refs, **ids), plgpu.ACC((_TILE, tile.columns)))

    def accumulate(x_ref, dy_ref, *refs, part, c, turn, warpgroup):
        if pooled:
            place_ref, sums_ref, xs, routed, loaded, ready, dys, places, sums = refs
        else:
            sums_ref, xs, routed, loaded, ready, sums = refs
        first = part * per_part
        steps = jnp.minimum(units - first, per_part)

        def fetch(step):
            slot, unit = step % slots, first + step
            p, n = unit % P, pl.ds(unit // P * examples, examples)
            for channel in range(tile.channels):
                rows = pl.ds(((c * tile.channels + channel) * H + p * R) * W, band * W)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, n], xs.at[slot, pl.ds(channel * band * W, band * W)], loaded.at[slot]
                )
            if pooled:
                plgpu.copy_gmem_to_smem(dy_ref.at[p, :, n], dys.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(place_ref.at[p, :, n], places.at[slot], loaded.at[slot])
            else:
                for k in range(K):
                    rows = pl.ds((k * P * R + p * R + turn * tile.places) * Q, tile.places * Q)
                    here = routed.at[slot, pl.ds(k * tile.places * Q, tile.places * Q)]
                    plgpu.copy_gmem_to_smem(dy_ref.at[rows, n], here, loaded.at[slot])

        def route(slot, buffer):
            rows = pl.ds(warpgroup * mine, mine)
            gradient = rounded_to_tf32(load((dys if pooled else routed).at[slot, rows], layout))
            if pooled:
                at = load(places.at[slot, rows], layout, optimized=False).astype(jnp.int32)
                for t in range(tile.places):
                    here = jnp.where(at == turn * tile.places + t, gradient, jnp.zeros_like(gradient))
                    routed[buffer, pl.ds(t * KQ + warpgroup * mine, mine)] = here
            else:
                routed[slot, rows] = gradient
            plgpu.commit_smem()

        @pl.when(warpgroup == 0)
        def _():
            ones = plgpu.layout_cast(jnp.ones((8, examples), x.dtype), layout)
            for slot in range(slots):
                xs[slot, tile.ones : tile.ones + 8] = ones
            plgpu.commit_smem()
            for step in range(slots - 1):
                pl.when(step < steps)(functools.partial(fetch, step))

        def add(step, _):
            slot = step % slots
            buffer = step % 2 if pooled else slot
            plgpu.barrier_wait(loaded.at[slot])
            if pooled or dy.dtype == jnp.float32:
                route(slot, buffer)
            # The product before this one is done, here and behind the barrier everywhere: what it read is free.
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)
            pl.when((warpgroup == 0) & (step + slots - 1 < steps))(lambda: fetch(step + slots - 1))
            left, right = (xs.at[slot], routed.at[buffer]) if tile.images_on_left else (routed.at[buffer], xs.at[slot])
            plgpu.wgmma(sums, left.at[pl.ds(warpgroup * _TILE, _TILE)], right.transpose((1, 0)))

        lax.fori_loop(0, steps, add, None)
        plgpu.wgmma_wait(0)
        store(sums_ref.at[part, c, turn, pl.ds(warpgroup * _TILE, _TILE)], sums[...])

    by_rows = lambda a: a.swapaxes(0, 1).reshape(P, -1, N)  # noqa: E731
    partial_sums = launch(
        body,
        x.reshape(C * H * W, N),
        *([by_rows(dy), by_rows(place)] if pooled else [dy.reshape(-1, N)]),
        out=jax.ShapeDtypeStruct((parts, splits, turns, tile.warpgroups * _TILE, tile.columns), jnp.float32),
        grid={"part": parts, "c": splits, "turn": turns},
        warpgroups=tile.warpgroups,
        scratch=[
            operand((slots, tile.x_rows, examples), x.dtype),
            operand((2 if pooled else slots, routed_rows, examples), dy.dtype),
            plgpu.Barrier(num_arrivals=tile.channels + (2 if pooled else K), num_barriers=slots),
            plgpu.Barrier(num_arrivals=tile.warpgroups),
            *([plgpu.SMEM((slots, KQ, examples), a) for a in (dy.dtype, jnp.uint8)] if pooled else []),
        ],
        name="conv2d_relu_max_pool2d_backward_weights_tensor_cores" if pooled else "correlate_batch_tensor_cores",
    )
    # x's rows first; the sums below are of slices then, and add up windows, columns and parts.
    rows_first = partial_sums if tile.images_on_left else partial_sums.swapaxes(3, 4)
    rows_first = rows_first.reshape(parts, splits, turns, -1, *((tile.places, K) if pooled else (K, tile.places)), Q)
    if not pooled:
        rows_first = rows_first.swapaxes(4, 5)
    db = jnp.sum(rows_first[:, 0, :, tile.ones], axis=(0, 1, 2, 4))
    images = rows_first[:, :, :, : tile.ones].reshape(parts, splits, turns, tile.channels, band, W, tile.places, K, Q)
    terms = [
        images[:, :, t // tile.places, :, t // S :, q * S + t % S :, t % tile.places, :, q][:, :, :, :F, :G]
        for t in range(R * S)
        for q in range(Q)
    ]
    dw = jnp.sum(sum(terms[1:], terms[0]), axis=0)
    return dw.reshape(C, F, G, K).transpose(3, 0, 1, 2), db
