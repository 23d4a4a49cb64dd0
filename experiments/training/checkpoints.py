"""A checkpoint: one file with all that a run needs to go on, and the checksum of its bytes.

It is an `.npz`, which `numpy.load` reads, as does whatever reads zip files:

    run.json    the epoch, the settings, the checksum of the model's constants, and the metrics of every epoch so far
    *.npy       an array of the parameters or of the optimiser's state, named by its path

The zip's comment, the last 64 bytes of the file, is the SHA-256 of all bytes before them.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from experiments.output.errors import BrokenRun
from experiments.output.files import write_atomically

RUN = "run.json"
CHECKSUM_BYTES = 64


class Checkpoint(NamedTuple):
    """A run after an epoch; before the first one, after epoch 0."""

    epoch: int
    config: dict[str, Any]
    constants: str | None
    """The checksum of the model's variables that are not trained."""
    metrics: list[dict[str, Any]]
    """Of every epoch so far."""
    arrays: Mapping[str, np.ndarray]
    """Path -> array of the state."""


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Writes the file of the checkpoint's epoch, whole or not at all."""
    run = {field: value for field, value in checkpoint._asdict().items() if field != "arrays"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = bytes(CHECKSUM_BYTES)
        # A ZipInfo of a name alone has a fixed date: the same run is the same bytes.
        archive.writestr(zipfile.ZipInfo(RUN), json.dumps(run))
        for name, array in checkpoint.arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    content = file.getvalue()[:-CHECKSUM_BYTES]
    write_atomically(path_of(folder, checkpoint.epoch), content + _checksum(content))


def read(path: Path) -> Checkpoint:
    """The checkpoint in a file.

    Raises:
      BrokenRun: if the file is not as it was written, or not under the name of its epoch.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenRun(f"{path} cannot be read ({error.strerror})") from error
    content, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if _checksum(content) != checksum:
        raise BrokenRun(f"{path} is damaged (its checksum is not that of its content)")
    # From here on it is what `write` wrote.
    with np.load(io.BytesIO(data)) as members:
        run = json.loads(members[RUN])
        arrays = {name: members[name] for name in members.files if name != RUN}
    if path != path_of(path.parent, run["epoch"]):
        raise BrokenRun(f"{path} is a checkpoint of epoch {run['epoch']}, under another name")
    return Checkpoint(**run, arrays=arrays)


def path_of(folder: Path, epoch: int) -> Path:
    """Where the checkpoint of an epoch is."""
    return folder / f"{epoch}.npz"


def epochs(folder: Path) -> list[int]:
    """The epochs of which there are files, the last one first."""
    names = [path.stem for path in folder.glob("*.npz")] if folder.is_dir() else []
    return sorted({int(name) for name in names if name.isdecimal() and str(int(name)) == name}, reverse=True)


def to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    """Path -> array."""
    leaves, _ = jax.tree.flatten_with_path(state)
    return {_name(path): np.asarray(leaf) for path, leaf in leaves}


def from_arrays(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """The inverse of `to_arrays`: a state whose structure, shapes and dtypes are those of `like`.

    Raises:
      BrokenRun: if these are the arrays of another model or optimiser.
    """
    leaves, structure = jax.tree.flatten_with_path(like)
    wanted = {_name(path): leaf for path, leaf in leaves}
    for name in (*wanted, *arrays):
        saved, now = (_described(which.get(name)) for which in (arrays, wanted))
        if saved != now:
            raise BrokenRun(f"the checkpoint is of another model or optimiser ({name}: saved {saved}, now {now})")
    # NumPy reads a dtype that is not its own, as bfloat16, as so many bytes.
    restored = [jnp.asarray(arrays[name].view(leaf.dtype)) for name, leaf in wanted.items()]
    return jax.tree.unflatten(structure, restored)


def _described(array: Any) -> str:
    # Without the byte order, which NumPy writes of dtypes that are not its own, and does not read.
    return "none" if array is None else f"{array.shape} {np.lib.format.dtype_to_descr(array.dtype)[1:]}"


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
