"""The commands of jaxbp: `python -m experiments.{train,check,compare,bench,fuzz,kill,sanitize}`."""

import importlib.util

if importlib.util.find_spec("tyro") is None:
    # With this name, `python -m` prints the message in one line, without a traceback.
    raise ModuleNotFoundError("experiments need more packages: pip install -e '.[experiments]'", name="experiments")
