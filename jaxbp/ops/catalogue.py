"""The table of ops: what each takes, small for checking and at real sizes for lowering and timing.

An op listed here is checked against finite differences in every implementation, simulated, lowered for CUDA in every
dtype its kernels take, and timed. Nothing is listed anywhere else.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxbp.ops import _checks, activations, conv2d, conv2d_relu_max_pool2d, linear, logic_gates, losses, max_pool2d
from jaxbp.wires import Wires

BATCH = "batch"
"""Stands for the batch size in an argument's shape."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array to draw: its shape, and for integers the bound they stay below.

    Floats are standard normal, or with `weights` the softmax of that over the last axis, or with `apart` evenly spaced
    in random order.
    """

    shape: tuple[int | str, ...]
    below: int | None = None
    weights: bool = False
    apart: bool = False
    dtype: DTypeLike = jnp.int32

    def struct(self, batch: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        shape = tuple(batch if size == BATCH else size for size in self.shape)
        return jax.ShapeDtypeStruct(shape, dtype if self.below is None else self.dtype)

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Array:
        struct = self.struct(batch, dtype)
        if self.below is not None:
            return jax.random.randint(key, struct.shape, 0, self.below).astype(struct.dtype)
        if self.apart:
            return jax.random.permutation(key, jnp.linspace(-2, 2, struct.size, dtype=dtype)).reshape(struct.shape)
        x = jax.random.normal(key, struct.shape, struct.dtype)
        return jax.nn.softmax(x) if self.weights else x


@dataclasses.dataclass(frozen=True)
class WiresArgument:
    """Random wires, the same for every key."""

    inputs: int
    gates: int
    shape: ClassVar[tuple[()]] = ()
    """They have no batch."""

    def struct(self, batch: int, dtype: DTypeLike) -> Wires:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _wires(self.inputs, self.gates))

    def draw(self, key: Array, batch: int, dtype: DTypeLike) -> Wires:
        return _wires(self.inputs, self.gates)


@functools.cache
def _wires(inputs: int, gates: int) -> Wires:
    return Wires.random(inputs, gates, seed=0)


@dataclasses.dataclass(frozen=True)
class Case:
    """An op's arguments and options at one place."""

    arguments: tuple[Argument | WiresArgument, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def structs(self, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[jax.ShapeDtypeStruct | Wires, ...]:
        """The arguments' shapes and dtypes."""
        return tuple(argument.struct(batch, dtype) for argument in self.arguments)

    def draw(self, seed: int, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Array | Wires, ...]:
        """Fresh random arguments."""
        keys = jax.random.split(jax.random.key(seed), len(self.arguments))
        return tuple(argument.draw(key, batch, dtype) for argument, key in zip(self.arguments, keys, strict=True))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public function of the library, with the cases it is checked and timed on.

    Attributes:
      function: takes the arguments, the options and `implementation=`.
      small: for finite differences and the interpreter.
      real: place -> case, the sizes that count.
      kernel_dtypes: what its kernels take.
      batch: at which it is timed on a GPU.
    """

    function: Callable
    small: Case
    real: Mapping[str, Case]
    kernel_dtypes: tuple[str, ...] = _checks.KERNEL_DTYPES
    batch: int = 16384

    @property
    def name(self) -> str:
        return self.function.__name__


def _case(*arguments: Argument | WiresArgument | tuple, **options: Any) -> Case:
    return Case(tuple(Argument(a) if isinstance(a, tuple) else a for a in arguments), options)


_ANY = dict(stride=(2, 1), padding=(1, 0))
_POOL_ANY = dict(window=(3, 2), stride=(2, 1), padding=(1, 0))
# Values apart from each other, so that a finite difference does not move the maximum.
_APART = Argument((1, 2, 5, 6), apart=True)
_CLASS = Argument((BATCH,), below=10)
_INDICES = Argument((2, 2, 3, 5), below=6, dtype=jnp.uint8)

_FUSED_ANY = dict(window=(2, 3), padding=(1, 0))
_PLACES = Argument((1, 3, 2, 2), below=7, dtype=jnp.uint8)


def _pool_places(*shape: int | str) -> Argument:
    return Argument(shape, below=5, dtype=jnp.uint8)


def _pool_indices(*shape: int | str) -> Argument:
    return Argument(shape, below=4, dtype=jnp.uint8)


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        conv2d.conv2d,
        _case((2, 2, 5, 6), (3, 2, 3, 2), (3,), **_ANY),
        {
            "conv1": _case((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,)),
            "conv2": _case((BATCH, 6, 12, 12), (16, 6, 5, 5), (16,)),
        },
    ),
    Entry(
        conv2d.conv2d_backward_input,
        _case((2, 3, 3, 5), (3, 2, 3, 2), input_size=(5, 6), **_ANY),
        {
            "conv1": _case((BATCH, 6, 24, 24), (6, 1, 5, 5), input_size=(28, 28)),
            "conv2": _case((BATCH, 16, 8, 8), (16, 6, 5, 5), input_size=(12, 12)),
        },
    ),
    Entry(
        conv2d.conv2d_backward_weights,
        _case((2, 3, 3, 5), (2, 2, 5, 6), filter_size=(3, 2), **_ANY),
        {
            "conv1": _case((BATCH, 6, 24, 24), (BATCH, 1, 28, 28), filter_size=(5, 5)),
            "conv2": _case((BATCH, 16, 8, 8), (BATCH, 6, 12, 12), filter_size=(5, 5)),
        },
    ),
    Entry(
        conv2d.conv2d_backward_bias,
        _case((2, 3, 3, 5)),
        {"conv1": _case((BATCH, 6, 24, 24)), "conv2": _case((BATCH, 16, 8, 8))},
    ),
    Entry(
        activations.relu,
        _case((3, 7)),
        {
            "relu1": _case((BATCH, 6, 24, 24)),
            "relu2": _case((BATCH, 16, 8, 8)),
            "relu3": _case((BATCH, 120)),
            "relu4": _case((BATCH, 84)),
        },
    ),
    Entry(
        activations.relu_backward,
        _case((3, 7), (3, 7)),
        {
            "relu1": _case((BATCH, 6, 24, 24), (BATCH, 6, 24, 24)),
            "relu2": _case((BATCH, 16, 8, 8), (BATCH, 16, 8, 8)),
            "relu3": _case((BATCH, 120), (BATCH, 120)),
            "relu4": _case((BATCH, 84), (BATCH, 84)),
        },
    ),
    Entry(
        max_pool2d.max_pool2d,
        _case(_APART, **_POOL_ANY),
        {"pool1": _case((BATCH, 6, 24, 24), window=2), "pool2": _case((BATCH, 16, 8, 8), window=2)},
    ),
    Entry(
        max_pool2d.max_pool2d_with_indices,
        _case(_APART, **_POOL_ANY),
        {"pool1": _case((BATCH, 6, 24, 24), window=2), "pool2": _case((BATCH, 16, 8, 8), window=2)},
    ),
    Entry(
        max_pool2d.max_pool2d_backward,
        _case((2, 2, 3, 5), _INDICES, input_size=(5, 6), **_POOL_ANY),
        {
            "pool1": _case((BATCH, 6, 12, 12), _pool_indices(BATCH, 6, 12, 12), input_size=(24, 24), window=2),
            "pool2": _case((BATCH, 16, 4, 4), _pool_indices(BATCH, 16, 4, 4), input_size=(8, 8), window=2),
            "overlapping": _case(
                (BATCH, 16, 4, 4),
                Argument((BATCH, 16, 4, 4), below=9, dtype=jnp.uint8),
                input_size=(8, 8),
                window=3,
                stride=2,
                padding=1,
            ),
        },
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d,
        _case((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_FUSED_ANY),
        {
            "block1": _case((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,), window=2),
            "block2": _case((BATCH, 6, 12, 12), (16, 6, 5, 5), (16,), window=2),
        },
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_with_places,
        _case((1, 2, 5, 7), (3, 2, 3, 2), (3,), **_FUSED_ANY),
        {"block1": _case((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,), window=2)},
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_backward,
        _case((1, 3, 2, 2), _PLACES, (1, 2, 5, 7), (3, 2, 3, 2), **_FUSED_ANY),
        {
            "block1": _case(
                (BATCH, 6, 12, 12), _pool_places(BATCH, 6, 12, 12), (BATCH, 1, 28, 28), (6, 1, 5, 5), window=2
            ),
            "block2": _case(
                (BATCH, 16, 4, 4), _pool_places(BATCH, 16, 4, 4), (BATCH, 6, 12, 12), (16, 6, 5, 5), window=2
            ),
        },
    ),
    Entry(
        linear.linear,
        _case((2, 3, 5), (4, 5), (4,)),
        {
            "fc1": _case((BATCH, 256), (120, 256), (120,)),
            "fc2": _case((BATCH, 120), (84, 120), (84,)),
            "fc3": _case((BATCH, 84), (10, 84), (10,)),
        },
    ),
    Entry(
        linear.linear_backward,
        _case((2, 3, 4), (2, 3, 5), (4, 5)),
        {
            "fc1": _case((BATCH, 120), (BATCH, 256), (120, 256)),
            "fc2": _case((BATCH, 84), (BATCH, 120), (84, 120)),
            "fc3": _case((BATCH, 10), (BATCH, 84), (10, 84)),
        },
    ),
    Entry(
        losses.softmax_cross_entropy,
        _case((2, 3, 5), Argument((2, 3, 5), weights=True)),
        {
            "classes": _case((BATCH, 10), _CLASS),
            "weights": _case((BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        losses.softmax_cross_entropy_backward,
        _case((2, 3), (2, 3, 5), Argument((2, 3), below=5)),
        {
            "classes": _case((BATCH,), (BATCH, 10), _CLASS),
            "weights": _case((BATCH,), (BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        logic_gates.gate_layer,
        _case((6, 16), WiresArgument(5, 6), (2, 3, 5)),
        {
            "4096->8192": _case((8192, 16), WiresArgument(4096, 8192), (BATCH, 4096)),
            "8000->8000": _case((8000, 16), WiresArgument(8000, 8000), (BATCH, 8000)),
        },
        batch=8192,
    ),
    Entry(
        logic_gates.gate_layer_backward,
        _case((2, 3, 6), (6, 16), WiresArgument(5, 6), (2, 3, 5)),
        {"4096->8192": _case((BATCH, 8192), (8192, 16), WiresArgument(4096, 8192), (BATCH, 4096))},
        batch=8192,
    ),
)
"""Every op, once."""
