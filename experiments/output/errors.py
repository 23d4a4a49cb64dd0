"""How a command line ends that does not end well: in one line on stderr, and an exit code.

1      a run that cannot go on: damaged files, a full disk, a loss that is no longer finite
2      a mistake of the user
130    Ctrl-C
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class UserError(ValueError):
    """A setting or a file that the user supplied is invalid: the message names it, its value and what is wanted.

    It has a class so that the command line can tell it from a `ValueError` raised by a model or an operation under
    development, whose traceback is needed.
    """


class BrokenRun(Exception):
    """A run's files do not let it go on: the message names the file and what is wrong with it."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what is to be said of what is done so far."""


def exit_code(command: Callable[[], int]) -> int:
    """What the command returns, or the exit code of its end, after one line on stderr."""
    try:
        return command()
    except (UserError, NotImplementedError, FileNotFoundError) as error:
        return _said(f"error: {error}", 2)
    except (BrokenRun, OSError, FloatingPointError) as error:
        return _said(f"error: {error}", 1)
    except KeyboardInterrupt as stop:
        return _said(str(stop) or "stopped", 130)


@contextlib.contextmanager
def kept_in(path: Path | None) -> Iterator[None]:
    """At Ctrl-C within, says that the file of the results has those so far."""
    try:
        yield
    except KeyboardInterrupt:
        kept = path is not None and path.exists()
        raise Stopped(f"stopped; {path} has the results so far" if kept else "stopped") from None


def warn(message: str) -> None:
    """Says in one line what was not as it should be, and what happens now."""
    _said(f"warning: {message}", 0)


def _said(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code
