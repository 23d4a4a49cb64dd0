"""Gradient of `conv2d_relu_max_pool2d` with respect to x in exact float32 on the CUDA cores, batch last.

dx is divided into cells of a pooling window's size. A CTA computes adjacent cells in one row of cells, with one example
per lane and the sums in registers. For each window whose filters read pixels of a cell, each lane multiplies each
weight by dy at the position of the maximum, and by zero at other positions.
"""

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
from pallas_kernels.core.layouts import LANES, largest_divisor, multiply_add, quotient, remainder, zeros_like
from pallas_kernels.core.tiles import check_divides, kernel

_MAX_CELL_SUMS = 48
"""Maximum sums of dx in a thread's registers."""
_MAX_CELL_REGISTERS = 200
"""Registers per thread for everything but weights."""
_MAX_UNROLLED = 2000
"""Maximum unrolled products, to bound compile time: a thousand take up to two seconds."""


class InputGradientConfig(NamedTuple):
    """Tile per CTA: `channels` input channels of dx, and at most `cells` adjacent cells. dy is loaded one
    iteration ahead, for `ahead` output channels at once. If `uniform`, every CTA runs the code for the most windows, in
    which windows that do not exist contribute 0."""

    channels: int
    cells: int
    ahead: int
    uniform: bool


def _cells(input_size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    return -(-input_size[0] // window[0]), -(-input_size[1] // window[1])


def _parts(columns, cells, Q, G, S):
    """Return a dict that maps (number of cells, windows) to the indices of the groups with this key. Rows of `columns`
    cells are divided into groups of up to `cells` adjacent cells. `windows` are the columns of the pooling windows that
    contribute to a group, relative to its first cell. Q, G, and S are the widths of the pooled output, a filter, and a
    pooling window."""
    parts = {}
    for group, first in enumerate(range(0, columns, cells)):
        last = min(first + cells, columns)
        windows = range(max(0, first - (G + S - 2) // S), min(Q, last))
        parts.setdefault((last - first, tuple(q - first for q in windows)), []).append(group)
    return parts


def _plan(
    dy: Any, place: Any, w: Any, *, input_size: tuple[int, int], window: tuple[int, int]
) -> InputGradientConfig | str:
    if reason := unsupported(*w.shape[2:], window):
        return reason
    # Tuned on an H200, at batches from 128 to 8192: docs/lab/2026-11-25-lenet.md.
    (K, C, F, G), (R, S), (rows, columns), Q = w.shape, window, _cells(input_size, window), dy.shape[2]
    programs, multiprocessors = (dy.shape[-1] // LANES) * rows, device.target().multiprocessors
    cuts = []  # of a row into groups of cells, with fewer and fewer cells
    for cells in sorted({-(-columns // groups) for groups in range(1, columns + 1)}, reverse=True):
        if cells * R * S <= _MAX_CELL_SUMS:
            parts = _parts(columns, cells, Q, G, S)
            products = (
                F
                * R
                * sum(
                    0 <= n * S + s + v < width * S
                    for width, windows in parts
                    for n, s, v in itertools.product(windows, range(S), range(G))
                )
            )
            cuts.append((cells, max(len(windows) for _, windows in parts), products))
    cuts = [cut for cut in cuts if cut[2] <= _MAX_UNROLLED] or [min(cuts, key=lambda cut: cut[2])]
    ctas = lambda channels, cells: programs * channels * -(-columns // cells)  # noqa: E731
    busy = (cut for cut in cuts if ctas(C, cut[0]) >= 2 * multiprocessors)
    cells, windows, products = next(busy, cuts[-1])

    most = min(_MAX_CELL_SUMS // (cells * R * S), _MAX_UNROLLED // products)
    channels = largest_divisor(C, most, lambda d: ctas(C // d, cells) >= 4 * multiprocessors)
    # With fewer cells, an iteration multiplies less, and must load further ahead.
    registers = lambda ahead: channels * cells * R * S + windows * (R * S + 4 * ahead)  # noqa: E731
    fits = lambda n: n * channels * products <= _MAX_UNROLLED and registers(n) <= _MAX_CELL_REGISTERS  # noqa: E731
    # If all CTAs run at once, two per multiprocessor, those with the most windows determine the time. One code for all
    # CTAs then has up to a third of the instructions, and compiles faster.
    uniform = columns % cells == 0 and ctas(C // channels, cells) <= 2 * multiprocessors
    return InputGradientConfig(channels, cells, largest_divisor(K, min(4, -(-columns // cells)), fits), uniform)


@kernel(plan=_plan)
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
    (K, P, Q, N), (_, C, F, G), (rows, columns), (R, S) = dy.shape, w.shape, _cells(input_size, window), window
    channels, ahead = config.channels, config.ahead
    for name, length in {"channels": C, "ahead": K, **({"cells": columns} if config.uniform else {})}.items():
        check_divides("conv2d_relu_max_pool2d_input_gradient.input_gradient", name, getattr(config, name), length)
    parts = _parts(columns, config.cells, Q, G, S)
    if config.uniform:
        windows = [n for _, part in parts for n in part]
        parts = {(config.cells, tuple(range(min(windows), max(windows) + 1))): range(columns // config.cells)}

    def body(dy, place, w, dx, *, row, block, group, c):
        row, first, lanes = outwards(row, rows), group * config.cells, pl.ds(block * LANES, LANES)

        def fill_cells(cells, windows):
            width, zero = cells * S, zeros_like(dy[0, 0, 0, lanes].astype(jnp.float32))

            def maxima_of(q):
                """Return all indices that the maximum of window q may have. If there is no window q, return -1 for
                each, which no maximum has."""
                exists = (q >= 0) & (q < Q)
                return [jnp.where(exists, t, -1) for t in range(R * S)]

            def add_row_of_windows(back, sums):
                p = row - back
                exists = (p >= 0) & (p < P)
                columns, p = [first + n for n in windows], jnp.clip(p, 0, P - 1)
                maxima = {n: range(R * S) for n in windows}
                if config.uniform:
                    maxima = {n: maxima_of(q) for n, q in zip(windows, columns, strict=True)}
                    columns = [jnp.clip(q, 0, Q - 1) for q in columns]

                def load(k):
                    of_window = lambda k, q: (dy[k, p, q, lanes], place[p, k, q, lanes].astype(jnp.int32))  # noqa: E731
                    return tuple(tuple(of_window(k + n, q) for q in columns) for n in range(ahead))

                def add_channels(turn, carry):
                    sums, loaded = carry
                    following = load(jnp.minimum(turn + 1, K // ahead - 1) * ahead)
                    for n, of_windows in enumerate(loaded):
                        sums = add_channel(turn * ahead + n, of_windows, sums)
                    return sums, following

                def add_channel(k, of_windows, sums):
                    products = {}
                    for column, (gradient, maximum) in zip(windows, of_windows, strict=True):
                        gradient = gradient.astype(jnp.float32)
                        # `jnp.where` would trace four equations instead of one.
                        routed = [lax.select(maximum == t, gradient, zero) for t in maxima[column]]
                        for t, i, j in itertools.product(range(R * S), range(R), range(width)):
                            u, v = i - t // S + back * R, j - t % S - column * S
                            if 0 <= u < F and 0 <= v < G:
                                products.setdefault((u, v), []).append((i * width + j, routed[t]))
                    sums = list(sums)
                    for (u, v), o in itertools.product(sorted(products), range(channels)):
                        weight = w[k, c, u, v, o]
                        for pixel, gradient in products[u, v]:
                            at = o * R * width + pixel
                            sums[at] = multiply_add(sums[at], gradient, weight)
                    return tuple(sums)

                return lax.fori_loop(0, jnp.where(exists, K // ahead, 0), add_channels, (sums, load(0)))[0]

            sums = (zero,) * (channels * R * width)
            for back in range((F + R - 2) // R + 1):
                sums = add_row_of_windows(back, sums)
            pixels = itertools.product(range(channels), range(R), range(width))
            for total, (o, i, j) in zip(sums, pixels, strict=True):
                dx[c * channels + o, row * R + i, first * S + j, lanes] = total.astype(dx.dtype)

        # Separate code per part avoids products for windows that do not exist.
        for part, groups in parts.items():
            pl.when((group >= groups[0]) & (group <= groups[-1]))(functools.partial(fill_cells, *part))

    dx = launch(
        body,
        dy,
        place.swapaxes(0, 1),
        jnp.moveaxis(w.astype(jnp.float32).reshape(K, C // channels, channels, F, G), 2, -1),
        out=jax.ShapeDtypeStruct((C, rows * R, columns * S, N), dy.dtype),
        # The middle rows, with the most windows, start first, so the last CTAs are short.
        grid={"row": rows, "block": N // LANES, "group": -(-columns // config.cells), "c": C // channels},
        name="conv2d_relu_max_pool2d_backward_input",
    )
    return dx[:, : input_size[0], : input_size[1]]


def outwards(n, count):
    """Return the n-th integer below `count`, from the middle outwards: 2, 3, 1, 4, 0 for a count of 5."""
    middle, distance = (count - 1) // 2, quotient(n + 1, 2)
    return middle + jnp.where(remainder(n, 2) == 1, distance, -distance)
