"""The report on a trained logic network."""

import functools
import re
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.configs.logic import GateConfig, LogicConfig
from experiments.data.datasets import Dataset, Features
from experiments.output.files import written
from experiments.training import pictures
from experiments.training.compiled import AnyCircuit, compiled, measured
from jaxbp import Netlist, pack_bits
from jaxbp.nn import LogicNetwork
from jaxbp.training.loop import LEAST_SECONDS

FILES = ("gates.png", "circuit.c", "circuit.v")
TIMED_SAMPLES, TIMED_SECONDS, MOST_CALLS = 8192, 0.3, 10_000


def report(config: LogicConfig, model: LogicNetwork, dataset: Dataset) -> str:
    circuit = model.harden()
    netlist = Netlist.of(circuit).simplify()
    after = row_function(dataset.features) if dataset.features else ""
    lines = [
        f"{circuit.histogram().sum():,} gates; {config.run_dir / 'gates.png'} shows their functions",
        f"{len(netlist):,} gates when simplified, in {config.run_dir / 'circuit.c'} and circuit.v",
        *hints(len(netlist)),
    ]
    return write_report(config, model, dataset, circuit, netlist, comment(config, dataset), lines, after=after)


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
    after: str = "",
) -> str:
    """Write gates.png, which counts the gates of `circuit`, and the code of `evaluated`, which starts with `comment`.

    The C code ends with the functions `after`. `evaluated` is `circuit`, perhaps simplified. Return the text to print:
    accuracies, then `lines`, then speeds.
    """
    bits = np.asarray(config.bits(jnp.asarray(dataset.test_images))) > 0
    written(config.run_dir / "gates.png", lambda: pictures.gates(circuit, f"{config.name} on {dataset.name}"))
    written(config.run_dir / "circuit.c", lambda: (comment + evaluated.to_c("circuit", model.classes) + after).encode())
    if verilog:
        to_verilog = functools.partial(evaluated.to_verilog, "circuit", classes=model.classes)
        written(config.run_dir / "circuit.v", lambda: (comment + to_verilog()).encode())
    accuracy = accuracies(model, circuit, bits, dataset.test_labels, config.batch_size)
    return "\n".join([accuracy, *lines, speeds(evaluated, bits)])


def accuracies(model: nnx.Module, circuit: AnyCircuit, bits: np.ndarray, labels: np.ndarray, batch_size: int) -> str:
    relaxed = np.mean(relaxed_predictions(model, bits, batch_size) == labels)
    hardened = np.mean(hardened_predictions(circuit, bits, model.classes) == labels)
    return f"relaxed test accuracy {relaxed:.4f}, hardened {hardened:.4f}"


def speeds(circuit: AnyCircuit, bits: np.ndarray) -> str:
    line = f"hardened, on one CPU core: {samples_per_second(circuit.evaluate, bits):,.0f} samples/s in NumPy"
    in_c = measured(lambda *compiler: samples_per_second(compiled(circuit, *compiler), bits))
    return line if in_c is None else f"{line}, {in_c:,.0f} as compiled C"


def comment(config: LogicConfig, dataset: Dataset) -> str:
    group = config.gates // config.classes
    outputs = f"There are {config.gates} outputs; class c has outputs {group} c to {group} c + {group - 1}. */\n"
    if dataset.features:
        lines = [f"   {i}: {feature} > {limit:.9g}\n" for i, (feature, limit) in enumerate(_bits(dataset.features))]
        return f"/* Each input is a bit:\n{''.join(lines)}   {outputs}"
    levels, (channels, height, width) = config.levels, config.shape
    row = f"({height} * channel + row)" if channels > 1 else "row"
    index = f"{levels} * ({width} * {row} + column) + level"
    return (
        f"/* Input {index}: whether a pixel is above (level + 1) / {levels + 1},\n   for pixels from 0 to 1. {outputs}"
    )


def row_function(features: Features) -> str:
    """Return C code of a function that classifies one row of the table."""
    numbers = [i for i, limits in enumerate(features.thresholds) for _ in limits]
    limits = [f"{float(limit).hex()}f" for _, limit in _bits(features)]
    return f"""
/* Returns the class of one row, with {len(features.names)} features. */
int circuit_classify_row(const float *row)
{{
    static const int features[{len(numbers)}] = {{{", ".join(map(str, numbers))}}};
    static const float thresholds[{len(limits)}] = {{{", ".join(limits)}}};
    uint8_t bits[{len(limits)}];
    for (int i = 0; i < {len(limits)}; i++) bits[i] = row[features[i]] > thresholds[i];
    return circuit_classify(bits);
}}
"""


def _bits(features: Features) -> list[tuple[str, np.float32]]:
    """Return the name and threshold of each bit. Names get no characters that could end a comment of C."""
    names = [re.sub(r"[^\w .,:%()-]", "_", name) for name in features.names]
    return [(name, limit) for name, limits in zip(names, features.thresholds, strict=True) for limit in limits]


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
