"""Writing a file so that no moment shows half of it."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Puts `data` at `path`: whoever reads, even after a kill at any moment, sees the old file or the new one.

    A kill can leave a temporary file beside it; `is_leftover` knows these by name.
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
    """Whether `path` is a temporary file of `write_atomically`, so of no value once its writer is gone."""
    return path.name.startswith(".") and path.name.endswith(".tmp")
