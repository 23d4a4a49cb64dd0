"""Mixtures of candidates: the values of learned wires, and their gradients.

The wires of a group have the same K candidates, which are rows of x. For example n, candidate k of group q has the
value `v[q, k, n] = x[candidates[q, k], n]`. Wire w of group q computes

    y[w, n] = sum over k of weights[w, k] * v[q, k, n]

With dy, the gradient with respect to y,

    dweights[w, k] = sum over n of dy[w, n] * v[q, k, n]
    dv[q, k, n] = sum over the wires w of group q of weights[w, k] * dy[w, n]

One CTA computes one group for one block of examples. It reads each candidate once, and keeps it in registers. Each
group has `wires / groups` neighboring wires. weights is `(wires, K)`, candidates `(groups, K)`, x `(inputs, N)`, and dy
`(wires, N)`, N a multiple of 128. y has x's dtype, and dv and dweights are float32.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, SUMMED_ROWS, largest_divisor, sums_over_lanes
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.logic.forward import unsupported_batch

_REGISTERS = 96
"""Maximum registers per thread for the rows of a group: below 128, so that four CTAs fit on a multiprocessor."""
_MAX_BLOCKS = 4
"""Maximum lane blocks, each of `LANES` examples, per CTA. Not tuned."""
_MAX_WEIGHTS = 1024
"""Maximum weights per group. The body is unrolled, and the time to compile it is proportional to their number."""


class Config(NamedTuple):
    """Each CTA computes one group of wires for `blocks` blocks of 128 examples."""

    blocks: int


def unsupported_group(weights: Array, candidates: Array) -> str | None:
    """Return why a group has too many wires or candidates for the kernels, or None."""
    groups, count = candidates.shape
    wires = weights.shape[0] // groups
    if wires * count > _MAX_WEIGHTS:
        return f"{wires * count} weights per group, at most {_MAX_WEIGHTS}"
    if wires + count > _REGISTERS:
        return f"{wires + count} wires and candidates per group, at most {_REGISTERS}"
    return None


def _plan(*arrays: Array) -> Config | str:
    *_, weights, candidates, x = arrays
    if reason := unsupported_group(weights, candidates) or unsupported_batch(x):
        return reason
    rows = weights.shape[0] // candidates.shape[0] + candidates.shape[1]
    return Config(largest_divisor(x.shape[1] // LANES, min(_MAX_BLOCKS, _REGISTERS // rows)))


@kernel(plan=_plan)
def mixtures(weights: Array, candidates: Array, x: Array, *, config: Config) -> Array:
    """Return y."""
    (wires, count), groups, N = weights.shape, candidates.shape[0], x.shape[1]
    of_group, length = wires // groups, config.blocks * LANES

    def body(weights_ref, candidates_ref, x_ref, y_ref, *, block, group):
        lanes = pl.ds(block * length, length)
        values = [x_ref[candidates_ref[group, k], lanes].astype(jnp.float32) for k in range(count)]
        for wire in (group * of_group + s for s in range(of_group)):
            y_ref[wire, lanes] = _sum(weights_ref[wire, k] * v for k, v in enumerate(values)).astype(y_ref.dtype)

    return launch(
        body,
        weights.astype(jnp.float32),
        candidates,
        x,
        out=jax.ShapeDtypeStruct((wires, N), x.dtype),
        grid={"block": N // length, "group": groups},
        name="wire_layer",
    )


@kernel(plan=_plan)
def mixtures_gradients(
    dy: Array, weights: Array, candidates: Array, x: Array, *, config: Config
) -> tuple[Array, Array]:
    """Return (dv, dweights). dv is `(groups * K, N)`."""
    (wires, count), groups, N = weights.shape, candidates.shape[0], x.shape[1]
    of_group, blocks = wires // groups, N // (config.blocks * LANES)
    tile = 16 if of_group * count <= 16 else SUMMED_ROWS
    rows = -(-of_group * count // tile) * tile

    def body(dy_ref, weights_ref, candidates_ref, x_ref, dv_ref, dweights_ref, *tiles, block, group):
        lanes = [pl.ds((block * config.blocks + i) * LANES, LANES) for i in range(config.blocks)]
        wire_rows = [group * of_group + s for s in range(of_group)]
        values = [_load(x_ref, candidates_ref[group, k], lanes) for k in range(count)]
        gradients = [_load(dy_ref, wire, lanes) for wire in wire_rows]
        for k in range(count) if dv_ref is not None else ():
            of_wires = [weights_ref[wire, k] for wire in wire_rows]
            for i, lane_block in enumerate(lanes):
                terms = (weight * dy[i] for weight, dy in zip(of_wires, gradients, strict=True))
                dv_ref[group * count + k, lane_block] = _sum(terms)
        products = itertools.product(gradients, values) if dweights_ref is not None else ()
        for n, (dy, value) in enumerate(products):
            vector = _sum(a * b for a, b in zip(dy, value, strict=True))
            # The tiles alternate, so that one barrier per tile is enough.
            tile_ref = tiles[n // tile % 2]
            tile_ref[n % tile] = vector
            if n % tile == tile - 1 or n == of_group * count - 1:
                sums_over_lanes(tile_ref, dweights_ref.at[block, pl.ds(group * rows + n // tile * tile, tile)])

    dv, dweights = launch(
        body,
        dy,
        weights.astype(jnp.float32),
        candidates,
        x,
        out=(
            jax.ShapeDtypeStruct((groups * count, N), jnp.float32),
            jax.ShapeDtypeStruct((blocks, groups * rows), jnp.float32),
        ),
        skippable=[0, 1],
        grid={"block": blocks, "group": groups},
        scratch=[plgpu.SMEM((tile, LANES), jnp.float32)] * 2,
        barriers=False,
        name="wire_layer_backward",
    )
    dweights = jnp.sum(dweights, axis=0).reshape(groups, rows)[:, : of_group * count]
    return dv, dweights.reshape(wires, count)


def _load(ref: Any, row: Any, lanes: Sequence[Any]) -> list[Array]:
    return [ref[row, block].astype(jnp.float32) for block in lanes]


def _sum(terms: Any) -> Array:
    return functools.reduce(jnp.add, terms)
