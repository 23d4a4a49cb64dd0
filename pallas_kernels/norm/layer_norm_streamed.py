"""LayerNorm and RMSNorm of rows that stream through shared memory, so that each kernel reads its rows once.

TMA copies groups of rows to a ring of stages in shared memory. A persistent CTA loads a stage's rows into registers
(`row_block.py`), and overwrites the stage with the results. With n CTAs, each computes every n-th group. Copies past
the last row read zeros and write nothing. `layer_norm.py` has the formulas.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import quotient, store, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel
from pallas_kernels.norm.row_block import Block, Statistics, block_of

_RINGS_BYTES = 192 * 1024
"""Maximum bytes for all rings on a multiprocessor, from sweeps on an H200: docs/lab/2026-11-21-norm.md."""
_DRIVERS_BYTES = 1024
"""Shared memory that CUDA reserves per CTA (CUDA C++ Programming Guide)."""
_OVERHEAD_BYTES = 3 * 1024
"""Shared memory per CTA besides its ring: 2 KiB for Mosaic's sums across warps, 1 KiB for barriers."""


class Config(NamedTuple):
    """A stage of the ring in shared memory holds `rows` rows. `programs` counts the CTAs per multiprocessor."""

    rows: int
    stages: int
    programs: int


def _plan(x: Any, arrays: int, stages: int, programs: int) -> Config | str:
    """Return the config for a ring of `arrays` arrays like x, with at most `stages` stages and `programs` CTAs per
    multiprocessor. These come from sweeps on an H200: docs/lab/2026-11-21-norm.md, 2026-11-25-norm.md."""
    hidden, block = x.shape[-1], block_of(x.shape[-1])
    if block is None:
        return f"rows of {hidden}, only multiples of 128 up to 1024 and of 256 up to 8192"
    # A copy of one array has about `arrays` times 8 KiB.
    rows = max(1, arrays * 2**13 // (hidden * x.dtype.itemsize))
    if block.row_per_warp:
        rows = 4 if hidden > 512 else max(4, min(32, rows // 4 * 4))
    stage_bytes, shared_bytes = arrays * rows * hidden * x.dtype.itemsize, device.target().shared_bytes
    stages = min(stages, (shared_bytes - _OVERHEAD_BYTES) // stage_bytes)
    if stages < 2:
        return f"rows of {hidden} {x.dtype}: two stages exceed {shared_bytes} bytes of shared memory"
    ring_bytes = stages * stage_bytes
    fitting_programs = (shared_bytes + _DRIVERS_BYTES) // (ring_bytes + _OVERHEAD_BYTES + _DRIVERS_BYTES)
    return Config(rows, stages, max(1, min(programs, _RINGS_BYTES // ring_bytes, fitting_programs)))


def _input_gradient_plan(t, normalized, inv_std):
    block = block_of(t.shape[1])
    stages, programs = (3, 2) if block is not None and block.row_per_warp else (2, 3)
    return _plan(normalized, arrays=2, stages=stages, programs=programs)


def _schedule(config: Config, block: Block, *arrays: Array) -> tuple[int, int, list[Any]]:
    """Return the number of CTAs, the number of rows, and the shared memory for the streamed arrays.

    The number of rows is rounded up to a multiple of `config.rows`, the rows per group. The shared memory is a list of
    one ring of stages per array, and the barriers of the stages.
    """
    groups = -(-arrays[0].shape[0] // config.rows)
    stages = [plgpu.SMEM((config.stages, config.rows, *block.shape[1:]), a.dtype) for a in arrays]
    barrier = plgpu.Barrier(num_arrivals=len(arrays), num_barriers=config.stages)
    return min(groups, device.target().multiprocessors * config.programs), groups * config.rows, [stages, barrier]


def _stream(
    config: Config,
    step: Callable,
    carry: Any,
    sources: Sequence,
    targets: Sequence,
    stages: Sequence,
    loaded: Any,
    program: Any,
    programs: int,
) -> Any:
    """For each group of rows of this CTA, call `carry = step(first_row, buffers, wait, carry)`. Return the last carry.

    Args:
      step: when `wait()` returns, `buffers[i]` has the group's rows of `sources[i]`. `step` overwrites it with the rows
        of `targets[i]`.
      stages: per source, shared memory for `config.stages` groups.
      loaded: see `Ring`.
      program: this CTA's index among `programs`.
    """
    groups = -(-sources[0].shape[0] // config.rows)
    steps = quotient(groups - program + programs - 1, programs)

    def group_rows(i):
        return pl.ds((program + i * programs) * config.rows, config.rows)

    def copy(i, stage, barrier):
        for source, stage_buffer in zip(sources, stages, strict=True):
            plgpu.copy_gmem_to_smem(source.at[group_rows(i)], stage_buffer.at[stage], barrier)

    ring = Ring(config.stages, copy, loaded, steps)
    ring.prefetch(config.stages - 1)

    def turn(i, carry):
        stage = ring.stage(i)
        wait = functools.partial(ring.wait, i)
        carry = step(group_rows(i).start, [stage_buffer.at[stage] for stage_buffer in stages], wait, carry)
        plgpu.commit_smem()
        for target, stage_buffer in zip(targets, stages, strict=False):
            plgpu.copy_smem_to_gmem(stage_buffer.at[stage], target.at[group_rows(i)], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        # The next stage is free when a TMA copy has read the previous group's results from it.
        ring.fetch(i + config.stages - 1, prepare=functools.partial(plgpu.wait_smem_to_gmem, 1, wait_read_only=True))
        return carry

    carry = lax.fori_loop(0, steps, turn, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


@kernel(plan=lambda x, *parameters, **options: _plan(x, arrays=1, stages=4, programs=3))
def normalize(
    x: Array, scale: Array, bias: Array | None, *, epsilon: float, center: bool, config: Config
) -> tuple[Array, Array | None, Array]:
    """Compute `layer_norm.normalize`, with the same arguments and results."""
    block = block_of(x.shape[1])
    programs, padded_rows, scratch = _schedule(config, block, x)

    def body(x_ref, parameter_refs, y_ref, statistics_refs, stages, loaded, *, program):
        parameters = list(map(block.load_parameter, parameter_refs))

        def step(first_row, stages, wait, _):
            wait()
            for rows in block.groups(config.rows):
                blocks = [block.block_rows(stages[0], row) for row in rows]
                hats, statistics = block.normalize(blocks, None, epsilon=epsilon, center=center)
                for ref, hat in zip(blocks, hats, strict=True):
                    ref[...] = _scaled(hat(), *parameters).astype(ref.dtype)
                for row, block_statistics in zip(rows, statistics, strict=True) if statistics_refs is not None else ():
                    block.store_statistics(statistics_refs, first_row + row, block_statistics)

        _stream(config, step, None, [x_ref], [y_ref], stages, loaded, program, programs)

    row_statistic = jax.ShapeDtypeStruct((padded_rows,), jnp.float32)
    rows, *parameters = map(block.split_columns, (x, scale, bias) if center else (x, scale))
    y, statistics = launch(
        body,
        rows,
        parameters,
        out=(rows, Statistics(row_statistic if center else None, row_statistic)),
        skippable=[1],
        grid={"program": programs},
        scratch=scratch,
        name="layer_norm" if center else "rms_norm",
    )
    return y.reshape(x.shape), *(a if a is None else a[: x.shape[0]] for a in statistics)


@kernel(plan=lambda dy, x, *others, **options: _plan(x, arrays=2, stages=3, programs=4))
def gradients(
    dy: Array,
    x: Array,
    scale: Array,
    bias: Array | None,
    offset: Array | None,
    inv_std: Array | None,
    *,
    epsilon: float,
    center: bool,
    with_y: bool = False,
    config: Config,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Compute `layer_norm.gradients`, with the same arguments and results. If inv_std is None, the kernel computes
    offset and inv_std from x."""
    block = block_of(x.shape[1])
    programs, padded_rows, scratch = _schedule(config, block, x, dy)

    def body(x_ref, dy_ref, parameter_refs, statistics_refs, dx_ref, sums_ref, y_ref, stages, loaded, *, program):
        scale, *_ = parameters = list(map(block.load_parameter, parameter_refs))
        zeros = [block.partial_sum(zeros_like(scale)) for _ in range(0 if sums_ref is None else sums_ref.shape[1])]

        def step(first_row, stages, wait, sums):
            groups, known = block.groups(config.rows), None
            if statistics_refs is not None:
                known = [[block.load_statistics(statistics_refs, first_row + row) for row in rows] for rows in groups]
            wait()
            for i, rows in enumerate(groups):
                xs, dys = ([block.block_rows(stage, row) for row in rows] for stage in stages)
                hats, statistics = block.normalize(xs, known and known[i], epsilon=epsilon, center=center)
                gradients = [block.values(functools.partial(block.load, ref)) for ref in dys]
                means = block.means([lambda dy=dy: dy() * scale for dy in gradients], hats, center=center)
                for x_stage, dy_stage, hat, dy, (_, inv_std), row_means in zip(
                    xs, dys, hats, gradients, statistics, means, strict=True
                ):
                    hat, dy = hat(), dy()
                    x_stage[...] = block.input_gradient(dy * scale, hat, inv_std, *row_means).astype(x_stage.dtype)
                    if y_ref is not None:
                        dy_stage[...] = _scaled(hat, *parameters).astype(x_stage.dtype)
                    terms = (dy * hat, dy)[: len(sums)]
                    sums = [total + block.partial_sum(a) for total, a in zip(sums, terms, strict=True)]
            return sums

        targets = [dx_ref] if y_ref is None else [dx_ref, y_ref]
        sums = _stream(config, step, zeros, [x_ref, dy_ref], targets, stages, loaded, program, programs)
        for i, total in enumerate(sums):
            store(sums_ref.at[program, i], block.sum(total))

    rows, gradients, *parameters = map(
        block.split_columns, (x, dy, scale, bias) if center and with_y else (x, dy, scale)
    )
    statistics = None
    if inv_std is not None:
        padding = 0, padded_rows - x.shape[0]
        statistics = Statistics(jnp.pad(offset, padding) if center else None, jnp.pad(inv_std, padding))
    totals = jax.ShapeDtypeStruct((programs, 2 if center else 1, *block.shape[1:]), jnp.float32)
    dx, sums, y = launch(
        body,
        rows,
        gradients,
        parameters,
        statistics,
        out=(rows, totals, rows if with_y else None),
        skippable=[1, 2],
        grid={"program": programs},
        scratch=scratch,
        name="layer_norm_backward" if center else "rms_norm_backward",
    )
    dscale, *dbias = jnp.sum(sums.reshape(programs, -1, x.shape[1]), axis=0)
    y = y.reshape(x.shape) if with_y else None
    return dx.reshape(x.shape), dscale, dbias[0] if center else None, y


@kernel(plan=_input_gradient_plan)
def input_gradient(t: Array, normalized: Array, inv_std: Array, *, config: Config) -> Array:
    """Return dx of `layer_norm.gradients`, in x̂'s dtype, from `t = dy * scale` and x̂ (the argument `normalized`)."""
    return _input_gradient(t, normalized, inv_std, None, config)[0]


@kernel(plan=lambda t, x, **options: _plan(x, arrays=2, stages=2, programs=3))
def input_gradient_from_x(t: Array, x: Array, *, epsilon: float, config: Config) -> tuple[Array, Array]:
    """Return dx of `layer_norm.gradients`, and x̂, in x's dtype, from `t = dy * scale` and x."""
    return _input_gradient(t, x, None, epsilon, config)


def _input_gradient(t, x, inv_std, epsilon, config):
    """Return (dx, x̂) of LayerNorm, for `t = dy * scale` and x. If epsilon is None, the argument `x` is x̂, and the
    result is (dx,)."""
    block = block_of(x.shape[1])
    programs, padded_rows, scratch = _schedule(config, block, t, x)

    def body(t_ref, x_ref, inv_std_ref, dx_ref, hat_ref, stages, loaded, *, program):
        def step(first_row, stages, wait, _):
            groups, known = block.groups(config.rows), None
            if inv_std_ref is not None:
                known = [[block.load_row_values(inv_std_ref, first_row + row) for row in rows] for rows in groups]
            wait()
            for i, rows in enumerate(groups):
                t_stages, x_stages = ([block.block_rows(stage, row) for row in rows] for stage in stages)
                ts, hats = (
                    [block.values(functools.partial(block.load, ref)) for ref in refs] for refs in (t_stages, x_stages)
                )
                if epsilon is None:
                    inv_stds = known[i]
                else:
                    hats, statistics = block.normalize(x_stages, None, epsilon=epsilon, center=True)
                    inv_stds = [a.inv_std for a in statistics]
                means = block.means(ts, hats, center=True)
                for t_stage, x_stage, t, hat, inv_std, row_means in zip(
                    t_stages, x_stages, ts, hats, inv_stds, means, strict=True
                ):
                    hat = hat()
                    t_stage[...] = block.input_gradient(t(), hat, inv_std, *row_means).astype(t_stage.dtype)
                    if hat_ref is not None:
                        x_stage[...] = hat.astype(x_stage.dtype)

        targets = [dx_ref] if hat_ref is None else [dx_ref, hat_ref]
        _stream(config, step, None, [t_ref, x_ref], targets, stages, loaded, program, programs)

    rows = block.split_columns(x)
    results = launch(
        body,
        block.split_columns(t),
        rows,
        None if inv_std is None else jnp.pad(inv_std, (0, padded_rows - x.shape[0])),
        out=(rows, None if epsilon is None else rows),
        skippable=[1],
        grid={"program": programs},
        scratch=scratch,
        name="layer_norm_backward_input",
    )
    return tuple(a.reshape(x.shape) for a in results if a is not None)


def _scaled(hat: Array, scale: Array, *bias: Array) -> Array:
    return sum(bias, hat * scale)
