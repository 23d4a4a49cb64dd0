"""Writing files atomically."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path`. A reader sees the old file or the whole new one, even after a kill at any moment.

    A kill can leave a temporary file in the folder; `is_leftover` knows these by name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file of `write_atomically`, which a killed process left."""
    return path.name.startswith(".") and path.name.endswith(".tmp")
