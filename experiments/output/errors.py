"""How a command line runs, and how it ends if it does not end well: in one line on stderr, and an exit code.

1      a run that cannot go on: damaged files, a full disk, a loss that is no longer finite
2      a mistake of the user
130    Ctrl-C
"""

import contextlib
import difflib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro


class UserError(ValueError):
    """A setting or a file that the user supplied is invalid: the message names it, its value and what is wanted.

    It has a class so that the command line can tell it from a `ValueError` raised by a model or an operation under
    development, whose traceback is needed.
    """


class BrokenRun(Exception):
    """A run's files do not let it go on: the message names the file and what is wrong with it."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what is to be said of what is done so far."""


def run_command(
    run: Callable[[Any, str], int], config: Any, module: str, args: Sequence[str] | None, **options: Any
) -> int:
    """Return the exit code of `run(config, command)`: the parsed arguments, and the command line as text.

    Args:
      config: a dataclass, or a union of subcommands.
      args: None for those of this process.
      options: of `tyro.cli`.
    """
    args = sys.argv[1:] if args is None else list(args)
    program = ["python", "-m", module]

    def command():
        flags = (tyro.conf.FlagCreatePairsOff,)
        parsed = tyro.cli(config, args=args, prog=" ".join(program), config=flags, **options)
        return run(parsed, shlex.join([*program, *args]))

    return exit_code(command)


def exit_code(command: Callable[[], int]) -> int:
    """What the command returns, or the exit code of its end, after one line on stderr."""
    try:
        return command()
    except FileNotFoundError as error:
        return _said(f"error: {_in_words(error)}", 2)
    except OSError as error:
        return _said(f"error: {_in_words(error)}", 1)
    except (UserError, NotImplementedError) as error:
        return _said(f"error: {error}", 2)
    except (BrokenRun, FloatingPointError) as error:
        return _said(f"error: {error}", 1)
    except KeyboardInterrupt as stop:
        return _said(str(stop) or "stopped", 130)


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str], wanted: str = "some of ") -> None:
    """Requires known names. Names that are alike are proposed, else all of them, behind `wanted`.

    Raises:
      UserError: (a ValueError) for other names.
    """
    known = list(dict.fromkeys(known))
    if unknown := [name for name in names if name not in known]:
        like = dict.fromkeys(close for name in unknown for close in difflib.get_close_matches(name, known))
        hint = f"did you mean {' or '.join(like)}?" if like else f"wanted {wanted}{', '.join(known)}"
        raise UserError(f"unknown {what} {', '.join(unknown)}: {hint}")


def refuse_missing_folders(*paths: Path | None) -> None:
    """Require that the files can be written, as far as their folders are concerned.

    Raises:
      UserError: (a ValueError) for a file in a folder that does not exist.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}")


@contextlib.contextmanager
def kept_in(path: Path | None) -> Iterator[None]:
    """At Ctrl-C within, says that the file of the results has those so far."""
    try:
        yield
    except KeyboardInterrupt:
        kept = path is not None and path.exists()
        raise Stopped(f"stopped; {path} has the results so far" if kept else "stopped") from None


def _in_words(error: OSError) -> str:
    """The file and what is wrong with it, without the number that the system has for that."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error)


def warn(message: str) -> None:
    """Says in one line what was not as it should be, and what happens now."""
    _said(f"warning: {message}", 0)


def _said(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr, flush=True)
    return code
