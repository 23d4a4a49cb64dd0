import os
import re
import subprocess
from pathlib import Path

import pytest

from jaxbp.catalogue import CATALOGUE
from jaxbp.nn import lenet_memory_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if not page.is_relative_to(DOCS / "formulas")),
]
README = DOCUMENTS[0].read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_its_code_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    ("code", "wanted"),
    [(PYTHON[0], ("pallas", "xla", "autodiff")), (PYTHON[3], ("pallas", "xla", "autodiff", "None"))],
    ids=["first", "pair"],
)
def test_its_examples_print_the_same_gradients_under_every_implementation(code, wanted, capsys):
    exec(code, {"__name__": "readme"})
    printed = re.findall(r"^(\w+) \[([^]]*)\]$", capsys.readouterr().out, re.MULTILINE)
    names, gradients = zip(*printed, strict=True)
    assert names == wanted
    numbers = [[float(number) for number in line.split()] for line in gradients]
    assert all(line == pytest.approx(numbers[0], rel=1e-5) for line in numbers)


def test_its_example_of_check_prints_the_output_below_it(capsys):
    def without_numbers(text):
        return re.sub(r"\d+\.\d+", "#", " ".join(text.split()))

    exec(PYTHON[2], {"__name__": "readme"})
    (output,) = re.findall(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert without_numbers(capsys.readouterr().out) == without_numbers(output)


def test_it_is_short_and_begins_with_six_lines_to_run_a_chart_and_pictures():
    assert len(README.split()) <= 980
    assert len([line for line in PYTHON[0].splitlines() if line]) == 6
    beginning = README.partition("\n## ")[0]
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", beginning)
    assert [Path(picture).name for picture in pictures] == ["speed.svg", "lenet.png", "gates.png", "automaton.svg"]
    assert beginning.index("```python") < beginning.index("speed.svg") < 3000


def test_its_commands_are_one_to_train_and_one_to_test():
    assert [len(command.splitlines()) for command in SHELL] == [1, 1]
    train, test = SHELL
    assert train.endswith("-m experiments.train lenet\n")
    assert test.endswith("pytest -n auto\n")


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_its_commands_are_those_that_ci_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run([script, "commands"], capture_output=True, text=True, check=True).stdout == "".join(SHELL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_it_links_to_or_names_are_there(document):
    # An unmeasured table names a file that does not exist yet.
    text = re.sub(r"^\*Not measured yet.*$", "", document.read_text(), flags=re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    named = re.findall(r"`((?:docs|experiments|jaxbp|pallas_kernels|tests)/[\w/.]*)`", text)
    named = [] if document.is_relative_to(DOCS / "lab") else named
    paths = [document.parent / link for link in links] + [ROOT / name for name in named]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def test_the_table_of_ops_names_every_op():
    api = (DOCS / "api.md").read_text()
    named = set(re.findall(r"`(\w+)`", api))
    for row in re.findall(r"^\|(.*)\| each `NAME_backward` \|", api, re.MULTILINE):
        named |= {f"{name}_backward" for name in re.findall(r"`(\w+)`", row)}
    assert [entry.name for entry in CATALOGUE if entry.name not in named] == []


def test_the_table_of_lenets_memory_is_that_of_the_library():
    rows = lenet_memory_table(32)
    kinds = ("saved", "activation gradient", "parameter gradient")
    of_kind = {kind: [row.bytes for row in rows if row.kind == kind] for kind in kinds}
    table = re.findall(r"^\|[^|]*\| (\d+) \| ([\d,]+) \|$", (DOCS / "runs.md").read_text(), re.MULTILINE)
    assert table == [(str(len(sizes)), f"{sum(sizes):,}") for sizes in of_kind.values()]
