import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxbp.common import checks
from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify.arguments import (
    Arguments,
    name_of,
    require_several,
    take_apart,
    takes_implementation,
    tracers_explained,
    without_other_implementations,
)
from jaxbp.verify.judge import TOLERANCES, Tolerance
from jaxbp.verify.points import EXTRA_DATA, OTHER_INTEGERS
from jaxbp.verify.report import NOT_FLOATING, CheckResult, CheckRow, progress_of
from jaxbp.verify.study import Settings, Study, is_broken

ORDERS = (1, 2, 3)


def check(
    op: Callable,
    *args: Any,
    implementations: Sequence[Implementation] | None = None,
    order: int = 2,
    kinks: Sequence[float] = (0.0,),
    kink_convention: bool = True,
    added: Sequence[str] = EXTRA_DATA,
    cases: Sequence[Mapping[str, Any] | tuple[Sequence[Any], Mapping[str, Any]]] = (),
    tolerances: Mapping[str, Tolerance] = TOLERANCES,
    most_elements: int | None = None,
    gradient_of: Callable | None = None,
    seed: int = 0,
    **options: Any,
) -> CheckResult:
    """Compare the backward of `op(*args, **options)` with finite differences, in every implementation.

    - Order 0: the value, as computed while differentiating, must equal the value of the forward alone in float64.
    - Order 1: the gradient of `Σ c y`, with results y and random c, must equal autodiff's gradient of the forward in
      float64, which central differences confirm or correct.
    - Orders 2 and 3: the gradient of `Σ c (y + y²/2)` is differentiated once or twice along random directions.

    A hand-written backward also runs outside `jit`, and with one array passed for all arguments of its shape. It runs
    under nested `vmap` of all arguments, of some arguments, and of dy only, and under `jax.checkpoint`, `scan`, `cond`,
    and `shard_map` on one device. It also runs on the data that `added` names:

    - "cotangents": dy times -4,096 and times 1e-9 (in float16, only times -32), and dy with zeros.
    - "kinks": some elements are a number in `kinks`, a constant of the forward, -0, or a subnormal number.
    - "ties": few different numbers.
    - "zeros": zeros only.
    - "small": numbers up to 1e-4, in one argument at a time.
    - "large": numbers up to 300, up to 10,000, and below -200 (where other arguments are not negative), in one argument
      at a time.
    - "integers": other and repeated integers in the range of the user's integers, random masks, and masks of only True
      or only False.
    - "dtypes": the user's data and large numbers in bfloat16 and float16, or in float32 if the data is in half
      precision.

    If an argument is positive, is in [0, 1], or has rows that sum to 1, its added data has this property. Sorted
    integers stay sorted, and a permutation stays a permutation. For an op with other requirements, use
    `added=("cotangents",)`.

    A number beyond the tolerance fails only if neither rounding nor a kink explains the difference (docs/numerics.md).
    An argument of `stop_gradient` counts as a constant. If the forward reads one triangle of a symmetric argument, its
    gradient may be spread over both triangles.

    Args:
      args: arrays or pytrees of arrays. NumPy's float64 arrays stay float64 even if JAX's 64-bit mode is off.
      order: the highest order, 1, 2, or 3.
      kinks: values of an argument at which the op may have a kink, where the slopes on the two sides differ.
      kink_convention: whether the op must have autodiff's slope at a kink, not any slope between the slopes of both
        sides.
      cases: other options to check, such as `{"stride": 2}`, or pairs of other arguments and their options, such as
        `((x, w), {})`.
      tolerances: per dtype. Arguments of other dtypes are skipped.
      most_elements: the number of elements per argument that finite differences confirm.
      gradient_of: a function whose derivative the backward must compute, if this is deliberately not the forward's
        derivative, as in `check(round_straight_through, x, gradient_of=lambda x: x)`. The order is then 1, and
        `implementation="autodiff"` is not checked.

    Returns:
      A `CheckResult`, true if nothing failed.

    Raises:
      ValueError, TypeError: an argument is invalid; there is no floating argument or result; a result is not an array;
        the op has no forward in float64, or has a side effect; or `gradient_of` has results of other shapes.
    """
    if order not in ORDERS:
        raise ValueError(f"check: order is {order!r}; wants 1, 2, or 3")
    if unknown := set(added) - set(EXTRA_DATA):
        raise ValueError(
            f"check: the argument added contains {', '.join(map(repr, sorted(unknown)))}; wants only names among "
            f"{', '.join(EXTRA_DATA)}"
        )
    checks.function("check", "op", op)
    if gradient_of is not None:
        checks.function("check", "gradient_of", gradient_of)
    require_several("check", "implementations", implementations)
    op = without_other_implementations(op, args, options)
    if implementations is None:
        implementations = IMPLEMENTATIONS if takes_implementation(op) else (None,)
    if gradient_of is not None:
        implementations, order = [name for name in implementations if name != "autodiff"], 1
    rows, notes, progress = [], [], progress_of(name_of(op))
    settings = Settings(
        implementations, order, kinks, kink_convention, added, tolerances, most_elements, seed, gradient_of, progress
    )
    with progress:
        for case, arguments, changed in _cases(op, args, options, cases):
            with tracers_explained("check", op):
                found = _rows(op, arguments, changed, settings, notes)
            rows += [dataclasses.replace(row, case=case) for row in found]
    return CheckResult(tuple(rows), _untried(rows, options, cases, added), tuple(dict.fromkeys(notes)))


def _cases(op, args, options, cases) -> Iterator[tuple[str, Arguments, Mapping[str, Any]]]:
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
        if other is not args:
            shapes = ("×".join(map(str, a.shape)) or "scalar" for a in taken.floats)
            name.append(f"arguments of {', '.join(shapes)}")
        yield ", ".join(name), taken, changed


def _rows(op, arguments, options, settings, notes) -> list[CheckRow]:
    if not arguments.floats:
        raise ValueError(f"check: {name_of(op)} has no floating argument; wants at least one, to differentiate")
    if unknown := [dtype.name for dtype in arguments.dtypes if dtype.name not in settings.tolerances]:
        row = functools.partial(CheckRow, dtype=unknown[0], argument="all", order=1, against="", verdict="skipped")
        reason = f"there is no tolerance for {unknown[0]}"
        return [row(name_of(op), name, reason=reason, data=unknown[0]) for name in settings.implementations]
    wide = np.float64 in arguments.dtypes or jax.config.jax_enable_x64
    with jax.default_matmul_precision("highest"), jax.enable_x64(wide):
        study = Study(op, arguments, options, settings)
        rows = study.rows()
    notes += study.reference.notes
    return rows


def _untried(rows, options, cases, added) -> str:
    missing = [name for name in EXTRA_DATA if name not in added]
    tried = {row.dtype for row in rows if row.verdict != "skipped"}
    missing += [dtype for dtype in TOLERANCES if dtype not in tried and not any(row.data == dtype for row in rows)]
    if broken := {row.implementation for row in filter(is_broken, rows)}:
        where = f" for {', '.join(sorted(broken - {None}))}" if broken - {None} else ""
        missing.append(f"added data{where}, because the user's data fails")
    if kinds := {row.dtype for row in rows if row.reason == NOT_FLOATING}:
        tried = {OTHER_INTEGERS[row.data][0] for row in rows if row.verdict != "skipped" and row.data in OTHER_INTEGERS}
        if kinds != {"bool"}:
            missing.append("integers outside the range of yours" if "iu" in tried else "other integers")
        if "bool" in kinds and "b" not in tried:
            missing.append("other masks")
    if any("shard_map" in row.data for row in rows):
        missing.append("several devices")
    if not cases:
        given = f" than {', '.join(f'{name}={value!r}' for name, value in options.items())}" if options else ""
        missing += [f"other options{given}", "other shapes (cases=)"]
    return ", ".join(missing)
