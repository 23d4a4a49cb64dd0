"""Lookup tables, registers, and clock frequency of circuits, by Yosys and nextpnr."""

import dataclasses
import fnmatch
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from experiments.output.errors import BrokenRun, UserError
from jaxbp import Netlist

YOSYS = "yosys"
TARGET_MHZ = {False: 25, True: 400}
"""The frequency that nextpnr aims at, without registers and with registers. It may reach a lower or a higher one."""
FLIP_FLOPS = "SB_DFF* TRELLIS_FF FD?E"


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
    "xilinx": Device("Xilinx 7 series", 6, "synth_xilinx -family xc7 -nocarry -nowidelut -noiopad -noclkbuf -nosrl"),
}


class Part(NamedTuple):
    """The numbers of lookup tables and of registers, and the number of tables on the longest path between registers."""

    tables: int
    registers: int
    depth: int | None = None


class Synthesized(NamedTuple):
    """Result of `synthesize`. `parts` has the parts "gates", "votes", and "circuit". `latency` is the number of clock
    cycles of a circuit with registers, else None."""

    latency: int | None
    parts: dict[str, Part]


def synthesize(
    netlist: Netlist,
    classes: int,
    device: Device,
    folder: Path,
    registers: int | None = None,
    timeout: float | None = None,
) -> Synthesized:
    """Count the tables and registers of the gates, of the votes (the choice of the class), and of the whole circuit.

    Yosys maps each module separately, so that the tables of the gates and of the votes add up. It writes the mapped
    `timed_module` to `timed.json` in `folder`. `registers` is as in `netlist.to_verilog`.
    """
    circuit = netlist.to_verilog(classes=classes, registers=registers, table_inputs=device.inputs)
    (folder / "circuit.v").write_text(circuit + timed_module(netlist, classes, clocked=registers is not None))
    flip_flops = " ".join(f"t:{cell}" for cell in FLIP_FLOPS.split())
    names = "circuit_gates", "circuit"
    count = (
        f"design -load mapped; hierarchy -top {name}; flatten; opt_clean -purge; tee -q -o {name}.json stat -json; "
        f"delete {flip_flops}; tee -q -o {name}.txt ltp -noff"
        for name in names
    )
    script = (
        "read_verilog circuit.v",
        f"{device.synthesize} -top timed",
        "setattr -mod -unset keep_hierarchy",
        "design -save mapped",
        *count,
        "design -load mapped; flatten; opt_clean -purge; write_json timed.json",
    )
    _run("Yosys maps gates to lookup tables", YOSYS, ["-q", "-p", "; ".join(script)], folder, timeout)
    gates, every = (part((folder / f"{name}.json").read_text(), (folder / f"{name}.txt").read_text()) for name in names)
    votes = Part(every.tables - gates.tables, every.registers - gates.registers)
    latency = None if registers is None else int(re.findall(r"localparam LATENCY = (\d+);", circuit)[-1])
    return Synthesized(latency, {"gates": gates, "votes": votes, "circuit": every})


def timed_module(netlist: Netlist, classes: int, clocked: bool = False) -> str:
    """Return a Verilog module `timed` that has the module `circuit` between registers.

    The delay of the circuit then limits the clock frequency. A shift register holds the inputs that the circuit reads,
    because a chip has fewer pins than the circuit has inputs.

    Args:
      netlist: the circuit. `netlist.to_verilog(classes=classes)` returns the module `circuit`.
      classes: the number of classes, which determines the width of the result.
      clocked: whether the module `circuit` has registers, and so an input `clock`.
    """
    sources = np.concatenate([netlist.a, netlist.b, netlist.results])
    used = {source: i for i, source in enumerate(np.unique(sources[sources < netlist.inputs]).tolist())}
    bits = ", ".join(f"taken[{used[i]}]" if i in used else "1'b0" for i in reversed(range(netlist.inputs)))
    label = max(1, (classes - 1).bit_length()) - 1
    return f"""
module timed (input wire clock, input wire bit, output reg [{label}:0] result);
  reg [{max(len(used), 1) - 1}:0] taken;
  wire [{label}:0] label;
  circuit circuit ({".clock(clock), " * clocked}.x({{{bits}}}), .label(label));
  always @(posedge clock) begin
    taken <= {{taken, bit}};
    result <= label;
  end
endmodule
"""


def place(device: Device, folder: Path, target: float) -> float:
    """Return the clock frequency, in MHz, after placement and routing of `timed.json` for the frequency `target`."""
    tool, *options = device.place
    options += ["--json", "timed.json", "--report", "report.json", "--seed", "1"]
    options += ["-q", "--freq", str(target), "--timing-allow-fail", "--router", "router2"]
    _run("nextpnr places lookup tables and routes wires", tool, options, folder)
    return frequency((folder / "report.json").read_text())


def part(stat: str, ltp: str) -> Part:
    """Return the figures in the reports of Yosys's `stat -json` and `ltp`. An inverter counts as a table."""
    cells = json.loads(stat)["design"]["num_cells_by_type"]
    tables = sum(count for cell, count in cells.items() if re.fullmatch(r"(SB_)?LUT\d|INV", cell))
    registers = sum(
        count for cell, count in cells.items() if any(fnmatch.fnmatchcase(cell, kind) for kind in FLIP_FLOPS.split())
    )
    return Part(tables, registers, longest_path(ltp))


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


def _run(description: str, tool: str, args: Sequence[str], folder: Path, timeout: float | None = None) -> None:
    """Run a tool in a new process, and show the elapsed time."""
    command = [*command_line(tool), *args]
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{description} ...", file=sys.stderr, flush=True)
    columns = SpinnerColumn(), TextColumn(description), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("")
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), (lines or ["no message"])[-1])
        if re.search(r"unable to (find|place|legal)|no bels remaining", reason, re.IGNORECASE):
            raise UserError(f"the circuit does not fit the device ({reason}); wants another --device")
        raise BrokenRun(f"{tool} failed with exit code {done.returncode} ({reason})")
