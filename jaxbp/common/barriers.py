"""Optimization barriers that XLA's compiler for the CPU keeps.

A barrier prevents XLA from merging, moving, or repeating computations. Before jaxlib 0.11.1, XLA's CPU compiler removes
every barrier before it optimizes. A function call with the attribute `inlineable="false"` then replaces the barrier.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

REMOVED_EARLY = jaxlib.version.__version_info__ < (0, 11, 1)


def optimization_barrier(arrays: Any) -> Any:
    return _barrier(arrays) if _needs_calls() else lax.optimization_barrier(arrays)


def on_cpu(arrays: Any) -> Any:
    """Return the arrays. On the CPU, a barrier follows them, because XLA would otherwise recompute an array for each
    read."""
    return lax.platform_dependent(arrays, cpu=optimization_barrier, default=lambda arrays: arrays)


def recomputed(a: Array) -> Array:
    """Return a floating array from which a backward computes values of its forward again, such as `tanh(x)`.

    XLA merges equal expressions. On a GPU, it would keep these values from the forward as residuals, so the array is
    multiplied by a 1 whose value XLA does not know. On a CPU, keeping the values is faster.
    """
    return a * _on_gpu(lax.optimization_barrier, jnp.ones((), a.dtype))


def stored(arrays: Any) -> Any:
    """Return the arrays, such as residuals. On a GPU, a barrier makes XLA store these arrays and no others.

    Without it, XLA may store an array from which it can compute a residual again, or, in half precision, the float32
    array that was rounded (`xla_allow_excess_precision`).
    """
    return _on_gpu(lax.optimization_barrier, arrays)


def _on_gpu(f, a):
    return lax.platform_dependent(a, cpu=lambda a: a, default=f)


def checkpoint(f: Callable[[Any], Any], policy: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Return `jax.checkpoint(f, policy=policy)`, and make sure that XLA keeps the recomputation of f."""
    f = jax.checkpoint(f, policy=policy)
    return _not_inlined(f) if _needs_calls() else f


def _needs_calls() -> bool:
    return REMOVED_EARLY and jax.default_backend() == "cpu"


def _not_inlined(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @jax.jit
    def inner(x):
        # XLA may inline the calls inside f.
        with set_xla_metadata(inlineable="true"):
            return f(x)

    @functools.wraps(f)
    def call(x):
        with set_xla_metadata(inlineable="false"):
            return inner(x)

    return call


_barrier = _not_inlined(lax.optimization_barrier)
