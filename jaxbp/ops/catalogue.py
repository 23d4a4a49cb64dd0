"""The table of ops: what each takes, small for checking and at real sizes for lowering and timing.

An op listed here is checked against finite differences in every implementation, simulated, lowered for CUDA in every
dtype its kernels take, and timed. Nothing is listed anywhere else.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxbp.ops import (
    _checks,
    activations,
    conv2d,
    conv2d_relu_max_pool2d,
    layer_norm,
    layer_norm_linear,
    linear,
    losses,
    max_pool2d,
)

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
class Case:
    """An op's arguments and options at one place, and how many examples to time it with, if not the bench's default."""

    arguments: tuple[Argument, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: int | None = None

    def structs(self, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The arguments' shapes and dtypes."""
        return tuple(argument.struct(batch, dtype) for argument in self.arguments)

    def draw(self, seed: int, batch: int = 2, dtype: DTypeLike = jnp.float32) -> tuple[Array, ...]:
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
    """

    function: Callable
    small: Case
    real: Mapping[str, Case]
    kernel_dtypes: tuple[str, ...] = _checks.KERNEL_DTYPES

    @property
    def name(self) -> str:
        return self.function.__name__


def _case(*arguments: Argument | tuple, **options: Any) -> Case:
    return Case(tuple(a if isinstance(a, Argument) else Argument(a) for a in arguments), options)


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


def _rows(*sizes: tuple[int, ...], of: Callable[..., Case]) -> dict[str, Case]:
    """`of(*size)` for each `(rows, *size)`."""
    return {f"{rows}x{'x'.join(map(str, size))}": dataclasses.replace(of(*size), batch=rows) for rows, *size in sizes}


_NORMALISED_ROWS = (65536, 1024), (32768, 4096), (262144, 256)
_PROJECTED_ROWS = (65536, 1024, 4096), (65536, 1024, 1024), (32768, 4096, 4096), (262144, 256, 256)


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
        layer_norm.layer_norm,
        _case((2, 3, 5), (5,), (5,)),
        _rows(*_NORMALISED_ROWS, of=lambda hidden: _case((BATCH, hidden), (hidden,), (hidden,))),
    ),
    Entry(
        layer_norm.layer_norm_backward,
        _case((2, 3, 5), (2, 3, 5), (5,)),
        _rows(*_NORMALISED_ROWS, of=lambda hidden: _case((BATCH, hidden), (BATCH, hidden), (hidden,))),
    ),
    Entry(
        layer_norm.rms_norm,
        _case((2, 3, 5), (5,)),
        _rows(*_NORMALISED_ROWS, of=lambda hidden: _case((BATCH, hidden), (hidden,))),
    ),
    Entry(
        layer_norm.rms_norm_backward,
        _case((2, 3, 5), (2, 3, 5), (5,)),
        _rows(*_NORMALISED_ROWS, of=lambda hidden: _case((BATCH, hidden), (BATCH, hidden), (hidden,))),
    ),
    Entry(
        layer_norm_linear.layer_norm_linear,
        _case((2, 3, 5), (5,), (5,), (4, 5), (4,)),
        _rows(
            *_PROJECTED_ROWS, of=lambda hidden, out: _case((BATCH, hidden), (hidden,), (hidden,), (out, hidden), (out,))
        ),
    ),
    Entry(
        layer_norm_linear.layer_norm_linear_backward,
        _case((2, 3, 4), (2, 3, 5), (5,), (5,), (4, 5)),
        _rows(
            *_PROJECTED_ROWS,
            of=lambda hidden, out: _case((BATCH, out), (BATCH, hidden), (hidden,), (hidden,), (out, hidden)),
        ),
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
)
"""Every op, once."""
