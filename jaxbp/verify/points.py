import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxbp.verify.derivatives import Arrays, is_symmetric, scale_of

EXTRA_DATA = ("cotangents", "kinks", "ties", "zeros", "large", "dtypes")
USER_DATA = "own data"
SUBNORMAL, LEAST_NORMAL = 1e-39, 1.5e-38
"""In float32."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Arguments of an op and cotangents of its results, in float64 but rounded to the op's dtypes.

    Attributes:
      of: the index of the argument that contains kinks and whose derivatives are compared. None compares all.
      kinks: whether any argument may have elements exactly at a kink. Always true if `of` is set.
      maybe_undefined: whether expected numbers that are not finite are ignored.
    """

    name: str
    values: Arrays
    cotangents: Arrays
    of: int | None = None
    kinks: bool = False
    maybe_undefined: bool = False

    def rounded(self, dtypes: Sequence[np.dtype], results: Sequence[np.dtype]) -> "Point":
        values = [_rounded(a, dtype) for a, dtype in zip(self.values, dtypes, strict=True)]
        cotangents = [_rounded(c, dtype) for c, dtype in zip(self.cotangents, results, strict=True)]
        return dataclasses.replace(self, values=values, cotangents=cotangents)


def generator(seed: int) -> np.random.Generator:
    """Return a generator that differs from a user's generator with the same seed."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(0x6A6178, 0x6270))))


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _rounded(random.standard_normal(shape), dtype)


def direction(random: np.random.Generator, a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a random direction of the size of `a`, which is symmetric if `a` is."""
    moved = normal(random, a.shape, dtype) * scale_of(a)
    return (moved + np.swapaxes(moved, -1, -2)) / 2 if is_symmetric(a) else moved


def points(
    own: Point, names: Sequence[str], kinks: Sequence[float], added: Sequence[str], random: np.random.Generator
) -> Iterator[Point]:
    """Yield the user's data `own`, and then changed copies of it for each name in `added` (see `check`)."""
    yield own
    if "cotangents" in added:
        yield dataclasses.replace(own, name="dy times -30", cotangents=[-30 * c for c in own.cotangents])
        masked = [c * (random.random(c.shape) < 0.5) for c in own.cotangents]
        yield dataclasses.replace(own, name="dy with zeros", cotangents=masked)
    if "kinks" in added and len(kinks):
        for i, name in enumerate(names):
            yield from _with_kinks(own, i, name, kinks)
        yield _each(own, "-0 and subnormals", _with_least)
    if "ties" in added:
        ties = _each(own, "ties", _coarse)
        for a, other in itertools.combinations(ties.values, 2):
            if a.shape == other.shape and a.size > 1 and not any(other is values for values in own.values):
                other.flat[::4] = a.flat[::4]
        yield ties
    if "zeros" in added:
        yield _each(own, "zeros", np.zeros_like)
    if "large" in added:
        for i, name in enumerate(names):
            where = f"large {name}" if len(names) > 1 else "large"
            if (moved := _each(own, where, lambda a: _large(a, random), {i})).values[i] is not own.values[i]:
                yield moved


def halved(own: Point) -> Point:
    return dataclasses.replace(_each(own, "half", lambda a: a / 2), kinks=False, maybe_undefined=False)


def with_one_array(own: Point, same: Sequence[int], name: str) -> Point:
    """Return `own` with the same array for all arguments with indices in `same`.

    Choose the array with the narrowest range, such as [0, 1], which suits all.
    """
    ranks = (_sums_to_1, lambda a: (a >= 0).all() and (a <= 1).all(), lambda a: (a > 0).all())
    rank = lambda i: next((k for k, fits in enumerate(ranks) if fits(own.values[i])), len(ranks))  # noqa: E731
    array = own.values[min(same, key=rank)]
    values = [array if i in same else a for i, a in enumerate(own.values)]
    return dataclasses.replace(own, name=name, values=values, kinks=True, maybe_undefined=True)


def everywhere_large(own: Point, random: np.random.Generator) -> Point:
    return _each(own, "large", lambda a: _large(a, random))


def _with_kinks(own: Point, i: int, name: str, kinks: Sequence[float]) -> Iterator[Point]:
    size, remaining = own.values[i].size, list(kinks)
    while size and remaining:
        chosen, remaining = remaining[:size], remaining[size:]
        places = np.unique(np.linspace(0, size - 1, min(size, 2 * len(chosen))).astype(int))
        values = [np.array(a) for a in own.values]
        values[i].flat[places] = np.resize(chosen, places.size)
        for j, other in enumerate(values):
            if j != i and other.shape == values[i].shape:
                other.flat[places[len(chosen) :]] = 0  # where a kink occurs again
        shown = ", ".join(f"{kink:.4g}" for kink in chosen)
        yield dataclasses.replace(own, name=f"{name} at {shown}", values=values, of=i, kinks=True)


def _each(own: Point, name: str, change: Callable, which: set[int] | None = None) -> Point:
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
    changed.flat[np.unique(np.linspace(0, a.size - 1, 3).astype(int))] = least[: min(3, a.size)]
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


def _large(a: np.ndarray, random: np.random.Generator) -> np.ndarray:
    if (a >= 0).all() and (a <= 1).all():
        return a
    signs = np.sign(a) + (a == 0)
    return signs * 10 ** random.uniform(0.5, 2.5, a.shape)


def _rounded(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(np.asarray(a).astype(dtype), np.float64)
