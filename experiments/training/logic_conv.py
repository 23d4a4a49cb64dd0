"""The report on a trained convolutional logic network: its accuracies, its gates, the circuit's code and speed.

Written into the run's folder: `gates.png`, `circuit.c` with `circuit_classify`, and of a small circuit `circuit.v`.
"""

import jax.numpy as jnp
import numpy as np

from experiments.configs import LogicConvConfig
from experiments.data.datasets import CLASSES, IMAGE_SHAPES, Dataset
from experiments.output.files import write_atomically
from experiments.training.logic import accuracies, histogram, speeds
from jaxbp import ConvolutionalCircuit
from jaxbp.nn import LogicConvNetwork

FILES = ("gates.png", "circuit.c")
MOST_GATES_OF_VERILOG = 200_000


def report(config: LogicConvConfig, model: LogicConvNetwork, dataset: Dataset) -> str:
    """Lines about the model. Writes the files."""
    circuit = model.harden()
    bits = np.asarray(config.bits(jnp.asarray(dataset.test_images))) > 0
    picture = config.run_dir / "gates.png"
    write_atomically(picture, histogram(circuit, f"{config.name} on {dataset.name}"))
    source = comment(config, circuit) + circuit.to_c("circuit", model.classes)
    write_atomically(config.run_dir / "circuit.c", source.encode())
    files = "circuit.c"
    if circuit.placed_gates <= MOST_GATES_OF_VERILOG:
        source = comment(config, circuit) + circuit.to_verilog("circuit")
        write_atomically(config.run_dir / "circuit.v", source.encode())
        files = "circuit.c and circuit.v"
    return "\n".join(
        [
            accuracies(model, circuit, bits, dataset.test_labels, config.batch_size),
            f"{circuit.gates:,} gates, those of a kernel counted once; {picture} shows their functions",
            f"{circuit.placed_gates:,} gates, those of kernels and pools counted at every place",
            f"{len(circuit.netlist()):,} of these when kernels and layers are simplified, in {files} beside gates.png",
            speeds(circuit, bits),
        ]
    )


def comment(config: LogicConvConfig, circuit: ConvolutionalCircuit) -> str:
    """What the circuit's inputs and outputs are, at the head of its source."""
    channels, height, width = IMAGE_SHAPES[config.dataset]
    row = f"({config.levels} * channel + level)" if channels > 1 else "level"
    group = circuit.outputs // CLASSES
    return (
        f"/* Input {width} * ({height} * {row} + row) + column: whether a pixel is above\n"
        f"   (level + 1) / {config.levels + 1}, pixels being from 0 to 1. Of the {circuit.outputs} outputs, those of "
        f"class c are\n   {group} c to {group} c + {group - 1}. */\n"
    )
