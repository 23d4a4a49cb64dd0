"""One kernel that applies an element-wise formula to many arrays, to update many parameters in one launch.

Arrays come in lists, such as parameters, moments, and gradients. For one i, a CTA processes the same range of
elements in the i-th array of every list.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.core.gathers import load_of, store_to
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.tiles import kernel
from pallas_kernels.pointwise.elementwise import unsupported_indices

_ACCESS_BYTES = 16
"""A thread's widest access (CUDA C++ Programming Guide)."""
_ELEMENTS = 8
"""Elements per thread and list, if they leave `_WANTED_PROGRAMS` CTAs. Sixteen would take most registers. Not tuned."""
_WANTED_PROGRAMS = 1024
"""Wanted CTAs: several per multiprocessor. Not tuned."""
ARRAYS = 64
"""Maximum arrays of each list per launch, to bound compile time. Not tuned."""
DTYPES = ("float32", "bfloat16", "float16")

Arrays = Sequence[Array]


class Config(NamedTuple):
    """`accesses` is the number of loads, of at most 16 bytes each, per thread and list of arrays."""

    accesses: int = 1


def _plan(formula, scalars, changed, constant):
    lists = [*changed, *constant]
    for arrays in lists:
        if unknown := {a.dtype.name for a in arrays} - {*DTYPES}:
            return f"dtype {min(unknown)}"
        if len({a.dtype for a in arrays}) > 1:
            return "lists of several dtypes"
    enough = sum(a.size for a in changed[0]) >= LANES * _ELEMENTS * _WANTED_PROGRAMS
    reason = unsupported_indices(*(a.shape for arrays in lists for a in arrays))
    return reason or Config(_ELEMENTS // _width(lists) if enough else 1)


@kernel(plan=_plan)
def updates(
    formula: Callable[..., tuple[Array, ...]],
    scalars: Array,
    changed: Sequence[Arrays],
    constant: Sequence[Arrays],
    *,
    config: Config,
) -> tuple[list[Array], ...]:
    """For every i, compute `formula(scalars, *changed, *constant)` element by element on the i-th arrays of all lists.

    The results have the dtypes of `changed`, and overwrite its arrays. XLA first copies arrays that are still needed.
    The kernel runs only on GPUs and in the Mosaic GPU simulator.

    Args:
      formula: maps a list of scalars, and a float32 block of one array per list, to a tuple of new blocks for the
        lists of `changed`.
      scalars: `(n,)`, float32.
      changed, constant: lists of arrays, of one dtype per list. The i-th arrays of all lists have the same shape.
    """
    new = [list(arrays) for arrays in changed]
    filled = [i for i, a in enumerate(changed[0]) if a.size]
    for places in (filled[k : k + ARRAYS] for k in range(0, len(filled), ARRAYS)):
        of_places = [[[arrays[i] for i in places] for arrays in lists] for lists in (changed, constant)]
        for arrays, results in zip(new, _update(formula, scalars, *of_places, config), strict=True):
            for i, result in zip(places, results, strict=True):
                arrays[i] = result
    return tuple(new)


def _update(formula, scalars, changed, constant, config):
    """Launch `updates` once, for lists of at most `ARRAYS` arrays, none of which is empty."""
    shape = LANES * config.accesses, _width([*changed, *constant])
    ends = list(itertools.accumulate(-(-a.size // math.prod(shape)) for a in changed[0]))

    def body(scalars_ref, changed, constant, *new, program):
        scalars = [scalars_ref[k] for k in range(scalars_ref.shape[0])]
        array, first = jnp.int32(0), jnp.int32(0)
        for end in ends[:-1]:
            array, first = array + (program >= end).astype(jnp.int32), jnp.where(program >= end, end, first)
        start = (program - first) * math.prod(shape)
        blocks = load_of([*changed, *constant], array, start, shape)
        results = formula(scalars, *(block.astype(jnp.float32) for block in blocks))
        results = [block.astype(refs[0].dtype) for block, refs in zip(results, new, strict=True)]
        store_to(new, array, start, results)

    flat_changed, flat_constant = jax.tree.map(jnp.ravel, (changed, constant))
    results = launch(
        body,
        scalars,
        flat_changed,
        flat_constant,
        out=flat_changed,
        grid={"program": ends[-1]},
        name="updates",
        barriers=False,
        sums_across_warps=False,
        in_place={1 + o: o for o in range(len(changed) * len(ends))},
    )
    return jax.tree.map(lambda y, a: y.reshape(a.shape), results, changed)


def _width(lists: Sequence[Arrays]) -> int:
    return _ACCESS_BYTES // max(jnp.dtype(a.dtype).itemsize for arrays in lists for a in arrays)
