"""Logic cellular automata."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray, AnyKey
from jaxbp.common.numerics import upcast
from jaxbp.logic import gates
from jaxbp.logic.gates import Parametrization
from jaxbp.logic.ops import _automaton_formula, _automaton_kernels
from jaxbp.logic.ops._automaton_ticks import Draws, forward, ticks
from jaxbp.logic.ops.gate_layer import COEFFICIENTS
from jaxbp.logic.wires.automaton_wires import Automaton
from jaxbp.pairing import Implementation, Op, per_implementation
from jaxbp.pairing.gradients import in_dtypes_of
from jaxbp.training.checkpointing import Memory, check_memory, check_steps

Logits = tuple[list[Float[AnyArray, "kernels gates parameters"]], list[Float[AnyArray, "gates parameters"]]]
Gradients = tuple[list[Float[Array, "kernels gates parameters"]], list[Float[Array, "gates parameters"]]]


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
    return ticks(implementation, state)(coefficients, automaton, state, draws, implementation="xla", **options)


def _rollout_backward(dlast, logits, automaton, state, draws, *, parametrization, implementation, **options):
    def of_logits(logits):
        return _coefficients(logits, parametrization=parametrization, implementation=implementation)

    coefficients, to_logits = jax.vjp(of_logits, logits)
    pair = ticks(implementation, state)

    def last_state(coefficients, state):
        return pair(coefficients, automaton, state, draws, implementation="xla", **options)

    dc, dstate = jax.vjp(last_state, coefficients, state)[1](dlast)
    return to_logits(dc)[0], dstate


def _definition(logits, automaton, state, draws, *, parametrization, **options):
    coefficients = _coefficients(logits, parametrization=parametrization, implementation="autodiff")
    return forward(_automaton_formula, coefficients, automaton, state, draws, **options)


def _definition_backward(dlast, logits, automaton, state, draws, **options):
    return jax.vjp(lambda p, s: _definition(p, automaton, s, draws, **options), logits, state)[1](dlast)


def _state(logits, automaton, state, draws):
    return state


def _logits_and_state(dlast, logits, automaton, state, draws):
    return logits, state


def _unsupported(*arrays, **options):
    automaton, state = arrays[-3:-1]
    reason = checks.unsupported_dtype(arrays[-4], state)
    return reason or (_automaton_kernels.unsupported(automaton, state) if state.size else None)


_STEP, _STEP_BACKWARD, _ROLLOUT, _ROLLOUT_BACKWARD = (
    Op(
        name,
        {"autodiff": definition, **per_implementation(function, ("pallas", "xla"))},
        unsupported=_unsupported,
        # JAX cannot infer the sharding, because the op concatenates the cells of all grids.
        sharded_like=like,
        jit=True,
    )
    for name, definition, function, like in (
        ("automaton_step", _definition, _rollout, _state),
        ("automaton_step_backward", _definition_backward, _rollout_backward, _logits_and_state),
        ("automaton_rollout", _definition, _rollout, _state),
        ("automaton_rollout_backward", _definition_backward, _rollout_backward, _logits_and_state),
    )
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
    op = "automaton_step"
    logits, state = _check(op, logits, automaton, state, parametrization)
    draws = _draws(op, key, fire_rate, 0.0, None)
    options = dict(fire_rate=float(fire_rate), memory="states", parametrization=parametrization)
    return _STEP(logits, automaton, state, draws, steps=1, implementation=implementation, **options)


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
    op = "automaton_step_backward"
    layers, before = _check(op, logits, automaton, state, parametrization)
    draws = _draws(op, key, fire_rate, 0.0, None)
    dnext, before = checks.floating(op, dnext=dnext, state=before)
    checks.shape(op, "dnext", dnext, *before.shape)
    options = dict(fire_rate=float(fire_rate), memory="states", parametrization=parametrization)
    arrays = dnext, layers, automaton, before, draws
    gradients = _STEP_BACKWARD(*arrays, steps=1, implementation=implementation, **options)
    return in_dtypes_of((tuple(map(list, logits)), state), gradients)


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
    op = "automaton_rollout"
    logits, state = _check(op, logits, automaton, state, parametrization)
    options = _time_options(op, steps, fire_rate, memory)
    draws = _draws(op, key, fire_rate, rounding_rate, options["steps"])
    options |= dict(parametrization=parametrization, implementation=implementation)
    return _ROLLOUT(logits, automaton, state, draws, **options)


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
    """Gradients of `automaton_rollout`, by backpropagation through time:

        (dlogits_t, dstate_t) = automaton_step_backward(dstate_{t+1}, logits, automaton, s_t)
        dlogits = Σ_t dlogits_t

    Here t runs from `steps - 1` down to 0, also in the sum, and `dstate_steps` is dlast. s_t is as in
    `automaton_rollout`, with the forward's random values.
    """
    op = "automaton_rollout_backward"
    layers, first = _check(op, logits, automaton, state, parametrization)
    options = _time_options(op, steps, fire_rate, memory)
    draws = _draws(op, key, fire_rate, rounding_rate, options["steps"])
    dlast, first = checks.floating(op, dlast=dlast, state=first)
    checks.shape(op, "dlast", dlast, *first.shape)
    options |= dict(parametrization=parametrization, implementation=implementation)
    gradients = _ROLLOUT_BACKWARD(dlast, layers, automaton, first, draws, **options)
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


def _time_options(op: str, steps: Any, fire_rate: Any, memory: Any) -> dict[str, Any]:
    check_memory(op, memory)
    return dict(steps=check_steps(op, "steps", steps), fire_rate=fire_rate, memory=memory)


def _draws(op: str, key: AnyKey | None, fire_rate: Any, rounding_rate: Any, steps: int | None) -> Draws | None:
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
        return Draws(key[None], rounding)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(np.arange(steps, dtype=np.uint32))
    return Draws(keys, rounding)


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
