"""The experiments and their settings.

To add an experiment, subclass `TrainingConfig`, or `ImageConfig` for images, and list it in `EXPERIMENTS`. Outside this
repository, call `experiments.train.register`.
"""

import re
from collections.abc import Sequence
from typing import Any

from experiments.configs.automaton_experiments import AUTOMATA as AUTOMATA
from experiments.configs.base import TrainingConfig, annotations, described, is_setting
from experiments.configs.base import as_json as as_json
from experiments.configs.base import differences as differences
from experiments.configs.base import effective as effective
from experiments.configs.base import from_dict as from_dict
from experiments.configs.base import resumed as resumed
from experiments.configs.base import to_dict as to_dict
from experiments.configs.gpt import GPTConfig as GPTConfig
from experiments.configs.images import LeNetConfig as LeNetConfig
from experiments.configs.logic import LogicConfig as LogicConfig
from experiments.configs.logic import LogicConvConfig as LogicConvConfig
from experiments.output.errors import UserError

EXPERIMENTS: dict[str, type[TrainingConfig]] = {
    config.name: config for config in (LeNetConfig, GPTConfig, LogicConfig, LogicConvConfig)
} | AUTOMATA


def register(config: Any, reserved: Sequence[str] = ()) -> None:
    """Add an experiment to `EXPERIMENTS`. Its settings must not have a name in `reserved`."""
    if not (isinstance(config, type) and issubclass(config, TrainingConfig)):
        raise UserError(f"register: config is {config!r}; wants a subclass of TrainingConfig")
    where = f"register: {config.__name__}"
    if "__dataclass_params__" not in vars(config) or not config.__dataclass_params__.frozen:
        raise UserError(f"{where} is no frozen dataclass; wants @dataclasses.dataclass(frozen=True, kw_only=True)")
    name = getattr(config, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w-]*", name, re.ASCII):
        raise UserError(f"{where} has the name {name!r}; wants letters, digits, and hyphens")
    other = EXPERIMENTS.get(name, config)
    if (other.__module__, other.__qualname__) != (config.__module__, config.__qualname__):
        raise UserError(f"{where} has the name {name!r}, which is the name of {other.__name__}; wants another name")
    for setting, annotation in annotations(config).items():
        if setting in reserved:
            raise UserError(
                f"{where} has the setting {setting}, which is an option of every command; wants another name"
            )
        if not is_setting(annotation):
            wanted = "int, float, bool, str, Path, a Literal, or a tuple or union of these"
            raise UserError(f"{where} has the setting {setting} of type {described(annotation)}; wants {wanted}")
    EXPERIMENTS[name] = config
