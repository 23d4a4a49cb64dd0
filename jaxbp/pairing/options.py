import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

REMEMBERED = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Options:
    """An op's options as a cache key that distinguishes equal values of different types, such as 2 and 2.0."""

    values: Mapping[str, Any]

    @functools.cached_property
    def key(self) -> tuple:
        return tuple((name, _typed(value)) for name, value in sorted(self.values.items()))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.key == other.key


def _typed(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    # Hexadecimal text distinguishes 0.0 from -0.0, and makes NaN equal to NaN.
    return type(value), float(value).hex() if isinstance(value, float | np.floating) else value


def remembered(build: Callable[..., Callable]) -> Callable[..., Callable]:
    """Cache the functions that `build` returns. Equal arguments must give the same function, because JAX finds its
    traces by a function's identity."""
    return functools.lru_cache(REMEMBERED)(build)
