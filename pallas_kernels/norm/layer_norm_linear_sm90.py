"""LayerNorm followed by a dense layer in one pass over the rows, in half precision on Hopper's tensor cores.

    z = y wᵀ + b,    y = x̂ * scale + bias,    x̂ = (x - mean) * inv_std

w stays in shared memory, so x and z must be narrow. In the forward, a CTA's two warpgroups compute different blocks
of 64 rows. In the input gradient, each computes half of the columns of dx in the same block.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, multiply_registers, operand, quotient, store, value_a_column, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel
from pallas_kernels.norm.row_slices_sm90 import (
    COLUMNS,
    ROWS,
    broadcast_columns,
    broadcast_rows,
    column_slices,
    columns_of,
    first_values_of,
    load_columns,
    normalise_rows,
    sum_slices,
)

_MIN_ROWS = 65536
"""Fewest rows for which these kernels are faster. With fewer rows, y stays in the L2 cache between separate kernels
(docs/lab/2026-11-21-norm.md)."""
_WARPGROUPS = 2
"""With three warpgroups per CTA, threads spill registers (docs/lab/2026-11-21-norm.md)."""
_ALIGNMENT = 1024
"""Bytes to which Mosaic GPU aligns arrays in shared memory (docs/lab/2026-11-21-norm.md)."""


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """A TMA copy stores `columns` columns of the output z."""

    columns: int


@dataclasses.dataclass(frozen=True)
class InputGradientConfig:
    """Number of buffers in shared memory, each for 64 rows of dz, the gradient with respect to the output."""

    stages: int


def _unsupported(x: Any, w: Any, shared_bytes: Callable[..., int]) -> str | None:
    rows, (outputs, hidden) = x.shape[0], w.shape
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtypes {x.dtype} and {w.dtype}, only one half precision"
    if rows % ROWS:
        return f"{rows} rows, only multiples of {ROWS}"
    if hidden not in (128, 256) or outputs not in (128, 256):
        return f"widths {hidden} and {outputs}, only 128 and 256"
    needed_bytes, available_bytes = shared_bytes(hidden, outputs), device.target().shared_bytes
    return f"{needed_bytes} bytes of shared memory, only {available_bytes}" if needed_bytes > available_bytes else None


def _aligned_bytes(*sizes: int) -> int:
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _forward_bytes(hidden: int, outputs: int, columns: int = 2 * COLUMNS) -> int:
    blocks, z_buffers = (2 * _WARPGROUPS * ROWS * width for width in (hidden, columns))
    return _aligned_bytes(blocks, z_buffers, 2 * outputs * hidden, 2 * (2 * hidden + outputs)) + 8 * (_WARPGROUPS + 1)


def _forward_unsupported(x, scale, bias, w, b, *, epsilon):
    return _unsupported(x, w, _forward_bytes)


def _forward_heuristic(x, scale, bias, w, b, *, epsilon):
    return ForwardConfig(columns=2 * COLUMNS) if x.shape[0] >= _MIN_ROWS else None


def _input_gradient_bytes(hidden: int, outputs: int, stages: int = 2) -> int:
    dz, x, hat = 2 * stages * ROWS * outputs, 2 * ROWS * hidden, 0 if hidden == outputs else 2 * ROWS * hidden
    return _aligned_bytes(dz, x, hat, 2 * outputs * hidden, 4 * stages * 2 * _WARPGROUPS * ROWS) + 8 * (stages + 4)


def _input_gradient_unsupported(dz, x, scale, w, offset, inv_std):
    return _unsupported(x, w, _input_gradient_bytes)


def _input_gradient_heuristic(dz, x, scale, w, offset, inv_std):
    return InputGradientConfig(stages=2) if x.shape[0] >= _MIN_ROWS else None


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(
    x: Array, scale: Array, bias: Array, w: Array, b: Array, *, epsilon: float, config: ForwardConfig
) -> tuple[Array, Array, Array]:
    """Return the dense layer's output z `(rows, outputs)` in x's dtype, and float32 offset and inv_std `(rows,)` of
    LayerNorm: see `layer_norm.py`.

    Args:
      x: `(rows, hidden)`, rows a multiple of 64. All arguments have x's dtype.
      scale, bias: `(hidden,)`.
      w, b: `(outputs, hidden)` and `(outputs,)`. `hidden` and `outputs` are 128 or 256.
    """
    (rows, hidden), outputs = x.shape, w.shape[0]
    programs = min(-(-rows // (ROWS * _WARPGROUPS)), device.target().multiprocessors)
    row_statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return launch(
        _Forward(rows, hidden, outputs, programs, epsilon, config).body,
        x,
        w,
        scale,
        bias,
        b,
        out=(jax.ShapeDtypeStruct((rows, outputs), x.dtype), row_statistic, row_statistic),
        grid={"program": programs},
        warpgroups=_WARPGROUPS,
        scratch=[
            operand((_WARPGROUPS, ROWS, hidden), x.dtype),
            operand((_WARPGROUPS, ROWS, config.columns), x.dtype),
            operand((outputs, hidden), x.dtype),
            # scale, bias, and b in one array, because each array is aligned to `_ALIGNMENT` bytes
            plgpu.SMEM((2 * hidden + outputs,), x.dtype),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_arrivals=4),
        ],
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear",
    )


class _ForwardRefs(NamedTuple):
    x: Any
    w: Any
    scale: Any
    bias: Any
    b: Any
    z: Any
    offset: Any
    inv_std: Any
    x_stages: Any
    z_buffers: Any
    weights: Any
    vectors: Any
    x_loaded: Any
    parameters_loaded: Any


@dataclasses.dataclass(frozen=True)
class _Forward:
    rows: int
    hidden: int
    outputs: int
    programs: int
    epsilon: float
    config: ForwardConfig

    def body(self, *refs: Any, program: Any, warpgroup: Any) -> None:
        refs = _ForwardRefs(*refs)
        first, stride = program * _WARPGROUPS + warpgroup, self.programs * _WARPGROUPS
        steps = quotient(self.rows // ROWS - first + stride - 1, stride)

        def step_rows(step):
            return pl.ds((first + step * stride) * ROWS, ROWS)

        def copy(step, stage, barrier):
            plgpu.copy_gmem_to_smem(refs.x.at[step_rows(step)], refs.x_stages.at[stage], barrier)

        ring = Ring(1, copy, refs.x_loaded, steps, fixed_stage=warpgroup)
        pl.when(warpgroup == 0)(lambda: self._load_parameters(refs))
        ring.fetch(0)
        plgpu.barrier_wait(refs.parameters_loaded)

        def block(step, _):
            ring.wait(step)
            x = load(refs.x_stages.at[warpgroup], plgpu.Layout.WGMMA)
            # Every warp has then read the stage, and the next copy may fill it.
            plgpu.commit_smem()
            ring.fetch(step + 1)
            self._block(refs, x, step_rows(step), refs.z_buffers.at[warpgroup])

        lax.fori_loop(0, steps, block, None)
        plgpu.wait_smem_to_gmem(0)

    @property
    def _slices(self):
        return pl.ds(0, self.hidden), pl.ds(self.hidden, self.hidden), pl.ds(2 * self.hidden, self.outputs)

    def _load_parameters(self, refs):
        plgpu.copy_gmem_to_smem(refs.w, refs.weights, refs.parameters_loaded)
        for ref, columns in zip((refs.scale, refs.bias, refs.b), self._slices, strict=True):
            plgpu.copy_gmem_to_smem(ref, refs.vectors.at[columns], refs.parameters_loaded)

    def _block(self, refs, x, rows, z_buffer):
        scales, biases, bs = (refs.vectors.at[columns] for columns in self._slices)
        hat, offset, inv_std = normalise_rows(x, first_values_of(x), self.epsilon)
        store(refs.offset.at[rows], offset)
        store(refs.inv_std.at[rows], inv_std)

        def y(columns):
            scale, bias = (load_columns(ref, columns) for ref in (scales, biases))
            return (hat(columns) * scale + bias).astype(x.dtype)

        ys = [(y(columns), columns) for columns in column_slices(self.hidden)]

        def multiply(sums):
            scratch = z_buffer.at[:, pl.ds(0, COLUMNS)]
            for y, columns in ys:
                multiply_registers(sums, y, refs.weights.at[:, columns].transpose((1, 0)), scratch)
            return sums[...]

        z = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.outputs)))
        for start in range(0, self.outputs, self.config.columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for buffer_columns in column_slices(self.config.columns):
                columns = pl.ds(start + buffer_columns.start, buffer_columns.size)
                z_buffer[:, buffer_columns] = (columns_of(z, columns) + load_columns(bs, columns)).astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(z_buffer, refs.z.at[rows, pl.ds(start, self.config.columns)])


@kernel(unsupported=_input_gradient_unsupported, heuristic=_input_gradient_heuristic, capability=(9, 0))
def input_gradient(
    dz: Array, x: Array, scale: Array, w: Array, offset: Array, inv_std: Array, *, config: InputGradientConfig
) -> tuple[Array, Array]:
    """Return dx and LayerNorm's x̂ in x's dtype. dz `(rows, outputs)` is the gradient with respect to the dense layer's
    output. Other arguments are arguments and results of `forward`."""
    (rows, hidden), outputs = x.shape, w.shape[0]
    programs = min(rows // ROWS, device.target().multiprocessors)
    half = operand((_WARPGROUPS, ROWS, hidden // 2), x.dtype)
    return launch(
        _InputGradient(rows, hidden, outputs, programs, config).body,
        dz,
        x,
        w,
        scale,
        offset,
        inv_std,
        out=(x, x),
        skippable=[1],
        grid={"program": programs},
        warpgroups=_WARPGROUPS,
        scratch=[
            operand((config.stages, _WARPGROUPS, ROWS, outputs // 2), x.dtype),
            half,
            # If x̂ is as wide as dz, x̂ overwrites dz in the stage.
            None if hidden == outputs else half,
            operand((outputs, hidden), x.dtype),
            plgpu.SMEM((config.stages, 2, _WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.stages),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
        # A thread reads data of other warps only after the barrier `sums_stored` or `commit_smem`.
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear_backward_input",
    )


class _InputGradientRefs(NamedTuple):
    """Arguments, results, and shared memory of `input_gradient`. Each warpgroup sums `t = (dz @ w) * scale` and t * x̂
    over half of each row, and writes the sums to `sums`. `hat` is the result x̂, or None if it is unused."""

    dz: Any
    x: Any
    w: Any
    scale: Any
    offset: Any
    inv_std: Any
    dx: Any
    hat: Any
    dz_stages: Any
    x_stages: Any
    hat_buffers: Any
    weights: Any
    sums: Any
    dz_loaded: Any
    x_loaded: Any
    weights_loaded: Any
    sums_stored: Any


@dataclasses.dataclass(frozen=True)
class _InputGradient:
    rows: int
    hidden: int
    outputs: int
    programs: int
    config: InputGradientConfig

    def body(self, *refs: Any, program: Any, warpgroup: Any) -> None:
        refs = _InputGradientRefs(*refs)
        columns, dz_columns = (pl.ds(warpgroup * half, half) for half in (self.hidden // 2, self.outputs // 2))
        steps = quotient(self.rows // ROWS - program + self.programs - 1, self.programs)

        def step_rows(step):
            return pl.ds((program + step * self.programs) * ROWS, ROWS)

        def copy_x(step, stage, barrier):
            plgpu.copy_gmem_to_smem(refs.x.at[step_rows(step), columns], refs.x_stages.at[stage], barrier)

        def copy_dz(step, stage, barrier):
            source = refs.dz.at[step_rows(step), dz_columns]
            plgpu.copy_gmem_to_smem(source, refs.dz_stages.at[stage, warpgroup], barrier)

        x_ring = Ring(1, copy_x, refs.x_loaded, fixed_stage=warpgroup)
        dz_ring = Ring(self.config.stages, copy_dz, refs.dz_loaded, steps)
        pl.when(warpgroup == 0)(lambda: plgpu.copy_gmem_to_smem(refs.w, refs.weights, refs.weights_loaded))
        x_ring.fetch(0)
        dz_ring.prefetch(self.config.stages)
        scales = load(refs.scale.at[columns], value_a_column(), optimized=False)
        plgpu.barrier_wait(refs.weights_loaded)

        def block(step, _):
            self._block(refs, step, step_rows(step), columns, scales, warpgroup, x_ring, dz_ring)

            @pl.when(step + 1 < steps)
            def _():
                # The copy of dx started before the copy of x̂.
                plgpu.wait_smem_to_gmem(0 if refs.hat is None else 1, wait_read_only=True)
                x_ring.fetch(step + 1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dz_ring.fetch(step + self.config.stages)

        lax.fori_loop(0, steps, block, None)
        plgpu.wait_smem_to_gmem(0)

    def _block(self, refs, step, rows, columns, scales, warpgroup, x_ring, dz_ring):
        stage, x_stage = dz_ring.stage(step), refs.x_stages.at[warpgroup]
        first = load(refs.x.at[rows, 0], value_a_row(), optimized=False).astype(jnp.float32)
        offset, inv_std = (load(ref.at[rows], value_a_row(), optimized=False) for ref in (refs.offset, refs.inv_std))
        dz_ring.wait(step)
        dn = self._product(refs.dz_stages.at[stage], refs.weights, columns)
        x_ring.wait(step)
        x = load(x_stage, plgpu.Layout.WGMMA)

        def hat_piece(columns):
            deviation = columns_of(x, columns).astype(jnp.float32) - broadcast_rows(first) - broadcast_rows(offset)
            return deviation * broadcast_rows(inv_std)

        def t(columns):
            return columns_of(dn, columns) * broadcast_columns(columns_of(scales, columns))

        mean, projection = self._means(refs, stage, warpgroup, t, hat_piece)
        hat_stage = refs.dz_stages.at[stage, warpgroup] if refs.hat_buffers is None else refs.hat_buffers.at[warpgroup]
        for piece in column_slices(self.hidden // 2):
            hat = hat_piece(piece)
            dx = t(piece) - broadcast_rows(mean) - hat * broadcast_rows(projection)
            x_stage[:, piece] = (dx * broadcast_rows(inv_std)).astype(x_stage.dtype)
            if refs.hat is not None:
                hat_stage[:, piece] = hat.astype(x_stage.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_stage, refs.dx.at[rows, columns])
        if refs.hat is not None:
            plgpu.copy_smem_to_gmem(hat_stage, refs.hat.at[rows, columns])

    def _product(self, dz_stage, weights, columns):
        half = self.outputs // 2

        def multiply(sums):
            for i in range(2):
                plgpu.wgmma(sums, dz_stage.at[i], weights.at[pl.ds(i * half, half), columns])
            plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, self.hidden // 2)))

    def _means(self, refs, stage, warpgroup, t, hat_piece):
        pieces = column_slices(self.hidden // 2)
        sums = [sum_slices(t, pieces), sum_slices(lambda columns: t(columns) * hat_piece(columns), pieces)]
        for i, a in enumerate(sums):
            store(refs.sums.at[stage, i, warpgroup], a)
        # After this barrier, x̂ may overwrite dz.
        plgpu.barrier_arrive(refs.sums_stored)
        plgpu.barrier_wait(refs.sums_stored)

        def mean(i):
            halves = [load(refs.sums.at[stage, i, half], value_a_row(), optimized=False) for half in range(2)]
            return (halves[0] + halves[1]) * (1 / self.hidden)

        return mean(0), mean(1)
