"""Layers of lookup tables of four inputs, which interpolate their entries.

Gate g reads the rows `a[2 * g]`, `b[2 * g]`, `a[2 * g + 1]`, and `b[2 * g + 1]` of x as its inputs. For example n, its
result y is

    y[g, n] = sum over k of tables[g, k] * p[k, n]

where p[k, n] is the product of the four numbers x_v or 1 - x_v, for input v in row k of the truth table. With dy, the
gradient with respect to y,

    dtables[g, k] = sum over n of dy[g, n] * p[k, n]
    dreads[4 * g + v, n] = dy[g, n] * (y for x_v = 1 - y for x_v = 0)

One CTA computes one gate, or in the forward several neighboring gates, for one block of examples. tables is
`(gates, 16)`, a and b `(2 * gates,)`, x `(inputs, N)`, and dy `(gates, N)`, N a multiple of 128. y has x's dtype, and
dreads and dtables are float32.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, sums_over_lanes
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.forward import lane_block_length, unsupported_batch

ENTRIES = 16
"""Entries of a table."""
_MAX_GATES = 4
"""Maximum gates per CTA in the forward. Not tuned."""
_MAX_BLOCKS = 8
"""Maximum lane blocks, each of `LANES` examples, per CTA in the backward. Not tuned."""


def interpolated(table: Sequence[Any], inputs: Sequence[Array]) -> Array:
    """Return the interpolation of `2 ** len(inputs)` entries. The first input selects between their halves."""
    return _levels(table, inputs)[-1][0]


def interpolation_gradients(
    dy: Array, table: Sequence[Any] | None, inputs: Sequence[Array]
) -> tuple[list[Array] | None, list[Array]]:
    """Return the gradients of `interpolated` with respect to the inputs, or None without a table, and with respect to
    the entries."""
    levels = _levels(table, inputs) if table is not None else [None] * len(inputs)
    dinputs, gradients = [], [dy]
    for x, level in zip(reversed(inputs), reversed(levels[: len(inputs)]), strict=True):
        if level is not None:
            differences = (high - low for low, high in _halves(level))
            dinputs.append(functools.reduce(jnp.add, map(jnp.multiply, gradients, differences)))
        gradients = [d * (1 - x) for d in gradients] + [d * x for d in gradients]
    return dinputs[::-1] or None, gradients


def _levels(table, inputs):
    levels = [table]
    for x in inputs:
        levels.append([low + x * (high - low) for low, high in _halves(levels[-1])])
    return levels


def _halves(level):
    return list(zip(level[: len(level) // 2], level[len(level) // 2 :], strict=True))


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tile of a CTA: the outputs of `gates` gates for `length` examples, a multiple of 128."""

    gates: int
    length: int


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Number of blocks of 128 examples that each CTA computes, for one gate."""

    blocks: int


def _plan(tables, a, b, x):
    return unsupported_batch(x) or ForwardConfig(largest_divisor(tables.shape[0], _MAX_GATES), lane_block_length(x))


def _plan_gradients(dy, tables, a, b, x):
    return unsupported_batch(x) or BackwardConfig(largest_divisor(x.shape[1] // LANES, _MAX_BLOCKS))


def _read(a_ref, b_ref, x_ref, gate, lanes):
    rows = [ref[2 * gate + pair] for pair in (0, 1) for ref in (a_ref, b_ref)]
    return [x_ref[row, lanes].astype(jnp.float32) for row in rows]


@kernel(plan=_plan)
def lookup_tables(tables: Array, a: Array, b: Array, x: Array, *, config: ForwardConfig) -> Array:
    """Return y."""
    (gates, _), N = tables.shape, x.shape[1]

    def body(tables_ref, a_ref, b_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        for gate in (group * config.gates + i for i in range(config.gates)):
            table = [tables_ref[gate, k] for k in range(ENTRIES)]
            y = interpolated(table, _read(a_ref, b_ref, x_ref, gate, lanes))
            y_ref[gate, lanes] = y.astype(y_ref.dtype)

    return launch(
        body,
        tables.astype(jnp.float32),
        a,
        b,
        x,
        out=jax.ShapeDtypeStruct((gates, N), x.dtype),
        grid={"block": N // config.length, "group": gates // config.gates},
        name="lut_layer",
    )


@kernel(plan=_plan_gradients)
def lookup_tables_gradients(
    dy: Array, tables: Array, a: Array, b: Array, x: Array, *, config: BackwardConfig
) -> tuple[Array, Array]:
    """Return (dreads, dtables). dreads is `(4 * gates, N)`."""
    (gates, _), N = tables.shape, x.shape[1]
    blocks = N // (config.blocks * LANES)

    def body(dy_ref, tables_ref, a_ref, b_ref, x_ref, dreads_ref, dtables_ref, tile_ref, *, block, gate):
        table = None if dreads_ref is None else [tables_ref[gate, k] for k in range(ENTRIES)]
        totals = None
        for i in range(config.blocks):
            lanes = pl.ds((block * config.blocks + i) * LANES, LANES)
            inputs = _read(a_ref, b_ref, x_ref, gate, lanes)
            dinputs, products = interpolation_gradients(dy_ref[gate, lanes].astype(jnp.float32), table, inputs)
            for v, dinput in enumerate(dinputs or ()):
                dreads_ref[4 * gate + v, lanes] = dinput
            totals = products if totals is None else list(map(jnp.add, totals, products))
        for k, total in enumerate(totals if dtables_ref is not None else ()):
            tile_ref[k] = total
        if dtables_ref is not None:
            sums_over_lanes(tile_ref, dtables_ref.at[block, pl.ds(gate * ENTRIES, ENTRIES)])

    dreads, dtables = launch(
        body,
        dy,
        tables.astype(jnp.float32),
        a,
        b,
        x,
        out=(
            jax.ShapeDtypeStruct((4 * gates, N), jnp.float32),
            jax.ShapeDtypeStruct((blocks, gates * ENTRIES), jnp.float32),
        ),
        skippable=[0, 1],
        grid={"block": blocks, "gate": gates},
        scratch=[plgpu.SMEM((ENTRIES, LANES), jnp.float32)],
        barriers=False,
        name="lut_layer_backward",
    )
    return dreads, jnp.sum(dtables, axis=0).reshape(gates, ENTRIES)
