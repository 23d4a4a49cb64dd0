import json
import re
import shutil

import numpy as np
import pytest
from compiled_rows import results_in_c
from matplotlib import image

from experiments.data import user_data
from experiments.training import run_directory


class HardenedReport:
    """The fixture `finished` returns (exit code, output, folder of the run)."""

    least_accuracy: float

    def test_it_learns_hardened_and_says_so_last(self, finished):
        code, output, _ = finished
        assert code == 0
        accuracy = re.fullmatch(r"test accuracy (\d\.\d{4})", output.splitlines()[-1])[1]
        assert float(accuracy) >= self.least_accuracy

    def test_the_test_accuracy_is_that_of_the_circuit_evaluated_in_words(self, finished):
        relaxed, hardened = re.search(r"relaxed test accuracy (\S+), hardened (\S+)", finished[1]).groups()
        last = json.loads((finished[2] / "metrics.jsonl").read_text().splitlines()[-1])
        assert hardened == f"{last['test_accuracy']:.4f}"
        assert float(relaxed) >= self.least_accuracy

    @pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
    def test_the_c_that_it_leaves_classifies_as_the_loaded_model_does(self, finished, tmp_path):
        _, output, folder = finished
        config, model = run_directory.load(folder)
        dataset, circuit = config.load(), model.harden()
        bits = np.asarray(config.bits(dataset.test_images)) > 0
        scores = circuit(bits).reshape(len(bits), model.classes, -1).sum(axis=-1)
        rows = dataset.test_images
        if dataset.features:  # the images of a table are bits
            rows = user_data.read(config.data, config.target).test_images
            assert np.isnan(rows).any()
        classes = results_in_c((folder / "circuit.c").read_text(), rows, tmp_path)
        assert classes.tolist() == np.argmax(scores, axis=-1).tolist()
        assert f"test accuracy {np.mean(classes == dataset.test_labels):.4f}" == output.splitlines()[-1]

    def test_the_gates_are_drawn_and_timed(self, finished):
        _, output, folder = finished
        assert min(image.imread(folder / "gates.png").shape[:2]) > 100
        assert re.search(r"on one CPU core: [\d,]+ samples/s in NumPy", output)
