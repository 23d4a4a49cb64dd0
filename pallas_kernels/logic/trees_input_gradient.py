"""The gradient of a convolution with respect to its images, if each filter is a tree of gates.

A tree's leaves read pixels in the convolution's window. A pixel's gradient is the sum of the gradients of the leaves
that read it, in a fixed order. A CTA computes a band, some rows of one channel, for 128 images, one per thread.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.gathers import compiler_fence, gather_elements, lane_and_column, scatter_elements, spread
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.tree_windows import Config, visit_windows

_BAND_BYTES = 17 * 1024
"""Maximum bytes of a band. With smaller bands, more CTAs run per multiprocessor, but more leaves add to two bands:
docs/lab/2026-11-22-trees.md."""
_BANDS = 8
"""Wanted bands per multiprocessor: docs/lab/2026-11-22-trees.md."""
_UNROLLED_WINDOWS = 8
"""Maximum pooling windows for which a CTA fetches a leaf's gradients at once. Not tuned."""


def _unsupported(dleaves, places, leaves, readers, reader_offsets, *, size, window, stride, padding, pool):
    width, limit = size[2], device.target().shared_bytes
    if 4 * LANES * (width + 1) > limit:
        return f"images of width {width}, where a row of {LANES} examples does not fit into shared memory"
    return None


def _heuristic(dleaves, places, leaves, readers, reader_offsets, *, size, window, stride, padding, pool):
    channels, height, width = size
    rows = max(1, min(height, (_BAND_BYTES // (4 * LANES) - 1) // width))
    least_bands = _BANDS * device.target().multiprocessors * LANES / (channels * dleaves.shape[-1])
    return Config(-(-height // min(height, max(-(-height // rows), math.ceil(least_bands)))))


@kernel(unsupported=_unsupported, heuristic=_heuristic)
def input_gradient(
    dleaves: Array,
    places: Array | None,
    leaves: Array,
    readers: Array,
    reader_offsets: Array,
    *,
    size: tuple[int, int, int],
    window: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    pool: tuple[int, int],
    config: Config,
) -> Array:
    """Return the gradient with respect to the images without padding, `(channels, height, width, N)` float32.

    Args:
      dleaves: the gradients of the leaves, from `leaf_gradients`.
      places, leaves: arguments of `leaf_gradients`.
      readers, reader_offsets: int32. `readers[reader_offsets[c] : reader_offsets[c + 1]]` are the leaves that read
        channel c. Leaf l of kernel k is `k * leaves.shape[1] + l`.
      size: channels, height, and width without the padding.
      padding: rows above the image, and columns to its left.
    """
    (channels, height, width), N = size, dleaves.shape[-1]
    bands = _Bands(config.rows, height, width, stride, padding, pool)
    return launch(
        functools.partial(_input_gradient_of_band, bands=bands, count=leaves.shape[1]),
        dleaves,
        places,
        leaves.reshape(-1, 3),
        readers,
        reader_offsets,
        out=jax.ShapeDtypeStruct((*size, N), jnp.float32),
        grid={"block": N // LANES, "band": -(-height // config.rows), "channel": channels},
        scratch=[plgpu.SMEM(((bands.pixels + 1) * LANES,), jnp.float32)],
        barriers=False,
        sums_across_warps=False,
        name="trees_backward_input",
    )


@dataclasses.dataclass(frozen=True)
class _Bands:
    rows: int
    height: int
    width: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    pool: tuple[int, int]

    @property
    def pixels(self) -> int:
        return self.rows * self.width

    @property
    def steps(self) -> tuple[int, int]:
        return self.pool[0] * self.stride[0], self.pool[1] * self.stride[1]

    def windows(self, leaf_row: Any, rows: int) -> tuple[Any, Any]:
        """Return (first, end): a leaf can read the band only for rows first to end - 1 of the pooled output.

        Args:
          leaf_row: the image row that the leaf reads at the first position of the first pooling window. The band's
            first row is row 0.
          rows: the pooled output's height.
        """
        p, s, step = self.pool[0], self.stride[0], self.steps[0]
        # At the last position of row `first`, the leaf reads the band's first row or a later row.
        first = jnp.clip((-leaf_row - (p - 1) * s + p * s - 1) // step, 0, rows)
        last = jnp.clip((self.rows - 1 - leaf_row) // step + 1, first, rows)
        return first, last

    def targets(self, row: Any, column: Any, place: Array | None, lane: Array) -> Array:
        """Return, for each of 128 images, the index in shared memory for the pixel that one leaf reads. Pixels outside
        of the band get an unused index.

        Args:
          row, column: the pixel that the leaf reads at the first position of the pooling window, relative to the band.
          place: for each image, the index of its maximum in the pooling window. The pixel shifts by one `stride` per
            position. None for windows of one position.
          lane: the images' indices, 0 to 127.
        """
        (s, t), u = self.stride, lane * 0
        v = u
        for i, (row_step, column_step) in enumerate(itertools.product(*map(range, self.pool))):
            if i:
                u, v = (jnp.where(place == i, n, m) for n, m in ((row_step * s, u), (column_step * t, v)))
        row, column = row + u, column + v
        valid = (row >= 0) & (row < self.rows) & (column >= 0) & (column < self.width)
        return jnp.where(valid, row * self.width + column, self.pixels) * LANES + lane


def _input_gradient_of_band(
    dleaves_ref, place_ref, leaves_ref, readers_ref, offsets_ref, dx_ref, sums, *, block, band, channel, bands, count
):
    _, rows, columns, _ = dleaves_ref.shape
    lanes = pl.ds(block * LANES, LANES)
    lane = lane_and_column(LANES, 1)[0]
    top = band * bands.rows + bands.padding[0]  # in the padded image

    def add_reader(e, _):
        leaf = readers_ref[e]
        k = leaf // count
        leaf_row, leaf_column = leaves_ref[leaf, 1] - top, leaves_ref[leaf, 2] - bands.padding[1]
        first, last = bands.windows(leaf_row, rows)

        def add_windows(row, columns, _):
            targets, values, (row_step, column_step) = [], [], bands.steps
            for column in columns:
                place = None
                if place_ref is not None:
                    place = spread(place_ref[k, row, column, lanes].astype(jnp.int32), 1)
                targets.append(
                    bands.targets(row * row_step + leaf_row, column * column_step + leaf_column, place, lane)
                )
                values.append(spread(dleaves_ref[leaf, row, column, lanes], 1))
            # A leaf reads different pixels in different windows, so these additions are independent.
            old_sums = [gather_elements(sums, target) for target in targets]
            for target, old_sum, value in zip(targets, old_sums, values, strict=True):
                scatter_elements(sums, old_sum + value, target)

        visit_windows(first, last, columns, add_windows, columns_per_turn=largest_divisor(columns, _UNROLLED_WINDOWS))

    def clear(pixel, _):
        sums[pl.ds(pixel * LANES, LANES)] = jnp.zeros((LANES,), jnp.float32)

    def write(pixel, _):
        row, column = band * bands.rows + pixel // bands.width, pixel % bands.width
        dx_ref[channel, row, column, lanes] = sums[pl.ds(pixel * LANES, LANES)]

    lax.fori_loop(0, bands.pixels + 1, clear, None)
    compiler_fence()
    lax.fori_loop(offsets_ref[channel], offsets_ref[channel + 1], add_reader, None)
    compiler_fence()
    lax.fori_loop(0, jnp.minimum(bands.rows, bands.height - band * bands.rows) * bands.width, write, None)
