import re

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

from experiments.bench import report as bench_report

pytestmark = pytest.mark.once


def test_the_picture_lies_beside_the_json_and_is_not_empty(finished):
    pixels = image.imread(finished.picture)
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def test_the_table_has_a_line_a_row_and_says_what_failed(finished, capsys):
    report = finished.report | {
        "rows": [*finished.report["rows"], finished.report["rows"][-1] | {"failed": "OSError: no luck"}]
    }
    bench_report.print_table(report, Console(width=140, color_system=None))
    output = capsys.readouterr().out
    assert len(re.findall(r"│   (autodiff|None) ", output)) == len(report["rows"])
    assert "pool2, batch 2, None: OSError: no luck" in output
    assert bench_report.picture(report).startswith(b"\x89PNG")


def test_the_table_says_what_was_not_measured(finished, capsys):
    report = finished.report | {"complete": False, "missing": ["relu, batch 2, xla"]}
    bench_report.print_table(report, Console(width=140, color_system=None))
    assert "not measured: relu, batch 2, xla" in capsys.readouterr().out
    empty = report | {"rows": []}
    assert bench_report.picture(empty).startswith(b"\x89PNG")
