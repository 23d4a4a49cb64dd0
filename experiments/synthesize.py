"""Count the lookup tables of a logic run's circuit on a programmable chip (FPGA), as docs/logic_gates.md describes."""

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.configs import LogicConfig, LogicConvConfig
from experiments.output.errors import BrokenRun, UserError, run_command
from experiments.output.files import refuse_unwritable
from experiments.output.results import keep, provenance
from experiments.training.run_directory import load
from jaxbp import Netlist

YOSYS = "yosys"
TARGET_MHZ = 25
"""nextpnr reports the frequency that it reaches, also if it is higher or lower."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A chip. `tables` is its number of lookup tables of `inputs` inputs. Without `place`, there is only synthesis.

    `synthesize` maps to lookup tables only, without carry chains and wide multiplexers, so that counts are comparable.
    """

    title: str
    inputs: int
    synthesize: str
    tables: int | None = None
    place: Sequence[str] = ()


_ICE40 = "nextpnr-ice40", "--hx8k", "--package", "ct256"
_ECP5 = "nextpnr-ecp5", "--85k", "--package", "CABGA756", "--lpf-allow-unconstrained"
DEVICES = {
    "ice40": Device("Lattice iCE40 HX8K", 4, "synth_ice40 -noflatten -nocarry", 7680, _ICE40),
    "ecp5": Device("Lattice ECP5 85F", 4, "synth_ecp5 -noflatten -noccu2 -nowidelut", 83_640, _ECP5),
    "xilinx": Device("Xilinx 7 series", 6, "synth_xilinx -family xc7 -nocarry -nowidelut -noiopad -noclkbuf"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesizeConfig:
    """Counts the lookup tables of the circuit of a run of `experiments.train logic` or `logic-conv`."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""
    device: Literal["ice40", "ecp5", "xilinx"] = "ice40"
    """The chip: iCE40 HX8K, ECP5 85F, or Xilinx 7 series, for which there is no clock frequency."""
    json: Path | None = None
    """JSON file for the counts and the clock frequency."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(_main, SynthesizeConfig, "experiments.synthesize", args, description=SynthesizeConfig.__doc__)


def _main(config: SynthesizeConfig, command: str) -> int:
    refuse_unwritable(config.json)
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
        "gate_count": len(netlist),
    }
    with tempfile.TemporaryDirectory() as folder:
        counts = synthesize(netlist, trained.classes, device, Path(folder))
        table = Table("", f"tables of {device.inputs} inputs", "depth in tables")
        for part, row in counts.items():
            table.add_row(part, *(f"{number:,}" for number in row))
        Console().print(table)
        found |= {part: {"tables": number, "depth": depth} for part, (number, depth) in counts.items()}
        if device.place:
            tables, _ = counts["circuit"]
            if tables > device.tables:
                raise UserError(
                    f"the circuit has {tables:,} lookup tables; wants at most {device.tables:,}, the tables of "
                    f"{device.title}, or another --device"
                )
            frequency = place(device, Path(folder))
            print(f"{frequency:.1f} MHz between registers before and after the circuit, which has no registers")
            found["megahertz"] = frequency
    if config.json is not None:
        report = provenance(command)
        report["versions"] |= dict(map(version, tools))
        keep(report | found, config.json)
    return 0


def synthesize(netlist: Netlist, classes: int, device: Device, folder: Path) -> dict[str, tuple[int, int]]:
    """Return the number of lookup tables and the depth of the gates, of the votes, and of the whole circuit.

    Yosys maps each module separately, so that the tables of the gates and of the votes add up. The depth of the votes
    is the depth that they add. The mapped circuit between registers is written as `timed.json`.
    """
    (folder / "circuit.v").write_text(netlist.to_verilog(classes=classes) + timed_module(netlist, classes))
    parts = "circuit_gates", "circuit"
    count = (
        f"design -load mapped; hierarchy -top {part}; flatten; tee -q -o {part}.json stat -json; "
        f"tee -q -o {part}.txt ltp -noff"
        for part in parts
    )
    script = (
        "read_verilog circuit.v",
        f"{device.synthesize} -top timed",
        "design -save mapped",
        *count,
        "design -load mapped; flatten; opt_clean -purge; write_json timed.json",
    )
    _run("Yosys maps gates to lookup tables", YOSYS, ["-q", "-p", "; ".join(script)], folder)
    (gates, shallow), (every, depth) = (
        (tables((folder / f"{part}.json").read_text()), longest_path((folder / f"{part}.txt").read_text()))
        for part in parts
    )
    return {"gates": (gates, shallow), "votes": (every - gates, depth - shallow), "circuit": (every, depth)}


def timed_module(netlist: Netlist, classes: int) -> str:
    """Return a module that has the circuit between registers, so that its delay limits the clock.

    A shift register holds the inputs that the circuit reads, because a chip has fewer pins than the circuit inputs.
    """
    sources = np.concatenate([netlist.a, netlist.b, netlist.results])
    used = {source: i for i, source in enumerate(np.unique(sources[sources < netlist.inputs]).tolist())}
    bits = ", ".join(f"taken[{used[i]}]" if i in used else "1'b0" for i in reversed(range(netlist.inputs)))
    label = max(1, (classes - 1).bit_length()) - 1
    return f"""
module timed (input wire clock, input wire bit, output reg [{label}:0] result);
  reg [{max(len(used), 1) - 1}:0] taken;
  wire [{label}:0] label;
  circuit circuit (.x({{{bits}}}), .label(label));
  always @(posedge clock) begin
    taken <= {{taken, bit}};
    result <= label;
  end
endmodule
"""


def place(device: Device, folder: Path) -> float:
    """Return the clock frequency, in MHz, after placement and routing of `timed.json`."""
    tool, *options = device.place
    options += ["--json", "timed.json", "--report", "report.json", "--seed", "1"]
    options += ["-q", "--freq", str(TARGET_MHZ), "--timing-allow-fail", "--router", "router2"]
    _run("nextpnr places lookup tables and routes wires", tool, options, folder)
    return frequency((folder / "report.json").read_text())


def tables(stat: str) -> int:
    """Return the number of lookup tables in a report of Yosys's `stat -json`. An inverter counts as a table."""
    cells = json.loads(stat)["design"]["num_cells_by_type"]
    return sum(count for cell, count in cells.items() if re.fullmatch(r"(SB_)?LUT\d|INV", cell))


def longest_path(ltp: str) -> int:
    """Return the length of the path in a report of Yosys's `ltp`, 0 if the circuit has no cells."""
    found = re.search(r"Longest topological path in \S+ \(length=(\d+)\)", ltp)
    return int(found[1]) if found else 0


def frequency(report: str) -> float:
    """Return the clock frequency of a report of nextpnr, in MHz."""
    (clock,) = json.loads(report)["fmax"].values()
    return clock["achieved"]


def command_line(tool: str) -> list[str]:
    """Return the command that runs a tool from PATH or, if it is not there, from a YoWASP package, which is slower."""
    if path := shutil.which(tool):
        return [path]
    name = tool.replace("-", "_")
    if importlib.util.find_spec(f"yowasp_{name}") is None:
        wanted = "wants it on PATH, for example from OSS CAD Suite, or run: pip install '.[hardware]'"
        raise UserError(f"{tool} is not on PATH, and the package yowasp-{tool} is not installed; {wanted}")
    return [sys.executable, "-c", f"import sys, yowasp_{name} as tool; sys.exit(tool.run_{name}(sys.argv[1:]))"]


def version(command: Sequence[str]) -> tuple[str, str]:
    """Return the name of the tool that a command of `command_line` runs, and its version."""
    if found := re.search(r"yowasp_\w+", command[-1]):
        return found[0], metadata.version(found[0])
    done = subprocess.run([*command, "-V"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"\b\d+\.\d[\w.+-]*", done.stdout)
    return Path(command[0]).name, found[0] if found else done.stdout.strip()


def _run(description: str, tool: str, args: Sequence[str], folder: Path) -> None:
    """Run a tool in a new process, and show the elapsed time."""
    command = [*command_line(tool), *args]
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{description} ...", file=sys.stderr, flush=True)
    columns = SpinnerColumn(), TextColumn(description), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("")
        done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
        if re.search(r"unable to (find|place|legal)|no bels remaining", reason, re.IGNORECASE):
            raise UserError(f"the circuit does not fit the device ({reason}); wants another --device")
        raise BrokenRun(f"{tool} failed with exit code {done.returncode} ({reason})")


if __name__ == "__main__":
    sys.exit(main())
