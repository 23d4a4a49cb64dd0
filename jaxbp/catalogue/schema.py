import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

import jaxbp
from jaxbp.common import checks
from jaxbp.logic.wires.automaton_wires import Automaton
from jaxbp.logic.wires.tree_wires import TreeWires
from jaxbp.logic.wires.wires import Wires

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
    """Wires between logic gates, which are equal for all random keys. The Python expression `code` creates them."""

    shape: ClassVar[tuple[()]] = ()
    code: str

    def struct(self, batch: int, dtype: DTypeLike) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _fixed(self))

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Any:
        return _fixed(self)

    def made(self) -> Wires | TreeWires | Automaton:
        return eval(self.code, {"jaxbp": jaxbp})


@functools.cache
def _fixed(argument: FixedArgument) -> Wires | TreeWires | Automaton:
    return argument.made()


@dataclasses.dataclass(frozen=True)
class WiresArgument(FixedArgument):
    inputs: int
    gates: int

    @property
    def code(self) -> str:
        return f"jaxbp.Wires.random({self.inputs}, {self.gates}, seed=0)"


@dataclasses.dataclass(frozen=True)
class TreeWiresArgument(FixedArgument):
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
        return self.channels * self.kernels * sum(self.perception) + sum(self.update)

    def logits(self, parameters: int = 16, offset: tuple[float, ...] = ()) -> list[list[Argument]]:
        perception = [Argument((self.kernels, gates, parameters), offset=offset) for gates in self.perception]
        return [perception, [Argument((gates, parameters), offset=offset) for gates in self.update]]

    def state(self, *grid: int | str) -> Argument:
        return Argument((*grid, self.channels), weights=True)


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
