"""Holding a backward against finite differences, element by element.

Every implementation's gradients are computed as a user gets them, in the dtype of the arguments. What they are held
against is computed in float64 from the same numbers, by the implementation that JAX differentiates itself. A float32
kernel, which takes no float64, is so held to the tolerance of float32 and not to that of differences in float32.
"""

import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.test_util import check_grads
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify.arguments import bind, is_float, name_of, take_apart, takes_implementation
from jaxbp.verify.reference import STEP, Expected, Reference, hessian_product, value_and_gradients


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a number a may be from the expected e of an array: `|a - e| <= rtol |e| + atol max(1, max |e|)`.

    What the rounding of a float64 difference may amount to is allowed on top.

    Attributes:
      step: by which elements are moved; None for one by the scale of the argument.
    """

    rtol: float
    atol: float
    step: float | None


TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(rtol=1e-2, atol=1e-4, step=1e-3),
    "bfloat16": Tolerance(rtol=5e-2, atol=1e-3, step=1e-3),
    "float32": Tolerance(rtol=1e-4, atol=1e-7, step=None),
    "float64": Tolerance(rtol=1e-7, atol=1e-10, step=1e-7),
}
"""By dtype."""

# For JAX's own check, which moves all arguments at once: dtype -> (step, least tolerance).
_CHECK_GRADS = {"float64": (1e-6, 1e-7), "float32": (1e-3, 2e-2)}


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """What was found of one argument.

    Attributes:
      op, implementation, dtype: what ran.
      argument: its name, or that of the result, or "all" of them together.
      order: 0 for a value, 1 for a gradient, 2 for second derivatives.
      against: what it was held against.
      verdict: "ok", "failed" or "skipped".
      elements: how many were compared.
      absolute: the largest difference.
      relative: that as a share of the largest expected element.
      index, analytic, numeric: of the element that is furthest beyond its limit, or nearest: where it is, what the op
        gave, and what was expected.
      reason: why it was skipped, or failed without numbers.
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

    def __str__(self) -> str:
        what = f"{self.op}, {self.implementation}, {self.dtype}, order {self.order}"
        if self.index is None:
            return f"{what}: {self.argument}: {self.reason or self.verdict}"
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{what}: {self.argument}{at} is {self.analytic:.9g}; wants {self.numeric:.9g} ({self.against})"


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The rows of a check. True if none failed; printed, it is a table."""

    rows: tuple[CheckRow, ...]

    @property
    def failures(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "failed")

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=150).print(self.table())
        return text.getvalue()

    def raise_if_failed(self) -> "CheckResult":
        """Itself; AssertionError with a line for every failure: the worst element, what it is and what it should be."""
        if self.failures:
            raise AssertionError("\n".join(map(str, self.failures)))
        return self

    def table(self) -> Table:
        """The rows as a table of Rich."""
        table = Table("op", "implementation", "dtype", "argument", "order", "against", "max abs", "max rel", "verdict")
        for row, following in zip(self.rows, (*self.rows[1:], None), strict=True):
            style = {"ok": "green", "failed": "bold red", "skipped": "dim"}[row.verdict]
            verdict = Text(row.verdict + (f": {row.reason}" if row.reason else ""), style=style)
            cells = (row.op, str(row.implementation), row.dtype, row.argument, str(row.order), row.against)
            ends = following is None or following.implementation != row.implementation
            table.add_row(*map(Text, cells), _short(row.absolute), _short(row.relative), verdict, end_section=ends)
        return table


def check(
    op: Callable,
    *args: Any,
    implementations: Sequence[Implementation] | None = None,
    order: int = 2,
    kinks: Sequence[float] = (0.0,),
    kink_convention: bool = True,
    tolerances: Mapping[str, Tolerance] = TOLERANCES,
    most_elements: int = 10_000,
    seed: int = 0,
    **options: Any,
) -> CheckResult:
    """Holds the backward of `op(*args, **options)` against finite differences, in every implementation.

    - Order 0: the value, as it comes out while differentiating, is that of the plain forward in float64.
    - Order 1: the gradient of `Σ c y`, c random, is that by central differences of the plain forward in float64, one
      element after the other. Where there is no derivative, at a kink or where something is infinite, differences can
      not tell right from wrong, and the gradient is held against autodiff's in float64. So that kinks are met, every
      value of `kinks` is put into the middle of each argument in turn, and the gradient there is held likewise.
    - Order 2: the Hessian of `Σ c (y + y²/2)` times a random direction is the difference of two gradients by autodiff
      in float64.
    - With order 2, also `jax.test_util.check_grads`, which moves all arguments at once: to the second order in reverse
      mode, to the first in forward mode where the op has one, with arguments and results scaled to size 1. It runs in
      float64 where the implementation takes that; else in float32, where it is coarse.

    Products of float32 are exact in a check, whatever JAX's default precision.

    Args:
      op: a `Pair`, an `Op`, or a function with `implementation=`; or one without, which is checked as it is.
      args: its arguments, arrays or pytrees of arrays. Those without gradients, such as integers, are skipped. NumPy's
        float64 arrays are taken as such, whether or not JAX's 64-bit mode is on.
      implementations: those to check; by default all. One that does not take the arguments is skipped and says why.
      order: 1 for values and gradients alone, which takes a third of the time, or 2.
      kinks: values at which the op may have a kink.
      kink_convention: whether the op has autodiff's slope at a kink; if not, any will do there.
      tolerances: by dtype.
      most_elements: so many elements of an argument are moved, evenly spread; the others are held against autodiff.
      seed: of what is random.
      options: of the op.

    Returns:
      A `CheckResult`, true if nothing failed.

    Raises:
      ValueError, TypeError: arguments that the op does not take, an order other than 1 and 2, no floating argument or
        result, or an op that has no forward in float64.
    """
    if order not in (1, 2):
        raise ValueError(f"check: order is {order!r}; wants 1 or 2")
    arguments = take_apart(op, args)
    if not arguments.floats:
        raise ValueError(f"check: {name_of(op)} has no floating argument; wants at least one, to differentiate in")
    if implementations is None:
        implementations = IMPLEMENTATIONS if takes_implementation(op) else (None,)
    wide = any(a.dtype == np.float64 for a in arguments.floats)
    with jax.default_matmul_precision("highest"), jax.enable_x64(wide or jax.config.jax_enable_x64):
        reference = Reference(op, arguments, options, seed, kink_convention)
        steps = [tolerances[a.dtype.name].step for a in arguments.floats]
        expected = list(reference.first_orders(steps, most_elements))
        if order == 2:
            expected.append(reference.second_order(min(step or STEP for step in steps)))
        expected += [
            reference.at_kink(i, kink, steps[i]) for kink in kinks for i, a in enumerate(arguments.floats) if a.size
        ]
        rows = []
        for implementation in implementations:
            checked = _Checked(op, arguments, options, implementation, tolerances)
            rows += checked.rows(reference, expected, order)
    return CheckResult(tuple(rows))


class _Checked:
    """An implementation under check."""

    def __init__(self, op, arguments, options, implementation, tolerances):
        self.arguments, self.tolerances = arguments, tolerances
        self.function = jax.jit(arguments.of_floats(bind(op, implementation, options)))
        self.row = functools.partial(CheckRow, name_of(op), implementation)
        self.gradients, self.hessian_product = value_and_gradients(self.function), hessian_product(self.function)

    def rows(self, reference: Reference, expected: Sequence[Expected], order: int) -> Iterator[CheckRow]:
        """What is found of everything that is expected, by JAX's own check, and what is not checked."""
        as_a_whole = functools.partial(self.row, self.arguments.floats[0].dtype.name, "all", order, "")
        try:
            jax.eval_shape(self.function, *self.arguments.floats)
        except NotImplementedError as error:
            yield as_a_whole("skipped", reason=_one_line(error))
            return
        try:
            for each in expected:
                yield from self._compared(reference, each)
            if order == 2:
                yield self._by_check_grads(reference)
        except Exception as error:  # a wrong backward can raise anything
            yield as_a_whole("failed", reason=f"{type(error).__name__}: {_one_line(error)}")
        for name, a in zip(self.arguments.names, self.arguments.leaves, strict=True):
            if not is_float(a):
                yield self.row(str(a.dtype), name, 1, "", "skipped", reason="not floating, so without a gradient")

    def _compared(self, reference, expected):
        values = [v.astype(a.dtype) for v, a in zip(expected.at, self.arguments.floats, strict=True)]
        direction = [v.astype(a.dtype) for v, a in zip(reference.direction, values, strict=True)]
        cotangents = [c.astype(dtype) for c, dtype in zip(reference.cotangents, reference.result_dtypes, strict=True)]
        if expected.order == 2:
            actual = zip(reference.names, self.hessian_product(values, cotangents, direction), strict=True)
        else:
            names = reference.names if expected.order == 1 else reference.result_names
            actual = zip(names, self.gradients(values, cotangents)[expected.order], strict=True)
        actual = dict(actual)
        for name, e, rounding in zip(expected.names, expected.arrays, expected.rounding, strict=True):
            a = actual[name]
            verdict = _verdict(np.asarray(a, np.float64), e, rounding, self.tolerances[a.dtype.name])
            yield self.row(a.dtype.name, name, expected.order, expected.against, **verdict)

    def _by_check_grads(self, reference):
        row = functools.partial(self.row, argument="all", order=2)
        if not reference.smooth:
            reason = "differences would cross a kink"
            return row(dtype="float64", against="check_grads", verdict="skipped", reason=reason)
        rtol = max(self.tolerances[a.dtype.name].rtol for a in self.arguments.floats)
        for dtype, (step, least) in _CHECK_GRADS.items():
            with jax.enable_x64(dtype == "float64"):
                function, values = reference.brought_to_size_1(self.function, dtype)
                try:
                    jax.eval_shape(function, *values)
                except NotImplementedError:
                    continue
                modes = ("fwd", "rev") if _has_forward_mode(function, values) else ("rev",)
                row = functools.partial(row, dtype=dtype, against=f"check_grads, {' and '.join(modes)}")
                limits = dict(atol=max(least, rtol), rtol=max(least, rtol), eps=step)
                try:
                    for mode in modes:  # forward over reverse is what `hessian_product` does
                        check_grads(function, values, 2 if mode == "rev" else 1, (mode,), **limits)
                except AssertionError as error:
                    return row(verdict="failed", reason=_one_line(error))
                return row(verdict="ok")
        reason = f"takes none of {', '.join(_CHECK_GRADS)}"
        return row(dtype="float64", against="check_grads", verdict="skipped", reason=reason)


def _verdict(a: np.ndarray, e: np.ndarray, rounding: np.ndarray | float, tolerance: Tolerance) -> dict[str, Any]:
    """The fields of a row that say how `a` compares with the expected `e`."""
    if a.size == 0:
        return dict(verdict="ok")
    finite = np.abs(e[np.isfinite(e)])
    largest = finite.max(initial=0.0)
    with np.errstate(invalid="ignore", over="ignore"):
        equal = (a == e) | (np.isnan(a) & np.isnan(e))
        difference = np.where(equal, 0.0, np.nan_to_num(np.abs(a - e), nan=np.inf))
        limit = (
            tolerance.rtol * np.where(np.isfinite(e), np.abs(e), 0.0) + tolerance.atol * max(1.0, largest) + rounding
        )
        worst = np.unravel_index(np.argmax(np.nan_to_num(difference / limit)), a.shape)
        relative = float(difference.max() / (largest or 1.0))
    return dict(
        verdict="ok" if (difference <= limit).all() else "failed",
        elements=a.size,
        absolute=float(difference.max()),
        relative=relative,
        index=tuple(map(int, worst)),
        analytic=float(a[worst]),
        numeric=float(e[worst]),
    )


def _has_forward_mode(function: Callable, values: Sequence[np.ndarray]) -> bool:
    """Whether JAX can differentiate a function forwards: one with a hand-written backward it cannot."""
    try:
        jax.jit(lambda *values: jax.jvp(function, values, values)).lower(*values)
    except TypeError:
        return False
    return True


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
