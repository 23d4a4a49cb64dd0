import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.pairing import Implementation
from jaxbp.verify import points as at
from jaxbp.verify.arguments import is_float, name_of, takes_implementation
from jaxbp.verify.derivatives import flat
from jaxbp.verify.interpreter import without_custom_rules
from jaxbp.verify.judge import NOT_FINITE, Judge
from jaxbp.verify.points import LEVELS, LEVELS_OF_SEVERAL, USER_DATA, Point
from jaxbp.verify.programs import WRAPPERS, Programs
from jaxbp.verify.reference import Expected, Reference
from jaxbp.verify.report import NOT_FLOATING, CheckRow
from jaxbp.verify.tolerance import Tolerance, within

MOST_ELEMENTS, WORK, MOST_NUMBERS = (64, 10_000), 2**23, 2**22


@dataclasses.dataclass(frozen=True)
class Settings:
    implementations: Sequence[Implementation]
    order: int
    kinks: Sequence[float]
    kink_convention: bool
    added: Sequence[str]
    tolerances: Mapping[str, Tolerance]
    most_elements: int | None
    seed: int
    gradient_of: Callable | None


class Study:
    """An op with one set of arguments and options, and its reference.

    Attributes:
      autodiff: the programs of the forward and its gradients, without custom rules.
      same: lists of indices of floating arguments with equal shapes and dtypes.
    """

    def __init__(self, op, arguments, options, settings, reference, directions):
        self.op, self.arguments, self.options, self.settings = op, arguments, options, settings
        self.reference, self.directions = reference, directions
        self.steps = [settings.tolerances[a.dtype.name].step for a in arguments.floats]
        self.size = sum(a.size for a in arguments.floats) + sum(y.size for y in reference.results)
        least, most = MOST_ELEMENTS
        self.most = settings.most_elements or max(least, min(most, WORK // max(1, self.size)))
        groups = {}
        for i, a in enumerate(arguments.floats):
            groups.setdefault((a.shape, a.dtype), []).append(i)
        self.same = [group for group in groups.values() if len(group) > 1 and arguments.floats[group[0]].size]
        self.autodiff = self._autodiff()
        self.other_integers, self._at_integers = [], {}
        self._computed_in = functools.cache(lambda *dtypes: self._narrowed(dtypes))

    def _autodiff(self):
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
        if independent and implementation == self.autodiff.implementation:
            return self.autodiff
        return Programs(self.op, self.arguments, self.options, implementation)

    def same_name(self, same: Sequence[int]) -> str:
        return f"{' = '.join(self.reference.names[i] for i in same)}"

    def judge(self, dtype: str | None = None) -> Judge:
        dtypes = [jnp.dtype(dtype or a.dtype) for a in self.arguments.floats]
        autodiff = self.autodiff and self.autodiff.in_dtype(dtype) if dtype else self.autodiff
        settings = self.settings
        return Judge(
            self.reference,
            autodiff,
            settings.tolerances,
            self.directions,
            settings.kink_convention,
            self._computed_in(*dtypes),
        )

    def _narrowed(self, dtypes):
        try:
            narrow = self.reference.computed_in(dtypes)
        except Exception:  # `in_dtype` reports it
            return None
        eps = lambda dtype: float(jnp.finfo(dtype).eps)  # noqa: E731
        return narrow if narrow is not None and eps(narrow) > max(map(eps, dtypes)) else None

    def at(self, point: Point) -> tuple[Expected, ...]:
        if not self.reference.independent:
            found = self.reference.first_orders(point.values, point.cotangents, self.steps, self.most, False)
        else:
            found = self.reference.value_and_gradients(point.values, point.cotangents)
            found = [
                Expected(order, against, arrays, [np.zeros(a.shape, bool) for a in arrays])
                for order, against, arrays in zip((0, 1), ("float64", "autodiff"), found, strict=True)
            ]
        # At a tie, the value of an op such as a backward may jump, too.
        return tuple(found) if self.settings.kink_convention else tuple(found)[1:]

    def expected(
        self, points: Sequence[Point], orders: Sequence[tuple[Point, int]]
    ) -> tuple[list[tuple[Point, Expected]], list[tuple[Point, int, Exception]]]:
        own, *added = points
        found, failed = [], []
        confirm = functools.cache(
            lambda: self.reference.first_orders(own.values, own.cotangents, self.steps, self.most)
        )
        higher = lambda point, order: self.reference.higher(order, point.values, point.cotangents, self.directions)  # noqa: E731
        tasks = [(own, 1, confirm)]
        tasks += [(point, order, functools.partial(higher, point, order)) for point, order in orders]
        for point in added:
            # Gradients are linear in dy.
            tasks.append(
                (point, 1, functools.partial(self.at, point) if point.dy_factor == 1 else lambda: confirm()[1])
            )
        for point, order, compute in tasks:
            try:
                result = compute()
                found += [(point, e) for e in (result if isinstance(result, tuple) else (result,))]
            except jax.errors.UnexpectedTracerError:
                raise
            except Exception as error:
                failed.append((point, order, error))
        return found, failed

    def of_implementation(self, programs, expected, failed, own, points) -> Iterator[CheckRow]:
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation)
        dtype = self.arguments.floats[0].dtype.name
        try:
            jax.eval_shape(programs.function, *programs.arguments.floats)
        except NotImplementedError as error:
            yield row(dtype, "all", 1, "", "skipped", reason=_one_line(error))
            return
        for point, order, error in failed:
            # If autodiff succeeds, a custom rule raised the error.
            wrong = not self.reference.independent and order == 1 and self._can(self.autodiff, order, point)
            verdict = "failed" if wrong else "inconclusive"
            yield row(dtype, "all", order, "", verdict, reason=_named(error), data=point.name)
        judge, found = self.judge(), []
        for checked in self.compared(programs, judge, expected):
            found.append(checked)
            yield checked
        if programs is not self.autodiff and not is_broken(found):
            yield from self.transformed(programs, judge, own, points)
            yield from self.with_other_integers(programs, own)
        for name, a in zip(programs.arguments.names, programs.arguments.leaves, strict=True):
            if not is_float(a):
                yield row(str(a.dtype), name, 1, "", "skipped", reason=NOT_FLOATING)

    def in_dtype(self, programs: Programs, dtype: str, points: Sequence[Point]) -> Iterator[CheckRow]:
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation, dtype, "all", 1, "", "skipped")
        own = points[0]
        if dtype not in self.settings.tolerances:
            yield row(reason=f"there is no tolerance for {dtype}", data=dtype)
            return
        changed, judge = programs.in_dtype(dtype), self.judge(dtype)
        reason = None
        try:
            results = [y.dtype for y in jax.eval_shape(changed.function, *changed.arguments.floats)]
            if self._can(self.autodiff, 1, own):
                self.autodiff.in_dtype(dtype).results(1, own.values, own.cotangents, self.directions)
            if not takes_implementation(self.op):  # the user did not ask for this dtype
                changed.results(1, own.values, own.cotangents, self.directions)
        except Exception as error:
            reason = _named(error)
        if reason is not None:
            yield row(reason=reason, data=dtype)
            return
        rounded = [p.rounded([jnp.dtype(dtype)] * len(self.arguments.floats), results) for p in points]
        yield from self.compared(changed, judge, [(p, e) for p in rounded for e in self.at(p)])

    def compared(self, programs, judge, expected) -> Iterator[CheckRow]:
        row, found = functools.partial(CheckRow, name_of(self.op), programs.implementation), []
        for point, e in expected:
            if point.name != USER_DATA and is_broken(found):
                return
            names = self.reference.names if e.order else self.reference.result_names
            try:
                actual = programs.at(point, e.order, judge.directions)
                for i, (name, a) in enumerate(zip(names, actual, strict=True)):
                    if e.order == 1 and a.dtype != (wanted := programs.arguments.floats[i].dtype):
                        self.reference.notes.append(f"the gradient of {name} is {a.dtype}; wants {wanted}, as {name}")
                    if point.of is None or point.of == i or e.order == 0:
                        verdict = judge.verdict(point, e, i, a, programs)
                        found.append(row(a.dtype.name, name, e.order, e.against, data=point.name, **verdict))
                        yield found[-1]
            except Exception as error:
                verdict = "failed" if programs is not self.autodiff else "inconclusive"
                dtype = programs.arguments.floats[0].dtype.name
                yield row(dtype, "all", e.order, "", verdict, reason=_named(error), data=point.name)
                return

    def transformed(self, programs, judge, own, points) -> Iterator[CheckRow]:
        outside_jit = lambda p: [p.outside_jit(own.values, self._cotangents(programs, own))]  # noqa: E731
        yield from self._same(programs, judge, "outside jit", [own], outside_jit)
        levels = [name for name in LEVELS if len(self.arguments.floats) > 1 or name not in LEVELS_OF_SEVERAL]
        if self.size * math.prod(at.sizes_of(levels)) > MOST_NUMBERS:
            levels, left_out = levels[:1], levels[1:]
            row = functools.partial(CheckRow, name_of(self.op), programs.implementation, verdict="skipped")
            dtype, reason = self.arguments.floats[0].dtype.name, "too many elements"
            yield row(dtype, "all", 1, "", data=", ".join(left_out), reason=reason)
        for names in levels, [*WRAPPERS, "shard_map"]:
            rows = list(self._under(programs, judge, own, names))
            if any(row.verdict != "ok" for row in rows):
                alone = [row for name in names for row in self._under(programs, judge, own, [name])]
                only_together = all(row.verdict == "ok" for row in alone) and any(row.argument != "all" for row in rows)
                rows = rows if only_together else alone
            yield from rows
        for same in self.same:
            (point,) = [p for p in points if p.name == self.same_name(same)]
            run = functools.partial(
                self._with_one_array, same=same, cotangents=self._cotangents(programs, point), point=point
            )
            yield from self._same(programs, judge, f"{point.name}, one array", [point], run, same)

    def _under(self, programs, judge, own, names):
        dtypes = [a.dtype for a in self.arguments.floats]
        points = [point.rounded(dtypes, programs.result_dtypes) for point in at.grid(own, names)]
        run = lambda p: p.transformed(names, points)  # noqa: E731
        return self._same(programs, judge, ", ".join(names), points, run)

    def with_other_integers(self, programs: Programs, own: Point) -> Iterator[CheckRow]:
        """Compare results and gradients at other integers with autodiff. All integers share one program.

        If a number differs, a study with these integers decides.
        """
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation)
        dtype, run = self.arguments.floats[0].dtype.name, programs.of_integers()
        values, cotangents = programs.in_dtypes(own.values), self._cotangents(programs, own)
        for name, integers in self.other_integers:
            skipped = functools.partial(row, dtype, "all", 1, "", "skipped", data=name)
            try:
                if name not in self._at_integers:
                    at_own = self.autodiff, own.values, own.cotangents
                    self._at_integers[name] = self.reference.at_integers(*at_own, integers)
                found = [*itertools.chain(*run(values, cotangents, integers))]
            except Exception as error:
                yield skipped(reason=type(error).__name__)
                continue
            right, elements = True, 0
            for a, e in zip(found, self._at_integers[name], strict=True):
                finite = np.isfinite(e)
                elements += finite.sum()
                right &= within(np.asarray(a)[finite], e[finite], self.settings.tolerances[a.dtype.name])
            if not right:
                yield from self._at_constants(programs, own, name, self.arguments.with_integers(integers))
            elif elements:
                yield row(dtype, "all", 1, "autodiff", "ok", elements=int(elements), data=name)
            else:
                yield skipped(reason=NOT_FINITE)

    def _at_constants(self, programs, own, name, arguments):
        reference = Reference(self.op, arguments, self.options)
        study = Study(self.op, arguments, self.options, self.settings, reference, self.directions)
        point = dataclasses.replace(own, name=name, kinks=True, maybe_undefined=True)
        expected = reference.first_orders(point.values, point.cotangents, self.steps, self.most)
        changed = study.programs(programs.implementation)
        return study.compared(changed, study.judge(), [(point, e) for e in expected])

    def _with_one_array(self, programs, same, cotangents, point):
        y, gradient = programs.with_one_array(point.values, cotangents, same)
        return [[*y, gradient]]

    def _cotangents(self, programs, point):
        return [c.astype(dtype) for c, dtype in zip(point.cotangents, programs.result_dtypes, strict=True)]

    def _same(self, programs, judge, name, where, run, same=()) -> Iterator[CheckRow]:
        """Compare an implementation under `jit` with `run(programs)`, which runs it in another way, such as `vmap`.

        Compare results and gradients at the points in `where`. Arguments with indices in `same` are one array.
        """
        row = functools.partial(CheckRow, name_of(self.op), programs.implementation)
        dtype = self.arguments.floats[0].dtype.name
        try:
            found = run(programs)
        except Exception as error:
            autodiff = self.autodiff if self._can(self.autodiff, 1, where[0]) else None
            try:
                able = autodiff is not None and autodiff is not programs and run(autodiff) is not None
            except Exception:
                able = False
            # On one device, an error in `shard_map` does not show that the backward is wrong.
            wrong = able and name != "shard_map" and not isinstance(error, NotImplementedError)
            verdict = "failed" if wrong else "skipped"
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
            jitted = [programs.at(point, order, self.directions) for order in (0, 1)]
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
        if programs is None:
            return False
        try:
            programs.results(order, point.values, point.cotangents, self.directions)
        except Exception:
            return False
        return True


def is_broken(rows: Sequence[CheckRow]) -> bool:
    return any(row.verdict == "failed" and row.data == USER_DATA and row.order < 2 for row in rows)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
