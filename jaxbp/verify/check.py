"""Compare a backward with finite differences, element by element.

The gradients of every implementation are computed as a user gets them, in the dtype of the arguments. They are compared
with gradients that are computed in float64 from the same numbers, by the implementation that JAX differentiates,
confirmed by differences. So a float32 kernel, which does not take float64, is held to the tolerance of float32, not of
differences in float32. `jaxbp.verify.judge` says what is a mistake.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify import points as at
from jaxbp.verify.arguments import (
    Arguments,
    is_float,
    name_of,
    require_function,
    require_several,
    take_apart,
    takes_implementation,
    without_other_implementations,
)
from jaxbp.verify.derivatives import flat, scale_of
from jaxbp.verify.interpreter import without_custom_rules
from jaxbp.verify.judge import Judge, Tolerance, within
from jaxbp.verify.points import ADDED, OWN, Point
from jaxbp.verify.programs import Programs
from jaxbp.verify.progress import Progress
from jaxbp.verify.reference import Expected, Reference
from jaxbp.verify.report import NOT_FLOATING, CheckResult, CheckRow

TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(rtol=1e-2, atol=1e-4, step=1e-3),
    "bfloat16": Tolerance(rtol=2e-2, atol=1e-3, step=1e-3),
    "float32": Tolerance(rtol=1e-4, atol=1e-7, step=None),
    "float64": Tolerance(rtol=1e-7, atol=1e-10, step=1e-7),
}
"""The tolerance of each dtype."""
ORDERS = (1, 2, 3)
MOST_KINKS = 16
"""Constants of a program that are tried as kinks."""
MOST_ELEMENTS, WORK = (64, 10_000), 2**23
"""By default so many elements per argument are moved that this times the numbers in the arguments is `WORK`, within
these bounds."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `check` that say what is tried."""

    implementations: Sequence[Implementation]
    order: int
    kinks: Sequence[float]
    kink_convention: bool
    added: Sequence[str]
    tolerances: Mapping[str, Tolerance]
    most_elements: int | None
    seed: int
    gradient_of: Callable | None


def check(
    op: Callable,
    *args: Any,
    implementations: Sequence[Implementation] | None = None,
    order: int = 2,
    kinks: Sequence[float] = (0.0,),
    kink_convention: bool = True,
    added: Sequence[str] = ADDED,
    cases: Sequence[Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]]] = (),
    tolerances: Mapping[str, Tolerance] = TOLERANCES,
    most_elements: int | None = None,
    gradient_of: Callable | None = None,
    seed: int = 0,
    **options: Any,
) -> CheckResult:
    """Compare the backward of `op(*args, **options)` with finite differences, in every implementation.

    - Order 0: the value, as it comes out while differentiating, is that of the plain forward in float64.
    - Order 1: the gradient of `Σ c y`, c random, is that of the plain forward in float64: JAX's, confirmed by central
      differences, one element after the other. Where two steps of a difference agree with each other and not with JAX,
      the difference is right. Where they cannot tell, at a kink or where something is infinite, JAX's stands.
    - Orders 2 and 3: the gradient of `Σ c (y + y²/2)` differentiated along random directions, likewise confirmed.

    Values and gradients are also computed outside `jit`, under `vmap` and `jax.checkpoint`, and with one array given as
    all arguments of its shape. Gradients are also compared with JAX's on data of the same shapes, as `added` names it:

    - "cotangents": dy times -30, and dy with zeros.
    - "kinks": `kinks`, and the numbers in the program of the forward, such as bounds, in each argument; -0 and
      subnormal numbers.
    - "ties": few numbers, each many times. "zeros": zeros only. "large": numbers up to 300, one argument at a time.
    - "dtypes": the user's data and large numbers in bfloat16 and float16, or in float32 for data in these.

    An implementation that fails on the user's data is not tried on more. Arguments stay in their range: positive ones
    positive, those in [0, 1] there, and rows that sum to 1 unchanged. An op that needs more of its arguments, say
    sorted ones, is checked with `added=("cotangents",)`.

    Products of float32 are exact in a check, whatever JAX's default precision. A number beyond the tolerance is wrong
    only if JAX's own differentiation in the same dtype is not as far off, and if there is no kink within rounding of
    the data. If the forward computes in a narrower dtype than its arguments, its tolerance is the narrower dtype's, and
    the reference computes the same program in float64. An argument of `stop_gradient` counts as a constant.

    Args:
      op: a `Pair`, an `Op`, or a function with `implementation=`; or one without, which is checked as it is.
      args: its arguments, arrays or pytrees of arrays. Those without gradients, such as integers, are skipped. NumPy's
        float64 arrays stay float64, whether or not JAX's 64-bit mode is on.
      implementations: those to check; by default all. One that does not take the arguments is skipped with the reason.
      order: 1 for values and gradients only, which takes the least time, 2 or 3.
      kinks: values at which the op may have a kink.
      kink_convention: whether the op has autodiff's slope at a kink; if not, any between the two sides passes there.
      added: data to check besides the user's.
      cases: more to check: other options, `{"stride": 2}`, or other arguments with their options, `((x, w), {})`.
      tolerances: by dtype. Arguments of other dtypes are skipped.
      most_elements: how many elements per argument are moved, evenly spread; the others are compared with autodiff. By
        default as many as take a few seconds. The row says how many.
      gradient_of: a function of the same arguments and options whose derivative the backward must have, for gradients
        that are not the forward's: `check(round_straight_through, x, gradient_of=lambda x: x)`. Then the order is 1,
        and "autodiff", which has the forward's derivative, is not checked.
      seed: seed of what is random. The check has a stream of its own, whatever the data was drawn from.
      options: options of the op.

    Returns:
      A `CheckResult`, true if nothing failed. What JAX cannot compute is "inconclusive", or skipped with the reason.

    Raises:
      ValueError, TypeError: arguments that the op does not take, an order other than 1, 2 and 3, no floating argument
        or result, a result that is no array, an op that has no forward in float64, a side effect in a trace, or a
        `gradient_of` with results of other shapes.
    """
    if order not in ORDERS:
        raise ValueError(f"check: order is {order!r}; wants 1, 2 or 3")
    if unknown := set(added) - set(ADDED):
        raise ValueError(f"check: added has {', '.join(map(repr, sorted(unknown)))}; wants some of {', '.join(ADDED)}")
    require_function("check", "op", op)
    if gradient_of is not None:
        require_function("check", "gradient_of", gradient_of)
    require_several("check", "implementations", implementations)
    op = without_other_implementations(op, args, options)
    if implementations is None:
        implementations = IMPLEMENTATIONS if takes_implementation(op) else (None,)
    if gradient_of is not None:
        implementations, order = [name for name in implementations if name != "autodiff"], 1
    settings = Settings(
        implementations, order, kinks, kink_convention, added, tolerances, most_elements, seed, gradient_of
    )
    rows, notes = [], []
    with Progress(name_of(op)) as progress:
        for case, arguments, changed in _cases(op, args, options, cases):
            try:
                for row in _rows(op, arguments, changed, settings, notes):
                    rows.append(dataclasses.replace(row, case=case))
                    progress.show(f"{row.dtype}, order {row.order}, {row.data}")
            except jax.errors.UnexpectedTracerError as error:
                raise TypeError(
                    f"check: {name_of(op)} keeps an array from one trace for another; wants a function without side "
                    "effects"
                ) from error
    return CheckResult(tuple(rows), _untried(rows, options, cases, added), tuple(dict.fromkeys(notes)))


def _cases(op, args, options, cases) -> Iterator[tuple[str, Arguments, Mapping[str, Any]]]:
    """Yield the user's arguments and options, then the other cases, each once, with its name."""
    arguments = take_apart(op, args)
    yield "", arguments, options
    seen = [(args, {**options})]
    for case in cases:
        other, changed = (args, {**options, **case}) if isinstance(case, Mapping) else case
        if any(other is known and changed == known_options for known, known_options in seen):
            continue
        seen.append((other, changed))
        taken = arguments if other is args else take_apart(op, other)
        name = [f"{key}={value}" for key, value in changed.items()]
        name += [] if other is args else [f"arguments of {_shapes(taken)}"]
        yield ", ".join(name), taken, changed


def _rows(
    op: Callable, arguments: Arguments, options: Mapping[str, Any], settings: Settings, notes: list[str]
) -> Iterator[CheckRow]:
    """Yield what is found of one case."""
    if not arguments.floats:
        raise ValueError(f"check: {name_of(op)} has no floating argument; wants at least one, to differentiate in")
    dtypes = [a.dtype for a in arguments.floats]
    if unknown := [dtype.name for dtype in dtypes if dtype.name not in settings.tolerances]:
        for implementation in settings.implementations:
            row = functools.partial(CheckRow, name_of(op), implementation, unknown[0], "all", 1, "", "skipped")
            yield row(reason=f"there is no tolerance for {unknown[0]}", data=unknown[0])
        return
    wide = np.float64 in dtypes
    with jax.default_matmul_precision("highest"), jax.enable_x64(wide or jax.config.jax_enable_x64):
        reference, random = Reference(op, arguments, options, settings.gradient_of), at.generator(settings.seed)
        notes += [reference.note] if reference.note else []
        own = Point(
            OWN,
            [np.asarray(a, np.float64) for a in arguments.floats],
            [at.normal(random, y.shape, y.dtype) for y in reference.results],
        )
        directions = [
            [at.normal(random, a.shape, a.dtype) * scale_of(np.asarray(a, np.float64)) for a in arguments.floats]
            for _ in range(settings.order - 1)
        ]
        study = _Study(op, arguments, options, settings, reference, directions)
        constants = sorted({s * c for c in reference.constants for s in (1, -1)}, key=abs)[:MOST_KINKS]
        kinks = tuple(dict.fromkeys((*settings.kinks, *constants))) if settings.kinks else ()
        tried = list(at.points(own, reference.names, kinks, settings.added, random))
        large = at.everywhere_large(own, random)
        tried += [at.with_one_array(own, same, study.same_name(same)) for same in study.same]
        tried = [point.rounded(dtypes, [y.dtype for y in reference.results]) for point in tried]
        orders = [(own, order) for order in range(2, settings.order + 1)]
        expected, failed = study.expected(tried, orders)
        for implementation in settings.implementations:
            programs, found = study.programs(implementation), []
            for row in study.of_implementation(programs, expected, failed, tried[0], tried):
                found.append(row)
                yield row
            if not _is_broken(found) and "dtypes" in settings.added and len(set(dtypes)) == 1:
                for dtype in ("float32",) if dtypes[0].itemsize == 2 else ("bfloat16", "float16"):
                    yield from study.in_dtype(programs, dtype, (own, large))


class _Study:
    """One case of a check: the reference, and what each implementation is compared with.

    Attributes:
      native: the implementation that JAX differentiates; for a function with custom rules, the function without them;
        None if that cannot be differentiated.
      same: groups of arguments that can be one array, by their numbers among the floating arguments.
    """

    def __init__(self, op, arguments, options, settings, reference, directions):
        self.op, self.arguments, self.options, self.settings = op, arguments, options, settings
        self.reference, self.directions = reference, directions
        self.steps = [settings.tolerances[a.dtype.name].step for a in arguments.floats]
        size = sum(a.size for a in arguments.floats) + sum(y.size for y in reference.results)
        least, most = MOST_ELEMENTS
        self.most = settings.most_elements or max(least, min(most, WORK // max(1, size)))
        groups = {}
        for i, a in enumerate(arguments.floats):
            groups.setdefault((a.shape, a.dtype), []).append(i)
        self.same = [group for group in groups.values() if len(group) > 1 and arguments.floats[group[0]].size]
        self.native = self._native()
        self._computed_in = functools.cache(lambda *dtypes: self._narrowed(dtypes))

    def _native(self):
        reference = self.reference
        if self.settings.gradient_of is not None:
            return Programs(self.op, self.arguments, self.options, None, change=lambda _: reference.function)
        if reference.independent:
            implementation = "autodiff" if takes_implementation(self.op) else None
            return Programs(self.op, self.arguments, self.options, implementation)
        return Programs(
            self.op, self.arguments, self.options, None, change=lambda _: without_custom_rules(reference.function)
        )

    def programs(self, implementation: Implementation) -> Programs:
        independent = self.reference.independent and self.settings.gradient_of is None
        if independent and implementation == self.native.implementation:
            return self.native
        return Programs(self.op, self.arguments, self.options, implementation)

    def same_name(self, same: Sequence[int]) -> str:
        return f"{' = '.join(self.reference.names[i] for i in same)}"

    def judge(self, dtype: str | None = None) -> Judge:
        dtypes = [jnp.dtype(dtype or a.dtype) for a in self.arguments.floats]
        native = self.native and self.native.in_dtype(dtype) if dtype else self.native
        settings = self.settings
        return Judge(
            self.reference,
            native,
            settings.tolerances,
            self.directions,
            settings.kink_convention,
            self._computed_in(*dtypes),
        )

    def _narrowed(self, dtypes):
        """The dtype that the forward computes in, if it has less precision than all of its arguments."""
        try:
            narrow = self.reference.computed_in(dtypes)
        except Exception:  # the function does not take the dtype; `in_dtype` says so
            return None
        eps = lambda dtype: float(jnp.finfo(dtype).eps)  # noqa: E731
        return narrow if narrow is not None and eps(narrow) > max(map(eps, dtypes)) else None

    def at(self, point: Point) -> Expected:
        """Return the gradients at a point of added data. Those of a backward with custom rules are confirmed there."""
        if not self.reference.independent:
            return self.reference.first_orders(point.values, point.cotangents, self.steps, self.most)[1]
        _, gradients = self.reference.value_and_gradients(point.values, point.cotangents)
        return Expected(1, "autodiff", gradients, [np.zeros(g.shape, bool) for g in gradients])

    def expected(
        self, points: Sequence[Point], orders: Sequence[tuple[Point, int]]
    ) -> tuple[list[tuple[Point, Expected]], list[tuple[Point, int, Exception]]]:
        """Return what is expected at each point, the first of which is the user's, and what cannot be computed."""
        own, *added = points
        found, failed = [], []
        confirm = lambda: self.reference.first_orders(own.values, own.cotangents, self.steps, self.most)  # noqa: E731
        higher = lambda point, order: self.reference.higher(order, point.values, point.cotangents, self.directions)  # noqa: E731
        tasks = [(own, 1, confirm)]
        tasks += [(point, order, functools.partial(higher, point, order)) for point, order in orders]
        tasks += [(point, 1, functools.partial(self.at, point)) for point in added]
        for point, order, compute in tasks:
            try:
                result = compute()
                found += [(point, e) for e in (result if isinstance(result, tuple) else (result,))]
            except jax.errors.UnexpectedTracerError:
                raise
            except Exception as error:  # a program can raise anything
                failed.append((point, order, error))
        return found, failed

    def of_implementation(self, programs, expected, failed, own, points) -> Iterator[CheckRow]:
        """Yield what is found of everything that is expected, and what is not checked."""
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation)
        dtype = self.arguments.floats[0].dtype.name
        try:
            jax.eval_shape(programs.function, *programs.arguments.floats)
        except NotImplementedError as error:
            yield row(dtype, "all", 1, "", "skipped", reason=_one_line(error))
            return
        for point, order, error in failed:
            # A backward with custom rules is a part of the reference. It is wrong if JAX can do without it.
            wrong = not self.reference.independent and order == 1 and self._can(self.native, order, point)
            verdict = "failed" if wrong else "inconclusive"
            yield row(dtype, "all", order, "", verdict, reason=_named(error), data=point.name)
        judge, found = self.judge(), []
        for checked in self.compared(programs, judge, expected):
            found.append(checked)
            yield checked
        if not _is_broken(found):
            yield from self.transformed(programs, judge, own, points)
        for name, a in zip(programs.arguments.names, programs.arguments.leaves, strict=True):
            if not is_float(a):
                yield row(str(a.dtype), name, 1, "", "skipped", reason=NOT_FLOATING)

    def in_dtype(self, programs: Programs, dtype: str, points: Sequence[Point]) -> Iterator[CheckRow]:
        """Yield what is found of data in another dtype, or why it is not tried."""
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation, dtype, "all", 1, "", "skipped")
        own = points[0]
        if dtype not in self.settings.tolerances:
            yield row(reason="there is no tolerance", data=dtype)
            return
        changed, judge = programs.in_dtype(dtype), self.judge(dtype)
        reason = None
        try:
            results = [y.dtype for y in jax.eval_shape(changed.function, *changed.arguments.floats)]
            if self._can(self.native, 1, own):
                judge.native.results(1, own.values, own.cotangents, self.directions)
            if not takes_implementation(self.op):  # what fails was not asked for
                changed.results(1, own.values, own.cotangents, self.directions)
        except Exception as error:  # a primitive can raise anything for a dtype that it does not take
            reason = _named(error)
        if reason is not None:
            yield row(reason=reason, data=dtype)
            return
        rounded = [p.rounded([jnp.dtype(dtype)] * len(self.arguments.floats), results) for p in points]
        yield from self.compared(changed, judge, [(p, self.at(p)) for p in rounded])

    def compared(self, programs, judge, expected) -> Iterator[CheckRow]:
        """Yield what is found at each point. If the user's data fails, no added data is tried."""
        row, found = functools.partial(CheckRow, name_of(self.op), programs.implementation), []
        for point, e in expected:
            if point.name != OWN and _is_broken(found):
                return
            names = self.reference.names if e.order else self.reference.result_names
            try:
                actual = programs.results(e.order, point.values, point.cotangents, judge.directions)
                for i, (name, a) in enumerate(zip(names, actual, strict=True)):
                    if point.of is None or point.of == i or e.order == 0:
                        verdict = judge.verdict(point, e, i, a, programs)
                        found.append(row(a.dtype.name, name, e.order, e.against, data=point.name, **verdict))
                        yield found[-1]
            except Exception as error:  # a wrong backward can raise anything
                verdict = "failed" if programs is not self.native else "inconclusive"
                dtype = programs.arguments.floats[0].dtype.name
                yield row(dtype, "all", e.order, "", verdict, reason=_named(error), data=point.name)
                return

    def transformed(self, programs, judge, own, points) -> Iterator[CheckRow]:
        """Yield whether values and gradients are the same outside `jit`, under transformations, and with one array."""
        half = at.halved(own).rounded([a.dtype for a in self.arguments.floats], programs.result_dtypes())
        both = [own, half]
        batch = [(p.values, self._cotangents(programs, p)) for p in both]
        runs = [("outside jit", both[:1], lambda p: [p.outside_jit(*batch[0])])]
        vmapped = lambda vmap, remat: lambda p: p.vmapped(batch, vmap, remat)  # noqa: E731
        runs.append(("vmap of remat", both, vmapped(True, True)))
        for name, where, run in runs:
            rows = list(self._same(programs, judge, name, where, run))
            if name == "vmap of remat" and any(row.verdict != "ok" for row in rows):
                alone = [("vmap", vmapped(True, False)), ("remat", vmapped(False, True))]
                apart = [row for name, run in alone for row in self._same(programs, judge, name, where, run)]
                rows = apart if any(row.verdict != "ok" for row in apart) else rows
            yield from rows
        for same in self.same:
            (point,) = [p for p in points if p.name == self.same_name(same)]
            run = functools.partial(
                self._with_one_array, same=same, cotangents=self._cotangents(programs, point), point=point
            )
            yield from self._same(programs, judge, f"{point.name}, one array", [point], run, same)

    def _with_one_array(self, programs, same, cotangents, point):
        y, gradient = programs.with_one_array(point.values, cotangents, same)
        return [[*y, gradient]]

    def _cotangents(self, programs, point):
        return [c.astype(dtype) for c, dtype in zip(point.cotangents, programs.result_dtypes(), strict=True)]

    def _same(self, programs, judge, name, where, run, same=()) -> Iterator[CheckRow]:
        """Yield a row for each array that is neither what `jit` gives nor what is expected, or one row for all.

        With `same`, the gradient is with respect to one array, and is the sum over these arguments.
        """
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation)
        dtype = self.arguments.floats[0].dtype.name
        try:
            found = run(programs)
        except Exception as error:  # a wrong backward can raise anything
            native = self.native if self._can(self.native, 1, where[0]) else None
            try:
                able = native is not None and native is not programs and run(native) is not None
            except Exception:
                able = False
            verdict = "failed" if able and not isinstance(error, NotImplementedError) else "skipped"
            yield row(dtype, "all", 1, "", verdict, reason=_named(error), data=name)
            return
        try:
            wrong = list(self._differing(programs, judge, name, where, found, same))
        except Exception as error:
            yield row(dtype, "all", 1, "", "inconclusive", reason=_named(error), data=name)
            return
        yield from wrong or [row(dtype, "all", 1, "jit", "ok", elements=sum(flat(a).size for a in found), data=name)]

    def _differing(self, programs, judge, name, where, found, same):
        reference = self.reference
        for point, arrays in zip(where, found, strict=True):
            settings = point.values, point.cotangents, self.directions
            jitted = [programs.results(order, *settings) for order in (0, 1)]
            if same:
                jitted[1] = [sum(np.asarray(jitted[1][i], np.float64) for i in same)]
            count, expected = len(reference.results), None
            for k, (a, j) in enumerate(zip(arrays, itertools.chain(*jitted), strict=True)):
                if within(a, j, self.settings.tolerances[a.dtype.name]):
                    continue
                expected = expected or reference.value_and_gradients(point.values, point.cotangents)
                order, i = (0, k) if k < count else (1, k - count)
                wanted = [sum(expected[1][i] for i in same)] if order and same else expected[order]
                e = Expected(order, "autodiff", wanted, [np.zeros(w.shape, bool) for w in wanted])
                verdict = judge.verdict(point, e, i, a, programs)
                names = reference.names if order else reference.result_names
                argument = point.name if order and same else names[i]
                yield CheckRow(
                    name_of(self.op), programs.implementation, a.dtype.name, argument, order, "autodiff",
                    data=name, **verdict,
                )  # fmt: skip

    def _can(self, programs: Programs | None, order: int, point: Point) -> bool:
        """Whether programs give an order at a point."""
        try:
            return programs.results(order, point.values, point.cotangents, self.directions) is not None
        except Exception:  # a program can raise anything
            return False


def _is_broken(rows: Sequence[CheckRow]) -> bool:
    """Whether a value or a gradient is wrong on the user's data."""
    return any(row.verdict == "failed" and row.data == OWN and row.order < 2 for row in rows)


def _untried(rows, options, cases, added) -> str:
    missing = [name for name in ADDED if name not in added]
    tried = {row.dtype for row in rows if row.verdict != "skipped"}
    missing += [dtype for dtype in TOLERANCES if dtype not in tried and not any(row.data == dtype for row in rows)]
    if broken := {row.implementation for row in rows if _is_broken([row])} - {None}:
        missing.append(f"added data for {', '.join(sorted(broken))}, which fails on the user's")
    elif any(_is_broken([row]) for row in rows):
        missing.append("added data, because the user's fails")
    if not cases:
        given = f" than {', '.join(f'{name}={value!r}' for name, value in options.items())}" if options else ""
        missing += [f"other options{given}" if options else "options", "other shapes (cases=)"]
    return ", ".join(missing)


def _shapes(arguments: Arguments) -> str:
    return ", ".join("×".join(map(str, a.shape)) or "scalar" for a in arguments.floats)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
