"""LayerNorm and RMSNorm over the last axis of `(rows, hidden)`: the forward, and all gradients in one pass.

    y = x̂ * scale + bias,    x̂ = (x - mean) * inv_std,    inv_std = 1 / sqrt(mean((x - mean)²) + eps)

RMSNorm, `center=False`, is the same without the mean and the bias. Sums are in float32. A row's mean is computed and
kept as its `offset` from the row's first element: values far from zero lose no digits in the difference, as they would
when the mean is rounded.

For a GPU the kernels are persistent: a program takes every so many-th group of rows through a ring in shared memory,
whose bulk copies are under way while other groups are computed in place. Beyond the last row such a copy reads zeros
and writes nothing. The gradients of scale and bias are added up in registers over the rows of a program, then over
programs in a fixed order. Rows that do not fit in such pieces have plain kernels, which also run in the interpreter.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import LANES, largest_divisor, load, store, zeros_like

_MULTIPROCESSORS = 132
_RING_BYTES = 192 * 1024


def normalise(
    x: Array, scale: Array, bias: Array | None, *, eps: float, center: bool, **sizes: int
) -> tuple[Array, ...]:
    """The forward.

    Args:
      x: `(rows, hidden)`.
      scale, bias: `(hidden,)`; no bias without `center`.
      sizes: of the `Tile`, in place of its rule.

    Returns:
      y in x's dtype, and the float32 statistics of each row: its offset and its inv_std; without `center` the latter.
    """
    plain = functools.partial(_normalise_plain, eps=eps, center=center)
    if (tile := _tile(x, arrays=1, **sizes)) is None:
        return plain(x, scale, bias)
    return on_gpu(functools.partial(_normalise_streamed, eps=eps, center=center, tile=tile), plain, x, scale, bias)


def gradients(
    dy: Array,
    x: Array,
    scale: Array,
    bias: Array | None,
    *statistics: Array,
    eps: float,
    center: bool,
    again: bool = False,
    **sizes: int,
) -> tuple[Array, ...]:
    """The backward: with `t = dy * scale`, means over a row and sums over all rows,

        dx = inv_std * (t - mean(t) - x̂ * mean(t * x̂)),    dscale = Σ dy * x̂,    dbias = Σ dy,

    and without `center` neither `mean(t)` nor dbias.

    Args:
      dy, x: `(rows, hidden)`.
      bias: of the forward; wanted only for `again`.
      statistics: as `normalise` gives them. Without, they are computed on the way.
      again: whether to return the forward's y, too, from the same pass.
      sizes: of the `Tile`, in place of its rule.

    Returns:
      dx in x's dtype, float32 dscale, with `center` float32 dbias, and y if it is wanted `again`.
    """
    options = dict(eps=eps, center=center, again=again)
    plain = functools.partial(_gradients_plain, **options)
    arrays = dy, x, scale, bias, *statistics
    if (tile := _tile(x, arrays=2, **sizes)) is None:
        return plain(*arrays)
    return on_gpu(functools.partial(_gradients_streamed, **options, tile=tile), plain, *arrays)


def streams(x: Array) -> bool:
    """Whether rows like those of x go through the ring: what has only the plain kernels is faster by XLA."""
    return _tile(x, arrays=2) is not None


# ------------------------------------------------------------------------------------------- through a ring, for GPUs


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a program takes rows.

    Attributes:
      layout: of a block of rows in registers, `(block, hidden / piece, piece)`.
      block: rows computed at once, a row a warp or one of the whole warpgroup.
      piece: columns side by side in a bulk copy.
      rows: of a group, which fills a slot of the ring.
      slots: of the ring.
      programs: at a time on a multiprocessor.
    """

    layout: Any
    block: int
    piece: int
    rows: int
    slots: int
    programs: int

    @property
    def of_warps(self) -> bool:
        return self.block > 1


def _tile(x: Any, *, arrays: int, rows: int = 0, slots: int = 0, programs: int = 0) -> Tile | None:
    """The tile for rows like those of x, and so many arrays to stream; None where there is none. From a sweep."""
    hidden, row_bytes = x.shape[-1], x.shape[-1] * x.dtype.itemsize
    slots = slots or (4 if arrays == 1 else 3)
    fill = arrays * 2**13 // row_bytes
    if hidden <= 1024 and hidden % 128 == 0:
        # A row belongs to a warp, which adds it up without a barrier.
        layout = plgpu.Layout.TILED(plgpu.Tiling(((4, 1, 128), (4,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
        block, piece = 4, 128
        rows = rows or (4 if hidden > 512 else max(4, min(32, fill // 4 * 4)))
    elif hidden <= 8192 and hidden % 256 == 0:
        layout = plgpu.Layout.TILED(
            plgpu.Tiling(((1, 1, 256), (64,), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
        block, piece, rows = 1, 256, rows or max(1, fill)
    else:
        return None
    fitting = _RING_BYTES // (slots * arrays * rows * row_bytes)
    programs = programs or max(1, min(3 if arrays == 1 else 4, fitting))
    return Tile(layout, block, piece, rows, slots, programs)


class _Block:
    """A block of rows in registers: how it is loaded, added up and spread."""

    def __init__(self, tile: Tile, hidden: int):
        self.tile, self.hidden = tile, hidden
        self.shape = tile.block, hidden // tile.piece, tile.piece
        self.of_a_row, self.of_a_column = tile.layout.reduce((1,)).reduce((1,)), tile.layout.reduce((0,))

    def load(self, ref: Any, layout: Any = None) -> Array:
        return load(ref, layout or self.tile.layout, optimized=False).astype(jnp.float32)

    def store_rows(self, ref: Any, row: Any, a: Array) -> None:
        """A value a row."""
        if self.tile.block == 1:
            ref[row] = jnp.sum(a)
        else:
            store(ref.at[pl.ds(row, self.tile.block)], a)

    def load_rows(self, ref: Any, row: Any) -> Array:
        return self.load(ref.at[pl.ds(row, self.tile.block)], self.of_a_row)

    def load_parameters(self, refs: Sequence) -> list[Array]:
        """Scale, and bias where there is one, for each row."""
        return [self.along_columns(self.load(ref, self.of_a_column)) for ref in refs]

    def scaled(self, normalised: Array, scale: Array, *bias: Array) -> Array:
        return sum(bias, normalised * scale)

    def along_rows(self, a: Array) -> Array:
        """A value a row, for each of its columns."""
        return plgpu.layout_cast(lax.broadcast_in_dim(a, self.shape, (0,)), self.tile.layout)

    def along_columns(self, a: Array) -> Array:
        """A value a column, for each row."""
        return plgpu.layout_cast(lax.broadcast_in_dim(a, self.shape, (1, 2)), self.tile.layout)

    def mean(self, a: Array) -> Array:
        """Of each row."""
        return jnp.sum(jnp.sum(a, axis=1), axis=1) * (1 / self.hidden)

    def partial_sum(self, a: Array) -> Array:
        """Over the rows, as far as that is one thread's own business."""
        return a if self.tile.of_warps else jnp.sum(a, axis=0)

    def sum(self, partial_sum: Array) -> Array:
        return jnp.sum(partial_sum, axis=0) if self.tile.of_warps else partial_sum

    def groups(self) -> list[list[int]]:
        """The first rows of the blocks in a slot: of all that are computed side by side, then of the next ones.

        Rows of warps wait for each sum's shuffles together, those of the warpgroup have the registers to themselves.
        """
        blocks = range(0, self.tile.rows, self.tile.block)
        return [list(blocks)] if self.tile.of_warps else [[block] for block in blocks]

    def at(self, ref: Any, row: Any) -> Any:
        return ref.at[pl.ds(row, self.tile.block)]

    def values(self, compute: Callable[[], Array]) -> Callable[[], Array]:
        """What `compute` gives, in registers or, beside other blocks, computed anew for each use."""
        if self.tile.of_warps:
            return compute
        value = compute()
        return lambda: value

    def normalise(
        self, refs: Sequence, known: Sequence[Sequence[Array]], *, eps: float, center: bool
    ) -> tuple[list[Callable[[], Array]], list[list[Array]]]:
        """(x̂ as `values`, the statistics) of blocks side by side; the statistics computed unless they are known."""

        def change(x, function, per_row):
            return [
                self.values(functools.partial(lambda x, a: function(x(), self.along_rows(a)), x, a))
                for x, a in zip(x, per_row, strict=True)
            ]

        x = [self.values(functools.partial(self.load, ref)) for ref in refs]
        offsets = []
        if center:
            x = change(x, jnp.subtract, [self.load(ref.at[:, 0, 0], self.of_a_row) for ref in refs])
            offsets = [a[0] for a in known] if known else [self.mean(x()) for x in x]
            x = change(x, jnp.subtract, offsets)
        inv_stds = [a[-1] for a in known] if known else [lax.rsqrt(self.mean(jnp.square(x())) + eps) for x in x]
        statistics = zip(offsets, inv_stds, strict=True) if center else zip(inv_stds, strict=True)
        return change(x, jnp.multiply, inv_stds), [list(a) for a in statistics]


def _normalise_streamed(x, scale, bias, *, eps, center, tile):
    rows, hidden = x.shape
    block, programs, padded = _Block(tile, hidden), *_division(rows, tile)
    parameters = [scale, bias] if center else [scale]

    def body(x_ref, *refs, program):
        parameter_refs, (y_ref, *statistics_refs, ring, loaded) = refs[: len(parameters)], refs[len(parameters) :]
        parameters_ = block.load_parameters(parameter_refs)

        def step(row, slots, wait, _):
            wait()
            for group in block.groups():
                refs = [block.at(slots[0], first) for first in group]
                normalised, statistics = block.normalise(refs, [], eps=eps, center=center)
                for ref, hat in zip(refs, normalised, strict=True):
                    ref[...] = block.scaled(hat(), *parameters_).astype(y_ref.dtype)
                for first, of_block in zip(group, statistics, strict=True):
                    for ref, a in zip(statistics_refs, of_block, strict=True):
                        block.store_rows(ref, row + first, a)

        _stream(step, None, [x_ref], [y_ref], [ring], loaded, program=program, programs=programs)

    pieces = functools.partial(_in_pieces, piece=tile.piece)
    y, *statistics = launch(
        body,
        *map(pieces, [x, *parameters]),
        out=(jax.eval_shape(pieces, x), *[jax.ShapeDtypeStruct((padded,), jnp.float32)] * len(parameters)),
        grid={"program": programs},
        scratch=_ring(tile, x),
        name="layer_norm" if center else "rms_norm",
    )
    return y.reshape(x.shape), *(a[:rows] for a in statistics)


def _gradients_streamed(dy, x, scale, bias, *statistics, eps, center, again, tile):
    rows, hidden = x.shape
    block, programs, padded = _Block(tile, hidden), *_division(rows, tile)
    parameters = [scale, bias] if center and again else [scale]
    number_of_sums = 2 if center else 1

    def body(x_ref, dy_ref, *refs, program):
        parameter_refs, refs = refs[: len(parameters)], refs[len(parameters) :]
        statistics_refs, (dx_ref, *refs) = refs[: len(statistics)], refs[len(statistics) :]
        sums_ref, *y_refs, x_ring, dy_ring, loaded = refs
        scale, *bias = block.load_parameters(parameter_refs)

        def step(row, slots, wait, sums):
            groups = block.groups()
            known = [[[block.load_rows(ref, row + first) for ref in statistics_refs] for first in g] for g in groups]
            wait()
            for group, known_ in zip(groups, known, strict=True):
                xs, dys = ([block.at(slot, first) for first in group] for slot in slots)
                normalised, statistics = block.normalise(xs, known_ if statistics_refs else [], eps=eps, center=center)
                gradients = [block.values(functools.partial(block.load, ref)) for ref in dys]
                along = [block.mean(dy() * scale * hat()) for dy, hat in zip(gradients, normalised, strict=True)]
                shifts = [block.mean(dy() * scale) for dy in gradients] if center else along
                for x_ref, dy_ref, hat, dy, (*_, inv_std), a, shift in zip(
                    xs, dys, normalised, gradients, statistics, along, shifts, strict=True
                ):
                    hat, dy = hat(), dy()
                    dx = dy * scale - hat * block.along_rows(a)
                    if center:
                        dx = dx - block.along_rows(shift)
                    x_ref[...] = (dx * block.along_rows(inv_std)).astype(x_ref.dtype)
                    if again:
                        dy_ref[...] = block.scaled(hat, scale, *bias).astype(x_ref.dtype)
                    terms = (dy * hat, dy) if center else (dy * hat,)
                    sums = [total + block.partial_sum(a) for total, a in zip(sums, terms, strict=True)]
            return sums

        zeros = [block.partial_sum(zeros_like(scale)) for _ in range(number_of_sums)]
        ins, outs, rings = [x_ref, dy_ref], [dx_ref, *y_refs], [x_ring, dy_ring]
        sums = _stream(step, zeros, ins, outs, rings, loaded, program=program, programs=programs)
        for i, total in enumerate(sums):
            store(sums_ref.at[program, i], block.sum(total))

    pieces = functools.partial(_in_pieces, piece=tile.piece)
    like_x = jax.eval_shape(pieces, x)
    dx, sums, *y = launch(
        body,
        *map(pieces, [x, dy, *parameters]),
        *(jnp.pad(a, (0, padded - rows)) for a in statistics),
        out=(
            like_x,
            jax.ShapeDtypeStruct((programs, number_of_sums, *block.shape[1:]), jnp.float32),
            *[like_x] * again,
        ),
        grid={"program": programs},
        scratch=_ring(tile, x, dy),
        name="layer_norm_backward" if center else "rms_norm_backward",
    )
    sums = jnp.sum(sums.reshape(programs, number_of_sums, hidden), axis=0)
    return dx.reshape(x.shape), *sums, *(a.reshape(x.shape) for a in y)


def _in_pieces(a: Array, piece: int) -> Array:
    return a.reshape(*a.shape[:-1], -1, piece)


def _division(rows: int, tile: Tile) -> tuple[int, int]:
    """(programs, rows when the last group is full)."""
    groups = -(-rows // tile.rows)
    return min(groups, _MULTIPROCESSORS * tile.programs), groups * tile.rows


def _ring(tile: Tile, *arrays: Array) -> list[Any]:
    """Shared memory and barriers for `_stream`."""
    slots = [plgpu.SMEM((tile.slots, tile.rows, a.shape[1] // tile.piece, tile.piece), a.dtype) for a in arrays]
    return [*slots, plgpu.Barrier(num_arrivals=len(arrays), num_barriers=tile.slots)]


def _stream(
    step: Callable, carry: Any, ins: Sequence, outs: Sequence, rings: Sequence, loaded: Any, *, program, programs
) -> Any:
    """Takes a program's groups of rows through shared memory: `carry = step(row, slots, wait, carry)` for each.

    A step gets the group's first row, and the slots with its part of each of `ins` once it has called `wait`. What it
    leaves in the first slots goes to `outs`.
    """
    slots, rows = rings[0].shape[:2]
    groups = -(-ins[0].shape[0] // rows)
    steps = (groups - program + programs - 1) // programs

    def at(i):
        return pl.ds((program + i * programs) * rows, rows)

    def fetch(i):
        for ref, ring in zip(ins, rings, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[at(i)], ring.at[i % slots], loaded.at[i % slots])

    for i in range(slots - 1):
        pl.when(i < steps)(functools.partial(fetch, i))

    def turn(i, carry):
        slot = i % slots
        wait = functools.partial(plgpu.barrier_wait, loaded.at[slot])
        carry = step(at(i).start, [ring.at[slot] for ring in rings], wait, carry)
        plgpu.commit_smem()
        for ref, ring in zip(outs, rings, strict=False):
            plgpu.copy_smem_to_gmem(ring.at[slot], ref.at[at(i)], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

        @pl.when(i + slots - 1 < steps)
        def _():
            # What the group before left in the slot that is filled next has been read from it.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            fetch(i + slots - 1)

        return carry

    carry = lax.fori_loop(0, steps, turn, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


# ---------------------------------------------------------------------------------------------- plain, for any length

_OWN = 4096
"""Columns at most of which a program adds up the gradients over rows, in its registers."""
_PART = 32
"""Rows at most that a program adds up."""


def _normalise_plain(x, scale, bias, *, eps, center):
    rows, hidden = x.shape
    x, scale, bias, inside = map(_fill_up, (x, scale, scale if bias is None else bias, jnp.ones_like(scale)))
    pieces = _vectors(x.shape[1])

    def body(x_ref, scale_ref, bias_ref, inside_ref, y_ref, *statistics_refs, row):
        normalised, statistics = _normalised_row(x_ref, inside_ref, row, pieces, hidden, eps, center)
        for ref, a in zip(statistics_refs, statistics, strict=True):
            ref[row] = a
        for piece in pieces:
            y = normalised(piece) * _load(scale_ref, piece)
            y_ref[row, piece] = (y + _load(bias_ref, piece) if center else y).astype(y_ref.dtype)

    per_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    y, *statistics = launch(
        body,
        x,
        scale,
        bias,
        inside,
        out=(jax.ShapeDtypeStruct(x.shape, x.dtype), *[per_row] * (2 if center else 1)),
        grid={"row": rows},
        name="layer_norm" if center else "rms_norm",
    )
    return y[:, :hidden], *statistics


def _gradients_plain(dy, x, scale, bias, *_, eps, center, again):
    rows, hidden = x.shape
    dy, x, scale, bias, inside = map(_fill_up, (dy, x, scale, scale if bias is None else bias, jnp.ones_like(scale)))
    pieces = _vectors(x.shape[1])
    length = pieces[0].size
    # Programs that own different columns of the same rows find them in the cache.
    own = largest_divisor(len(pieces), _OWN // length)
    per_part = max(1, min(_PART, rows // (4 * _MULTIPROCESSORS)))
    parts = -(-rows // per_part)

    def body(dy_ref, x_ref, scale_ref, bias_ref, inside_ref, dx_ref, *refs, part, owner):
        sum_refs, y_refs = refs[: 2 if center else 1], refs[2 if center else 1 :]
        owned = [pl.ds((owner * own + j) * length, length) for j in range(own)]

        def add(i, sums):
            row = part * per_part + i
            normalised, (*_, inv_std) = _normalised_row(x_ref, inside_ref, row, pieces, hidden, eps, center)

            def t(piece):
                return _load(dy_ref, (row, piece)) * _load(scale_ref, piece)

            along = _mean(lambda piece: t(piece) * normalised(piece), pieces, hidden)
            shift = _mean(t, pieces, hidden) if center else 0.0
            results = []
            for piece, totals in zip(owned, sums, strict=True):
                normalised_, dy = normalised(piece), _load(dy_ref, (row, piece))
                dx = dy * _load(scale_ref, piece) - normalised_ * along - shift
                dx_ref[row, piece] = (dx * inv_std).astype(dx_ref.dtype)
                for y_ref in y_refs:
                    y = normalised_ * _load(scale_ref, piece)
                    y_ref[row, piece] = (y + _load(bias_ref, piece) if center else y).astype(y_ref.dtype)
                terms = (dy * normalised_, dy)
                results.append([total + a for total, a in zip(totals, terms, strict=False)])
            return results

        zeros = [[zeros_like(scale_ref[piece]) for _ in sum_refs] for piece in owned]
        sums = lax.fori_loop(0, jnp.minimum(per_part, rows - part * per_part), add, zeros)
        for piece, totals in zip(owned, sums, strict=True):
            for ref, total in zip(sum_refs, totals, strict=True):
                ref[part, piece] = total

    like_x = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sums = jax.ShapeDtypeStruct((parts, x.shape[1]), jnp.float32)
    dx, *results = launch(
        body,
        dy,
        x,
        scale,
        bias,
        inside,
        out=(like_x, *[sums] * (2 if center else 1), *[like_x] * again),
        grid={"part": parts, "owner": len(pieces) // own},
        name="layer_norm_backward" if center else "rms_norm_backward",
    )
    y = [results.pop()[:, :hidden]] if again else []
    return dx[:, :hidden], *(jnp.sum(parts, axis=0)[:hidden] for parts in results), *y


def _normalised_row(x_ref, inside_ref, row, pieces, hidden, eps, center):
    """(x̂ as a function of a piece, the statistics) of a row, which is loaded anew for every use."""

    def centred(piece):
        x = _load(x_ref, (row, piece))
        return x - first - offset if center else x

    def inside(piece):
        return centred(piece) * _load(inside_ref, piece) if center else centred(piece)

    first, offset = x_ref[row, 0].astype(jnp.float32), jnp.float32(0)
    if center:
        offset = _mean(inside, pieces, hidden)
    inv_std = lax.rsqrt(_mean(lambda piece: jnp.square(inside(piece)), pieces, hidden) + eps)
    return lambda piece: centred(piece) * inv_std, [offset, inv_std] if center else [inv_std]


def _mean(of_piece: Callable, pieces: Sequence, hidden: int) -> Array:
    return jnp.sum(functools.reduce(jnp.add, map(of_piece, pieces))) / hidden


def _load(ref: Any, at: Any) -> Array:
    return ref[at].astype(jnp.float32)


def _fill_up(a: Array) -> Array:
    """With zeros, to whole warpgroups."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % LANES)])


def _vectors(width: int) -> list[Any]:
    """The row in vectors of up to 4 elements a thread."""
    length = LANES * max(each for each in (1, 2, 4) if width % (LANES * each) == 0)
    return [pl.ds(start, length) for start in range(0, width, length)]
