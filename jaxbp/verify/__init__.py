"""Trusting a backward: `check` holds it against finite differences, `compare` puts its implementations side by side."""

from jaxbp.verify.check import TOLERANCES, CheckResult, CheckRow, Tolerance, check
from jaxbp.verify.compare import Comparison, Difference, Measured, Program, compare

__all__ = [
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
