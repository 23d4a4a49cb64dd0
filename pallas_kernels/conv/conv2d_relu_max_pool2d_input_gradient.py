"""Gradient of `conv2d_relu_max_pool2d` with respect to x in exact float32 on the CUDA cores, batch last.

dx is divided into cells of a pooling window's size. A CTA computes adjacent cells in one row of cells, with one example
per lane and the sums in registers. For each window whose filters read pixels of a cell, each lane multiplies each
weight by dy at the position of the maximum, and by zero at other positions.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.conv.filters_and_windows import unsupported
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, quotient, remainder, zeros_like
from pallas_kernels.core.tiles import check_divides, kernel

_MAX_CELL_SUMS = 48
"""Maximum sums of dx in a thread's registers."""
_MAX_CELL_REGISTERS = 200
"""Registers per thread for everything but weights."""
_MAX_UNROLLED = 2000
"""Maximum unrolled products, to bound compile time: a thousand take up to two seconds."""


@dataclasses.dataclass(frozen=True)
class InputGradientConfig:
    """Tile per CTA: `channels` input channels of dx, and at most `cells` adjacent cells. dy is loaded one
    iteration ahead, for `ahead` output channels at once."""

    channels: int
    cells: int
    ahead: int


def _cells(input_size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    return -(-input_size[0] // window[0]), -(-input_size[1] // window[1])


def _input_gradient_unsupported(dy: Any, place: Any, w: Any, *, window: tuple[int, int], **options: Any) -> str | None:
    return unsupported(*w.shape[2:], window)


def _input_gradient_heuristic(
    dy: Any, place: Any, w: Any, *, input_size: tuple[int, int], window: tuple[int, int]
) -> InputGradientConfig:
    # Tuned on an H200, at batches from 128 to 8192: docs/lab/2026-11-25-lenet.md.
    (K, C, F, G), (R, S), (rows, columns) = w.shape, window, _cells(input_size, window)
    programs, multiprocessors = (dy.shape[-1] // LANES) * rows, device.target().multiprocessors
    sizes = sorted({-(-columns // groups) for groups in range(1, columns + 1)}, reverse=True)
    cuts = [_Cut(columns, cells, dy.shape[2], G, S) for cells in sizes if cells * R * S <= _MAX_CELL_SUMS]
    products = lambda cut: F * R * cut.column_products  # noqa: E731
    cuts = [cut for cut in cuts if products(cut) <= _MAX_UNROLLED] or [min(cuts, key=products)]

    busy = (cut for cut in cuts if programs * C * cut.groups >= 2 * multiprocessors)
    cut = next(busy, cuts[-1])
    most = min(_MAX_CELL_SUMS // (cut.cells * R * S), _MAX_UNROLLED // products(cut))
    enough = lambda d: programs * (C // d) * cut.groups >= 4 * multiprocessors  # noqa: E731
    channels = largest_divisor(C, most, enough)

    # With fewer cells, an iteration multiplies less, and must load further ahead.
    registers = lambda ahead: channels * cut.cells * R * S + cut.windows * (R * S + 4 * ahead)  # noqa: E731
    fits = lambda n: n * channels * products(cut) <= _MAX_UNROLLED and registers(n) <= _MAX_CELL_REGISTERS  # noqa: E731
    ahead = largest_divisor(K, min(4, -(-columns // cut.cells)), fits)
    return InputGradientConfig(channels, cut.cells, ahead)


class _Part(NamedTuple):
    """`cells` adjacent cells of dx. `windows` are the columns of the pooling windows that contribute to these cells,
    relative to the first cell."""

    cells: int
    windows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Division of dx's width into `columns` cells, each as wide as a pooling window. Q, G, and S are the widths of the
    pooled output, a filter, and a pooling window."""

    columns: int
    cells: int
    Q: int
    G: int
    S: int

    @property
    def groups(self) -> int:
        return -(-self.columns // self.cells)

    @functools.cached_property
    def parts(self) -> dict[_Part, list[int]]:
        parts = {}
        for group in range(self.groups):
            first = group * self.cells
            last = min(first + self.cells, self.columns)
            windows = range(max(0, first - (self.G + self.S - 2) // self.S), min(self.Q, last))
            parts.setdefault(_Part(last - first, tuple(q - first for q in windows)), []).append(group)
        return parts

    @property
    def windows(self) -> int:
        return max(len(part.windows) for part in self.parts)

    @functools.cached_property
    def column_products(self) -> int:
        S, G = range(self.S), range(self.G)
        return sum(
            0 <= n * self.S + s + v < part.cells * self.S
            for part in self.parts
            for n, s, v in itertools.product(part.windows, S, G)
        )


@kernel(unsupported=_input_gradient_unsupported, heuristic=_input_gradient_heuristic)
def input_gradient(
    dy: Array,
    place: Array,
    w: Array,
    *,
    input_size: tuple[int, int],
    window: tuple[int, int],
    config: InputGradientConfig,
) -> Array:
    """Compute dx `(C, H, W, N)` of `conv2d_relu_max_pool2d`, in dy's dtype.

    Args:
      dy, place: `(K, P, Q, N)`, the gradient with respect to y, and the indices of the maxima.
      w: `(K, C, F, G)`.
      input_size: H and W.
    """
    (K, C, F, G), N, (rows, columns), (R, S) = w.shape, dy.shape[-1], _cells(input_size, window), window
    channels = config.channels
    for name, length in {"channels": C, "ahead": K}.items():
        check_divides("conv2d_relu_max_pool2d_input_gradient.input_gradient", name, getattr(config, name), length)
    cut = _Cut(columns, config.cells, dy.shape[2], G, S)
    dx = launch(
        _InputGradientProgram(window, rows, cut, config.ahead).body,
        dy,
        place.swapaxes(0, 1),
        jnp.moveaxis(w.astype(jnp.float32).reshape(K, C // channels, channels, F, G), 2, -1),
        out=jax.ShapeDtypeStruct((C, rows * R, columns * S, N), dy.dtype),
        # The middle rows, with the most windows, start first, so the last CTAs are short.
        grid={"row": rows, "block": N // LANES, "group": cut.groups, "c": C // channels},
        name="conv2d_relu_max_pool2d_backward_input",
    )
    return dx[:, : input_size[0], : input_size[1]]


def outwards(n, count):
    """Return the n-th integer below `count`, from the middle outwards: 2, 3, 1, 4, 0 for a count of 5."""
    middle, distance = (count - 1) // 2, quotient(n + 1, 2)
    return middle + jnp.where(remainder(n, 2) == 1, distance, -distance)


@dataclasses.dataclass(frozen=True)
class _InputGradientProgram:
    window: tuple[int, int]
    rows: int
    cut: _Cut
    ahead: int

    def body(self, dy, place, w, dx, *, row, block, group, c):
        at = outwards(row, self.rows), group * self.cut.cells, c, pl.ds(block * LANES, LANES)
        # Separate code per part avoids products for windows that do not exist.
        for part, groups in self.cut.parts.items():
            fill_cells = functools.partial(self.fill_cells, dy, place, w, dx, at, part)
            pl.when((group >= groups[0]) & (group <= groups[-1]))(fill_cells)

    def fill_cells(self, dy, place, w, dx, at, part):
        (K, P, *_), (*_, F, _, channels), (R, S), (row, column, c, lanes) = dy.shape, w.shape, self.window, at
        width = part.cells * S
        sums = (zeros_like(dy[0, 0, 0, lanes].astype(jnp.float32)),) * (channels * R * width)
        for back in range((F + R - 2) // R + 1):
            p = row - back
            exists = (p >= 0) & (p < P)
            columns = [column + n for n in part.windows]
            gradients = functools.partial(self.gradients, dy, place, jnp.clip(p, 0, P - 1), columns, lanes)
            add_windows = functools.partial(self.add_windows, w, c, back, part)

            def add_channels(turn, carry, gradients=gradients, add_windows=add_windows):
                sums, arrived = carry
                following = gradients(jnp.minimum(turn + 1, K // self.ahead - 1) * self.ahead)
                for n, of_channel in enumerate(arrived):
                    sums = add_windows(turn * self.ahead + n, of_channel, sums)
                return sums, following

            turns = jnp.where(exists, K // self.ahead, 0)
            sums, _ = lax.fori_loop(0, turns, add_channels, (sums, gradients(0)))
        pixels = itertools.product(range(channels), range(R), range(width))
        for total, (o, i, j) in zip(sums, pixels, strict=True):
            dx[c * channels + o, row * R + i, column * S + j, lanes] = total.astype(dx.dtype)

    def gradients(self, dy, place, p, columns, lanes, first):
        of_window = lambda k, q: (dy[k, p, q, lanes], place[p, k, q, lanes].astype(jnp.int32))  # noqa: E731
        return tuple(tuple(of_window(first + n, q) for q in columns) for n in range(self.ahead))

    def add_windows(self, w, c, back, part, k, gradients, sums):
        (*_, F, G, channels), (R, S), width = w.shape, self.window, part.cells * self.window[1]
        products = {}
        for column, (gradient, maximum) in zip(part.windows, gradients, strict=True):
            gradient = gradient.astype(jnp.float32)
            routed = [jnp.where(maximum == t, gradient, 0.0) for t in range(R * S)]
            for t, i, j in itertools.product(range(R * S), range(R), range(width)):
                u, v = i - t // S + back * R, j - t % S - column * S
                if 0 <= u < F and 0 <= v < G:
                    products.setdefault((u, v), []).append((i * width + j, routed[t]))
        sums = list(sums)
        for (u, v), o in itertools.product(sorted(products), range(channels)):
            weight = w[k, c, u, v, o]
            for pixel, gradient in products[u, v]:
                sums[o * R * width + pixel] += gradient * weight
        return tuple(sums)
