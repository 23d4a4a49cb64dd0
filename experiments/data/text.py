"""Text for a language model: files as bytes, divided into training and validation, and packed into rows.

Each file is a document. The documents of a part are joined, and cut into rows of `context` bytes, which are the
targets. The input at each position is the byte before the target, or `START` at the first byte of a document. So every
byte is predicted once, and `segment_ids` can be computed from the inputs. The incomplete last row is left out.
"""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

from experiments.data.datasets import Dataset
from experiments.output.errors import UserError, warn
from experiments.output.files import read as read_file

START = 0
"""The byte before the first byte of a document. No text contains it."""
VALIDATION_SHARE = 0.1
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
"""Folders of the standard library that are left out: packages of others, tests, which some distributions package
separately, and generated tables and pages."""

Documents = Mapping[str, bytes]
"""The content of each file by its path relative to the folder, in sorted order."""


def load(path: Path | None, context: int) -> Dataset:
    """Return the bytes of a text in rows of `context` bytes: inputs and targets for training and validation (see
    `divide` and `pack`). The text is the file or folder `path`, or if it is None, the standard library of this Python.

    Raises:
      UserError: there is no text, or less than one row for training or for validation.
      FileNotFoundError: there is no such file or folder.
    """
    if path is None:
        name = f"the standard library of Python {platform.python_version()}"
        documents = read_folder(Path(sysconfig.get_paths()["stdlib"]), ".py", LEFT_OUT)
    else:
        name, documents = path.name, read(path)
    parts = divide(documents)
    rows = [pack(part, context) for part in parts]
    for what, part, (inputs, _) in zip(("training", "validation"), parts, rows, strict=True):
        if not len(inputs):
            size = sum(map(len, part))
            raise UserError(
                f"{name} has {size:,} bytes for {what}; wants at least {context:,}, the context of the model"
            )
    return Dataset(*rows[0], *rows[1], name, classes=256)


def read(path: Path) -> Documents:
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; wants a text file, or a folder of text files")
    content = read_file(path)
    if not content:
        raise UserError(f"{path} is empty; wants a file with text")
    if START in content:
        raise UserError(f"{path} has a zero byte at {content.index(START):,}; wants a text file")
    return {path.name: content}


def read_folder(folder: Path, suffix: str = "", left_out: frozenset[str] = frozenset()) -> Documents:
    """Read the files whose names end in `suffix`, in all subfolders but those named in `left_out`.

    Hidden and empty files are left out. Files that contain the byte 0, and files that cannot be read, are left out with
    a warning.
    """
    documents, refused = {}, []
    for path in _files(folder, suffix, left_out):
        try:
            content = read_file(path)
        except OSError:
            refused.append(path)
            continue
        if START in content:
            refused.append(path)
        elif content:
            documents[path.relative_to(folder).as_posix()] = content
    if not documents:
        raise UserError(f"{folder} has no readable text file{f' {suffix}' * bool(suffix)}; wants a folder with text")
    if refused:
        number = f"{len(refused)} files" if len(refused) > 1 else "1 file"
        warn(f"{number} of {folder}, such as {refused[0].name}, cannot be read as text, and were left out")
    return dict(sorted(documents.items()))


def _files(folder: Path, suffix: str, left_out: frozenset[str]) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(suffix) and name[0] != ".")


def divide(documents: Documents) -> tuple[list[bytes], list[bytes]]:
    """Divide documents into training and validation.

    A document is for validation if the SHA-256 of its name, as a fraction of the largest value, is below
    `VALIDATION_SHARE`, or smaller than the fractions of all others. The end of a single document is for validation.
    """
    if len(documents) == 1:
        (content,) = documents.values()
        cut = len(content) - int(VALIDATION_SHARE * len(content))
        return [content[:cut]], [content[cut:]]
    fractions = {name: int(hashlib.sha256(os.fsencode(name)).hexdigest(), 16) / 2**256 for name in documents}
    most = max(VALIDATION_SHARE, min(fractions.values()))
    train = [content for name, content in documents.items() if fractions[name] > most]
    return train, [content for name, content in documents.items() if fractions[name] <= most]


def pack(documents: Iterable[bytes], context: int) -> tuple[UInt8[np.ndarray, "rows t"], UInt8[np.ndarray, "rows t"]]:
    """Return the inputs and targets of a language model in rows of `context` bytes."""
    documents = [document for document in documents if document]
    before = b"".join(bytes([START]) + document[:-1] for document in documents)
    inputs, targets = (np.frombuffer(part, np.uint8) for part in (before, b"".join(documents)))
    whole = len(targets) // context * context
    return inputs[:whole].reshape(-1, context), targets[:whole].reshape(-1, context)


def segment_ids(inputs: Int[Array, "*batch t"]) -> Int[Array, "*batch t"]:
    """Return the number of the document of each position, counted from the start of the row."""
    return jnp.cumsum(inputs == START, axis=-1, dtype=jnp.int32)


def joined(targets: UInt8[np.ndarray, "rows t"]) -> bytes:
    return np.ascontiguousarray(targets, np.uint8).tobytes()
