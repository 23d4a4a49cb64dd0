"""Gradients of a layer of two-input gates, in the order of an Euler trail through its inputs (see `Graph`).

A CTA starts all loads for some consecutive inputs of the trail at once. `backward` has the formulas.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, SUMMED_ROWS, largest_divisor, sums_over_lanes
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.backward import (
    GATE_SUMS,
    consumer_slopes,
    dy_row,
    gate_sums,
    lane_blocks,
    load_row,
    unsupported_memory,
)
from pallas_kernels.logic.forward import unsupported_batch
from pallas_kernels.logic.graph import Graph

_CONSUMERS = (2, 4)
_MAX_BLOCKS = 8
"""Maximum lane blocks per CTA. Twice as many were slower: docs/lab/2026-11-22-logic.md."""
_MAX_BYTES = 64
"""Bytes of dy that a thread reads per input. Not tuned."""
_LOAD_BYTES = 4
"""Bytes per load of a thread. Loads of 2 bytes would make half precision slower than float32:
docs/lab/2026-11-22-mixed.md."""
SUM_ROWS = SUMMED_ROWS // 2
"""Rows of shared memory per CTA, for the sums of at most four gates."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile of a CTA: `inputs` inputs of the layer, and `blocks` blocks of `length` (a multiple of 128) examples."""

    inputs: int
    blocks: int
    length: int


def _unsupported(dy, coefficients, graph, x):
    if not graph.regular or graph.max_fan_out not in _CONSUMERS:
        counts = " or ".join(map(str, _CONSUMERS))
        return f"wires with {graph.max_fan_out} consumers per input, only {counts}"
    return unsupported_batch(x) or unsupported_memory(SUM_ROWS * _block_length(x) // LANES)


def _block_length(x):
    return LANES * largest_divisor(x.shape[1] // LANES, max(1, _LOAD_BYTES // x.dtype.itemsize))


def _heuristic(dy, coefficients, graph, x):
    consumers, length = graph.max_fan_out, _block_length(x)
    examples = LANES * min(_MAX_BLOCKS, _MAX_BYTES // (consumers * x.dtype.itemsize))
    blocks = largest_divisor(x.shape[1] // length, examples // length)
    # Eight consumers for short rows, four for long rows: a similar number of loads in flight.
    inputs = largest_divisor(x.shape[0], (8 if blocks * length <= 2 * LANES else 4) // consumers)
    return Config(inputs, blocks, length)


@kernel(unsupported=_unsupported, heuristic=_heuristic)
def gradients_along_trail(
    dy: Array, coefficients: Array, graph: Graph, x: Array, *, config: Config
) -> tuple[Array, Array]:
    """Return (dx, dc)."""
    (inputs, N), gates, consumers_per_input = x.shape, graph.gates, graph.max_fan_out
    gates_per_input = consumers_per_input // 2

    def body(dy_ref, c_ref, consumers_ref, partners_ref, inputs_ref, x_ref, dx_ref, dc_ref, rows_ref, *, block, group):
        lanes = lane_blocks(block, config.blocks, config.length)
        rows = [inputs_ref[group * config.inputs + k] for k in range(config.inputs)]
        per_input = consumers_per_input if dx_ref is not None else gates_per_input
        places = [
            (group * config.inputs + k) * consumers_per_input + n
            for k in range(config.inputs)
            for n in range(per_input)
        ]
        consumers, partner_rows = ([ref[e] for e in places] for ref in (consumers_ref, partners_ref))
        slopes = [consumer_slopes(c_ref, consumer) for consumer in consumers]
        x_blocks = [load_row(x_ref, row, lanes) for row in rows]
        dys = [load_row(dy_ref, dy_row(dy_ref, gates, consumer >> 1), lanes) for consumer in consumers]
        partners = [load_row(x_ref, row, lanes) for row in partner_rows]
        for k, row in enumerate(rows):
            input_consumers = range(k * per_input, (k + 1) * per_input)
            for p, lane_block in enumerate(lanes if dx_ref is not None else ()):
                terms = [dys[n][p] * (slopes[n][0] + slopes[n][1] * partners[n][p]) for n in input_consumers]
                dx_ref[row, lane_block] = functools.reduce(jnp.add, terms).astype(dx_ref.dtype)
            for gate, n in enumerate(
                input_consumers[: gates_per_input if dc_ref is not None else 0], k * gates_per_input
            ):
                for t, vector in enumerate(gate_sums(list(zip(dys[n], x_blocks[k], partners[n], strict=True)))):
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
    return dx, _gather_gates(jnp.sum(sums, axis=0), graph, config)


def _gather_gates(sums, graph, config):
    consumers_per_input, gates_per_input, place = graph.max_fan_out, graph.max_fan_out // 2, graph.trail_places
    sums = sums.reshape(-1, SUM_ROWS // GATE_SUMS, GATE_SUMS)
    gate = place // consumers_per_input * gates_per_input + place % consumers_per_input
    dc = sums[gate // (config.inputs * gates_per_input), gate % (config.inputs * gates_per_input)]
    # The kernel takes each input for the gate's a. If it is the b, exchange the sums of dy a and dy b.
    is_swapped = graph.trail_consumers[place] & 1 == 1
    return jnp.where(is_swapped[:, None], dc[:, jnp.array([0, 2, 1, 3])], dc)
