import shutil

import numpy as np
import pytest
from cells import life

from experiments.training import compiled
from experiments.training.reports.logic import hardened_predictions
from jaxbp import Circuit, Wires, pack_bits

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_ticks_are_counted_until_they_take_long_enough(monkeypatch):
    now, asked = [0.0], []
    monkeypatch.setattr(compiled.time, "perf_counter", lambda: now[0])

    def run(state, ticks):
        asked.append(ticks)
        now[0] += 0.1 + ticks / 50

    assert compiled.ticks_per_second(run, None) == pytest.approx(64 / (0.1 + 64 / 50))
    assert asked == [1, 2, 4, 8, 16, 32, 64]


def test_a_compiled_automaton_is_far_faster_than_numpy(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "TIMED_SECONDS", 0.05)
    automaton, board = life(True), np.random.default_rng(0).random((256, 256, 1)) < 0.4
    in_c = compiled.ticks_per_second(compiled.compiled_automaton(automaton, shutil.which("cc"), tmp_path), board)
    in_numpy = compiled.ticks_per_second(lambda state, ticks: automaton.run(state[None], ticks), board)
    assert in_c > 3 * in_numpy


def test_a_compiled_classifier_gives_the_classes_of_which_the_most_outputs_are_on(tmp_path):
    random = np.random.default_rng(0)
    circuit = Circuit.of([(random.integers(16, size=12), Wires.random(9, 12, seed=0))])
    bits = random.random((50, 9)) < 0.5
    classify = compiled.compiled_classifier(circuit, 4, shutil.which("cc"), tmp_path)
    assert (classify(pack_bits(bits))[:50] == hardened_predictions(circuit, bits, 4)).all()
