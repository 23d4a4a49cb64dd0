"""Many ticks of a logic cellular automaton, given the coefficients of its gates.

The argument `backend` is a module that computes one tick, by formulas or by kernels.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.logic.ops import _automaton_formula, _automaton_kernels
from jaxbp.pairing import Pair, differentiable
from jaxbp.pairing.mesh import Axes, BatchAxes, mesh_of
from jaxbp.training.checkpointing import Memory, advance, reverse_scan


class Draws(NamedTuple):
    """One random key per tick, and the probability that a value of the state is rounded, or None for no rounding."""

    keys: Array
    rounding_rate: Array | None


def _advance(backend, coefficients, automaton, state, draws, *, steps, fire_rate, memory, keep):
    prepared = backend.prepare(coefficients, automaton, state.shape)
    seen = functools.partial(_seen, backend, draws, state.shape, fire_rate)

    def step(s, t):
        return backend.tick(prepared, *seen(s, t))

    last, kept = advance(step, backend.enter(state), steps, memory, unroll=backend.UNROLL, keep=keep)
    return backend.leave(last, state.shape), kept


def forward(backend: ModuleType, *arrays: Any, memory: Memory, **options: Any) -> Array:
    return _advance(backend, *arrays, memory="states", keep=lambda s: (), **options)[0]


def _save(backend, *arrays, memory, **options):
    if memory == "all" and backend.KEEPS_ROWS:
        last, kept = _keeping_rows(backend, *arrays, **options)
    else:
        memory = "states" if memory == "all" else memory
        last, kept = _advance(backend, *arrays, memory=memory, keep=lambda s: s, **options)
    return last, (*arrays, kept)


def _backward(backend, dlast, coefficients, automaton, state, draws, kept, *, steps, fire_rate, memory):
    if kept is None:
        options = dict(steps=steps, fire_rate=fire_rate, memory=memory)
        kept = _save(backend, coefficients, automaton, state, draws, **options)[1][-1]
    prepared = backend.prepare(coefficients, automaton, state.shape)
    carry = backend.enter_gradient(prepared, dlast), backend.zeros(prepared)
    seen = functools.partial(_seen, backend, draws, state.shape, fire_rate)

    def step(s, t):
        return backend.tick(prepared, *seen(s, t))

    def step_backward(gradients, s, t):
        return backend.tick_backward(prepared, *gradients, *seen(s, t))

    def backward_of_rows(gradients, t_and_rows):
        t, rows = t_and_rows
        fires = _fires(draws, t, state.shape, fire_rate)
        return backend.tick_backward_of_rows(prepared, *gradients, rows, fires), None

    if memory == "all" and backend.KEEPS_ROWS:
        times = np.arange(steps, dtype=np.int32)
        dstate, dc = lax.scan(backward_of_rows, carry, (times, kept), reverse=True)[0]
    else:
        memory = "states" if memory == "all" else memory
        dstate, dc = reverse_scan(step, step_backward, kept, carry, steps, memory, unroll=backend.UNROLL)
    return backend.finish(prepared, dc), None, backend.leave_gradient(prepared, dstate, state.dtype), None


def _keeping_rows(backend, coefficients, automaton, state, draws, *, steps, fire_rate):
    prepared = backend.prepare(coefficients, automaton, state.shape)
    seen = functools.partial(_seen, backend, draws, state.shape, fire_rate)

    def step(s, t):
        return backend.tick_keeping_rows(prepared, *seen(s, t))

    last, rows = lax.scan(step, backend.enter(state), np.arange(steps, dtype=np.int32))
    return backend.leave(last, state.shape), rows


def _seen(backend, draws, shape, fire_rate, state, t):
    return _rounded(backend, draws, t, state, shape), _fires(draws, t, shape, fire_rate)


def _fires(draws, t, shape, fire_rate):
    return None if fire_rate == 1.0 else jax.random.bernoulli(draws.keys[t], fire_rate, shape[:-1])


def _rounded(backend, draws, t, state, shape):
    if draws is None or draws.rounding_rate is None:
        return state
    # The random bits must be the same in every layout and every dtype.
    uniform = jax.random.uniform(jax.random.fold_in(draws.keys[t], 1), shape, jnp.float32)
    change = jnp.where(backend.enter(uniform < draws.rounding_rate), jnp.round(state) - state, 0)
    return state + lax.stop_gradient(change)


def _backward_by_autodiff(dlast, coefficients, automaton, state, draws, kept, **options):
    def last_state(coefficients, state):
        return forward(_automaton_formula, coefficients, automaton, state, draws, **options)

    dc, dstate = jax.vjp(last_state, coefficients, state)[1](dlast)
    return dc, None, dstate, None


def _own_grids(coefficients, automaton, state, draws):
    # Random values are drawn for all grids at once.
    return Axes({2: 0} if draws is None else {})


def _own_grids_and_gradients(dlast, coefficients, automaton, state, draws, kept):
    return Axes({0: 0, 3: 0} if kept is None else {})


_FORWARD = differentiable(
    functools.partial(forward, _automaton_kernels), functools.partial(forward, _automaton_formula), _own_grids
)


def _save_on_own_device(*arrays, **options):
    # On a mesh, the backward recomputes the states. Each device's vector of states ends in unused elements, so the
    # vectors cannot be joined.
    if _own_grids(*arrays).of and mesh_of(arrays) is not None:
        return _FORWARD(*arrays, **options), (*arrays, None)
    return _save(_automaton_kernels, *arrays, **options)


def _pair(backend: ModuleType, forward: Callable, save: Callable, examples: BatchAxes | None = None) -> Pair:
    backward = differentiable(functools.partial(_backward, backend), _backward_by_autodiff, examples)
    return Pair(forward, {"xla": backward}, save=save, name="automaton_ticks")


_TICKS = {
    "pallas": _pair(_automaton_kernels, _FORWARD, _save_on_own_device, _own_grids_and_gradients),
    "xla": _pair(
        _automaton_formula,
        functools.partial(forward, _automaton_formula),
        functools.partial(_save, _automaton_formula),
    ),
}


def ticks(implementation: str, state: Array) -> Pair:
    return _TICKS[implementation if state.size else "xla"]
