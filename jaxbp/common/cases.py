"""The schema of the catalogue, and what the entries of several ops share. Each op's file ends with its entries."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxbp.common import checks

BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Argument:
    """A random array. Floats are standard normal, times `scale`, plus `offset`.

    Attributes:
      shape: may contain `BATCH`, which the batch size replaces.
      below: the exclusive upper bound of integers; None for floats.
      weights: whether the floats go through a softmax over the last axis.
      apart: whether the floats are evenly spaced, in random order.
      positive: whether the floats are at least a half.
      offset: one number per index of the last axis; empty for none.
    """

    shape: tuple[int | str, ...]
    below: int | None = None
    weights: bool = False
    apart: bool = False
    dtype: DTypeLike = jnp.int32
    scale: float = 1.0
    positive: bool = False
    offset: tuple[float, ...] = ()

    def struct(self, batch: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        shape = tuple(batch if size == BATCH else size for size in self.shape)
        return jax.ShapeDtypeStruct(shape, dtype if self.below is None else self.dtype)

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Array:
        struct = self.struct(batch, dtype)
        if self.below is not None:
            return jax.random.randint(key, struct.shape, 0, self.below).astype(struct.dtype)
        if self.apart:
            return jax.random.permutation(key, jnp.linspace(-2, 2, struct.size, dtype=dtype)).reshape(struct.shape)
        x = jax.random.normal(key, struct.shape, struct.dtype) * jnp.asarray(self.scale, struct.dtype)
        x = x + jnp.asarray(self.offset, struct.dtype) if self.offset else x
        return jax.nn.softmax(x) if self.weights else jnp.abs(x) + 0.5 if self.positive else x


class FixedArgument:
    """Argument with wires of gates, equal for all keys of `draw`. `create` makes them from a subclass's fields."""

    shape: ClassVar[tuple[()]] = ()
    create: ClassVar[Callable]

    def struct(self, batch: int, dtype: DTypeLike) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.wires)

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Any:
        return self.wires

    @functools.cached_property
    def wires(self) -> Any:
        return self.create(**dataclasses.asdict(self), seed=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op's arguments, which are pytrees of `Argument` and `FixedArgument`, and its options.

    `batch` is the batch size for timing, or None.
    """

    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: int | None = None

    @property
    def leaves(self) -> list[Argument | FixedArgument]:
        return jax.tree.leaves(self.arguments)

    @property
    def floats(self) -> list[Argument]:
        return [a for a in self.leaves if isinstance(a, Argument) and a.below is None]

    def structs(self, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Any, ...]:
        return jax.tree.map(lambda argument: argument.struct(batch, dtype), self.arguments)

    def draw(self, seed: int, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Any, ...]:
        keys = iter(jax.random.split(jax.random.key(seed), len(self.leaves)))
        return jax.tree.map(lambda argument: argument.draw(next(keys), batch, dtype), self.arguments)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public function of jaxbp, with the cases for its checks and timings.

    Attributes:
      small: the case for finite differences and for the interpreter of kernels.
      real: maps names to cases of realistic size.
      kernel_dtypes: the dtypes of the function's kernels; empty if it has none.
      like: the name of an entry that differs only in its formula, and which many tests use instead.
      kink_convention: whether the gradient equals autodiff's where the function has no derivative.
    """

    function: Callable
    small: Case
    real: Mapping[str, Case]
    kernel_dtypes: tuple[str, ...] = checks.KERNEL_DTYPES
    like: str = ""
    kink_convention: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__


def case_of(*arguments: Any, **options: Any) -> Case:
    return Case(tuple(Argument(a) if isinstance(a, tuple) else a for a in arguments), options)


def pair_entries(
    function: Callable, small: Case, real: Mapping[str, Case], takes: slice = slice(None), like: str = "", **fields: Any
) -> tuple[Entry, Entry]:
    """Return the catalogue's entries of a function and of its public backward.

    `small`, `real`, `like`, and the other fields are as in `Entry`, but cases contain `(dy, *arguments)`. The function
    takes `arguments`, and the backward `(dy, *arguments[takes])`. If `like` names the function, only the backward gets
    it.
    """

    def entry(op, like, arguments_of):
        def changed(case):
            return dataclasses.replace(case, arguments=arguments_of(*case.arguments))

        return Entry(op, changed(small), {place: changed(case) for place, case in real.items()}, like=like, **fields)

    backward = getattr(sys.modules[function.__module__], f"{function.__name__}_backward")
    return (
        entry(function, "" if like == function.__name__ else like, lambda dy, *arguments: arguments),
        entry(backward, like, lambda dy, *arguments: (dy, *arguments[takes])),
    )


SMOOTH = Argument((2, 3, 4))
# A step of finite differences does not change the order of the numbers.
APART = Argument((2, 3, 4), apart=True)


def hidden_entries(
    function, *arguments, dy=(2, 3, 4), place="hidden", takes=slice(None), like="relu", **options
) -> tuple[Entry, Entry]:
    """Return the entries of a function of arrays of shape (2, 3, 4), which is `(BATCH, 1024)` in the real case."""
    shapes = {(2, 3, 4): (BATCH, 1024), (2, 3): (BATCH,)}
    small = case_of(dy, *arguments, **options)
    real = [dataclasses.replace(a, shape=shapes.get(a.shape, a.shape)) for a in small.arguments]
    return pair_entries(function, small, {place: case_of(*real, **options)}, takes, like)


def row_cases(*sizes: tuple[int, ...], of: Callable[..., Case]) -> dict[str, Case]:
    return {f"{rows}x{'x'.join(map(str, size))}": dataclasses.replace(of(*size), batch=rows) for rows, *size in sizes}


def block_cases(name: str, of: Callable[..., Case]) -> dict[str, Case]:
    """Return the cases `{name}1` and `{name}2`, which `of(x, w, z, y)` makes from the shapes of images x, filters w,
    convolution z, and pool y in LeNet's two blocks."""
    blocks = (
        ((BATCH, 1, 28, 28), (6, 1, 5, 5), (BATCH, 6, 24, 24), (BATCH, 6, 12, 12)),
        ((BATCH, 6, 12, 12), (16, 6, 5, 5), (BATCH, 16, 8, 8), (BATCH, 16, 4, 4)),
    )
    return {f"{name}{i}": of(*shapes) for i, shapes in enumerate(blocks, 1)}


def indices_of(*shape: int | str, below: int) -> Argument:
    return Argument(shape, below=below, dtype=jnp.uint8)


LABELS, DIGITS = Argument((2, 3), below=4), Argument((BATCH,), below=10)
ANY_CONVOLUTION = dict(stride=(2, 1), padding=(1, 0))
ANY_POOL = dict(window=(3, 2), **ANY_CONVOLUTION)
