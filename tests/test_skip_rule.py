"""The rule that a skipped test fails CI, itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs a GPU of compute capability 9.0 or higher")
def test_for_a_gpu(): pass

@pytest.mark.skip(reason="needs Icarus Verilog")
def test_of_verilog(): pass

def test_that_skips_itself(): pytest.skip("because it can")

@pytest.mark.xfail(reason="known")
def test_that_is_known_to_fail(): assert False

def test_that_passes(): pass
"""


@pytest.fixture
def outcomes(tmp_path):
    """Runs the tests above with some options: the exit code, and how many tests ended in which way."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_none.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    (tmp_path / "pytest.ini").touch()
    path = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import pytest; sys.exit(pytest.main())"

    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

    def run(*options):
        command = [sys.executable, "-c", path, "-p", "skip_rule", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
        return done.returncode, counts, done.stdout

    return run


def test_a_skipped_test_passes_by_default(outcomes):
    code, counts, _ = outcomes()
    assert (code, counts["skipped"], counts["passed"]) == (0, 4, 1)


def test_with_the_rule_only_what_lacks_a_gpu_may_be_skipped(outcomes):
    code, counts, printed = outcomes("--fail-on-skip", "--continue-on-collection-errors")
    assert (code, counts["skipped"], counts["passed"], counts["xfailed"]) == (1, 1, 1, 1)
    assert (counts["failed"], counts["errors"]) == (1, 2)
    for reason in ("needs Icarus Verilog", "because it can", "could not import 'no_such_module'"):
        assert f"skipped, which --fail-on-skip forbids: {reason}" in printed


def test_a_reason_that_is_named_is_allowed(outcomes):
    reasons = ("needs Icarus Verilog", "because it can", "could not import")
    code, counts, _ = outcomes("--fail-on-skip", *(f"--may-skip={reason}" for reason in reasons))
    assert (code, counts["skipped"]) == (0, 4)
