"""Logic cellular automata.

The argument `backend` is a module that computes one tick, by formulas or by kernels.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, case_of, pair_entries
from jaxbp.common.checks import AnyArray, AnyKey
from jaxbp.common.numerics import upcast
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.ops import _automaton_formula, _automaton_kernels
from jaxbp.logic.ops.gate_layer import COEFFICIENTS
from jaxbp.logic.wires.automaton_wires import Automaton, AutomatonArgument
from jaxbp.pairing import Implementation, Op, Pair, differentiable, per_implementation
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.pairing.mesh import Axes, mesh_of
from jaxbp.training.checkpointing import Memory, advance, check_memory, reverse_scan

Logits = tuple[list[Float[AnyArray, "kernels gates parameters"]], list[Float[AnyArray, "gates parameters"]]]
Gradients = tuple[list[Float[Array, "kernels gates parameters"]], list[Float[Array, "gates parameters"]]]


class _Draws(NamedTuple):
    """One random key per tick, and the probability that a value of the state is rounded, or None for no rounding."""

    keys: Array
    rounding_rate: Array | None


def _fires(draws, t, shape, fire_rate):
    return None if fire_rate == 1.0 else jax.random.bernoulli(draws.keys[t], fire_rate, shape[:-1])


def _arguments_of_tick(backend: ModuleType, draws: _Draws | None, shape: tuple[int, ...], fire_rate: float):
    """Return the function from a state and its time to the state that the tick reads, and to the cells that fire."""

    def rounded(state, t):
        if draws is None or draws.rounding_rate is None:
            return state
        # The random bits must be the same in every layout and every dtype.
        uniform = jax.random.uniform(jax.random.fold_in(draws.keys[t], 1), shape, jnp.float32)
        change = jnp.where(backend.enter(uniform < draws.rounding_rate), jnp.round(state) - state, 0)
        return state + lax.stop_gradient(change)

    return lambda state, t: (rounded(state, t), _fires(draws, t, shape, fire_rate))


def _ticks(backend, coefficients, automaton, state, draws, *, steps, fire_rate, memory, keep=lambda s: s):
    """Return the last state, and what the policy `memory` keeps for the gradient: `keep(s)` for each state s that the
    policy selects. If `memory` is "all" and the backend keeps rows, these are the rows of every tick, and `keep` is not
    used."""
    prepared = backend.prepare(coefficients, automaton, state.shape)
    arguments = _arguments_of_tick(backend, draws, state.shape, fire_rate)
    if memory == "all" and backend.KEEPS_ROWS:
        step = lambda s, t: backend.tick_keeping_rows(prepared, *arguments(s, t))  # noqa: E731
        last, kept = lax.scan(step, backend.enter(state), np.arange(steps, dtype=np.int32))
    else:
        step, memory = lambda s, t: backend.tick(prepared, *arguments(s, t)), _without_rows(memory)
        last, kept = advance(step, backend.enter(state), steps, memory, unroll=backend.UNROLL, keep=keep)
    return backend.leave(last, state.shape), kept


def _without_rows(memory):
    return "states" if memory == "all" else memory


def _last_state(backend, coefficients, automaton, state, draws, *, memory, **options):
    arrays = coefficients, automaton, state, draws
    return _ticks(backend, *arrays, memory="states", keep=lambda s: (), **options)[0]


def _ticks_backward(backend, dlast, coefficients, automaton, state, draws, kept, *, steps, fire_rate, memory):
    if kept is None:
        options = dict(steps=steps, fire_rate=fire_rate, memory=memory)
        _, kept = _ticks(backend, coefficients, automaton, state, draws, **options)
    prepared = backend.prepare(coefficients, automaton, state.shape)
    carry = backend.enter_gradient(prepared, dlast), backend.zeros(prepared)
    arguments = _arguments_of_tick(backend, draws, state.shape, fire_rate)

    def step(s, t):
        return backend.tick(prepared, *arguments(s, t))

    def step_backward(gradients, s, t):
        return backend.tick_backward(prepared, *gradients, *arguments(s, t))

    def backward_of_rows(gradients, t_and_rows):
        t, rows = t_and_rows
        fires = _fires(draws, t, state.shape, fire_rate)
        return backend.tick_backward_of_rows(prepared, *gradients, rows, fires), None

    if memory == "all" and backend.KEEPS_ROWS:
        times = np.arange(steps, dtype=np.int32)
        dstate, dc = lax.scan(backward_of_rows, carry, (times, kept), reverse=True)[0]
    else:
        unroll, memory = backend.UNROLL, _without_rows(memory)
        dstate, dc = reverse_scan(step, step_backward, kept, carry, steps, memory, unroll=unroll)
    return backend.finish(prepared, dc), None, backend.leave_gradient(prepared, dstate, state.dtype), None


def _ticks_backward_by_autodiff(dlast, coefficients, automaton, state, draws, kept, **options):
    def last_state(coefficients, state):
        return _last_state(_automaton_formula, coefficients, automaton, state, draws, **options)

    dc, dstate = jax.vjp(last_state, coefficients, state)[1](dlast)
    return dc, None, dstate, None


def _batch_axes(coefficients, automaton, state, draws):
    # Random values are drawn for all grids at once.
    return Axes({"state": 0} if draws is None else {})


def _backward_batch_axes(dlast, coefficients, automaton, state, draws, kept):
    return Axes({"dlast": 0, "state": 0} if kept is None else {})


def _save(backend, forward, *arrays, **options):
    # On a mesh, each device's backward recomputes its states. The states of the kernels cannot be joined, because the
    # vector of each device ends in unused elements.
    if _batch_axes(*arrays).of and mesh_of(arrays) is not None:
        return forward(*arrays, **options), (*arrays, None)
    last, kept = _ticks(backend, *arrays, **options)
    return last, (*arrays, kept)


def _pair(backend):
    # XLA would gather the cells of all devices in each tick.
    forward = differentiable(functools.partial(_last_state, backend), _BY_FORMULA, _batch_axes)
    backward = functools.partial(_ticks_backward, backend)
    backward = differentiable(backward, _ticks_backward_by_autodiff, _backward_batch_axes)
    return Pair(forward, {"xla": backward}, save=functools.partial(_save, backend, forward), name="automaton_ticks")


_BY_FORMULA = functools.partial(_last_state, _automaton_formula)
_TICKS = {"xla": _pair(_automaton_formula), "pallas": _pair(_automaton_kernels)}


def _coefficients(logits: Logits, *, parametrization: str, implementation: Implementation) -> tuple[list, list]:
    layers = [*logits[0], *logits[1]]
    flat = jnp.concatenate([layer.reshape(-1, layer.shape[-1]) for layer in layers])
    of_gates = COEFFICIENTS[parametrization](upcast(flat), implementation=implementation).T
    ends = np.cumsum([layer.size // layer.shape[-1] for layer in layers])[:-1]
    split = [
        jnp.swapaxes(c.reshape(4, *layer.shape[:-1]), 1, -1) if layer.ndim == 3 else c
        for c, layer in zip(jnp.split(of_gates, ends, axis=1), layers, strict=True)
    ]
    return split[: len(logits[0])], split[len(logits[0]) :]


def _rollout(logits, automaton, state, draws, *, parametrization, implementation, **options):
    coefficients = _coefficients(logits, parametrization=parametrization, implementation=implementation)
    ticks = _TICKS[implementation if state.size else "xla"]
    return ticks(coefficients, automaton, state, draws, implementation="xla", **options)


def _definition(logits, automaton, state, draws, *, parametrization, **options):
    coefficients = _coefficients(logits, parametrization=parametrization, implementation="autodiff")
    return _BY_FORMULA(coefficients, automaton, state, draws, **options)


def _vjp(rollout, dlast, logits, automaton, state, draws, **options):
    return jax.vjp(lambda p, s: rollout(p, automaton, s, draws, **options), logits, state)[1](dlast)


def _unsupported(*arrays, **options):
    automaton, state = arrays[-3:-1]
    reason = checks.unsupported_dtype(arrays[-4], state)
    return reason or (_automaton_kernels.unsupported(automaton, state) if state.size else None)


def _state(logits, automaton, state, draws):
    return state


def _logits_and_state(dlast, logits, automaton, state, draws):
    return logits, state


# JAX cannot infer the sharding, because the op concatenates the cells of all grids.
_op = functools.partial(Op, unsupported=_unsupported, jit=True)
_ROLLOUT = _op(
    "automaton_rollout",
    {"autodiff": _definition, **per_implementation(_rollout)},
    sharded_like=_state,
)
_ROLLOUT_BACKWARD = _op(
    "automaton_rollout_backward",
    {"autodiff": functools.partial(_vjp, _definition), **per_implementation(functools.partial(_vjp, _rollout))},
    sharded_like=_logits_and_state,
)


def automaton_step(
    logits: Logits,
    automaton: Automaton,
    state: Float[AnyArray, "batch height width channels"],
    *,
    key: AnyKey | None = None,
    fire_rate: float = 1.0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> Float[Array, "batch height width channels"]:
    """Return the state of a grid after one tick. All cells run the same circuit of relaxed gates.

        perceived_kc = perception_k(seen_0c, ..., seen_8c), for every kernel k and channel c
        next = update(the cell's channels, then perceived, sorted by channel, bit, and kernel)

    Here seen_pc is channel c of the p-th of nine cells: the cell and its eight neighbors, in row-major order. Beyond
    the border, cells are 0, or in a periodic automaton, the cells on the opposite side. perception_k and update are
    layers of gates, as in `gate_layer`. A bit is an output of perception_k. The next state is clipped to [0, 1], with
    derivative 1.

    Args:
      logits: a pair of lists (perception, update) with one array per layer, possibly in a wider dtype than the state.
      state: values in [0, 1].
      key: required if `fire_rate` is below 1.
      fire_rate: the probability that a cell updates. Otherwise, it keeps its state.
      parametrization: as in `gate_layer`.

    Source: P. Miotti et al., "Differentiable logic cellular automata", 2025.
    """
    options = key, fire_rate, 0.0, "states", parametrization, implementation
    return _call("automaton_step", logits, automaton, state, None, *options)


def automaton_step_backward(
    dnext: Float[AnyArray, "batch height width channels"],
    logits: Logits,
    automaton: Automaton,
    state: Float[AnyArray, "batch height width channels"],
    *,
    key: AnyKey | None = None,
    fire_rate: float = 1.0,
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Gradients, Float[Array, "batch height width channels"]]:
    """Gradients of `automaton_step`, by the formulas of `gate_layer_backward` in each layer of gates.

    dlogits is summed over all cells, and for perception also over all channels. A cell's dstate is summed over the nine
    cells that see it, plus its `dnext` if it did not update.
    """
    options = key, fire_rate, 0.0, "states", parametrization, implementation
    return _call("automaton_step_backward", logits, automaton, state, None, *options, dnext=dnext)


def automaton_rollout(
    logits: Logits,
    automaton: Automaton,
    state: Float[AnyArray, "batch height width channels"],
    steps: int,
    *,
    key: AnyKey | None = None,
    fire_rate: float = 1.0,
    rounding_rate: float | Float[AnyArray, ""] = 0.0,
    memory: Memory = "states",
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> Float[Array, "batch height width channels"]:
    """Return the state after `steps` ticks of `automaton_step`. Tick t has the key `jax.random.fold_in(key, t)`.

        state_{t+1} = automaton_step(s_t),  s_t = state_t + m_t stop_gradient(round(state_t) - state_t)

    For each value of the state, m_t is 1 with probability `rounding_rate`, else 0.

    Args:
      steps: static.
      rounding_rate: as above, with gradient 0.
      memory: what the forward keeps: "all" for the inputs of every gate in every tick, or a policy of
        `jaxbp.checkpointed_scan`. With `implementation="pallas"`, "all" means "states".
      Other arguments, dtype, and source: as in `automaton_step`.
    """
    options = key, fire_rate, rounding_rate, memory, parametrization, implementation
    return _call("automaton_rollout", logits, automaton, state, steps, *options)


def automaton_rollout_backward(
    dlast: Float[AnyArray, "batch height width channels"],
    logits: Logits,
    automaton: Automaton,
    state: Float[AnyArray, "batch height width channels"],
    steps: int,
    *,
    key: AnyKey | None = None,
    fire_rate: float = 1.0,
    rounding_rate: float | Float[AnyArray, ""] = 0.0,
    memory: Memory = "states",
    parametrization: Parametrization = "softmax",
    implementation: Implementation = None,
) -> tuple[Gradients, Float[Array, "batch height width channels"]]:
    """Return (dlogits, dstate), the gradients of `automaton_rollout`, by backpropagation through time:

        (dlogits_t, dstate_t) = automaton_step_backward(dstate_{t+1}, logits, automaton, s_t)
        dlogits = Σ_t dlogits_t,  dstate = dstate_0


    Here t runs from `steps - 1` down to 0, also in the sum, and `dstate_steps` is dlast. s_t is as in
    `automaton_rollout`, with the forward's random values.
    """
    options = key, fire_rate, rounding_rate, memory, parametrization, implementation
    return _call("automaton_rollout_backward", logits, automaton, state, steps, *options, dlast=dlast)


def _call(
    op, logits, automaton, state, steps, key, fire_rate, rounding_rate, memory, parametrization, implementation, **dlast
):
    """Call `op` on checked arguments: a rollout, or if `steps` is None, one tick. `dlast` has the gradient with respect
    to its result, by name, if `op` is a backward."""
    layers, first = _check(op, logits, automaton, state, parametrization)
    check_memory(op, memory)
    steps = None if steps is None else checks.count(op, "steps", steps, 0)
    draws = _draws(op, key, fire_rate, rounding_rate, steps)
    options = dict(steps=1 if steps is None else steps, fire_rate=float(fire_rate), memory=memory)
    options |= dict(parametrization=parametrization, implementation=implementation)
    if not dlast:
        return _ROLLOUT.named(op)(layers, automaton, first, draws, **options)
    ((name, _),) = dlast.items()
    gradient, first = checks.floating(op, **dlast, state=first)
    checks.shape(op, name, gradient, *first.shape)
    gradients = _ROLLOUT_BACKWARD.named(op)(gradient, layers, automaton, first, draws, **options)
    return in_dtypes_of((tuple(map(list, logits)), state), gradients)


def _check(op: str, logits: Any, automaton: Any, state: Any, parametrization: Any) -> tuple[Logits, Array]:
    if not isinstance(automaton, Automaton):
        raise TypeError(f"{op}: automaton is a {type(automaton).__name__}; wants a jaxbp.Automaton")
    (state,) = checks.only_floating(op, state=state)
    checks.shape(op, "state", state, "batch", "height", "width", automaton.channels)
    parts = {"perception": automaton.perception, "update": automaton.update}
    if not isinstance(logits, tuple | list) or [len(p) for p in logits] != [len(w) for w in parts.values()]:
        wanted = " and ".join(f"{len(w)} arrays for {name}" for name, w in parts.items())
        raise ValueError(f"{op}: logits is not a pair of lists with one array per layer; wants {wanted}")
    names = [f"logits[{i}][{j}]" for i, part in enumerate(logits) for j in range(len(part))]
    layers = checks.only_floating(op, **dict(zip(names, [*logits[0], *logits[1]], strict=True)))
    wires = [*automaton.perception, *automaton.update]
    for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
        kernels = (automaton.kernels,) if i < len(automaton.perception) else ()
        gates.check_parameters(op, layer, wires[i].gates, parametrization, name=name, kernels=kernels)
    return (list(layers[: len(logits[0])]), list(layers[len(logits[0]) :])), state


def _draws(op: str, key: AnyKey | None, fire_rate: Any, rounding_rate: Any, steps: int | None) -> _Draws | None:
    rate, rounding = checks.number(op, "fire_rate", fire_rate, 0.0, 1.0), _rounding_rate(op, rounding_rate)
    if rate == 1.0 and rounding is None:
        return None
    if key is None and rate < 1.0:
        raise ValueError(
            f"{op}: key is None and fire_rate is {rate}; wants a key, which determines the cells that update"
        )
    if key is None:
        came = rounding_rate if checks.is_number(rounding_rate) else "an array"
        wanted = "a key, which determines the values that are rounded"
        raise ValueError(f"{op}: key is None and rounding_rate is {came}; wants {wanted}")
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (typed and shape == ()) and not (dtype == jnp.uint32 and len(shape) == 1):
        came = f"is a {type(key).__name__}" if dtype is None else f"has dtype {dtype} and shape {shape}"
        raise TypeError(f"{op}: key {came}; wants one key, say jax.random.key(0)")
    if steps is None:
        return _Draws(key[None], rounding)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(np.arange(steps, dtype=np.uint32))
    return _Draws(keys, rounding)


def _rounding_rate(op: str, rate: Any) -> Array | None:
    if isinstance(rate, Array | np.ndarray):
        if rate.shape != () or not jnp.issubdtype(rate.dtype, jnp.floating):
            wanted = "a number in [0.0, 1.0], or a floating array of shape ()"
            came = f"has dtype {rate.dtype} and shape {rate.shape}"
            raise ValueError(f"{op}: rounding_rate {came}; wants {wanted}")
        if not isinstance(rate, jax.core.Tracer):
            checks.number(op, "rounding_rate", float(rate), 0.0, 1.0)
    elif checks.number(op, "rounding_rate", rate, 0.0, 1.0) == 0.0:
        return None
    return jnp.asarray(rate, jnp.float32)


CHECKERBOARD = AutomatonArgument(8, 16, (8, 4, 2), (*[256] * 10, 128, 64, 32, 16, 8, 8), periodic=False)


def _entries(function, **options):

    def at(automaton, grid, logits):
        state = automaton.state(*grid)
        return case_of(state.shape, logits, automaton, state, **options)

    cell = AutomatonArgument(2, 1, (8, 4, 2), (4, 2))
    # Most gates pass one input through. With random functions, the gradient would vanish.
    passing = CHECKERBOARD.logits(offset=tuple(6.0 * (i == gates.PASS_THROUGH) for i in range(16)))
    published = dataclasses.replace(at(CHECKERBOARD, (BATCH, 16, 16), passing), batch=2)
    small = at(cell, (BATCH, 2, 3), cell.logits())
    return pair_entries(function, small, {"checkerboard": published}, like="automaton_step")


ENTRIES = (*_entries(automaton_step), *_entries(automaton_rollout, steps=2))
