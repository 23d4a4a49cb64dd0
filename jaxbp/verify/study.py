"""The rows of `check` for an op with one set of arguments and options.

The user's data and added data are points (`points`). At each point, `Programs` computes the results and gradients of an
implementation, `Reference` the expected numbers, and `Judge` the verdict on their differences.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress

from jaxbp.pairing import Implementation
from jaxbp.verify import points as at
from jaxbp.verify.arguments import Arguments, is_float, name_of, takes_implementation
from jaxbp.verify.judge import NOT_FINITE, Judge, Tolerance, close
from jaxbp.verify.points import LEVELS, LEVELS_OF_SEVERAL, USER_DATA, Point
from jaxbp.verify.programs import WRAPPERS, Programs
from jaxbp.verify.reference import Expected, Reference
from jaxbp.verify.report import NOT_FLOATING, CheckRow

MOST_ELEMENTS, WORK, MOST_NUMBERS, MOST_KINKS = (64, 10_000), 2**23, 2**22, 16
MOST_OF_RULE = 600
"""Characters of JAX's error about a custom rule, which ends with the shapes."""


class Settings(NamedTuple):
    """The arguments of `check` that do not depend on the case."""

    implementations: Sequence[Implementation]
    order: int
    kinks: Sequence[float]
    kink_convention: bool
    added: Sequence[str]
    tolerances: Mapping[str, Tolerance]
    most_elements: int | None
    seed: int
    gradient_of: Callable | None
    progress: Progress


class Study:
    """The check of an op with one set of arguments and options.

    Attributes:
      autodiff: the programs of the forward and its gradients, without custom rules.
      is_autodiff: whether `autodiff` is an implementation of the op.
    """

    def __init__(self, op: Callable, arguments: Arguments, options: Mapping[str, Any], settings: Settings):
        self.op, self.arguments, self.options, self.settings = op, arguments, options, settings
        self.reference = reference = Reference(op, arguments, options, settings.gradient_of)
        self.name, self.dtype = name_of(op), arguments.dtypes[0].name
        self.steps = [settings.tolerances[dtype.name].step for dtype in arguments.dtypes]
        self.size = sum(a.size for a in arguments.floats) + sum(y.size for y in reference.results)
        least, most = MOST_ELEMENTS
        self.most = settings.most_elements or max(least, min(most, WORK // max(1, self.size)))
        self.is_autodiff = reference.independent and settings.gradient_of is None
        implementation = "autodiff" if self.is_autodiff and takes_implementation(op) else None
        function = None if self.is_autodiff else reference.plain
        self.autodiff = Programs(op, arguments, options, implementation, function)
        self._at_integers = {}

    def rows(self) -> list[CheckRow]:
        """Compare all implementations on the user's data and on added data."""
        settings, arguments, reference = self.settings, self.arguments, self.reference
        random, added = at.generator(settings.seed), settings.added
        values, results = [np.asarray(a, np.float64) for a in arguments.floats], reference.results
        cotangents = [at.normal(random, y.shape, y.dtype) for y in results]
        directions = [
            [at.direction(random, a, dtype) for a, dtype in zip(values, arguments.dtypes, strict=True)]
            for _ in range(settings.order - 1)
        ]
        own = Point(USER_DATA, values, cotangents, directions)
        constants = sorted({s * c for c in reference.constants for s in (1, -1)}, key=abs)[:MOST_KINKS]
        kinks = tuple(dict.fromkeys((*settings.kinks, *constants))) if settings.kinks else ()
        half = any(y.dtype == np.float16 for y in results)
        points = list(at.points(own, reference.names, kinks, added, half, random))
        large = at.each(own, "large", lambda a: at.large(a, random))
        groups = {}
        for i, a in enumerate(arguments.floats):
            groups.setdefault((a.shape, a.dtype), []).append(i)
        alike = [group for group in groups.values() if len(group) > 1 and arguments.floats[group[0]].size]
        points += [at.with_one_array(own, same, reference.names) for same in alike]
        points = [point.rounded(arguments.dtypes, [y.dtype for y in results]) for point in points]
        of_one = list(zip(alike, points[len(points) - len(alike) :], strict=True))
        expected, failed = self._expected(own, points)
        integers = "integers" in added and settings.gradient_of is None
        integers = list(at.other_integers(arguments.integers, random)) if integers else []
        dtypes = ("float32",) if arguments.dtypes[0].itemsize == 2 else ("bfloat16", "float16")
        dtypes = dtypes if "dtypes" in added and len(set(arguments.dtypes)) == 1 else ()
        rows = []
        for implementation in settings.implementations:
            programs = self._programs(implementation)
            found = self._of_implementation(programs, expected, failed, points[0], of_one, integers)
            rows += found
            for dtype in () if any(map(is_broken, found)) else dtypes:
                rows += self._in_dtype(programs, dtype, (own, large))
        return rows

    def _programs(self, implementation):
        if self.is_autodiff and implementation == self.autodiff.implementation:
            return self.autodiff
        return Programs(self.op, self.arguments, self.options, implementation)

    def _expected(self, own, points):
        """Return pairs of a point and a tuple of `Expected`, and for each failure of the reference a triple of the
        point, the order, and the error. `own` is the user's data. `points` are rounded, and begin with it."""
        own_rounded, *added = points
        first_orders = functools.cache(lambda: self.reference.first_orders(own_rounded, self.steps, self.most))
        tasks = [(own_rounded, 1, first_orders)]
        for order in range(2, self.settings.order + 1):
            tasks.append((own, order, lambda order=order: (self.reference.higher(order, own),)))
        for point in added:  # gradients are linear in dy
            of_point = functools.partial(self._at, point)
            tasks.append((point, 1, of_point if point.dy_factor == 1 else lambda: first_orders()[1:]))
        found, failed = [], []
        for point, order, compute in tasks:
            try:
                found.append((point, compute()))
            except jax.errors.UnexpectedTracerError:
                raise
            except Exception as error:
                failed.append((point, order, error))
        return found, failed

    def _at(self, point):
        """Return the expected results and gradients at `point`, which has added data."""
        if self.reference.independent:
            y, gradients = self.reference.value_and_gradients(point)
            found = Expected(0, "float64", y), Expected(1, "autodiff", gradients)
        else:
            found = self.reference.first_orders(point, self.steps, self.most, nan_is_wrong=False)
        # At a tie, the value of an op such as a backward may jump, too.
        return found if self.settings.kink_convention else found[1:]

    def _judge(self, dtype=None):
        dtypes = self.arguments.dtypes if dtype is None else [jnp.dtype(dtype)] * len(self.arguments.dtypes)
        autodiff, settings = self.autodiff if dtype is None else self.autodiff.in_dtype(dtype), self.settings
        precision = self.reference.less_precise(*dtypes)
        return Judge(self.reference, autodiff, settings.tolerances, settings.kink_convention, precision)

    def _names(self, order):
        return self.reference.names if order else self.reference.result_names

    def _row(self, programs, verdict, reason=None, data=USER_DATA, order=1, dtype=None, argument="all", **found):
        row = functools.partial(CheckRow, self.name, programs.implementation, dtype or self.dtype, argument, order)
        return row(verdict=verdict, reason=reason, data=data, **{"against": "", **found})

    def _judged(self, programs, judge, point, e, i, a, argument, data):
        found = judge.verdict(point, e, i, a, programs)
        found |= dict(order=e.order, dtype=a.dtype.name, argument=argument, against=e.against)
        return self._row(programs, data=data, **found)

    def _of_implementation(self, programs, expected, failed, own, of_one, integers):
        try:
            _ = programs.result_dtypes
        except NotImplementedError as error:
            return [self._row(programs, "skipped", _one_line(error))]
        if programs is not self.autodiff and (reason := self._broken_rule(programs, own)):
            return [self._row(programs, "failed", reason)]
        rows = []
        for point, order, error in failed:
            # If autodiff succeeds, a custom rule raised the error.
            wrong = not self.reference.independent and order == 1 and _succeeds(self.autodiff.results, 1, point)
            rows.append(self._row(programs, "failed" if wrong else "inconclusive", _named(error), point.name, order))
        judge = self._judge()
        compared = self._compared(programs, judge, expected)
        rows += compared
        if programs is not self.autodiff and not any(map(is_broken, compared)):
            rows += self._transformed(programs, judge, own, of_one)
            rows += self._with_other_integers(programs, own, integers)
        for name, a in zip(self.arguments.names, self.arguments.leaves, strict=True):
            if not is_float(a):
                rows.append(self._row(programs, "skipped", NOT_FLOATING, dtype=str(a.dtype), argument=name))
        return rows

    def _broken_rule(self, programs, own):
        """Return the mistake if the gradients of `programs` cannot be traced or have other dtypes than the arguments,
        else None. `own` is the point with the user's data."""
        try:
            gradients = programs.gradient_shapes(own)
        except (NotImplementedError, jax.errors.UnexpectedTracerError):
            return None
        except Exception as error:
            return _named(error, MOST_OF_RULE) if _succeeds(self.autodiff.results, 1, own) else None
        return "; ".join(self._other_dtypes(programs, gradients)) or None

    def _other_dtypes(self, programs, gradients):
        wanted = zip(self._names(1), gradients, programs.arguments.dtypes, strict=True)
        return [
            f"the gradient of {name} is {a.dtype}; wants {dtype}, as {name}"
            for name, a, dtype in wanted
            if a.dtype != dtype
        ]

    def _compared(self, programs, judge, expected):
        rows, dtypes = [], programs.arguments.dtypes
        for point, of_orders in expected:
            if point.name != USER_DATA and any(map(is_broken, rows)):
                return rows
            order = of_orders[0].order
            try:
                for e, arrays in zip(of_orders, programs.at(point, *(e.order for e in of_orders)), strict=True):
                    order = e.order
                    self.reference.notes += self._other_dtypes(programs, arrays) if order == 1 else ()
                    for i, (name, a) in enumerate(zip(self._names(order), arrays, strict=True)):
                        if point.of is None or point.of == i or order == 0:
                            rows.append(self._judged(programs, judge, point, e, i, a, name, point.name))
            except Exception as error:
                verdict = "failed" if programs is not self.autodiff else "inconclusive"
                return [*rows, self._row(programs, verdict, _named(error), point.name, order, dtypes[0].name)]
            self.settings.progress.update(0, doing=f"{dtypes[0].name}, order {order}, {point.name}")
        return rows

    def _in_dtype(self, programs, dtype, points):
        own, skipped = points[0], functools.partial(self._row, programs, "skipped", data=dtype, dtype=dtype)
        if dtype not in self.settings.tolerances:
            return [skipped(f"there is no tolerance for {dtype}")]
        changed, judge = programs.in_dtype(dtype), self._judge(dtype)
        try:
            results = changed.result_dtypes
            if _succeeds(self.autodiff.results, 1, own):
                self.autodiff.in_dtype(dtype).results(1, own)
            if not takes_implementation(self.op):  # the user did not ask for this dtype
                changed.results(1, own)
        except Exception as error:
            return [skipped(_named(error))]
        points = [point.rounded(changed.arguments.dtypes, results) for point in points]
        return self._compared(changed, judge, [(point, self._at(point)) for point in points])

    def _transformed(self, programs, judge, own, of_one):
        """Compare an implementation under `jit` with the same implementation outside `jit`, under transformations, and
        with one array for several arguments. Return the rows of the check.

        `programs` has the implementation, and `judge` decides about differences. `own` is the point with the user's
        data. `of_one` has pairs of a list of argument indices and a point at which these arguments are equal.
        """
        rows = self._same(programs, judge, "outside jit", [own], lambda p: [p.outside_jit(own)])
        levels = [name for name in LEVELS if len(self.arguments.floats) > 1 or name not in LEVELS_OF_SEVERAL]
        if self.size * math.prod(at.sizes_of(levels)) > MOST_NUMBERS:
            levels, left_out = levels[:1], levels[1:]
            rows.append(self._row(programs, "skipped", "too many elements", ", ".join(left_out)))

        def under(names):
            points = [point.rounded(self.arguments.dtypes, programs.result_dtypes) for point in at.grid(own, names)]
            return self._same(programs, judge, ", ".join(names), points, lambda p: p.transformed(names, points))

        for names in levels, [*WRAPPERS, "shard_map"]:
            together = under(names)
            if any(row.verdict != "ok" for row in together):
                alone = [row for name in names for row in under([name])]
                only = all(row.verdict == "ok" for row in alone) and any(row.argument != "all" for row in together)
                together = together if only else alone
            rows += together
        for same, point in of_one:
            run = lambda p, same=same, point=point: [p.with_one_array(point, same)]  # noqa: E731
            rows += self._same(programs, judge, f"{point.name}, one array", [point], run, same)
        return rows

    def _same(self, programs, judge, name, points, run, same=()):
        """Compare an implementation under `jit` with `run(programs)`, which runs it in another way, such as `vmap`.

        Compare results and gradients at `points`. Arguments with indices in `same` are one array.
        """
        reference, autodiff, rows = self.reference, self.autodiff, []
        try:
            found = run(programs)
        except Exception as error:
            able = _succeeds(autodiff.results, 1, points[0]) and autodiff is not programs and _succeeds(run, autodiff)
            # On one device, an error in `shard_map` does not show that the backward is wrong.
            wrong = able and name != "shard_map" and not isinstance(error, NotImplementedError)
            return [self._row(programs, "failed" if wrong else "skipped", _named(error), name)]
        try:
            for point, arrays in zip(points, found, strict=True):
                jitted, names = programs.at(point, 0, 1), [self._names(0), self._names(1)]
                if same:
                    jitted[1], names[1] = [sum(np.asarray(jitted[1][i], np.float64) for i in same)], [point.name]
                compared = [(order, i) for order in (0, 1) for i in range(len(jitted[order]))]
                expected = None
                for (order, i), a in zip(compared, arrays, strict=True):
                    if close(a, jitted[order][i], self.settings.tolerances[a.dtype.name]).all():
                        continue
                    expected = expected or reference.value_and_gradients(point)
                    wanted = [sum(expected[1][i] for i in same)] if order and same else expected[order]
                    e = Expected(order, "autodiff", wanted)
                    rows.append(self._judged(programs, judge, point, e, i, a, names[order][i], name))
        except Exception as error:
            return [self._row(programs, "inconclusive", _named(error), name)]
        elements = sum(a.size for arrays in found for a in arrays)
        return rows or [self._row(programs, "ok", data=name, against="jit", elements=elements)]

    def _with_other_integers(self, programs, own, integers):
        """Compare results and gradients with autodiff for other integer arguments. Return the rows of the check.

        `own` is the point with the user's data. `integers` has pairs of a name and the changed integer arguments. All
        integers share one program. If a number differs, a `Study` with these integers decides.
        """
        rows, run, (values, cotangents, _) = [], programs.of_integers(), programs.in_dtypes(own)
        for name, changed in integers:
            try:
                if name not in self._at_integers:
                    self._at_integers[name] = self.reference.at_integers(self.autodiff, own, changed)
                found = run(values, cotangents, changed)
            except Exception as error:
                rows.append(self._row(programs, "skipped", type(error).__name__, name))
                continue
            right, elements = True, 0
            for a, e in zip(found, self._at_integers[name], strict=True):
                finite = np.isfinite(e)
                elements += int(finite.sum())
                right &= close(np.asarray(a)[finite], e[finite], self.settings.tolerances[a.dtype.name]).all()
            if not right:
                study = Study(self.op, self.arguments.with_integers(changed), self.options, self.settings)
                point = dataclasses.replace(own, name=name, kinks=True, maybe_undefined=True)
                expected = [(point, study.reference.first_orders(point, self.steps, self.most))]
                rows += study._compared(study._programs(programs.implementation), study._judge(), expected)
            elif elements:
                rows.append(self._row(programs, "ok", data=name, against="autodiff", elements=elements))
            else:
                rows.append(self._row(programs, "skipped", NOT_FINITE, name))
        return rows


def is_broken(row: CheckRow) -> bool:
    return row.verdict == "failed" and row.data == USER_DATA and row.order < 2


def _succeeds(function, *args):
    try:
        function(*args)
    except Exception:
        return False
    return True


def _named(error: Exception, most: int = 200) -> str:
    return f"{type(error).__name__}: {_one_line(error, most)}"


def _one_line(error: Exception, most: int = 200) -> str:
    return " ".join(str(error).split())[:most]
