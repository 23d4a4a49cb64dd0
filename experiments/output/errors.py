"""Errors of the commands. The exit codes of a failed command are:

1      the command cannot continue: corrupt files, a full disk, a loss that is not finite
2      a mistake of the user
130    Ctrl-C
"""

import contextlib
import dataclasses
import difflib
import io
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments import at_ctrl_c

LEAST_COLUMNS = 40
"""Tyro's help does not end on a narrower terminal."""
MOST_CHARACTERS = 2000
"""Longer messages lose their middle."""


class UserError(ValueError):
    """An invalid setting or file from the user."""


class BrokenRun(Exception):
    """A run cannot continue because of its files, such as a corrupt checkpoint."""


class Stopped(KeyboardInterrupt):
    """The user has pressed Ctrl-C."""


def run_command(
    run: Callable[[Any, str], int], config: Any, module: str, args: Sequence[str] | None, **options: Any
) -> int:
    """Parse the command line, call `run(parsed, command line)`, and return the exit code.

    Args:
      config: the dataclass of the settings, or a union of dataclasses, one per subcommand.
      module: the text after `python -m`.
    """
    args = sys.argv[1:] if args is None else list(args)
    program = ["python", "-m", *module.split()]

    def command():
        at_ctrl_c(signal.default_int_handler)
        flags = (tyro.conf.FlagCreatePairsOff,)
        parsed = tyro.cli(config, args=args, prog=" ".join(program), config=flags, **options)
        return run(with_home(parsed), shlex.join([*program, *args]))

    return exit_code(command)


def exit_code(command: Callable[[], int]) -> int:
    """Return the command's result. For an exception that is caught here, return the code in the module's list.

    Print such an exception as one line on stderr. Other exceptions propagate.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if shutil.get_terminal_size().columns < LEAST_COLUMNS:
        os.environ["COLUMNS"] = str(LEAST_COLUMNS)
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
        at_ctrl_c(signal.SIG_IGN)
        return _said(str(stop) or "stopped", 130, most=None)


def refuse_unknown(
    what: str, names: Sequence[str], known: Iterable[str], wanted: str = "names among "
) -> tuple[str, ...]:
    """Return `names`, or all known names if it is empty. Raise UserError about `what` if a name is unknown."""
    known = list(dict.fromkeys(known))
    if unknown := [name for name in names if name not in known]:
        like = dict.fromkeys(close for name in unknown for close in difflib.get_close_matches(name, known))
        hint = f"did you mean {' or '.join(like)}?" if like else f"wants {wanted}{', '.join(known)}"
        raise UserError(f"unknown {what} {', '.join(unknown)}; {hint}")
    return tuple(names or known)


def with_home(settings: Any) -> Any:
    """Return a dataclass with the home folder instead of `~` in its paths, also in nested dataclasses."""
    if isinstance(settings, Path):
        try:
            return settings.expanduser()
        except RuntimeError as error:
            raise UserError(f"{settings}: {str(error).rstrip('.')}; wants a path without ~") from None
    if not dataclasses.is_dataclass(settings):
        return settings
    expanded = {name: with_home(value) for name, value in vars(settings).items()}
    return dataclasses.replace(settings, **expanded) if expanded != vars(settings) else settings


@contextlib.contextmanager
def kept_in(path: Path | None) -> Iterator[None]:
    """Turn Ctrl-C into `Stopped`, whose message names the file with the results so far."""
    try:
        yield
    except KeyboardInterrupt:
        kept = path is not None and path.exists()
        raise Stopped(f"stopped; {path} has the results so far" if kept else "stopped") from None


def warn_of_failure(part: str, error: Exception) -> None:
    """Warn that a part of a command's output is missing."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    warn(f"{part} failed, and is left out ({type(error).__name__} in {where}: {error})")


def warn(message: str) -> None:
    _said(f"warning: {message}", 0)


def _in_words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error)


def _said(message: str, code: int, most: int | None = MOST_CHARACTERS) -> int:
    line = " ".join(part.strip() for part in message.splitlines())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    if most is not None and len(line) > most:
        line = f"{line[: most // 2]} ... {line[-most // 2 :]}"
    print(line, file=sys.stderr, flush=True)
    return code
