"""Find the dtypes in which ops, their gradients, and their kernels compute, from jaxprs."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from figures.cells import markdown
from jax.extend.core import jaxprs_in_params
from launches import vjp

from jaxbp.catalogue import CATALOGUE, Case, Entry
from jaxbp.verify.arguments import floats, is_float

SUMS = "reduce_sum reduce_window_sum reduce_prod cumsum cumprod cumlogsumexp psum add_any scatter-add scatter_add"
FUNCTIONS = "exp exp2 expm1 log log1p logistic tanh sin cos tan erf erfc erf_inv rsqrt sqrt cbrt pow div integer_pow"
PRIMITIVES = {
    "sums": {*SUMS.split(), "select_and_scatter_add", "wgmma_ref"},
    # Loops of these operations may compute sums.
    "terms": {"add", "sub"},
    "products": {"dot_general", "conv_general_dilated", "ragged_dot_general"},
    "functions": {*FUNCTIONS.split(), "atan2", "lgamma", "digamma"},
}
TENSOR_CORES = "wgmma_ref"
"""The first operand of this primitive is the accumulator."""

HALVES = ("bfloat16", "float16")
BATCH = 128
ENTRIES = {entry.name: entry for entry in CATALOGUE}

ADD_IN_HALF = {"linear", "conv2d", "conv2d_relu_max_pool2d", "layer_norm_linear", "mlp_softmax_cross_entropy"}
"""Ops that add a bias in half precision to a rounded product."""

Found = defaultdict[str, set[str]]
"""The floating dtypes of each kind of computation in `PRIMITIVES`, of an op's "results", and of the arrays "kept" for
its backward, where kept inputs count as "inputs"."""


def ours(name: str) -> tuple[str, ...]:
    """Return the implementations with a backward of jaxbp."""
    return ("xla", "pallas") if ENTRIES[name].kernel_dtypes else ("xla",)


@functools.cache
def found(name: str, implementation: str, dtype: str) -> Found:
    """Return the dtypes in all cases of the op's catalogue entry, or only in its small case for backwards and for ops
    that run another op's kernels."""
    entry, dtypes = ENTRIES[name], defaultdict(set)
    for case in (entry.small, *([] if entry.like or "_backward" in name else entry.real.values())):
        _walk_case(entry, case, implementation, dtype, dtypes)
    return dtypes


def _walk_case(entry: Entry, case: Case, implementation: str, dtype: str, dtypes: Found) -> None:
    op = functools.partial(entry.function, **case.options, implementation=implementation)

    def with_gradients(*arrays):
        y, gradients = vjp(op, arrays)
        return (y, gradients([jnp.ones_like(a) for a in y])), jax.tree.leaves(gradients)

    is_backward = "_backward" in entry.name
    function = (lambda *arrays: (op(*arrays), [])) if is_backward else with_gradients
    arguments = case.structs(case.batch or BATCH, dtype)
    closed, (results, kept) = jax.make_jaxpr(function, return_shape=True)(*arguments)
    given, out = set(closed.jaxpr.invars), closed.jaxpr.outvars
    walk(closed.jaxpr, dtypes)
    dtypes["results"] |= {a.dtype.name for a in floats(results)}
    dtypes["kept"] |= {"inputs" if v in given else v.aval.dtype.name for v in out[len(out) - len(kept) :]}


def walk(jaxpr: Any, dtypes: Found) -> Found:
    """Add to `dtypes` the dtypes in which a jaxpr and its nested jaxprs compute."""
    for equation in _equations(jaxpr):
        name = equation.primitive.name
        variables = equation.invars[:1] if name == TENSOR_CORES else equation.outvars
        for kind, names in PRIMITIVES.items():
            if name in names:
                dtypes[kind] |= {v.aval.dtype.name for v in variables if is_float(v.aval)}
    return dtypes


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)
        if equation.primitive.name == "launch":
            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            yield from _equations(jax.make_jaxpr(equation.params["cuda"])(*structs).jaxpr)


HEAD = ("ops", "`implementation`", "sums", "XLA's products", "exponentials, roots, quotients", "saved for the backward")


def table() -> str:
    names = [name for name in ENTRIES if "_backward" not in name and "_with_" not in name]
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        cells = {of: _cells(found(name, of, HALVES[0])) for of in ours(name)}
        if cells["xla"] == cells.get("pallas"):
            cells = {"both": cells["xla"]}
        for of, text in cells.items():
            lines.setdefault((of, *text), []).append(f"`{name}`")
    rows = [(", ".join(lines[key]), *key) for key in sorted(lines, key=_order)]
    wide = [
        f"`{name}`" for name in names if any(found(name, of, HALVES[0])["results"] - {HALVES[0]} for of in ours(name))
    ]
    return (
        f"{markdown(HEAD, rows, numbers=False)}\n\n*half* is the dtype of the inputs, {' or '.join(HALVES)}. "
        f"Results and gradients have the dtype half, except the loss of {', '.join(wide)}, which is float32. "
        "XLA's products are summed in float32, and then rounded to the dtype in the table. "
        "\\*: a bias is added in half precision to the rounded product. The row of `conv1d` is for depthwise "
        "convolutions. Other convolutions of `conv1d` are computed as in `conv2d`. An empty cell means that "
        "an op has no such computation, or saves no array."
    )


def _cells(dtypes: Found) -> tuple[str, ...]:
    half = dtypes["terms"].intersection(HALVES)
    sums = dtypes["sums"] | dtypes["terms"] - half
    return _text(sums) + "\\*" * bool(half), *(_text(dtypes[kind]) for kind in ("products", "functions", "kept"))


def _text(dtypes: set[str]) -> str:
    return ", ".join(sorted({"half" if dtype in HALVES else dtype for dtype in dtypes}))


def _order(cells: tuple[str, ...]) -> tuple:
    implementation, sums, products, functions, kept = cells
    return bool(products), "*" in sums, bool(sums), bool(functions), kept, implementation == "pallas"
