"""Writing files atomically."""

import os
import shutil
from pathlib import Path

SUFFIX = ".jaxbp-tmp"


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path`. A reader sees the old file or the whole new one, even after a kill at any moment.

    A kill can leave a temporary file in the folder; `is_leftover` knows these by name.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    to_disk(path.parent)


def to_disk(*paths: Path) -> None:
    """Returns once files are on the disk; of folders, the names in them."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Where this process writes what is to get the name `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")


def is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file or folder, which a killed process left."""
    return path.name.startswith(".") and path.name.endswith(SUFFIX)
