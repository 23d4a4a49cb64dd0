"""Verify a backward (`check`), compare implementations (`compare`), and find the origin of a NaN (`find_nan`)."""

from jaxbp.verify.check import check as check
from jaxbp.verify.compare import Comparison as Comparison
from jaxbp.verify.compare import compare as compare
from jaxbp.verify.find_nan import NonFinite as NonFinite
from jaxbp.verify.find_nan import find_nan as find_nan
from jaxbp.verify.measurement import Difference as Difference
from jaxbp.verify.measurement import Measured as Measured
from jaxbp.verify.measurement import Program as Program
from jaxbp.verify.points import EXTRA_DATA as EXTRA_DATA
from jaxbp.verify.report import CheckResult as CheckResult
from jaxbp.verify.report import CheckRow as CheckRow
from jaxbp.verify.tolerance import TOLERANCES as TOLERANCES
from jaxbp.verify.tolerance import Tolerance as Tolerance
