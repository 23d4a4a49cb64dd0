"""Gradients of the parameters of LayerNorm followed by a dense layer, computed in one pass over its weights w.

    dw = s * scale + db biasᵀ,    dscale = Σ w * s,    dbias = Σ w * db.

`s = dzᵀ x̂` and `db = Σ dz` are sums over the rows. x̂ is LayerNorm's normalized input, and dz the gradient with
respect to the dense layer's output. dscale and dbias are sums over the outputs. A CTA computes a tile of dw, and
partial sums for dscale and dbias.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, largest_divisor, zeros_like
from pallas_kernels.core.tiles import kernel

_PROGRAMS = 8
"""Wanted CTAs per multiprocessor. Not tuned."""
_MIN_OUTPUTS = 16
"""Fewest outputs per CTA, so that XLA reads far fewer sums than the CTAs read elements of s. Not tuned."""
_LOADED_OUTPUTS = 4
"""Outputs whose s and w a CTA loads at once. Not tuned."""


class Config(NamedTuple):
    """Tile of a CTA: `outputs` rows and `columns` columns of dw, which divide dw's shape."""

    outputs: int
    columns: int


def _plan(s, db, scale, bias, w):
    outputs, hidden = w.shape
    if hidden % LANES or not w.size:
        return f"weights of shape {w.shape}, only rows of a multiple of {LANES}"
    columns = LANES if hidden % (2 * LANES) else 2 * LANES
    limit = outputs * (hidden // columns) // (_PROGRAMS * device.target().multiprocessors)
    return Config(largest_divisor(outputs, max(limit, _MIN_OUTPUTS)), columns)


@kernel(plan=_plan)
def parameter_gradients(
    s: Array, db: Array, scale: Array, bias: Array, w: Array, *, config: Config
) -> tuple[Array, Array, Array]:
    """Return the dense layer's dw in w's dtype, and LayerNorm's float32 dscale and dbias.

    Args:
      s, db: `dzᵀ x̂ (outputs, hidden)` and `Σ dz (outputs,)`, float32, for the gradient dz with respect to the dense
        layer's output.
      scale, bias: `(hidden,)`.
      w: `(outputs, hidden)`, hidden a multiple of 128.
    """
    outputs, hidden = w.shape
    parts, count = outputs // config.outputs, largest_divisor(config.outputs, _LOADED_OUTPUTS)

    def body(s_ref, db_ref, scale_ref, bias_ref, w_ref, dw_ref, sums_ref, *, part, block):
        columns = pl.ds(block * config.columns, config.columns)
        scale, bias = (_load(ref, columns) for ref in (scale_ref, bias_ref))

        def add(i, sums):
            rows = [part * config.outputs + i * count + j for j in range(count)]
            loaded = [(db_ref[row], _load(s_ref, (row, columns)), _load(w_ref, (row, columns))) for row in rows]
            for row, (db, s, w) in zip(rows, loaded, strict=True):
                dw_ref[row, columns] = (s * scale + db * bias).astype(dw_ref.dtype)
                sums = [total + a for total, a in zip(sums, (w * s, w * db), strict=True)]
            return sums

        sums = lax.fori_loop(0, config.outputs // count, add, [zeros_like(scale)] * 2)
        for i, total in enumerate(sums):
            sums_ref[part, i, columns] = total

    dw, sums = launch(
        body,
        s,
        db,
        scale,
        bias,
        w,
        out=(jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct((parts, 2, hidden), jnp.float32)),
        grid={"part": parts, "block": hidden // config.columns},
        barriers=False,
        name="layer_norm_linear_backward_parameters",
    )
    dscale, dbias = jnp.sum(sums, axis=0)
    return dw, dscale, dbias


def _load(ref: Any, index: Any) -> Array:
    return ref[index].astype(jnp.float32)
