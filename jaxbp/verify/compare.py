"""The same function under each implementation, side by side: what it computes, and what that costs."""

import dataclasses
import functools
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify.arguments import Arguments, bind, name_of, require_function, require_several, take_apart
from jaxbp.verify.derivatives import has_no_forward_mode
from jaxbp.verify.page import WIDTH, colour, page, printed, section, show
from jaxbp.verify.timing import compile_program, device_seconds

CALLS = 10
"""Calls in a program that is timed on a GPU: the device need not wait for the host between them."""

KINDS = ("value", "gradient", "hessian product")
BAR_WIDTH = 60
"""Of the longest bar of a page, in characters."""
ROUNDINGS = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-10}
"""By dtype, the relative difference that the order of a sum may make."""
TF32 = 1e-2
"""That of products on a GPU's tensor cores, where no precision is asked for."""
AS_FAST = 1.05
"""Run-to-run noise: times whose ratio is below are the same."""
HOST_BOUND = 0.05
"""Below this share of waiting for the device a time is the host's."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a result is from the reference's.

    Attributes:
      kind: one of `KINDS`.
      name: of the result, or of the argument that was differentiated in.
      absolute: of the element that is furthest off; infinite where one is NaN and the other not.
      relative: `‖a - reference‖ / ‖reference‖`.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    absolute: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Program:
    """What a compiled program costs.

    Attributes:
      microseconds: of a call, with more of them queued behind it. All have the same arguments, so what is small stays
        in the device's cache.
      fastest, slowest: the microseconds per call in the fastest and in the slowest round of timing.
      host_waited: the share of that time in which the host waited for the device. Near 0 the host bounds the time.
      compile_seconds: from Python to the executable.
      peak_bytes: arguments, results and temporaries, as XLA reports them.
      temporary_bytes: the temporaries alone.
    """

    microseconds: float
    host_waited: float
    compile_seconds: float
    peak_bytes: int
    temporary_bytes: int
    fastest: float | None = None
    slowest: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """An implementation: its results' differences from the reference's, and its two programs.

    Attributes:
      gradients: value and gradients.
      hessian_product: the derivative of the gradients along a direction; None if not asked for.
      failed: why there is nothing else, or nothing of the Hessian.
      missing: whether it failed because the function has no such implementation, such as a kernel.
      same_as: the implementation before it whose program of value and gradients is this one's, to the letter.
    """

    implementation: str | None
    differences: tuple[Difference, ...] = ()
    gradients: Program | None = None
    hessian_product: Program | None = None
    failed: str | None = None
    same_as: str | None = None
    missing: bool = False

    @property
    def programs(self) -> list[tuple[str, Program]]:
        """The programs that ran, each with the kind of its results, one of `KINDS`."""
        both = zip(KINDS[1:], (self.gradients, self.hessian_product), strict=True)
        return [(kind, program) for kind, program in both if program is not None]

    def difference(self, kind: str, name: str) -> Difference | None:
        """That of one result; None if it was not reached."""
        return next((one for one in self.differences if (one.kind, one.name) == (kind, name)), None)

    def largest(self, kind: str) -> Difference | None:
        """The largest relative difference of a kind."""
        of_kind = [difference for difference in self.differences if difference.kind == kind]
        return max(of_kind, key=lambda difference: difference.relative, default=None)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found, the reference first. Printed, it is a verdict, and tables of costs and of differences."""

    function: str
    device: str
    reference: str | None
    measured: tuple[Measured, ...]
    rounding: float = ROUNDINGS["float32"]

    @property
    def verdict(self) -> list[str]:
        """A sentence for each implementation but the reference: how fast it is, and how far off."""
        reference, *others = self.measured
        return [self._verdict(reference, one) for one in others]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> "Comparison":
        """Make a comparison again from its plain values, as `dataclasses.asdict` gives them or a JSON file holds them.
        A number that is not finite may be None there."""

        def difference(values):
            known = {key: math.inf if value is None else value for key, value in values.items()}
            return Difference(**known | {"shape": tuple(values["shape"])})

        def measured(values):
            programs = {name: values[name] and Program(**values[name]) for name in ("gradients", "hessian_product")}
            return Measured(**values | programs | {"differences": tuple(map(difference, values["differences"]))})

        report = {field.name: report[field.name] for field in dataclasses.fields(cls)}
        return cls(**report | {"measured": tuple(map(measured, report["measured"]))})

    def to_html(self, path: str | os.PathLike) -> None:
        """Writes it as a page: one file."""
        Path(path).write_text(self.page([f"jax {jax.__version__}"]), encoding="utf-8")

    def page(self, notes: Sequence[str], before: str = "", after: str = "") -> str:
        """Return the comparison as a page of HTML, with other elements of HTML before and after its own."""
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
            hint = "does the function hand `implementation=` on?"
            return f"{one.implementation} is the same program as {one.same_as}: nothing is compared; {hint}"
        ratio = reference.gradients.microseconds / one.gradients.microseconds
        if abs(np.log(ratio)) < np.log(AS_FAST):
            speed = "as fast"
        else:
            speed = f"{_times(ratio)} faster" if ratio > 1 else f"{_times(1 / ratio)} slower"
            speed += _spread(reference.gradients, one.gradients, ratio > 1)
        if min(reference.gradients.host_waited, one.gradients.host_waited) < HOST_BOUND:
            speed += " (the time is the host's)"
        worst = max(one.differences, key=lambda difference: difference.relative)
        if worst.relative <= self.rounding:
            found = f"differences at most {worst.relative:.0e}: rounding" if worst.relative else "no difference"
        else:
            found = f"differs by {worst.relative:.0e} in {worst.kind} {worst.name}: more than rounding"
        failed = f"; no Hessian product: {one.failed}" if one.failed else ""
        return f"{one.implementation} {speed}; {found}{failed}"

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(Console(file=text, width=WIDTH))
        return text.getvalue()

    def show(self, console: Console) -> None:
        """Prints the verdict, the tables, and why an implementation failed."""
        show(console, *(Text(line, style="bold") for line in self.verdict))
        show(console, *self._tables())

    def _tables(self) -> list[Table | Text]:
        failed = [one for one in self.measured if one.failed and not one.missing]
        reasons = [Text(f"failed: {one.implementation}: {one.failed}", style="red") for one in failed]
        return [self._costs(), self._differences(), *reasons]

    def _bars(self, unit: str, field: str, size: float) -> Table:
        """Draw one field of every program as bars."""
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
        # In 80 columns a long name goes to a line of its own.
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
            "of", "name", "shape", *(f"{one.implementation}: max abs, relative" for one in others),
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
    """`function(*args, implementation=..., **options)` under each implementation: results, time, memory, compilation.

    Gradients are those of the sum of the results, each element of one that is no scalar times a random number. The
    Hessian's product with a random direction is taken forward over reverse, or in reverse where a custom rule has no
    forward mode. If two implementations compile to the same program, the report says so. This happens when a function
    does not pass `implementation=` on.

    Args:
      function: a `Pair`, an `Op`, or any function that takes `implementation=` and hands it down.
      args: arrays or pytrees of arrays, models of Flax NNX among them.
      implementations: those to compare.
      reference: the one whose results the others' are held against; it is run as well.
      argnums: of the arguments to differentiate in; by default all floating ones.
      second_order: whether the Hessian's product is wanted.
      seconds: least time of a round of timing.
      seed: of what is random.
      options: of the function.

    Returns:
      A `Comparison`. An implementation that fails says why, and the others are still compared.

    Raises:
      ValueError: nothing to differentiate. What the reference raises is raised as it is.
    """
    require_function("compare", "function", function)
    require_several("compare", "implementations", implementations)
    arguments = take_apart(function, args)
    chosen = arguments.positions((argnums,) if isinstance(argnums, int) else argnums)
    if not chosen:
        among = "its arguments" if argnums is None else argnums
        raise ValueError(f"compare: {name_of(function)} has no floating argument among {among}")
    leaves, random = list(arguments.leaves), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda leaves: arguments.call(bind(function, reference, options), leaves), leaves)
    cotangents = [_normal(random, y) if y.shape else np.ones((), y.dtype) for y in shapes]
    direction = [_normal(random, leaves[i]) for i in chosen]
    expected, measured, programs = None, [], {}
    for implementation in dict.fromkeys((reference, *implementations)):
        gradients, hessian_product, in_reverse = _programs(bind(function, implementation, options), arguments, chosen)
        one, results = Measured(implementation), {}
        try:
            text = jax.jit(gradients).lower(leaves, cotangents).as_text()
            one = dataclasses.replace(one, same_as=programs.get(text))
            programs.setdefault(text, implementation)
            program, (y, gradient) = _run(gradients, (leaves, cotangents), seconds)
            one, results = dataclasses.replace(one, gradients=program), {"value": y, "gradient": gradient}
            if second_order:
                given = leaves, cotangents, direction
                try:
                    program, product = _run(hessian_product, given, seconds)
                except TypeError as error:
                    if not has_no_forward_mode(error):
                        raise
                    program, product = _run(in_reverse, given, seconds)
                one, results = dataclasses.replace(one, hessian_product=program), results | {"hessian product": product}
        except Exception as error:  # a backward can raise anything, and the other implementations are still of interest
            if expected is None:
                raise
            missing = isinstance(error, NotImplementedError) and "has no implementation" in str(error)
            failed = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            one = dataclasses.replace(one, failed=failed, missing=missing)
        expected = expected or results
        differences = tuple(
            _difference(kind, name, a, e)
            for kind in results
            for name, a, e in zip(_names(kind, arguments, chosen, shapes), results[kind], expected[kind], strict=True)
        )
        measured.append(dataclasses.replace(one, differences=differences))
    dtypes = {leaves[i].dtype.name for i in chosen} | {y.dtype.name for y in shapes}
    rounding = max(ROUNDINGS.get(dtype, ROUNDINGS["float32"]) for dtype in dtypes)
    if jax.default_backend() == "gpu" and jax.config.jax_default_matmul_precision not in ("highest", "float32"):
        rounding = max(rounding, TF32)
    return Comparison(name_of(function), jax.devices()[0].device_kind, reference, tuple(measured), rounding)


def _programs(function: Callable, arguments: Arguments, chosen: Sequence[int]) -> tuple[Callable, Callable, Callable]:
    """`(leaves, cotangents) -> (results, gradients)` and `(leaves, cotangents, direction) -> Hessian's product`.

    The product is taken forward over reverse, and again in reverse over reverse.
    """

    def of_chosen(leaves, function):
        def call(*values):
            moved = dict(zip(chosen, values, strict=True))
            return function([moved.get(i, a) for i, a in enumerate(leaves)])

        return call, [leaves[i] for i in chosen]

    def gradients(leaves, cotangents):
        call, values = of_chosen(leaves, lambda leaves: arguments.call(function, leaves))
        y, vjp = jax.vjp(call, *values)
        return y, vjp(list(cotangents))

    def hessian_product(leaves, cotangents, direction):
        call, values = of_chosen(leaves, lambda leaves: gradients(leaves, cotangents)[1])
        return jax.jvp(call, values, list(direction))[1]

    def in_reverse(leaves, cotangents, direction):
        call, values = of_chosen(leaves, lambda leaves: gradients(leaves, cotangents)[1])
        slope = lambda *values: sum(jnp.vdot(d, g) for d, g in zip(direction, call(*values), strict=True))  # noqa: E731
        return jax.grad(slope, argnums=tuple(range(len(values))))(*values)

    return gradients, hessian_product, in_reverse


def _run(function: Callable, arguments: tuple, seconds: float) -> tuple[Program, Any]:
    """What the function costs, and its results."""
    arguments = jax.device_put(arguments)
    compiled, compile_seconds = compile_program(function, arguments)
    results = compiled(*arguments)
    calls = CALLS if jax.default_backend() == "gpu" else 1  # XLA's compiler for the CPU makes slower code of a loop
    program = compiled if calls == 1 else jax.jit(functools.partial(_one_after_another, function, calls, results))
    program_seconds, host_waited, rounds = device_seconds(program, arguments, seconds)
    memory = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    per_call = [seconds / calls * 1e6 for seconds in (program_seconds, min(rounds), max(rounds))]
    program = Program(per_call[0], host_waited, compile_seconds, whole + temporary, temporary, *per_call[1:])
    return program, jax.tree.map(np.asarray, results)


def _one_after_another(function: Callable, calls: int, results: Any, *arguments: Any) -> Any:
    """The results of the last of several calls with the same arguments, each of which waits for the one before."""

    def call(before, _):
        # Tied together, so that no call is taken for the one before nor starts before it is over.
        given, _ = lax.optimization_barrier((arguments, before))
        return function(*given), None

    return lax.scan(call, jax.tree.map(jnp.zeros_like, results), length=calls)[0]


def _names(kind, arguments, chosen, results):
    if kind != "value":
        return [arguments.names[i] for i in chosen]
    return ["value"] if len(results) == 1 else [f"value {i}" for i in range(len(results))]


def _difference(kind: str, name: str, a: np.ndarray, expected: np.ndarray) -> Difference:
    a, expected = np.asarray(a, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == expected) | (np.isnan(a) & np.isnan(expected))
        off = np.where(same, 0.0, np.nan_to_num(np.abs(a - expected), nan=np.inf, posinf=np.inf))
        relative = np.linalg.norm(off) / max(np.linalg.norm(expected[np.isfinite(expected)]), 1e-300)
    return Difference(kind, name, a.shape, float(off.max(initial=0.0)), float(relative))


def _normal(random: np.random.Generator, a: Any) -> np.ndarray:
    return random.standard_normal(a.shape).astype(a.dtype)


def _spread(reference: Program, one: Program, faster: bool) -> str:
    """The smallest and the largest ratio of two rounds, one of each program."""
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
