import dataclasses
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify.arguments import bind, name_of, require_function, require_several, take_apart
from jaxbp.verify.exact import Exact
from jaxbp.verify.measurement import Difference, Measured, Program, derivatives_of, measure
from jaxbp.verify.page import WIDTH, colour, page, printed, section, show
from jaxbp.verify.tolerance import TOLERANCES, excess_and_difference

BAR_WIDTH = 60
AS_FAST = 1.05
HOST_BOUND = 0.05


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The findings of `compare`, one in `measured` per implementation, first the reference."""

    function: str
    device: str
    reference: str | None
    measured: tuple[Measured, ...]

    @property
    def verdict(self) -> list[str]:
        """One sentence per implementation except the reference."""
        reference, *others = self.measured
        return [self._verdict(reference, one) for one in others]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "Comparison":
        """Rebuild a comparison from `dataclasses.asdict` or its JSON. None means infinity."""

        def difference(values):
            known = {key: math.inf if value is None else value for key, value in values.items()}
            return Difference(**known | {"shape": tuple(values["shape"])})

        def measured(values):
            programs = {name: values[name] and Program(**values[name]) for name in ("gradients", "hessian_product")}
            return Measured(**values | programs | {"differences": tuple(map(difference, values["differences"]))})

        report = {field.name: report[field.name] for field in dataclasses.fields(cls)}
        return cls(**report | {"measured": tuple(map(measured, report["measured"]))})

    def to_html(self, path: str | os.PathLike) -> None:
        Path(path).write_text(self.page([f"jax {jax.__version__}"]), encoding="utf-8")

    def page(self, notes: Sequence[str], before: str = "", after: str = "") -> str:
        """Return an HTML page. `before` and `after` are HTML around the comparison."""
        names = ", ".join(str(one.implementation) for one in self.measured)
        parts = [
            section("Time", printed(self._bars("µs", "microseconds", 1))),
            section("Memory", printed(self._bars("MiB", "peak_bytes", 2**20))),
            section("Numbers", printed(*self._tables())),
        ]
        return page(f"{self.function}: {names}", self.verdict, [self.device, *notes], before, *parts, after)

    def _verdict(self, reference: Measured, one: Measured) -> str:
        if one.missing:
            return f"{self.function} has no {'kernel' if one.implementation == 'pallas' else one.implementation}"
        if one.gradients is None:
            return f"{one.implementation} failed: {one.failed}"
        if one.same_as is not None:
            hint = "does the function pass `implementation=` on?"
            return f"{one.implementation} compiles to the same program as {one.same_as}; {hint}"
        ratio = reference.gradients.microseconds / one.gradients.microseconds
        if abs(np.log(ratio)) < np.log(AS_FAST):
            speed = "as fast"
        else:
            speed = f"{_times(ratio)} faster" if ratio > 1 else f"{_times(1 / ratio)} slower"
            speed += _spread(reference.gradients, one.gradients, ratio > 1)
        if min(reference.gradients.host_waited, one.gradients.host_waited) < HOST_BOUND:
            speed += " (the host limits the time)"
        worst = max(one.differences, key=lambda difference: (difference.mistakes > 0, difference.relative))
        if worst.mistakes:
            where = f"{worst.mistakes:,} of {math.prod(worst.shape):,} elements of {worst.kind} {worst.name}"
            found = f"more than rounding in {where}: {worst.worst}"
        else:
            found = f"differences at most {worst.relative:.0e}: rounding" if worst.relative else "no difference"
        failed = f"; no Hessian product: {one.failed}" if one.failed else ""
        return f"{one.implementation} {speed}; {found}{failed}"

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=WIDTH))
        return text.getvalue()

    def show(self, console: Console) -> None:
        show(console, *(Text(line, style="bold") for line in self.verdict))
        show(console, *self._tables())

    def _tables(self) -> list[Table | Text]:
        failed = [one for one in self.measured if one.failed and not one.missing]
        reasons = [Text(f"failed: {one.implementation}: {one.failed}", style="red") for one in failed]
        return [self._costs(), self._differences(), *reasons]

    def _bars(self, unit: str, field: str, size: float) -> Table:
        bars = Table.grid("", "", "", padding=(0, 1))
        values = [(one.implementation, kind, getattr(p, field)) for one in self.measured for kind, p in one.programs]
        largest = max(value for *_, value in values) or 1
        for implementation, kind, value in values:
            bar = Text("█" * round(BAR_WIDTH * value / largest), style=colour(implementation))
            bars.add_row(f"{implementation}, {kind}", bar, f"{value / size:,.2f} {unit}")
        return bars

    def _costs(self) -> Table:
        costs = Table(
            "", "program", "µs", "host\nwaited", "MiB,\ntemporary", "compile,\ns", "largest difference",
            title=f"{self.function} on {self.device}",
        )  # fmt: skip
        for column in costs.columns[2:6]:
            column.justify = "right"
        for column in costs.columns[:-1]:
            column.no_wrap = True
        costs.columns[-1].overflow = "fold"
        for one in self.measured:
            for kind, program in one.programs:
                name = "Hessian" if kind == "hessian product" else kind
                costs.add_row(str(one.implementation), name, *_cells(program), _worst(one.largest(kind)))
            costs.add_section()
        return costs

    def _differences(self) -> Table:
        others = [one for one in self.measured if one.differences and one.implementation != self.reference]
        differences = Table(
            "kind", "name", "shape", *(f"{one.implementation}: max abs, relative" for one in others),
            title=f"differences from {self.reference}",
        )  # fmt: skip
        for expected in self.measured[0].differences:
            rows = [one.difference(expected.kind, expected.name) for one in others]
            numbers = [f"{row.absolute:.1e}  {row.relative:.1e}" if row else "" for row in rows]
            differences.add_row(expected.kind, Text(expected.name), str(expected.shape), *numbers)
        return differences


def compare(
    function: Callable,
    *args: Any,
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    reference: Implementation = "autodiff",
    argnums: int | Sequence[int] | None = None,
    second_order: bool = True,
    seconds: float = 0.05,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Run `function(*args, implementation=..., **options)` under each implementation, and compare results and costs.

    The costs are time, memory, and compilation time. The sum of all results is differentiated, with random weights for
    the elements of non-scalar results. The sum's Hessian is multiplied by a random direction, in forward over reverse
    mode, or in reverse over reverse mode if a custom rule has no forward mode.

    Elements that differ from the reference by more than the tolerance of `check` are compared with the reference in
    float64. Rounding explains an error of up to four times the reference's error, unless all elements are wrong by the
    same factor. At a tie or a kink, any number between the slopes near the data is accepted.

    Args:
      function: a `Pair`, an `Op`, or any function that takes `implementation=` and passes it on.
      args: arrays or pytrees of arrays, including models of Flax NNX.
      argnums: as in `jax.grad`; by default all floating arrays.
      seconds: the approximate duration of a round of timing.

    Returns:
      A `Comparison`. If an implementation fails, it contains the reason.

    Raises:
      ValueError: there is no floating argument.
      Errors of the reference are raised unchanged.
    """
    require_function("compare", "function", function)
    require_several("compare", "implementations", implementations)
    arguments = take_apart(function, args)
    chosen = arguments.positions((argnums,) if isinstance(argnums, int) else argnums)
    if not chosen:
        among = "" if argnums is None else f" among argnums {argnums}"
        raise ValueError(
            f"compare: {name_of(function)} has no floating argument{among}; wants at least one, to differentiate"
        )
    leaves, random = list(arguments.leaves), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda leaves: arguments.call(bind(function, reference, options), leaves), leaves)
    cotangents = [_normal(random, y) if y.shape else np.ones((), y.dtype) for y in shapes]
    direction = [_normal(random, leaves[i]) for i in chosen]
    data, order = (leaves, cotangents, direction), 2 if second_order else 1
    dtypes = {leaves[i].dtype.name for i in chosen} | {y.dtype.name for y in shapes}
    tolerance = max((TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) for dtype in dtypes), key=lambda one: one.rtol)
    expected, measured, programs = None, [], {}
    for implementation in dict.fromkeys((reference, *implementations)):
        functions = derivatives_of(bind(function, implementation, options), arguments, chosen)
        one, results = measure(implementation, functions, data, order, seconds, programs, may_fail=bool(measured))
        expected = expected or Exact(functions, data, chosen, results, tolerance)
        differences = tuple(
            _difference(expected, kind, i, name, a)
            for kind in results
            for i, (name, a) in enumerate(zip(_names(kind, arguments, chosen, shapes), results[kind], strict=True))
        )
        measured.append(dataclasses.replace(one, differences=differences))
    return Comparison(name_of(function), jax.devices()[0].device_kind, reference, tuple(measured))


def _names(kind, arguments, chosen, results):
    if kind != "value":
        return [arguments.names[i] for i in chosen]
    return ["value"] if len(results) == 1 else [f"value {i}" for i in range(len(results))]


def _difference(expected: Exact, kind: str, i: int, name: str, a: np.ndarray) -> Difference:
    a, e = np.asarray(a, np.float64), expected.by_reference(kind, i)
    wrong, exact = expected.mistakes(kind, i, a)
    excess, _ = excess_and_difference(a, exact, expected.tolerance)
    _, off = excess_and_difference(a, e, expected.tolerance)
    with np.errstate(invalid="ignore", over="ignore"):
        relative = np.linalg.norm(off) / max(np.linalg.norm(e[np.isfinite(e)]), 1e-300)
    worst = ""
    if wrong.any():
        at = np.unravel_index(np.argmax(np.where(wrong, excess, -1.0)), a.shape)
        index = f"[{', '.join(map(str, at))}]" if at else ""
        worst = f"{name}{index} is {a[at]:.6g}; wants {exact[at]:.6g}"
    return Difference(kind, name, a.shape, float(off.max(initial=0.0)), float(relative), int(wrong.sum()), worst)


def _normal(random: np.random.Generator, a: Any) -> np.ndarray:
    return random.standard_normal(a.shape).astype(a.dtype)


def _spread(reference: Program, one: Program, faster: bool) -> str:
    if None in (reference.fastest, one.fastest):
        return ""
    low, high = reference.fastest / one.slowest, reference.slowest / one.fastest
    low, high = (low, high) if faster else (1 / high, 1 / low)
    return f" ({_times(low)} to {_times(high)})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _cells(program: Program) -> list[str]:
    memory = ", ".join(f"{size / 2**20:.2f}" for size in (program.peak_bytes, program.temporary_bytes))
    return [f"{program.microseconds:.1f}", f"{program.host_waited:.0%}", memory, f"{program.compile_seconds:.2f}"]


def _worst(difference: Difference | None) -> str:
    return "" if difference is None else f"{difference.relative:.1e} {difference.name}"
