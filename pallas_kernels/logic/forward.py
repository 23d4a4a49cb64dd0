"""Layers of two-input gates, features first: a wire is a row of examples, of which programs read long vectors.

Gate g computes `y = c0 + c1 a + c2 b + c3 a b` of its inputs a and b, with four coefficients of its own.

The batch is the slow axis of every grid: all gates are computed for a lane block, a vector of the batch, before the
next block begins. Its part of x, which gates read in random places, then comes from memory once and afterwards from the
L2 cache. What bounds the kernel: docs/kernels/logic.md; what was tried: docs/lab/2026-11-22-logic.md.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.graph import Graph

_LOAD_BYTES = 16
"""Bytes of the widest load of a thread (CUDA C++ Programming Guide, device memory accesses)."""
_PROGRAM_EXAMPLES = 512
"""Examples of all gates in a program: a shorter lane block leaves it more gates, with as many loads under way. From the
numbers of gates measured in docs/lab/2026-11-22-logic.md."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A program's gates, and the length of its lane block, a multiple of `LANES`."""

    gates: int
    length: int


def lane_block_length(x: Array) -> int:
    """The longest vector of a row of x that a warpgroup reads in one load a thread."""
    return LANES * largest_divisor(x.shape[1] // LANES, _LOAD_BYTES // x.dtype.itemsize)


def unsupported_batch(x: Array) -> str | None:
    """What no kernel of gates takes of a batch."""
    return f"a batch of {x.shape[1]}, only multiples of {LANES}" if x.shape[1] % LANES or not x.shape[1] else None


def _supports(coefficients, graph, x):
    return unsupported_batch(x)


def _heuristic(coefficients, graph, x):
    length = lane_block_length(x)
    # At least two gates, so that the loads of both are under way at once.
    return Config(gates=largest_divisor(graph.a.shape[0], max(2, _PROGRAM_EXAMPLES // length)), length=length)


@kernel(supports=_supports, heuristic=_heuristic)
def forward(coefficients: Array, graph: Graph, x: Array, *, config: Config) -> Array:
    """`y[g, n] = c[g, 0] + c[g, 1] * x[a[g], n] + c[g, 2] * x[b[g], n] + c[g, 3] * x[a[g], n] * x[b[g], n]`.

    Programs take the gates along the trail. Where neighbours share an input, a program that has both reads it once.

    Args:
      coefficients: `(gates, 4)`.
      graph: of as many gates.
      x: `(inputs, N)`, the batch N a multiple of `LANES`.

    Returns:
      `(gates, N)` in x's dtype, computed in float32.
    """
    gates, N = graph.trail.shape[1], x.shape[1]

    def body(c_ref, trail_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * config.length, config.length)
        places = [group * config.gates + k for k in range(config.gates)]
        # All loads come before the first store, so that they are under way at once.
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
