"""Body of the kernels in `conv2d_weights_gradient_sm90`.

A CTA sums matrix products of x and `routed` over rows and examples. For `conv2d`, `routed` is dy. Otherwise, it is
dy at the positions of the pooling windows' maxima, and zero elsewhere. Each warpgroup multiplies 64 rows of the left
operand by the right operand. `Config.images_on_left` says which operand is x.

The gradient of one weight is the sum of several elements of the product. At the end, the CTA therefore writes the
product to device memory, and gathers these elements through the L2 cache.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.conv2d_weights_gradient_sizes_sm90 import TILE, Sizes
from pallas_kernels.core.gathers import columns, gather_elements, lane_and_column, meet, sums_of_rows
from pallas_kernels.core.layouts import LANES, largest_divisor, load, quotient, remainder, rounded_to_tf32, store
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.simulator import simulating

_BLOCK_COLUMNS = 4
"""Elements that a thread gathers at once: 16 bytes."""


def body(program, sizes, per_split, *refs, split, **ids):
    def accumulate(sums):
        first = split * per_split
        steps = jnp.minimum(sizes.units - first, per_split)
        program(sizes, *refs, sums=sums, split=split, first=first, steps=steps, **ids).run()

    pl.run_scoped(accumulate, plgpu.ACC((TILE, sizes.columns)))


@dataclasses.dataclass(frozen=True)
class _Program:
    """Computation of one warpgroup. Subclasses copy dy, and compute the operand `routed` from it.

    Attributes:
      place: indices of the maxima, or None for `conv2d`.
      out, gradients: each CTA's product, and its part of dw, then db.
      dys, places: dy and `place` in shared memory, or None for `conv2d`.
      xs: buffers in shared memory, each with rows of x, then eight rows of ones: see `Sizes.ones`.
      c: index of the CTA's group of input channels.
      t: index of the CTA's group of positions in each pooling window. For `conv2d`, positions are rows of dy.
    """

    sizes: Sizes
    x: Any
    dy: Any
    place: Any
    out: Any
    gradients: Any
    xs: Any
    routed: Any
    loaded: Any
    ready: Any
    dys: Any
    places: Any
    sums: Any
    split: Any
    c: Any
    t: Any
    warpgroup: Any
    first: Any
    steps: Any

    def run(self):
        ring = Ring(self.sizes.config.stages, self.copy, self.loaded, self.steps)
        pl.when(self.warpgroup == 0)(functools.partial(self.begin, ring))
        lax.fori_loop(0, self.steps, functools.partial(self.add, ring), None)
        plgpu.wgmma_wait(0)
        rows = pl.ds(self.warpgroup * TILE, TILE)
        store(self.out.at[self.split, self.c, self.t, rows], self.sums[...])
        meet(self.ready)
        warpgroups, vectors = self.sizes.warpgroups, self.sizes.vectors
        for first in range(0, vectors, warpgroups):
            vector = first + self.warpgroup
            pl.when(vector < vectors)(functools.partial(self.cut_out, vector))

    def cut_out(self, vector):
        sizes, places = self.sizes, self.sizes.config.places
        F, G = sizes.filter_size
        width = largest_divisor(sizes.Q, _BLOCK_COLUMNS)
        lane, column = lane_and_column(LANES, width)
        number = jnp.minimum(vector * LANES + lane, (sizes.taps + 1) * sizes.K - 1)
        tap, k = quotient(number, sizes.K), remainder(number, sizes.K)
        c, u, v = quotient(tap, F * G), remainder(quotient(tap, G), F), remainder(tap, G)
        of_weights = tap < sizes.taps
        first = jnp.where(of_weights, (c * sizes.band + u) * sizes.W + v + column * sizes.S, sizes.ones)
        moves = jnp.where(of_weights, 1, 0)
        sums, total = self.out.at[self.split, self.c, self.t], 0.0
        for t, q in itertools.product(range(places), range(0, sizes.Q, width)):
            r, s = quotient(self.t * places + t, sizes.S), remainder(self.t * places + t, sizes.S)
            image, routed = first + moves * (r * sizes.W + q * sizes.S + s), self.routed_row(t, k, q + column)
            total += gather_elements(sums, *((image, routed) if sizes.config.images_on_left else (routed, image)))
        gradients = columns(sums_of_rows(total))[0]
        self.gradients[self.split, self.c, self.t, pl.ds(vector * LANES, LANES)] = gradients

    def routed_row(self, t, k, q):
        raise NotImplementedError

    def begin(self, ring):
        ones = plgpu.layout_cast(jnp.ones((8, self.sizes.examples), self.x.dtype), self.layout)
        for stage in range(ring.stages):
            self.xs[stage, self.sizes.ones : self.sizes.ones + 8] = ones
        plgpu.commit_smem()
        ring.prefetch(ring.stages - 1)

    def add(self, ring, step, _):
        stage = ring.stage(step)
        ring.wait(step)
        xs, routed = self.xs.at[stage], self.routed.at[self.scatter_gradients(step, stage)]
        # All warpgroups have now finished their last product, so its operands may be overwritten.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.ready)
        plgpu.barrier_wait(self.ready)
        pl.when(self.warpgroup == 0)(lambda: ring.fetch(step + ring.stages - 1))
        left, right = (xs, routed) if self.sizes.config.images_on_left else (routed, xs)
        plgpu.wgmma(self.sums, left.at[pl.ds(self.warpgroup * TILE, TILE)], right.transpose((1, 0)))

    def copy(self, step, stage, barrier):
        sizes = self.sizes
        unit = self.first + step
        p, examples = remainder(unit, sizes.P), pl.ds(quotient(unit, sizes.P) * sizes.examples, sizes.examples)
        channels, rows = sizes.config.channels, sizes.band * sizes.W
        for channel in range(channels):
            under = pl.ds(((self.c * channels + channel) * sizes.H + p * sizes.R) * sizes.W, rows)
            plgpu.copy_gmem_to_smem(self.x.at[under, examples], self.xs.at[stage, pl.ds(channel * rows, rows)], barrier)
        self.copy_gradient(p, examples, stage, barrier)

    def copy_gradient(self, p, examples, stage, barrier):
        raise NotImplementedError

    def scatter_gradients(self, step, stage):
        raise NotImplementedError

    @property
    def share(self):
        return self.sizes.gradient_rows // self.sizes.warpgroups

    @property
    def layout(self):
        examples = self.sizes.examples
        # Two rows per warp avoid bank conflicts in shared memory.
        tiling = plgpu.Tiling(((8, examples), (2, examples), (examples // 16,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


class PooledProgram(_Program):
    """Computation for `conv2d_relu_max_pool2d`. `routed` has two buffers. Threads fill one while the tensor cores read
    the other."""

    def routed_row(self, t, k, q):
        return (t * self.sizes.K + k) * self.sizes.Q + q

    def copy_gradient(self, p, examples, stage, barrier):
        K, Q = self.sizes.K, self.sizes.Q
        if simulating() is None:
            dys = self.dys.at[stage].reshape(K, Q, self.sizes.examples)
            plgpu.copy_gmem_to_smem(self.dy.at[:, p, :, examples], dys, barrier)
        else:
            for k in range(K):
                plgpu.copy_gmem_to_smem(self.dy.at[k, p, :, examples], self.dys.at[stage, pl.ds(k * Q, Q)], barrier)
        plgpu.copy_gmem_to_smem(self.place.at[p, :, examples], self.places.at[stage], barrier)

    def scatter_gradients(self, step, stage):
        buffer, places = remainder(step, 2), self.sizes.config.places
        rows = pl.ds(self.warpgroup * self.share, self.share)
        gradient = rounded_to_tf32(load(self.dys.at[stage, rows], self.layout))
        maximum = load(self.places.at[stage, rows], self.layout, optimized=False).astype(jnp.int32)
        for t in range(places):
            of_place = jnp.where(maximum == self.t * places + t, gradient, jnp.zeros_like(gradient))
            first = t * self.sizes.gradient_rows + self.warpgroup * self.share
            self.routed[buffer, pl.ds(first, self.share)] = of_place
        plgpu.commit_smem()
        return buffer


class ConvolutionProgram(_Program):
    """Computation for `conv2d`, where `routed` is dy."""

    def routed_row(self, t, k, q):
        return (k * self.sizes.config.places + t) * self.sizes.Q + q

    def copy_gradient(self, p, examples, stage, barrier):
        sizes, places = self.sizes, self.sizes.config.places
        for k in range(sizes.K):
            rows = pl.ds((k * sizes.P * sizes.R + p * sizes.R + self.t * places) * sizes.Q, places * sizes.Q)
            to = self.routed.at[stage, pl.ds(k * places * sizes.Q, places * sizes.Q)]
            plgpu.copy_gmem_to_smem(self.dy.at[rows, examples], to, barrier)

    def scatter_gradients(self, step, stage):
        if self.dy.dtype == jnp.float32:
            rows = pl.ds(self.warpgroup * self.share, self.share)
            self.routed[stage, rows] = rounded_to_tf32(load(self.routed.at[stage, rows], self.layout))
            plgpu.commit_smem()
        return stage
