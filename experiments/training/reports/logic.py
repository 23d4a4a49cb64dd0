"""The report on a trained logic network."""

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.configs.logic import GateConfig, LogicConfig
from experiments.data import datasets
from experiments.data.datasets import Dataset
from experiments.output.files import write_atomically
from experiments.training import pictures
from experiments.training.compiled import AnyCircuit, compiled
from jaxbp import Netlist, pack_bits
from jaxbp.nn import LogicNetwork

FILES = ("gates.png", "circuit.c", "circuit.v")
TIMED_SAMPLES, TIMED_SECONDS = 8192, 0.3


def report(config: LogicConfig, model: LogicNetwork, dataset: Dataset) -> str:
    circuit = model.harden()
    netlist = Netlist.of(circuit).simplify()
    lines = [
        f"{circuit.histogram().sum():,} gates; {config.run_dir / 'gates.png'} shows their functions",
        f"{len(netlist):,} gates when simplified, in {config.run_dir / 'circuit.c'} and circuit.v",
    ]
    return write_report(config, model, dataset, circuit, netlist, comment(config), lines)


def write_report(
    config: GateConfig,
    model: nnx.Module,
    dataset: Dataset,
    circuit: AnyCircuit,
    evaluated: AnyCircuit,
    comment: str,
    lines: Sequence[str],
    verilog: bool = True,
) -> str:
    """Write gates.png, which counts the gates of `circuit`, and the code of `evaluated`, which starts with `comment`.

    `evaluated` is `circuit`, perhaps simplified. Return the text to print: accuracies, then `lines`, then speeds.
    """
    bits = np.asarray(config.bits(jnp.asarray(dataset.test_images))) > 0
    write_atomically(config.run_dir / "gates.png", pictures.gates(circuit, f"{config.name} on {dataset.name}"))
    write_atomically(config.run_dir / "circuit.c", (comment + evaluated.to_c("circuit", model.classes)).encode())
    if verilog:
        write_atomically(config.run_dir / "circuit.v", (comment + evaluated.to_verilog("circuit")).encode())
    accuracy = accuracies(model, circuit, bits, dataset.test_labels, config.batch_size)
    return "\n".join([accuracy, *lines, speeds(evaluated, bits)])


def accuracies(model: nnx.Module, circuit: AnyCircuit, bits: np.ndarray, labels: np.ndarray, batch_size: int) -> str:
    relaxed = np.mean(relaxed_predictions(model, bits, batch_size) == labels)
    hardened = np.mean(hardened_predictions(circuit, bits, model.classes) == labels)
    return f"relaxed test accuracy {relaxed:.4f}, hardened {hardened:.4f}"


def speeds(circuit: AnyCircuit, bits: np.ndarray) -> str:
    line = f"hardened, on one CPU core: {samples_per_second(circuit.evaluate, bits):,.0f} samples/s in NumPy"
    if compiler := shutil.which("cc"):
        with tempfile.TemporaryDirectory() as folder:
            function = compiled(circuit, compiler, Path(folder))
            line += f", {samples_per_second(function, bits):,.0f} as compiled C"
    return line


def comment(config: LogicConfig) -> str:
    levels, width, group = config.levels, datasets.IMAGE_SHAPES[config.dataset][2], config.gates // datasets.CLASSES
    return (
        f"/* Input {levels} * ({width} * row + column) + level: whether a pixel is above (level + 1) / {levels + 1},\n"
        f"   for pixels from 0 to 1. There are {config.gates} outputs; class c has outputs {group} c to "
        f"{group} c + {group - 1}. */\n"
    )


def hardened_predictions(circuit: AnyCircuit, bits: np.ndarray, classes: int) -> np.ndarray:
    return np.argmax(circuit(bits).reshape(len(bits), classes, -1).sum(axis=-1), axis=-1)


def relaxed_predictions(model: nnx.Module, bits: np.ndarray, batch_size: int) -> np.ndarray:
    graph, state = nnx.split(model)
    predict = jax.jit(lambda state, x: jnp.argmax(nnx.merge(graph, state)(x), axis=-1))
    batches = [bits[i : i + batch_size] for i in range(0, len(bits), batch_size)]
    return np.concatenate([predict(state, jnp.asarray(batch, jnp.float32)) for batch in batches])


def samples_per_second(evaluate, bits: np.ndarray) -> float:
    words = pack_bits(np.resize(bits.reshape(len(bits), -1), (TIMED_SAMPLES, bits[0].size)))
    evaluate(words)
    times = []
    while sum(times) < TIMED_SECONDS:
        start = time.perf_counter()
        evaluate(words)
        times.append(time.perf_counter() - start)
    return TIMED_SAMPLES / float(np.median(times))
