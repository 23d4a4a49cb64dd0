"""The report on a trained convolutional logic network: its accuracies, its gates, the circuit's code and speed.

Written into the run's folder: `gates.png`, `circuit.c` with `circuit_classify`, and of a small circuit `circuit.v`.
"""

from experiments.configs import LogicConvConfig
from experiments.data.datasets import CLASSES, IMAGE_SHAPES, Dataset
from experiments.training.logic import write_report
from jaxbp import ConvolutionalCircuit
from jaxbp.nn import LogicConvNetwork

FILES = ("gates.png", "circuit.c")
MOST_GATES_OF_VERILOG = 200_000


def report(config: LogicConvConfig, model: LogicConvNetwork, dataset: Dataset) -> str:
    """Lines about the model. Writes the files."""
    circuit, picture = model.harden(), config.run_dir / "gates.png"
    has_verilog = circuit.placed_gates <= MOST_GATES_OF_VERILOG
    files = "circuit.c and circuit.v" if has_verilog else "circuit.c"
    lines = [
        f"{circuit.gates:,} gates, those of a kernel counted once; {picture} shows their functions",
        f"{circuit.placed_gates:,} gates, those of kernels and pools counted at every place",
        f"{len(circuit.netlist()):,} of these when kernels and layers are simplified, in {files} beside gates.png",
    ]
    return write_report(config, model, dataset, circuit, circuit, comment(config, circuit), lines, has_verilog)


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
