"""Gradients of `conv2d` and `conv2d_relu_max_pool2d` with respect to the weights on Hopper's tensor cores.

For `conv2d_relu_max_pool2d`, each row p of pooling windows adds one matrix product to the sums:

    sums[(c, i, j), (t, k, q)] += sum over n of x[c, p * R + i, j, n] * routed[t, k, q, n].

c and k are input and output channels, and n is an example. i counts the rows of x that the filters read for row p. j
counts all columns of x. q is a window in row p, and t = (r, s) one of its R x S positions. `routed` is dy at the
positions of the maxima, and zero elsewhere. For position (u, v) in a filter, dw[k, c, u, v] is the total over t and q
of the sums with `i = r + u` and `j = q * S + s + v`.

For `conv2d`, each product takes R = 1, 2, or 4 rows of dy: S is 1, and `routed[(r, 0), k, q]` is `dy[k, p * R + r, q]`.

A CTA computes the sums for part of the input channels c and positions t, over one split: part of the rows p and
examples n. Each warpgroup multiplies 64 rows of the left operand, x or `routed`, by the right operand. At the end, the
CTA writes the sums to device memory, and gathers the elements of each dw[k, c, u, v] through the L2 cache.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import columns, gather_elements, lane_and_column, meet, sums_of_rows
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    OPERAND_BYTES,
    divisors,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    rounded_to_tf32,
    store,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_TILE = 64
"""Rows of the left operand that one warpgroup multiplies."""
_MAX_WARPGROUPS = 4
"""Each thread then has 128 registers."""
_MAX_COLUMNS = 160
"""Columns of a CTA's product. A thread keeps one sum per two columns, and spills registers with 144 sums."""
_MAX_STAGES = 4
"""Not tuned."""
_RESERVED_BYTES = 27 * 1024
"""Bytes of shared memory left free for barriers, sums across warps, and a reserve. Stages were tuned with it."""
_BLOCK_COLUMNS = 4
"""Elements that a thread gathers at once: 16 bytes."""


class Config(NamedTuple):
    """Tile per CTA: `channels` input channels, and `places` positions in each pooling window. The left operand of
    `wgmma` is x if `images_on_left`, otherwise `routed`."""

    channels: int
    places: int
    images_on_left: bool
    stages: int


def _tile(dy, x, window, config, pooled):
    """Return the sizes of a CTA's operands. Without pooling, a window is R rows of one column of dy."""
    (K, P, Q, _), (_, H, W, _), (R, _) = dy.shape, x.shape, window
    band = H - (P * R if pooled else P) + R
    ones, routed = config.channels * band * W, config.places * K * Q
    warpgroups = -(-(ones + 8) // _TILE) if config.images_on_left else routed // _TILE
    return SimpleNamespace(
        band=band,  # rows of x that the filters read for one row of windows
        ones=ones,  # index of the first of eight rows of ones, after x's rows. Their product with `routed` yields db.
        routed=routed,  # rows of `routed`
        gradients=K * Q if pooled else routed,  # rows of dy
        warpgroups=warpgroups,
        columns=routed if config.images_on_left else ones + 8,
        x_rows=warpgroups * _TILE if config.images_on_left else ones + 8,
        examples=OPERAND_BYTES // dy.dtype.itemsize,
    )


def _plan(dy: Any, x: Any, window: tuple[int, int], pooled: bool) -> Config | str:
    (K, _, Q, _), (C, H, W, _), (R, S) = dy.shape, x.shape, window
    configs, shared_bytes = {}, device.target().shared_bytes - _RESERVED_BYTES
    for channels, places, images_on_left in itertools.product(divisors(C), divisors(R * S), (False, True)):
        tile = _tile(dy, x, window, Config(channels, places, images_on_left, 0), pooled)
        stage_bytes = OPERAND_BYTES * (tile.x_rows + tile.gradients) + pooled * tile.gradients * tile.examples
        stages = (shared_bytes - pooled * OPERAND_BYTES * 2 * tile.routed) // stage_bytes
        config = Config(channels, places, images_on_left, min(_MAX_STAGES, stages))
        if (
            not any(rows % 8 for rows in (K * Q, tile.band * W, R * W, H * W))
            # dy of `conv2d` is copied one channel at a time, in whole tiles of eight rows.
            and (pooled or places * Q % 8 == 0)
            and 1 <= tile.warpgroups <= _MAX_WARPGROUPS
            and tile.columns <= _MAX_COLUMNS
            and (images_on_left or tile.routed % _TILE == 0)
            and tile.gradients % (8 * tile.warpgroups) == 0
            and config.stages >= 2
        ):
            # Estimated clock cycles per row of windows and block of examples: two per column, one per 24 loaded bytes.
            clocks = tile.warpgroups * tile.columns * OPERAND_BYTES // 64 + stage_bytes // 24
            configs.setdefault(clocks * (C // channels) * (R * S // places), config)
    misfit = f"dy {dy.shape} with x {x.shape}: their rows do not come in eights, or fit no tiles in shared memory"
    return configs[min(configs)] if configs else misfit


def _rows_a_product(dy, x):
    (_, rows, Q, _), W = dy.shape, x.shape[2]
    # A tile of an operand has eight rows, one per pixel. If no R fits, no config fits R = 1 either.
    return next((R for R in (1, 2, 4) if rows % R == 0 and R * W % 8 == 0 and R * Q % 8 == 0), 1)


@kernel(plan=lambda dy, place, x, *, window: _plan(dy, x, window, pooled=True), capability=(9, 0))
def weights_gradient(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: Config
) -> tuple[Array, Array]:
    """Compute `conv2d_relu_max_pool2d_weights_gradient.weights_gradient` on the tensor cores. float32 dy is rounded to
    TF32, and float32 x is truncated."""
    return _gradients(dy, place, x, window, config, "conv2d_relu_max_pool2d_backward_weights_tensor_cores")


@kernel(plan=lambda dy, x: _plan(dy, x, (_rows_a_product(dy, x), 1), pooled=False), capability=(9, 0))
def correlate_batch(dy: Array, x: Array, *, config: Config) -> tuple[Array, Array]:
    """Return dw of `conv2d.correlate_batch` for stride 1, and float32 db `(K,)`, the sum of dy per output channel.
    float32 dy is rounded to TF32, and float32 x is truncated."""
    return _gradients(dy, None, x, (_rows_a_product(dy, x), 1), config, "correlate_batch_tensor_cores")


def _gradients(dy, place, x, window, config, name):
    pooled = place is not None
    tile = _tile(dy, x, window, config, pooled)
    (K, P, Q, N), (C, H, W, _), (R, S) = dy.shape, x.shape, window
    P = P if pooled else P // R
    F, G = H - P * R + 1, W - Q * S + 1
    channels, places, warpgroups, examples = config.channels, config.places, tile.warpgroups, tile.examples
    taps, band_rows, share = channels * F * G, tile.band * W, tile.gradients // warpgroups
    vectors, shares = -(-(taps + 1) * K // LANES), (C // channels, R * S // places)
    units = P * (N // examples)
    per_split = -(-units // min(units, -(-device.target().multiprocessors // (shares[0] * shares[1]))))
    splits = -(-units // per_split)
    # Two rows per warp avoid bank conflicts in shared memory.
    tiling = plgpu.Tiling(((8, examples), (2, examples), (examples // 16,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def body(x, dy, place, out, gradients, xs, routed, loaded, ready, dys, places_of_maxima, *, split, c, t, warpgroup):
        """Compute a product for the input channels `c` and the positions `t` of windows. With pooling, `routed` has two
        buffers: threads fill one while the tensor cores read the other. Otherwise, `routed` is dy."""

        @functools.partial(pl.run_scoped, sums=plgpu.ACC((_TILE, tile.columns)))
        def _(sums):
            first = split * per_split
            steps = jnp.minimum(units - first, per_split)

            def copy(step, stage, barrier):
                unit = first + step
                p, block = remainder(unit, P), pl.ds(quotient(unit, P) * examples, examples)
                for channel in range(channels):
                    under = pl.ds(((c * channels + channel) * H + p * R) * W, band_rows)
                    to = xs.at[stage, pl.ds(channel * band_rows, band_rows)]
                    plgpu.copy_gmem_to_smem(x.at[under, block], to, barrier)
                if not pooled:
                    for k in range(K):
                        rows = pl.ds((k * P * R + p * R + t * places) * Q, places * Q)
                        to = routed.at[stage, pl.ds(k * places * Q, places * Q)]
                        plgpu.copy_gmem_to_smem(dy.at[rows, block], to, barrier)
                    return
                if simulating() is None:
                    plgpu.copy_gmem_to_smem(dy.at[:, p, :, block], dys.at[stage].reshape(K, Q, examples), barrier)
                else:  # The simulator reshapes no memory.
                    for k in range(K):
                        plgpu.copy_gmem_to_smem(dy.at[k, p, :, block], dys.at[stage, pl.ds(k * Q, Q)], barrier)
                plgpu.copy_gmem_to_smem(place.at[p, :, block], places_of_maxima.at[stage], barrier)

            ring = Ring(config.stages, copy, loaded, steps)

            @pl.when(warpgroup == 0)
            def _():
                ones = plgpu.layout_cast(jnp.ones((8, examples), x.dtype), layout)
                for stage in range(ring.stages):
                    xs[stage, tile.ones : tile.ones + 8] = ones
                plgpu.commit_smem()
                ring.prefetch(ring.stages - 1)

            def route(step, stage):
                """Write this step's part of `routed` to one of its buffers, and return the index of the buffer."""
                if not pooled and dy.dtype != jnp.float32:
                    return stage
                buffer = remainder(step, 2) if pooled else stage
                rows = pl.ds(warpgroup * share, share)
                if not pooled:
                    routed[buffer, rows] = rounded_to_tf32(load(routed.at[stage, rows], layout), layout)
                    plgpu.commit_smem()
                    return buffer
                gradient = rounded_to_tf32(load(dys.at[stage, rows], layout), layout)
                maximum = load(places_of_maxima.at[stage, rows], layout, optimized=False).astype(jnp.int32)
                for n in range(places):
                    of_place = jnp.where(maximum == t * places + n, gradient, jnp.zeros_like(gradient))
                    routed[buffer, pl.ds(n * tile.gradients + warpgroup * share, share)] = of_place
                plgpu.commit_smem()
                return buffer

            def add(step, _):
                stage = ring.stage(step)
                ring.wait(step)
                images, operand_of_dy = xs.at[stage], routed.at[route(step, stage)]
                # All warpgroups have now finished their last product, so its operands may be overwritten.
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(ready)
                plgpu.barrier_wait(ready)
                pl.when(warpgroup == 0)(lambda: ring.fetch(step + ring.stages - 1))
                left, right = (images, operand_of_dy) if config.images_on_left else (operand_of_dy, images)
                plgpu.wgmma(sums, left.at[pl.ds(warpgroup * _TILE, _TILE)], right.transpose((1, 0)))

            lax.fori_loop(0, steps, add, None)
            plgpu.wgmma_wait(0)
            store(out.at[split, c, t, pl.ds(warpgroup * _TILE, _TILE)], sums[...])
            meet(ready)

        def gather(vector):
            width = largest_divisor(Q, _BLOCK_COLUMNS)
            lane, column = lane_and_column(LANES, width)
            number = jnp.minimum(vector * LANES + lane, (taps + 1) * K - 1)
            tap, k = quotient(number, K), remainder(number, K)
            channel, u, v = quotient(tap, F * G), remainder(quotient(tap, G), F), remainder(tap, G)
            of_weights = tap < taps
            first = jnp.where(of_weights, (channel * tile.band + u) * W + v + column * S, tile.ones)
            moves = jnp.where(of_weights, 1, 0)
            total = 0.0
            for n, q in itertools.product(range(places), range(0, Q, width)):
                r, s = quotient(t * places + n, S), remainder(t * places + n, S)
                image = first + moves * (r * W + q * S + s)
                window = q + column
                gradient = ((n * K + k) if pooled else (k * places + n)) * Q + window
                at = (image, gradient) if config.images_on_left else (gradient, image)
                total += gather_elements(out.at[split, c, t], *at)
            gradients[split, c, t, pl.ds(vector * LANES, LANES)] = columns(sums_of_rows(total))[0]

        for first in range(0, vectors, warpgroups):
            vector = first + warpgroup
            pl.when(vector < vectors)(lambda vector=vector: gather(vector))

    if pooled:
        place = place.swapaxes(0, 1).reshape(P, -1, N)
    stages = (config.stages, tile.gradients, examples)
    _, gradients = launch(
        body,
        x.reshape(-1, N),
        dy if pooled else dy.reshape(-1, N),
        place,
        out=[
            jax.ShapeDtypeStruct((splits, *shares, *shape), jnp.float32)
            for shape in ((warpgroups * _TILE, tile.columns), (vectors * LANES,))
        ],
        grid={"split": splits, "c": shares[0], "t": shares[1]},
        warpgroups=warpgroups,
        scratch=[
            operand((config.stages, tile.x_rows, examples), x.dtype),
            operand((2 if pooled else config.stages, tile.routed, examples), dy.dtype),
            plgpu.Barrier(
                num_arrivals=channels + (1 + (1 if simulating() is None else K) if pooled else K),
                num_barriers=config.stages,
            ),
            plgpu.Barrier(num_arrivals=warpgroups),
            *((plgpu.SMEM(stages, dy.dtype), plgpu.SMEM(stages, jnp.uint8)) if pooled else (None, None)),
        ],
        name=name,
    )
    gradients = jnp.sum(gradients, axis=(0, 2))
    dw = gradients[:, : taps * K].reshape(C, F, G, K).transpose(3, 0, 1, 2)
    # db is the same for all input channels.
    return dw, gradients[0, taps * K : (taps + 1) * K]
