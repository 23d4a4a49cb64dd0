import fnmatch
import importlib
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxbp.catalogue import CATALOGUE
from jaxbp.verify import TOLERANCES
from pallas_kernels.core.launch import launch

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if not page.is_relative_to(DOCS / "formulas")]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
CODE = {page: BLOCK.findall(page.read_text()) for page in PAGES}
"""The blocks of code on each page, each with the output that the page shows, or ""."""


def name_of(page):
    return str(page.relative_to(DOCS.parent))


KERNEL_BODIES = DOCS / "kernel_bodies.md"


@pytest.mark.parametrize("page", [page for page in PAGES if CODE[page] and page != KERNEL_BODIES], ids=name_of)
def test_its_code_runs_and_prints_what_the_page_shows(page, capsys):
    namespace = {"__name__": page.stem}
    for code, shown in CODE[page]:
        capsys.readouterr()
        exec(compile(code, page.name, "exec"), namespace)
        without_fractions = lambda text: re.sub(r"\d+\.\d+", "#", text).split()  # noqa: E731
        assert not shown or without_fractions(capsys.readouterr().out) == without_fractions(shown)


def test_code_is_in_the_pages_that_teach():
    teaching = {"install", "tutorial", "kernel_bodies", "tutorial_faster", "reading_a_backward", "numerics", "nnx"}
    assert {page.stem for page in PAGES if CODE[page]} >= teaching


def test_the_code_of_kernel_bodies_runs_and_raises_the_errors_on_the_page(capsys):
    name, text = "page.md", KERNEL_BODIES.read_text()  # no file, whose lines would be in the messages
    namespace = {"__name__": KERNEL_BODIES.stem}
    for code, shown in CODE[KERNEL_BODIES]:
        exec(compile(code, name, "exec"), namespace)
        printed = capsys.readouterr().out
        assert re.sub(rf"^mine: {name}:\d+: ", "", printed).split() == shown.split()
    assert sum("; wants " in shown for _, shown in CODE[KERNEL_BODIES]) == text.count("def wrong(") > 5


def test_the_table_of_tolerances_is_the_librarys():
    rows = re.findall(r"^\| (\w*float\d+) \| (\S+) \| (\S+) \| ([^|]+) \|$", (DOCS / "numerics.md").read_text(), re.M)
    assert rows == [
        (
            dtype,
            f"{tolerance.rtol:.0e}",
            f"{tolerance.atol:.0e}",
            f"{tolerance.step:.0e}" if tolerance.step else "by scale",
        )
        for dtype, tolerance in TOLERANCES.items()
    ]


def test_the_site_builds_without_a_warning_and_asks_for_nothing_from_elsewhere(tmp_path):
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module)
    source, html = (
        shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("formulas")),
        tmp_path / "html",
    )
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", source, html]
    built = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent, check=False)
    assert built.returncode == 0, built.stderr
    assert [page for page in PAGES if not (html / page.relative_to(DOCS)).with_suffix(".html").exists()] == []
    families = {entry.function.__module__.rpartition(".")[2] for entry in CATALOGUE}
    assert families == {page.stem for page in (html / "formulas").glob("*.html")}
    for page in html.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)] == []
    sheet, api = (html / "formulas" / "conv2d.html").read_text(), (html / "api.html").read_text()
    assert "<math" in sheet and 'href="../_modules/jaxbp/ops/conv/conv2d.html#conv2d_backward_input"' in sheet
    framework = ("Pair", "Op", "DefaultImplementation", "differentiable", "verify.check", "verify.compare")
    for name in (*framework, "Wires", "TreeWires", "Circuit", "ConvolutionalCircuit", "Netlist", "CellularCircuit"):
        assert re.search(rf'id="jaxbp\.{name}"', api), name


@pytest.mark.parametrize("picture", sorted((DOCS / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_its_drawings_are_readable_in_light_and_dark(picture):
    ElementTree.parse(picture)
    light, _, dark = picture.read_text().partition("prefers-color-scheme: dark")
    assert ".paper" in light and ".paper" in dark


@pytest.fixture
def formula_sheet(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("formula_sheet")


@pytest.fixture
def typeset(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("typeset")


def words(text):
    return " ".join(re.sub(r"`[^`]*`|\$[^$]*\$", "@", text).split())


def test_the_formula_sheet_has_every_op_with_its_formula(formula_sheet):
    text = "".join(formula_sheet.pages().values())
    for entry in CATALOGUE:
        _, found, section = text.partition(f"\n## {entry.name}\n")
        assert found
        section = " ".join(section.partition("\n## ")[0].split())
        paragraph = entry.function.__doc__.split("\n\n")[0]
        assert words(paragraph) in words(section)
        for formula in re.findall(r"`([^`]* = [^`]*)`", paragraph):
            formula = " ".join(formula.split())
            assert f"${formula_sheet.typeset.latex(formula)}$" in section or f"`{formula}`" in section


def test_the_formula_sheet_follows_the_docstrings(formula_sheet, monkeypatch):
    relu = next(entry.function for entry in CATALOGUE if entry.name == "relu")
    monkeypatch.setattr(relu, "__doc__", "Another formula, `y = x`.\n\nArgs:\n  x: numbers.\n\nSource: nowhere, 1999.")
    page = formula_sheet.pages()["activations"]
    assert "Another formula, $y = x$." in page and "Source: nowhere, 1999." in page and "numbers" not in page


def test_the_formula_sheet_shows_a_shape_for_each_array_of_a_pair(formula_sheet):
    page = formula_sheet.pages()["batch_norm"]
    assert "`running`: `(channels)`, `(channels)`\n" in page


def test_the_titles_of_the_formula_sheet_are_no_sentences(formula_sheet):
    titles = [page.partition("\n")[0] for page in formula_sheet.pages().values()]
    assert titles and not [title for title in titles if ". " in title or title.endswith(".")]


def test_nearly_every_formula_of_the_sheet_is_typeset(formula_sheet):
    text = "".join(formula_sheet.pages().values())
    typed = [code for code in re.findall(r"`([^`]*)`", text) if re.search(r" = |Σ", code)]
    assert text.count("$") > 200
    # Calls by name, and indices that only NumPy supports, remain code.
    assert all("(" in code or "[" in code for code in typed) and len(typed) <= 5, typed


@pytest.mark.parametrize(
    ("formula", "latex"),
    [
        ("y = x wᵀ + b", r"y = x\,w^{\top } + b"),
        ("db[k] = Σ_{n, i} dy[n, k, i]", r"\mathit{db}_{k} = \sum _{n, i}\,\mathit{dy}_{n, k, i}"),
        ("dx = dy where x > 0, else 0", r"\mathit{dx} = \mathit{dy} \text{ where } x > 0, \text{ else } 0"),
        ("x̂ = x / sqrt(mean(x²) + epsilon)", r"\hat{x} = x / \sqrt{\operatorname{mean}(x^{2}) + \mathit{epsilon}}"),
        ("yᵢ = exp(xᵢ) / Σⱼ exp(xⱼ)", r"y_{i} = \operatorname{exp}(x_{i}) / \sum _{j}\,\operatorname{exp}(x_{j})"),
        ("y = x1 ** (x2 - 1)", r"y = x_{1}^{x_{2} - 1}"),
        ("max_pool2d(relu(x), window)", None),
        ("y = conv2d(x, w)", None),
        ("y.shape[i] = a.shape[axes[i]]", None),
        ("y = (x", None),
        ("y = x)", None),
        ("NAME_backward", None),
    ],
)
def test_a_formula_in_plain_text_becomes_latex_and_other_code_does_not(typeset, formula, latex):
    assert typeset.latex(formula) == latex


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("tables")


@pytest.fixture
def figures(tables):
    return importlib.import_module("figures")


@pytest.fixture
def book(tables, figures, tmp_path, monkeypatch):
    """Return `book(text, **reports)`, which renders a page."""
    docs = tmp_path / "docs"
    monkeypatch.setattr(figures.measurements, "DOCS", docs)
    (docs / "results").mkdir(parents=True)
    (docs / "images").mkdir()
    (tmp_path / "README.md").write_text("# A library\n")

    def write(text, **reports):
        for name, report in reports.items():
            (docs / "results" / f"{name}.json").write_text(json.dumps(report))
        (docs / "page.md").write_text(f"<!-- table: {text} -->\n<!-- end -->\n")
        assert tables.main([]) == 0
        return (docs / "page.md").read_text()

    return write


def row(work="a work", implementation="pallas", microseconds=10.0, peer=None, **fields):
    return {
        "work": work,
        "op": work.split()[0],
        "place": "",
        "batch": 128,
        "dtype": "float32",
        "precision": "default",
        "implementation": implementation,
        "peer": peer,
        "microseconds": microseconds,
        "host_waited": 0.9,
        "temporary_bytes": 3 * 2**20,
        "compile_seconds": 1.5,
        "error": 1e-7,
        "failed": None,
        "floor_fraction": 0.5,
    } | fields


def report(*rows):
    return {
        "command": "python -m experiments.bench --json docs/results/run.json",
        "date": "2026-11-22T10:00:00+00:00",
        "commit": "0123456789abcdef",
        "device": "a device",
        "platform": "gpu",
        "versions": {"python": "3.13", "jax": "0.12.0"},
        "dtype": "float32",
        "precision": "default",
        "copy_bytes_per_second": 4e12,
        "operations_per_second": {"default": 3e14, "highest": 5e13},
        "rows": list(rows),
    }


def cells(text):
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines if not line.startswith("---")]


def test_tables_and_charts_are_those_of_the_results(tables):
    assert [name_of(path) for path in tables.stale()] == [], "run `python docs/tables.py`"


@pytest.fixture
def computed_in(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("computed_in")


# The page's table has the same dtypes, which are found once per process.
def test_no_op_adds_up_or_exponentiates_in_half_precision(computed_in):
    dtype = "bfloat16"
    found = {
        (entry.name, implementation): computed_in.found(entry.name, implementation, dtype)
        for entry in CATALOGUE
        for implementation in computed_in.ours(entry.name)
    }
    assert {op: of["sums"] for op, of in found.items() if dtype in of["sums"]} == {}
    assert {op: of["functions"] for op, of in found.items() if dtype in of["functions"]} == {}
    forwards = {re.sub("_with_.*|_backward.*", "", op) for (op, _), of in found.items() if dtype in of["terms"]}
    assert forwards == computed_in.ADD_IN_HALF


def test_every_table_of_the_book_is_one_that_can_be_made(tables):
    marks = [mark for page in tables.pages() for mark in re.findall(r"<!-- table: (\w+)", page.read_text())]
    ends = sum(page.read_text().count("<!-- end -->") for page in tables.pages())
    assert len(marks) == ends > 20 and set(marks) == tables.TABLES.keys()


def test_every_result_says_where_it_comes_from_and_is_in_a_table(tables, figures):
    words = [word for page in tables.pages() for word in re.findall(r"<!-- table: \w+ (.*) -->", page.read_text())]
    marks = [mark for mark in " ".join(words).split() if "=" not in mark and mark != "*"]
    marks += [family.file for family in figures.summary.FAMILIES]
    lab = "".join(page.read_text() for page in (DOCS / "lab").glob("*.md"))
    marks += re.findall(r"\]\(\.\./results/([\w-]+)\.json\): .+\n\n    ", lab)
    for path in (DOCS / "results").glob("*.json"):
        assert json.loads(path.read_text()).keys() >= {"date", "commit", "command", "device", "versions"}, path.name
        assert any(fnmatch.fnmatchcase(path.stem, mark) for mark in marks), f"{path.name} is in no table"
        written = re.search(r"--json (\S+)", json.loads(path.read_text())["command"])
        assert written is None or written[1] == f"docs/results/{path.name}"


def test_works_have_a_line_each_with_speedup_and_roofline(book):
    run = report(row(), row(implementation="autodiff", microseconds=25.0, floor_fraction=0.2), row("b work"))
    head, first, second = cells(book("works run", run=run))
    assert head[:3] == ["workload, batch 128, µs", "`pallas`", "`autodiff`"]
    assert head[3:] == ["speedup over autodiff", "jaxbp, % of roofline"]
    assert first == ["a work", "**10**", "25", "2.50x", "50%"]
    assert second == ["b work", "**10**", "", "", "50%"]


def test_the_batch_sizes_of_a_workload_ascend_but_workloads_keep_their_order(book):
    run = report(row("b work", batch=8), row("a work", batch=4), row("b work", batch=2))
    titles = [line[0] for line in cells(book("works run", run=run))[1:]]
    assert titles == ["b work, batch 2", "b work, batch 8", "a work, batch 4"]


def test_the_time_per_tile_is_relative_to_attention_without_a_mask(book):
    causal = dict(place="8x2 causal", share_of_tiles=0.5)
    run = report(
        row("a", place="8x2", share_of_tiles=1.0),
        row("a causal", microseconds=6.0, **causal),
        row("a causal", "Torch", 5.0, peer="Torch", **causal),
        row("a of another shape", place="9x2", share_of_tiles=1.0),
    )
    head, *lines = cells(book("masks run", run=run))
    assert head[2:] == ["tiles with a valid pair", "time per tile / without a mask"]
    assert lines == [["a", "10", "100%", "1.00x"], ["a causal", "6", "50%", "1.20x"]]


def test_works_without_a_row_of_the_library_are_left_out_but_not_those_that_failed(book):
    failed = row("c work", microseconds=None, failed="ValueError: broken")
    run = report(row(), row("b work", "autodiff"), row("b work", "Torch eager", peer="Torch"), failed)
    assert [line[:2] for line in cells(book("works run", run=run))[1:]] == [["a work", "**10**"], ["c work", "failed"]]


@pytest.mark.parametrize(
    ("works", "heading", "titles"),
    [
        (["a step in x, batch 8", "a step in y, batch 8"], "a step in …, batch 8, µs", ["x", "y"]),
        (["a, batch 8", "b, batch 8", "c, batch 9"], "workload, batch 8 unless stated, µs", ["a", "b", "c, batch 9"]),
        (["a step, batch 8", "a step, batch 9"], "a step, batch …, µs", ["8", "9"]),
        (["a, batch last, batch 8", "b, batch last, batch 8"], "workload, batch last, batch 8, µs", ["a", "b"]),
        (["a step, batch 8"], "workload, µs", ["a step, batch 8"]),
        (["a", "a b"], "workload, µs", ["a", "a b"]),
    ],
)
def test_a_heading_says_what_titles_share(figures, works, heading, titles):
    assert figures.cells.hoisted(works) == (heading, titles)


def test_a_file_is_described_once_per_page(book):
    text = book("works run -->\n<!-- end -->\n\n<!-- table: works run", run=report(row()))
    assert text.count("a device") == 1 and "[run.json](results/run.json): described above." in text


def test_a_study_of_recipes_counts_the_seeds_that_came_out_exact(book):
    fields = dict(stands=1.0, heals=0.5, gates=7)
    runs = [
        dict(recipe="worst", seed=0, right=0.0, updates=2000) | fields | {"stands": 0.0},
        dict(recipe="best", seed=0, right=1.0, updates=150) | fields,
        dict(recipe="best", seed=1, right=1.0, updates=350) | fields,
        dict(recipe="best", seed=2, right=0.99, updates=2000) | fields | {"stands": 0.0},
    ]
    study = {"experiment": "ca-x", "recipes": {"best": "a recipe", "worst": "another"}, "runs": runs}
    page = book("seeds study", study={key: value for key, value in report().items() if key != "rows"} | study)
    head, best, worst = cells(page)
    assert head == ["settings", "exact", "stand", "heal", "updates until exact, median", "gates, median"]
    assert best == ["ca-x: a recipe", "2 of 3", "2", "0", "250", "7"]
    assert worst == ["ca-x: another", "0 of 1", "0", "0", "", ""]


def test_a_command_of_a_script_that_moved_or_is_gone_checks_out_its_commit(book):
    run = report() | {"rows": []}
    today = {"command": "python -m experiments.studies.profiles lenet"}
    assert f"\n    {today['command']}" in book("seeds run", run=run | today)
    for script in ("docs/lab/profiles.py lenet", "-m experiments.sanitize relu", "docs/lab/hardening.py ca-life"):
        gone = run | {"command": f"python {script}", "commit": "0123456789abcdef+"}
        assert f"\n    git checkout 0123456789abcdef && python {script}" in book("seeds run", run=gone)


def test_a_profile_adds_up_the_launches_of_a_kernel_and_weighs_their_shares(book):
    fields = dict(work="a step", dtype="float32", l2=1, l1=2, sm=3, warps=4, issued=0.5, registers=32)
    rows = [
        dict(kernel="relu_mosaic_gpu_kernel", microseconds=10.0, dram=40, waits_for="barrier", waited_cycles=2.0),
        dict(kernel="relu_mosaic_gpu_kernel", microseconds=30.0, dram=80, waits_for="selected", waited_cycles=9.1),
        dict(kernel="tanh_mosaic_gpu_kernel", microseconds=10.0, dram=8, waits_for="barrier", waited_cycles=2.0),
        dict(kernel="gemm", microseconds=5.0, dram=10, waits_for="barrier", waited_cycles=2.0),
    ]
    run = report() | {"rows": [row | fields for row in rows]}
    _, relu, tanh = cells(book("profile run", run=run))
    assert relu == ["a step", "`relu`", "40", "DRAM, 70%", "4%", "0.5", "selected, 9.1"]
    assert tanh[:4] == ["", "`tanh`", "10", "DRAM, 8%"]


def test_a_run_under_the_sanitizer_has_a_line_for_ops_of_which_all_tools_say_the_same(book):
    rows = [("relu", "memcheck", "clean"), ("relu", "racecheck", "found"), ("sum", "memcheck", "timed out")]
    rows += [("tanh", "memcheck", "clean"), ("tanh", "racecheck", "found")]
    run = report() | {"rows": [dict(zip(("op", "tool", "outcome"), row, strict=True)) for row in rows]}
    head, relu, total = cells(book("sanitizer run", run=run))
    assert head[1:] == ["memcheck", "racecheck"]
    assert (relu, total) == (["`relu`, `tanh`", "clean", "found"], ["`sum`", "timed out", "not run"])
    rows = [("relu", "memcheck", "failed"), ("relu", "racecheck", "clean"), ("sum", "racecheck", "timed out")]
    later = {"date": "2026-11-23", "rows": [dict(zip(("op", "tool", "outcome"), row, strict=True)) for row in rows]}
    _, relu, total, _ = cells(book("sanitizer run*", run=run, run_later=run | later))
    assert (relu, total) == (["`relu`", "clean", "clean"], ["`sum`", "timed out", "timed out"])


def test_a_table_says_where_and_how_it_was_measured(book):
    text = book("works run", run=report(row(error=0.25)))
    for fact in ("results/run.json", "a device", "jax 0.12.0", "2026-11-22", "commit 0123456789", "4 TB/s", "2.5e-01"):
        assert fact in text
    assert "    python -m experiments.bench --json docs/results/run.json" in text


def test_a_table_names_only_the_packages_that_its_rows_use(book):
    versions = {"jax": "1", "flax": "2", "PyTorch": "3", "QuACK": "4", "tokamax": "5", "published automaton": "1"}
    run = report(row(), row(implementation="QuACK eager", peer="QuACK")) | {"versions": versions}
    assert "a device, jax 1, PyTorch 3, QuACK 4, 2026" in book("works run", run=run)
    run["rows"] = [row(), row(implementation="published automaton", peer="published automaton")]
    assert "a device, jax 1, 2026" in book("works run", run=run)


def test_works_are_chosen_by_patterns(book):
    run = report(row("conv2d_x", microseconds=1.0), row("relu_x", microseconds=2.0))
    assert [line[0] for line in cells(book("works run op=conv*", run=run))[1:]] == ["`conv2d_x`, batch 128"]
    assert "no such rows" in book("works run op=nothing")


def test_what_failed_and_what_the_host_bounds_is_marked(book):
    failed = row(implementation="xla", microseconds=None, failed="NotImplementedError: no")
    broken = row(implementation="None", microseconds=None, failed="ValueError: broken")
    text = book("works run", run=report(row(host_waited=0.01), failed, broken))
    assert cells(text)[1][1:4] == ["**10***", "unsupported", "failed"]
    assert "the device waited for the host" in text


def test_peers_have_a_column_each_after_the_library_and_the_fastest_is_bold(book):
    run = report(row(implementation="Torch eager", microseconds=8.0, peer="Torch"), row())
    head, line = cells(book("works run columns=peer", run=run))
    assert head == ["workload, µs", "`pallas`", "Torch eager", "speedup over best peer"]
    assert line == ["a work, batch 128", "10", "**8**", "0.80x"]


def test_models_have_a_line_per_implementation_and_peers_are_last(book):
    figures = dict(tokens_per_second=2e5, model_flop_utilization=0.4, peak_bytes=2**31)
    failed = dict.fromkeys(figures) | dict(failed="RuntimeError: out of memory", microseconds=None)
    rows = row(implementation="Torch", peer="Torch") | figures, row(implementation="autodiff") | failed, row() | figures
    head, *lines = cells(book("models run", run=report(*rows)))
    assert head[2:] == ["µs", "tokens/s", "model FLOP utilization", "peak memory, MiB"]
    assert [line[1:] for line in lines] == [
        ["`autodiff`", "failed", "", "", ""],
        ["`pallas`", "10", "200,000", "40%", "2,048"],
        ["Torch", "10", "200,000", "40%", "2,048"],
    ]


def test_ratios_list_what_is_outside_of_the_band(book):
    pairs = [("a work", 10.0), ("b work", 20.0)]
    rows = [row(work, name, time) for work, time in pairs for name, time in (("None", time), ("autodiff", 10.0))]
    text = book("ratios run high=1.05", run=report(*rows))
    assert "`None` takes at most 1.05x the time of `autodiff` in 1 of 2 workloads." in text
    assert cells(text)[1:] == [["b work, batch 128", "20", "10", "2.00x"]]


def test_a_workload_that_was_timed_again_counts_once_in_the_ratios(book):
    of = lambda time: report(row(implementation="None", microseconds=time), row(implementation="autodiff"))  # noqa: E731
    text = book("ratios old new high=1.05", old=of(20.0), new=of(10.0))
    assert "in 1 of 1 workloads" in text and not cells(text)
    cut = report(row(implementation="None", microseconds=30.0), row())
    assert "in 1 of 1 workloads" in book("ratios old new cut high=1.05", old=of(20.0), new=of(10.0), cut=cut)


def test_a_comparison_has_the_times_of_two_rows_and_their_ratio_in_each_field(book):
    peer = row(implementation="Torch eager", microseconds=5.0, peer="Torch", burst_microseconds=30.0)
    run = report(row(burst_microseconds=20.0), row(implementation="None"), peer)
    head, line = cells(book("comparison run of=Torch fields=microseconds,burst_microseconds", run=run))
    assert head[1:4] == ["Torch", "`pallas`", "Torch / `pallas`"] and head[6] == "Torch / `pallas`, burst"
    assert line == ["a work, batch 128", "5", "10", "0.50x", "30", "20", "1.50x"]
    assert cells(book("comparison run of=None"))[0][1:] == ["`None`", "`pallas`", "`None` / `pallas`"]


def test_trainings_have_a_line_each(book):
    run = report() | {
        "command": "python -m experiments.train lenet --epochs 3 --json docs/results/mnist-a.json",
        "test_accuracy": 0.99,
        "epochs": 3,
        "train_seconds": 1.25,
        "evaluation_seconds": 0.5,
        "compile_seconds": 8.0,
        "images_per_second": 424_000.0,
    }
    columns = "columns=arguments,test_accuracy,epochs,train_seconds,evaluation_seconds,compile_seconds,images"
    text = book(f"training mnist-* experiment=lenet {columns}", **{"mnist-a": run})
    assert cells(text)[1][1:] == ["0.9900", "3", "1.2", "0.5", "8", "424,000"]
    assert "`lenet --epochs 3`" in text and "Not measured" in book(f"training mnist-* experiment=logic {columns}")


def test_the_summary_takes_the_best_variant_of_any_peer(book, figures):
    lenet = {"work": "lenet training step"}
    autodiff = row(implementation="autodiff", microseconds=20.0, **lenet)
    slow = row(implementation="A eager", microseconds=90.0, peer="A", **lenet)
    fast = row(implementation="B compiled", microseconds=30.0, peer="B", **lenet)
    text = book("summary", lenet=report(row(**lenet), autodiff, slow, fast))
    first, *unmeasured = cells(text)[1:]
    assert first[1:7] == ["10", "20", "2.00x", "30 (B)", "3.00x", "50%"]
    families, chart = figures.summary.FAMILIES, figures.charts.speed()
    assert len(unmeasured) == len(families) - 1 and all(line[1] == "not measured yet" for line in unmeasured)
    assert "3.00x" in chart and "2.00x" in chart and "over the best peer: B<" in chart


def test_speedups_are_over_the_fastest_form_of_autodiff(book):
    slow, fast = (row(implementation=name, microseconds=t) for name, t in (("autodiff", 90.0), ("autodiff, x", 20.0)))
    head, line = cells(book("works run", run=report(row(), slow, fast)))
    assert head[1:4] == ["`pallas`", "`autodiff`", "`autodiff, x`"] and line[1:5] == ["**10**", "90", "20", "2.00x"]
    lenet = {"work": "lenet training step"}
    text = book("summary", lenet=report(row(**lenet), slow | lenet, fast | lenet))
    assert cells(text)[1][1:4] == ["10", "20 (x)", "2.00x"]


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        (dict(operations=0), ""),
        (dict(operations=9, dtype="bfloat16"), "bfloat16"),
        (dict(operations=9, precision="highest", error=1e-3), "exact"),
        (dict(operations=9, error=1e-7), "TF32"),  # at the larger batch that is timed, a kernel may use TF32
        (dict(operations=9, error=1e-7, error_batch=128), "exact"),
        (dict(operations=9, error=1e-3, error_batch=128), "TF32"),
        (dict(operations=9, error=1e-7, implementation="autodiff"), "exact"),
        (dict(operations=9, error=1e-4, implementation="autodiff"), "TF32"),
        (dict(operations=9, error=1e-7, implementation="Torch", peer="Torch"), "exact"),
    ],
)
def test_the_precision_of_products_follows_from_settings_and_errors(figures, fields, precision):
    assert figures.measurements.products(row(**fields)) == precision


def test_both_precisions_are_shown_if_they_differ(book):
    fields = dict(operations=9)
    run = report(row(error=1e-3, **fields), row(implementation="autodiff", microseconds=20.0, **fields))
    assert cells(book("works run columns=speedup,products", run=run))[1][3:] == ["2.00x", "TF32 / exact"]
    run["rows"][1]["error"] = 1e-3
    assert cells(book("works run columns=speedup,products", run=run))[1][3:] == ["2.00x", "TF32"]


def test_kernels_slower_than_autodiff_are_listed_from_the_newest_run(book):
    rows = [row(work, name, t) for work in ("a", "b") for name, t in (("pallas", 10.0), ("autodiff", 5.0))]
    later = report(row("b"), row("b", "autodiff", 11.0)) | {"date": "2026-11-23T10:00:00+00:00"}
    page = book("slower *", run=report(*rows, row("a", "B", 1.0, peer="B")), later=later)
    assert "slower than autodiff in 1 of 2 measured workloads" in page
    assert cells(page) == [["workload", "speedup over autodiff"], ["a, batch 128", "0.50x"]]
    assert "Measured on a device, jax 0.12.0: [run.json](results/run.json)." in page


def test_kernels_slower_than_autodiff_are_marked_if_the_host_determined_a_time(book):
    run = report(row("a"), row("a", "autodiff", 5.0, host_waited=0.01), row("b"), row("b", "autodiff", 5.0))
    page = book("slower *", run=run)
    assert cells(page)[1:] == [["a", "0.50x*"], ["b", "0.50x"]] and "waited for the host" in page


def test_kernels_slower_than_autodiff_in_one_dtype_are_listed_beside_a_newer_run_in_another(book):
    rows = [row("a"), row("a", "autodiff", 5.0)]
    later = [row("a", dtype="bfloat16"), row("a", "autodiff", 20.0, dtype="bfloat16")]
    later = report(*later) | {"date": "2026-11-23T10:00:00+00:00"}
    page = book("slower *", run=report(*rows), later=later)
    assert "slower than autodiff in 1 of 2 measured workloads" in page
    assert cells(page)[1:] == [["a, batch 128", "0.50x"]]


def test_the_chart_of_kernels_has_the_worst_and_the_best_place_of_each(book, figures):
    places = [row("gates a", floor_fraction=0.25), row("gates b", floor_fraction=0.75)]
    places = [of | {"place": of["work"][-1]} for of in places]
    half = places[0] | {"work": "gates a in float16", "dtype": "float16", "floor_fraction": 0.9}
    theirs = places[0] | {"implementation": "autodiff", "floor_fraction": 0.99}
    newer = report(places[1] | {"floor_fraction": 0.5, "work": "gates b at default precision"})
    newer |= {"date": "2026-11-23T10:00:00+00:00"}
    book("works run", run=report(*places, half, theirs), another=newer)
    words = re.findall(r">([^<]+)</text>", figures.charts.floors())
    assert words[-4:] == ["gates, float16", "90%", "gates", "25% to 50%"]
    assert (figures.measurements.DOCS / "images" / "roofline.svg").read_text() == figures.charts.floors()


def test_a_table_without_its_file_says_so_until_there_is_one(book, tables, figures):
    assert "*Not measured yet: there is no `docs/results/run.json`.*" in book("works run")
    assert tables.stale() == {}
    docs = figures.measurements.DOCS
    (docs / "results" / "run.json").write_text(json.dumps(report(row())))
    assert list(tables.stale()) == [docs / "page.md", docs / "images" / "roofline.svg"]


def test_a_table_is_stale_when_its_result_changes(book, tables, figures):
    book("works run", run=report(row()))
    assert tables.stale() == {} and tables.main(["--check"]) == 0
    docs = figures.measurements.DOCS
    (docs / "results" / "run.json").write_text(json.dumps(report(row(microseconds=11.0))))
    assert tables.main(["--check"]) == 1
    assert list(tables.stale()) == [docs / "page.md"]


def test_every_family_of_the_summary_has_its_page_and_its_rows(figures):
    families = figures.summary.FAMILIES
    assert [family.page for family in families if not (DOCS / "benchmarks" / f"{family.page}.md").exists()] == []
    assert [family.name for family in families if not figures.measurements.library(family.rows())] == []


def test_a_workload_has_one_time_in_all_tables_of_the_book(tables, figures):
    words = [word for page in tables.pages() for word in re.findall(r"<!-- table: (\w+ .*) -->", page.read_text())]
    tables_of_works = [arguments for kind, *arguments in map(str.split, words) if kind == "works"]
    shown = [(word, arguments) for arguments in tables_of_works for word in arguments if "=" not in word]
    values = {}
    for name, arguments in shown:
        (ops,) = [word[3:] for word in arguments if word.startswith("op=")] or ["*"]
        (field,) = [word[5:] for word in arguments if word.startswith("time=")] or ["microseconds"]
        for of in figures.measurements.load(name).values():
            for one in (row for row in of["rows"] if fnmatch.fnmatchcase(row["op"], ops)):
                key = one["work"], one["batch"], one["dtype"], one["precision"], one["implementation"], of["device"]
                values.setdefault((*key, field), set()).add(one[field])
    assert len(values) > 100 and {key for key, times in values.items() if len(times) > 1} == set()


FIGURE = re.compile(
    r"(?<![\w.])\d[\d,.]*(?:x(?!\w)|\s?(?:%|per cent\b|µs|us\b|ms\b|s\b|TB/s|[TG]FLOP|MiB|images/s|samples/s)"
    r"|\s(?:micro|milli)?seconds?\b|\stimes (?:as|faster|slower))"
)


def prose(text):
    text = re.sub(r"<!-- table:.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$|^    [^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", "", text, flags=re.DOTALL)


def test_no_page_types_a_figure_that_a_run_measures(tables):
    typed = {name_of(page): FIGURE.findall(prose(page.read_text())) for page in tables.pages()}
    assert len(typed) > 20
    assert {page: figures for page, figures in typed.items() if figures} == {}


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("it takes 61.1 us", ["61.1 us"]),
        ("2.92x as fast, at 83% of the roofline", ["2.92x", "83%"]),
        ("copy 4.1 TB/s", ["4.1 TB/s"]),
        ("after 8.4 seconds", ["8.4 seconds"]),
        ("<!-- table: works a -->\n61 us\n<!-- end -->", []),
        ("a 5x5 filter of `12 us`, 65536x1024, 2 KiB, $3 s$", []),
        ("\n    python -m x  # 10 s\n", []),
    ],
)
def test_a_typed_figure_is_seen(text, typed):
    assert FIGURE.findall(prose(text)) == typed


def test_names_of_shapes_are_defined_on_the_page():
    names = {name for entry in CATALOGUE for name in entry.real if re.fullmatch(r"[a-z]+\d?", name)}
    undefined = []
    for page in (DOCS / "benchmarks.md", *(DOCS / "benchmarks").glob("*.md")):
        rows = "\n".join(re.findall(r"^\| (?!---)([^|]*) \|", page.read_text(), re.MULTILINE))
        found = names.intersection(re.findall(r"(?:` |fwd\+bwd )([a-z]+\d?)\b", rows))
        found.update(re.findall(r"\b(?:conv|fc|relu|pool|block)\d\b", rows))
        undefined += [f"{page.name}: {name}" for name in sorted(found) if f"`{name}`" not in page.read_text()]
    assert undefined == []


def test_half_precision_stands_beside_float32(book):
    fields = dict(argument_bytes=2**20, result_bytes=0)
    run = report(
        row("step in float32", dtype="float32", **fields),
        row("step in float16", dtype="float16", microseconds=5.0, **fields | dict(temporary_bytes=2**20)),
    )
    page = book("dtypes run another", run=run)
    assert "newest runs" not in page
    assert "there is no `docs/results/another.json`" in page
    head, wide, half = cells(page)
    assert head[2:] == ["speedup over float32", "MiB", "% of float32 memory"]
    assert wide[1:] == ["float32", "1.00x", "4", "100%"]
    assert half == ["step, batch 128", "float16", "2.00x", "2", "50%"]
    newer = report(row("step", microseconds=20.0, **fields)) | {"date": "2026-11-23"}
    page = book("dtypes run", run=run, newer=newer)
    assert "from the newest runs: [newer.json](results/newer.json)." in page and cells(page)[2][2] == "4.00x"


def test_accuracies_are_means_over_seeds(book):
    runs = [
        {"settings": f"lenet --precision {precision}", "test_accuracy": accuracy, "skipped_steps": seed, "epochs": 9}
        for precision, accuracies in (("float16", (0.5, 0.7)), ("float32", (0.75,)))
        for seed, accuracy in enumerate(accuracies)
    ]
    failed = {"settings": "lenet --precision float32", "failed": "no GPU"}
    head, half, full = cells(book("seeds run", run=report(*runs, failed)))
    assert head == ["settings", "seeds", "test accuracy", "skipped steps", "epochs"]
    assert half == ["`lenet --precision float16`", "2", "0.6000 ± 0.1414", "1", "9"]
    assert full == ["`lenet --precision float32`", "1", "0.7500 ± 0.0000", "", "9"]


def test_seeds_of_one_setting_in_two_files_are_one_line(book):
    first, second = ({"settings": "logic", "seed": seed, "test_accuracy": 0.5 + seed / 4} for seed in (0, 1))
    page = book("seeds first second", first=report(first), second=report(second))
    assert cells(page)[1:] == [["`logic`", "2", "0.6250 ± 0.1768"]]


def test_accuracies_of_logic_networks_are_ordered_by_their_gates(book):
    runs = [
        {"settings": f"logic --wiring {wiring} --layers 2 --gates {gates}{arity}", "test_accuracy": accuracy}
        for wiring, gates, arity, accuracy in (
            ("random", 8000, "", 0.9),
            ("random", 500, "", 0.5),
            ("learned", 500, " --arity 4", 0.75),
            ("learned", 500, " --arity 4", 0.25),
        )
    ]
    failed = {"settings": "logic --wiring learned --layers 1 --gates 64000 --arity 4", "failed": "no answer"}
    page = book("gates run", run=report(*runs, failed))
    assert cells(page) == [
        ["gates", "fixed wires, 2 inputs", "learned wires, 4 inputs"],
        ["1,000", "0.5000", "0.5000"],
        ["16,000", "0.9000", ""],
        ["64,000", "", ""],
    ]


def test_older_studies_say_their_settings_in_several_fields(book):
    fields = dict(placed_gates=1000, simplified_gates=500, relaxed=0.75, hardened=0.5, epochs=9, seconds=3.0)
    rows = [{"size": "s", "settings": settings} | fields for settings in ({}, {"shift": 1})]
    rows[0]["c_samples_per_second"] = 2e6
    study = report(*rows) | {"dataset": "mnist", "processor": "A CPU", "compiler": "gcc 12, -O3"}
    page = book("seeds logic-conv-*", **{"logic-conv-mnist": study})
    _, first, second = cells(page)
    assert first == ["mnist, s", "1", "1,000", "500", "0.5000 ± 0.0000", "0.7500", "9", "3", "2,000,000"]
    assert second[0] == 'mnist, s, `{"shift": 1}`' and second[-1] == "" and "; A CPU; gcc 12, -O3" in page
    rows = [{"experiment": "lenet", "precision": "float32", "test_accuracy": 0.5}]
    assert cells(book("seeds run", run=report(*rows)))[1] == ["lenet, float32", "1", "0.5000 ± 0.0000"]


def test_each_step_of_the_tutorial_has_its_share_of_the_roofline(book):
    table = "rows run columns=step,microseconds,roofline"
    assert "*Not measured yet" in book(table)
    rows = [{"step": "naive", "microseconds": 400.0, "roofline_microseconds": 100.0, "roofline_share": 0.25}]
    page = book(table, run=report(*rows) | {"shape": [65536, 1024], "dtype": "bfloat16"})
    assert cells(page) == [["step", "time, µs", "share of the roofline"], ["naive", "400", "25%"]]
    assert "65,536 rows of 1,024 in bfloat16." in page and "a device" in page


def test_the_gradients_of_adapters_are_compared_with_all_gradients(book):
    assert "*Not measured yet" in book("frozen run")
    size = 2**20
    rows = [
        {"implementation": "xla", "place": wanted, "microseconds": us, "temporary_bytes": us * size, "result_bytes": n}
        for wanted, us, n in (("adapters", 100, size), ("all", 400, 9 * size))
    ]
    head, row = cells(page := book("frozen run", run=report(*rows)))
    assert row == ["`xla`", "100", "400", "25%", "100", "400", "1", "9"] and head[-1] == "results, all, MiB"
    assert "a device" in page


def test_a_program_has_the_lines_that_changed_and_the_differences_of_its_losses(book):
    where = dict(program="A GPT", repository="owner/name", commit="abc", path="a/model.py", dtype="bfloat16")
    changes = dict(replaced=12, imports=2, lines_added=14, lines_removed=13)
    run = report(where | changes | {"differences": {"None": 2.34e-7, "xla": 0.0}}) | {"note": "A note."}
    page = book("programs run columns=program,dtype,replaced,lines,None,xla", run=run)
    link = "[A GPT](https://github.com/owner/name/blob/abc/a/model.py)"
    assert cells(page)[1] == [link, "bfloat16", "12", "12 / 13", "2.3e-07", "0"]
    assert "[run.json](results/run.json): A note." in page


def test_a_program_has_its_time_and_memory_before_and_after_the_change(book):
    costs = {
        "original": dict(milliseconds=50.0, peak_bytes=2**31),
        "changed": dict(milliseconds=49.0, peak_bytes=2**30),
    }
    page = book(
        "programs run columns=setting,original_ms,changed_ms,ms,original_gib,changed_gib,gib",
        run=report({"program": "A GPT", "setting": "batch 2"} | costs) | {"note": "A note."},
    )
    assert cells(page)[1] == ["A GPT, batch 2", "50.0", "49.0", "-2%", "2.00", "1.00", "-50%"]


def test_losses_are_compared_with_the_losses_in_float32(book):
    row = {"implementation": "pallas", "dtype": "bfloat16", "difference": 0.00877}
    page = book("rows run columns=implementation,dtype,loss_difference", run=report(row))
    assert cells(page)[1] == ["`pallas`", "bfloat16", "0.88%"]


def test_what_many_devices_cost_is_a_share_and_a_batch(book):
    steps = [
        {"work": "a training step", "examples": n, "alone": t, "mesh_of_one": t, "mesh": 2 * t, "mesh_overlapping": t}
        for n, t in ((100, 200.0), (200, 300.0))
    ]
    measured = report(*steps) | {"devices": 2}
    table = "rows run columns=training_step,alone,mesh_of_one,mesh,mesh_overlapping"
    head, first, _ = cells(book(table, run=measured))
    assert head[3] == "efficiency on 2 devices" and first == ["a, 100 per device", "200", "+0.0%", "50.0%", "100.0%"]
    small = {"work": "b training step", "examples": 1, "alone": 1.0, "mesh": 51.0}
    measured = report(steps[0], small) | {"devices": 2}
    each = {"collectives": {"all-reduce": 1}, "kernels": 3}
    programs = [
        each | {"work": f"{name} training step", "bytes": size, "kernels_meanwhile": meanwhile}
        for name, size in (("a", 20_000), ("b", 5_000))
        for meanwhile in (0, 2)
    ]
    compiled = report(*programs) | {"devices": 8}
    _, line, _ = cells(book("communication compiled run", compiled=compiled, run=measured))
    # The all-reduce takes 200 µs on two devices, and 1.75 times as long on eight. 3,325 examples per device take 19
    # times as long.
    assert line == ["a", "20,000", "1 all-reduce", "1, during 2 of 3 kernels", "350", "26,600"]


def test_the_walk_sees_sums_wherever_they_are(computed_in):
    x = jax.ShapeDtypeStruct((64,), jnp.bfloat16)

    def kernel(x):
        def body(x_ref, y_ref, *, program):
            y_ref[:] = jax.lax.fori_loop(0, 2, lambda i, y: y + jnp.exp(x_ref[:]), x_ref[:])

        return launch(body, x, out=x, grid={"program": 1}, name="in_half")

    def walked(function):
        return computed_in.walk(jax.make_jaxpr(function)(x).jaxpr, defaultdict(set))

    paths = {
        "cumsum": (lambda x: jax.lax.cumsum(x), "sums"),
        "in scan": (lambda x: jax.lax.scan(lambda y, x: (y + x, None), x[0], x)[0], "terms"),
        "in a gradient": (jax.grad(lambda x: (jnp.broadcast_to(x[:1], 64) * x)[3]), "sums"),
        "in a kernel": (kernel, "terms"),
        "a function in a kernel": (kernel, "functions"),
        "a product": (lambda x: jax.jit(jnp.dot)(x, x), "products"),
    }
    for name, (function, kind) in paths.items():
        assert "bfloat16" in walked(function)[kind], name
    wide = walked(lambda x: jnp.sum(jax.nn.softmax(x.astype(jnp.float32))))
    assert wide["sums"] == wide["functions"] == {"float32"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_of_xla_adds_up_in_float32(dtype):
    # A sum of ones stops at 256 in bfloat16, and at 2048 in float16.
    ones = jnp.ones((1, 1, 64, 64), dtype)
    assert jnp.dot(ones.ravel(), ones.ravel()) == 4096
    assert jax.lax.conv(ones, ones, (1, 1), "VALID").ravel() == 4096
