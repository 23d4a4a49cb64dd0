"""LayerNorm and RMSNorm of rows that stream through shared memory, so that each kernel reads its rows once.

TMA copies groups of rows to a ring of stages (`row_stream.py`). A persistent CTA loads a stage's rows into registers
(`row_block.py`), and overwrites the stage with the results. `layer_norm.py` has the formulas.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import store, zeros_like
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.norm.row_block import Block, Statistics, block_of
from pallas_kernels.norm.row_stream import Config, Stream

_RINGS_BYTES = 192 * 1024
"""Maximum bytes for all rings on a multiprocessor, from sweeps on an H200: docs/lab/2026-11-21-norm.md."""
_DRIVERS_BYTES = 1024
"""Shared memory that CUDA reserves per CTA (CUDA C++ Programming Guide)."""
_OVERHEAD_BYTES = 3 * 1024
"""Shared memory per CTA besides its ring: 2 KiB for Mosaic's sums across warps, 1 KiB for barriers."""


def _unsupported(x: Any, *, arrays: int) -> str | None:
    hidden = x.shape[-1]
    if block_of(hidden) is None:
        return f"rows of {hidden}, only multiples of 128 up to 1024 and of 256 up to 8192"
    if _fitting_stages(x, arrays) < 2:
        return f"rows of {hidden} {x.dtype}: two stages exceed {device.target().shared_bytes} bytes of shared memory"
    return None


def _heuristic(x: Any, *, arrays: int, stages: int, programs: int) -> Config:
    stages = min(stages, _fitting_stages(x, arrays))
    ring_bytes = stages * _stage_bytes(x, arrays)
    program_bytes = ring_bytes + _OVERHEAD_BYTES + _DRIVERS_BYTES
    fitting_programs = (device.target().shared_bytes + _DRIVERS_BYTES) // program_bytes
    programs = min(programs, _RINGS_BYTES // ring_bytes, fitting_programs)
    return Config(_stage_rows(x, arrays), stages, max(1, programs))


def _stage_rows(x: Any, arrays: int) -> int:
    hidden = x.shape[-1]
    # A copy of one array has about `arrays` times 8 KiB.
    group_rows = arrays * 2**13 // (hidden * x.dtype.itemsize)
    if not block_of(hidden).row_per_warp:
        return max(1, group_rows)
    return 4 if hidden > 512 else max(4, min(32, group_rows // 4 * 4))


def _stage_bytes(x: Any, arrays: int) -> int:
    return arrays * _stage_rows(x, arrays) * x.shape[-1] * x.dtype.itemsize


def _fitting_stages(x: Any, arrays: int) -> int:
    return (device.target().shared_bytes - _OVERHEAD_BYTES) // _stage_bytes(x, arrays)


def _forward_unsupported(x, *parameters, **options):
    return _unsupported(x, arrays=1)


def _backward_unsupported(dy, x, *others, **options):
    return _unsupported(x, arrays=2)


# Stages per ring and CTAs per multiprocessor come from sweeps on an H200: docs/lab/2026-11-21-norm.md,
# 2026-11-25-norm.md.


def _normalise_heuristic(x, scale, bias, *, epsilon, center):
    return _heuristic(x, arrays=1, stages=4, programs=3)


def _gradients_heuristic(dy, x, scale, bias, offset, inv_std, *, epsilon, center, with_y=False):
    return _heuristic(x, arrays=2, stages=3, programs=4)


def _input_gradient_heuristic(t, normalised, inv_std):
    stages, programs = (3, 2) if block_of(t.shape[1]).row_per_warp else (2, 3)
    return _heuristic(normalised, arrays=2, stages=stages, programs=programs)


def _input_gradient_from_x_heuristic(t, x, *, epsilon):
    return _heuristic(x, arrays=2, stages=2, programs=3)


@kernel(unsupported=_forward_unsupported, heuristic=_normalise_heuristic)
def normalise(
    x: Array, scale: Array, bias: Array | None, *, epsilon: float, center: bool, config: Config
) -> tuple[Array, Array | None, Array]:
    """Compute `layer_norm.normalise`, with the same arguments and results."""
    block, (programs, padded_rows) = block_of(x.shape[1]), _division(x.shape[0], config)
    row_statistic = jax.ShapeDtypeStruct((padded_rows,), jnp.float32)
    rows, *parameters = map(block.split_columns, (x, scale, bias) if center else (x, scale))
    y, statistics = launch(
        _Forward(block, config, programs, epsilon, center).body,
        rows,
        parameters,
        out=(rows, Statistics(row_statistic if center else None, row_statistic)),
        skippable=[1],
        grid={"program": programs},
        scratch=_stages(block, config, x),
        name="layer_norm" if center else "rms_norm",
    )
    return y.reshape(x.shape), *(a if a is None else a[: x.shape[0]] for a in statistics)


@kernel(unsupported=_backward_unsupported, heuristic=_gradients_heuristic)
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
    block, (programs, padded_rows) = block_of(x.shape[1]), _division(x.shape[0], config)
    rows, gradients, *parameters = map(
        block.split_columns, (x, dy, scale, bias) if center and with_y else (x, dy, scale)
    )
    statistics = None
    if inv_std is not None:
        padding = 0, padded_rows - x.shape[0]
        statistics = Statistics(jnp.pad(offset, padding) if center else None, jnp.pad(inv_std, padding))
    totals = jax.ShapeDtypeStruct((programs, 2 if center else 1, *block.shape[1:]), jnp.float32)
    dx, sums, y = launch(
        _Backward(block, config, programs, epsilon, center).body,
        rows,
        gradients,
        parameters,
        statistics,
        out=(rows, totals, rows if with_y else None),
        skippable=[1, 2],
        grid={"program": programs},
        scratch=_stages(block, config, x, dy),
        name="layer_norm_backward" if center else "rms_norm_backward",
    )
    dscale, *dbias = jnp.sum(sums.reshape(programs, -1, x.shape[1]), axis=0)
    y = y.reshape(x.shape) if with_y else None
    return dx.reshape(x.shape), dscale, dbias[0] if center else None, y


@kernel(unsupported=_backward_unsupported, heuristic=_input_gradient_heuristic)
def input_gradient(t: Array, normalised: Array, inv_std: Array, *, config: Config) -> Array:
    """Return dx of `layer_norm.gradients`, in x̂'s dtype, from `t = dy * scale` and x̂ (the argument `normalised`)."""
    return _launch_input_gradient(t, normalised, inv_std, None, config)[0]


@kernel(unsupported=_backward_unsupported, heuristic=_input_gradient_from_x_heuristic)
def input_gradient_from_x(t: Array, x: Array, *, epsilon: float, config: Config) -> tuple[Array, Array]:
    """Return dx of `layer_norm.gradients`, and x̂, in x's dtype, from `t = dy * scale` and x."""
    return _launch_input_gradient(t, x, None, epsilon, config)


def _launch_input_gradient(t, x, inv_std, epsilon, config):
    """Return (dx, x̂) of LayerNorm, for `t = dy * scale` and x. If epsilon is None, the argument `x` is x̂, and the
    result is (dx,)."""
    block, (programs, padded_rows) = block_of(x.shape[1]), _division(x.shape[0], config)
    t, rows = block.split_columns(t), block.split_columns(x)
    results = launch(
        _InputGradient(block, config, programs, epsilon).body,
        t,
        rows,
        None if inv_std is None else jnp.pad(inv_std, (0, padded_rows - x.shape[0])),
        out=(rows, None if epsilon is None else rows),
        skippable=[1],
        grid={"program": programs},
        scratch=_stages(block, config, t, x),
        name="layer_norm_backward_input",
    )
    return tuple(a.reshape(x.shape) for a in results if a is not None)


def _division(rows: int, config: Config) -> tuple[int, int]:
    groups = -(-rows // config.rows)
    return min(groups, device.target().multiprocessors * config.programs), groups * config.rows


def _stages(block: Block, config: Config, *arrays: Array) -> list[Any]:
    stages = [plgpu.SMEM((config.stages, config.rows, *block.shape[1:]), a.dtype) for a in arrays]
    return [stages, plgpu.Barrier(num_arrivals=len(arrays), num_barriers=config.stages)]


@dataclasses.dataclass(frozen=True)
class _Forward(Stream):
    epsilon: float
    center: bool

    def body(self, x, parameters, y, statistics, stages, loaded, *, program):
        step = functools.partial(self._step, list(map(self.block.load_parameter, parameters)), statistics)
        self.stream(step, None, [x], [y], stages, loaded, program)

    def _step(self, parameters, statistics_refs, first_row, stages, wait, _):
        block = self.block
        wait()
        for rows in block.groups(self.config.rows):
            blocks = [block.block_rows(stages[0], row) for row in rows]
            hats, statistics = block.normalise(blocks, None, epsilon=self.epsilon, center=self.center)
            for ref, hat in zip(blocks, hats, strict=True):
                ref[...] = _scaled(hat(), *parameters).astype(ref.dtype)
            for row, block_statistics in zip(rows, statistics, strict=True) if statistics_refs is not None else ():
                block.store_statistics(statistics_refs, first_row + row, block_statistics)


@dataclasses.dataclass(frozen=True)
class _Backward(Stream):
    epsilon: float
    center: bool

    def body(self, x, dy, parameters, statistics, dx, sums_ref, y, stages, loaded, *, program):
        parameters = list(map(self.block.load_parameter, parameters))
        sums = 0 if sums_ref is None else sums_ref.shape[1]
        zeros = [self.block.partial_sum(zeros_like(parameters[0])) for _ in range(sums)]
        step = functools.partial(self._step, parameters, statistics, y is not None)
        sums = self.stream(step, zeros, [x, dy], [dx] if y is None else [dx, y], stages, loaded, program)
        for i, total in enumerate(sums):
            store(sums_ref.at[program, i], self.block.sum(total))

    def _step(self, parameters, statistics_refs, with_y, first_row, stages, wait, sums):
        block, groups, known_statistics = self.block, self.block.groups(self.config.rows), None
        if statistics_refs is not None:
            known_statistics = [
                [block.load_statistics(statistics_refs, first_row + row) for row in rows] for rows in groups
            ]
        wait()
        for i, rows in enumerate(groups):
            xs, dys = ([block.block_rows(stage, row) for row in rows] for stage in stages)
            hats, statistics = block.normalise(
                xs, known_statistics and known_statistics[i], epsilon=self.epsilon, center=self.center
            )
            sums = self._finish(xs, dys, hats, statistics, parameters, sums, with_y)
        return sums

    def _finish(self, xs, dys, hats, statistics, parameters, sums, with_y):
        block, (scale, *_) = self.block, parameters
        gradients = [block.values(functools.partial(block.load, ref)) for ref in dys]
        means = block.means([lambda dy=dy: dy() * scale for dy in gradients], hats, center=self.center)
        for x_ref, dy_ref, hat, dy, (_, inv_std), row_means in zip(
            xs, dys, hats, gradients, statistics, means, strict=True
        ):
            hat, dy = hat(), dy()
            x_ref[...] = block.input_gradient(dy * scale, hat, inv_std, *row_means).astype(x_ref.dtype)
            if with_y:
                dy_ref[...] = _scaled(hat, *parameters).astype(x_ref.dtype)
            terms = (dy * hat, dy)[: len(sums)]
            sums = [total + block.partial_sum(a) for total, a in zip(sums, terms, strict=True)]
        return sums


@dataclasses.dataclass(frozen=True)
class _InputGradient(Stream):
    epsilon: float | None

    def body(self, t, x, inv_std, dx, hat, stages, loaded, *, program):
        step, targets = functools.partial(self._step, inv_std, hat is not None), [dx] if hat is None else [dx, hat]
        self.stream(step, None, [t, x], targets, stages, loaded, program)

    def _step(self, inv_std, with_hat, first_row, stages, wait, _):
        block, groups = self.block, self.block.groups(self.config.rows)
        inv_stds = [
            [None if inv_std is None else block.load_row_values(inv_std, first_row + row) for row in rows]
            for rows in groups
        ]
        wait()
        for rows, known in zip(groups, inv_stds, strict=True):
            t_refs, x_refs = ([block.block_rows(stage, row) for row in rows] for stage in stages)
            ts, hats = ([block.values(functools.partial(block.load, ref)) for ref in refs] for refs in (t_refs, x_refs))
            if self.epsilon is not None:
                hats, statistics = block.normalise(x_refs, None, epsilon=self.epsilon, center=True)
                known = [a.inv_std for a in statistics]
            means = block.means(ts, hats, center=True)
            for t_ref, x_ref, t, hat, value, row_means in zip(t_refs, x_refs, ts, hats, known, means, strict=True):
                hat = hat()
                t_ref[...] = block.input_gradient(t(), hat, value, *row_means).astype(t_ref.dtype)
                if with_hat:
                    x_ref[...] = hat.astype(x_ref.dtype)


def _scaled(hat: Array, scale: Array, *bias: Array) -> Array:
    return sum(bias, hat * scale)
