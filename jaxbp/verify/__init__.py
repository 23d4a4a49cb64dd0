"""Trusting a backward: `check` holds it against finite differences, `compare` puts its implementations side by side."""

from jaxbp.verify.check import TOLERANCES, CheckResult, CheckRow, check
from jaxbp.verify.compare import Comparison, Difference, Measured, Program, compare
from jaxbp.verify.judge import Tolerance
from jaxbp.verify.points import ADDED

__all__ = [
    "ADDED",
    "TOLERANCES",
    "CheckResult",
    "CheckRow",
    "Comparison",
    "Difference",
    "Measured",
    "Program",
    "Tolerance",
    "check",
    "compare",
]
