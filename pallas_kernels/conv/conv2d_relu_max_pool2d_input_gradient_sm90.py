"""Input gradient of `conv2d_relu_max_pool2d` on Hopper's tensor cores.

The batch is the last axis of dy and dx. Each row of pooling windows is divided into groups of adjacent windows. dx is
divided into cells, as high as a window and as wide as a group. `wgmma` computes the cell in row m and column j:

    dx[m, j] = sum over a < reach, b < 2 of routed[m - a, j - b] @ weights[a, b].

`routed[p, g]`, with one row per example, is for group g in row p of windows. It is dy at the positions of the windows'
maxima, and zero elsewhere. The group contributes to cells a < reach rows below it, in the same column (b = 0) or the
next (b = 1). `weights[a, b]` has the filters' weights between the group and such a cell.

A CTA has one warpgroup per column of cells. Filters reach beyond the last group, so there is one more column than
groups. For each row p, every warpgroup but the last writes `routed` of one group to shared memory. A cell's sums stay
in registers until the last row of windows that contributes to it.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import BARRIER_BYTES, taps
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import divisors, load, operand, rounded_to_tf32, store, with_products
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.simulator import simulating
from pallas_kernels.core.tiles import kernel

_EXAMPLES = 64
"""Examples per CTA: the rows of a `wgmma` product."""
_COLUMNS = 32
"""Columns of an operand's tile. Each window position must fill whole tiles of `routed`."""
_MAX_WARPGROUPS = 4
"""Each thread then has 128 registers."""
_MAX_SUMS = 96
"""Maximum sums per thread. A warpgroup holds `reach` cells at once. More sums spill registers."""
MIN_JAX = (0, 11, 1)
"""First JAX known to lower `jnp.concatenate` in a kernel."""


class Config(NamedTuple):
    windows: int


def _group(dy, w, window, windows):
    """Return the sizes of groups of `windows` adjacent windows, and whether they fit the kernel."""
    (K, _, Q, _), (_, C, F, G), (R, S), itemsize = dy.shape, w.shape, window, dy.dtype.itemsize
    reach, groups, width = -(-(F + R - 1) // R), Q // windows, windows * S
    warpgroups, cell_row, gradients = groups + 1, C * width, K * windows
    cell, routed = R * cell_row, R * S * gradients
    elements = routed * (2 * reach * cell + groups * _EXAMPLES) + warpgroups * _EXAMPLES * cell_row
    return SimpleNamespace(
        reach=reach,  # rows of cells to which one row of windows contributes
        groups=groups,
        warpgroups=warpgroups,
        width=width,  # of a cell
        cell_row=cell_row,
        cell=cell,
        gradients=gradients,
        routed=routed,  # columns of `routed`: one per position in a window, output channel, and window of a group
        fits=itemsize * elements <= device.target().shared_bytes - BARRIER_BYTES
        and warpgroups <= _MAX_WARPGROUPS
        and reach * cell * _EXAMPLES // 128 <= _MAX_SUMS
        and width >= G - 1
        and K % 8 == 0
        and gradients % _COLUMNS == 0
        and cell_row % 8 == 0,
    )


def _plan(dy: Any, place: Any, w: Any, *, window: tuple[int, int], input_size: tuple[int, int]) -> Config | str:
    if jax.__version_info__ < MIN_JAX:
        return f"JAX {jax.__version__}, which cannot concatenate registers, at least {'.'.join(map(str, MIN_JAX))}"
    if dy.dtype.itemsize > 4:
        return f"dtype {dy.dtype}, only float32 and half precisions"
    smallest = next((d for d in divisors(dy.shape[2]) if _group(dy, w, window, d).fits), None)
    if smallest:
        return Config(smallest)
    return f"{w.shape} filters with {dy.shape[2]} windows in a row: no group of them fits the shared memory of a CTA"


@kernel(plan=_plan, capability=(9, 0))
def input_gradient(
    dy: Array, place: Array, w: Array, *, window: tuple[int, int], input_size: tuple[int, int], config: Config
) -> Array:
    """Compute `conv2d_relu_max_pool2d_input_gradient.input_gradient` on the tensor cores with float32 sums.

    N must be a multiple of 64. w is rounded to dy's dtype, and float32 operands to TF32.
    """
    (_, P, _, N), C, (R, S), size = dy.shape, w.shape[1], window, _group(dy, w, window, config.windows)

    def body(dy, place, matrices, dx, weights, loaded, operands, met, staging, *, block, warpgroup):
        examples, group = pl.ds(block * _EXAMPLES, _EXAMPLES), jnp.minimum(warpgroup, size.groups - 1)

        def fetch(p):
            windows = [group * config.windows + q for q in range(config.windows)]
            rows = [dy.at[:, p, q, examples] for q in windows], [place.at[p, :, q, examples] for q in windows]
            read = lambda row: load(row.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)  # noqa: E731
            return [jnp.concatenate(list(map(read, of_array)), axis=1) for of_array in rows]

        def route(gradient, places):
            gradient = plgpu.layout_cast(gradient, plgpu.Layout.WGMMA)
            gradient = rounded_to_tf32(gradient, plgpu.Layout.WGMMA)
            places = plgpu.layout_cast(places.astype(jnp.int32), plgpu.Layout.WGMMA)
            for t in range(R * S):
                columns = pl.ds(t * size.gradients, size.gradients)
                operands[group, :, columns] = jnp.where(places == t, gradient, jnp.zeros_like(gradient))

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def multiply(*sums):
            def add_group(b, _):
                for a in range(size.reach):
                    plgpu.wgmma(sums[a], operands.at[warpgroup - b], weights.at[a, b].transpose((1, 0)))
                plgpu.wgmma_wait(0)

            first, end = jnp.maximum(0, warpgroup - size.groups + 1), jnp.minimum(2, warpgroup + 1)
            lax.fori_loop(first, end, add_group, None)

        def zeros():
            return plgpu.layout_cast(jnp.zeros((_EXAMPLES, size.cell), jnp.float32), plgpu.Layout.WGMMA)

        def take_row(p, carry):
            """Add what row p of windows contributes to cells of dx. Then write row p of cells, which later windows do
            not reach."""
            fetched, sums = carry
            pl.when(warpgroup < size.groups)(lambda: route(*fetched))
            plgpu.commit_smem()
            meet()
            fetched = fetch(jnp.minimum(p + 1, P - 1))
            first, *sums = with_products([*sums, zeros()], multiply)
            meet()
            write(p, first)
            return fetched, sums

        def write(m, cell):
            staged = staging.at[warpgroup]
            for r in range(R):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                row = cell[:, r * size.cell_row : (r + 1) * size.cell_row]
                row = plgpu.layout_cast(row.astype(staged.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                store(staged.transpose((1, 0)), row)
                plgpu.commit_smem()
                at, columns = m * R + r, pl.ds(warpgroup * size.width, size.width)
                if simulating() is None:
                    channels = staged.reshape(C, size.width, _EXAMPLES)
                    plgpu.copy_smem_to_gmem(channels, dx.at[:, at, columns, examples])
                    continue
                for c in range(C):  # The simulator cannot reshape memory.
                    channel = staged.at[pl.ds(c * size.width, size.width)]
                    plgpu.copy_smem_to_gmem(channel, dx.at[c, at, columns, examples])

        @pl.when(warpgroup == 0)
        def _():
            for a, b in np.ndindex(size.reach, 2):
                plgpu.copy_gmem_to_smem(matrices.at[a, b], weights.at[a, b], loaded)

        fetched = fetch(0)
        plgpu.barrier_wait(loaded)
        _, sums = lax.fori_loop(0, P, take_row, (fetched, [zeros() for _ in range(size.reach - 1)]))
        for n, cell in enumerate(sums):
            write(P + n, cell)
        plgpu.wait_smem_to_gmem(0)

    row_bytes = _COLUMNS * dy.dtype.itemsize
    dx = launch(
        body,
        dy,
        place.swapaxes(0, 1),
        _matrices(w.astype(dy.dtype), window, config, size),
        out=jax.ShapeDtypeStruct((C, (P + size.reach - 1) * R, size.warpgroups * size.width, N), dy.dtype),
        grid={"block": N // _EXAMPLES},
        warpgroups=size.warpgroups,
        scratch=[
            operand((size.reach, 2, size.cell, size.routed), dy.dtype, row_bytes),
            plgpu.Barrier(num_arrivals=2 * size.reach),
            operand((size.groups, _EXAMPLES, size.routed), dy.dtype, row_bytes),
            plgpu.Barrier(num_arrivals=size.warpgroups),
            plgpu.SMEM((size.warpgroups, size.cell_row, _EXAMPLES), dy.dtype),
        ],
        name="conv2d_relu_max_pool2d_backward_input_tensor_cores",
    )
    return dx[:, : input_size[0], : input_size[1]]


def _matrices(w, window, config, size):
    R, S = window
    # (r, v) is a pixel of a cell, and (tr, ts) a position in window q of a group.
    a, b, r, v, tr, ts, q = np.ix_(*map(range, (size.reach, 2, R, size.width, R, S, config.windows)))
    w = lax.reduce_precision(w, 8, 10) if w.dtype == jnp.float32 else w
    w = taps(w, a * R + r - tr, b * size.width + v - (q * S + ts))
    # Axes: K, C, a, b, r, v, tr, ts, q.
    return w.transpose(2, 3, 4, 1, 5, 6, 7, 8, 0).reshape(size.reach, 2, size.cell, size.routed)
