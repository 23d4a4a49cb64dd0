"""The commands of jaxbp: `python -m experiments.{train,check,compare,bench}`."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable

# `python -m`, before the command runs. Under `nohup`, Python ignores Ctrl-C.
_IS_COMMAND = sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def at_ctrl_c(handler: Callable | signal.Handlers) -> None:
    """In a command, set the handler of Ctrl-C. Programs that import this package keep their handler."""
    if _IS_COMMAND:
        signal.signal(signal.SIGINT, handler)


def _end(*_):
    os.write(sys.stderr.fileno(), b"stopped\n")
    os._exit(130)


# Imports may catch a KeyboardInterrupt or turn it into an ImportError.
at_ctrl_c(_end)

if importlib.util.find_spec("tyro") is None:
    # With `name`, `python -m` prints no traceback.
    raise ModuleNotFoundError(
        "the packages of experiments are not installed; wants: pip install -e '.[experiments]'", name="experiments"
    )
