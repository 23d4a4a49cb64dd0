"""Functions of arrays that launch no kernel."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, get_abstract_mesh, use_abstract_mesh

from pallas_kernels.core.layouts import LANES


def batch_last(x: Array) -> Array:
    """Move the batch to the last axis, `(batch, ...) -> (..., lanes)`, and pad it with zeros to a multiple of
    128."""
    padding = -x.shape[0] % LANES or (LANES if x.shape[0] == 0 else 0)
    x = jnp.moveaxis(x, 0, -1)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def batch_first(x: Array, batch: int) -> Array:
    """Invert `batch_last`: return the first `batch` examples, batch first."""
    return jnp.moveaxis(x[..., :batch], -1, 0)


def unify_varying_axes(arrays: Any) -> Any:
    """Within shard_map, cast the arrays so that all vary along the union of their varying axes. The cast's transpose
    sums a replicated array's gradient over the devices."""
    axes = [jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)]
    union = frozenset().union(*axes)

    def cast(a):
        added_axes = union - jax.typeof(a).manual_axis_type.varying
        return lax.pcast(a, tuple(added_axes), to="varying") if added_axes else a

    return jax.tree.map(cast, arrays)


def has_explicit_axes() -> bool:
    return AxisType.Explicit in get_abstract_mesh().axis_types


def on_no_mesh() -> contextlib.AbstractContextManager:
    return use_abstract_mesh(AbstractMesh((), ()))
