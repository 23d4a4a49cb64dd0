"""A checkpoint: a folder with all that a run needs to go on, and the checksums of its files.

    run.json    the epoch, the settings, the checksum of the model's constants, the metrics of every epoch so far, the
                checksums of the state's files, and its own
    state/      parameters and the optimiser's state, as Orbax writes them

A folder gets its name once all of it is on the disk. Nothing is read whose checksum is another.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jaxtyping import PyTree

from experiments.output.errors import BrokenRun
from experiments.output.files import remove, temporary_name, to_disk, write_atomically

RUN, STATE = "run.json", "state"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A run after an epoch; before the first one, after epoch 0.

    Attributes:
      config: the settings.
      constants: the checksum of the model's variables that are not trained.
      metrics: of every epoch so far.
      files: path below `state` -> checksum.
      folder: where it is, or is to be, with those of other epochs.
    """

    epoch: int
    config: dict[str, Any]
    constants: str | None
    metrics: list[dict[str, Any]]
    files: dict[str, str]
    folder: Path

    @property
    def path(self) -> Path:
        return path_of(self.folder, self.epoch)

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """Path -> array of the state, read when they are asked for."""
        path = (self.path / STATE).resolve()  # Orbax takes absolute paths alone
        with _orbax() as orbax:
            like = orbax.metadata(path).item_metadata.tree
            restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
            return traverse_util.flatten_dict(orbax.restore(path, restore_args=restore), sep="/")


def write(checkpoint: Checkpoint, arrays: Mapping[str, np.ndarray]) -> Checkpoint:
    """Writes the folder of the checkpoint's epoch, whole or not at all. Returns the checkpoint with its checksums."""
    unfinished = temporary_name(checkpoint.path)
    try:
        unfinished.mkdir()
        save_state(unfinished / STATE, arrays)
        files = list(_files(unfinished / STATE))
        to_disk(*files, *{folder for file in files for folder in file.parents if folder.is_relative_to(unfinished)})
        sums = {str(file.relative_to(unfinished / STATE)): _checksum(file.read_bytes()) for file in files}
        checkpoint = dataclasses.replace(checkpoint, files=sums)
        write_run(checkpoint, unfinished)
        remove(checkpoint.path)  # one of this epoch is damaged: a run goes on from the newest that is whole
        os.rename(unfinished, checkpoint.path)
    except BaseException:
        # After Ctrl-C, threads of Orbax may still write into it: what stays goes when the run goes on.
        with contextlib.suppress(OSError):
            remove(unfinished)
        raise
    to_disk(checkpoint.folder)
    return checkpoint


def write_run(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a checkpoint's file `run.json` into its folder: all but the state."""
    run = {field: value for field, value in vars(checkpoint).items() if field not in ("folder", "arrays")}
    run["sha256"] = _checksum(json.dumps(run).encode())
    write_atomically(path / RUN, json.dumps(run, indent=1).encode())


def save_state(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays, named by their paths, as a tree of Orbax."""
    with _orbax() as orbax:
        orbax.save(path.resolve(), traverse_util.unflatten_dict(dict(arrays), sep="/"))


def _orbax():
    """Orbax of this process alone, which waits for no other one."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read(path: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
      BrokenRun: if a file is not as it was written, or the folder has not the name of its epoch.
    """
    run = _run(path / RUN)
    if path != path_of(path.parent, run["epoch"]):
        raise BrokenRun(f"{path} is a checkpoint of epoch {run['epoch']}, under another name")
    for name, checksum in run["files"].items():
        if _checksum(_bytes(path / STATE / name)) != checksum:
            raise BrokenRun(f"{path / STATE / name} is damaged (its checksum is not that of its content)")
    return Checkpoint(**run, folder=path.parent)


def _run(file):
    try:
        run = json.loads(_bytes(file))
        if run.pop("sha256") == _checksum(json.dumps(run).encode()):
            return run
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise BrokenRun(f"{file} is damaged (its checksum is not that of its content)")


def path_of(folder: Path, epoch: int) -> Path:
    """Where the checkpoint of an epoch is."""
    return folder / str(epoch)


def epochs(folder: Path) -> list[int]:
    """The epochs of which there are folders, the last one first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True)


def to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    """Path -> array."""
    return {name: np.asarray(leaf) for name, leaf in _named(state).items()}


def from_arrays(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """The inverse of `to_arrays`: a state whose structure, shapes and dtypes are those of `like`.

    Raises:
      BrokenRun: if these are the arrays of another model or optimiser.
    """
    wanted = _named(like)
    for name in (*wanted, *arrays):
        saved, expected = (_described(leaves.get(name)) for leaves in (arrays, wanted))
        if saved != expected:
            raise BrokenRun(f"the checkpoint is of another model or optimiser ({name}: saved {saved}, now {expected})")
    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(arrays[name]) for name in wanted])


def _named(state: PyTree) -> dict[str, Any]:
    """Path -> leaf, in the tree's order. A variable of NNX is named as it is, and not as its only leaf, `value`."""
    paths = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    ]
    leaves = collections.Counter(name.rpartition("/")[0] for name, _ in paths)
    return {name.removesuffix("/value") if leaves[name.rpartition("/")[0]] == 1 else name: leaf for name, leaf in paths}


def _described(array: Any) -> str:
    return "none" if array is None else f"{array.shape} {array.dtype}"


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BrokenRun(f"{file} cannot be read ({error.strerror})") from error


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
