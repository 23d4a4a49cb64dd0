import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from helpers import on_the_cpu

import jaxbp
from experiments import tune
from experiments.bench import measure
from pallas_kernels.core import tiles
from pallas_kernels.core.device import HOPPER

BATCH = 128


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int


@pytest.fixture
def kernel(monkeypatch):
    """A kernel in place of the others, wrong with one of its tiles and failing with another."""
    monkeypatch.setattr(tiles, "KERNELS", {})
    monkeypatch.setattr(measure, "ROUNDS", 1)

    @tiles.kernel(heuristic=lambda x, place, *, window: Config(rows=1), sweep={"rows": (1, 2, 3, 4)})
    def kernel(x, place, *, window, config):
        if config.rows == 3:
            raise ValueError("3 rows do not fit")
        return x + place * (1.0 if config.rows == 2 else 0.0)

    return kernel


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what is missing without a GPU")
def test_without_a_gpu_there_is_nothing_to_tune(capsys):
    assert tune.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: tiles are for the GPU") and error.count("\n") == 1


def test_an_unknown_kernel_is_refused_with_those_there_are(capsys):
    assert tune.main(["conv3d"]) == 2
    assert "unknown kernel conv3d: wanted some of conv2d_relu_max_pool2d.forward" in capsys.readouterr().err


def test_a_tile_that_fails_or_gives_other_results_does_not_win(kernel, capsys):
    x, place = jax.ShapeDtypeStruct((2, 128), "float32"), jax.ShapeDtypeStruct((2, 128), "uint8")
    assert tune.sweep(kernel, [x, place], {"window": (2, 2)}, seconds=1e-4) == {}
    output = capsys.readouterr().out
    assert "the rule: " in output
    assert "rows=2: ArithmeticError: its results differ" in output
    assert "rows=3: ValueError: 3 rows do not fit" in output
    assert "rows=1" not in output and "rows=4" not in output  # the rule's own program


def test_the_command_writes_what_wins_and_removes_what_no_longer_does(kernel, monkeypatch, tmp_path, on_hopper):
    path, winner = tmp_path / "tiles.json", {"rows": 4}
    path.write_text("{}")
    monkeypatch.setattr(tune, "sweep", lambda *_: winner)
    run = ["--batch", "128", "--write", "--file", str(path)]
    assert tune.main(run) == 0
    (of_kernel,) = json.loads(path.read_text())[HOPPER.kind].values()
    assert of_kernel == {
        "float32 1x28x28x128 uint8 6x12x12x128, window=2x2": winner,
        "float32 6x12x12x128 uint8 16x4x4x128, window=2x2": winner,
    }
    winner = {}
    assert tune.main(run) == 0
    assert json.loads(path.read_text()) == {HOPPER.kind: {"test_tune.kernel": {}}}


def test_what_is_recorded_is_what_the_op_looks_up(monkeypatch):
    looked_up = set()

    def look_up(kernel, shapes, names):
        if names:
            looked_up.add((kernel, shapes))
        return {}

    monkeypatch.setattr(tiles, "recorded_tile", look_up)

    def loss(x, w, b):
        op = jaxbp.conv2d_relu_max_pool2d
        return op(x, w, b, window=tune.WINDOW, precision="highest", implementation="pallas").sum()

    recorded = set()
    for channels, size, out_channels in tune.BLOCKS.values():
        shapes = (BATCH, channels, size, size), (out_channels, channels, *tune.FILTER), (out_channels,)
        with on_the_cpu():
            jax.eval_shape(jax.grad(loss, (0, 1, 2)), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        for name, kernel in tiles.KERNELS.items():
            if not kernel.sweep:
                continue
            arrays, options = tune.arguments(kernel, channels, size, out_channels, BATCH)
            recorded.add((name, tiles.key(*arrays, **options)))
    assert looked_up and looked_up <= recorded
