from experiments.configs import LogicConvConfig
from experiments.data.datasets import Dataset
from experiments.training.reports.logic import hints, write_report
from jaxbp import ConvolutionalCircuit
from jaxbp.nn import LogicConvNetwork

FILES = ("gates.png", "circuit.c")
MOST_GATES_OF_VERILOG = 200_000


def report(config: LogicConvConfig, model: LogicConvNetwork, dataset: Dataset) -> str:
    circuit, picture = model.harden(), config.run_dir / "gates.png"
    has_verilog = circuit.placed_gates <= MOST_GATES_OF_VERILOG
    files = "circuit.c and circuit.v" if has_verilog else "circuit.c"
    simplified = len(circuit.netlist())
    lines = [
        f"{circuit.gates:,} gates, each gate of a kernel counted once; {picture} shows their functions",
        f"{circuit.placed_gates:,} gates, with kernels and pools counted at every position",
        f"{simplified:,} of these after simplification of kernels and layers, in {files} next to gates.png",
        *hints(simplified),
    ]
    return write_report(config, model, dataset, circuit, circuit, comment(config, circuit), lines, has_verilog)


def comment(config: LogicConvConfig, circuit: ConvolutionalCircuit) -> str:
    channels, height, width = config.shape
    row = f"({config.levels} * channel + level)" if channels > 1 else "level"
    group = circuit.outputs // config.classes
    return (
        f"/* Input {width} * ({height} * {row} + row) + column: whether a pixel is above\n"
        f"   (level + 1) / {config.levels + 1}, for pixels from 0 to 1. There are {circuit.outputs} outputs; class c "
        f"has outputs\n   {group} c to {group} c + {group - 1}. */\n"
    )
