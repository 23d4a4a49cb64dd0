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


def test_a_language_model_has_a_table_of_tokens(finished, capsys):
    row = finished.report["rows"][0]
    model = {"tokens_per_second": 1.5e6, "model_flop_utilization": 0.412, "peak_bytes": 3 * 2**30}
    bench_report.print_table(finished.report, Console(width=140, color_system=None))
    assert "tokens/s" not in capsys.readouterr().out
    bench_report.print_table(finished.report | {"rows": [row | model]}, Console(width=140, color_system=None))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "1,500,000" in line)
    assert row["implementation"] in line and "41.2%" in line and "3,072.0" in line


def test_the_table_says_what_was_not_measured(finished, capsys):
    report = finished.report | {"complete": False, "missing": ["relu, batch 2, xla"]}
    report |= {"left_out": {"A": "no module a", "B": "no module b"}}
    bench_report.print_table(report, Console(width=140, color_system=None))
    output = capsys.readouterr().out
    assert "not measured: relu, batch 2, xla" in output
    assert output.count("peers that cannot be imported: A: no module a; B: no module b\n") == 1
