"""The experiments and their settings.

To add an experiment, subclass `TrainingConfig`, or `ImageConfig` for images, and list it in `EXPERIMENTS`.
"""

from experiments.configs.automaton_experiments import AUTOMATA
from experiments.configs.base import TrainingConfig, as_json, differences, from_dict, resumed, to_dict
from experiments.configs.images import LeNetConfig, MixerConfig
from experiments.configs.logic import LogicConfig, LogicConvConfig

EXPERIMENTS: dict[str, type[TrainingConfig]] = {
    config.name: config for config in (LeNetConfig, MixerConfig, LogicConfig, LogicConvConfig)
} | AUTOMATA

__all__ = [
    "AUTOMATA",
    "EXPERIMENTS",
    "LeNetConfig",
    "LogicConfig",
    "LogicConvConfig",
    "MixerConfig",
    "TrainingConfig",
    "as_json",
    "differences",
    "from_dict",
    "resumed",
    "to_dict",
]
