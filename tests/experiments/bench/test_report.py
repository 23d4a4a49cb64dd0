import re

from rich.console import Console

from experiments.bench import report as bench_report


def test_the_table_has_a_line_a_row_and_says_what_failed(finished, capsys):
    report = finished.report | {
        "rows": [*finished.report["rows"], finished.report["rows"][-1] | {"failed": "OSError: no luck"}]
    }
    bench_report.print_table(report, Console(width=140, color_system=None))
    output = capsys.readouterr().out
    assert len(re.findall(r"│   (autodiff|None) ", output)) == len(report["rows"])
    assert "pool2, batch 2, None: OSError: no luck" in output


def test_the_table_says_what_was_not_measured(finished, capsys):
    report = finished.report | {"complete": False, "missing": ["relu, batch 2, xla"]}
    bench_report.print_table(report, Console(width=140, color_system=None))
    assert "not measured: relu, batch 2, xla" in capsys.readouterr().out
