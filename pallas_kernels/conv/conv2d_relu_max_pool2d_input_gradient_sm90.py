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

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import taps
from pallas_kernels.conv.window_tiles_sm90 import BARRIER_BYTES
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
_MIN_BATCH = 2048
"""Smallest batch for this kernel. If cuBLAS is faster than the exact kernel, the limit is `_KERNEL_BATCH` of
`jaxbp/ops/conv/conv2d_relu_max_pool2d.py`."""
MIN_JAX = (0, 11, 1)
"""First JAX known to lower `jnp.concatenate` in a kernel."""


@dataclasses.dataclass(frozen=True)
class Config:
    windows: int


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """K output and C input channels, P x Q pooling windows of R x S positions, filters of F x G elements, and groups of
    `windows` adjacent windows."""

    K: int
    P: int
    Q: int
    C: int
    F: int
    G: int
    R: int
    S: int
    itemsize: int
    windows: int

    @property
    def reach(self) -> int:
        """Rows of cells to which one row of pooling windows contributes."""
        return -(-(self.F + self.R - 1) // self.R)

    @property
    def groups(self) -> int:
        return self.Q // self.windows

    @property
    def warpgroups(self) -> int:
        return self.groups + 1

    @property
    def cell_width(self) -> int:
        return self.windows * self.S

    @property
    def cell_row(self) -> int:
        return self.C * self.cell_width

    @property
    def cell(self) -> int:
        return self.R * self.cell_row

    @property
    def gradients(self) -> int:
        return self.K * self.windows

    @property
    def routed(self) -> int:
        """Number of columns of `routed`: one per position in a window, output channel, and window of a group."""
        return self.R * self.S * self.gradients

    def fit(self) -> bool:
        operands = self.routed * (2 * self.reach * self.cell + self.groups * _EXAMPLES)
        staging = self.warpgroups * _EXAMPLES * self.cell_row
        return (
            self.itemsize * (operands + staging) <= device.target().shared_bytes - BARRIER_BYTES
            and self.warpgroups <= _MAX_WARPGROUPS
            and self.reach * self.cell * _EXAMPLES // 128 <= _MAX_SUMS
            and self.cell_width >= self.G - 1
            and self.K % 8 == 0
            and self.gradients % _COLUMNS == 0
            and self.cell_row % 8 == 0
        )


def _sizes(dy: Any, w: Any, window: tuple[int, int], windows: int) -> _Sizes:
    return _Sizes(*dy.shape[:3], *w.shape[1:], *window, dy.dtype.itemsize, windows)


def _smallest_group(dy: Any, w: Any, window: tuple[int, int]) -> int | None:
    return next((d for d in divisors(dy.shape[2]) if _sizes(dy, w, window, d).fit()), None)


def _unsupported(dy: Any, place: Any, w: Any, *, window: tuple[int, int], input_size: tuple[int, int]) -> str | None:
    if jax.__version_info__ < MIN_JAX:
        return f"JAX {jax.__version__}, which cannot concatenate registers, at least {'.'.join(map(str, MIN_JAX))}"
    if dy.dtype.itemsize > 4:
        return f"dtype {dy.dtype}, only float32 and half precisions"
    if _smallest_group(dy, w, window) is None:
        return (
            f"{w.shape} filters with {dy.shape[2]} windows in a row: no group of them fits the shared memory of a CTA"
        )
    return None


def _heuristic(dy: Any, place: Any, w: Any, *, window: tuple[int, int], input_size: tuple[int, int]) -> Config | None:
    windows = _smallest_group(dy, w, window)
    return Config(windows) if windows is not None and dy.shape[-1] >= _MIN_BATCH else None


@kernel(unsupported=_unsupported, heuristic=_heuristic, capability=(9, 0))
def input_gradient(
    dy: Array, place: Array, w: Array, *, window: tuple[int, int], input_size: tuple[int, int], config: Config
) -> Array:
    """Compute `conv2d_relu_max_pool2d_input_gradient.input_gradient` on the tensor cores with float32 sums.

    N must be a multiple of 64. w is rounded to dy's dtype, and float32 operands to TF32.
    """
    N, sizes = dy.shape[-1], _sizes(dy, w, window, config.windows)
    rows, columns = (sizes.P + sizes.reach - 1) * sizes.R, sizes.warpgroups * sizes.cell_width
    dx = launch(
        functools.partial(_body, sizes),
        dy,
        place.swapaxes(0, 1),
        _matrices(w.astype(dy.dtype), sizes),
        out=jax.ShapeDtypeStruct((sizes.C, rows, columns, N), dy.dtype),
        grid={"block": N // _EXAMPLES},
        warpgroups=sizes.warpgroups,
        scratch=[
            operand((sizes.reach, 2, sizes.cell, sizes.routed), dy.dtype, _COLUMNS * sizes.itemsize),
            plgpu.Barrier(num_arrivals=2 * sizes.reach),
            operand((sizes.groups, _EXAMPLES, sizes.routed), dy.dtype, _COLUMNS * sizes.itemsize),
            plgpu.Barrier(num_arrivals=sizes.warpgroups),
            plgpu.SMEM((sizes.warpgroups, sizes.cell_row, _EXAMPLES), dy.dtype),
        ],
        name="conv2d_relu_max_pool2d_backward_input_tensor_cores",
    )
    return dx[:, : input_size[0], : input_size[1]]


def _matrices(w: Array, sizes: _Sizes) -> Array:
    R, S, width = sizes.R, sizes.S, sizes.cell_width
    # (r, v) is a pixel of a cell, and (tr, ts) a position in window q of a group.
    a, b, r, v, tr, ts, q = np.ix_(*map(range, (sizes.reach, 2, R, width, R, S, sizes.windows)))
    w = lax.reduce_precision(w, 8, 10) if w.dtype == jnp.float32 else w
    w = taps(w, a * R + r - tr, b * width + v - (q * S + ts))
    # Axes: K, C, a, b, r, v, tr, ts, q.
    return w.transpose(2, 3, 4, 1, 5, 6, 7, 8, 0).reshape(sizes.reach, 2, sizes.cell, sizes.routed)


def _body(sizes, *refs, block, warpgroup):
    examples, group = pl.ds(block * _EXAMPLES, _EXAMPLES), jnp.minimum(warpgroup, sizes.groups - 1)
    _Program(sizes, *refs, examples=examples, group=group, warpgroup=warpgroup).run()


@dataclasses.dataclass(frozen=True)
class _Program:
    sizes: _Sizes
    dy: Any
    place: Any
    matrices: Any
    dx: Any
    weights: Any
    loaded: Any
    operands: Any
    met: Any
    staging: Any
    examples: Any
    group: Any
    warpgroup: Any

    def run(self):
        pl.when(self.warpgroup == 0)(self.fetch_weights)
        fetched = self.fetch(0)
        plgpu.barrier_wait(self.loaded)
        sums = [self.zeros() for _ in range(self.sizes.reach - 1)]
        _, sums = lax.fori_loop(0, self.sizes.P, self.take_row, (fetched, sums))
        for n, cell in enumerate(sums):
            self.write(self.sizes.P + n, cell)
        plgpu.wait_smem_to_gmem(0)

    def fetch_weights(self):
        for a in range(self.sizes.reach):
            for b in range(2):
                plgpu.copy_gmem_to_smem(self.matrices.at[a, b], self.weights.at[a, b], self.loaded)

    def take_row(self, p, carry):
        """Add the contributions of row p of windows to dx. Then write row p of cells, which is complete."""
        sizes, (fetched, sums) = self.sizes, carry
        pl.when(self.warpgroup < sizes.groups)(functools.partial(self.scatter_gradients, *fetched))
        plgpu.commit_smem()
        self.meet()
        fetched = self.fetch(jnp.minimum(p + 1, sizes.P - 1))
        first, *sums = with_products([*sums, self.zeros()], self.multiply)
        self.meet()
        self.write(p, first)
        return fetched, sums

    def zeros(self):
        return plgpu.layout_cast(jnp.zeros((_EXAMPLES, self.sizes.cell), jnp.float32), plgpu.Layout.WGMMA)

    def fetch(self, p):
        sizes = self.sizes
        windows = [self.group * sizes.windows + q for q in range(sizes.windows)]
        return [
            jnp.concatenate([self.read(row) for row in rows], axis=1)
            for rows in (
                [self.dy.at[:, p, q, self.examples] for q in windows],
                [self.place.at[p, :, q, self.examples] for q in windows],
            )
        ]

    def read(self, row):
        return load(row.transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)

    def scatter_gradients(self, gradient, places):
        sizes = self.sizes
        gradient = rounded_to_tf32(plgpu.layout_cast(gradient, plgpu.Layout.WGMMA))
        places = plgpu.layout_cast(places.astype(jnp.int32), plgpu.Layout.WGMMA)
        for t in range(sizes.R * sizes.S):
            columns = pl.ds(t * sizes.gradients, sizes.gradients)
            self.operands[self.group, :, columns] = jnp.where(places == t, gradient, jnp.zeros_like(gradient))

    def meet(self):
        plgpu.barrier_arrive(self.met)
        plgpu.barrier_wait(self.met)

    def multiply(self, *sums):
        sizes = self.sizes

        def add_group(b, _):
            for a in range(sizes.reach):
                weights = self.weights.at[a, b].transpose((1, 0))
                plgpu.wgmma(sums[a], self.operands.at[self.warpgroup - b], weights)
            plgpu.wgmma_wait(0)

        first, end = jnp.maximum(0, self.warpgroup - sizes.groups + 1), jnp.minimum(2, self.warpgroup + 1)
        lax.fori_loop(first, end, add_group, None)

    def write(self, m, cell):
        sizes, staging = self.sizes, self.staging.at[self.warpgroup]
        for r in range(sizes.R):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            row = cell[:, r * sizes.cell_row : (r + 1) * sizes.cell_row]
            row = plgpu.layout_cast(row.astype(staging.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            store(staging.transpose((1, 0)), row)
            plgpu.commit_smem()
            self.copy_row(staging, m * sizes.R + r)

    def copy_row(self, staging, row):
        sizes = self.sizes
        columns = pl.ds(self.warpgroup * sizes.cell_width, sizes.cell_width)
        if simulating() is None:
            channels = staging.reshape(sizes.C, sizes.cell_width, _EXAMPLES)
            plgpu.copy_smem_to_gmem(channels, self.dx.at[:, row, columns, self.examples])
            return
        for c in range(sizes.C):  # The simulator cannot reshape memory.
            channel = staging.at[pl.ds(c * sizes.cell_width, sizes.cell_width)]
            plgpu.copy_smem_to_gmem(channel, self.dx.at[c, row, columns, self.examples])
