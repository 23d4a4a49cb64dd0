"""The commands of jaxbp: `python -m experiments.{train,check,compare,bench}`."""

import importlib.util
import sys

if sys.argv[:1] == ["-m"]:  # `python -m`, before the command runs
    _print_traceback = sys.excepthook

    def _print_one_line(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt):
            print("stopped", file=sys.stderr)
        else:
            _print_traceback(kind, error, trace)

    sys.excepthook = _print_one_line

if importlib.util.find_spec("tyro") is None:
    # With `name`, `python -m` prints no traceback.
    raise ModuleNotFoundError(
        "the packages of experiments are not installed; wants: pip install -e '.[experiments]'", name="experiments"
    )
