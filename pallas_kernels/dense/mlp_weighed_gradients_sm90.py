"""Gradients of a multi-layer perceptron for a small batch, from dy and the results of `forward_and_gradients`.

A CTA computes one tile of a layer's dw for 128 examples. db is a further column of dw. XLA adds the tiles of all
examples in a fixed order. Further CTAs compute dx.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load, operand, quotient, remainder, rounded_to_tf32, store, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, SLICE, Config, Network, float32_struct
from pallas_kernels.dense.mlp_rows_sm90 import read, spread


class _WeighedGradientsRefs(NamedTuple):
    """`sums` has each layer's dw per 128 examples. In shared memory, `left (outputs, examples)` has dy times the
    losses' gradients with respect to a layer's outputs before ReLU, and `right (inputs, examples)` the layer's
    inputs."""

    dy: Any
    x: Any
    dx: Any
    hidden: tuple
    gradients: tuple
    weighed_dx: Any
    sums: tuple
    left: Any
    right: Any
    tile_stored: Any


@dataclasses.dataclass(frozen=True)
class _WeighedGradients:
    network: Network

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Numbers of rows and columns of tiles in each layer's dw. The first layer has one more column of tiles for db.
        Later layers' inputs contain a 1, so that their dw includes db."""
        widths = itertools.pairwise(self.network.widths)
        return [(-(-n // EXAMPLES), m // SLICE + (layer == 0)) for layer, (m, n) in enumerate(widths)]

    @property
    def first_tiles(self) -> list[int]:
        return [0, *itertools.accumulate(rows * columns for rows, columns in self.grids)]

    @property
    def tiles(self) -> int:
        return self.first_tiles[-1] + self.network.widths[0] // SLICE

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(rows * EXAMPLES, columns * SLICE) for rows, columns in self.grids]

    def body(self, *refs, part, tile, warpgroup):
        refs, first_tiles = _WeighedGradientsRefs(*refs), self.first_tiles
        lanes = pl.ds(warpgroup * EXAMPLES, EXAMPLES)
        examples = pl.ds(part * LANES + warpgroup * EXAMPLES, EXAMPLES)
        for layer in range(self.network.layers):
            make = functools.partial(self.make_tile, refs, layer, part, tile, warpgroup, lanes, examples)
            pl.when((first_tiles[layer] <= tile) & (tile < first_tiles[layer + 1]))(make)
        pl.when(tile >= first_tiles[-1])(functools.partial(self.weigh_dx, refs, part, tile, warpgroup))

    def make_tile(self, refs, layer, part, tile, warpgroup, lanes, examples):
        index, half, (_, columns) = tile - self.first_tiles[layer], SLICE // 2, self.grids[layer]
        row, column = quotient(index, columns) * EXAMPLES, remainder(index, columns) * SLICE
        self.bring(refs, layer, row, column, lanes, examples)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.tile_stored)
        plgpu.barrier_wait(refs.tile_stored)

        def multiply(sums):
            plgpu.wgmma(sums, refs.left, refs.right.at[pl.ds(warpgroup * half, half)].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return sums[...]

        columns = pl.ds(column + warpgroup * half, half)
        sums = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, half)))
        store(refs.sums[layer].at[part, pl.ds(row, EXAMPLES), columns], sums)

    def bring(self, refs, layer, row, column, lanes, examples):
        widths, gradients = self.network.widths, refs.gradients[-1 - layer]
        weight = read(refs.dy, examples, value_a_row())
        # Rows beyond the layer's outputs repeat other rows. Their sums are unused.
        starts = [jnp.minimum(row + n, widths[layer + 1] - SLICE) for n in (0, SLICE)]
        tiles = [load(gradients.at[examples, pl.ds(n, SLICE)], plgpu.Layout.WGMMA, optimized=False) for n in starts]
        if layer:
            inputs = load(
                refs.hidden[layer - 1].at[examples, pl.ds(column, SLICE)], plgpu.Layout.WGMMA, optimized=False
            )
            inputs = plgpu.layout_cast(inputs, plgpu.Layout.WGMMA_TRANSPOSED)
        else:
            columns = pl.ds(jnp.minimum(column, widths[0] - SLICE), SLICE)
            inputs = load(
                refs.x.at[columns, examples].transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
            )
            inputs = rounded_to_tf32(jnp.where(column < widths[0], inputs, 1.0))
        for n, left in zip((0, SLICE), tiles, strict=True):
            left = plgpu.layout_cast(rounded_to_tf32(left * spread(weight, left)), plgpu.Layout.WGMMA_TRANSPOSED)
            store(refs.left.at[pl.ds(n, SLICE), lanes].transpose((1, 0)), left)
        store(refs.right.at[:, lanes].transpose((1, 0)), inputs)

    def weigh_dx(self, refs, part, tile, warpgroup):
        half = SLICE // 2
        row, lanes = (tile - self.first_tiles[-1]) * SLICE + warpgroup * half, pl.ds(part * LANES, LANES)
        weight, values = refs.dy[lanes], [refs.dx[row + n, lanes] for n in range(half)]
        for n, value in enumerate(values):
            refs.weighed_dx[row + n, lanes] = value * weight


def _weighed_gradients_unsupported(dy, x, hidden, gradients, *, sizes):
    return None if dy.size and dy.size % LANES == 0 else f"a batch of {dy.size}, only multiples of {LANES}"


def _weighed_gradients_heuristic(dy, x, hidden, gradients, *, sizes):
    return Config(stages=1)


@kernel(unsupported=_weighed_gradients_unsupported, heuristic=_weighed_gradients_heuristic, capability=(9, 0))
def weighed_gradients(
    dy: Array,
    x: Array,
    hidden: tuple[Array, ...],
    gradients: tuple[Array, ...],
    *,
    sizes: tuple[int, ...],
    config: Config,
) -> tuple[Array, ...]:
    """Return dx, then dw and db of each layer in turn: the gradients of `Σ dy * loss`.

    dx is the dx in `gradients`, times each example's dy. Sums over examples n give each layer's
    `dw[o, i] = Σ dy[n] g[n, o] h[n, i]` and `db[o] = Σ dy[n] g[n, o]`. g[n, o] is the gradient of example n's loss with
    respect to the layer's output o before ReLU, and h[n, i] the layer's input i.

    Args:
      dy: `(N,)`, N a multiple of 128.
      x, hidden, gradients: argument and results of `forward_and_gradients`. dx is last in `gradients`.
      sizes: numbers of inputs and of each layer's outputs.
    """
    parts = dy.size // LANES
    *gradients, dx = gradients
    network = Network(sizes)
    division = _WeighedGradients(network)
    dx, sums = launch(
        division.body,
        dy,
        x,
        dx,
        hidden,
        gradients,
        out=(float32_struct(*dx.shape), tuple(float32_struct(parts, *shape) for shape in division.shapes)),
        grid={"part": parts, "tile": division.tiles},
        warpgroups=2,
        scratch=[
            operand((EXAMPLES, LANES), jnp.float32),
            operand((SLICE, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        barriers=False,
        name="mlp_softmax_cross_entropy_weighed_gradients",
    )
    layers = []
    for layer, (products, (inputs, outputs)) in enumerate(zip(sums, itertools.pairwise(sizes), strict=True)):
        bias = inputs if layer else network.widths[0]
        layers += [jnp.sum(products[:, :outputs, columns], axis=0) for columns in (slice(inputs), bias)]
    return dx, *layers
