"""The report on a trained logic network."""

import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.configs.logic import GateConfig, LogicConfig
from experiments.data.datasets import Dataset
from experiments.output.errors import BrokenRun, UserError, warn_of_failure
from experiments.output.files import written
from experiments.training import pictures
from experiments.training.compiled import AnyCircuit, compiled, measured
from experiments.training.synthesis import DEVICES, YOSYS, synthesize
from jaxbp import Netlist, pack_bits
from jaxbp.logic.tables import columns, row_source
from jaxbp.nn import LogicNetwork
from jaxbp.training.loop import LEAST_SECONDS

FILES = ("gates.png", "circuit.c", "circuit.v")
TIMED_SAMPLES, TIMED_SECONDS, MOST_CALLS = 8192, 0.3, 10_000
MOST_MAPPED, MAPPING_SECONDS = 10_000, 60.0
"""Yosys maps circuits of at most this number of gates and outputs, which takes about 10 s, and is stopped later."""


def report(config: LogicConfig, model: LogicNetwork, dataset: Dataset) -> str:
    circuit = model.harden()
    netlist = Netlist.of(circuit).simplify()
    lines = [
        f"{circuit.histogram().sum():,} gates; {config.run_dir / 'gates.png'} shows their functions",
        f"{len(netlist):,} gates when simplified, in {config.run_dir / 'circuit.c'} and circuit.v",
        *hints(len(netlist)),
    ]
    return write_report(config, model, dataset, circuit, netlist, comment(config, dataset), lines)


def hints(gates: int) -> list[str]:
    """Return a line about a circuit without gates, else nothing."""
    advice = "more --epochs or a larger --learning-rate may help"
    return [] if gates else [f"no gate is left, so that each output is an input or a constant; {advice}"]


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
    written(config.run_dir / "gates.png", lambda: pictures.gates(circuit, f"{config.name} on {dataset.name}"))
    written(config.run_dir / "circuit.c", lambda: (comment + c_source(config, evaluated, dataset)).encode())
    if verilog:
        to_verilog = functools.partial(evaluated.to_verilog, "circuit", classes=model.classes)
        written(config.run_dir / "circuit.v", lambda: (comment + to_verilog()).encode())
    accuracy = accuracies(model, circuit, bits, dataset.test_labels, config.batch_size)
    return "\n".join([accuracy, *lines, *lookup_tables(evaluated, model.classes), speeds(evaluated, bits)])


def accuracies(model: nnx.Module, circuit: AnyCircuit, bits: np.ndarray, labels: np.ndarray, batch_size: int) -> str:
    relaxed = np.mean(relaxed_predictions(model, bits, batch_size) == labels)
    hardened = np.mean(hardened_predictions(circuit, bits, model.classes) == labels)
    return f"relaxed test accuracy {relaxed:.4f}, hardened {hardened:.4f}"


def lookup_tables(circuit: AnyCircuit, classes: int) -> list[str]:
    """Return a line with the numbers of lookup tables, if the circuit is small and Yosys is on PATH."""
    gates = len(circuit) if isinstance(circuit, Netlist) else circuit.placed_gates
    if gates + circuit.outputs > MOST_MAPPED or shutil.which(YOSYS) is None:
        return []
    netlist, device = circuit.netlist().simplify(), DEVICES["ice40"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            _, parts = synthesize(netlist, classes, device, Path(folder), timeout=MAPPING_SECONDS)
    except (OSError, subprocess.SubprocessError, BrokenRun, UserError) as error:
        warn_of_failure("the number of lookup tables", error)
        return []
    tables = f"{parts['gates'].tables:,} for the gates and {parts['votes'].tables:,} for the votes"
    depth = f"at most {parts['circuit'].depth:,} one after another"
    return [f"lookup tables of {device.inputs} inputs: {tables}, {depth} (Yosys, {device.title})"]


def speeds(circuit: AnyCircuit, bits: np.ndarray) -> str:
    line = f"hardened, on one CPU core: {samples_per_second(circuit.evaluate, bits):,.0f} samples/s in NumPy"
    in_c = measured(lambda *compiler: samples_per_second(compiled(circuit, *compiler), bits))
    return line if in_c is None else f"{line}, {in_c:,.0f} as compiled C"


def comment(config: LogicConfig, dataset: Dataset) -> str:
    if features := dataset.features:
        described_by = features.quantizer, features.names, features.categories
        return row_source.circuit_comment(*described_by, config.gates, config.classes)
    group = config.gates // config.classes
    outputs = f"There are {config.gates} outputs; class c has outputs {group} c to {group} c + {group - 1}. */\n"
    levels, (channels, height, width) = config.levels, config.shape
    row = f"({height} * channel + row)" if channels > 1 else "row"
    index = f"{levels} * ({width} * {row} + column) + level"
    return (
        f"/* Input {index}: whether a pixel is above (level + 1) / {levels + 1},\n   for pixels from 0 to 1. {outputs}"
    )


def c_source(config: GateConfig, circuit: AnyCircuit, dataset: Dataset) -> str:
    """Return C code of the circuit, and of `int predict(const float *row)`, which classifies a row of the table, or an
    image."""
    if features := dataset.features:
        size, lines = len(features.names), columns.describe(features.names, features.categories)
    else:
        channels, height, width = config.shape
        i, channel = (f"({height} * c + i)", " of channel c") if channels > 1 else ("i", "")
        size = channels * height * width
        lines = [f"row[{width} * {i} + j] is the pixel in row i and column j{channel}, from 0 to 1 (bytes / 255.0f)."]
    classes = (features and features.classes) or range(dataset.classes)
    arguments = config.quantizer(dataset), circuit, size, lines, classes
    return row_source.c_source(config.name, "predict", *arguments, circuit_name="circuit")


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
    while sum(times) < TIMED_SECONDS and len(times) < MOST_CALLS:
        start = time.perf_counter()
        evaluate(words)
        times.append(max(time.perf_counter() - start, LEAST_SECONDS))
    return TIMED_SAMPLES / float(np.median(times))
