import re

import numpy as np
import pytest
from hardened_report import HardenedReport

from experiments.configs import LogicConvConfig
from experiments.training import run_directory
from experiments.training.reports import logic_conv


@pytest.fixture(scope="module")
def finished(gates_run):
    size = ["--kernels", "8", "--levels", "1", "--tau", "2"]
    training = ["--epochs", "2", "--learning-rate", "0.1", "--shift", "0", "--devices", "1"]
    return gates_run("logic-conv", *size, *training)


class TestReport(HardenedReport):
    least_accuracy = 0.7


def test_the_gates_are_counted(finished):
    _, output, folder = finished
    circuit = run_directory.load(folder)[1].harden()
    once, placed, simplified = re.findall(r"^([\d,]+) (?:gates, (?:each|with)|of these)", output, re.MULTILINE)
    assert once == f"{circuit.gates:,}" and placed == f"{circuit.placed_gates:,}"
    assert 0 < int(simplified.replace(",", "")) < circuit.placed_gates


def test_the_code_says_what_its_bits_are(finished):
    _, _, folder = finished
    for suffix in "cv":
        text = (folder / f"circuit.{suffix}").read_text()
        assert "Input 28 * (28 * level + row) + column: whether a pixel is above\n   (level + 1) / 2" in text


def test_inputs_of_colors_are_a_channel_after_the_other(finished):
    circuit = run_directory.load(finished[2])[1].harden()
    comment = logic_conv.comment(LogicConvConfig(dataset="cifar10", levels=2), circuit)
    assert "Input 32 * (32 * (2 * channel + level) + row) + column" in comment
    assert f"There are {circuit.outputs} outputs" in comment


@pytest.fixture(scope="module")
def finished_own(gates_run, tmp_path_factory):
    path, random = tmp_path_factory.mktemp("images") / "own.npz", np.random.default_rng(0)
    labels, classes = np.arange(90) % 3, random.random((3, 3, 4, 5))
    np.savez(path, x_train=np.clip(classes[labels] + random.normal(0, 0.1, (90, 3, 4, 5)), 0, 1), y_train=labels)
    settings = ["--kernels", "8", "--levels", "1", "--epochs", "20", "--batch-size", "24", "--devices", "1"]
    return gates_run("logic-conv", "--data", str(path), *settings, "--residual-logit", "1", "--learning-rate", "0.1")


class TestReportOfOwnImages(HardenedReport):
    least_accuracy = 0.8

    @pytest.fixture
    def finished(self, finished_own):
        return finished_own


def test_the_code_of_own_images_says_what_its_bits_are(finished_own):
    text = (finished_own[2] / "circuit.c").read_text()
    assert "Input 5 * (4 * (1 * channel + level) + row) + column" in text and "class c\nhas" not in text
    assert re.search(r"There are (\d+) outputs", text)[1] == str(3 * int(re.search(r"outputs\s+(\d+) c to", text)[1]))
