"""Scores of a tile in the registers of a consumer warpgroup, for the attention kernels on Hopper.

A tile of scores is `(queries, keys)`, or transposed. Scores are in base 2: the probabilities are `exp2(score - lse)`.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.tiles import COMPARE_SEGMENTS, MOST_CONSTANTS, Masks, Visits
from pallas_kernels.core import device
from pallas_kernels.core.layouts import (
    OPERAND_BYTES,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    value_a_column,
    value_a_row,
)
from pallas_kernels.core.mosaic import plgpu

LOG2_E = math.log2(math.e)
ROWS = 64
"""Rows of a consumer's tile: the rows of a wgmma (PTX ISA)."""
HEADS = 32, 64, 128, 256
"""Supported head dimensions."""
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""Registers per thread, by the number of consumers. All threads of an SM share 65,536 (PTX ISA, setmaxnreg)."""
_SORTED_ROUNDS = 4
"""How many rounds of rows, one per CTA, are sorted by length. Their keys and values should fit into the L2 cache."""
_TILE_ROWS = 8
"""Rows of a swizzled tile. Mosaic copies only between arrays of whole tiles."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of scores of shape `(queries, keys)`, or `(keys, queries)` if `query_axis` is 1.

    Before a loop over tiles of the same queries, `with_queries` loads the intervals of these queries.
    """

    batch: Any
    head: Any
    query: Any
    key: Any
    shape: tuple[int, int]
    query_axis: int = 0
    loaded: Any = None

    def with_queries(self, masks: Masks) -> "Tile":
        return dataclasses.replace(self, loaded=self.queries(masks))

    def queries(self, masks: Masks) -> list[Array]:
        """For each query of the tile, return the first valid key and the end of the valid keys, as two vectors."""
        return self.loaded or [self._load(a, self.query, self.query_axis) for a in (masks.first, masks.end)]

    def same_segment(self, masks: Masks) -> Array:
        queries = self._load(masks.query_segments, self.query, self.query_axis)
        return self.along_queries(queries) == self.along_keys(masks.key_segments)

    def along_queries(self, values: Array) -> Array:
        return lax.broadcast_in_dim(values, self.shape, [self.query_axis])

    def along_keys(self, ref: Any) -> Array:
        """Return the tile's part of `ref (batch or 1, keys)`, broadcast along the queries."""
        values = self._load(ref, self.key, 1 - self.query_axis)
        return lax.broadcast_in_dim(values, self.shape, [1 - self.query_axis])

    def elements(self, ref: Any) -> Array:
        """Return the tile's part of `ref (batch or 1, heads or 1, rows or 1, columns or 1)`, in the tile's order."""
        starts = (self.query, self.key) if self.query_axis == 0 else (self.key, self.query)
        index = [index if size > 1 else 0 for index, size in zip((self.batch, self.head), ref.shape[:2], strict=True)]
        axes = [axis for axis in (0, 1) if ref.shape[2 + axis] > 1]
        index += [pl.ds(starts[axis], self.shape[axis]) if axis in axes else 0 for axis in (0, 1)]
        layout = {(0, 1): plgpu.Layout.WGMMA, (0,): value_a_row(), (1,): value_a_column()}.get(tuple(axes))
        values = ref[tuple(index)] if layout is None else load(ref.at[tuple(index)], layout, optimized=False)
        return values if len(axes) == 2 else lax.broadcast_in_dim(values, self.shape, axes)

    def _load(self, ref, start, axis):
        index = self.batch if ref.shape[0] > 1 else 0
        layout = (value_a_row, value_a_column)[axis]()
        return load(ref.at[index, pl.ds(start, self.shape[axis])], layout, optimized=False)


class Heads(NamedTuple):
    """The heads of queries and of keys, and where they lie in their arrays.

    If `packed`, one array `(batch, positions, key heads, group + 2, dimension)` has for each key head the queries that
    attend to it, the key, and the value.
    """

    queries: int
    keys: int
    packed: bool

    @classmethod
    def of(cls, q: Any, k: Any) -> "Heads":
        if q.ndim == 4:
            return cls(q.shape[2], k.shape[2], packed=False)
        return cls(q.shape[2] * (q.shape[3] - 2), q.shape[2], packed=True)

    @property
    def group(self) -> int:
        """The number of query heads per key head."""
        return self.queries // self.keys

    def key_head(self, query_head: Any) -> Any:
        return quotient(query_head, self.group)

    def query(self, query_head: Any) -> Any:
        """Return the index of the queries along the axis of heads of `flat(q)`."""
        if not self.packed:
            return query_head
        return self.key_head(query_head) * (self.group + 2) + remainder(query_head, self.group)

    def key(self, key_head: Any) -> Any:
        return key_head * (self.group + 2) + self.group if self.packed else key_head

    def value(self, key_head: Any) -> Any:
        return self.key(key_head) + int(self.packed)

    def shape(self, a: Any, heads: int) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of an array with this number of heads, and otherwise as a."""
        return jax.ShapeDtypeStruct((*a.shape[:2], heads, a.shape[-1]), a.dtype)

    def flat(self, *arrays: Array) -> list[Array]:
        """Return arrays with one axis of heads, padded with zeros to whole swizzled tiles along the positions."""
        return [aligned(a.reshape(*a.shape[:2], -1, a.shape[-1])) for a in arrays]


class Row(NamedTuple):
    """One row of tiles of a head.

    Attributes:
      number: how many rows the CTA has computed before.
      batch, head, index: the example, the head, and the index among the rows of tiles of the head.
      first_step: number of tiles that the CTA has visited before.
      count: number of tiles to visit.
      visit: `visit(i)` returns the index of the i-th tile, and its flags (`tiles.tiles_with_pairs`).
    """

    number: Any
    batch: Any
    head: Any
    index: Any
    first_step: Any
    count: Any
    visit: Callable[[Any], tuple[Any, Any]]


class Rows(NamedTuple):
    """The order in which CTAs compute the rows of tiles of all heads.

    The rows of `width` heads follow each other, so that concurrent CTAs share keys and values in the L2 cache.

    Attributes:
      shape: numbers of examples, heads, and rows of tiles per head.
      width: a divisor of the number of all heads.
      last_first: whether the rows of a head are computed from the last to the first, for example because the last row
        of a causal mask is the longest.
      schedule: int32 `(CTAs, 2 + most rows, 2)`. For each CTA, first the number of its rows, and then for each row its
        position in this order and its number of tiles. If it is None, each CTA computes one row.
    """

    shape: tuple[int, int, int]
    width: int
    last_first: bool
    schedule: np.ndarray | None = None

    @property
    def programs(self) -> int:
        return math.prod(self.shape) if self.schedule is None else len(self.schedule)

    def at(self, position: Any) -> tuple[Any, Any, Any]:
        """Return the batch, the head, and the index of the row at a position of the order."""
        _, heads, tiles = self.shape
        index = remainder(quotient(position, self.width), tiles)
        pair = quotient(position, self.width * tiles) * self.width + remainder(position, self.width)
        return quotient(pair, heads), remainder(pair, heads), tiles - 1 - index if self.last_first else index

    def for_each(self, compute: Callable[[Row], None], program: Any, schedule: Any, visits: Visits) -> None:
        """Call `compute(row)` for each row of tiles of CTA `program`. `schedule` is the reference to the attribute."""

        def compute_one(number, position, count, step):
            batch, head, index = self.at(position)
            of_row, visit = row_visits(visits, batch, index)
            count = of_row if count is None else count
            compute(Row(number, batch, head, index, step, count, visit))
            return step + count

        def scheduled(number):
            return schedule[program, number + 1, 0], schedule[program, number + 1, 1]

        def compute_next(number, carry):
            row, step = carry
            following = scheduled(number + 1)  # loaded early
            return following, compute_one(number, *row, step)

        if schedule is None:
            compute_one(jnp.int32(0), program, None, jnp.int32(0))
        else:
            lax.fori_loop(0, schedule[program, 0, 0], compute_next, (scheduled(0), jnp.int32(0)))


def rows_of(own: Any, read: Any, tiles: int, visits: Visits, *, last_first: bool, persistent: bool) -> Rows:
    """Return the order for `tiles` rows of tiles per head of `own`, such as the queries. Each row reads two arrays of
    the shape of `read`, such as the keys and the values. `width` is chosen so that what its heads read fits into half
    of the L2 cache.

    If `persistent`, each multiprocessor has one CTA.
    """
    (batch, _, heads, head), (_, length, heads_read, _) = own.shape, read.shape
    shape, fewer_heads = (batch, heads, tiles), min(heads, heads_read)
    bytes_read = 2 * heads_read // fewer_heads * length * head * read.dtype.itemsize
    most = max(1, device.target().l2_bytes // 2 // bytes_read) * (heads // fewer_heads)
    rows = Rows(shape, largest_divisor(batch * heads, most), last_first)
    if not persistent:
        return rows
    batches, _, indices = rows.at(np.arange(math.prod(shape), dtype=np.int32))
    counts = visits.counts[batches if len(visits.counts) > 1 else 0, indices]
    is_known = isinstance(counts, np.ndarray) and math.prod(shape) <= MOST_CONSTANTS
    return rows._replace(schedule=_balanced(counts) if is_known else _dealt(counts))


def _balanced(counts):
    """Return a `Rows.schedule` in which each row goes to the CTA that is free first. `counts` has each row's number of
    tiles."""
    ctas = [(0, cta) for cta in range(min(len(counts), device.target().multiprocessors))]
    positions = [[] for _ in ctas]
    for position, count in enumerate(counts.tolist()):
        busy, cta = ctas[0]
        positions[cta].append(position)
        # Its start and its end take about as long as a tile.
        heapq.heapreplace(ctas, (busy + count + 1, cta))
    schedule = np.zeros((len(ctas), 2 + max(map(len, positions)), 2), np.int32)
    for row, of_cta in zip(schedule, positions, strict=True):
        row[0, 0] = len(of_cta)
        row[1 : len(of_cta) + 1] = np.stack([of_cta, counts[of_cta]], axis=1)
    return schedule


def _dealt(counts):
    """Return a `Rows.schedule` for numbers of tiles that are only known when the program runs. The longest rows of some
    consecutive rounds come first. Each round begins with another CTA, so that all CTAs get long and short rows."""
    rows = len(counts)
    ctas = min(rows, device.target().multiprocessors)
    rounds = -(-rows // (ctas * _SORTED_ROUNDS)) * _SORTED_ROUNDS
    counts = jnp.pad(jnp.asarray(counts), (0, rounds * ctas - rows), constant_values=-1)
    sorted_together = counts.reshape(-1, _SORTED_ROUNDS * ctas)
    order = jnp.argsort(-sorted_together, axis=1, stable=True).astype(jnp.int32)
    order += jnp.arange(0, rounds * ctas, _SORTED_ROUNDS * ctas, dtype=jnp.int32)[:, None]
    # In round r, the CTA c gets the row number `c + r * ctas // rounds`, modulo the number of CTAs.
    number = (np.arange(ctas)[:, None] + np.arange(rounds) * ctas // rounds) % ctas
    positions = order.reshape(rounds, ctas)[np.arange(rounds), number]
    of_cta = counts[positions]
    schedule = jnp.stack([positions, of_cta], axis=2)
    numbers = jnp.broadcast_to(jnp.sum(of_cta >= 0, axis=1, dtype=jnp.int32)[:, None, None], (ctas, 1, 2))
    return jnp.concatenate([numbers, schedule, jnp.zeros((ctas, 1, 2), jnp.int32)], axis=1)


def row_visits(visits: Visits, batch: Any, row: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """Return the number of tiles that a row of tiles visits, and `Row.visit`."""
    example = batch if visits.visits.shape[0] > 1 else 0

    def visit(step):
        code = visits.visits[example, row, step]
        # In 64-bit mode, JAX would take a Python integer for an int64.
        return lax.shift_right_logical(code, np.int32(2)), code & np.int32(3)

    return visits.counts[example, row], visit


def unknown_zero(number: Any) -> Any:
    """Return 0 for the index of a tile, or a number of visits below 2^29. Compilers do not know this 0. With it in an
    index, they compute an address once per visit. They would compute it once per row, and spill it."""
    return lax.shift_right_logical(number, np.int32(29))  # an index and its flags have 31 bits, see `Visits`


def scores(products: Array, masks: Masks, tile: Tile, flags: Any, *, scale: float, softcap: float | None) -> Any:
    """Return scores, a factor to multiply them with, and the softcap's tanh or None. A masked pair has a score of
    -inf. The factor is separate, because `exp2(score * factor - lse)` is then one multiply-add and one exponential.

    Args:
      products: q kᵀ.
      flags: the tile's flags.
    """
    capped, factor = None, scale
    if softcap is not None:
        # `tanh.approx` has an error of 2^-11, which the softcap multiplies.
        capped = 1 - 2 / (1 + jnp.exp2(products * (2 * LOG2_E * scale / softcap)))
        products, factor = capped, softcap
    if masks.bias is not None:
        products, factor = products * factor + tile.elements(masks.bias).astype(jnp.float32), 1.0

    def mask(products):
        first, end = tile.queries(masks)
        key = plgpu.broadcasted_iota(jnp.int32, tile.shape, 1 - tile.query_axis, layout=plgpu.Layout.WGMMA)
        # With unsigned integers, one comparison finds whether a key is in the interval.
        after_first = (key + tile.along_queries(tile.key - first)).astype(jnp.uint32)
        length = tile.along_queries(jnp.maximum(end - first, 0).astype(jnp.uint32))
        products = jnp.where(after_first < length, products, -jnp.inf)
        if masks.query_segments is not None:
            compare = lambda products: jnp.where(tile.same_segment(masks), products, -jnp.inf)  # noqa: E731
            products = lax.cond(flags == COMPARE_SEGMENTS, compare, lambda products: products, products)
        if masks.mask is not None:
            products = jnp.where(tile.elements(masks.mask) != 0, products, -jnp.inf)
        return products

    return lax.cond(flags > 0, mask, lambda products: products, products), factor * LOG2_E, capped


def padded(masks: Masks, tile: tuple[int, int], transposed: bool = False) -> Masks:
    """Pad the masks to whole tiles `(queries, keys)`, and transpose `mask` and `bias` if `transposed`."""
    queries, keys = tile

    def last(a, unit):
        return None if a is None else jnp.pad(a, ((0, 0), (0, -a.shape[1] % unit)))

    def elements(a):
        if a is None:
            return None
        padding = [(0, 0 if size == 1 else -size % unit) for size, unit in zip(a.shape[2:], tile, strict=True)]
        a = jnp.pad(a.astype(jnp.int8) if a.dtype == bool else a, ((0, 0), (0, 0), *padding))
        return a.swapaxes(2, 3) if transposed else a

    first, end, query_segments = (last(a, queries) for a in masks[:3])
    return Masks(first, end, query_segments, last(masks.key_segments, keys), elements(masks.mask), elements(masks.bias))


def aligned(x: Array) -> Array:
    """Pad the sequence of x `(batch, sequence, heads, dimension)` with zeros to whole swizzled tiles."""
    padding = -x.shape[1] % _TILE_ROWS
    return jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) if padding else x


def padded_statistics(lse: Array, delta: Array, queries: int) -> tuple[Array, Array]:
    """Return lse in base 2, and delta, padded along the last axis to whole tiles of `queries` queries. Both arguments
    have one value per example, head, and query. Where a query has no valid key (lse is -inf), and in the padding, lse
    becomes inf, so that the probabilities are 0. delta is padded with 0."""
    padding = ((0, 0), (0, 0), (0, -lse.shape[2] % queries))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    return jnp.pad(lse, padding, constant_values=jnp.inf), jnp.pad(delta, padding)


def unsupported(q: Any, k: Any, v: Any, scale: float) -> str | None:
    if len({a.dtype for a in (q, k, v)}) > 1 or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtypes {q.dtype}, {k.dtype}, and {v.dtype}, only bfloat16 or float16 for all"
    dimensions = [a.shape[-1] for a in (q, k, v)]
    if dimensions[0] not in HEADS or len({*dimensions}) > 1:
        return "head dimensions of {}, {}, and {}, only 32, 64, 128, or 256 for all".format(*dimensions)
    if q.shape[2] % k.shape[2]:
        return f"{q.shape[2]} query heads and {k.shape[2]} key heads, only multiples"
    if not scale > 0:
        return f"a scale of {scale}, only positive numbers"
    if not all((*q.shape, *k.shape)):
        return "an empty array"
    return None


def tile_memory(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a `plgpu.SMEM` for tiles of q, k, v, or do, whose rows are `shape[-1]` features."""
    return operand(shape, dtype, min(OPERAND_BYTES, shape[-1] * jnp.dtype(dtype).itemsize))
