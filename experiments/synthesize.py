"""Count the lookup tables of a logic run's circuit on a programmable chip (FPGA), as docs/logic_gates.md describes."""

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from experiments.configs import LogicConfig, LogicConvConfig, effective
from experiments.output.errors import UserError, run_command
from experiments.output.files import OptionalPath, refuse_unwritable
from experiments.output.results import keep, provenance
from experiments.training.run_directory import load, read_metrics
from experiments.training.synthesis import DEVICES, TARGET_MHZ, YOSYS, command_line, place, synthesize, version


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesizeConfig:
    """Counts the lookup tables of the circuit of a run of `experiments.train logic` or `logic-conv`."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""
    device: Literal["ice40", "ecp5", "xilinx"] = "ice40"
    """The chip: iCE40 HX8K, ECP5 85F, or Xilinx 7 series, for which there is no clock frequency."""
    registers: int | None = None
    """Levels of logic between registers: gates, counters, comparisons, and selections. None: no registers."""
    json: OptionalPath = None
    """JSON file for the counts and the clock frequency."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(_main, SynthesizeConfig, "experiments.synthesize", args, description=SynthesizeConfig.__doc__)


def _main(config: SynthesizeConfig, command: str) -> int:
    refuse_unwritable(config.json)
    if config.registers is not None and config.registers < 1:
        raise UserError(f"registers is {config.registers}; wants at least 1, the levels of logic between registers")
    device = DEVICES[config.device]
    tools = [command_line(tool) for tool in (YOSYS, *device.place[:1])]
    trained, model = load(config.run_dir)
    if not isinstance(trained, LogicConfig | LogicConvConfig):
        wanted = f"a run of {LogicConfig.name} or {LogicConvConfig.name}"
        raise UserError(f"{config.run_dir} is a run of {trained.name}; wants {wanted}")
    netlist = model.harden().netlist().simplify()
    print(f"{len(netlist):,} gates when simplified, mapped to {device.title}", flush=True)
    found = {
        "chip": device.title,
        "device_option": config.device,
        "table_inputs": device.inputs,
        "settings": effective(trained),
        "test_accuracy": read_metrics(config.run_dir)[-1].test_accuracy,
        "gate_count": len(netlist),
        "levels_per_register": config.registers,
    }
    with tempfile.TemporaryDirectory() as folder:
        latency, parts = synthesize(netlist, trained.classes, device, Path(folder), config.registers)
        table = Table("", f"tables of {device.inputs} inputs", "registers", "depth in tables")
        for name, part in parts.items():
            table.add_row(name, *("" if number is None else f"{number:,}" for number in part))
        Console().print(table)
        found |= {name: part._asdict() for name, part in parts.items()} | {"latency_cycles": latency}
        if latency is not None:
            print(f"{latency} clock cycles from a sample to its class, one sample per cycle")
        if device.place:
            if parts["circuit"].tables > device.tables:
                raise UserError(
                    f"the circuit has {parts['circuit'].tables:,} lookup tables; wants at most {device.tables:,}, the "
                    f"tables of {device.title}, or another --device"
                )
            frequency = place(device, Path(folder), TARGET_MHZ[config.registers is not None])
            nanoseconds = 1e3 * (latency or 1) / frequency
            print(f"{frequency:.1f} MHz, so {nanoseconds:.0f} ns from a sample to its class")
            found |= {"megahertz": frequency, "latency_nanoseconds": nanoseconds}
    if config.json is not None:
        report = provenance(command)
        report["versions"] |= dict(map(version, tools))
        keep(report | found, config.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
