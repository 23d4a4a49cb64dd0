"""Gradients of a layer of two-input gates.

For example n, gate g computes `y = c0 + c1 a + c2 b + c3 a b` from a = x[a[g], n], b = x[b[g], n], and its coefficients
c[g]. With dy, the gradient with respect to y,

    dx[i, n] = sum over the gates g that read i as their a of dy[g, n] * (c[g, 1] + c[g, 3] * x[b[g], n])
             + sum over the gates g that read i as their b of dy[g, n] * (c[g, 2] + c[g, 3] * x[a[g], n])
    dc[g] = sum over n of dy[g, n] * (1, a, b, a * b)

One CTA computes

- in `gradients_by_gate`, if one gate reads each input: dc of a few gates, and dx of their inputs;
- in `gradients_by_input`: dx of one input, and dc of the gates that read it as their a;
- in `gradients_along_trail`: dx of consecutive inputs of an Euler trail (see `Graph`), and dc of half of the gates that
  read them;
- in `input_gradient` and `coefficients_gradient`, for small batches: dx of a few inputs, or dc of a few gates.

dy is `(gates, N)`, N a multiple of 128, or `(groups, N)` if equally many consecutive gates share a gradient. x is
`(inputs, N)`, and c `(gates, 4)`. dx has x's dtype, and dc is float32.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, SUMMED_ROWS, largest_divisor, quotient, sums_over_lanes, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.forward import lane_block_length, unsupported_batch
from pallas_kernels.logic.graph import Graph

GATE_SUMS = 4


def lane_blocks(block: Any, blocks: int, length: int = LANES) -> list[Any]:
    return [pl.ds((block * blocks + k) * length, length) for k in range(blocks)]


def load_row(ref: Any, row: Any, lanes: Sequence[Any]) -> list[Array]:
    return [ref[row, block].astype(jnp.float32) for block in lanes]


def dy_row(dy_ref: Any, layer_gates: int, gate: Any) -> Any:
    run = layer_gates // dy_ref.shape[0]
    return gate if run == 1 else quotient(gate, run)


def gate_sums(values: Sequence[tuple[Array, Array, Array]]) -> Iterator[Array]:
    """Yield the sums of dy, dy a, dy b, and dy a b over the triples (dy, a, b) in `values`. Their sums over
    lanes are the gradients of a gate's coefficients."""
    terms = [(dy, dy * a, dy * b, dy * a * b) for dy, a, b in values]
    for blocks in zip(*terms, strict=True):
        yield functools.reduce(jnp.add, blocks)


def consumer_slopes(c_ref: Any, consumer: Any) -> tuple[Any, Any]:
    """Return (slope, curve) for `consumer`, a gate that reads an input, numbered as in `Graph.consumers`. Its
    derivative with respect to this input is `slope + curve * partner`, where partner is its other input."""
    return c_ref[consumer >> 1, 1 + (consumer & 1)], c_ref[consumer >> 1, 3]


def unsupported_memory(rows: int) -> str | None:
    needed_bytes, available_bytes = rows * LANES * 4, device.target().shared_bytes
    if needed_bytes <= available_bytes:
        return None
    return f"{needed_bytes} bytes of shared memory per CTA, only {available_bytes}"


_GATES = SUMMED_ROWS // GATE_SUMS
"""Gates per CTA: their sums fill the rows of `sums_over_lanes`."""
_GATE_BLOCKS = 4
"""Maximum lane blocks, each of `LANES` examples, per CTA. Not tuned."""


@dataclasses.dataclass(frozen=True)
class GatesConfig:
    """Number of blocks of 128 examples that each CTA computes."""

    blocks: int


def _gates_config(x):
    return GatesConfig(largest_divisor(x.shape[1] // LANES, _GATE_BLOCKS))


def _by_gate_unsupported(dy, coefficients, graph, x):
    if not graph.regular or graph.max_fan_out != 1:
        return f"wires with {graph.max_fan_out} consumers per input, only 1 consumer"
    return unsupported_batch(x) or unsupported_memory(GATE_SUMS * _GATES)


def _by_gate_heuristic(dy, coefficients, graph, x):
    return _gates_config(x)


@kernel(unsupported=_by_gate_unsupported, heuristic=_by_gate_heuristic)
def gradients_by_gate(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: GatesConfig
) -> tuple[Array, Array]:
    """Return (dx, dc). dx may overwrite x, because only one CTA reads each element."""
    layer_gates = graph.gates

    def body(dy_ref, c_ref, a_ref, b_ref, x_ref, dx_ref, dc_ref, rows_ref, *, block, group):
        lanes = lane_blocks(block, config.blocks)
        gates = [(g, a_ref[g], b_ref[g]) for g in _owned_gates(layer_gates, group)]
        slopes = [[c_ref[g, k] for k in (1, 2, 3)] for g, _, _ in gates]
        values = _values_of_gates(dy_ref, layer_gates, x_ref, gates, lanes)
        for (_, a, b), (slope_a, slope_b, slope_ab), gate_values in zip(gates, slopes, values, strict=True):
            for lane_block, (dy, value_a, value_b) in zip(lanes, gate_values, strict=True):
                dx_ref[a, lane_block] = (dy * (slope_a + slope_ab * value_b)).astype(dx_ref.dtype)
                dx_ref[b, lane_block] = (dy * (slope_b + slope_ab * value_a)).astype(dx_ref.dtype)
        _write_sums_of_gates(values, rows_ref, dc_ref, block, group)

    arrays = dy, coefficients.astype(jnp.float32), graph.a, graph.b, x
    name = "gate_layer_backward_by_gate"
    dx, dc = _launch_by_gates(body, layer_gates, *arrays, out=(x,), blocks=config.blocks, name=name, in_place={4: 0})
    return dx, dc


def _launch_by_gates(body, gates, dy, *arrays, out, blocks, **options):
    N = dy.shape[1]
    blocks, groups, rows = N // (LANES * blocks), -(-gates // _GATES), GATE_SUMS * _GATES
    *results, dc = launch(
        body,
        dy,
        *arrays,
        out=(*out, jax.ShapeDtypeStruct((blocks, groups * rows), jnp.float32)),
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((rows, LANES), jnp.float32)],
        barriers=False,
        **options,
    )
    return *results, jnp.sum(dc, axis=0)[: GATE_SUMS * gates].reshape(gates, GATE_SUMS)


def _owned_gates(layer_gates, group):
    return [jnp.minimum(group * _GATES + k, layer_gates - 1) for k in range(_GATES)]


def _values_of_gates(dy_ref, layer_gates, x_ref, gates, lanes):
    operands = [((dy_ref, dy_row(dy_ref, layer_gates, g)), (x_ref, a), (x_ref, b)) for g, a, b in gates]
    return [[_load_each(rows, lane_block) for lane_block in lanes] for rows in operands]


def _load_each(rows, lane_block):
    return [ref[row, lane_block].astype(jnp.float32) for ref, row in rows]


def _write_sums_of_gates(values, rows_ref, dc_ref, block, group):
    rows = itertools.chain.from_iterable(map(gate_sums, values))
    for n, vector in enumerate(rows):
        rows_ref[n] = vector
    sums_over_lanes(rows_ref, dc_ref.at[block, pl.ds(group * GATE_SUMS * _GATES, GATE_SUMS * _GATES)])


_INPUT_EXAMPLES = 1024
"""Maximum examples per CTA. Half as many were slower: docs/lab/2026-11-22-logic.md."""


@dataclasses.dataclass(frozen=True)
class ByInputConfig:
    """Tile of a CTA: one input of the layer, and `blocks` blocks of `length` (a multiple of 128) examples."""

    blocks: int
    length: int


def _by_input_unsupported(dy, coefficients, graph, x):
    return unsupported_batch(x)


def _by_input_heuristic(dy, coefficients, graph, x):
    length = lane_block_length(x)
    return ByInputConfig(largest_divisor(x.shape[1] // length, max(1, _INPUT_EXAMPLES // length)), length)


@kernel(unsupported=_by_input_unsupported, heuristic=_by_input_heuristic)
def gradients_by_input(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: ByInputConfig
) -> tuple[Array, Array]:
    """Return (dx, dc)."""
    gates, (inputs, N) = graph.gates, x.shape

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, x_ref, dx_ref, dc_ref, *, block, row):
        lanes = lane_blocks(block, config.blocks, config.length)
        x_blocks = load_row(x_ref, row, lanes)

        def add_consumer(e, dx, role):
            g = consumers_ref[e] >> 1
            dy, partner = load_row(dy_ref, dy_row(dy_ref, gates, g), lanes), load_row(x_ref, partners_ref[e], lanes)
            if role == 0 and dc_ref is not None:
                for k, vector in enumerate(gate_sums(list(zip(dy, x_blocks, partner, strict=True)))):
                    dc_ref[block, g, k] = jnp.sum(vector)
            slope, curve = c_ref[g, 1 + role], c_ref[g, 3]
            return tuple(s + d * (slope + curve * p) for s, d, p in zip(dx, dy, partner, strict=True))

        dx = tuple(zeros_like(a) for a in x_blocks)
        for role in (0, 1) if dx_ref is not None else (0,):
            first, end = offsets_ref[2 * row + role], offsets_ref[2 * row + role + 1]
            dx = lax.fori_loop(first, end, functools.partial(add_consumer, role=role), dx)
        for lane_block, total in zip(lanes, dx, strict=True) if dx_ref is not None else ():
            dx_ref[row, lane_block] = total.astype(dx_ref.dtype)

    blocks = N // (config.length * config.blocks)
    dx, dc = launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        graph.consumers,
        graph.partners,
        graph.offsets,
        x,
        out=(x, jax.ShapeDtypeStruct((blocks, gates, GATE_SUMS), jnp.float32)),
        skippable=[0, 1],
        grid={"block": blocks, "row": inputs},
        name="gate_layer_backward",
    )
    return dx, jnp.sum(dc, axis=0)


_SHORT_ROW = 512
"""Largest batch for which separate kernels for dx and dc are faster: docs/lab/2026-11-22-trees.md."""
_SHORT_ROW_IN_L2 = 1024
"""The same limit if x fits in the L2 cache: docs/lab/2026-11-22-logic.md."""
_L2_SHARE = 0.8
"""Largest fraction of the L2 cache for x, to leave room for dy. Not tuned."""
_INPUTS, _CONSUMERS = 4, 4
"""Maximum inputs per CTA, and consumers per input that it reads at once. Not tuned: docs/lab/2026-11-22-logic.md."""


@dataclasses.dataclass(frozen=True)
class InputConfig:
    """Tile of a CTA: `inputs` inputs of the layer, and one block of `length` examples. For each input, the CTA loads
    at once the data of `consumers` gates that read it."""

    inputs: int
    consumers: int
    length: int


def _is_short(x):
    in_l2 = x.size * x.dtype.itemsize <= _L2_SHARE * device.target().l2_bytes
    return x.shape[1] <= (_SHORT_ROW_IN_L2 if in_l2 else _SHORT_ROW)


def _input_unsupported(dy, coefficients, graph, x):
    return unsupported_batch(x)


def _input_heuristic(dy, coefficients, graph, x):
    if not _is_short(x):
        return None
    max_consumers = graph.max_fan_out
    consumers = max_consumers if max_consumers <= _CONSUMERS else 2
    return InputConfig(largest_divisor(x.shape[0], _INPUTS), consumers, lane_block_length(x))


@kernel(unsupported=_input_unsupported, heuristic=_input_heuristic)
def input_gradient(dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: InputConfig) -> Array:
    gates, max_fan_out, (inputs, N) = graph.gates, graph.max_fan_out, x.shape

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, inputs_ref, x_ref, dx_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        rows = [inputs_ref[group * config.inputs + k] for k in range(config.inputs)]
        ends = [(offsets_ref[2 * row], offsets_ref[2 * row + 2]) for row in rows]

        def add_consumers(turn, sums):
            places = [first + turn * config.consumers + k for first, _ in ends for k in range(config.consumers)]
            # The last of these may be consumers of the next input, which are not added.
            read_places = [jnp.minimum(e, 2 * gates - 1) for e in places]
            consumers, partner_rows = ([ref[e] for e in read_places] for ref in (consumers_ref, partners_ref))
            dys = [dy_ref[dy_row(dy_ref, gates, consumer >> 1), lanes].astype(jnp.float32) for consumer in consumers]
            partners = [x_ref[row, lanes].astype(jnp.float32) for row in partner_rows]
            slopes = [consumer_slopes(c_ref, consumer) for consumer in consumers]
            sums = list(sums)
            for n, (e, dy, partner, (slope, curve)) in enumerate(zip(places, dys, partners, slopes, strict=True)):
                k = n // config.consumers
                sums[k] += jnp.where(e < ends[k][1], dy * (slope + curve * partner), jnp.zeros_like(dy))
            return tuple(sums)

        sums = (zeros_like(x_ref[0, lanes].astype(jnp.float32)),) * config.inputs
        if config.consumers == max_fan_out:
            sums = add_consumers(0, sums)
        else:
            max_consumers = functools.reduce(jnp.maximum, (end - first for first, end in ends))
            sums = lax.fori_loop(0, (max_consumers + config.consumers - 1) // config.consumers, add_consumers, sums)
        for row, total in zip(rows, sums, strict=True):
            dx_ref[row, lanes] = total.astype(dx_ref.dtype)

    return launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        graph.consumers,
        graph.partners,
        graph.offsets,
        graph.trail_inputs,
        x,
        out=x,
        grid={"block": N // config.length, "group": inputs // config.inputs},
        barriers=False,
        name="gate_layer_backward_input",
    )


def _coefficients_unsupported(dy, graph, x):
    return unsupported_batch(x) or unsupported_memory(GATE_SUMS * _GATES)


def _coefficients_heuristic(dy, graph, x):
    return _gates_config(x) if _is_short(x) else None


@kernel(unsupported=_coefficients_unsupported, heuristic=_coefficients_heuristic)
def coefficients_gradient(dy: Array, graph: Graph, x: Array, *, config: GatesConfig) -> Array:
    layer_gates = graph.gates

    def body(dy_ref, a_ref, b_ref, x_ref, dc_ref, rows_ref, *, block, group):
        gates = [(g, a_ref[g], b_ref[g]) for g in _owned_gates(layer_gates, group)]
        values = _values_of_gates(dy_ref, layer_gates, x_ref, gates, lane_blocks(block, config.blocks))
        _write_sums_of_gates(values, rows_ref, dc_ref, block, group)

    arrays, name = (dy, graph.a, graph.b, x), "gate_layer_backward_coefficients"
    (dc,) = _launch_by_gates(body, layer_gates, *arrays, out=(), blocks=config.blocks, name=name)
    return dc
