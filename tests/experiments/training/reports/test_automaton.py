import dataclasses
import hashlib
import json
import shutil
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from cells import Gates, checkerboard, checkerboard_target
from cells import life as life_circuit
from PIL import Image

from experiments import configs, train
from experiments.configs.automaton_experiments import CheckerboardConfig, LifeConfig, PictureConfig
from experiments.training import compiled
from experiments.training.reports import automaton
from jaxbp import CellularCircuit, Netlist
from jaxbp.training.loop import TIMINGS


@pytest.fixture(scope="module")
def finished(tiny_automaton, tmp_path_factory):
    config = tiny_automaton(run_dir=tmp_path_factory.mktemp("automaton") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "TIMED_SECONDS", 0.01)
        patch.setattr(train, "REPORTS", {config.name: train.Report(automaton.FILES, automaton.report)})
        printed = []
        patch.setattr("builtins.print", lambda *words, **options: printed.append(" ".join(map(str, words))))
        train.train(config)
    return config, "\n".join(printed)


def metrics(config):
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMINGS} for line in lines]


def test_it_learns_and_stays_right_when_hardened(finished):
    first, *_, last = metrics(finished[0])
    assert last["train_loss"] < first["train_loss"] / 4
    assert (last["test_loss"], last["test_accuracy"]) == (0, 1)


def test_the_run_says_how_often_the_circuit_is_right(finished):
    config, printed = finished
    figures = json.loads((config.run_dir / "automaton.json").read_text())
    assert (figures["right"], figures["stands"], figures["blinks"], figures["heals"]) == (1, 1, 0, 1)
    assert figures["gates"] >= figures["gates_seen"]
    assert "from 256 unseen starts, every cell right: at tick 3 100.0%, at ticks 4 to 12 100.0%" in printed
    assert "hardened test loss 0.0000 accuracy 1.0000" in printed and "grids/s" in printed


def test_the_run_leaves_pictures_a_page_and_code(finished):
    run_dir = finished[0].run_dir
    written = {path.name for path in run_dir.iterdir()} - {".lock", "checkpoints", "config.json", "metrics.jsonl"}
    assert written == {"curves.png", *automaton.FILES, "files.sha256"}
    sums = [line.split() for line in (run_dir / "files.sha256").read_text().splitlines()]
    assert {name: hashlib.sha256((run_dir / name).read_bytes()).hexdigest() for name in written - {"files.sha256"}} == {
        name: checksum for checksum, name in sums
    }


def test_more_epochs_are_of_as_many_updates(tiny_automaton):
    config = tiny_automaton(epochs=4, updates=79)
    assert (config.extended(6).epochs, config.extended(6).updates) == (6, 120)
    assert configs.resumed(config, tiny_automaton(epochs=6, updates=79)) == config.extended(6)
    assert configs.resumed(config, config.extended(6)) == config.extended(6)
    with pytest.raises(ValueError, match="updates: saved 79, now 100"):
        configs.resumed(config, tiny_automaton(epochs=6, updates=100))


def test_a_run_resumes_to_the_same_bits(finished, tmp_path, monkeypatch):
    whole = finished[0]
    config = dataclasses.replace(whole, run_dir=tmp_path / "run", resume=True)
    shutil.copytree(whole.run_dir, config.run_dir)
    shutil.rmtree(config.run_dir / "checkpoints" / "4")
    monkeypatch.setattr(train, "REPORTS", {})
    train.train(config)
    lines = [(c.run_dir / "metrics.jsonl").read_text().splitlines()[-1] for c in (whole, config)]
    assert lines[0] != lines[1]
    assert metrics(config) == metrics(whole) and len(metrics(whole)) == 4


def test_a_picture_of_ones_own_leaves_the_report(tmp_path, monkeypatch, capsys):
    sizes = dict(channels=4, perception=(2, (8, 4, 2)), update=(16, 8, 4), hardening=(40, 2), trials=1)
    for name, value in sizes.items():
        monkeypatch.setattr(PictureConfig, name, value)
    monkeypatch.setattr(compiled, "TIMED_SECONDS", 0.01)
    monkeypatch.setattr(automaton, "TIMED_GRID", (8, 8))
    pixels = np.full((4, 5, 3), 255, np.uint8)
    pixels[1, 2:4] = (255, 0, 0)
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    run_dir = tmp_path / "run"
    options = ["--target", str(tmp_path / "mine.png"), "--run-dir", str(run_dir), "--json", str(tmp_path / "mine.json")]
    assert train.main(["ca", *options]) == 0
    printed = capsys.readouterr().out
    assert "from its one start, every cell right: at tick 6" in printed
    assert "no gate is left" in printed or json.loads((run_dir / "automaton.json").read_text())["gates_seen"]
    assert {*automaton.FILES} <= {path.name for path in run_dir.iterdir()}
    assert json.loads((tmp_path / "mine.json").read_text())["dataset"] == "mine.png"
    pixels[0, 0] = 0
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    assert train.main(["--resume", "--run-dir", str(run_dir), "--epochs", "3"]) == 2
    assert "the data differ from the data of the run" in capsys.readouterr().err


def test_every_setting_is_an_option_of_the_command_line(tmp_path):
    options = {
        "recipe": "published",
        "updates": 40,
        "epochs": 4,
        "batch_size": 3,
        "learning_rate": 0.1,
        "schedule": "cosine",
        "weight_decay": 0.5,
        "parametrization": "walsh",
        "pass_through": 3.0,
        "noise": 0.25,
        "hard_share": 0.5,
        "hard_from": 0.1,
        "first_gates": "drawn",
        "restart_after": 20,
        "implementation": "xla",
    }
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = train.parse(["ca-letter", *args, "--run-dir", str(tmp_path)]).experiment
    assert options.items() <= configs.to_dict(config).items()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Squares(CheckerboardConfig):
    grid: ClassVar = (6, 5)
    channels: ClassVar = 2
    steps: ClassVar = 12
    trials: ClassVar = 20

    def pattern(self, grid=None):
        return checkerboard_target(*(grid or self.grid))


def test_a_circuit_that_heals_is_right_and_stands():
    figures, _ = automaton.trials(Squares(), checkerboard())
    assert figures == {"right": 1, "stands": 1, "blinks": 0, "heals": 1}


def test_a_circuit_that_does_nothing_is_wrong():
    idle = CellularCircuit(Netlist.from_gates(18, [], [], [], [8, 9]), 2)
    figures, _ = automaton.trials(Squares(), idle)
    assert figures == {"right": 0, "stands": 0, "blinks": 0, "heals": 0}


def test_a_pattern_that_is_inverted_at_every_tick_blinks(monkeypatch):
    gates = Gates(18)
    inverted = CellularCircuit(gates.netlist(gates("xor", 8, gates("one", 0, 0)), 9), 2)
    board = np.concatenate([checkerboard_target(6, 5)] * 2, axis=-1)
    monkeypatch.setattr(Squares, "starts", lambda config, seeds, grid=None: jnp.stack([board] * len(seeds)))
    figures, _ = automaton.trials(Squares(), inverted)
    assert figures == {"right": 1, "stands": 0, "blinks": 1, "heals": 0}


def test_the_game_of_life_is_exact_for_300_ticks_and_another_rule_is_not(monkeypatch):
    monkeypatch.setattr(automaton, "LIFE_GRID", (16, 16))
    assert automaton.life(LifeConfig(), life_circuit(True))[0] == {"right": 1, "ticks": 300}
    gates = Gates(9)
    alone = CellularCircuit(gates.netlist(gates("and", 3, 4)), 1, True)
    figures, _ = automaton.life(LifeConfig(), alone)
    assert 0 < figures["right"] < 1 and figures["ticks"] == 0
