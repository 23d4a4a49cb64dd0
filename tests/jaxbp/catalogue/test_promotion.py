"""Every op of the table where JAX is told to promote neither ranks nor dtypes."""

import jax
import jax.numpy as jnp
import pytest
from helpers import ENTRIES, every_implementation, op_of, results_of, value_and_gradients

import jaxbp
from jaxbp.common.checks import KERNEL_DTYPES

BROADCASTING = ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")
"""Ops that broadcast as `jax.numpy` does. The table calls them with arrays of different ranks."""


def trace(name, implementation, dtype):
    """Trace the value and the gradients of an entry. The bodies of kernels are traced while they are lowered."""
    arrays = ENTRIES[name].small.structs(2, jnp.dtype(dtype))
    if name.removesuffix("_backward") in BROADCASTING:
        ndim = max(a.ndim for a in jax.tree.leaves(arrays))
        arrays = [jax.ShapeDtypeStruct((1,) * (ndim - a.ndim) + a.shape, a.dtype) for a in arrays]
    op = op_of(name, None, implementation)
    traced = value_and_gradients(op).trace(arrays, results_of(op, arrays))
    if implementation == "pallas":
        traced.lower(lowering_platforms=("cuda",))


@every_implementation
@pytest.mark.parametrize("name", ENTRIES)
def test_no_op_promotes_a_rank_or_a_dtype_if_its_arrays_have_one_dtype(name, implementation):
    *_, half = ENTRIES[name].kernel_dtypes or KERNEL_DTYPES
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        trace(name, implementation, half)


@pytest.mark.parametrize("name", BROADCASTING)
def test_arrays_of_different_ranks_are_refused_as_by_jax(name):
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="could not be broadcast together"):
        getattr(jaxbp, name)(jnp.ones((2, 3)), jnp.ones(3), implementation="xla")


@every_implementation
def test_mixed_dtypes_are_refused(implementation):
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((4, 3))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(TypeError, match="dtype"):
        jaxbp.linear(x, w, implementation=implementation)
