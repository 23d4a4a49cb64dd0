"""Trusting a backward: `check` holds it against finite differences, `compare` puts its implementations side by side."""

from jaxbp.verify.check import TOLERANCES, CheckResult, CheckRow, Tolerance, check

__all__ = ["TOLERANCES", "CheckResult", "CheckRow", "Tolerance", "check"]
