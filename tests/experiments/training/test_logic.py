"""The experiment `logic`: it reaches its accuracy hardened, and reports what it learned."""

import json
import re

import pytest
from matplotlib import image

from experiments import train
from experiments.training import logic

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A smaller and shorter run of the command line than the default: its output and its folder."""
    folder = tmp_path_factory.mktemp("logic") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logic, "TIMED_SECONDS", 0.01)
        patch.setattr(logic, "TIMED_SAMPLES", 64)
        output = []
        patch.setattr("builtins.print", lambda *words, **options: output.append(" ".join(map(str, words))))
        size = ["--levels", "2", "--gates", "1000", "--layers", "3", "--epochs", "60"]
        code = train.main(["logic", *size, "--run-dir", str(folder)])
    return code, "\n".join(output), folder


def test_it_reaches_93_percent_hardened_and_says_so_last(finished):
    code, output, _ = finished
    assert code == 0
    assert float(re.fullmatch(r"test accuracy (\d\.\d{4})", output.splitlines()[-1])[1]) >= 0.93


def test_the_test_accuracy_is_that_of_the_circuit_evaluated_in_words(finished):
    relaxed, hardened = re.search(r"relaxed test accuracy (\S+), hardened (\S+)", finished[1]).groups()
    last = json.loads((finished[2] / "metrics.jsonl").read_text().splitlines()[-1])
    assert hardened == f"{last['test_accuracy']:.4f}"
    assert float(relaxed) >= 0.93


def test_the_gates_are_counted_drawn_and_timed(finished):
    _, output, folder = finished
    assert f"3,000 gates, {folder / 'gates.png'} shows which" in output
    assert min(image.imread(folder / "gates.png").shape[:2]) > 100
    assert re.search(r"on one CPU core: [\d,]+ samples/s in NumPy", output)
