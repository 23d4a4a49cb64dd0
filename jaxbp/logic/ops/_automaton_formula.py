"""One tick of a logic cellular automaton and its backward, as formulas in jnp.

A state is `(channels, batch, height, width)`. The coefficients are two lists with one array per layer:
`(4, gates, kernels)` for perception, and `(4, gates)` for update.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.common.numerics import upcast
from jaxbp.logic.ops._rows import take
from jaxbp.logic.ops.gate_layer import gradients_of_rows, mixed
from jaxbp.logic.wires.automaton_wires import CENTER, Automaton

UNROLL = 1
KEEPS_ROWS = True
"""Whether the forward can keep the inputs of every gate (`memory="all"`)."""


def enter(state: Array) -> Array:
    return jnp.moveaxis(state, -1, 0)


def leave(state: Array, shape: tuple[int, ...]) -> Array:
    return jnp.moveaxis(state, 0, -1)


def enter_gradient(prepared: tuple, dlast: Array) -> Array:
    return enter(dlast)


def leave_gradient(prepared: tuple, gradient: Array, dtype: jnp.dtype) -> Array:
    return jnp.moveaxis(gradient, 0, -1)


def prepare(coefficients: tuple, automaton: Automaton, shape: tuple[int, ...]) -> tuple:
    return coefficients, automaton


def zeros(prepared: tuple) -> tuple[list, list]:
    return tuple([jnp.zeros_like(c) for c in part] for part in prepared[0])


def finish(prepared: tuple, total: tuple) -> tuple[list, list]:
    return total


def tick(prepared: tuple, state: Array, fires: Array | None) -> Array:
    """Return the next state. Where `fires`, `(batch, height, width)`, is False, a cell keeps its state."""
    return tick_keeping_rows(prepared, state, fires)[0]


def tick_keeping_rows(prepared: tuple, state: Array, fires: Array | None) -> tuple[Array, tuple]:
    (perceiving, updating), automaton = prepared
    seen = neighborhoods(upcast(state), automaton.periodic)  # (9, channels, batch, height, width)
    rows, read = seen.reshape(seen.shape[0], 1, state.size), ([], [])
    for c, wires in zip(perceiving, automaton.perception, strict=True):
        read[0].append(rows)
        rows = mixed(c, take(rows, wires.a), take(rows, wires.b))
    cells = math.prod(state.shape[1:])
    C, K, bits = automaton.channels, automaton.kernels, automaton.bits
    perceived = jnp.moveaxis(rows.reshape(bits, K, C, cells), 2, 0)
    rows = jnp.concatenate([seen[CENTER].reshape(C, cells), perceived.reshape(C * bits * K, cells)])
    for c, wires in zip(updating, automaton.update, strict=True):
        read[1].append(rows)
        rows = mixed(c, take(rows, wires.a), take(rows, wires.b))
    new = in_range(rows.reshape(state.shape)).astype(state.dtype)
    return new if fires is None else jnp.where(fires, new, state), read


def tick_backward(prepared: tuple, dnew: Array, total: tuple, state: Array, fires: Array | None) -> tuple[Array, tuple]:
    return tick_backward_of_rows(prepared, dnew, total, tick_keeping_rows(prepared, state, fires)[1], fires)


def tick_backward_of_rows(
    prepared: tuple, dnew: Array, total: tuple, read: tuple, fires: Array | None
) -> tuple[Array, tuple]:
    (perceiving, updating), automaton = prepared
    dc, cells = ([], []), math.prod(dnew.shape[1:])
    dy = upcast(dnew if fires is None else jnp.where(fires, dnew, 0)).reshape(automaton.channels, cells)
    for c, wires, rows in reversed(list(zip(updating, automaton.update, read[1], strict=True))):
        of_layer, dy = gradients_of_rows(dy, c, wires, rows)
        dc[1].insert(0, of_layer)
    dcenter, dy = dy[: automaton.channels], dy[automaton.channels :]
    C, K, bits = automaton.channels, automaton.kernels, automaton.bits
    dy = jnp.moveaxis(dy.reshape(C, bits, K, cells), 0, 2).reshape(bits, K, C * cells)
    for c, wires, rows in reversed(list(zip(perceiving, automaton.perception, read[0], strict=True))):
        of_layer, dy = gradients_of_rows(dy, c, wires, rows)
        dc[0].insert(0, of_layer)
    dseen = dy.reshape(dy.shape[0], *dnew.shape)
    dstate = neighborhood_backward(dseen.at[CENTER].add(dcenter.reshape(dnew.shape)), automaton.periodic)
    dstate = dstate.astype(dnew.dtype)
    if fires is not None:
        dstate = dstate + jnp.where(fires, 0, dnew)
    return dstate, jax.tree.map(jnp.add, total, dc)


@jax.custom_jvp
def in_range(new: Array) -> Array:
    """Clip a state to [0, 1], with derivative 1, so that rounding errors do not grow."""
    return jnp.clip(new, 0, 1)


in_range.defjvp(lambda new, tangents: (in_range(*new), *tangents))


def neighborhoods(state, periodic):
    height, width = state.shape[-2:]
    edge = [(0, 0)] * (state.ndim - 2) + [(1, 1), (1, 1)]
    padded = jnp.pad(state, edge, mode="wrap" if periodic else "constant")
    return jnp.stack([padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)])


def neighborhood_backward(dseen, periodic):
    height, width = dseen.shape[-2:]
    edge = [(0, 0)] * (dseen.ndim - 2) + [(1, 1), (1, 1)]
    padded = jnp.pad(dseen, edge, mode="wrap" if periodic else "constant")
    return sum(
        padded[3 * i + j, ..., 2 - i : 2 - i + height, 2 - j : 2 - j + width] for i in range(3) for j in range(3)
    )
