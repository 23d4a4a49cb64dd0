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

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
from pallas_kernels.logic.readers import sums_of_terms

GATE_SUMS = 4


def _lane_blocks(block: Any, blocks: int, length: int = LANES) -> list[Any]:
    return [pl.ds((block * blocks + k) * length, length) for k in range(blocks)]


def _load_row(ref: Any, row: Any, lanes: Sequence[Any]) -> list[Array]:
    return [ref[row, block].astype(jnp.float32) for block in lanes]


def _dy_row(dy_ref: Any, graph: Graph, gate: Any) -> Any:
    run = graph.gates // dy_ref.shape[0]
    return gate if run == 1 else quotient(gate, run)


def _gate_sums(values: Sequence[tuple[Array, Array, Array]]) -> Iterator[Array]:
    """Yield the sums of dy, dy a, dy b, and dy a b over the triples (dy, a, b) in `values`. Their sums over
    lanes are the gradients of a gate's coefficients."""
    terms = [(dy, dy * a, dy * b, dy * a * b) for dy, a, b in values]
    for blocks in zip(*terms, strict=True):
        yield functools.reduce(jnp.add, blocks)


def _consumer_slopes(c_ref: Any, consumer: Any) -> tuple[Any, Any]:
    """Return (slope, curve) for `consumer`, a gate that reads an input, numbered as in `Graph.consumers`. Its
    derivative with respect to this input is `slope + curve * partner`, where partner is its other input."""
    return c_ref[consumer >> 1, 1 + (consumer & 1)], c_ref[consumer >> 1, 3]


def _unsupported_memory(rows):
    needed_bytes, available_bytes = rows * LANES * 4, device.target().shared_bytes
    if needed_bytes <= available_bytes:
        return None
    return f"{needed_bytes} bytes of shared memory per CTA, only {available_bytes}"


_GATES = SUMMED_ROWS // GATE_SUMS
"""Gates per CTA: their sums fill the rows of `sums_over_lanes`."""
_GATE_BLOCKS = 4
"""Maximum lane blocks, each of `LANES` examples, per CTA. Not tuned."""


class GatesConfig(NamedTuple):
    """Number of blocks of 128 examples that each CTA computes."""

    blocks: int


def _coefficients_plan(dy, graph, x):
    reason = unsupported_batch(x) or _unsupported_memory(GATE_SUMS * _GATES)
    return reason or GatesConfig(largest_divisor(x.shape[1] // LANES, _GATE_BLOCKS))


def _by_gate_plan(dy, coefficients, graph, x):
    if not graph.regular or graph.max_fan_out != 1:
        return f"wires with {graph.max_fan_out} consumers per input, only 1 consumer"
    return _coefficients_plan(dy, graph, x)


@kernel(plan=_by_gate_plan)
def gradients_by_gate(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: GatesConfig
) -> tuple[Array, Array]:
    """Return (dx, dc). dx may overwrite x, because only one CTA reads each element."""
    return _gradients_of_gates(dy, coefficients.astype(jnp.float32), graph, x, config, "gate_layer_backward_by_gate")


@kernel(plan=_coefficients_plan)
def coefficients_gradient(dy: Array, graph: Graph, x: Array, *, config: GatesConfig) -> Array:
    return _gradients_of_gates(dy, None, graph, x, config, "gate_layer_backward_coefficients")[1]


def _gradients_of_gates(dy, coefficients, graph, x, config, name):
    with_dx = coefficients is not None
    blocks, groups, sums = x.shape[1] // (LANES * config.blocks), -(-graph.gates // _GATES), GATE_SUMS * _GATES

    def body(dy_ref, c_ref, a_ref, b_ref, x_ref, dx_ref, dc_ref, rows_ref, *, block, group):
        lanes = _lane_blocks(block, config.blocks)
        numbers = [jnp.minimum(group * _GATES + k, graph.gates - 1) for k in range(_GATES)]
        gates = [(g, a_ref[g], b_ref[g]) for g in numbers]
        slopes = [[c_ref[g, k] for k in (1, 2, 3)] for g, _, _ in gates] if with_dx else []
        operands = [((dy_ref, _dy_row(dy_ref, graph, g)), (x_ref, a), (x_ref, b)) for g, a, b in gates]
        values = [
            [[ref[row, lane_block].astype(jnp.float32) for ref, row in rows] for lane_block in lanes]
            for rows in operands
        ]
        for (_, a, b), slopes_of_gate, gate_values in zip(gates, slopes, values, strict=True) if with_dx else ():
            slope_a, slope_b, slope_ab = slopes_of_gate
            for lane_block, (dy, value_a, value_b) in zip(lanes, gate_values, strict=True):
                dx_ref[a, lane_block] = (dy * (slope_a + slope_ab * value_b)).astype(dx_ref.dtype)
                dx_ref[b, lane_block] = (dy * (slope_b + slope_ab * value_a)).astype(dx_ref.dtype)
        for n, vector in enumerate(itertools.chain.from_iterable(map(_gate_sums, values))):
            rows_ref[n] = vector
        sums_over_lanes(rows_ref, dc_ref.at[block, pl.ds(group * GATE_SUMS * _GATES, sums)])

    dx, dc = launch(
        body,
        dy,
        coefficients,
        graph.a,
        graph.b,
        x,
        out=(x if with_dx else None, jax.ShapeDtypeStruct((blocks, groups * sums), jnp.float32)),
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((sums, LANES), jnp.float32)],
        barriers=False,
        name=name,
        in_place={4: 0} if with_dx else None,
    )
    return dx, jnp.sum(dc, axis=0)[: GATE_SUMS * graph.gates].reshape(graph.gates, GATE_SUMS)


_INPUT_EXAMPLES = 1024
"""Maximum examples per CTA. Half as many were slower: docs/lab/2026-11-22-logic.md."""


class ByInputConfig(NamedTuple):
    """Tile of a CTA: one input of the layer, and `blocks` blocks of `length` (a multiple of 128) examples."""

    blocks: int
    length: int


def _by_input_plan(dy, coefficients, graph, x):
    if reason := unsupported_batch(x):
        return reason
    length = lane_block_length(x)
    return ByInputConfig(largest_divisor(x.shape[1] // length, max(1, _INPUT_EXAMPLES // length)), length)


@kernel(plan=_by_input_plan)
def gradients_by_input(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: ByInputConfig
) -> tuple[Array, Array]:
    """Return (dx, dc)."""
    inputs, N = x.shape

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, x_ref, dx_ref, dc_ref, *, block, row):
        lanes = _lane_blocks(block, config.blocks, config.length)
        x_blocks = _load_row(x_ref, row, lanes)

        def add_consumer(e, dx, role):
            g = consumers_ref[e] >> 1
            dy, partner = _load_row(dy_ref, _dy_row(dy_ref, graph, g), lanes), _load_row(x_ref, partners_ref[e], lanes)
            if role == 0 and dc_ref is not None:
                for k, vector in enumerate(_gate_sums(list(zip(dy, x_blocks, partner, strict=True)))):
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
        out=(x, jax.ShapeDtypeStruct((blocks, graph.gates, GATE_SUMS), jnp.float32)),
        skippable=[0, 1],
        grid={"block": blocks, "row": inputs},
        name="gate_layer_backward",
    )
    return dx, jnp.sum(dc, axis=0)


_INPUTS, _CONSUMERS = 4, 4
"""Maximum inputs per CTA, and consumers per input that it reads at once. Not tuned: docs/lab/2026-11-22-logic.md."""


class InputConfig(NamedTuple):
    """Tile of a CTA: `inputs` inputs of the layer, and one block of `length` examples. For each input, the CTA loads
    at once the data of `consumers` gates that read it."""

    inputs: int
    consumers: int
    length: int


def _input_plan(dy, coefficients, graph, x):
    consumers = graph.max_fan_out if graph.max_fan_out <= _CONSUMERS else 2
    config = InputConfig(largest_divisor(x.shape[0], _INPUTS), consumers, lane_block_length(x))
    return unsupported_batch(x) or config


@kernel(plan=_input_plan)
def input_gradient(dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: InputConfig) -> Array:
    inputs, N = x.shape

    def body(dy_ref, c_ref, consumers_ref, partners_ref, offsets_ref, inputs_ref, x_ref, dx_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        rows = [inputs_ref[group * config.inputs + k] for k in range(config.inputs)]
        ends = [(offsets_ref[2 * row], offsets_ref[2 * row + 2]) for row in rows]

        def terms(places):
            places = [jnp.minimum(e, 2 * graph.gates - 1) for e in places]
            consumers, partner_rows = ([ref[e] for e in places] for ref in (consumers_ref, partners_ref))
            dys = [dy_ref[_dy_row(dy_ref, graph, consumer >> 1), lanes].astype(jnp.float32) for consumer in consumers]
            partners = [x_ref[row, lanes].astype(jnp.float32) for row in partner_rows]
            slopes = [_consumer_slopes(c_ref, consumer) for consumer in consumers]
            for dy, partner, (slope, curve) in zip(dys, partners, slopes, strict=True):
                yield dy * (slope + curve * partner)

        zeros = zeros_like(x_ref[0, lanes].astype(jnp.float32))
        sums = sums_of_terms(terms, ends, zeros, at_once=config.consumers, max_fan_out=graph.max_fan_out)
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


_TRAIL_CONSUMERS = (2, 4)
_MAX_BLOCKS = 8
"""Maximum lane blocks per CTA. Twice as many were slower: docs/lab/2026-11-22-logic.md."""
_MAX_BYTES = 64
"""Bytes of dy that a thread reads per input. Not tuned."""
_LOAD_BYTES = 4
"""Bytes per load of a thread. Loads of 2 bytes would make half precision slower than float32:
docs/lab/2026-11-22-mixed.md."""
SUM_ROWS = SUMMED_ROWS // 2
"""Rows of shared memory per CTA, for the sums of at most four gates."""


class TrailConfig(NamedTuple):
    """Tile of a CTA: `inputs` inputs of the layer, and `blocks` blocks of `length` (a multiple of 128) examples."""

    inputs: int
    blocks: int
    length: int


def _trail_plan(dy, coefficients, graph, x):
    consumers, itemsize = graph.max_fan_out, x.dtype.itemsize
    if not graph.regular or consumers not in _TRAIL_CONSUMERS:
        return f"wires with {consumers} consumers per input, only {' or '.join(map(str, _TRAIL_CONSUMERS))}"
    length = LANES * largest_divisor(x.shape[1] // LANES, max(1, _LOAD_BYTES // itemsize))
    if reason := unsupported_batch(x) or _unsupported_memory(SUM_ROWS * length // LANES):
        return reason
    examples = LANES * min(_MAX_BLOCKS, _MAX_BYTES // (consumers * itemsize))
    blocks = largest_divisor(x.shape[1] // length, examples // length)
    # Eight consumers for short rows, four for long rows: a similar number of loads in flight.
    inputs = largest_divisor(x.shape[0], (8 if blocks * length <= 2 * LANES else 4) // consumers)
    return TrailConfig(inputs, blocks, length)


@kernel(plan=_trail_plan)
def gradients_along_trail(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: TrailConfig
) -> tuple[Array, Array]:
    """Return (dx, dc)."""
    (inputs, N), consumers_per_input = x.shape, graph.max_fan_out
    gates_per_input = consumers_per_input // 2

    def body(dy_ref, c_ref, consumers_ref, partners_ref, inputs_ref, x_ref, dx_ref, dc_ref, rows_ref, *, block, group):
        lanes = _lane_blocks(block, config.blocks, config.length)
        rows = [inputs_ref[group * config.inputs + k] for k in range(config.inputs)]
        per_input = consumers_per_input if dx_ref is not None else gates_per_input
        places = [
            (group * config.inputs + k) * consumers_per_input + n
            for k in range(config.inputs)
            for n in range(per_input)
        ]
        consumers, partner_rows = ([ref[e] for e in places] for ref in (consumers_ref, partners_ref))
        slopes = [_consumer_slopes(c_ref, consumer) for consumer in consumers]
        x_blocks = [_load_row(x_ref, row, lanes) for row in rows]
        dys = [_load_row(dy_ref, _dy_row(dy_ref, graph, consumer >> 1), lanes) for consumer in consumers]
        partners = [_load_row(x_ref, row, lanes) for row in partner_rows]
        for k, row in enumerate(rows):
            input_consumers = range(k * per_input, (k + 1) * per_input)
            for p, lane_block in enumerate(lanes if dx_ref is not None else ()):
                terms = [dys[n][p] * (slopes[n][0] + slopes[n][1] * partners[n][p]) for n in input_consumers]
                dx_ref[row, lane_block] = functools.reduce(jnp.add, terms).astype(dx_ref.dtype)
            for gate, n in enumerate(
                input_consumers[: gates_per_input if dc_ref is not None else 0], k * gates_per_input
            ):
                for t, vector in enumerate(_gate_sums(list(zip(dys[n], x_blocks[k], partners[n], strict=True)))):
                    rows_ref[GATE_SUMS * gate + t] = vector
        if dc_ref is not None:
            sums_over_lanes(rows_ref, dc_ref.at[block, pl.ds(group * SUM_ROWS, SUM_ROWS)])

    blocks, groups = N // (config.length * config.blocks), inputs // config.inputs
    dx, sums = launch(
        body,
        dy,
        coefficients.astype(jnp.float32),
        graph.trail_consumers,
        graph.trail_partners,
        graph.trail_inputs,
        x,
        out=(x, jax.ShapeDtypeStruct((blocks, groups * SUM_ROWS), jnp.float32)),
        skippable=[0, 1],
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((SUM_ROWS, config.length), jnp.float32)],
        barriers=False,
        name="gate_layer_backward_along_trail",
    )
    sums = jnp.sum(sums, axis=0).reshape(-1, SUM_ROWS // GATE_SUMS, GATE_SUMS)
    place, gates_per_cta = graph.trail_places, config.inputs * gates_per_input
    gate = place // consumers_per_input * gates_per_input + place % consumers_per_input
    dc = sums[gate // gates_per_cta, gate % gates_per_cta]
    # The kernel takes each input for the gate's a. If it is the b, exchange the sums of dy a and dy b.
    is_swapped = graph.trail_consumers[place] & 1 == 1
    return dx, jnp.where(is_swapped[:, None], dc[:, jnp.array([0, 2, 1, 3])], dc)
