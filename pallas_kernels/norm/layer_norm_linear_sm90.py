"""LayerNorm and a dense layer in one pass over the rows, in half precisions on Hopper's tensor cores.

    z = y wᵀ + b,    y = x̂ * scale + bias,    x̂ = (x - mean) * inv_std

The weights stay in shared memory, so both widths are small. Each of two warpgroups takes every so many-th block of 64
rows by itself: a bulk copy brings it, its rows are normalised in registers, from where the tensor cores take them, and
bulk copies take z away. The next block is on its way as soon as the registers hold this one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch, on_gpu
from pallas_kernels.core.layouts import load, multiply_registers, operand, store
from pallas_kernels.dense import linear_sm90 as linear_tensor_cores
from pallas_kernels.norm import layer_norm

_MULTIPROCESSORS = 132
_ROWS = 64
_LEAST_ROWS = 65536
# Columns of a half precision that fill the tensor cores' rows in shared memory; as many are computed at once.
_COLUMNS = 64
# Of z, in shared memory until a bulk copy has read them.
_LEAVING = 128
_WARPGROUPS = 2
_SUMS = plgpu.Layout.WGMMA
_A_ROW, _A_COLUMN = _SUMS.reduce(1), _SUMS.reduce(0)


def pays(x: Any, w: Any) -> bool:
    """Whether the kernels take `(rows, hidden)` x and `(out, hidden)` w, and are faster than separate ones."""
    rows, widths = x.shape[0], w.shape
    half = x.dtype == w.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    return half and rows >= _LEAST_ROWS and rows % _ROWS == 0 and all(a in (128, 256) for a in widths)


def forward(x: Array, scale: Array, bias: Array, w: Array, b: Array, *, eps: float) -> tuple[Array, Array, Array]:
    """z in x's dtype, and the statistics of each row as `layer_norm.normalise` gives them.

    Args:
      x: `(rows, hidden)`, rows a multiple of 64. All arguments are of its dtype.
      scale, bias: `(hidden,)`.
      w, b: `(out, hidden)` and `(out,)`, both widths 128 or 256.
    """

    def separate(x, scale, bias, w, b):
        y, *statistics = layer_norm.normalise(x, scale, bias, eps=eps, center=True)
        z = jnp.matmul(y, w.T, preferred_element_type=jnp.float32) + b.astype(jnp.float32)
        return z.astype(x.dtype), *statistics

    return on_gpu(functools.partial(_forward, eps=eps), separate, x, scale, bias, w, b)


def backward(
    dz: Array, x: Array, scale: Array, bias: Array, w: Array, offset: Array, inv_std: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """dx, dscale, dbias, dw and db, the first and dw in x's dtype, the others in float32.

    With `s = Σ dzᵀ x̂` over the rows the gradients in the parameters need no sums of their own:

        dw = s * scale + db biasᵀ,    dscale = Σ w * s,    dbias = Σ w * db,    db = Σ dz,

    sums but the last over the outputs.

    Args:
      dz: `(rows, out)`.
      offset, inv_std: the forward's.
    """

    def separate(dz, x, scale, bias, w, offset, inv_std):
        t = jnp.matmul(dz, w)
        options = dict(eps=0.0, center=True, again=True)
        dx, dscale, dbias, y = layer_norm.gradients(t, x, scale, bias, offset, inv_std, **options)
        return dx, dscale, dbias, *linear_tensor_cores.weights_gradient(dz, y)

    def here(dz, x, scale, bias, w, offset, inv_std):
        dx, hat = _input_gradient(dz, x, scale, w, offset, inv_std)
        sums, db = linear_tensor_cores.weights_gradient(dz, hat, dtype=jnp.float32)
        scale, bias, wide = (a.astype(jnp.float32) for a in (scale, bias, w))
        dw = sums * scale + db[:, None] * bias
        return dx, jnp.sum(wide * sums, axis=0), jnp.sum(wide * db[:, None], axis=0), dw.astype(w.dtype), db

    return on_gpu(here, separate, dz, x, scale, bias, w, offset, inv_std)


def _forward(x, scale, bias, w, b, *, eps):
    (rows, hidden), out = x.shape, w.shape[0]
    blocks = rows // _ROWS
    programs = min(-(-blocks // _WARPGROUPS), _MULTIPROCESSORS)
    apart = programs * _WARPGROUPS
    places = pl.ds(0, hidden), pl.ds(hidden, hidden), pl.ds(2 * hidden, out)

    def body(x_ref, w_ref, *refs, program, warpgroup):
        *vector_refs, z_ref, offset_ref, inv_std_ref, xs, zs, weights, vectors, loaded, parameters_loaded = refs
        held, leaving = xs.at[warpgroup], zs.at[warpgroup]
        scales, biases, bs = (vectors.at[place] for place in places)
        mine = program * _WARPGROUPS + warpgroup
        steps = (blocks - mine + apart - 1) // apart

        def rows_of(step):
            return pl.ds((mine + step * apart) * _ROWS, _ROWS)

        def fetch(step):
            plgpu.copy_gmem_to_smem(x_ref.at[rows_of(step)], held, loaded.at[warpgroup])

        @pl.when(warpgroup == 0)
        def _():
            plgpu.copy_gmem_to_smem(w_ref, weights, parameters_loaded)
            for ref, place in zip(vector_refs, places, strict=True):
                plgpu.copy_gmem_to_smem(ref, vectors.at[place], parameters_loaded)

        pl.when(steps > 0)(lambda: fetch(0))
        plgpu.barrier_wait(parameters_loaded)

        def one(step, _):
            plgpu.barrier_wait(loaded.at[warpgroup])
            block = load(held, _SUMS)
            # All warps have read it.
            plgpu.commit_smem()
            pl.when(step + 1 < steps)(lambda: fetch(step + 1))
            normalised, offset, inv_std = _normalise(block, _first(block), eps)
            store(offset_ref.at[rows_of(step)], offset)
            store(inv_std_ref.at[rows_of(step)], inv_std)

            def y(columns):
                scale, bias = (_of_columns(ref, columns) for ref in (scales, biases))
                return (normalised(columns) * scale + bias).astype(x.dtype)

            ys = [(y(columns), columns) for columns in _pieces(hidden)]

            def multiply(sums):
                spare = leaving.at[:, pl.ds(0, _COLUMNS)]
                for y, columns in ys:
                    multiply_registers(sums, y, weights.at[:, columns].transpose((1, 0)), spare)
                return sums[...]

            z = pl.run_scoped(multiply, plgpu.ACC((_ROWS, out)))
            for start in range(0, out, _LEAVING):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for inside in _pieces(_LEAVING):
                    columns = pl.ds(start + inside.start, inside.size)
                    leaving[:, inside] = (_piece(z, columns) + _of_columns(bs, columns)).astype(x.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(leaving, z_ref.at[rows_of(step), pl.ds(start, _LEAVING)])

        lax.fori_loop(0, steps, one, None)
        plgpu.wait_smem_to_gmem(0)

    per_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return launch(
        body,
        x,
        w,
        scale,
        bias,
        b,
        out=(jax.ShapeDtypeStruct((rows, out), x.dtype), per_row, per_row),
        grid={"program": programs},
        warpgroups=_WARPGROUPS,
        scratch=[
            operand((_WARPGROUPS, _ROWS, hidden), x.dtype),
            operand((_WARPGROUPS, _ROWS, _LEAVING), x.dtype),
            operand((out, hidden), x.dtype),
            # Scale, bias and b in one: each alone takes whole KiB.
            plgpu.SMEM((2 * hidden + out,), x.dtype),
            plgpu.Barrier(num_barriers=_WARPGROUPS),
            plgpu.Barrier(num_arrivals=4),
        ],
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear",
    )


def _input_gradient(dz, x, scale, w, offset, inv_std):
    """dx and x̂. Two warpgroups take a block together, each half of its columns."""
    (rows, hidden), out = x.shape, w.shape[0]
    blocks = rows // _ROWS
    programs = min(blocks, _MULTIPROCESSORS)
    mine, half = hidden // 2, out // 2
    shared = hidden == out

    def body(dz_ref, x_ref, w_ref, scale_ref, offset_ref, inv_std_ref, dx_ref, hat_ref, *refs, program, warpgroup):
        dzs, xs, *hats, weights, parts, dz_loaded, x_loaded, weights_loaded, both = refs
        held = xs.at[warpgroup]
        columns_of_x, columns_of_dz = pl.ds(warpgroup * mine, mine), pl.ds(warpgroup * half, half)
        steps = (blocks - program + programs - 1) // programs

        def rows_of(step):
            return pl.ds((program + step * programs) * _ROWS, _ROWS)

        def fetch_x(step):
            plgpu.copy_gmem_to_smem(x_ref.at[rows_of(step), columns_of_x], held, x_loaded.at[warpgroup])

        def fetch_dz(step):
            slot = step % 2
            source = dz_ref.at[rows_of(step), columns_of_dz]
            plgpu.copy_gmem_to_smem(source, dzs.at[slot, warpgroup], dz_loaded.at[slot])

        pl.when(warpgroup == 0)(lambda: plgpu.copy_gmem_to_smem(w_ref, weights, weights_loaded))
        fetch_x(0)
        fetch_dz(0)
        pl.when(steps > 1)(lambda: fetch_dz(1))
        scales = load(scale_ref.at[columns_of_x], _A_COLUMN, optimized=False)
        plgpu.barrier_wait(weights_loaded)

        def one(step, _):
            slot = step % 2
            first = load(x_ref.at[rows_of(step), 0], _A_ROW, optimized=False).astype(jnp.float32)
            offset, inv_std = (
                load(ref.at[rows_of(step)], _A_ROW, optimized=False) for ref in (offset_ref, inv_std_ref)
            )
            plgpu.barrier_wait(dz_loaded.at[slot])

            def multiply(sums):
                for i in range(2):
                    plgpu.wgmma(sums, dzs.at[slot, i], weights.at[pl.ds(i * half, half), columns_of_x])
                plgpu.wgmma_wait(0)
                return sums[...]

            dn = pl.run_scoped(multiply, plgpu.ACC((_ROWS, mine)))
            plgpu.barrier_wait(x_loaded.at[warpgroup])
            x = load(held, _SUMS)

            def normalised(columns):
                centred = _piece(x, columns).astype(jnp.float32) - _along_rows(first) - _along_rows(offset)
                return centred * _along_rows(inv_std)

            def t(columns):
                return _piece(dn, columns) * _along_columns(scales[columns.start : columns.start + columns.size])

            pieces = _pieces(mine)
            sums = [_sum(t, pieces), _sum(lambda columns: t(columns) * normalised(columns), pieces)]
            for i, a in enumerate(sums):
                store(parts.at[slot, i, warpgroup], a)
            # By now the other half, too, has multiplied what the slot holds.
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)
            shift, along = (
                (
                    load(parts.at[slot, i, 0], _A_ROW, optimized=False)
                    + load(parts.at[slot, i, 1], _A_ROW, optimized=False)
                )
                * (1 / hidden)
                for i in range(2)
            )
            hat_slot = dzs.at[slot, warpgroup] if shared else hats[0].at[warpgroup]
            for columns in pieces:
                hat = normalised(columns)
                dx = t(columns) - _along_rows(shift) - hat * _along_rows(along)
                held[:, columns] = (dx * _along_rows(inv_std)).astype(held.dtype)
                hat_slot[:, columns] = hat.astype(held.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(held, dx_ref.at[rows_of(step), columns_of_x])
            plgpu.copy_smem_to_gmem(hat_slot, hat_ref.at[rows_of(step), columns_of_x])

            @pl.when(step + 1 < steps)
            def _():
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                fetch_x(step + 1)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                pl.when(step + 2 < steps)(lambda: fetch_dz(step + 2))

        lax.fori_loop(0, steps, one, None)
        plgpu.wait_smem_to_gmem(0)

    return launch(
        body,
        dz,
        x,
        w,
        scale,
        offset,
        inv_std,
        out=(x, x),
        grid={"program": programs},
        warpgroups=2,
        scratch=[
            operand((2, 2, _ROWS, half), x.dtype),
            operand((2, _ROWS, mine), x.dtype),
            *([] if shared else [operand((2, _ROWS, mine), x.dtype)]),
            operand((out, hidden), x.dtype),
            plgpu.SMEM((2, 2, 2, _ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
        ],
        # Of what another warpgroup, or warp, stored it reads nothing but behind `both` and `commit_smem`.
        barriers=False,
        sums_across_warps=False,
        name="layer_norm_linear_backward_input",
    )


def _pieces(width):
    return [pl.ds(start, _COLUMNS) for start in range(0, width, _COLUMNS)]


def _piece(a, columns):
    return a[:, columns.start : columns.start + columns.size]


def _along_rows(a):
    return lax.broadcast_in_dim(a, (_ROWS, _COLUMNS), (0,))


def _along_columns(a):
    return lax.broadcast_in_dim(a.astype(jnp.float32), (_ROWS, _COLUMNS), (1,))


def _of_columns(ref, columns):
    return _along_columns(load(ref.at[columns], _A_COLUMN, optimized=False))


def _first(x):
    """The first value of each row, whose other values other threads have: they sum it and zeros."""
    some = _piece(x, pl.ds(0, 8)).astype(jnp.float32)
    column = plgpu.broadcasted_iota(jnp.int32, some.shape, 1, layout=_SUMS)
    return jnp.sum(jnp.where(column == 0, some, 0.0), axis=1)


def _sum(of_piece, pieces):
    """Of each row. Piece on piece first: the shuffles come last, and once."""
    return jnp.sum(functools.reduce(jnp.add, map(of_piece, pieces)), axis=1)


def _normalise(x, first, eps):
    """(x̂ as a function of the columns, offset, inv_std) of a block of rows."""
    pieces, share = _pieces(x.shape[1]), 1 / x.shape[1]

    def from_first(columns):
        return _piece(x, columns).astype(jnp.float32) - _along_rows(first)

    offset = _sum(from_first, pieces) * share

    def centred(columns):
        return from_first(columns) - _along_rows(offset)

    inv_std = lax.rsqrt(_sum(lambda columns: jnp.square(centred(columns)), pieces) * share + eps)
    return lambda columns: centred(columns) * _along_rows(inv_std), offset, inv_std
