"""LayerNorm followed by a dense layer in one pass over the rows, in half precision on Hopper's tensor cores.

    z = y wᵀ + b,    y = x̂ * scale + bias,    x̂ = (x - mean) * inv_std

w stays in shared memory, so x and z must be narrow. In the forward, a CTA's two warpgroups compute different blocks
of 64 rows. In the input gradient, each computes half of the columns of dx in the same block. The arithmetic is in
float32, on one slice of 64 columns at a time.
"""

import functools
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
from pallas_kernels.norm.statistics import inverse_root

_ROWS = 64
"""Rows per block: the rows of a `wgmma` (PTX ISA)."""
_COLUMNS = 64
"""Columns per slice: 128 bytes in half precision, the widest row of a tile of an operand."""
_WARPGROUPS = 2
"""With three warpgroups per CTA, threads spill registers (docs/lab/2026-11-21-norm.md)."""
_ALIGNMENT = 1024
"""Bytes to which Mosaic GPU aligns arrays in shared memory (docs/lab/2026-11-21-norm.md)."""


class ForwardConfig(NamedTuple):
    """A TMA copy stores `columns` columns of the output z."""

    columns: int = 2 * _COLUMNS


class InputGradientConfig(NamedTuple):
    """Number of buffers in shared memory, each for 64 rows of dz, the gradient with respect to the output."""

    stages: int = 2


def _forward_plan(x, scale, bias, w, b, *, epsilon):
    (outputs, hidden), config = w.shape, ForwardConfig()
    blocks, z_buffers = (2 * _WARPGROUPS * _ROWS * width for width in (hidden, config.columns))
    sizes = blocks, z_buffers, 2 * outputs * hidden, 2 * (2 * hidden + outputs)
    return _unsupported(x, w, sizes, barriers=_WARPGROUPS + 1) or config


def _input_gradient_plan(dz, x, scale, w, offset, inv_std):
    (outputs, hidden), config = w.shape, InputGradientConfig()
    dz_stages, x_block = 2 * config.stages * _ROWS * outputs, 2 * _ROWS * hidden
    sums = 4 * config.stages * 2 * _WARPGROUPS * _ROWS
    sizes = dz_stages, x_block, 0 if hidden == outputs else x_block, 2 * outputs * hidden, sums
    return _unsupported(x, w, sizes, barriers=config.stages + 4) or config


def _unsupported(x: Any, w: Any, sizes: tuple[int, ...], barriers: int) -> str | None:
    rows, (outputs, hidden) = x.shape[0], w.shape
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtypes {x.dtype} and {w.dtype}, only one half precision"
    if rows % _ROWS:
        return f"{rows} rows, only multiples of {_ROWS}"
    if hidden not in (128, 256) or outputs not in (128, 256):
        return f"widths {hidden} and {outputs}, only 128 and 256"
    needed_bytes = sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes) + 8 * barriers
    available_bytes = device.target().shared_bytes
    return f"{needed_bytes} bytes of shared memory, only {available_bytes}" if needed_bytes > available_bytes else None


def _column_slices(width: int) -> list[Any]:
    return [pl.ds(start, _COLUMNS) for start in range(0, width, _COLUMNS)]


def _columns_of(a: Array, columns: Any) -> Array:
    return a[..., columns.start : columns.start + columns.size]


def _broadcast_rows(a: Array) -> Array:
    return lax.broadcast_in_dim(a, (_ROWS, _COLUMNS), (0,))


def _broadcast_columns(a: Array) -> Array:
    return lax.broadcast_in_dim(a.astype(jnp.float32), (_ROWS, _COLUMNS), (1,))


def _row_sums(function: Callable[[Any], Array], width: int) -> Array:
    """Return the sum along each row of a matrix of `width` columns. `function` returns the values in one slice."""
    return jnp.sum(functools.reduce(jnp.add, map(function, _column_slices(width))), axis=1)


@kernel(plan=_forward_plan, capability=(9, 0))
def forward(
    x: Array, scale: Array, bias: Array, w: Array, b: Array, *, epsilon: float, config: ForwardConfig
) -> tuple[Array, Array, Array]:
    """Return the dense layer's output z `(rows, outputs)` in x's dtype, and LayerNorm's float32 offset and inv_std
    `(rows,)`. The offset is the mean of a row minus the row's first element.

    Args:
      x: `(rows, hidden)`, rows a multiple of 64. All arguments have x's dtype.
      scale, bias: `(hidden,)`.
      w, b: `(outputs, hidden)` and `(outputs,)`. `hidden` and `outputs` are 128 or 256.
    """
    (rows, hidden), outputs = x.shape, w.shape[0]
    programs = min(-(-rows // (_ROWS * _WARPGROUPS)), device.target().multiprocessors)

    def body(x_ref, w_ref, parameter_refs, z_ref, statistics_refs, buffers, loaded, *, program, warpgroup):
        x_stages, z_buffers, weights, vectors = buffers
        x_loaded, parameters_loaded = loaded
        first, stride = program * _WARPGROUPS + warpgroup, programs * _WARPGROUPS
        steps = quotient(rows // _ROWS - first + stride - 1, stride)
        x_stage, z_buffer = x_stages.at[warpgroup], z_buffers.at[warpgroup]
        slices = pl.ds(0, hidden), pl.ds(hidden, hidden), pl.ds(2 * hidden, outputs)
        scales, biases, bs = parameters = [vectors.at[columns] for columns in slices]

        def step_rows(step):
            return pl.ds((first + step * stride) * _ROWS, _ROWS)

        def copy(step, stage, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[step_rows(step)], x_stages.at[stage], barrier)

        def load_parameters():
            plgpu.copy_gmem_to_smem(w_ref, weights, parameters_loaded)
            for source, target in zip(parameter_refs, parameters, strict=True):
                plgpu.copy_gmem_to_smem(source, target, parameters_loaded)

        def load_columns(ref, columns):
            return _broadcast_columns(load(ref.at[columns], value_a_column(), optimized=False))

        def normalized(x):
            """Return x̂ as a function of a slice of columns, and offset (mean minus first value) and inv_std per row."""
            first_columns = _columns_of(x, pl.ds(0, 8)).astype(jnp.float32)
            column = plgpu.broadcasted_iota(jnp.int32, first_columns.shape, 1, layout=plgpu.Layout.WGMMA)
            first_values = jnp.sum(jnp.where(column == 0, first_columns, 0.0), axis=1)

            def difference(columns):
                return _columns_of(x, columns).astype(jnp.float32) - _broadcast_rows(first_values)

            offset = _row_sums(difference, hidden) * (1 / hidden)

            def deviation(columns):
                return difference(columns) - _broadcast_rows(offset)

            variance = _row_sums(lambda columns: jnp.square(deviation(columns)), hidden) * (1 / hidden)
            inv_std = inverse_root(variance, epsilon)
            return lambda columns: deviation(columns) * _broadcast_rows(inv_std), offset, inv_std

        def compute_block(step, _):
            ring.wait(step)
            x = load(x_stage, plgpu.Layout.WGMMA)
            # Every warp has then read the stage, and the next copy may fill it.
            plgpu.commit_smem()
            ring.fetch(step + 1)
            block_rows = step_rows(step)
            hat, *statistics = normalized(x)
            for ref, a in zip(statistics_refs, statistics, strict=True):
                store(ref.at[block_rows], a)

            def y(columns):
                scale, bias = (load_columns(ref, columns) for ref in (scales, biases))
                return (hat(columns) * scale + bias).astype(x.dtype)

            ys = [(y(columns), columns) for columns in _column_slices(hidden)]

            def multiply(sums):
                scratch = z_buffer.at[:, pl.ds(0, _COLUMNS)]
                for y, columns in ys:
                    multiply_registers(sums, y, weights.at[:, columns].transpose((1, 0)), scratch)
                return sums[...]

            z = pl.run_scoped(multiply, plgpu.ACC((_ROWS, outputs)))
            for start in range(0, outputs, config.columns):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for buffer_columns in _column_slices(config.columns):
                    columns = pl.ds(start + buffer_columns.start, buffer_columns.size)
                    z_buffer[:, buffer_columns] = (_columns_of(z, columns) + load_columns(bs, columns)).astype(x.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(z_buffer, z_ref.at[block_rows, pl.ds(start, config.columns)])

        ring = Ring(1, copy, x_loaded, steps, fixed_stage=warpgroup)
        pl.when(warpgroup == 0)(load_parameters)
        ring.fetch(0)
        plgpu.barrier_wait(parameters_loaded)
        lax.fori_loop(0, steps, compute_block, None)
        plgpu.wait_smem_to_gmem(0)

    row_statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    z, statistics = launch(
        body,
        x,
        w,
        (scale, bias, b),
        out=(jax.ShapeDtypeStruct((rows, outputs), x.dtype), (row_statistic, row_statistic)),
        grid={"program": programs},
        warpgroups=_WARPGROUPS,
        scratch=[
            [
                *(operand((_WARPGROUPS, _ROWS, width), x.dtype) for width in (hidden, config.columns)),
                operand((outputs, hidden), x.dtype),
                # scale, bias, and b in one array, because each array is aligned to `_ALIGNMENT` bytes
                plgpu.SMEM((2 * hidden + outputs,), x.dtype),
            ],
            [plgpu.Barrier(num_barriers=_WARPGROUPS), plgpu.Barrier(num_arrivals=4)],
        ],
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear",
    )
    return z, *statistics


@kernel(plan=_input_gradient_plan, capability=(9, 0))
def input_gradient(
    dz: Array, x: Array, scale: Array, w: Array, offset: Array, inv_std: Array, *, config: InputGradientConfig
) -> tuple[Array, Array]:
    """Return dx and LayerNorm's x̂ in x's dtype. dz `(rows, outputs)` is the gradient with respect to the dense layer's
    output. Other arguments are arguments and results of `forward`."""
    (rows, hidden), outputs = x.shape, w.shape[0]
    programs = min(rows // _ROWS, device.target().multiprocessors)
    half, half_outputs = hidden // 2, outputs // 2

    def body(
        dz_ref, x_ref, w_ref, scale_ref, statistics_refs, dx_ref, hat_ref, buffers, barriers, *, program, warpgroup
    ):
        dz_stages, x_stages, hat_buffers, weights, sums = buffers
        dz_loaded, x_loaded, weights_loaded, sums_stored = barriers
        columns, dz_columns = (pl.ds(warpgroup * size, size) for size in (half, half_outputs))
        steps = quotient(rows // _ROWS - program + programs - 1, programs)
        x_stage = x_stages.at[warpgroup]

        def step_rows(step):
            return pl.ds((program + step * programs) * _ROWS, _ROWS)

        def copy_x(step, stage, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[step_rows(step), columns], x_stages.at[stage], barrier)

        def copy_dz(step, stage, barrier):
            source = dz_ref.at[step_rows(step), dz_columns]
            plgpu.copy_gmem_to_smem(source, dz_stages.at[stage, warpgroup], barrier)

        def mean(stage, i):
            halves = [load(sums.at[stage, i, half], value_a_row(), optimized=False) for half in range(_WARPGROUPS)]
            return (halves[0] + halves[1]) * (1 / hidden)

        def compute_block(step):
            block_rows, stage = step_rows(step), dz_ring.stage(step)
            first = load(x_ref.at[block_rows, 0], value_a_row(), optimized=False).astype(jnp.float32)
            offset, inv_std = (load(ref.at[block_rows], value_a_row(), optimized=False) for ref in statistics_refs)
            dz_stage = dz_stages.at[stage]
            dz_ring.wait(step)

            def multiply(products):
                for i in range(_WARPGROUPS):
                    w_rows = weights.at[pl.ds(i * half_outputs, half_outputs), columns]
                    plgpu.wgmma(products, dz_stage.at[i], w_rows)
                plgpu.wgmma_wait(0)
                return products[...]

            dn = pl.run_scoped(multiply, plgpu.ACC((_ROWS, half)))
            x_ring.wait(step)
            x = load(x_stage, plgpu.Layout.WGMMA)

            def hat(piece):
                deviation = _columns_of(x, piece).astype(jnp.float32) - _broadcast_rows(first) - _broadcast_rows(offset)
                return deviation * _broadcast_rows(inv_std)

            def t(piece):
                return _columns_of(dn, piece) * _broadcast_columns(_columns_of(scales, piece))

            # Each warpgroup sums t and t * x̂ over half of each row.
            half_sums = [_row_sums(t, half), _row_sums(lambda piece: t(piece) * hat(piece), half)]
            for i, a in enumerate(half_sums):
                store(sums.at[stage, i, warpgroup], a)
            # After this barrier, x̂ may overwrite dz.
            plgpu.barrier_arrive(sums_stored)
            plgpu.barrier_wait(sums_stored)
            mean_t, projection = mean(stage, 0), mean(stage, 1)
            hat_stage = dz_stages.at[stage, warpgroup] if hat_buffers is None else hat_buffers.at[warpgroup]
            for piece in _column_slices(half):
                hat_piece = hat(piece)
                dx = t(piece) - _broadcast_rows(mean_t) - hat_piece * _broadcast_rows(projection)
                x_stage[:, piece] = (dx * _broadcast_rows(inv_std)).astype(x_stage.dtype)
                if hat_ref is not None:
                    hat_stage[:, piece] = hat_piece.astype(x_stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_stage, dx_ref.at[block_rows, columns])
            if hat_ref is not None:
                plgpu.copy_smem_to_gmem(hat_stage, hat_ref.at[block_rows, columns])

        def turn(step, _):
            compute_block(step)

            @pl.when(step + 1 < steps)
            def _():
                # The copy of dx started before the copy of x̂.
                plgpu.wait_smem_to_gmem(0 if hat_ref is None else 1, wait_read_only=True)
                x_ring.fetch(step + 1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                dz_ring.fetch(step + config.stages)

        x_ring = Ring(1, copy_x, x_loaded, fixed_stage=warpgroup)
        dz_ring = Ring(config.stages, copy_dz, dz_loaded, steps)
        pl.when(warpgroup == 0)(lambda: plgpu.copy_gmem_to_smem(w_ref, weights, weights_loaded))
        x_ring.fetch(0)
        dz_ring.prefetch(config.stages)
        scales = load(scale_ref.at[columns], value_a_column(), optimized=False)
        plgpu.barrier_wait(weights_loaded)
        lax.fori_loop(0, steps, turn, None)
        plgpu.wait_smem_to_gmem(0)

    halves = operand((_WARPGROUPS, _ROWS, half), x.dtype)
    return launch(
        body,
        dz,
        x,
        w,
        scale,
        (offset, inv_std),
        out=(x, x),
        skippable=[1],
        grid={"program": programs},
        warpgroups=_WARPGROUPS,
        scratch=[
            [
                operand((config.stages, _WARPGROUPS, _ROWS, half_outputs), x.dtype),
                halves,
                # If x̂ is as wide as dz, x̂ overwrites dz in the stage.
                None if hidden == outputs else halves,
                operand((outputs, hidden), x.dtype),
                plgpu.SMEM((config.stages, 2, _WARPGROUPS, _ROWS), jnp.float32),
            ],
            [
                plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=config.stages),
                plgpu.Barrier(num_barriers=_WARPGROUPS),
                plgpu.Barrier(),
                plgpu.Barrier(num_arrivals=_WARPGROUPS),
            ],
        ],
        # A thread reads data of other warps only after the barrier `sums_stored` or `commit_smem`.
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear_backward_input",
    )
