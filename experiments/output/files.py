"""Writing files atomically."""

import os
from pathlib import Path

SUFFIX = ".jaxbp-tmp"


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path`. A reader sees the old file or the whole new one, even after a kill at any moment.

    A kill can leave a temporary file in the folder; `is_leftover` knows these by name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new name is on the disk once the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file of `write_atomically`, which a killed process left."""
    return path.name.startswith(".") and path.name.endswith(SUFFIX)
