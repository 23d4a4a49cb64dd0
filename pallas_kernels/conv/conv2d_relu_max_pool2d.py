"""Convolution, bias, ReLU, and max-pooling in one kernel per direction, with the batch as the last axis.

All kernels compute in exact float32 on the CUDA cores, with one example per lane and each weight broadcast to all
lanes. A CTA of `forward` computes a part of one row of pooling windows, for a few output channels and one block of the
batch. It reads the patch of the image under the windows once into registers, and keeps the sums of every position of
the windows there. It writes the pooled output and one byte per window: the index of the maximum, or one past the last
index where ReLU was off. The convolution at full resolution never reaches memory, because the backward needs only these
two arrays and the input. A CTA of `weights_gradient` keeps the sums of a few output channels and one input channel in
registers. It adds them up over the lanes through shared memory. A CTA of `input_gradient` computes cells of one input
row, each of a window's size, in registers.

Windows do not overlap: the pool's stride is the window's size. The convolution's stride is 1.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    SUMMED_ROWS,
    divisors,
    largest_divisor,
    quotient,
    remainder,
    sums_over_lanes,
    zeros_like,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import check_divides, kernel

MAX_TAPS = 64
"""Largest filter, in positions, that these kernels unroll."""
MAX_PLACES = 16
"""Largest window, in positions."""
_MAX_ACCUMULATORS = 160
"""Most sums that a thread keeps in registers: it has 255, and needs some for operands and addresses."""
_OTHER_REGISTERS = 30
"""Registers of a thread for everything but its sums and its part of the image. With this value, the computed number of
resident CTAs per multiprocessor equals the number that follows from ptxas' register counts, for LeNet's filters."""
_MAX_PATCH = 72
"""Most elements of the image that a thread reads at once: those under four of LeNet's windows, the largest number
measured (docs/lab/2026-11-24-lenet.md)."""
_MAX_CELL_SUMS = 48
"""Most sums of the input's gradient that a thread keeps in registers."""
_MAX_CELL_REGISTERS = 200
"""Registers of a thread for these sums, for routed gradients, and for gradients and indices whose loads are under way.
The rest is for weights."""
_MAX_UNROLLED = 2000
"""Most products in the code of the input's gradient. A thousand products take up to two seconds to compile."""
_REDUCTION_BYTES = 2048
"""Bytes of shared memory that Mosaic reserves for sums across warps."""


def _unsupported(filter_rows: int, filter_columns: int, window: tuple[int, int]) -> str | None:
    if filter_rows * filter_columns > MAX_TAPS:
        return f"filters of {filter_rows} x {filter_columns}, more than {MAX_TAPS} positions"
    if window[0] * window[1] > MAX_PLACES:
        return f"window={window}, more than {MAX_PLACES} positions"
    return None


def _lane_block(N: int, at_most: int) -> int:
    return max(length for length in (LANES, 2 * LANES) if N % length == 0 and length <= at_most)


# ------------------------------------------------------------------------------------------------------------- forward


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tiles of `forward`.

    Attributes:
      channels, windows: most output channels, and most adjacent windows, whose sums a CTA keeps in registers. A weight
        is loaded once for all positions of these windows.
      lane_block: greatest length of a CTA's vectors along the batch.
      programs_per_multiprocessor: fewest CTAs to launch per multiprocessor. If necessary, each computes fewer channels
        and windows.
    """

    channels: int
    windows: int
    lane_block: int
    programs_per_multiprocessor: int


def _forward_unsupported(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> str | None:
    return _unsupported(*w.shape[2:], window)


def _forward_heuristic(x: Any, w: Any, b: Any, *, window: tuple[int, int]) -> ForwardConfig:
    # Measured on an H100, for LeNet's blocks at batches from 128 to 65536.
    (_, H, W, N), (K, C, F, G), (R, S) = x.shape, w.shape, window
    if C == 1 and R * S > 4:
        return ForwardConfig(channels=8, windows=1, lane_block=2 * LANES, programs_per_multiprocessor=6)
    if C == 1:
        return ForwardConfig(channels=3, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=4)
    P, Q = (H - F + 1) // R, (W - G + 1) // S
    programs = (N // _lane_block(N, 2 * LANES)) * P * -(-Q // 4) * -(-K // 2)
    if programs < device.target().multiprocessors:
        return ForwardConfig(channels=4, windows=2, lane_block=LANES, programs_per_multiprocessor=1)
    return ForwardConfig(channels=2, windows=4, lane_block=2 * LANES, programs_per_multiprocessor=3)


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic)
def forward(x: Array, w: Array, b: Array, *, window: tuple[int, int], config: ForwardConfig) -> tuple[Array, Array]:
    """Compute `y[k, p, q, n] = max(0, b[k] + max over the window of conv(x, w)[k, p * R + r, q * S + s, n])`.

    Here k is an output channel, (p, q) a window of R x S positions (r, s), and n an example.

    Args:
      x: `(C, H, W, N)`, whose batch N is a multiple of `LANES`.
      w: `(K, C, F, G)`.
      b: `(K,)`.
      window: R and S.

    Returns:
      y `(K, (H - F + 1) // R, (W - G + 1) // S, N)` in x's dtype, and the indices of the maxima, `r * S + s`, or R * S
      where y = 0, as uint8 of the same shape.
    """
    (_, H, W, N), (K, _, F, G), (R, S) = x.shape, w.shape, window
    P, Q = (H - F + 1) // R, (W - G + 1) // S
    wanted = config.programs_per_multiprocessor * device.target().multiprocessors
    # Use fewer windows and channels per CTA where the batch alone does not keep the GPU busy.
    lane_block = _lane_block(N, config.lane_block)
    rows = (N // lane_block) * P
    windows = largest_divisor(Q, config.windows, lambda d: rows * K * (Q // d) >= wanted)
    steps = Q // windows
    channels = largest_divisor(K, config.channels, lambda d: rows * (K // d) * steps >= wanted)
    # Use the fewest CTAs along a row that are enough.
    row_programs = (d for d in divisors(steps) if rows * (K // channels) * d >= wanted)
    turns = steps // next(row_programs, steps)
    y, place = launch(
        _ForwardProgram(window, lane_block, channels, windows, turns).body,
        x,
        w.astype(jnp.float32),
        b.astype(jnp.float32),
        # The indices are grouped by rows of windows, as the backward reads them.
        out=(jax.ShapeDtypeStruct((K, P, Q, N), x.dtype), jax.ShapeDtypeStruct((P, K, Q, N), jnp.uint8)),
        grid={"block": N // lane_block, "p": P, "step": steps // turns, "k": K // channels},
        name="conv2d_relu_max_pool2d",
    )
    return y, place.swapaxes(0, 1)


@dataclasses.dataclass(frozen=True)
class _ForwardProgram:
    """A part of a row of windows, for a few output channels and a lane block.

    Attributes:
      turns: number of groups of `windows` windows that the CTA computes, one after the other.
    """

    window: tuple[int, int]
    lane_block: int
    channels: int
    windows: int
    turns: int

    def body(self, x, w, b, y, place, *, block, p, step, k):
        C, places = x.shape[0], self.window[0] * self.window[1]
        lanes = pl.ds(block * self.lane_block, self.lane_block)

        def take_windows(turn, _):
            q = (step * self.turns + turn) * self.windows
            add_channel = functools.partial(self.add_channel, x, w, (k, p, q, lanes))
            zero = zeros_like(x[0, 0, 0, lanes].astype(jnp.float32))
            sums = [[zero] * places] * (self.channels * self.windows)
            sums = add_channel(0, sums) if C == 1 else lax.fori_loop(0, C, add_channel, sums)
            for (o, n), window in zip(self.windows_by_channel(), sums, strict=True):
                largest, at = first_maximum(window)
                largest += b[k * self.channels + o]
                y[k * self.channels + o, p, q + n, lanes] = jnp.maximum(largest, 0.0).astype(y.dtype)
                at = jnp.where(largest > 0, at, places)
                place[p, k * self.channels + o, q + n, lanes] = at.astype(jnp.uint8)

        lax.fori_loop(0, self.turns, take_windows, None)

    def windows_by_channel(self):
        return list(itertools.product(range(self.channels), range(self.windows)))

    def add_channel(self, x, w, program, c, sums):
        """Add one input channel's products to the sums, which are one list of the positions' sums per window."""
        (k, p, q, lanes), (_, _, F, G), (R, S) = program, w.shape, self.window
        sums = dict(zip(self.windows_by_channel(), sums, strict=True))
        patch = {
            (i, j): x[c, p * R + i, q * S + j, lanes].astype(jnp.float32)
            for i in range(F + R - 1)
            for j in range(G + self.windows * S - 1)
        }
        for u, v, o in itertools.product(range(F), range(G), range(self.channels)):
            weight = w[k * self.channels + o, c, u, v]
            for n in range(self.windows):
                values = (patch[u + r, v + n * S + s] for r in range(R) for s in range(S))
                sums[o, n] = [total + value * weight for total, value in zip(sums[o, n], values, strict=True)]
        return list(sums.values())


def first_maximum(values):
    """Return the elementwise largest of a list of vectors, and the first index that attains it."""
    largest, *rest = values
    place = jnp.where(largest != largest, 0, 0)
    for t, value in enumerate(rest, start=1):
        place = jnp.where(value > largest, t, place)
        largest = jnp.maximum(largest, value)
    return largest, place


def taps(w, row, column):
    """Return `w[:, :, row, column]`, zero outside the filter, for integer arrays that broadcast against each other."""
    F, G = w.shape[2:]
    inside = (row >= 0) & (row < F) & (column >= 0) & (column < G)
    row, column, inside = np.broadcast_arrays(np.where(inside, row, 0), np.where(inside, column, 0), inside)
    return jnp.where(inside, w[:, :, row, column], 0)


# ---------------------------------------------------------------------------------------------------- weights_gradient


@dataclasses.dataclass(frozen=True)
class WeightsGradientConfig:
    """Tiles of `weights_gradient`.

    Attributes:
      channels: output channels per CTA, a divisor of their number.
      windows: adjacent windows whose patch of the image a CTA reads once, a divisor of the windows in a row.
      programs_per_multiprocessor: CTAs to launch per multiprocessor, if there is work for each. The rows and the batch
        are divided among them.
    """

    channels: int
    windows: int
    programs_per_multiprocessor: int

    def units(self, dy: Any) -> int:
        """Return the number of units of work: pairs of `windows` adjacent windows and a lane block."""
        _, P, Q, N = dy.shape
        return (N // LANES) * P * (Q // self.windows)

    def wanted_splits(self, dy: Any, x: Any) -> int:
        """Return the number of splits that gives the wanted number of CTAs, if there are that many units."""
        programs = self.programs_per_multiprocessor * device.target().multiprocessors
        return -(-programs // (x.shape[0] * (dy.shape[0] // self.channels)))

    def units_a_split(self, dy: Any, x: Any) -> int:
        """Return the number of units per split. The last split may have fewer."""
        units = self.units(dy)
        return -(-units // min(units, self.wanted_splits(dy, x)))

    def splits(self, dy: Any, x: Any) -> int:
        """Return the number of splits of the units. Different CTAs sum different splits."""
        return -(-self.units(dy) // self.units_a_split(dy, x))


def _filter_size(dy, x, window):
    return tuple(size - n * f + 1 for size, n, f in zip(x.shape[1:3], dy.shape[1:3], window, strict=True))


def _sums(channels: int, taps: int) -> int:
    """Return the number of sums for the weights and biases of `channels` output channels, rounded up as
    `sums_over_lanes` requires."""
    return -(-channels * (taps + 1) // SUMMED_ROWS) * SUMMED_ROWS


def _fits(channels: int, taps: int) -> bool:
    return _sums(channels, taps) * LANES * 4 + _REDUCTION_BYTES <= device.target().shared_bytes


def _weights_gradient_unsupported(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> str | None:
    F, G = _filter_size(dy, x, window)
    if not _fits(1, F * G):
        return f"filters of {F} x {G}, whose sums do not fit shared memory"
    return _unsupported(F, G, window)


def _weights_gradient_heuristic(dy: Any, place: Any, x: Any, *, window: tuple[int, int]) -> WeightsGradientConfig:
    """Return the config that a sweep on an H200 found."""
    (F, G), (R, S), (K, _, Q, _), gpu = _filter_size(dy, x, window), window, dy.shape, device.target()
    patch = lambda windows: (F + R - 1) * (G + windows * S - 1)  # noqa: E731
    windows = largest_divisor(Q, 4, lambda d: patch(d) <= _MAX_PATCH)
    for channels in (2, 1) if K % 2 == 0 and 2 * F * G <= _MAX_ACCUMULATORS and _fits(2, F * G) else (1,):
        registers = channels * (F * G + 1) + patch(windows) + _OTHER_REGISTERS
        resident = max(1, gpu.registers // (LANES * registers))
        config = WeightsGradientConfig(channels, windows, programs_per_multiprocessor=2 * resident)
        # Divide the channels as well where there are fewer units than splits wanted.
        if config.units(dy) >= config.wanted_splits(dy, x):
            break
    return config


@kernel(unsupported=_weights_gradient_unsupported, heuristic=_weights_gradient_heuristic)
def weights_gradient(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: WeightsGradientConfig
) -> tuple[Array, Array]:
    """Compute the gradients of `forward` with respect to w and b. Each part of the rows and the batch is summed in a
    fixed order.

    Args:
      dy: `(K, P, Q, N)`, the gradient with respect to y.
      place: the indices that `forward` returns.
      x: `(C, H, W, N)`, with H = P * R + F - 1 and W = Q * S + G - 1.

    Returns:
      dw `(K, C, F, G)` and db `(K,)` in float32.
    """
    return _weights_gradient(dy, place, x, window, config, through_shared_memory=True)


@kernel(unsupported=_weights_gradient_unsupported, heuristic=_weights_gradient_heuristic)
def weights_gradient_interpreted(
    dy: Array, place: Array, x: Array, *, window: tuple[int, int], config: WeightsGradientConfig
) -> tuple[Array, Array]:
    """Compute `weights_gradient` in Pallas' interpreter, which has no shared memory."""
    return _weights_gradient(dy, place, x, window, config, through_shared_memory=False)


def _weights_gradient(dy, place, x, window, config, *, through_shared_memory):
    (K, _, Q, _), C, (F, G) = dy.shape, x.shape[0], _filter_size(dy, x, window)
    channels, taps = config.channels, config.channels * F * G
    check_divides("conv2d_relu_max_pool2d.weights_gradient", "channels", channels, K)
    check_divides("conv2d_relu_max_pool2d.weights_gradient", "windows", config.windows, Q)
    splits, rows = config.splits(dy, x), _sums(channels, F * G)
    program = _WeightsGradientProgram(window, (F, G), config, config.units_a_split(dy, x))
    sums = launch(
        program.body if through_shared_memory else program.interpreted_body,
        dy,
        # The order in which the forward wrote them, so that no transpose is needed.
        place.swapaxes(0, 1),
        x,
        out=jax.ShapeDtypeStruct((splits, K // channels, C, rows), jnp.float32),
        grid={"split": splits, "k": K // channels, "c": C},
        scratch=[plgpu.SMEM((rows, LANES), jnp.float32)] if through_shared_memory else (),
        barriers=False,
        name="conv2d_relu_max_pool2d_backward_weights",
    )
    sums = jnp.sum(sums, axis=0)
    dw = sums[:, :, :taps].reshape(K // channels, C, channels, F, G).swapaxes(1, 2).reshape(K, C, F, G)
    # The CTAs of every input channel saw the same gradients, so the first one's sum is the bias gradient.
    return dw, sums[:, 0, taps : taps + channels].reshape(K)


@dataclasses.dataclass(frozen=True)
class _WeightsGradientProgram:
    """The sums of one split, for a few output channels and one input channel."""

    window: tuple[int, int]
    filter_size: tuple[int, int]
    config: WeightsGradientConfig
    per_split: int

    def body(self, dy, place, x, sums, lanes, *, split, k, c):
        for n, total in enumerate(self.totals(dy, place, x, split, k, c)):
            lanes[n] = total
        sums_over_lanes(lanes, sums.at[split, k, c])

    def interpreted_body(self, dy, place, x, sums, *, split, k, c):
        for n, total in enumerate(self.totals(dy, place, x, split, k, c)):
            sums[split, k, c, n] = jnp.sum(total)

    def totals(self, dy, place, x, split, k, c):
        """Return the sums of the weights, then the biases', with one term per lane, then zeros that fill up the
        rows."""
        (_, P, Q, _), (F, G), units = dy.shape, self.filter_size, self.config.units(dy)
        count, steps = self.config.channels * (F * G + 1), Q // self.config.windows

        def add_unit(n, sums):
            row, q = quotient(n, steps), remainder(n, steps) * self.config.windows
            p, lanes = remainder(row, P), pl.ds(quotient(row, P) * LANES, LANES)
            return self.add_windows(dy, place, x, (k, c, p, q, lanes), sums)

        zero = zeros_like(x[0, 0, 0, pl.ds(0, LANES)].astype(jnp.float32))
        first, last = split * self.per_split, jnp.minimum((split + 1) * self.per_split, units)
        sums = lax.fori_loop(first, last, add_unit, (zero,) * count)
        return [*sums, *[zero] * (_sums(self.config.channels, F * G) - count)]

    def add_windows(self, dy, place, x, at, sums):
        (k, c, p, q, lanes), (F, G), (R, S) = at, self.filter_size, self.window
        channels, windows = range(self.config.channels), range(self.config.windows)
        taps = len(channels) * F * G
        patch = {
            (i, j): x[c, p * R + i, q * S + j, lanes].astype(jnp.float32)
            for j in range(G + len(windows) * S - 1)
            for i in range(F + R - 1)
        }
        weights, biases = list(sums[:taps]), list(sums[taps:])
        for n, o in itertools.product(windows, channels):
            gradient = dy[k * len(channels) + o, p, q + n, lanes].astype(jnp.float32)
            maximum = place[p, k * len(channels) + o, q + n, lanes].astype(jnp.int32)
            biases[o] += jnp.where(maximum < R * S, gradient, 0.0)
            for t in range(R * S):
                routed = jnp.where(maximum == t, gradient, 0.0)
                for u, v in itertools.product(range(F), range(G)):
                    weights[(o * F + u) * G + v] += routed * patch[u + t // S, v + n * S + t % S]
        return (*weights, *biases)


# ------------------------------------------------------------------------------------------------------ input_gradient


@dataclasses.dataclass(frozen=True)
class InputGradientConfig:
    """Tiles of `input_gradient`.

    Attributes:
      channels: input channels per CTA, a divisor of their number.
      cells: adjacent cells per CTA; the last CTA of a row has the rest. A weight that is loaded serves all of them.
      ahead: output channels per turn, a divisor of their number. Their gradients are loaded while the previous turn's
        are multiplied.
    """

    channels: int
    cells: int
    ahead: int


def _cells(input_size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """Return the rows and columns of the cells, each of a window's size, that cover the input."""
    return -(-input_size[0] // window[0]), -(-input_size[1] // window[1])


def _input_gradient_unsupported(dy: Any, place: Any, w: Any, *, window: tuple[int, int], **options: Any) -> str | None:
    return _unsupported(*w.shape[2:], window)


def _input_gradient_heuristic(
    dy: Any, place: Any, w: Any, *, input_size: tuple[int, int], window: tuple[int, int]
) -> InputGradientConfig:
    # Found on an H200, at batches from 128 to 8192 (docs/lab/2026-11-25-lenet.md).
    (K, C, F, G), (R, S), (rows, columns) = w.shape, window, _cells(input_size, window)
    programs, multiprocessors = (dy.shape[-1] // LANES) * rows, device.target().multiprocessors
    sizes = sorted({-(-columns // groups) for groups in range(1, columns + 1)}, reverse=True)
    cuts = [_Cut(columns, cells, dy.shape[2], G, S) for cells in sizes if cells * R * S <= _MAX_CELL_SUMS]
    products = lambda cut: F * R * cut.column_products  # noqa: E731
    cuts = [cut for cut in cuts if products(cut) <= _MAX_UNROLLED] or [min(cuts, key=products)]

    # The most cells and channels with which the batch keeps the GPU busy.
    busy = (cut for cut in cuts if programs * C * cut.groups >= 2 * multiprocessors)
    cut = next(busy, cuts[-1])
    most = min(_MAX_CELL_SUMS // (cut.cells * R * S), _MAX_UNROLLED // products(cut))
    enough = lambda d: programs * (C // d) * cut.groups >= 4 * multiprocessors  # noqa: E731
    channels = largest_divisor(C, most, enough)

    # With fewer cells a CTA multiplies less per turn, and must load further ahead.
    registers = lambda ahead: channels * cut.cells * R * S + cut.windows * (R * S + 4 * ahead)  # noqa: E731
    fits = lambda n: n * channels * products(cut) <= _MAX_UNROLLED and registers(n) <= _MAX_CELL_REGISTERS  # noqa: E731
    ahead = largest_divisor(K, min(4, -(-columns // cut.cells)), fits)
    return InputGradientConfig(channels, cut.cells, ahead)


class _Part(NamedTuple):
    """A part of a row of cells.

    Attributes:
      cells: number of adjacent cells.
      windows: windows whose filters reach these cells, counted from the first cell.
    """

    cells: int
    windows: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A row of cells, divided into groups of equal size; the last group has the rest.

    Attributes:
      columns: columns of cells.
      cells: cells per group.
      Q, G, S: columns of windows, of the filter, and of one window.
    """

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
        """Map each distinct part of a row to the numbers of the groups that have it, which are adjacent."""
        parts = {}
        for group in range(self.groups):
            first = group * self.cells
            last = min(first + self.cells, self.columns)
            windows = range(max(0, first - (self.G + self.S - 2) // self.S), min(self.Q, last))
            parts.setdefault(_Part(last - first, tuple(q - first for q in windows)), []).append(group)
        return parts

    @property
    def windows(self) -> int:
        """Return the largest number of windows that reach a group."""
        return max(len(part.windows) for part in self.parts)

    @functools.cached_property
    def column_products(self) -> int:
        """Count, over all distinct parts, the triples of a window, a column in it, and a filter column that reach a
        cell."""
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
    """Compute the gradient of `forward` with respect to x.

    A CTA owns cells of one row, each of a window's size, for one or more input channels.

    Args:
      dy, place: `(K, P, Q, N)`, the gradient with respect to y, and the indices that `forward` returns.
      w: `(K, C, F, G)`.
      input_size: height H and width W of the input.

    Returns:
      dx `(C, H, W, N)` in dy's dtype.
    """
    (K, C, F, G), N, (rows, columns), (R, S) = w.shape, dy.shape[-1], _cells(input_size, window), window
    channels = config.channels
    for name, length in {"channels": C, "ahead": K}.items():
        check_divides("conv2d_relu_max_pool2d.input_gradient", name, getattr(config, name), length)
    cut = _Cut(columns, config.cells, dy.shape[2], G, S)
    dx = launch(
        _InputGradientProgram(window, rows, cut, config.ahead).body,
        dy,
        place.swapaxes(0, 1),
        # The weights of one tap for all channels of a CTA are adjacent, so that one access loads several.
        jnp.moveaxis(w.astype(jnp.float32).reshape(K, C // channels, channels, F, G), 2, -1),
        out=jax.ShapeDtypeStruct((C, rows * R, columns * S, N), dy.dtype),
        # The rows that the most windows reach come first, so that the CTAs at the end are short.
        grid={"row": rows, "block": N // LANES, "group": cut.groups, "c": C // channels},
        name="conv2d_relu_max_pool2d_backward_input",
    )
    return dx[:, : input_size[0], : input_size[1]]


def outwards(n, count):
    """Map 0, 1, 2, ... to the middle of `count` numbers, then alternately one after and one before it: 2, 3, 1, 4, 0
    for 5."""
    middle, distance = (count - 1) // 2, quotient(n + 1, 2)
    return middle + jnp.where(remainder(n, 2) == 1, distance, -distance)


@dataclasses.dataclass(frozen=True)
class _InputGradientProgram:
    """A group of cells of one row, for a few input channels and `LANES` examples.

    Attributes:
      rows: number of rows of cells.
    """

    window: tuple[int, int]
    rows: int
    cut: _Cut
    ahead: int

    def body(self, dy, place, w, dx, *, row, block, group, c):
        at = outwards(row, self.rows), group * self.cut.cells, c, pl.ds(block * LANES, LANES)
        # Each distinct part of a row has separate code, which multiplies by no window that does not exist.
        for part, groups in self.cut.parts.items():
            fill_cells = functools.partial(self.fill_cells, dy, place, w, dx, at, part)
            pl.when((group >= groups[0]) & (group <= groups[-1]))(fill_cells)

    def fill_cells(self, dy, place, w, dx, at, part):
        """Compute dx for the cells from a given row and column, for a group of channels and one lane block."""
        (K, P, *_), (*_, F, _, channels), (R, S), (row, column, c, lanes) = dy.shape, w.shape, self.window, at
        width = part.cells * S
        sums = (zeros_like(dy[0, 0, 0, lanes].astype(jnp.float32)),) * (channels * R * width)
        # Loop over the rows of windows whose filters reach the cells, from the cells' own row backwards.
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
        """Load, for `ahead` channels from `first`, each window's gradient and the index of its maximum."""
        of_window = lambda k, q: (dy[k, p, q, lanes], place[p, k, q, lanes].astype(jnp.int32))  # noqa: E731
        return tuple(tuple(of_window(first + n, q) for q in columns) for n in range(self.ahead))

    def add_windows(self, w, c, back, part, k, gradients, sums):
        """Add the contribution of the windows `back` rows back: a window's gradient goes to the position of its
        maximum."""
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
