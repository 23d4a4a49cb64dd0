"""Run programs of narrower dtypes in float64, because rounding would hide the small steps of finite differences."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.verify.interpreter import Trace, bind, evaluate, is_program, programs_in, rerun, structured, traced

FIXED = frozenset({"pallas_call", "mosaic_gpu_call", "core_map", "pure_callback", "io_callback", "ffi_call"})
"""Primitives whose code is fixed to the traced dtypes."""


class CannotLiftError(NotImplementedError):
    """A part of a program cannot run in float64."""


def lifted(function: Callable, trace: Trace = traced) -> Callable:
    """Return `function` in float64, which raises `CannotLiftError` if a kernel or a callback has a narrower result.

    If JAX cannot trace `function` in float64, `trace` traces it in other dtypes.
    """
    return rerun(function, _lift, _wide, trace)


def traced_in(values: Sequence[np.dtype], cotangents: Sequence[np.dtype]) -> Trace:
    """Trace functions of values, cotangents, and directions in these dtypes, in the current 64-bit mode. Other arrays,
    such as integers, keep their dtypes."""
    mode = jax.config.jax_enable_x64

    def trace(function, args):
        leaves, structure = jax.tree.flatten(args)
        dtypes = itertools.chain(values, cotangents, itertools.cycle(values))
        narrow = [dtype if _is_float(a) else a.dtype for a, dtype in zip(leaves, dtypes, strict=False)]
        shapes = [jax.ShapeDtypeStruct(a.shape, dtype) for a, dtype in zip(leaves, narrow, strict=True)]
        with jax.enable_x64(mode):
            return traced(function, structure.unflatten(shapes))

    return trace


def narrowest(*programs: Any) -> np.dtype | None:
    """Return the least precise dtype of the values that depend on floating arguments, or None."""
    found = set().union(*map(_computed_in, programs))
    return max(found, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)


def _computed_in(program):
    jaxpr, found = getattr(program, "jaxpr", program), set()
    moved = {v for v in jaxpr.invars if _is_float(v.aval)}
    for equation in jaxpr.eqns:
        if not any(v in moved for v in equation.invars if not hasattr(v, "val")):
            continue
        moved.update(equation.outvars)
        found |= {v.aval.dtype for v in equation.outvars if _is_float(v.aval)}
        if equation.primitive.name in FIXED:
            continue
        found = found.union(*map(_computed_in, programs_in(equation)))
        if equation.primitive.name == "reduce_precision":
            bits = equation.params["mantissa_bits"]
            widths = {10: jnp.bfloat16, 23: np.float16, 52: np.float32, 64: np.float64}
            found.add(np.dtype(next(dtype for most, dtype in widths.items() if bits < most)))
    return found


def _lift(equation, inputs):
    name, params = equation.primitive.name, equation.params
    if name in FIXED:
        if any(_is_float(v.aval) and v.aval.dtype != np.float64 for v in equation.outvars):
            raise CannotLiftError(f"{name} computes in {equation.outvars[0].aval.dtype}")
        return bind(equation, _as_traced(equation, inputs))
    if name == "reduce_precision":
        return inputs
    if name == "bitcast_convert_type":
        return [_wide(y) for y in bind(equation, _as_traced(equation, inputs))]
    if (results := structured(equation, inputs, _lift, _wide)) is not None:
        return results
    changed = {key: _wide_parameter(value) for key, value in params.items()}
    if isinstance(changed.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        changed["precision"] = lax.Precision.HIGHEST
    return bind(equation, inputs, **changed)


def _as_traced(equation, inputs):
    return [
        jnp.asarray(a, v.aval.dtype) if _is_float(v.aval) else a for a, v in zip(inputs, equation.invars, strict=True)
    ]


def _wide_parameter(value):
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return _wide_dtype(np.dtype(value))
    if is_program(value):
        jaxpr = getattr(value, "jaxpr", value)
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, _wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        wide = jax.make_jaxpr(lambda *args: evaluate(value, args, _lift, _wide))(*shapes)
        return wide if isinstance(value, type(wide)) else wide.jaxpr
    if isinstance(value, tuple) and any(is_program(inner) for inner in jax.tree.leaves(value, is_leaf=is_program)):
        return jax.tree.map(_wide_parameter, value, is_leaf=is_program)
    return value


def _wide_dtype(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _wide(a):
    dtype = jnp.result_type(a)
    return a if (wide := _wide_dtype(dtype)) == dtype else jnp.asarray(a, wide)


def _is_float(aval):
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
