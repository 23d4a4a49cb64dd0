import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import DictKey, SequenceKey

from jaxbp.pairing import name_of as name_of
from jaxbp.pairing.gradients import positional_names


def is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def floats(tree: Any) -> list[Array]:
    return [a for a in jax.tree.leaves(tree) if is_float(a)]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The positional arguments of a function as a flat list of arrays, named by parameter and path.

    Attributes:
      alone: for each array, whether only lists, tuples, and dictionaries contain it. The check may then change this
        array while other arrays keep their values.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any
    alone: tuple[bool, ...] = ()

    @functools.cached_property
    def float_names(self) -> tuple[str, ...]:
        return tuple(name for name, a in zip(self.names, self.leaves, strict=True) if is_float(a))

    @functools.cached_property
    def floats(self) -> tuple[Any, ...]:
        return tuple(a for a in self.leaves if is_float(a))

    @functools.cached_property
    def dtypes(self) -> list[np.dtype]:
        return [a.dtype for a in self.floats]

    def with_integers(self, integers: Sequence[Any]) -> "Arguments":
        """Replace the arrays that are not floating."""
        other = iter(integers)
        return dataclasses.replace(self, leaves=tuple(a if is_float(a) else next(other) for a in self.leaves))

    @property
    def integers(self) -> list[tuple[Any, bool]]:
        """The arrays that are not floating, each with its entry of `alone`."""
        return [(a, alone) for a, alone in zip(self.leaves, self.alone, strict=True) if not is_float(a)]

    def positions(self, argnums: Sequence[int] | None) -> list[int]:
        belongs = jax.tree.leaves([[i] * tree.num_leaves for i, tree in enumerate(self.structure.children())])
        return [
            i
            for i, (a, argument) in enumerate(zip(self.leaves, belongs, strict=True))
            if is_float(a) and (argnums is None or argument in argnums)
        ]

    def call(self, function: Callable, leaves: Sequence[Any]) -> list[Array]:
        results = function(*jax.tree.unflatten(self.structure, leaves))
        if other := [a for a in jax.tree.leaves(results) if not hasattr(a, "dtype")]:
            kind = type(other[0]).__name__
            raise TypeError(f"{name_of(function)} returns {other[0]!r}, a Python {kind}; wants arrays")
        return floats(results)

    def of_floats(self, function: Callable) -> Callable[..., list[Array]]:
        """Return `function` as a function of the floating arrays. Other arrays are constants."""

        def call(*values):
            values = iter(values)
            return self.call(function, [next(values) if is_float(a) else jnp.asarray(a) for a in self.leaves])

        return call


def take_apart(function: Callable, args: Sequence[Any]) -> Arguments:
    parameters = _parameters(function, len(args))
    paths, structure = jax.tree.flatten_with_path(tuple(args))
    names, leaves, alone = [], [], []
    for (position, *way), a in paths:
        way = [key for key in way if getattr(key, "name", None) != "value"]  # the only field of a Flax NNX variable
        inner = jax.tree_util.keystr(tuple(way), simple=True, separator=".")
        names.append(".".join(filter(None, (parameters[position.idx], inner))))
        alone.append(all(isinstance(key, SequenceKey | DictKey) for key in way))
        a = a if hasattr(a, "dtype") else jnp.asarray(a)
        # NumPy arrays can be constants on any device.
        leaves.append(np.asarray(a) if jnp.issubdtype(a.dtype, jnp.integer) else a)
    return Arguments(tuple(names), tuple(leaves), structure, tuple(alone))


def _parameters(function: Callable, count: int) -> list[str]:
    if isinstance(function, functools.partial):
        return _parameters(function.func, len(function.args) + count)[len(function.args) :]
    try:
        return positional_names(getattr(function, "forward", function), count)
    except ValueError:  # some callables have no signature
        return [f"argument {i}" for i in range(count)]


def without_other_implementations(function: Callable, args: Sequence[Any], options: Mapping[str, Any]) -> Callable:
    """Return `function`, with `implementation=None` fixed if `implementation` has another meaning than in jaxbp.

    Trace `function(*args, **options)` to find out. The meaning differs if `implementation="autodiff"` raises an error
    other than `NotImplementedError`, and `implementation=None` raises none.
    """
    if not takes_implementation(function):
        return function
    arguments, default = take_apart(function, args), functools.partial(function, implementation=None)

    def error(function, implementation):
        try:
            jax.eval_shape(arguments.of_floats(bind(function, implementation, options)), *arguments.floats)
        except Exception as error:
            return error

    refused = error(function, "autodiff")
    if refused is None or isinstance(refused, NotImplementedError) or error(default, None):
        return function  # the check reports any error of the default
    return default


def bind(function: Callable, implementation: str | None, options: Mapping[str, Any]) -> Callable:
    if takes_implementation(function):
        options = {**options, "implementation": implementation}
    return functools.partial(function, **options)


def takes_implementation(function: Callable) -> bool:
    if isinstance(function, functools.partial) and "implementation" in function.keywords:
        return False
    try:
        return "implementation" in inspect.signature(function).parameters
    except ValueError:
        return False


@contextlib.contextmanager
def tracers_explained(caller: str, function: Callable) -> Iterator[None]:
    """Return a context that turns JAX's `UnexpectedTracerError` into a TypeError with `caller`, `function`, and the
    reason."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        name = name_of(function)
        if "nondiff_argnums" in str(error):
            raise TypeError(
                f"{caller}: {name} passes an array or a number at a position in `nondiff_argnums`, which {caller} "
                f"traces; wants a function of the other arguments, such as {caller}(lambda x: {name}(x, 2.0), x)"
            ) from error
        raise TypeError(
            f"{caller}: {name} leaks a tracer: it stores an array in one call and uses it in a later call; wants a "
            "function whose results depend only on its arguments"
        ) from error


def require_several(op: str, name: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(f"{op}: {name} is {value!r}; wants a sequence, say [{value!r}]")
