"""The report on a trained language model."""

import functools
import gzip
import json
import lzma
from collections.abc import Callable, Mapping

import numpy as np

from experiments.configs.gpt import GPTConfig
from experiments.data.datasets import Dataset
from experiments.data.ngrams import NGramModel
from experiments.data.text import joined
from experiments.output.files import write_atomically
from experiments.training.run_directory import read_metrics
from experiments.training.sampling import sample
from jaxbp.nn import GPT

FILES = ("compression.json", "samples.txt")
ORDER = 4
SAMPLES, TEMPERATURE, TOP_K = 3, 0.8, 40
COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip -9": functools.partial(gzip.compress, compresslevel=9),
    "xz": lzma.compress,
}


def report(config: GPTConfig, model: GPT, dataset: Dataset) -> str:
    bits = read_metrics(config.run_dir)[-1].test_loss
    others = references(joined(dataset.train_labels), joined(dataset.test_labels))
    figures = {"gpt": bits} | others
    sizes = {"train_bytes": dataset.train_labels.size, "validation_bytes": dataset.test_labels.size}
    content = json.dumps(sizes | {"bits_per_byte": figures}, indent=1) + "\n"
    write_atomically(config.run_dir / FILES[0], content.encode())
    samples = "\n\n".join(f"sample {i}:\n{text}" for i, text in enumerate(samples_of(config, model), start=1))
    write_atomically(config.run_dir / FILES[1], f"{samples}\n".encode())
    return "\n".join([samples, "", *compared(figures, dataset.test_labels.size)])


def references(train: bytes, validation: bytes) -> dict[str, float]:
    """Return the bits per byte of the validation text by compressors, and by n-grams of the training text."""
    found = {name: 8 * len(compress(validation)) / len(validation) for name, compress in COMPRESSORS.items()}
    return found | {f"order {ORDER}": NGramModel(train, ORDER).bits_per_byte(validation)}


def compared(figures: Mapping[str, float], size: int) -> list[str]:
    """Return lines with the bits per byte of each method, and whether it is better or worse than the language model.

    `figures` maps the name of each method to its bits per byte. The language model is "gpt". `size` is the number of
    validation bytes.
    """
    bits = figures["gpt"]

    def verdict(other: float) -> str:
        return f", {'better' if other < bits else 'worse'} than gpt" * (other != bits)

    lines = (f"  {name:8} {other:.4f}{verdict(other)}" for name, other in figures.items())
    return [f"bits per byte of {size:,} validation bytes:", *lines]


def samples_of(config: GPTConfig, model: GPT) -> list[str]:
    prompts = np.zeros((SAMPLES, 0), np.int32)
    drawn = sample(model, prompts, config.context - 1, TEMPERATURE, TOP_K, config.seed)
    return [bytes(row.astype(np.uint8)).decode(errors="replace") for row in drawn]
