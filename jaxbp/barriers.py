"""Optimization barriers that XLA's compiler for the CPU keeps.

A barrier prevents XLA from merging equal computations, and from moving or repeating a computation. Before jaxlib
0.11.1, the compiler for the CPU removes every barrier before it assigns layouts, fuses operations, and merges equal
computations. With these versions, a call that XLA must not inline replaces the barrier. The attribute `inlineable` of
the call forbids the inlining. If XLA ignored the attribute, programs would need more time or memory, but the results
would be the same.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jaxlib.version
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

REMOVED_EARLY = jaxlib.version.__version_info__ < (0, 11, 1)
"""Whether the compiler for the CPU removes barriers before it optimizes."""


def optimization_barrier(arrays: Any) -> Any:
    """Return `lax.optimization_barrier(arrays)`."""
    return _barrier(arrays) if _needs_calls() else lax.optimization_barrier(arrays)


def on_cpu(arrays: Any) -> Any:
    """Return the arrays, passed through a barrier if the program is lowered for the CPU.

    Without the barrier, XLA's compiler for the CPU recomputes an array wherever it is read.
    """
    return lax.platform_dependent(arrays, cpu=optimization_barrier, default=lambda arrays: arrays)


def checkpoint(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `jax.checkpoint(f)`. XLA cannot move the recomputation of f out of the backward pass."""
    return _not_inlined(jax.checkpoint(f)) if _needs_calls() else jax.checkpoint(f)


def _needs_calls() -> bool:
    return REMOVED_EARLY and jax.default_backend() == "cpu"


def _not_inlined(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return f as a function that stays a call in the compiled program. Each of its derivatives is a separate call."""

    @jax.jit
    def inner(x):
        # The attribute forbids only that the call of f is inlined. XLA may inline the calls inside f.
        with set_xla_metadata(inlineable="true"):
            return f(x)

    @functools.wraps(f)
    def call(x):
        with set_xla_metadata(inlineable="false"):
            return inner(x)

    return call


_barrier = _not_inlined(lax.optimization_barrier)
