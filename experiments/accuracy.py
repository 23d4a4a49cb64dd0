"""Compare the ops' results and gradients with float64, at several offsets and scales of their arguments."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.catalogue import Case, Entry
from jaxbp.verify.arguments import bind, is_float, take_apart
from jaxbp.verify.derivatives import float64

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
    cases: Mapping[str, tuple[Entry, Case]],
    implementations: Sequence[str] = ("pallas", "xla"),
    dtypes: Sequence[str] = DTYPES,
    offsets: Sequence[float] = OFFSETS,
    scales: Sequence[float] = SCALES,
    draws: int = DRAWS,
) -> Iterator[Accuracy]:
    """Draw each op's arguments `draws` times. Yield the errors of all results and gradients at all offsets and scales.

    Leave out an offset and scale if values overflow, or if values of an `Argument` with `apart=True` become equal.
    """
    drawn = _draw(cases, draws)
    native, *programs = (_program(drawn, implementation) for implementation in ("autodiff", *implementations))
    for dtype in dtypes:
        places, arrays = {}, {}
        for name, each in drawn.items():
            places[name], values = each.moved(offsets, scales, dtype)
            arrays[name] = values, each.cotangents(dtype, len(places[name]))
        exact, reference = _in_float64(native, arrays), _numpy(native(arrays))
        for implementation, run in zip(implementations, programs, strict=True):
            actual = _numpy(run(arrays))
            for name in cases:
                compared = functools.partial(_compared, dtype, places[name], actual[name], reference[name], exact[name])
                found = compared(exact[name])
                if any(errors.excess > 1 for *_, errors in found):
                    by_formula = _in_float64(_program({name: drawn[name]}, "xla"), {name: arrays[name]})
                    found = compared(by_formula[name])
                for result, place, errors in found:
                    yield Accuracy(name, dtype, implementation, result, place, *errors)


def _program(drawn, implementation):
    def run(arrays):
        return {name: jax.vmap(jax.vmap(each.function(implementation)))(*arrays[name]) for name, each in drawn.items()}

    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def _compared(dtype, places, *results):
    found = []
    for result, (i, place) in itertools.product(results[0], enumerate(places)):
        errors = _errors(dtype, *(of[result][i] for of in results))
        if errors is not None:
            found.append((result, place, errors))
    return found


def _in_float64(run, arrays):
    with float64():
        return _numpy(run(_numpy(arrays)))


def _numpy(arrays):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), arrays)


def _draw(cases, draws):
    @jax.jit
    def draw():
        seeds = jnp.arange(draws)
        floats = lambda case, seed: [a for a in jax.tree.leaves(case.draw(seed)) if is_float(a)]  # noqa: E731
        return {
            name: (case.draw(0), jax.vmap(functools.partial(floats, case))(seeds)) for name, (_, case) in cases.items()
        }

    with jax.default_prng_impl("rbg"):
        return {name: _Drawn(*cases[name], arguments, _numpy(values)) for name, (arguments, values) in draw().items()}


class _Drawn:
    def __init__(self, entry: Entry, case: Case, arguments: Sequence, values: Sequence[np.ndarray]):
        self.entry, self.case, self.values = entry, case, values
        self.arguments = take_apart(entry.function, arguments)
        named = list(zip(self.arguments.float_names, case.floats, strict=True))
        self.movable = [i for i, (name, kind) in enumerate(named) if name != "dy" and not kind.weights]
        self.apart = [i for i, kind in enumerate(case.floats) if kind.apart]

    def function(self, implementation: str):
        function = self._of_floats(implementation)

        def named(values, cotangents):
            results, vjp = jax.vjp(function, *values)
            named = {f"value {i}": a for i, a in enumerate(results)}
            gradients = zip(self.arguments.float_names, vjp(list(cotangents)), strict=True)
            return named | {f"gradient in {name}": a for name, a in gradients}

        return named

    def _of_floats(self, implementation: str):
        return self.arguments.of_floats(bind(self.entry.function, implementation, self.case.options))

    def moved(self, offsets, scales, dtype):
        """Shift and scale the `movable` arguments: all together, and each alone.

        Return one `Place` per change, and all arguments after the changes, each `(places, draws, *shape)`. `accuracy`
        says which changes are left out.
        """
        moves = [(i,) for i in self.movable] if len(self.movable) > 1 else []
        places, values = [], []
        for offset, scale, which in itertools.product(offsets, scales, (tuple(self.movable), *moves)):
            at = [offset + scale * a if i in which else a for i, a in enumerate(self.values)]
            with np.errstate(over="ignore"):
                at = [a.astype(dtype) for a in at]
            if all(np.isfinite(a).all() for a in at) and all(_differ(at[i]) for i in self.apart):
                name = self.arguments.float_names[which[0]] if len(which) == 1 else "all"
                places.append(Place(offset, scale, name))
                values.append(at)
        return places, [np.stack(same) for same in zip(*values, strict=True)]

    def cotangents(self, dtype, places):
        results = jax.eval_shape(self._of_floats("autodiff"), *self.arguments.floats)
        random = np.random.default_rng(0)
        drawn = [random.standard_normal((len(self.values[0]), *y.shape)).astype(dtype) for y in results]
        return [np.broadcast_to(a, (places, *a.shape)) for a in drawn]


def _differ(values):
    return all(np.unique(a).size == a.size for a in values.astype(np.float64))


class _Errors(NamedTuple):
    error: float
    native: float
    excess: float


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
    return _Errors(*(float(np.quantile(a, quantile)) for a in (error / size, of_native / size, excess)))


def _norms(a):
    norms = np.linalg.norm(a.reshape(-1, a.shape[-1] if a.ndim > 1 else 1), axis=1)
    return np.where(np.isnan(norms), np.inf, norms)
