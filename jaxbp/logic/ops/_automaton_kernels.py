"""One tick of a logic cellular automaton and its backward, computed by the kernels.

A state is a vector of all channels of all cells, then unused elements. Its gradient is a pair (dseen, dkept), as in
`kernels.tick_backward`. For the last state, dkept is the whole gradient.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbp.logic.ops import _automaton_formula as formula
from jaxbp.logic.ops._rows import take
from jaxbp.logic.wires.automaton_wires import CENTER, Automaton, perceived_rows
from jaxbp.logic.wires.wires import Wires
from jaxbp.pairing import differentiable
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.logic import automaton as kernels
from pallas_kernels.logic.automaton_sizes import Layer, Sizes, padded_lanes

UNROLL = 16
"""XLA launches the kernels of this number of ticks as one CUDA graph, which is faster."""
_GATES, _LANES = 0, 1
"""Rows of `Automaton.orders`: the gates in the kernels' order, and each gate's position in this order."""
KEEPS_ROWS = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """Arrays that are computed once for the kernels of all ticks.

    Attributes:
      lanes: the four coefficients of each gate, in the kernels' order.
      wires, backward_wires: the arguments `wires` of `kernels.tick` and of `kernels.tick_backward`.
      consumers: the tables of `Sizes.consumers`.
    """

    coefficients: tuple
    automaton: Automaton
    lanes: Array
    wires: Array
    backward_wires: Array
    consumers: Array
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.automaton, self.shape)


def sizes_of(automaton: Automaton, shape: tuple[int, ...]) -> Sizes:
    return Sizes(
        *shape,
        periodic=automaton.periodic,
        kernels=automaton.kernels,
        perception=tuple(w.gates for w in automaton.perception),
        update=tuple(w.gates for w in automaton.update),
        output_consumers=tuple(w.max_fan_out for w in [*automaton.perception[1:], *automaton.update]),
        neighbor_consumers=automaton.perception[0].max_fan_out,
        center_consumers=automaton.update[0].max_fan_out,
    )


def unsupported(automaton: Automaton, state: Array) -> str | None:
    return kernels.tick_backward.unsupported(sizes=sizes_of(automaton, state.shape))


# The forward and the backward prepare the same arrays. From JAX 0.12 on, JAX traces this function once for both.
@functools.partial(jax.jit, static_argnums=2, inline=True)
def prepare(coefficients: tuple, automaton: Automaton, shape: tuple[int, ...]) -> Prepared:
    sizes = sizes_of(automaton, shape)
    layers = [c.reshape(4, -1) for c in [*coefficients[0], *coefficients[1]]]
    filled = [
        jnp.pad(c, [(0, 0), (0, layer.coefficients - c.shape[1])])
        for c, layer in zip(layers, sizes.layers, strict=True)
    ]
    wires = [_rows_read(automaton, layers) for layers in (sizes.forward_layers, sizes.layers)]
    gates = jnp.concatenate(filled, axis=1).T.astype(jnp.float32)
    lanes = _reordered(gates, automaton, sizes.coefficient_firsts, _GATES)
    return Prepared(coefficients, automaton, lanes, *wires, _rows_of_consumers(automaton, sizes), shape)


def enter(state: Array) -> Array:
    return jnp.pad(state.ravel(), (0, padded_lanes(state.shape[-1])))


def leave(state: Array, shape: tuple[int, ...]) -> Array:
    return state[: math.prod(shape)].reshape(shape)


def enter_gradient(prepared: Prepared, dlast: Array) -> tuple[Array, Array]:
    sizes, spare = prepared.sizes, prepared.sizes.inputs.lanes
    return jnp.zeros(sizes.cells * sizes.neighborhood + spare, jnp.float32), enter(dlast.astype(jnp.float32))


def leave_gradient(prepared: Prepared, gradient: tuple[Array, Array], dtype: jnp.dtype) -> Array:
    dseen, dkept = gradient
    batch, height, width, channels = prepared.shape
    dseen = dseen[: batch * height * width * 9 * channels].reshape(batch, height, width, 9, channels)
    around = formula.neighborhood_backward(jnp.moveaxis(dseen, (3, 4), (0, 1)), prepared.automaton.periodic)
    return (formula.leave(around, prepared.shape) + leave(dkept, prepared.shape)).astype(dtype)


def zeros(prepared: Prepared) -> Array:
    """Return zeros, `(CTAs, gates, 4)`, in which each CTA sums the coefficients' gradients over its cells."""
    programs = kernels.tick_backward.plan(sizes=prepared.sizes).programs
    return jnp.zeros((programs, prepared.sizes.gates, 4), jnp.float32)


def finish(prepared: Prepared, total: Array) -> tuple[list, list]:
    automaton, sizes = prepared.automaton, prepared.sizes
    total, parts = _reordered(jnp.sum(total, axis=0), automaton, sizes.gate_firsts, _LANES).T, []
    for layer, first in zip(sizes.layers, sizes.gate_firsts, strict=False):
        parts.append(total[:, first : first + layer.count])
    perceiving, updating = prepared.coefficients
    of_perception = [
        jnp.sum(part.reshape(*c.shape, automaton.channels), axis=-1) for part, c in zip(parts, perceiving, strict=False)
    ]
    of_update = parts[len(perceiving) :]
    return tuple(
        [dc.astype(c.dtype) for dc, c in zip(*both, strict=True)]
        for both in ((of_perception, perceiving), (of_update, updating))
    )


def _flat(fires):
    return None if fires is None else fires.ravel().astype(jnp.int32)


def _tick_by_kernel(prepared, state, fires):
    return kernels.tick(prepared.lanes, prepared.wires, state, _flat(fires), sizes=prepared.sizes)


def _tick_by_formula(prepared, state, fires):
    own, shape = formula.prepare(prepared.coefficients, prepared.automaton, prepared.shape), prepared.shape
    return enter(formula.leave(formula.tick(own, formula.enter(leave(state, shape)), fires), shape))


tick = differentiable(functools.partial(on_gpu, _tick_by_kernel, _tick_by_formula), _tick_by_formula)


def tick_backward(
    prepared: Prepared, dnew: tuple[Array, Array], total: Array, state: Array, fires: Array | None
) -> tuple[tuple[Array, Array], Array]:
    arrays = prepared, state, fires, *dnew, total
    dseen, dkept, total = on_gpu(_backward_by_kernel, _backward_by_formula, *arrays)
    return (dseen, dkept), total


def _backward_by_kernel(prepared, state, fires, dseen, dkept, total):
    arrays = prepared.lanes, prepared.backward_wires, prepared.consumers, state, _flat(fires), dseen, dkept, total
    return kernels.tick_backward(*arrays, sizes=prepared.sizes)


def _backward_by_formula(prepared, state, fires, dseen, dkept, total):
    # The formula sums the gradients of perception's coefficients over channels. The first channel's gates get the sums.
    automaton, shape, sizes = prepared.automaton, prepared.shape, prepared.sizes
    own = formula.prepare(prepared.coefficients, automaton, shape)
    dnew = formula.enter(leave_gradient(prepared, (dseen, dkept), jnp.float32))
    dstate, dc = formula.tick_backward(own, dnew, formula.zeros(own), formula.enter(leave(state, shape)), fires)
    first_channel = np.arange(automaton.channels) == 0
    of_lanes = [jnp.where(first_channel, c[..., None], 0).reshape(4, -1) for c in dc[0]]
    dc = [
        jnp.pad(c, [(0, 0), (0, layer.lanes - layer.count)])
        for c, layer in zip([*of_lanes, *dc[1]], sizes.layers, strict=True)
    ]
    of_lanes = _reordered(jnp.concatenate(dc, axis=1).T, automaton, sizes.gate_firsts, _GATES)
    dseen, dkept = enter_gradient(prepared, formula.leave(dstate, shape))
    return dseen, dkept, total.at[0].add(of_lanes.astype(total.dtype))


def _rows_read(automaton: Automaton, layers: tuple[Layer, ...]) -> Array:
    C, K, orders = automaton.channels, automaton.kernels, automaton.orders
    perceived = layers[len(automaton.perception) - 1].first + perceived_rows(C, K, automaton.bits)
    inputs = jnp.asarray(np.concatenate([CENTER * C + np.arange(C), perceived]), jnp.int32)
    parts = []
    for i, (wires, layer) in enumerate(zip([*automaton.perception, *automaton.update], layers, strict=True)):
        reads, j = (wires.a, wires.b), i - len(automaton.perception)
        if i == 0:  # the gate of a (kernel, channel) reads this channel at two of the nine positions
            rows = (jnp.stack(reads)[:, :, None] * C + np.arange(C)[None, None]).repeat(K, axis=1)
        elif j < 0:
            of_kernels = np.arange(K)[:, None] * C + np.arange(C)[None]
            rows = layers[i - 1].first + jnp.stack(reads)[..., None, None] * (K * C) + of_kernels[None, None]
        else:
            rows = jnp.stack([take(inputs, take(read, orders[j][_GATES])) for read in reads])
            inputs = layer.first + orders[j][_LANES]
        parts.append(jnp.pad(rows.reshape(2, -1), [(0, 0), (0, layer.lanes - layer.count)]))
    a, b = jnp.concatenate(parts, axis=1).astype(jnp.int32)
    return _packed(a, b)


def _reordered(rows, automaton, firsts, which):
    # Only the gates of update layers have another order in the kernels.
    firsts = firsts[len(automaton.perception) :]
    places = [np.arange(firsts[0])]
    for order, first, end in zip(automaton.orders, firsts, firsts[1:], strict=False):
        places += [first + order[which], np.arange(first + order.shape[1], end)]
    return rows[jnp.concatenate(places)]


def _packed(low, high):
    return low | high << 16


def _rows_of_consumers(automaton: Automaton, sizes: Sizes) -> Array:
    C, K, rows = automaton.channels, automaton.kernels, sizes.gradients
    perception, orders = automaton.perception, automaton.orders
    nobody = sizes.zeros

    def of_update(j):
        i = len(perception) + j
        gate, role = _consumers(automaton.update[j])
        lane = take(orders[j][_LANES], gate)
        return jnp.where(gate < 0, nobody, rows.firsts[i] + role * sizes.layers[i].lanes + lane)

    def filled(table, lanes):
        missing = [(0, table.shape[0] % 2), (0, lanes - table.shape[1])]
        table = jnp.pad(table.astype(jnp.int32), missing, constant_values=nobody)
        return _packed(table[::2], table[1::2]).ravel()

    parts = []
    for i, layer in enumerate(sizes.layers):
        j = i + 1 - len(perception)
        if j < 0:
            gate, role = _consumers(perception[i + 1])
            first, lanes = rows.firsts[i + 1], sizes.layers[i + 1].lanes
            row = first + role[..., None, None] * lanes + gate[..., None, None] * (K * C)
            row = row + np.arange(K)[None, None, :, None] * C + np.arange(C)[None, None, None]
            table = jnp.where(gate[..., None, None] < 0, nobody, row).reshape(layer.max_consumers, -1)
        elif j == 0:
            perceived = of_update(0)[:, C:].reshape(-1, C, automaton.bits, K)
            table = jnp.moveaxis(perceived, 1, 3).reshape(layer.max_consumers, -1)
        elif i + 1 < len(sizes.layers):
            table = of_update(j)[:, orders[j - 1][_GATES]]
        else:
            table = jnp.zeros((0, layer.lanes), jnp.int32)
        parts.append(filled(table, layer.lanes))
    # `kernel_sums` has the axes (role, gate, channel). The update also reads the center cell.
    gate, role = _consumers(perception[0])
    row = rows.kernel_sums.first + (role * perception[0].gates + gate)[..., None] * C + np.arange(C)[None, None]
    of_sums = jnp.where(gate[..., None] < 0, nobody, row).reshape(-1, sizes.neighborhood)
    around = [(0, 0), (CENTER * C, (8 - CENTER) * C)]
    of_center = jnp.pad(of_update(0)[:, :C], around, constant_values=nobody)
    parts.append(filled(jnp.concatenate([of_sums, of_center]), sizes.inputs.lanes))
    role, gate, channel = np.indices((2, perception[0].gates, C))
    begins = rows.firsts[0] + role * sizes.layers[0].lanes + gate * (K * C) + channel
    parts.append(jnp.pad(jnp.asarray(begins.ravel()), (0, rows.kernel_sums.lanes - begins.size)))
    return jnp.concatenate(parts).astype(jnp.int32)


def _consumers(wires: Wires) -> tuple[Array, Array]:
    """Return the gates that read each input, padded with -1, and whether they read it as their a (0) or b (1). Both are
    `(max_fan_out, inputs)`."""
    first, end = wires.offsets[:-1:2], wires.offsets[2::2]
    turns = first[None] + np.arange(wires.max_fan_out, dtype=np.int32)[:, None]
    consumer = take(wires.consumers, jnp.minimum(turns, wires.consumers.size - 1))
    return jnp.where(turns < end[None], consumer >> 1, -1), consumer & 1
