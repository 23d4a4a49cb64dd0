import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.common.numerics import cast_like, upcast


class CastOnce:
    """A formula that casts each array in half precision to float32 once. Otherwise, a second derivative would round the
    gradient of each use of the array before it adds them."""

    def __init__(self, formula: Callable):
        functools.update_wrapper(self, formula)  # a mesh divides the arguments by name
        self.formula = formula

    def __call__(self, *arrays: Any, **options: Any) -> Any:
        wide = jax.tree.map(upcast, arrays)
        results = self.formula(*wide, **options)
        if all(map(operator.is_, jax.tree.leaves(wide), jax.tree.leaves(arrays))):
            return results
        return jax.tree.map(cast_like, results, jax.eval_shape(functools.partial(self.formula, **options), *arrays))


def of_floating(gradients: Any, arguments: tuple) -> Any:
    """Return the gradients of the arguments that have a floating leaf: a tuple, or the only gradient itself."""
    pairs = zip(gradients if isinstance(gradients, tuple) else (gradients,), arguments, strict=True)
    found = tuple(gradient for gradient, a in pairs if any(map(_is_floating, jax.tree.leaves(a))))
    return found if len(found) > 1 else found[0]


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
    return jnp.issubdtype(jax.typeof(a).dtype, jnp.floating)


def positional_names(function: Callable, count: int) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*names[:count], *(f"argument {i}" for i in range(len(names), count))]
