"""Compare the ops' results and gradients with float64, at several offsets and scales of their arguments."""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.output.results import finite, keep, provenance
from jaxbp.catalogue import Case, Entry
from jaxbp.verify.arguments import Arguments, bind, floats, take_apart
from jaxbp.verify.derivatives import float64, value_and_gradients

DTYPES = ("float32", "bfloat16", "float16")
OFFSETS = (0.0, 1.0, 1e2, 1e4, 1e5)
SCALES = (1e-4, 1e-2, 1.0, 10.0, 1e2, 1e4)
DRAWS = 32
NEARLY_ALL = 0.95
ALLOWED = 1.5
"""The largest allowed ratio of an implementation's error to autodiff's error."""
ROUNDINGS = {"float32": 8, "bfloat16": 2, "float16": 2}
"""A relative error of this number of roundings, ε/2 each, is always allowed."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A change of an op's random arguments: each value v becomes `offset + scale * v`.

    `argument` names the changed argument. "all" means all arguments except `dy`, weights, and integers.
    """

    offset: float
    scale: float
    argument: str = "all"


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Relative errors of one result or gradient of an op, at one offset and scale of its arguments.

    Errors are computed for each row, a vector along the last axis. `error`, `native`, and `excess` are 95% quantiles
    over the rows of all draws, or medians if autodiff is inaccurate.

    Attributes:
      result: such as "value 0", the op's first result, or "gradient in x".
      error: `‖a - e‖ / ‖e‖`, where a is a row of the implementation's result, and e is the same row in float64.
      native: the error of autodiff in `dtype`.
      excess: the error divided by the allowed error, or 0 if autodiff has no correct digit. The check fails above 1.
    """

    op: str
    dtype: str
    implementation: str
    result: str
    place: Place
    error: float
    native: float
    excess: float


def accuracy(
    entry: Entry,
    case: Case,
    implementations: Sequence[str] = ("pallas", "xla"),
    dtypes: Sequence[str] = DTYPES,
    offsets: Sequence[float] = OFFSETS,
    scales: Sequence[float] = SCALES,
    draws: int = DRAWS,
) -> Iterator[Accuracy]:
    """Draw an op's arguments `draws` times. Yield the errors of all results and gradients at all offsets and scales.

    Leave out an offset and scale if values overflow, or if values of an `Argument` with `apart=True` become equal.
    """
    arguments, drawn = _draw(entry, case, draws)
    names = arguments.float_names
    movable = [i for i, kind in enumerate(case.floats) if names[i] != "dy" and not kind.weights]
    apart = [i for i, kind in enumerate(case.floats) if kind.apart]
    # All movable arguments together, and each alone.
    alone = {names[i]: [i] for i in movable}
    moves = alone if len(movable) == 1 else {"all": movable} | alone

    def of_floats(implementation):
        return arguments.of_floats(bind(entry.function, implementation, case.options))

    def program(implementation):
        function = of_floats(implementation)
        run = value_and_gradients(function)

        def named(values, cotangents):
            try:
                results, gradients = run(values, cotangents)
            except NotImplementedError:  # autodiff of the gradients of `jax.lax.ragged_dot`
                results, gradients = function(*values), []
            named = {f"value {i}": a for i, a in enumerate(results)}
            return named | {f"gradient in {name}": a for name, a in zip(names, gradients, strict=bool(gradients))}

        def of_all(*arrays):
            # The outer axis is for the changes of the arguments, the inner axis for the draws.
            try:
                return jax.vmap(jax.vmap(named))(*arrays)
            except NotImplementedError:  # `vmap` of `jax.lax.ragged_dot` must also map the integers
                return jax.lax.map(functools.partial(jax.lax.map, lambda one: named(*one)), arrays)

        return jax.jit(of_all, compiler_options={"xla_allow_excess_precision": False})

    def moved(dtype):
        places, values = [], []
        for offset, scale, (name, which) in itertools.product(offsets, scales, moves.items()):
            at = [offset + scale * a if i in which else a for i, a in enumerate(drawn)]
            with np.errstate(over="ignore"):
                at = [a.astype(dtype) for a in at]
            differ = all(np.unique(a).size == a.size for i in apart for a in at[i].astype(np.float64))
            if differ and all(np.isfinite(a).all() for a in at):
                places.append(Place(offset, scale, name))
                values.append(at)
        return places, [np.stack(same) for same in zip(*values, strict=True)]

    def cotangents(dtype, places):
        random = np.random.default_rng(0)
        results = jax.eval_shape(of_floats("autodiff"), *arguments.floats)
        dy = [random.standard_normal((draws, *y.shape)).astype(dtype) for y in results]
        return [np.broadcast_to(a, (places, *a.shape)) for a in dy]

    def compare(dtype, implementation, places, *results):
        for result, (i, place) in itertools.product(results[1], enumerate(places)):
            if errors := _errors(dtype, *(of[result][i] for of in results)):
                yield Accuracy(entry.name, dtype, implementation, result, place, *errors)

    native, *programs = map(program, ("autodiff", *implementations))
    for dtype in dtypes:
        places, values = moved(dtype)
        arrays = values, cotangents(dtype, len(places))
        exact, reference = _in_float64(native, arrays), _numpy(native(*arrays))
        for implementation, run in zip(implementations, programs, strict=True):
            compared = functools.partial(compare, dtype, implementation, places, _numpy(run(*arrays)), reference, exact)
            found = list(compared(exact))
            if any(each.excess > 1 for each in found):
                found = compared(_in_float64(program("xla"), arrays))
            yield from found


def _draw(entry: Entry, case: Case, draws: int) -> tuple[Arguments, list[np.ndarray]]:
    """Return one draw of an op's arguments, and the floating arrays of all draws, each `(draws, *shape)`."""

    @jax.jit
    def draw():
        return case.draw(0), jax.vmap(lambda seed: floats(case.draw(seed)))(jnp.arange(draws))

    with jax.default_prng_impl("rbg"):
        arguments, values = draw()
    return take_apart(entry.function, arguments), _numpy(values)


def _in_float64(run, arrays):
    with float64():
        return _numpy(run(*_numpy(arrays)))


def _numpy(arrays):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), arrays)


def _errors(dtype, actual, native, exact, by_formula):
    """Return the `error`, `native`, and `excess` of `Accuracy` for one result or gradient.

    Return None if every element of `exact` is NaN, infinite, or too large for the dtype. A row's allowed error is
    `ALLOWED` times autodiff's error, or the error of `ROUNDINGS` if larger, plus `‖by_formula - exact‖`.

    Args:
      actual, native: the results of the implementation and of autodiff.
      exact: autodiff's float64 result.
      by_formula: the float64 result of "xla", or `exact` again.
    """
    limits = jnp.finfo(dtype)
    held = np.isfinite(exact) & (np.abs(exact) <= float(limits.max))
    if not held.any():
        return None
    size, error, of_native, unknown = (
        _norms(np.where(held, a, 0.0)) for a in (exact, actual - exact, native - exact, by_formula - exact)
    )
    least = ROUNDINGS[dtype] * float(limits.eps) / 2 * size + float(limits.tiny)
    excess = np.where(of_native < size, error / (np.maximum(ALLOWED * of_native, least) + unknown), 0.0)
    # Where autodiff is inaccurate, a few of its rows are right by chance, and give a large excess.
    quantile = NEARLY_ALL if np.quantile(of_native / least, NEARLY_ALL) <= 1 else 0.5
    size = np.where(size == 0, 1.0, size)
    return tuple(float(np.quantile(a, quantile)) for a in (error / size, of_native / size, excess))


def _norms(a):
    norms = np.linalg.norm(a.reshape(-1, a.shape[-1] if a.ndim > 1 else 1), axis=1)
    return np.where(np.isnan(norms), np.inf, norms)


QUICK = dict(offsets=(0.0, 1e2, 1e5), scales=(1e-4, 1.0, 1e4), draws=8)
"""Fewer locations and draws, for slow ops and for kernels without a GPU."""
SLOW = "conv1d", "conv2d", "dot_product_attention_backward"
"""Beginnings of the names of ops whose programs are slow on a CPU."""
MORE = 8
"""The factor for the number of draws when a too large error is measured again."""
FULL = dict(offsets=OFFSETS, scales=SCALES, draws=DRAWS)


def measure(
    entries: Sequence[Entry],
    implementations: Sequence[str],
    dtypes: Sequence[str],
    command: str,
    console: Console,
    path: Path | None = None,
) -> bool:
    """Print and save each op's worst error per dtype and implementation. Return whether all errors are allowed.

    Do not repeat measurements that the file `path` has with an allowed error.
    """
    report = {**provenance(command), "passed": True, "rows": _kept(path)}
    done = {(row["op"], row["dtype"], row["implementation"]) for row in report["rows"]}
    without_gpu = jax.default_backend() != "gpu"
    for entry in entries:
        table = Table("op", "dtype", "implementation", "locations", "worst", "error", "autodiff error", "% of allowed")
        for implementation in implementations:
            slow = without_gpu and (implementation == "pallas" or entry.name.startswith(SLOW))
            places = QUICK if slow else FULL
            start = time.perf_counter()
            taken = [dtype for dtype in dtypes if implementation != "pallas" or dtype in entry.kernel_dtypes]
            taken = [dtype for dtype in taken if (entry.name, dtype, implementation) not in done]
            if not taken:
                continue
            found = _found(entry, implementation, taken, **places)
            seconds = time.perf_counter() - start
            for dtype in taken:
                row = worst([each for each in found if each.dtype == dtype], places["draws"])
                report["rows"].append(row | {"seconds": round(seconds / len(taken), 2)})
                table.add_row(entry.name, dtype, implementation, *cells(row))
        if table.row_count:
            console.print(table)
        report["passed"] = all(row["excess"] <= 1 for row in report["rows"])
        keep(report, path)
    return report["passed"]


def _kept(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["excess"] <= 1]


def _found(entry: Entry, implementation: str, dtypes: Sequence[str], offsets, scales, draws: int) -> list[Accuracy]:
    run = functools.partial(accuracy, entry, entry.small, (implementation,))
    found = []
    for each in run(dtypes, offsets, scales, draws):
        if each.excess > 1:
            place = each.place
            again = run((each.dtype,), (place.offset,), (place.scale,), MORE * draws)
            (each,) = (a for a in again if (a.place, a.result) == (place, each.result))
        found.append(each)
    return found


def worst(found: Sequence[Accuracy], draws: int) -> dict[str, Any]:
    most = max(found, key=lambda each: each.excess)
    row = dataclasses.asdict(most) | {"places": len({each.place for each in found}), "draws": draws}
    return finite(row, lambda infinite: 1e300)  # larger than any finite error


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    place = row["place"]
    where = f"{row['result']}, {place['offset']:g} + {place['scale']:g} {place['argument']}"
    return str(row["places"]), where, f"{row['error']:.1e}", f"{row['native']:.1e}", f"{row['excess']:.0%}"
