import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from numpy.random import Generator as Random

from jaxbp.verify.derivatives import Arrays, evenly, is_symmetric, scale_of

EXTRA_DATA = ("cotangents", "kinks", "ties", "zeros", "small", "large", "integers", "dtypes")
USER_DATA = "own data"
SUBNORMAL, LEAST_NORMAL = 1e-39, 1.5e-38
"""In float32."""
SMALL, NEGATIVE = 1e-4, 200.0
LARGE, VERY_LARGE = (0.5, 2.5), (2.5, 4.0)
"""Ranges of the decimal logarithm."""
LEVELS = {
    "vmap": (3, True, False, True),
    "vmap of an argument": (2, True, False, False),
    "vmap of the other arguments": (2, False, True, False),
    "vmap of all": (2, True, True, True),
    "vmap of dy": (2, False, False, True),
}
"""For each level of nested `vmap`, outermost first, its size, and whether it maps the first argument, the other
arguments, and dy."""
LEVELS_OF_SEVERAL = {"vmap of the other arguments", "vmap of all"}


@dataclasses.dataclass(frozen=True)
class Point:
    """Arguments of an op and cotangents of its results, in float64 but rounded to the op's dtypes.

    Attributes:
      directions: sets of arguments, along which orders above 1 differentiate gradients.
      of: the index of the argument that contains kinks and whose derivatives are compared. None compares all.
      kinks: whether any argument may have elements exactly at a kink. Always true if `of` is set.
      maybe_undefined: whether expected numbers that are not finite are ignored.
      dy_factor: a power of 2 by which the checked implementation's dy is multiplied, and its gradients divided.
    """

    name: str
    values: Arrays
    cotangents: Arrays
    directions: Sequence[Arrays] = ()
    of: int | None = None
    kinks: bool = False
    maybe_undefined: bool = False
    dy_factor: float = 1.0

    def at(self, values: Arrays) -> "Point":
        return dataclasses.replace(self, values=values)

    def rounded(self, dtypes: Sequence[np.dtype], results: Sequence[np.dtype]) -> "Point":
        values = [rounded(a, dtype) for a, dtype in zip(self.values, dtypes, strict=True)]
        cotangents = [rounded(c, dtype) for c, dtype in zip(self.cotangents, results, strict=True)]
        return dataclasses.replace(self, values=values, cotangents=cotangents)


def rounded(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(a).astype(dtype), np.float64)


def generator(seed: int) -> Random:
    """Return a generator that differs from a user's generator with the same seed."""
    return Random(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(0x6A6178, 0x6270))))


def normal(random: Random, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return rounded(random.standard_normal(shape), dtype)


def direction(random: Random, a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a random direction of the size of `a`, which is symmetric if `a` is."""
    moved = normal(random, a.shape, dtype) * scale_of(a)
    return (moved + np.swapaxes(moved, -1, -2)) / 2 if is_symmetric(a) else moved


def points(
    own: Point, names: Sequence[str], kinks: Sequence[float], added: Sequence[str], half: bool, random: Random
) -> Iterator[Point]:
    """Yield the user's data `own`, and then changed copies of it for each name in `added` (see `check`).

    `half` says whether a result has dtype float16.
    """
    yield own
    if "cotangents" in added:
        dy_factors = {"dy times -32": -32.0} if half else {"dy times -4,096": -4096.0, "dy times 1e-9": 2.0**-30}
        for name, factor in dy_factors.items():
            yield dataclasses.replace(own, name=name, dy_factor=factor)
        masked = [c * (random.random(c.shape) < 0.5) for c in own.cotangents]
        yield dataclasses.replace(own, name="dy with zeros", cotangents=masked)
    if "kinks" in added and len(kinks):
        for i, name in enumerate(names):
            yield from _with_kinks(own, i, name, kinks)
        yield each(own, "-0 and subnormals", _with_least)
    if "ties" in added:
        ties = each(own, "ties", _coarse)
        for a, other in itertools.combinations(ties.values, 2):
            if a.shape == other.shape and a.size > 1 and not any(other is values for values in own.values):
                other.flat[::4] = a.flat[::4]
        yield ties
    if "zeros" in added:
        yield each(own, "zeros", np.zeros_like)
    changes = {"small": _small} if "small" in added else {}
    if "large" in added:
        changes["large"] = lambda a: large(a, random)
        changes["very large"] = lambda a: large(a, random, VERY_LARGE)
        changes["very negative"] = lambda a: a if (a >= 0).all() else a - scale_of(a) - NEGATIVE
    for change, (i, name) in itertools.product(changes, enumerate(names)):
        where = f"{change} {name}" if len(names) > 1 else change
        moved = each(own, where, changes[change], {i})
        if moved.values[i] is own.values[i]:
            continue
        if change == "very negative":  # a product with it is negative, too
            moved = each(moved, where, np.abs, {*range(len(names))} - {i})
        yield moved


def grid(own: Point, names: Collection[str]) -> list[Point]:
    """Return one changed copy of `own` per index of the nested `vmap`s in `names` (see `LEVELS`). Arguments differ
    along the levels that map them."""
    found = []
    for index in itertools.product(*map(range, sizes_of(names))):
        first, rest, dy = (
            math.prod(1 - k / 4 for k, level in zip(index, LEVELS.values(), strict=True) if level[kind])
            for kind in (1, 2, 3)
        )
        values = [a if _sums_to_1(a) or not a.size else (rest if i else first) * a for i, a in enumerate(own.values)]
        cotangents = [(dy if index[-1] == 0 else -dy) * c for c in own.cotangents]
        found.append(dataclasses.replace(own, values=values, cotangents=cotangents))
    return found


def sizes_of(names: Collection[str]) -> list[int]:
    return [size if name in names else 1 for name, (size, *_) in LEVELS.items()]


def other_integers(arrays: Sequence[tuple[Any, bool]], random: Random) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield names and changed copies of integer and boolean arrays, with numbers in the range of each array.

    `arrays` says whether each array may change. An array that is sorted along its last axis stays sorted, and a
    permutation stays a permutation.
    """
    for name, (kinds, change) in OTHER_INTEGERS.items():
        changed = [
            _as_sorted_as(a, change(np.asarray(a), random))
            if may_change and a.size and getattr(a.dtype, "kind", "?") in kinds
            else a
            for a, may_change in arrays
        ]
        if any(new is not a and (new != a).any() for new, (a, _) in zip(changed, arrays, strict=True)):
            yield name, changed


def _is_permutation(a):
    return a.size > 3 and (np.sort(a, axis=None) == np.arange(a.size)).all()


def _drawn(a, random):
    if a.dtype == bool:
        return random.random(a.shape) < 0.5
    if _is_permutation(a):
        return random.permutation(a.ravel()).reshape(a.shape)
    # Negative integers often have a special meaning.
    numbers, others = np.unique(a[a < 0]), a[a >= 0]
    if others.size:
        least, most = others.min(), others.max()
        numbers = np.concatenate([numbers, least + evenly(int(most) - int(least) + 1, 1024).astype(a.dtype)])
    return np.asarray(random.choice(numbers, a.shape), a.dtype)


def _repeated(a, random):
    drawn = _drawn(a, random)
    return drawn if _is_permutation(a) else np.resize(drawn.ravel()[: (a.size + 1) // 2], a.shape)


def _as_sorted_as(a, new):
    if a.ndim == 0 or a.shape[-1] < 2 or (a[..., :1] == a).all():
        return new
    steps = np.diff(np.asarray(a).astype(np.int64), axis=-1)
    if (steps >= 0).all():
        return np.sort(new, axis=-1)
    return np.sort(new, axis=-1)[..., ::-1] if (steps <= 0).all() else new


OTHER_INTEGERS = {
    "other integers": ("iu", _drawn),
    "repeated integers": ("iu", _repeated),
    "other masks": ("b", _drawn),
    "masks of True": ("b", lambda a, random: np.ones_like(a)),
    "masks of False": ("b", lambda a, random: np.zeros_like(a)),
}
"""Names of changed data, the kinds of NumPy dtypes that change, and how they change."""


def with_one_array(own: Point, same: Sequence[int], names: Sequence[str]) -> Point:
    """Return `own` with the same array for all arguments with indices in `same`.

    Choose the array with the narrowest range, such as [0, 1], which suits all.
    """
    ranks = (_sums_to_1, lambda a: (a >= 0).all() and (a <= 1).all(), lambda a: (a > 0).all())
    rank = lambda i: next((k for k, fits in enumerate(ranks) if fits(own.values[i])), len(ranks))  # noqa: E731
    array = own.values[min(same, key=rank)]
    values = [array if i in same else a for i, a in enumerate(own.values)]
    name = " = ".join(names[i] for i in same)
    return dataclasses.replace(own, name=name, values=values, kinks=True, maybe_undefined=True)


def _with_kinks(own: Point, i: int, name: str, kinks: Sequence[float]) -> Iterator[Point]:
    size, remaining = own.values[i].size, list(kinks)
    while size and remaining:
        chosen, remaining = remaining[:size], remaining[size:]
        places = evenly(size, 2 * len(chosen))
        values = [np.array(a) for a in own.values]
        values[i].flat[places] = np.resize(chosen, places.size)
        for j, other in enumerate(values):
            if j != i and other.shape == values[i].shape:
                other.flat[places[len(chosen) :]] = 0  # where a kink occurs again
        shown = ", ".join(f"{kink:.4g}" for kink in chosen)
        yield dataclasses.replace(own, name=f"{name} at {shown}", values=values, of=i, kinks=True)


def each(own: Point, name: str, change: Callable, which: set[int] | None = None) -> Point:
    values = [
        change(a) if (which is None or i in which) and a.size and not _sums_to_1(a) else a
        for i, a in enumerate(own.values)
    ]
    return dataclasses.replace(own, name=name, values=values, of=None, kinks=True, maybe_undefined=True)


def _sums_to_1(a: np.ndarray) -> bool:
    return a.ndim > 0 and a.shape[-1] > 1 and bool((a >= 0).all() and np.allclose(a.sum(axis=-1), 1, atol=0.02))


def _with_least(a: np.ndarray) -> np.ndarray:
    least = SUBNORMAL if _has_subnormals() else LEAST_NORMAL
    least = [least, least, least] if (a > 0).all() else [-0.0, least, -least if (a < 0).any() else 0.0]
    changed = np.array(a)
    changed.flat[evenly(a.size, 3)] = least[: min(3, a.size)]
    return changed


@functools.cache
def _has_subnormals() -> bool:
    # XLA's CPU programs do not distinguish subnormal numbers from 0.
    return bool(jax.jit(lambda x: x > 0)(np.float32(SUBNORMAL)))


def _coarse(a: np.ndarray) -> np.ndarray:
    unit = 2.0 ** np.floor(np.log2(scale_of(a) / 2))
    positive = (a > 0).all() and not (a <= 1).all()
    coarse = (np.ceil if positive else np.round)(a / unit) * unit
    coarse.flat[1::3] = coarse.flat[0::3][: coarse.flat[1::3].size]
    return coarse


def _small(a: np.ndarray) -> np.ndarray:
    small = SMALL / scale_of(a) * a
    if _has_subnormals():
        return small
    is_subnormal = (small != 0) & (np.abs(small) < LEAST_NORMAL)
    return np.where(is_subnormal, np.copysign(LEAST_NORMAL, small), small)


def large(a: np.ndarray, random: Random, exponents: tuple[float, float] = LARGE) -> np.ndarray:
    if (a >= 0).all() and (a <= 1).all():
        return a
    signs = np.sign(a) + (a == 0)
    return signs * 10 ** random.uniform(*exponents, a.shape)
