"""The roofline: the least time that this GPU allows for a workload, from rates measured in the same run.

Equal numbers of read and written bytes count at the rate of copies. The other bytes count at the rate of only reading
or only writing. Rates depend on the working set, the number of bytes that a program touches. See docs/benchmarks.md.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from experiments.bench import measure
from experiments.bench.workloads import Workload, one_after_another
from jaxbp.verify.timing import device_seconds

MIB = 2**20
WORKING_SETS = (8 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 512 * MIB)
"""Working sets for the rates. The L2 cache of an H200 has 60 MiB."""
CALLS = 8
"""Kernels per program. One kernel with a small working set takes less time than its dispatch."""
PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (32768, 4096, 4096))
RATE_SECONDS = 0.03
"""The longest timing round for a rate. In longer rounds, the clock of the GPU drops."""


HOPPER_OPERATIONS = 989.4e12
"""Operations per second of bfloat16 and float16 products on an H100 SXM and an H200, without sparsity.

Source: NVIDIA's data sheets.
"""


class Cost(NamedTuple):
    """The least work that one call of a workload needs.

    Attributes:
      operations: multiplications and additions in matrix products and convolutions.
      read_bytes: the size of the arguments that affect the results.
      written_bytes: the size of the results, without copies of an argument or of another result.
      arithmetic: other multiplications and additions, or 0 if unknown.
    """

    argument_bytes: int
    result_bytes: int
    operations: int
    read_bytes: int
    written_bytes: int
    arithmetic: int = 0


def roofline_seconds(cost: Cost, working_set: int, precision: str, rates: Mapping[str, Any]) -> float:
    """Return the least time of one call in a program that touches `working_set` bytes, at rates of `measured_rates`."""
    copy, read, write = (rate_of(kind, working_set, rates) for kind in ("copy", "read", "write"))
    copied = min(cost.read_bytes, cost.written_bytes)
    # Only reading, or only writing, is at least as fast as a copy. A lower measured rate is noise.
    reading, writing = (cost.read_bytes - copied) / max(copy, read), (cost.written_bytes - copied) / max(copy, write)
    operations = rates["operations_per_second"]
    return max(
        2 * copied / copy + reading + writing,
        cost.operations / operations[precision],
        cost.arithmetic / operations["highest"],
    )


def rate_of(kind: str, working_set: int, rates: Mapping[str, Any]) -> float:
    """Return the best rate of `kind` ("copy", "read", or "write") in bytes per second, or 0 if none was measured.

    Ignore rates for smaller working sets, which may fit in the cache.
    """
    curve = rates["bytes_per_second"].get(kind, [])
    start = max((size for size, _ in curve if size <= working_set), default=0)
    return max((rate for size, rate in curve if size >= start), default=0.0)


def nominal_operations(dtype: str) -> float | None:
    """Return the operations per second that NVIDIA states for products of `dtype` on this GPU, or None if unknown."""
    is_hopper = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
    return HOPPER_OPERATIONS if is_hopper and dtype in ("bfloat16", "float16") else None


def measured_rates(dtype: str, seconds: float, quick: bool = False) -> dict[str, Any]:
    """Measure how fast this GPU moves bytes and multiplies matrices of `dtype`.

    A timing round takes `seconds`, at most `RATE_SECONDS`. `bytes_per_second` has pairs (working set, rate) for "copy",
    "read", and "write". `copy_bytes_per_second` is for a copy that does not fit in the cache. With `quick`, programs
    are compiled together, which may change the algorithm that XLA chooses for a product.
    """
    with ThreadPoolExecutor(None if quick else 1) as pool:
        products = itertools.product(PRECISIONS, PRODUCTS)
        programs = _traffic(pool) | {key: pool.submit(_product, *key, dtype) for key in products}
    programs = {key: program.result() for key, program in programs.items()}
    least = dict.fromkeys(programs, math.inf)
    for _ in range(measure.ROUNDS):
        for key, (_, run) in programs.items():
            least[key] = min(least[key], run(min(seconds, RATE_SECONDS)))
    rates = {key: amount / least[key] for key, (amount, _) in programs.items()}
    curves = {}
    for (kind, size), rate in rates.items():
        if kind not in PRECISIONS:
            curves.setdefault(kind, []).append([size, rate])
    return {
        "copy_bytes_per_second": curves["copy"][-1][1],
        "bytes_per_second": curves,
        "operations_per_second": {p: max(rates[p, shape] for shape in PRODUCTS) for p in PRECISIONS},
    }


PRECISIONS = ("default", "highest")
Timed = tuple[float, Callable[[float], float]]
"""The bytes or operations of a program, and a function from the seconds of a timing round to the program's seconds."""


def _product(precision: str, shape: tuple[int, int, int], dtype: str) -> Timed:
    m, k, n = shape
    a, b = (jax.random.normal(jax.random.key(i), size, dtype) for i, size in enumerate([(m, k), (k, n)]))
    program = jax.jit(functools.partial(jnp.matmul, precision=precision)).lower(a, b).compile()
    return 2 * m * k * n, lambda seconds: device_seconds(program, (a, b), seconds, 1)[0]


def _traffic(pool: Executor) -> dict[tuple[str, int], Future]:
    programs = {}
    for size in WORKING_SETS:
        calls = 1 if size > 256 * MIB else CALLS
        half, whole = (size // part // calls // 4 for part in (2, 1))  # float32
        programs["copy", size] = pool.submit(_chain, jnp.negative, calls, size, (half,))
        programs["read", size] = pool.submit(_chain, lambda x: x.reshape(-1, 1024).sum(1), calls, size, (whole,))
        programs["write", size] = pool.submit(_chain, functools.partial(jnp.full, whole), calls, size, ())
    return programs


def _chain(function: Callable, calls: int, size: int, shape: tuple[int, ...]) -> Timed:
    sets = tuple((jax.random.normal(jax.random.key(i), shape),) for i in range(calls))
    program = jax.jit(one_after_another(function, calls)).lower(sets).compile()
    return size, lambda seconds: device_seconds(program, (sets,), seconds, 1)[0]


def cost(workload: Workload, batch: int, dtype: str) -> Cost:
    """Count the operations and bytes of one call in the jaxpr of the implementation "autodiff"."""
    arguments = jax.eval_shape(lambda: workload.draw(0, batch, dtype))
    jaxpr = jax.make_jaxpr(workload.function("autodiff", dtype))(*arguments).jaxpr
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    given = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "optimization_barrier":
            given |= {b for a, b in zip(equation.invars, equation.outvars, strict=True) if a in given}
    results = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in given)
    return Cost(
        argument_bytes=_bytes(v.aval for v in jaxpr.invars),
        result_bytes=_bytes(v.aval for v in jaxpr.outvars),
        operations=round(workload.share * _operations(needed)),
        read_bytes=sum(_bytes_read(needed, v) for v in needed.invars),
        written_bytes=_bytes(v.aval for v in results),
        arithmetic=workload.arithmetic(batch),
    )


def _bytes(avals: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in avals)


def _bytes_read(jaxpr: Any, argument: Any) -> int:
    size, read = _bytes([argument.aval]), 0
    if any(v is argument for v in jaxpr.outvars):  # whatever uses this result reads the argument
        return size
    for equation in jaxpr.eqns:
        for i, v in enumerate(equation.invars):
            if v is not argument:
                continue
            (inner,) = jaxprs_in_params(equation.params) if equation.primitive.name == "jit" else (None,)
            if inner is not None:
                read += _bytes_read(inner, inner.invars[i])
            elif equation.primitive.name == "gather" and i == 0:
                read += _bytes(v.aval for v in equation.outvars)
            else:
                return size
    return min(read, size)


def _operations(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            x = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(x[axis] for axis in contracted)
        elif equation.primitive.name == "ragged_dot_general":
            numbers, groups = equation.params["ragged_dot_dimension_numbers"], equation.invars[2].aval.shape[0]
            (contracted, _), _ = numbers.dot_dimension_numbers
            x, y = equation.invars[0].aval.shape, equation.outvars[0].aval.size
            # If the rows are contracted, the result has an axis of the groups.
            terms = y if numbers.rhs_group_dimensions else y // groups
            total += 2 * terms * math.prod(x[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            total += 2 * _products_of_convolution(equation)
        else:
            times = equation.params.get("length", 1)  # the number of steps of a scan
            total += times * sum(map(_operations, jaxprs_in_params(equation.params)))
    return total


def _products_of_convolution(equation: Any) -> int:
    """Return the number of a convolution's multiplications. Padding and inserted zeros do not count."""
    (x, w), y, p = (v.aval.shape for v in equation.invars), equation.outvars[0].aval.shape, equation.params
    (n, _, *in_axes), (k, c, *w_axes), (_, _, *out_axes) = p["dimension_numbers"]
    products = x[n] // p["batch_group_count"] * w[k] * w[c]
    axes = zip(in_axes, w_axes, out_axes, strict=True)
    options = (p["window_strides"], p["padding"], p["lhs_dilation"], p["rhs_dilation"])
    for (i, f, o), stride, (before, _), spread, dilation in zip(axes, *options, strict=True):
        position = np.arange(y[o])[:, None] * stride + np.arange(w[f]) * dilation - before
        inside = (position >= 0) & (position <= (x[i] - 1) * spread) & (position % spread == 0)
        products *= int(inside.sum())
    return products


def has_launch(jaxpr: Any) -> bool:
    return any(
        equation.primitive.name == "launch" or any(map(has_launch, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )
