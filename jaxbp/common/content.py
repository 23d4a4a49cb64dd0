import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np


class ByContent:
    """Base of frozen dataclasses that compare arrays by dtype, shape, and bits, so that `jax.jit` compiles once
    for equal static arguments. The arrays must not change. An object is equal only to itself if it contains a tracer,
    or an array that lies partly on other hosts."""

    @functools.cached_property
    def _content(self) -> Any:
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)]
        leaves, structure = jax.tree.flatten(fields)
        if not all(map(_is_concrete, leaves)):
            return None
        return structure, tuple(map(_of_leaf, leaves))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        is_alike = isinstance(other, ByContent) and type(self) is type(other)
        return is_alike and self._content is not None and self._content == other._content

    def __hash__(self) -> int:
        return object.__hash__(self) if self._content is None else hash(self._content)


def _is_concrete(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or (not isinstance(leaf, jax.core.Tracer) and leaf.is_fully_addressable)


def _of_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | jax.Array):
        return leaf
    array = np.ascontiguousarray(leaf)
    return array.dtype.name, array.shape, hashlib.sha256(array).digest()
