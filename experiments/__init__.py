"""The commands of jaxbp: `python -m experiments.{train,check,compare,bench,fuzz,kill,sanitize}`."""

import importlib.util
import sys

if sys.argv[:1] == ["-m"]:  # `python -m` has imported this package, but not yet run the command
    _print_traceback = sys.excepthook

    def _print_one_line(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt):
            print("stopped", file=sys.stderr)
        else:
            _print_traceback(kind, error, trace)

    sys.excepthook = _print_one_line

if importlib.util.find_spec("tyro") is None:
    # The argument `name` makes `python -m` print only the message, without a traceback.
    raise ModuleNotFoundError(
        "the packages of experiments are not installed; wants: pip install -e '.[experiments]'", name="experiments"
    )
