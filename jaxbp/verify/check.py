"""Holding a backward against finite differences, element by element.

Every implementation's gradients are computed as a user gets them, in the dtype of the arguments. What they are held
against is computed in float64 from the same numbers, by the implementation that JAX differentiates itself, confirmed by
differences. A float32 kernel, which takes no float64, is so held to the tolerance of float32 and not to that of
differences in float32. `jaxbp.verify.judge` says what is a mistake and what is not.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify import points as at
from jaxbp.verify.arguments import (
    Arguments,
    bind,
    is_float,
    name_of,
    require_function,
    require_several,
    take_apart,
    takes_implementation,
)
from jaxbp.verify.judge import Judge, Tolerance
from jaxbp.verify.points import ADDED, OWN, Point
from jaxbp.verify.reference import Arrays, Derivatives, Expected, Reference, scale_of

TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(rtol=1e-2, atol=1e-4, step=1e-3),
    "bfloat16": Tolerance(rtol=5e-2, atol=1e-3, step=1e-3),
    "float32": Tolerance(rtol=1e-4, atol=1e-7, step=None),
    "float64": Tolerance(rtol=1e-7, atol=1e-10, step=1e-7),
}
"""By dtype."""
ORDERS = (1, 2, 3)
WIDTH = 80
STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}
MOST_KINKS = 16
"""Constants of a program that are tried as kinks."""


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """What was found of one argument.

    Attributes:
      op, implementation, dtype: what ran.
      argument: its name, or that of the result, or "all" of them together.
      order: 0 for a value, 1 for a gradient, 2 and 3 for its derivatives.
      against: what it was held against.
      verdict: "ok", "failed" or "skipped".
      elements: how many were compared.
      absolute: the largest difference.
      relative: that as a share of the largest expected element.
      index, analytic, numeric: of the element that is furthest beyond its limit, or nearest: where it is, what the op
        gave, and what was expected.
      reason: why it was skipped; or what the mistake looks like; or why it is none although the tolerance is exceeded.
      data: the user's own, or which of the data beside it.
    """

    op: str
    implementation: str | None
    dtype: str
    argument: str
    order: int
    against: str
    verdict: str
    elements: int = 0
    absolute: float | None = None
    relative: float | None = None
    index: tuple[int, ...] | None = None
    analytic: float | None = None
    numeric: float | None = None
    reason: str | None = None
    data: str = OWN

    def __str__(self) -> str:
        return f"{self.op}, {self.implementation}, {self.dtype}, order {self.order}: {self.finding}"

    @property
    def finding(self) -> str:
        """Which element is what, and what it should be."""
        if self.index is None:
            return f"{self.argument}: {self.reason or self.verdict}"
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        against = self.against if self.data == OWN else f"{self.against}, {self.data}"
        looks = f": {self.reason}" if self.verdict == "failed" and self.reason else ""
        return f"{self.argument}{where} is {self.analytic:.9g}; wants {self.numeric:.9g} ({against}){looks}"


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The rows of a check. True if none failed; printed, it has a line for each implementation.

    Attributes:
      rows: what was found.
      untried: what the check did not look at, in words.
    """

    rows: tuple[CheckRow, ...]
    untried: str = ""

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "failed")

    @property
    def tried(self) -> tuple[str, ...]:
        """On which data it was checked, the user's own first."""
        return tuple(dict.fromkeys(row.data for row in self.rows if row.verdict != "skipped"))

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=WIDTH).print(self.summary())
        return text.getvalue()

    def raise_if_failed(self) -> "CheckResult":
        """Itself; AssertionError with a line for every failure: the worst element, what it is and what it should be."""
        if self.failures:
            raise AssertionError("\n".join(map(str, self.failures)))
        return self

    def summary(self) -> Group:
        """A line for each implementation, under it the first of its failures; and on what data, for Rich."""
        lines = []
        for (op, implementation), rows in _grouped(self.rows).items():
            failed = [row for row in rows if row.verdict == "failed"]
            skipped = [row for row in rows if row.verdict == "skipped"]
            verdict = "failed" if failed else "skipped" if len(skipped) == len(rows) else "ok"
            lines.append(Text(f"{verdict:7} ", STYLES[verdict], no_wrap=True, overflow="ellipsis"))
            lines[-1].append(op if implementation is None else f"{op}, {implementation}", "default")
            if verdict == "ok":
                lines[-1].append(f": {len(rows) - len(skipped)} results, off by {_off(rows)}", "default")
            if failed:
                lines.append(Text(f"        {failed[0].dtype}, order {failed[0].order}: {failed[0].finding}"))
            elif verdict == "skipped":
                lines.append(Text(f"        {skipped[0].reason}"))
            else:
                lines += [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in _excused(rows)]
            if len(failed) > 1:
                lines.append(Text(f"        and {len(failed) - 1} more, on {_listed(row.data for row in failed)}"))
        if self.tried:
            lines.append(Text(f"tried: {_listed(self.tried)}", "dim"))
        if self.untried:
            lines.append(Text(f"not tried: {self.untried}", "dim"))
        return Group(*lines)

    def table(self) -> Table:
        """The rows as a table of Rich."""
        fields = ("op", "implementation", "dtype", "data", "argument", "order", "against")
        table = Table(*fields, "max abs", "max rel", "verdict")
        for row, following in zip(self.rows, (*self.rows[1:], None), strict=True):
            verdict = Text(row.verdict + (f": {row.reason}" if row.reason else ""), style=STYLES[row.verdict])
            cells = (Text(str(getattr(row, field))) for field in fields)
            ends = following is None or following.implementation != row.implementation
            table.add_row(*cells, _short(row.absolute), _short(row.relative), verdict, end_section=ends)
        return table


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
    most_elements: int = 10_000,
    seed: int = 0,
    **options: Any,
) -> CheckResult:
    """Holds the backward of `op(*args, **options)` against finite differences, in every implementation.

    - Order 0: the value, as it comes out while differentiating, is that of the plain forward in float64.
    - Order 1: the gradient of `Σ c y`, c random, is that of the plain forward in float64: JAX's, confirmed by central
      differences, one element after the other. Where two steps of a difference agree with each other and not with JAX,
      the difference is right. Where they can not tell, at a kink or where something is infinite, JAX's stands.
    - Orders 2 and 3: the gradient of `Σ c (y + y²/2)` differentiated along random directions, likewise confirmed.

    Gradients are also held against JAX's on data beside the user's own, of the same shapes, as `added` names it:

    - "cotangents": dy times -30, and dy with zeros.
    - "kinks": `kinks`, and the numbers that stand in the program of the forward, such as bounds, in each argument.
    - "ties": few numbers, each many times. "zeros": zeros alone. "large": numbers up to 300, an argument at a time.
    - "dtypes": the user's data and large numbers in bfloat16 and float16, or in float32 for data in these.

    Arguments stay in their range: positive ones positive, those in [0, 1] there, rows that sum to 1 as they are. An op
    that wants more of its arguments, say sorted ones, is checked with `added=("cotangents",)`.

    Products of float32 are exact in a check, whatever JAX's default precision. What is beyond the tolerance is wrong
    only if JAX's own differentiation in the same dtype is not as far off, and the data not within rounding of a kink.

    Args:
      op: a `Pair`, an `Op`, or a function with `implementation=`; or one without, which is checked as it is.
      args: its arguments, arrays or pytrees of arrays. Those without gradients, such as integers, are skipped. NumPy's
        float64 arrays are taken as such, whether or not JAX's 64-bit mode is on.
      implementations: those to check; by default all. One that does not take the arguments is skipped and says why.
      order: 1 for values and gradients alone, which takes the least time, 2 or 3.
      kinks: values at which the op may have a kink.
      kink_convention: whether the op has autodiff's slope at a kink; if not, any between the two sides will do there.
      added: data to check beside the user's own.
      cases: more to check: other options, `{"stride": 2}`, or other arguments with their options, `((x, w), {})`.
      tolerances: by dtype.
      most_elements: so many elements of an argument are moved, evenly spread; the others are held against autodiff.
      seed: of what is random. It is a stream of the check's own, whatever the data was drawn from.
      options: of the op.

    Returns:
      A `CheckResult`, true if nothing failed.

    Raises:
      ValueError, TypeError: arguments that the op does not take, an order other than 1, 2 and 3, no floating argument
        or result, or an op that has no forward in float64.
    """
    if order not in ORDERS:
        raise ValueError(f"check: order is {order!r}; wants 1, 2 or 3")
    if unknown := set(added) - set(ADDED):
        raise ValueError(f"check: added has {', '.join(map(repr, sorted(unknown)))}; wants some of {', '.join(ADDED)}")
    require_function("check", "op", op)
    require_several("check", "implementations", implementations)
    if implementations is None:
        implementations = IMPLEMENTATIONS if takes_implementation(op) else (None,)
    settings = dict(
        implementations=implementations,
        order=order,
        kinks=kinks,
        kink_convention=kink_convention,
        added=added,
        tolerances=tolerances,
        most_elements=most_elements,
        seed=seed,
    )
    rows = list(_rows(op, args, options, **settings))
    for case in cases:
        other, changed = (args, {**options, **case}) if isinstance(case, Mapping) else case
        name = ", ".join(f"{key}={value}" for key, value in changed.items()) or "arguments"
        shapes = "" if other is args else f" of {_shapes(take_apart(op, other))}"
        for row in _rows(op, other, changed, **settings):
            rows.append(dataclasses.replace(row, data=f"case {name}{shapes}: {row.data}"))
    return CheckResult(tuple(rows), _untried(options, cases, added, kinks))


def _rows(
    op, args, options, *, implementations, order, kinks, kink_convention, added, tolerances, most_elements, seed
) -> Iterator[CheckRow]:
    arguments = take_apart(op, args)
    if not arguments.floats:
        raise ValueError(f"check: {name_of(op)} has no floating argument; wants at least one, to differentiate in")
    wide = any(a.dtype == np.float64 for a in arguments.floats)
    with jax.default_matmul_precision("highest"), jax.enable_x64(wide or jax.config.jax_enable_x64):
        reference, random = Reference(op, arguments, options), at.generator(seed)
        own = Point(
            OWN,
            [np.asarray(a, np.float64) for a in arguments.floats],
            [at.normal(random, y.shape, y.dtype) for y in reference.results],
        )
        directions = [
            [at.normal(random, a.shape, a.dtype) * scale_of(np.asarray(a, np.float64)) for a in arguments.floats]
            for _ in range(order - 1)
        ]
        constants = sorted({s * c for c in reference.constants for s in (1, -1)}, key=abs)[:MOST_KINKS]
        kinks = tuple(dict.fromkeys((*kinks, *constants))) if kinks else ()
        dtypes = [a.dtype for a in arguments.floats]
        tried = [
            point.rounded(dtypes, [y.dtype for y in reference.results])
            for point in at.points(own, reference.names, kinks, added, random)
        ]
        large = at.everywhere_large(own, random)
        steps = [tolerances[a.dtype.name].step for a in arguments.floats]
        expected = [(tried[0], e) for e in reference.first_orders(own.values, own.cotangents, steps, most_elements)]
        expected += [(own, reference.higher(n, own.values, own.cotangents, directions)) for n in range(2, order + 1)]
        expected += [(point, _at(reference, point, steps, most_elements)) for point in tried[1:]]
        native = None
        if reference.independent:
            native = Programs(op, arguments, options, "autodiff" if takes_implementation(op) else None)
        judge = Judge(reference, native, tolerances, directions, kink_convention)
        for implementation in implementations:
            is_native = native is not None and implementation == native.implementation
            programs = native if is_native else Programs(op, arguments, options, implementation)
            yield from _of_implementation(op, programs, reference, judge, expected)
            if "dtypes" in added and len(set(dtypes)) == 1:
                for dtype in ("float32",) if dtypes[0].itemsize == 2 else ("bfloat16", "float16"):
                    in_dtype = programs.in_dtype(dtype)
                    judge_in_dtype = Judge(
                        reference, native and native.in_dtype(dtype), tolerances, directions, kink_convention
                    )
                    results = in_dtype.result_dtypes()
                    if results is None:
                        continue
                    rounded = [p.rounded([jnp.dtype(dtype)] * len(dtypes), results) for p in (own, large)]
                    wanted = [(p, _at(reference, p, steps, most_elements)) for p in rounded]
                    yield from _compared_all(op, in_dtype, reference, judge_in_dtype, wanted)


def _at(reference: Reference, point: Point, steps: Sequence[float | None], most: int) -> Expected:
    """The gradients at a point beside the user's; those of a backward that has no other are confirmed there, too."""
    if not reference.independent:
        return reference.first_orders(point.values, point.cotangents, steps, most)[1]
    _, gradients = reference.value_and_gradients(point.values, point.cotangents)
    return Expected(1, "autodiff", gradients, [np.zeros(g.shape, bool) for g in gradients])


class Programs:
    """An implementation's value, gradients and their derivatives, in a dtype.

    Args:
      compiling: of `Derivatives`.
    """

    def __init__(
        self,
        op: Callable,
        arguments: Arguments,
        options: Mapping[str, Any],
        implementation: Implementation,
        **compiling: Any,
    ):
        self.implementation, self.arguments = implementation, arguments
        self.function = jax.jit(arguments.of_floats(bind(op, implementation, options)))
        self._derivatives = Derivatives(self.function, **compiling)

    def in_dtype(self, dtype: str) -> "Programs":
        """The same programs for arguments of another dtype."""
        leaves = [np.asarray(a).astype(dtype) if is_float(a) else a for a in self.arguments.leaves]
        other = object.__new__(Programs)
        other.__dict__ = self.__dict__ | dict(arguments=dataclasses.replace(self.arguments, leaves=tuple(leaves)))
        return other

    def result_dtypes(self) -> list[np.dtype] | None:
        """None if it does not take the arguments' dtype."""
        try:
            return [y.dtype for y in jax.eval_shape(self.function, *self.arguments.floats)]
        except (NotImplementedError, TypeError, ValueError):
            return None

    def rounded(self, values: Arrays) -> list[np.ndarray]:
        return [np.asarray(v.astype(a.dtype), np.float64) for v, a in zip(values, self.arguments.floats, strict=True)]

    def results(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """Values, gradients, or the derivative of an order, as they come; None if it does not take the arguments."""
        dtypes = self.result_dtypes()
        if dtypes is None:
            return None
        floats = self.arguments.floats
        with np.errstate(over="ignore"):
            values = [v.astype(a.dtype) for v, a in zip(values, floats, strict=True)]
            directions = [[v.astype(a.dtype) for v, a in zip(d, floats, strict=True)] for d in directions]
            cotangents = [c.astype(dtype) for c, dtype in zip(cotangents, dtypes, strict=True)]
        return self._derivatives(order, values, cotangents, directions)


def _of_implementation(
    op: Callable,
    programs: Programs,
    reference: Reference,
    judge: Judge,
    expected: Sequence[tuple[Point, Expected]],
) -> Iterator[CheckRow]:
    """What is found of everything that is expected, and what is not checked."""
    row = functools.partial(CheckRow, name_of(op), programs.implementation)
    arguments = programs.arguments
    try:
        jax.eval_shape(programs.function, *arguments.floats)
    except NotImplementedError as error:
        yield row(arguments.floats[0].dtype.name, "all", 1, "", "skipped", reason=_one_line(error))
        return
    yield from _compared_all(op, programs, reference, judge, expected)
    for name, a in zip(arguments.names, arguments.leaves, strict=True):
        if not is_float(a):
            yield row(str(a.dtype), name, 1, "", "skipped", reason="not floating, so without a gradient")


def _compared_all(op, programs, reference, judge, expected) -> Iterator[CheckRow]:
    row = functools.partial(CheckRow, name_of(op), programs.implementation)
    for point, e in expected:
        names = reference.names if e.order else reference.result_names
        try:
            actual = programs.results(e.order, point.values, point.cotangents, judge.directions)
            for i, (name, a) in enumerate(zip(names, actual, strict=True)):
                if point.of is None or point.of == i or e.order == 0:
                    verdict = judge.verdict(point, e, i, a, programs)
                    yield row(a.dtype.name, name, e.order, e.against, data=point.name, **verdict)
        except Exception as error:  # a wrong backward can raise anything
            reason = f"{type(error).__name__}: {_one_line(error)}"
            dtype = programs.arguments.floats[0].dtype.name
            yield row(dtype, "all", e.order, "", "failed", reason=reason, data=point.name)
            return


def _grouped(rows: Sequence[CheckRow]) -> dict[tuple, list[CheckRow]]:
    groups = {}
    for row in rows:
        if row.reason != "not floating, so without a gradient":
            groups.setdefault((row.op, row.implementation), []).append(row)
    return groups


def _off(rows: Sequence[CheckRow]) -> str:
    """The largest relative difference in each dtype, of what is within the tolerance."""
    found = {}
    for row in rows:
        if row.relative is not None and not row.reason:
            found[row.dtype] = max(found.get(row.dtype, 0.0), row.relative)
    return " ".join(f"{dtype.replace('loat', '')} {value:.0e}" for dtype, value in found.items())


def _excused(rows: Sequence[CheckRow]) -> list[str]:
    """On which data right results are beyond the tolerance, and why."""
    data = {}
    for row in rows:
        if row.verdict == "ok" and row.reason:
            data.setdefault(row.reason, []).append(row.data)
    return [f"        beyond that, {reason}: on {_listed(names)}" for reason, names in data.items()]


def _untried(options, cases, added, kinks) -> str:
    missing = [name for name in ADDED if name not in added]
    if not cases:
        given = f" than {', '.join(f'{name}={value!r}' for name, value in options.items())}" if options else ""
        missing += [f"other options{given}" if options else "options", "other shapes (cases=)"]
    return ", ".join(missing)


def _shapes(arguments: Arguments) -> str:
    return ", ".join("×".join(map(str, a.shape)) or "scalar" for a in arguments.floats)


def _listed(names) -> str:
    return ", ".join(dict.fromkeys(names))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
