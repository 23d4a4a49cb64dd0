"""Continue a prompt with a trained language model, as docs/gpt.md describes."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from experiments.configs import GPTConfig
from experiments.data.text import START
from experiments.output.errors import UserError, run_command
from experiments.training.run_directory import load
from experiments.training.sampling import sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continues a prompt with the language model of a run of `experiments.train gpt`."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""
    prompt: str = ""
    """Beginning of the text."""
    length: int | None = None
    """Number of bytes to generate. None: as many as the context of the model has room for."""
    temperature: float = 0.8
    """Below 1, likely bytes become likelier. 0: always the most likely byte."""
    top_k: int = 256
    """Number of the most likely bytes to draw from."""
    seed: int = 0
    """Seed for the draws."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(_main, GenerateConfig, "experiments.generate", args, description=GenerateConfig.__doc__)


def _main(config: GenerateConfig, command: str) -> int:
    prompt = os.fsencode(config.prompt)
    _check(config, prompt)
    trained, model = load(config.run_dir)
    if not isinstance(trained, GPTConfig):
        raise UserError(f"{config.run_dir} is a run of {trained.name}; wants a run of {GPTConfig.name}")
    most = trained.context - len(prompt)
    if most < 1:
        raise UserError(f"the prompt has {len(prompt)} bytes; wants fewer than {trained.context}, the model's context")
    length = most if config.length is None else config.length
    if length > most:
        raise UserError(f"length is {length}; wants at most {most}, the model's context without the prompt")
    tokens = np.frombuffer(prompt, np.uint8)[None]
    (drawn,) = sample(model, tokens, length, config.temperature, config.top_k, config.seed)
    print((prompt + drawn.astype(np.uint8).tobytes()).decode(errors="replace"))
    return 0


def _check(config: GenerateConfig, prompt: bytes) -> None:
    for field, is_valid, wanted in (
        ("prompt", START not in prompt, "a text without zero bytes"),
        ("length", config.length is None or config.length >= 1, "a whole number of at least 1"),
        ("temperature", 0 <= config.temperature < np.inf, "a finite number of at least 0"),
        ("top_k", 1 <= config.top_k <= 256, "a whole number from 1 to 256"),
        ("seed", 0 <= config.seed < 2**32, "a whole number from 0 to 4294967295"),
    ):
        if not is_valid:
            raise UserError(f"{field} is {getattr(config, field)!r}; wants {wanted}")


if __name__ == "__main__":
    sys.exit(main())
