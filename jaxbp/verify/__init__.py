"""Verify a backward (`check`), compare implementations (`compare`), and find the origin of a NaN (`find_nan`)."""

from jaxbp.verify.check import check as check
from jaxbp.verify.compare import compare as compare
from jaxbp.verify.comparison import Comparison as Comparison
from jaxbp.verify.comparison import Difference as Difference
from jaxbp.verify.comparison import Measured as Measured
from jaxbp.verify.comparison import Program as Program
from jaxbp.verify.find_nan import NonFinite as NonFinite
from jaxbp.verify.find_nan import find_nan as find_nan
from jaxbp.verify.judge import TOLERANCES as TOLERANCES
from jaxbp.verify.judge import Tolerance as Tolerance
from jaxbp.verify.points import EXTRA_DATA as EXTRA_DATA
from jaxbp.verify.report import CheckResult as CheckResult
from jaxbp.verify.report import CheckRow as CheckRow
