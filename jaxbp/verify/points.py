import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from jaxbp.verify.derivatives import Arrays, scale_of

EXTRA_DATA = ("cotangents", "kinks", "ties", "zeros", "small", "large", "integers", "dtypes")
USER_DATA = "own data"
SUBNORMAL, LEAST_NORMAL = 1e-39, 1.5e-38
"""In float32."""
SMALL, NEGATIVE = 1e-4, 200.0
LARGE, VERY_LARGE = (0.5, 2.5), (2.5, 4.0)
"""Ranges of the decimal logarithm."""
LEVELS = {
    "vmap": (2, True, True, True),
    "vmap of one argument and dy": (3, True, False, True),
    "vmap of all other arguments": (2, False, True, False),
    "vmap of dy": (2, False, False, True),
}
"""Per level of nested `vmap`, outermost first: its size, and whether it maps the first argument, the others, and dy."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Arguments of an op and cotangents of its results, in float64 but rounded to the op's dtypes.

    Attributes:
      of: the index of the argument that contains kinks and whose derivatives are compared. None compares all.
      kinks: whether any argument may have elements exactly at a kink. Always true if `of` is set.
      maybe_undefined: whether expected numbers that are not finite are ignored.
      dy_factor: a power of 2 by which the checked implementation's dy is multiplied, and its gradients divided.
    """

    name: str
    values: Arrays
    cotangents: Arrays
    of: int | None = None
    kinks: bool = False
    maybe_undefined: bool = False
    dy_factor: float = 1.0

    def rounded(self, dtypes: Sequence[np.dtype], results: Sequence[np.dtype]) -> "Point":
        values = [_rounded(a, dtype) for a, dtype in zip(self.values, dtypes, strict=True)]
        cotangents = [_rounded(c, dtype) for c, dtype in zip(self.cotangents, results, strict=True)]
        return dataclasses.replace(self, values=values, cotangents=cotangents)


def generator(seed: int) -> np.random.Generator:
    """Return a generator that differs from a user's generator with the same seed."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(0x6A6178, 0x6270))))


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return _rounded(random.standard_normal(shape), dtype)


def points(
    own: Point,
    names: Sequence[str],
    kinks: Sequence[float],
    added: Sequence[str],
    dy_factors: Mapping[str, float],
    random: np.random.Generator,
) -> Iterator[Point]:
    """Yield the user's data `own`, and then changed copies of it for each name in `added` (see `check`)."""
    yield own
    if "cotangents" in added:
        for name, factor in dy_factors.items():
            yield dataclasses.replace(own, name=name, dy_factor=factor)
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
    changes = {"small": _small} if "small" in added else {}
    if "large" in added:
        changes["large"] = lambda a: _large(a, random, LARGE)
        changes["very large"] = lambda a: _large(a, random, VERY_LARGE)
        changes["very negative"] = _very_negative
    for change, (i, name) in itertools.product(changes, enumerate(names)):
        where = f"{change} {name}" if len(names) > 1 else change
        moved = _each(own, where, changes[change], {i})
        if moved.values[i] is own.values[i]:
            continue
        if change == "very negative":  # a product with it is negative, too
            moved = _each(moved, where, np.abs, {*range(len(names))} - {i})
        yield moved


def grid(own: Point, names: Collection[str]) -> list[Point]:
    """Return one point per index of the nested levels of `vmap` in `names`. Arguments differ along the levels that map
    them."""
    found = []
    for index in itertools.product(*map(range, sizes_of(names))):
        first, rest, dy = (
            math.prod(1 - k / 4 for k, (_, *maps) in zip(index, LEVELS.values(), strict=True) if maps[kind])
            for kind in range(3)
        )
        values = _each(own, "", lambda a, by=first: by * a, {0}).values
        values = [values[0], *_each(own, "", lambda a, by=rest: by * a).values[1:]]
        cotangents = [(dy if index[-1] == 0 else -dy) * c for c in own.cotangents]
        found.append(dataclasses.replace(own, values=values, cotangents=cotangents))
    return found


def sizes_of(names: Collection[str]) -> list[int]:
    return [size if name in names else 1 for name, (size, *_) in LEVELS.items()]


def other_integers(
    arrays: Sequence[tuple[np.ndarray, bool]], random: np.random.Generator
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yield names and changed copies of integer and boolean arrays, with numbers in the range of each array.

    `arrays` says whether each array may change. It stays sorted along its last axis, or a permutation, if it is.
    """
    for name, changes in {**INTEGERS, **MASKS}.items():
        changed = []
        for a, may_change in arrays:
            change = changes.get(getattr(a.dtype, "kind", None)) if may_change and a.size else None
            changed.append(a if change is None else _as_sorted_as(a, change(np.asarray(a), random)))
        if any(new is not a and (new != a).any() for new, (a, _) in zip(changed, arrays, strict=True)):
            yield name, changed


def _drawn(a, random):
    if a.dtype == bool:
        return random.random(a.shape) < 0.5
    if a.size > 3 and (np.sort(a, axis=None) == np.arange(a.size)).all():
        return random.permutation(a.ravel()).reshape(a.shape)
    # Negative numbers often have a meaning of their own.
    least = a[a >= 0].min(initial=np.iinfo(a.dtype).max)
    numbers = np.unique(a[a < 0])
    if (a >= 0).any():
        numbers = np.concatenate([numbers, least + _spread(int(a.max()) - int(least) + 1).astype(a.dtype)])
    return np.asarray(random.choice(numbers, a.shape), a.dtype)


def _spread(count):
    return np.unique(np.linspace(0, count - 1, min(count, 1024)).astype(np.int64))


def _repeated(a, random):
    drawn = _drawn(a, random)
    if a.size > 3 and (np.sort(a, axis=None) == np.arange(a.size)).all():
        return drawn
    return np.resize(drawn.ravel()[: (a.size + 1) // 2], a.shape)


def _as_sorted_as(a, new):
    if a.ndim == 0 or a.shape[-1] < 2 or (a[..., :1] == a).all():
        return new
    steps = np.diff(np.asarray(a).astype(np.int64), axis=-1)
    if (steps >= 0).all():
        return np.sort(new, axis=-1)
    return np.sort(new, axis=-1)[..., ::-1] if (steps <= 0).all() else new


INTEGERS = {
    "other integers": dict.fromkeys("iu", _drawn),
    "repeated integers": dict.fromkeys("iu", _repeated),
}
MASKS = {
    "other masks": {"b": _drawn},
    "masks of True": {"b": lambda a, random: np.ones_like(a)},
    "masks of False": {"b": lambda a, random: np.zeros_like(a)},
}
