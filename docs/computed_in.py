"""In which dtypes ops compute, found by walking what JAX traces: the op, its gradient, and the kernels in both.

Nothing runs. A kernel's body is traced as it is lowered for a GPU. `table` is a table of docs/tables.py.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxbp.catalogue import CATALOGUE, Case, Entry

SUMS = {"reduce_sum", "reduce_window_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "psum", "add_any"}
SUMS |= {"scatter-add", "scatter_add", "select_and_scatter_add"}
TERMS = {"add", "sub"}
"""Of these each loop over the terms of a sum is made, in kernels too."""
TENSOR_CORES = {"wgmma_ref"}
"""A kernel's products. What they are added to is the first operand."""
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general"}
"""XLA's. It adds up within them in float32, and rounds to the dtype of their result."""
FUNCTIONS = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "tan", "erf", "erfc", "erf_inv"}
FUNCTIONS |= {"rsqrt", "sqrt", "cbrt", "pow", "div", "integer_pow", "atan2", "lgamma", "digamma"}

OURS = ("xla", "pallas")
HALVES = ("bfloat16", "float16")
BATCH = 128
ENTRIES = {entry.name: entry for entry in CATALOGUE}

ADD_IN_HALF = {"linear", "conv2d", "conv2d_relu_max_pool2d", "layer_norm_linear", "mlp_softmax_cross_entropy"}
"""Ops that add two numbers in half precision: a bias to a product that is rounded already. It is no sum, and costs one
more rounding, whatever the sizes."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The floating dtypes that an op computes in, each a set of names.

    Attributes:
      sums: of sums, and of what a kernel's products are added to.
      terms: of additions and subtractions.
      products: of the results of XLA's products.
      functions: of exponentials, logarithms, roots and quotients.
      kept: of what is kept for the backward; "inputs" for the op's own arguments.
      results: of results and gradients.
    """

    sums: frozenset[str] = frozenset()
    terms: frozenset[str] = frozenset()
    products: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()

    def __or__(self, other: "Found") -> "Found":
        return Found(*(a | b for a, b in zip(_fields(self), _fields(other), strict=True)))


def _fields(found: Found) -> list[frozenset[str]]:
    return [getattr(found, field.name) for field in dataclasses.fields(found)]


# ------------------------------------------------------------------------------------------------------------- the walk


@functools.cache
def found(name: str, implementation: str, dtype: str) -> Found:
    """What an op of this dtype computes in: its small case, and real ones unless it runs the kernels of another."""
    entry = ENTRIES[name]
    cases = [entry.small, *([] if entry.like or "_backward" in name else entry.real.values())]
    return functools.reduce(Found.__or__, (_at(entry, case, implementation, dtype) for case in cases))


def _at(entry: Entry, case: Case, implementation: str, dtype: str) -> Found:
    op = functools.partial(entry.function, **case.options, implementation=implementation)
    arguments = case.structs(case.batch or BATCH, dtype)
    function = op if "_backward" in entry.name else functools.partial(_with_gradients, op)
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    results, kept = (shapes, []) if function is op else shapes
    given, out = set(closed.jaxpr.invars), closed.jaxpr.outvars
    out_kept = out[len(out) - len(jax.tree.leaves(kept)) :]
    return walked(closed.jaxpr) | Found(
        kept=frozenset("inputs" if v in given else v.aval.dtype.name for v in out_kept),
        results=frozenset(a.dtype.name for a in jax.tree.leaves(results) if _is_float(a)),
    )


def _with_gradients(op, *arrays):
    """`((results, gradients), what is kept for the backward)`."""
    leaves, structure = jax.tree.flatten(arrays)

    def of_floats(*values):
        values = iter(values)
        given = [next(values) if _is_float(a) else a for a in leaves]
        results = jax.tree.leaves(op(*jax.tree.unflatten(structure, given)))
        return [a for a in results if _is_float(a)]

    y, vjp = jax.vjp(of_floats, *filter(_is_float, leaves))
    return (y, vjp([jnp.ones_like(a) for a in y])), jax.tree.leaves(vjp)


def walked(jaxpr: Any) -> Found:
    """What a jaxpr computes in, with all jaxprs in it."""
    kinds = dict(sums=SUMS | TENSOR_CORES, terms=TERMS, products=PRODUCTS, functions=FUNCTIONS)
    dtypes: dict[str, set[str]] = {kind: set() for kind in kinds}
    for equation in _equations(jaxpr):
        name = equation.primitive.name
        variables = equation.invars[:1] if name in TENSOR_CORES else equation.outvars
        for kind, names in kinds.items():
            if name in names:
                dtypes[kind] |= {v.aval.dtype.name for v in variables if _is_float(v.aval)}
    return Found(**{kind: frozenset(names) for kind, names in dtypes.items()})


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)
        if equation.primitive.name == "launch":
            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            yield from _equations(jax.make_jaxpr(equation.params["cuda"])(*structs).jaxpr)


def _is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


# ------------------------------------------------------------------------------------------------------------ the table

HEAD = ("ops", "`implementation`", "sums", "XLA's products", "exponentials, roots, quotients", "kept for the backward")


def table() -> str:
    """A line for all ops that are alike, each with its backward, and a column for each thing that an op does."""
    names = [name for name in ENTRIES if "_backward" not in name and "_with_" not in name]
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        xla, pallas = (_cells(found(name, implementation, HALVES[0])) for implementation in OURS)
        for key in [("both", *xla)] if xla == pallas else [("xla", *xla), ("pallas", *pallas)]:
            lines.setdefault(key, []).append(f"`{name}`")
    rows = [HEAD, ("---",) * len(HEAD), *((", ".join(lines[key]), *key) for key in sorted(lines, key=_order))]
    results = frozenset().union(*(found(name, of, HALVES[0]).results for name in names for of in OURS))
    return "\n".join(
        [
            *("| " + " | ".join(row) + " |" for row in rows),
            "",
            f"Results and gradients come in {_text(results)}. *half* is the inputs' dtype, {' or '.join(HALVES)}; a "
            "product of XLA's adds up in float32, and its result is then rounded to the dtype that stands there.",
            "\\*: and its bias in half, to a product that is rounded already.",
        ]
    )


def _cells(found: Found) -> tuple[str, ...]:
    bias = "\\*" if any(dtype in HALVES for dtype in found.terms) else ""
    sums = found.sums | {dtype for dtype in found.terms if dtype not in HALVES}
    return _text(sums) + bias, *map(_text, (found.products, found.functions, found.kept))


def _text(dtypes: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted({"half" if dtype in HALVES else dtype for dtype in dtypes}))


def _order(cells: tuple[str, ...]) -> tuple:
    """Those that do less before those that do more."""
    implementation, sums, products, functions, kept = cells
    return bool(products), "*" in sums, bool(sums), bool(functions), kept, implementation == "pallas"
