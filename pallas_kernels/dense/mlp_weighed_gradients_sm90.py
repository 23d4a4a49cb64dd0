"""Gradients of a multi-layer perceptron for a small batch, from dy and the results of `forward_and_gradients`.

A CTA computes one tile of a layer's dw for 128 examples. db is a further column of dw. XLA adds the tiles of all
examples in a fixed order. Further CTAs compute dx.
"""

import functools
import itertools

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, load, operand, quotient, remainder, rounded_to_tf32, store, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, SLICE, Config, float32_struct, read, row_widths, spread


def _plan(dy, x, hidden, gradients, *, sizes):
    is_supported = dy.size and dy.size % LANES == 0
    return Config(stages=1) if is_supported else f"a batch of {dy.size}, only multiples of {LANES}"


@kernel(plan=_plan, capability=(9, 0))
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
    *gradients, dx = gradients
    parts, widths, half = dy.size // LANES, row_widths(sizes), SLICE // 2
    # Rows and columns of tiles in each layer's dw. The first layer has one more column of tiles for db. Later layers'
    # inputs contain a 1, so that their dw includes db.
    grids = [(-(-n // EXAMPLES), m // SLICE + (layer == 0)) for layer, (m, n) in enumerate(itertools.pairwise(widths))]
    first_tiles = [0, *itertools.accumulate(rows * columns for rows, columns in grids)]

    def body(dy, x, dx, hidden, gradients, weighed_dx, sums, left, right, tile_stored, *, part, tile, warpgroup):
        # In shared memory, `left (outputs, examples)` has dy times the losses' gradients with respect to a layer's
        # outputs before ReLU, and `right (inputs, examples)` the layer's inputs.
        lanes = pl.ds(warpgroup * EXAMPLES, EXAMPLES)
        examples = pl.ds(part * LANES + warpgroup * EXAMPLES, EXAMPLES)

        def fill(layer, row, column):
            weight = read(dy, examples, value_a_row())
            # Rows beyond the layer's outputs repeat other rows. Their sums are unused.
            starts = [jnp.minimum(row + n, widths[layer + 1] - SLICE) for n in (0, SLICE)]
            tiles = [
                load(gradients[-1 - layer].at[examples, pl.ds(n, SLICE)], plgpu.Layout.WGMMA, optimized=False)
                for n in starts
            ]
            if layer:
                block = hidden[layer - 1].at[examples, pl.ds(column, SLICE)]
                inputs = load(block, plgpu.Layout.WGMMA, optimized=False)
                inputs = plgpu.layout_cast(inputs, plgpu.Layout.WGMMA_TRANSPOSED)
            else:
                columns = pl.ds(jnp.minimum(column, widths[0] - SLICE), SLICE)
                block = x.at[columns, examples].transpose((1, 0))
                inputs = load(block, plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
                inputs = jnp.where(column < widths[0], inputs, 1.0)
                inputs = rounded_to_tf32(inputs, plgpu.Layout.WGMMA_TRANSPOSED)
            for n, values in zip((0, SLICE), tiles, strict=True):
                values = rounded_to_tf32(values * spread(weight, values), plgpu.Layout.WGMMA)
                values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
                store(left.at[pl.ds(n, SLICE), lanes].transpose((1, 0)), values)
            store(right.at[:, lanes].transpose((1, 0)), inputs)

        def make_tile(layer):
            index, (_, columns) = tile - first_tiles[layer], grids[layer]
            row, column = quotient(index, columns) * EXAMPLES, remainder(index, columns) * SLICE
            fill(layer, row, column)
            plgpu.commit_smem()
            plgpu.barrier_arrive(tile_stored)
            plgpu.barrier_wait(tile_stored)

            def multiply(products):
                plgpu.wgmma(products, left, right.at[pl.ds(warpgroup * half, half)].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return products[...]

            columns = pl.ds(column + warpgroup * half, half)
            products = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, half)))
            store(sums[layer].at[part, pl.ds(row, EXAMPLES), columns], products)

        for layer in range(len(grids)):
            is_of_layer = (first_tiles[layer] <= tile) & (tile < first_tiles[layer + 1])
            pl.when(is_of_layer)(functools.partial(make_tile, layer))

        @pl.when(tile >= first_tiles[-1])
        def _():
            row, lanes = (tile - first_tiles[-1]) * SLICE + warpgroup * half, pl.ds(part * LANES, LANES)
            weight, values = dy[lanes], [dx[row + n, lanes] for n in range(half)]
            for n, value in enumerate(values):
                weighed_dx[row + n, lanes] = value * weight

    of_layers = tuple(float32_struct(parts, rows * EXAMPLES, columns * SLICE) for rows, columns in grids)
    dx, sums = launch(
        body,
        dy,
        x,
        dx,
        hidden,
        gradients,
        out=(float32_struct(*dx.shape), of_layers),
        grid={"part": parts, "tile": first_tiles[-1] + widths[0] // SLICE},
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
        bias = inputs if layer else widths[0]
        layers += [jnp.sum(products[:, :outputs, columns], axis=0) for columns in (slice(inputs), bias)]
    return dx, *layers
