"""Checkpoints of a run. A checkpoint is a folder that gets its name when all its files are on disk.

docs/runs.md describes its files. Orbax writes `state/`.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from jaxtyping import PyTree

from experiments.configs.base import build
from experiments.output.errors import BrokenRun
from experiments.output.files import read as read_file
from experiments.output.files import remove, temporary_name, to_disk, write_atomically

RUN, STATE = "run.json", "state"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The checkpoint after an epoch. Epoch 0 means the initial state.

    Attributes:
      config: the settings, as from `configs.to_dict`.
      constants: see `loop.constants_checksum`.
      files: the checksum of each file, by its path within `state/`.
      folder: the parent of the checkpoint's folder.
      data: see `TrainingConfig.data_checksum`.
    """

    epoch: int
    config: dict[str, Any]
    constants: str | None
    metrics: list[dict[str, Any]]
    files: dict[str, str]
    folder: Path
    data: str | None = None

    @property
    def path(self) -> Path:
        return path_of(self.folder, self.epoch)

    @functools.cached_property
    def shapes(self) -> Mapping[str, Any]:
        with self._orbax() as (orbax, state):
            return traverse_util.flatten_dict(orbax.metadata(state).item_metadata.tree, sep="/")

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        with self._orbax() as (orbax, state):
            restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in self.shapes}
            restored = orbax.restore(state, restore_args=traverse_util.unflatten_dict(restore, sep="/"))
            return traverse_util.flatten_dict(restored, sep="/")

    @contextlib.contextmanager
    def _orbax(self) -> Iterator[tuple[ocp.Checkpointer, Path]]:
        try:
            with _for_orbax(self.path) as folder, _orbax() as orbax:
                yield orbax, folder / STATE
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BrokenRun(f"{self.path / STATE} cannot be read by Orbax ({str(error)[:300]})") from error


def write(checkpoint: Checkpoint, arrays: Mapping[str, np.ndarray]) -> Checkpoint:
    """Write a checkpoint atomically, and return it with the checksums of its files."""
    unfinished = temporary_name(checkpoint.path)
    try:
        remove(unfinished)  # of an earlier process with the same number, or after a full disk
        unfinished.mkdir()
        save_state(unfinished, arrays)
        files = list(_files(unfinished / STATE))
        to_disk(*files, *{folder for file in files for folder in file.parents if folder.is_relative_to(unfinished)})
        sums = {str(file.relative_to(unfinished / STATE)): _checksum(file.read_bytes()) for file in files}
        checkpoint = dataclasses.replace(checkpoint, files=sums)
        write_run(checkpoint, unfinished)
        remove(checkpoint.path)  # an existing folder of this epoch is corrupt
        os.rename(unfinished, checkpoint.path)
    except BaseException:
        # Threads of Orbax may still write into the folder. A resumed run removes it.
        with contextlib.suppress(OSError):
            remove(unfinished)
        raise
    to_disk(checkpoint.folder)
    return checkpoint


def write_run(checkpoint: Checkpoint, path: Path) -> None:
    run = {field: value for field, value in vars(checkpoint).items() if field not in ("folder", "shapes", "arrays")}
    run["sha256"] = _checksum(json.dumps(run).encode())
    write_atomically(path / RUN, json.dumps(run, indent=1).encode())


def save_state(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    try:
        with _for_orbax(folder) as plain, _silent_threads(), _orbax() as orbax:
            orbax.save(plain / STATE, traverse_util.unflatten_dict(dict(arrays), sep="/"))
    except ValueError as error:
        if (found := re.search(r"\[os_error_code='(\d+)'\]", str(error))) is None:
            raise
        code = int(found[1])
        raise OSError(code, os.strerror(code), str(folder)) from None


@contextlib.contextmanager
def _silent_threads() -> Iterator[None]:
    """Silence Orbax's threads, which print tracebacks of errors that `save` raises."""
    previous, logger, is_disabled = sys.unraisablehook, logging.getLogger("absl"), logging.getLogger("absl").disabled

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            previous(unraisable)

    sys.unraisablehook, logger.disabled = hook, True
    try:
        yield
    finally:
        logger.disabled = is_disabled
    sys.unraisablehook = previous  # not restored after an error, because threads print later


@contextlib.contextmanager
def _for_orbax(folder: Path) -> Iterator[Path]:
    """Yield the folder, or a symbolic link if Orbax fails at the path's characters."""
    folder = folder.resolve()
    if re.fullmatch(r"[\w/. -]*", str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="jaxbp-") as links:
        link = Path(links) / "checkpoint"
        link.symlink_to(folder, target_is_directory=True)
        yield link


def _orbax():
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def read(path: Path) -> Checkpoint:
    """Read the checkpoint in a folder. Raise BrokenRun if it is corrupt."""
    file = path / RUN
    try:
        run = json.loads(_bytes(file))
        if run.pop("sha256") != _checksum(json.dumps(run).encode()):
            raise BrokenRun(f"{file} is corrupt (its checksum does not match)")
        checkpoint = build(Checkpoint, {**run, "folder": path.parent})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenRun(f"{file} is corrupt ({error})") from None
    if path != checkpoint.path:
        raise BrokenRun(
            f"{path} holds the checkpoint of epoch {checkpoint.epoch}; wants the epoch as the name of its folder"
        )
    files = {str(file.relative_to(path / STATE)): file for file in _files(path / STATE)}
    for name, checksum in checkpoint.files.items():
        if name not in files:
            raise BrokenRun(f"{path / STATE / name} cannot be read (the file is missing)")
        if _checksum(_bytes(files[name])) != checksum:
            raise BrokenRun(f"{files[name]} is corrupt (its checksum does not match)")
    return checkpoint


def path_of(folder: Path, epoch: int) -> Path:
    return folder / str(epoch)


def epochs(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True)


def to_arrays(state: PyTree) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in _named(state).items()}


def from_arrays(arrays: Mapping[str, np.ndarray], like: PyTree) -> PyTree:
    """Invert `to_arrays`, with the structure of `like`."""
    check_like(arrays, like)
    return jax.tree.unflatten(jax.tree.structure(like), [jax.numpy.asarray(arrays[name]) for name in _named(like)])


def check_like(arrays: Mapping[str, Any], like: PyTree) -> None:
    """Raise BrokenRun unless the arrays have the paths, shapes, and dtypes of `like`.

    Pass `Checkpoint.shapes` before reading any array, because a small file can claim a huge array.
    """
    both = [{name: f"{a.shape} {a.dtype}" for name, a in leaves.items()} for leaves in (_named(like), arrays)]
    for name in itertools.chain(*both):
        expected, saved = (described.get(name, "none") for described in both)
        if saved != expected:
            differs = f"{name}: saved {saved}, now {expected}"
            raise BrokenRun(
                f"the checkpoint has another model or optimizer than this version of jaxbp builds ({differs}); "
                "wants the version that wrote the checkpoint"
            )


def _named(state: PyTree) -> dict[str, Any]:
    """Map paths in `state` to arrays, without the suffix `/value` of variables with one array."""
    paths = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
    ]
    leaves = collections.Counter(name.rpartition("/")[0] for name, _ in paths)
    return {name.removesuffix("/value") if leaves[name.rpartition("/")[0]] == 1 else name: leaf for name, leaf in paths}


def _files(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _bytes(file: Path) -> bytes:
    try:
        return read_file(file)
    except OSError as error:
        raise BrokenRun(f"{file} cannot be read ({error.strerror})") from error


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
