import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbp.common.numerics import weakly_typed


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: str
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    weak_type: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Kinds:
    """The structures, shapes, and dtypes of an op's arguments, which its gradients must match."""

    leaves: tuple[_Leaf, ...]
    structure: Any

    @classmethod
    def of(cls, arguments: tuple) -> "Kinds":
        leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
        return cls(tuple(_leaf(path[1:], a) for path, a in leaves), structure)

    @property
    def count(self) -> int:
        return len(self.structure.children())

    def checked(self, op: str, names: list[str], found: Any) -> tuple:
        gradients, each = as_tuple(found), f"one gradient for each of {', '.join(names)}"
        if isinstance(found, list):
            raise TypeError(f"{op}_backward: returns a list; wants a tuple with {each}")
        if len(gradients) != len(names):
            raise ValueError(f"{op}_backward: returns {len(gradients)} gradients; wants {len(names)}, {each}")
        each = zip(names, self.structure.unflatten(self.leaves), gradients, strict=True)
        return tuple(_checked(op, name, kinds, gradient) for name, kinds, gradient in each)


def _leaf(path: tuple, a: Any) -> _Leaf:
    is_array = hasattr(a, "dtype") and hasattr(a, "shape")
    kind = (a.shape, a.dtype, jax.typeof(a).weak_type) if is_array else (None, None, False)
    return _Leaf(jax.tree_util.keystr(path), *kind)


def _checked(op: str, name: str, kinds: Any, gradient: Any) -> Any:
    if kinds is None or gradient is None:
        return gradient
    leaves, structure = jax.tree.flatten(gradient, is_leaf=lambda g: g is None)
    try:
        parts = structure.flatten_up_to(kinds)
    except ValueError:
        parts = [()]
    if not all(g is None or isinstance(kind, _Leaf) for g, kind in zip(leaves, parts, strict=True)):
        has, wanted = (jax.tree.structure(tree) for tree in (gradient, kinds))
        raise ValueError(f"{op}_backward: the gradient of {name} has structure {has}; wants {wanted}, as {name}")
    for g, kind in zip(leaves, parts, strict=True):
        if g is not None and kind.dtype is not None:
            _check_array(f"{op}_backward", f"{name}{kind.path}", kind, g)
    return structure.unflatten(
        weakly_typed(g, kind.dtype) if g is not None and kind.weak_type else g
        for g, kind in zip(leaves, parts, strict=True)
    )


def _check_array(op: str, name: str, kind: _Leaf, gradient: Any) -> None:
    dtype = jnp.result_type(gradient)
    if not jnp.issubdtype(kind.dtype, jnp.inexact):
        if dtype != jax.dtypes.float0:
            raise TypeError(
                f"{op}: the gradient of {name} has dtype {dtype}, but {name} has dtype {kind.dtype}; wants None"
            )
    elif jnp.shape(gradient) != kind.shape:
        has = jnp.shape(gradient)
        raise ValueError(f"{op}: the gradient of {name} has shape {has}; wants {kind.shape}, the shape of {name}")
    elif dtype != kind.dtype:
        raise TypeError(f"{op}: the gradient of {name} has dtype {dtype}; wants {kind.dtype}, the dtype of {name}")


def of_floating(gradients: Any, arguments: tuple) -> Any:
    """Return the gradients of the arguments that have a floating leaf: a tuple, or the only gradient itself."""
    pairs = zip(as_tuple(gradients), arguments, strict=True)
    return _alone_or_tuple(tuple(gradient for gradient, a in pairs if any(map(_is_floating, jax.tree.leaves(a)))))


def by_autodiff(function: Callable, dy: Any, *arguments: Any) -> Any:
    """Compute gradients of `function` by autodiff for the arguments that have a floating leaf. Other leaves have the
    gradient None."""
    leaves, structure = jax.tree.flatten(arguments)
    floating = [i for i, a in enumerate(leaves) if _is_floating(a)]

    def of_leaves(*values):
        given = dict(zip(floating, values, strict=True))
        return function(*structure.unflatten([given.get(i, a) for i, a in enumerate(leaves)]))

    _, vjp = jax.vjp(of_leaves, *(leaves[i] for i in floating))
    found = dict(zip(floating, vjp(dy), strict=True))
    return of_floating(structure.unflatten([found.get(i) for i in range(len(leaves))]), arguments)


def in_dtypes_of(arguments: Any, gradients: Any) -> Any:
    def converted(a, gradient):
        dtype = jnp.result_type(a)
        is_other = dtype != gradient.dtype and jnp.issubdtype(dtype, jnp.floating)
        return gradient.astype(dtype) if is_other else gradient

    return jax.tree.map(converted, arguments, gradients)


def summed_like(a: Array, gradient: Array) -> Array:
    """Return the gradient with respect to `a`, given the gradient with respect to a broadcast copy of `a`."""
    if gradient.shape == a.shape:
        return gradient
    (summed,) = jax.linear_transpose(lambda a: jnp.broadcast_to(a, gradient.shape), a)(gradient)
    return summed


def _is_floating(a: Any) -> bool:
    return hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)


def as_tuple(gradients: Any) -> tuple:
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _alone_or_tuple(gradients: tuple) -> Any:
    return gradients if len(gradients) > 1 else gradients[0]


def positional_names(function: Callable, count: int) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:count], *(f"argument {i}" for i in range(len(names), count))]
