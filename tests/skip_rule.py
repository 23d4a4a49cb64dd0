"""A test that is skipped everywhere has never run: with `--fail-on-skip` a skipped test has failed.

Allowed are reasons that another machine has not: a GPU, or its absence, and CUDA's compilers and PyTorch, which take
longer to install than CI has. `--may-skip REASON` allows one more: a tool that CI could not install.
"""

import re

import pytest

ALLOWED = re.compile(
    r"needs a GPU of compute capability|says what is missing without a GPU|needs (?:two|eight) devices to shard over"
    r"|needs (?:JAX's plugin for CUDA|ptxas|PyTorch and torchlogix):"
)


def pytest_addoption(parser):
    group = parser.getgroup("skips")
    group.addoption("--fail-on-skip", action="store_true", help="a skipped test fails, but for want of a GPU")
    group.addoption("--may-skip", action="append", default=[], metavar="REASON", help="tests skipped for REASON pass")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _judged((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _judged((yield), collector.config)


def _judged(report, config):
    """The report, as a failure if the test was skipped and may not be. One that is known to fail is not skipped."""
    if report.skipped and config.getoption("fail_on_skip") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not ALLOWED.search(reason) and not any(reason.startswith(may) for may in config.getoption("may_skip")):
            report.outcome, report.longrepr = "failed", f"skipped, which --fail-on-skip forbids: {reason}"
    return report
