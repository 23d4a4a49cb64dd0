import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A number a passes if `|a - e| <= rtol * |e| + atol * max(1, max |e|)`, where e is the expected number.

    `max |e|` is the largest in the array. `step` is the step of finite differences, or None for a step in proportion to
    the argument's largest element.
    """

    rtol: float
    atol: float
    step: float | None


TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(rtol=1e-2, atol=1e-4, step=1e-3),
    "bfloat16": Tolerance(rtol=2e-2, atol=1e-3, step=1e-3),
    "float32": Tolerance(rtol=1e-4, atol=1e-7, step=None),
    "float64": Tolerance(rtol=1e-7, atol=1e-10, step=1e-7),
}


def within(a: Any, e: Any, tolerance: Tolerance) -> bool:
    return bool((excess_and_difference(np.asarray(a, np.float64), np.asarray(e, np.float64), tolerance)[0] <= 1).all())


def allowed(e: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    largest = np.abs(e[np.isfinite(e)]).max(initial=0.0)
    return tolerance.rtol * np.where(np.isfinite(e), np.abs(e), 0.0) + tolerance.atol * max(1.0, largest)


def excess_and_difference(
    a: np.ndarray, e: np.ndarray, tolerance: Tolerance, more: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        difference = np.where(same, 0.0, np.nan_to_num(np.abs(a - e), nan=np.inf, posinf=np.inf))
        return np.nan_to_num(difference / (allowed(e, tolerance) + more)), difference
