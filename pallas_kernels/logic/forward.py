"""Forward of a layer of two-input gates.

A CTA computes consecutive gates of an Euler trail, which share inputs, for one block of examples: see
docs/kernels/logic.md.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.graph import Graph

_LOAD_BYTES = 16
"""Bytes of a thread's widest load."""
_PROGRAM_EXAMPLES = 512
"""Outputs per CTA, gates times examples: docs/lab/2026-11-22-logic.md."""


class Config(NamedTuple):
    """Tile of a CTA: the outputs of `gates` gates for `length` examples, a multiple of 128."""

    gates: int
    length: int


def lane_block_length(x: Array) -> int:
    """Return the largest number of examples that divides the batch and that a warpgroup loads with one load per
    thread."""
    return LANES * largest_divisor(x.shape[1] // LANES, _LOAD_BYTES // x.dtype.itemsize)


def unsupported_batch(x: Array) -> str | None:
    return f"a batch of {x.shape[1]}, only multiples of {LANES}" if x.shape[1] % LANES or not x.shape[1] else None


def _plan(coefficients, graph, x):
    length = lane_block_length(x)
    config = Config(gates=largest_divisor(graph.gates, max(2, _PROGRAM_EXAMPLES // length)), length=length)
    return unsupported_batch(x) or config


@kernel(plan=_plan)
def forward(coefficients: Array, graph: Graph, x: Array, *, config: Config) -> Array:
    """Compute `y[g, n] = c[g, 0] + c[g, 1] * x[a[g], n] + c[g, 2] * x[b[g], n] + c[g, 3] * x[a[g], n] * x[b[g], n]` for
    gate g and example n, in float32. y has x's dtype.

    Args:
      coefficients: c, `(gates, 4)`.
      graph: has a and b, the inputs of each gate.
      x: `(inputs, N)`, N a multiple of 128.
    """
    gates, N = graph.trail.shape[1], x.shape[1]

    def body(c_ref, trail_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        places = [group * config.gates + k for k in range(config.gates)]
        inputs = [[x_ref[trail_ref[role, k], lanes].astype(jnp.float32) for role in (1, 2)] for k in places]
        for k, (a, b) in zip(places, inputs, strict=True):
            g = trail_ref[0, k]
            c0, c1, c2, c3 = (c_ref[g, i] for i in range(4))
            y_ref[g, lanes] = (c0 + c1 * a + (c2 + c3 * a) * b).astype(y_ref.dtype)

    return launch(
        body,
        coefficients.astype(jnp.float32),
        graph.trail,
        x,
        out=jax.ShapeDtypeStruct((gates, N), x.dtype),
        grid={"block": N // config.length, "group": gates // config.gates},
        name="gate_layer",
    )
