"""The book is true: its code runs, its tables are the library's, and its site builds without a warning."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxbp.catalogue import CATALOGUE
from jaxbp.verify import TOLERANCES

pytestmark = pytest.mark.once

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CODE = {page: re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}


@pytest.mark.parametrize("page", [page for page in PAGES if CODE[page]], ids=lambda page: page.stem)
def test_its_code_runs(page):
    namespace = {"__name__": page.stem}
    for code in CODE[page]:
        exec(compile(code, page.name, "exec"), namespace)


def test_code_is_in_the_pages_that_teach():
    assert {page.stem for page in PAGES if CODE[page]} >= {"tutorial", "reading_a_backward", "numerics"}


def test_the_table_of_tolerances_is_the_librarys():
    rows = re.findall(r"^\| (\w*float\d+) \| (\S+) \| (\S+) \| ([^|]+) \|$", (DOCS / "numerics.md").read_text(), re.M)
    assert rows == [
        (dtype, f"{each.rtol:.0e}", f"{each.atol:.0e}", f"{each.step:.0e}" if each.step else "by scale")
        for dtype, each in TOLERANCES.items()
    ]


def test_the_site_builds_without_a_warning_and_asks_for_nothing_from_elsewhere(tmp_path):
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module)
    # From a copy, so that a run changes nothing in the working tree.
    source, html = (
        shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("formulas")),
        tmp_path / "html",
    )
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", source, html]
    built = subprocess.run(command, capture_output=True, text=True, cwd=DOCS.parent, check=False)
    assert built.returncode == 0, built.stderr
    assert {page.stem for page in PAGES} <= {page.stem for page in html.glob("*.html")}
    families = {entry.function.__module__.rpartition(".")[2] for entry in CATALOGUE}
    assert families == {page.stem for page in (html / "formulas").glob("*.html")}
    for page in html.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)] == []


@pytest.fixture
def formula_sheet(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("formula_sheet")


def test_the_formula_sheet_has_every_op_with_its_formula(formula_sheet):
    text = "".join(formula_sheet.pages().values())
    for entry in CATALOGUE:
        _, found, section = text.partition(f"\n## {entry.name}\n")
        assert found
        formula = " ".join(entry.function.__doc__.split("\n\n")[0].split())
        assert formula in " ".join(section.partition("\n## ")[0].split())


def test_the_formula_sheet_follows_the_docstrings(formula_sheet, monkeypatch):
    relu = next(entry.function for entry in CATALOGUE if entry.name == "relu")
    monkeypatch.setattr(relu, "__doc__", "Another formula, `y = x`.\n\nArgs:\n  x: numbers.\n\nSource: nowhere, 1999.")
    page = formula_sheet.pages()["activations"]
    assert "Another formula, `y = x`." in page and "Source: nowhere, 1999." in page and "numbers" not in page
