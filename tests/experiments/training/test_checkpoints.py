"""One file with everything, and its checksum. What damage to it does is in `test_damage.py`."""

import hashlib
import json
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.output.errors import BrokenRun
from experiments.training import checkpoints
from experiments.training.checkpoints import Checkpoint

STATE = {
    "params": {"weight": jnp.arange(6.0).reshape(2, 3), "half": jnp.array([0.1, -3], jnp.bfloat16)},
    "count": jnp.int32(7),
    "empty": jnp.zeros((0, 4)),
}


@pytest.fixture
def written(tmp_path):
    checkpoint = Checkpoint(3, {"seed": 1}, "abc", [{"epoch": 1}], checkpoints.to_arrays(STATE))
    checkpoints.write(tmp_path, checkpoint)
    return checkpoint, tmp_path / "3.npz"


def test_what_is_read_is_what_was_written(written):
    checkpoint, path = written
    read = checkpoints.read(path)
    assert read[:4] == checkpoint[:4]
    restored = checkpoints.from_arrays(read.arrays, STATE)
    for name in ("weight", "half"):
        was, now = STATE["params"][name], restored["params"][name]
        assert (now.dtype, now.shape) == (was.dtype, was.shape) and np.array_equal(now, was)
    assert restored["count"] == 7 and restored["empty"].shape == (0, 4)


def test_numpy_reads_it_and_every_program_that_reads_zip_files(written):
    _, path = written
    with np.load(path) as arrays:
        assert arrays["params/weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert json.loads(arrays["run.json"])["epoch"] == 3
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.comment.decode() == hashlib.sha256(path.read_bytes()[:-64]).hexdigest()


def test_the_same_state_is_the_same_bytes(written):
    checkpoint, path = written
    before = path.read_bytes()
    checkpoints.write(path.parent, checkpoint)
    assert path.read_bytes() == before


OTHERS = {
    "another shape": ({**STATE, "count": jnp.zeros(2, jnp.int32)}, r"count: saved \(\) i4, now \(2,\) i4"),
    "another dtype": ({**STATE, "count": jnp.float32(7)}, r"count: saved \(\) i4, now \(\) f4"),
    "more": ({**STATE, "scale": jnp.float32(7)}, r"scale: saved none, now \(\) f4"),
    "less": ({"params": STATE["params"], "count": STATE["count"]}, r"empty: saved \(0, 4\) f4, now none"),
}


@pytest.mark.parametrize(("state", "message"), OTHERS.values(), ids=OTHERS)
def test_another_models_arrays_are_refused(written, state, message):
    with pytest.raises(BrokenRun, match=message):
        checkpoints.from_arrays(checkpoints.read(written[1]).arrays, state)


def test_epochs_are_of_the_names_that_are_written_alone(tmp_path):
    for name in ("10.npz", "9.npz", "09.npz", "-1.npz", "best.npz", "3.npz.bak", "4"):
        (tmp_path / name).touch()
    assert checkpoints.epochs(tmp_path) == [10, 9]
    assert checkpoints.epochs(tmp_path / "missing") == []
