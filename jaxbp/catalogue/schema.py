"""What the table of ops is made of: arguments to draw, cases of them, and entries."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import jaxbp
from jaxbp.logic.automaton import Automaton
from jaxbp.logic.convolution import TreeWires
from jaxbp.logic.wires import Wires
from jaxbp.ops import _checks

BATCH = "batch"
"""Stands for the batch size in an argument's shape."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array to draw: its shape, and for integers the bound they stay below.

    Floats are standard normal times `scale`, plus `offset` along the last axis, or with `weights` the softmax of that
    over the last axis, or with `apart` evenly spaced in random order, or with `positive` at least a half.
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
    """Wires, or all those of an automaton: random, the same for every key and dtype.

    Attributes:
      code: the expression of `jaxbp`'s names that makes them.
    """

    shape: ClassVar[tuple[()]] = ()
    """They have no batch."""
    code: str

    def struct(self, batch: int, dtype: DTypeLike) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _fixed(self))

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Any:
        return _fixed(self)

    def made(self) -> Wires | TreeWires | Automaton:
        """What the code makes."""
        return eval(self.code, {"jaxbp": jaxbp})


@functools.cache
def _fixed(argument: FixedArgument) -> Wires | TreeWires | Automaton:
    return argument.made()


@dataclasses.dataclass(frozen=True)
class WiresArgument(FixedArgument):
    """Of a layer of gates."""

    inputs: int
    gates: int

    @property
    def code(self) -> str:
        return f"jaxbp.Wires.random({self.inputs}, {self.gates}, seed=0)"


@dataclasses.dataclass(frozen=True)
class TreeWiresArgument(FixedArgument):
    """Of a convolution of trees of gates."""

    channels: int
    kernels: int
    window: tuple[int, int]
    depth: int = 3

    @property
    def code(self) -> str:
        sizes = f"{self.channels}, {self.kernels}, {self.window}, depth={self.depth}"
        return f"jaxbp.TreeWires.random({sizes}, seed=0)"


@dataclasses.dataclass(frozen=True)
class AutomatonArgument(FixedArgument):
    """Of a cell's circuit."""

    channels: int
    kernels: int
    perception: tuple[int, ...]
    update: tuple[int, ...]
    periodic: bool = True

    @property
    def code(self) -> str:
        sizes = f"{self.channels}, {self.kernels}, {self.perception}, {self.update}"
        return f"jaxbp.Automaton.create({sizes}, periodic={self.periodic}, seed=0)"

    @property
    def gates_a_cell(self) -> int:
        """Perception's run for every channel."""
        return self.channels * self.kernels * sum(self.perception) + sum(self.update)

    def logits(self, parameters: int = 16, offset: tuple[float, ...] = ()) -> list[list[Argument]]:
        """Of each layer of perception, and of each layer of update."""
        perception = [Argument((self.kernels, gates, parameters), offset=offset) for gates in self.perception]
        return [perception, [Argument((gates, parameters), offset=offset) for gates in self.update]]

    def state(self, *grid: int | str) -> Argument:
        """Of a batch of grids, in [0, 1]."""
        return Argument((*grid, self.channels), weights=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op's arguments and options at one place, and how many examples to time it with, if not the bench's default.

    An argument may be a pytree of arrays, and is then one of `Argument`.
    """

    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: int | None = None

    @property
    def leaves(self) -> list[Argument | FixedArgument]:
        """Those of all arguments."""
        return jax.tree.leaves(self.arguments)

    @property
    def floats(self) -> list[Argument]:
        """Those that are floating."""
        return [a for a in self.leaves if isinstance(a, Argument) and a.below is None]

    def structs(self, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Any, ...]:
        """The arguments' shapes and dtypes."""
        return jax.tree.map(lambda argument: argument.struct(batch, dtype), self.arguments)

    def draw(self, seed: int, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Any, ...]:
        """Fresh random arguments."""
        keys = iter(jax.random.split(jax.random.key(seed), len(self.leaves)))
        return jax.tree.map(lambda argument: argument.draw(next(keys), batch, dtype), self.arguments)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public function of the library, with the cases it is checked and timed on.

    Attributes:
      function: takes the arguments, the options and `implementation=`.
      small: for finite differences and the interpreter.
      real: place -> case, the sizes that count.
      kernel_dtypes: what its kernels take.
      like: an entry that is paired in the same way and runs the same kernels, with another formula in them. What does
        not depend on the formula is tested with that entry alone.
      kink_convention: whether it has autodiff's slope where there is no derivative.
    """

    function: Callable
    small: Case
    real: Mapping[str, Case]
    kernel_dtypes: tuple[str, ...] = _checks.KERNEL_DTYPES
    like: str = ""
    kink_convention: bool = True

    @property
    def name(self) -> str:
        return self.function.__name__
