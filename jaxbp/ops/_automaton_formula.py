"""A tick of a logic cellular automaton, and its backward, in jnp.

States are held with the cells last, `(channels, batch, height, width)`, so that a gate reads rows of cells.
Coefficients are a list of `(4, gates, kernels)` for perception and one of `(4, gates)` for update.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.logic.automaton import CENTRE, Automaton
from jaxbp.ops import _gates
from jaxbp.ops._numerics import widen

UNROLL = 1
"""Ticks in the body of a compiled loop."""
KEEPS_ROWS = True
"""Whether the forward can keep what every gate reads."""


def enter(state: Array) -> Array:
    """`(batch, height, width, channels)` as states are held here."""
    return jnp.moveaxis(state, -1, 0)


def leave(state: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `enter`."""
    return jnp.moveaxis(state, 0, -1)


def enter_gradient(prepared: tuple, dlast: Array) -> Array:
    """The gradient of the last state as gradients are held here."""
    return enter(dlast)


def leave_gradient(prepared: tuple, gradient: Array, dtype: jnp.dtype) -> Array:
    """The inverse, for the gradient of the first state."""
    return jnp.moveaxis(gradient, 0, -1)


def prepare(coefficients: tuple, automaton: Automaton, shape: tuple[int, ...]) -> tuple:
    """What all ticks share."""
    return coefficients, automaton


def zeros(prepared: tuple) -> tuple[list, list]:
    """Of the coefficients' gradients, before the first is added."""
    return tuple([jnp.zeros_like(c) for c in part] for part in prepared[0])


def finish(prepared: tuple, total: tuple) -> tuple[list, list]:
    """The coefficients' gradients, as the coefficients came."""
    return total


def tick(prepared: tuple, state: Array, fires: Array | None) -> Array:
    """The next state. Where a cell does not fire, `fires (batch, height, width)`, it keeps its own."""
    return tick_keeping_rows(prepared, state, fires)[0]


def tick_keeping_rows(prepared: tuple, state: Array, fires: Array | None) -> tuple[Array, tuple]:
    """`tick`, and what each layer read."""
    (perceiving, updating), automaton = prepared
    seen = _neighbourhood(widen(state), automaton.periodic)  # (9, channels, batch, height, width)
    rows, read = seen.reshape(seen.shape[0], 1, state.size), ([], [])
    for c, wires in zip(perceiving, automaton.perception, strict=True):
        read[0].append(rows)
        rows = _gates.forward(c, wires, rows)
    cells = math.prod(state.shape[1:])
    C, K, bits = automaton.channels, automaton.kernels, automaton.bits
    perceived = jnp.moveaxis(rows.reshape(bits, K, C, cells), 2, 0)
    rows = jnp.concatenate([seen[CENTRE].reshape(C, cells), perceived.reshape(C * bits * K, cells)])
    for c, wires in zip(updating, automaton.update, strict=True):
        read[1].append(rows)
        rows = _gates.forward(c, wires, rows)
    new = in_range(rows.reshape(state.shape)).astype(state.dtype)
    return new if fires is None else jnp.where(fires, new, state), read


def tick_backward(prepared: tuple, dnew: Array, total: tuple, state: Array, fires: Array | None) -> tuple[Array, tuple]:
    """(dstate, total + dcoefficients) of `tick`, whose layers are computed again."""
    return tick_backward_of_rows(prepared, dnew, total, tick_keeping_rows(prepared, state, fires)[1], fires)


def tick_backward_of_rows(
    prepared: tuple, dnew: Array, total: tuple, read: tuple, fires: Array | None
) -> tuple[Array, tuple]:
    """`tick_backward`, of what each layer has read."""
    (perceiving, updating), automaton = prepared
    dc, cells = ([], []), math.prod(dnew.shape[1:])
    dy = widen(dnew if fires is None else jnp.where(fires, dnew, 0)).reshape(automaton.channels, cells)
    for c, wires, rows in reversed(list(zip(updating, automaton.update, read[1], strict=True))):
        of_layer, dy = _gates.gradients(dy, c, wires, rows)
        dc[1].insert(0, of_layer)
    dcentre, dy = dy[: automaton.channels], dy[automaton.channels :]
    C, K, bits = automaton.channels, automaton.kernels, automaton.bits
    dy = jnp.moveaxis(dy.reshape(C, bits, K, cells), 0, 2).reshape(bits, K, C * cells)
    for c, wires, rows in reversed(list(zip(perceiving, automaton.perception, read[0], strict=True))):
        of_layer, dy = _gates.gradients(dy, c, wires, rows)
        dc[0].insert(0, of_layer)
    dseen = dy.reshape(dy.shape[0], *dnew.shape)
    dstate = neighbourhood_backward(dseen.at[CENTRE].add(dcentre.reshape(dnew.shape)), automaton.periodic)
    dstate = dstate.astype(dnew.dtype)
    if fires is not None:
        dstate = dstate + jnp.where(fires, 0, dnew)
    return dstate, jax.tree.map(jnp.add, total, dc)


@jax.custom_jvp
def in_range(new: Array) -> Array:
    """A state, in [0, 1], where rounding alone leaves that: exact gates do not, and the derivative is theirs.

    XNOR takes 1 + e twice to 1 + 2e. Layers and ticks of such gates make any number of a rounding error.
    """
    return jnp.clip(new, 0, 1)


in_range.defjvp(lambda new, tangents: (in_range(*new), *tangents))


def _neighbourhood(state, periodic):
    """`(..., height, width) -> (9, ..., height, width)`: the cells around each, in row-major order."""
    height, width = state.shape[-2:]
    edge = [(0, 0)] * (state.ndim - 2) + [(1, 1), (1, 1)]
    padded = jnp.pad(state, edge, mode="wrap" if periodic else "constant")
    return jnp.stack([padded[..., i : i + height, j : j + width] for i in range(3) for j in range(3)])


def neighbourhood_backward(dseen, periodic):
    """`dstate = Σ` of what the cells around a cell have as its gradient."""
    height, width = dseen.shape[-2:]
    edge = [(0, 0)] * (dseen.ndim - 2) + [(1, 1), (1, 1)]
    padded = jnp.pad(dseen, edge, mode="wrap" if periodic else "constant")
    return sum(
        padded[3 * i + j, ..., 2 - i : 2 - i + height, 2 - j : 2 - j + width] for i in range(3) for j in range(3)
    )
