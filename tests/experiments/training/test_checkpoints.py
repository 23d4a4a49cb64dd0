import dataclasses
import errno
import json
import resource
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from experiments.output.errors import BrokenRun
from experiments.training import checkpoints
from experiments.training.checkpoints import Checkpoint
from jaxbp.training.precision import LossScale

STATE = {
    "params": {"weight": jnp.arange(6.0).reshape(2, 3), "half": jnp.array([0.1, -3], jnp.bfloat16)},
    "count": jnp.int32(7),
}


@pytest.fixture
def written(tmp_path):
    checkpoint = Checkpoint(3, {"seed": 1}, "abc", [{"epoch": 1}], {}, tmp_path)
    return checkpoints.write(checkpoint, checkpoints.to_arrays(STATE))


def test_what_is_read_is_what_was_written(written):
    read = checkpoints.read(written.path)
    assert read == written and written.path.name == "3"
    restored = checkpoints.from_arrays(read.arrays, STATE)
    for name in ("weight", "half"):
        was, now = STATE["params"][name], restored["params"][name]
        assert (now.dtype, now.shape) == (was.dtype, was.shape) and np.array_equal(now, was)
    assert restored["count"] == 7


def test_a_loss_scale_has_all_its_parts_and_a_variable_the_name_of_its_own():
    state = {"model": nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(0))), "loss_scale": LossScale.create(8.0)}
    arrays = checkpoints.to_arrays(state)
    assert arrays.keys() == {"model/kernel", "model/bias"} | {
        f"loss_scale/{part}" for part in ("value", "finite_steps", "skipped_steps")
    }
    assert checkpoints.from_arrays(arrays, state)["loss_scale"].value == 8


def test_a_checkpoint_is_read_by_a_relative_path_as_well(written, monkeypatch):
    monkeypatch.chdir(written.folder)
    assert checkpoints.read(Path("3")).arrays.keys() == {"params/weight", "params/half", "count"}


def test_orbax_reads_the_state_and_whatever_reads_json_the_rest(written):
    with ocp.PyTreeCheckpointer() as orbax:
        assert orbax.restore(written.path / "state")["params"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert json.loads((written.path / "run.json").read_text())["config"] == {"seed": 1}


def test_another_write_takes_the_place_of_the_first_and_leaves_nothing_else(written):
    other = dataclasses.replace(written, constants="def")
    again = checkpoints.write(other, {"count": np.int32(8)})
    assert checkpoints.read(written.path).constants == "def" and again.arrays == {"count": 8}
    assert [path.name for path in written.folder.iterdir()] == ["3"]


def test_settings_are_written_anew_without_the_state(written):
    before = (written.path / "state" / "_METADATA").stat().st_mtime_ns
    checkpoints.write_run(dataclasses.replace(written, config={"seed": 2}), written.path)
    assert checkpoints.read(written.path).config == {"seed": 2}
    assert (written.path / "state" / "_METADATA").stat().st_mtime_ns == before


def test_a_write_that_fails_leaves_what_was_there(written, monkeypatch):
    monkeypatch.setattr(checkpoints, "write_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.write(written, {"count": np.int32(8)})
    assert checkpoints.read(written.path) == written
    assert [path.name for path in written.folder.iterdir()] == ["3"]


def test_a_full_disk_is_an_error_of_the_system_and_threads_print_nothing(written, capfd):
    # A file-size limit fails as a full disk does.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    array = np.random.default_rng(0).random(10**6)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limits[1]))
    try:
        with pytest.raises(OSError) as raised:
            checkpoints.write(written, {f"array {i}": array for i in range(4)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG and raised.value.filename.startswith(str(written.folder))
    assert capfd.readouterr().err == ""
    assert checkpoints.read(written.path) == written


def bomb(folder, shape, chunk):
    """Write a checkpoint whose array `a` claims `shape`, with zlib data `chunk` and correct checksums."""
    orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    orbax.save(folder / "1" / "state", {"a": np.zeros(10, np.float32)})
    header = folder / "1" / "state" / "a" / ".zarray"
    claimed = {"shape": shape, "chunks": shape, "compressor": {"id": "zlib", "level": 9}}
    header.write_text(json.dumps(json.loads(header.read_text()) | claimed))
    (folder / "1" / "state" / "a" / "0").write_bytes(chunk)
    files = {str(file.relative_to(folder / "1" / "state")): file for file in checkpoints._files(folder / "1" / "state")}
    sums = {name: checkpoints._checksum(file.read_bytes()) for name, file in files.items()}
    checkpoints.write_run(Checkpoint(1, {}, None, [], sums, folder), folder / "1")
    return checkpoints.read(folder / "1")


def test_a_decompression_bomb_is_refused_before_it_goes_off(tmp_path):
    compressor = zlib.compressobj(9)
    parts = [compressor.compress(bytes(2**20)) for _ in range(256)]
    checkpoint = bomb(tmp_path, [10], b"".join([*parts, compressor.flush()]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenRun, match="cannot be read by Orbax"):
        checkpoint.arrays  # noqa: B018
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17


def test_the_shape_of_an_array_is_checked_before_it_is_read(tmp_path):
    checkpoint = bomb(tmp_path, [10**12], zlib.compress(b""))
    with pytest.raises(BrokenRun, match=r"a: saved \(1000000000000,\) float32, now \(10,\) float32"):
        checkpoints.check_like(checkpoint.shapes, {"a": jnp.zeros(10)})


OTHERS = {
    "another shape": ({**STATE, "count": jnp.zeros(2, jnp.int32)}, r"count: saved \(\) int32, now \(2,\) int32"),
    "another dtype": ({**STATE, "count": jnp.float32(7)}, r"count: saved \(\) int32, now \(\) float32"),
    "more": ({**STATE, "scale": jnp.float32(7)}, r"scale: saved none, now \(\) float32"),
    "less": ({"params": STATE["params"]}, r"count: saved \(\) int32, now none"),
}


@pytest.mark.parametrize(("state", "message"), OTHERS.values(), ids=OTHERS)
def test_another_models_arrays_are_refused(written, state, message):
    with pytest.raises(BrokenRun, match=message):
        checkpoints.from_arrays(checkpoints.read(written.path).arrays, state)


def test_epochs_are_of_the_names_that_are_written_alone(tmp_path):
    for name in ("10", "9", "09", "-1", "best", "3.bak"):
        (tmp_path / name).mkdir()
    assert checkpoints.epochs(tmp_path) == [10, 9]
    assert checkpoints.epochs(tmp_path / "missing") == []
