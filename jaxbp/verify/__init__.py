"""Verify a backward: `check` compares it with finite differences, and `compare` compares its implementations."""

from jaxbp.verify.check import TOLERANCES as TOLERANCES
from jaxbp.verify.check import check as check
from jaxbp.verify.compare import Comparison as Comparison
from jaxbp.verify.compare import compare as compare
from jaxbp.verify.measurement import Difference as Difference
from jaxbp.verify.measurement import Measured as Measured
from jaxbp.verify.measurement import Program as Program
from jaxbp.verify.points import EXTRA_DATA as EXTRA_DATA
from jaxbp.verify.report import CheckResult as CheckResult
from jaxbp.verify.report import CheckRow as CheckRow
from jaxbp.verify.tolerance import Tolerance as Tolerance
