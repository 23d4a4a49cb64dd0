import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import tyro

from experiments.output.errors import UserError, warn_of_failure

SUFFIX = ".jaxbp-tmp"
OptionalPath = tyro.conf.DisallowNone[Path | None]
"""The type of a command's option. `None` on the command line is a path with this name."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, so that a reader sees either the old or the complete new file.

    A killed process may leave a temporary file (`is_leftover`).
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)  # the error for a full disk has no file name
        raise
    finally:
        temporary.unlink(missing_ok=True)
    to_disk(path.parent)


def write(path: Path, data: bytes) -> None:
    """Write into a file that the user names: a device, a pipe, or atomically a file or the target of a link."""
    if path.exists() and not path.is_file():
        try:
            path.write_bytes(data)
        except OSError as error:
            error.filename = str(path)  # the error for a full device has no file name
            raise
    else:
        write_atomically(path.resolve(), data)


def refuse_unwritable(*paths: Path | None) -> None:
    for path in filter(None, paths):
        if path.is_dir():
            raise UserError(f"{path} is a folder; wants the name of a file")
        if not path.parent.is_dir():
            raise UserError(
                f"{path} cannot be written, because there is no folder {path.parent}; wants an existing folder"
            )
        try:
            if not path.exists():
                temporary = temporary_name(path.resolve())
                temporary.touch()
                temporary.unlink()
            elif not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); wants another path") from None


def written(path: Path, content: Callable[[], bytes]) -> None:
    """Write `content()` into a file. If `content` fails, warn instead."""
    try:
        data = content()
    except Exception as error:
        warn_of_failure(str(path), error)
    else:
        write_atomically(path, data)


def read(path: Path) -> bytes:
    """Read a regular file. Raise OSError for special files such as pipes, which could block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def to_disk(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")


def is_leftover(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(SUFFIX)
