import dataclasses
import json
import subprocess
import textwrap

import numpy as np
import pytest
from verilog import needs_icarus, needs_yosys, run_in_icarus

from experiments.output.errors import BrokenRun, UserError
from experiments.training import synthesis
from jaxbp import Netlist
from jaxbp.logic.circuits.verilog import count_module

# Six outputs of four of the five inputs: input 2 is unused.
NETLIST = Netlist.from_gates(5, [1, 6, 14], [0, 1, 5], [3, 4, 6], [5, 6, 7, 0, 7, 3])
STAT = json.dumps(
    {
        "creator": "Yosys",
        "modules": {"\\circuit": {"num_cells_by_type": {"SB_LUT4": 2}}},
        "design": {"num_cells": 17, "num_cells_by_type": {"$scopeinfo": 3, "SB_LUT4": 5, "SB_DFF": 9}},
    }
)
OTHERS = {"design": {"num_cells_by_type": {"INV": 1, "LUT2": 20, "LUT6": 300, "FDRE": 4, "TRELLIS_FF": 2, "MUXF7": 5}}}
LTP = """
9. Executing LTP pass (find longest path).

Longest topological path in circuit (length=33):
    0: \\circuit.x [3]
    1: \\y [0] (via $abc$1)
"""


def test_tables_registers_and_the_longest_path_are_read():
    assert synthesis.part(STAT, LTP) == (5, 9, 33)
    assert synthesis.part(json.dumps(OTHERS), "9. Executing LTP pass (find longest path).\n") == (321, 6, 0)


def test_the_clock_frequency_is_read():
    report = {"fmax": {"clock$SB_IO_IN_$glb_clk": {"achieved": 23.4, "constraint": 25.0}}, "utilization": {}}
    assert synthesis.frequency(json.dumps(report)) == 23.4


@needs_icarus
def test_the_registers_hold_the_inputs_that_are_read_and_the_label(tmp_path):
    samples = np.random.default_rng(0).random((20, 5)) < 0.5
    samples[:, 2] = False
    shifted = "".join("01"[int(bit)] for sample in samples[:, [4, 3, 1, 0]] for bit in sample)
    bench = f"""
        module test;
          reg [0:79] bits = 80'b{shifted};
          reg clock = 0, bit;
          wire [1:0] result;
          integer i;
          timed timed(.clock(clock), .bit(bit), .result(result));
          initial for (i = 0; i < 81; i = i + 1) begin
            bit = i < 80 ? bits[i] : 0;
            #1 clock = 1;
            #1 clock = 0;
            if (i > 0 && i % 4 == 0) $display("%0d", result);
          end
        endmodule
    """
    source = NETLIST.to_verilog(classes=3) + synthesis.timed_module(NETLIST, 3) + bench
    labels = NETLIST(samples).reshape(20, 3, 2).sum(axis=2).argmax(axis=1)
    assert len({*labels.tolist()}) > 1
    assert [int(line) for line in run_in_icarus(source, tmp_path)] == labels.tolist()


@needs_yosys
def test_yosys_maps_gates_and_votes(tmp_path):
    latency, parts = synthesis.synthesize(NETLIST, 3, synthesis.DEVICES["ice40"], tmp_path)
    gates, votes, circuit = parts.values()
    # Each of the three gates is an output and needs a table. The third depends on all inputs, so its depth is 1.
    assert (latency, gates) == (None, (3, 0, 1))
    assert circuit.tables == gates.tables + votes.tables > 6 and circuit.depth >= 3 and circuit.registers == 0
    cells = json.loads((tmp_path / "timed.json").read_text())["modules"]["timed"]["cells"].values()
    # Four inputs and two bits of the label are registers.
    assert sum(cell["type"].startswith("SB_DFF") for cell in cells) == 6


@needs_yosys
def test_yosys_counts_the_registers_of_a_pipeline(tmp_path):
    latency, parts = synthesis.synthesize(NETLIST, 3, synthesis.DEVICES["ice40"], tmp_path, registers=1)
    # There are two levels of gates, one of adders, and two of comparisons. The first stage has registers for gates 0
    # and 1 and for inputs 0 and 3. The second has registers for the five different outputs.
    assert latency == 5
    assert parts["gates"] == (3, 9, 1)
    # After the sums of two bits per class come the larger of two sums, a label of one bit, and the third sum; then,
    # two bits of the label.
    assert parts["votes"].registers == 6 + 5 + 2
    assert parts["circuit"].depth < 5


@needs_yosys
@pytest.mark.parametrize("registers", [None, 5])
def test_hundred_votes_take_98_tables_of_six_inputs(registers, tmp_path):
    netlist = Netlist.from_gates(400, [1], [0], [1], [400, *range(1, 400)])
    _, parts = synthesis.synthesize(netlist, 4, synthesis.DEVICES["xilinx"], tmp_path, registers)
    assert parts["gates"].tables == 1
    # Six comparisons of seven bits take three tables each, and the label two.
    assert parts["votes"].tables == 4 * 98 + 6 * 3 + 2


@needs_yosys
def test_counters_are_mapped_separately_in_a_flat_design(tmp_path):
    source, _ = count_module("count", 50)
    (tmp_path / "count.v").write_text(source)
    device = synthesis.DEVICES["xilinx"].synthesize
    script = f"read_verilog count.v; {device} -flatten -top count; setattr -mod -unset keep_hierarchy; flatten"
    command = ["yosys", "-q", "-p", f"{script}; tee -q -o stat.json stat -json"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert synthesis.part((tmp_path / "stat.json").read_text(), "").tables == 47


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("Yosys 0.23 (git sha1 7ce5011c24b)", "0.23"),
        ("Yosys 0.60+39 (git sha1 1ab2c3d4, clang++ 18.1.8 -fPIC -O3)", "0.60+39"),
        ('"nextpnr-ice40" -- Next Generation Place and Route (Version nextpnr-0.4-1+b1)', "0.4-1+b1"),
        ("unknown", "unknown"),
    ],
)
def test_a_tool_on_path_is_preferred_and_has_a_version(message, wanted, tmp_path, monkeypatch):
    tool = tmp_path / "yosys"
    tool.write_text(f"#!/bin/sh\necho '{message}' >&2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(synthesis.importlib.util, "find_spec", lambda name: name)
    command = synthesis.command_line("yosys")
    assert command == [str(tool)]
    monkeypatch.undo()
    assert synthesis.version(command) == ("yosys", wanted)


@pytest.mark.parametrize(
    ("message", "error", "wanted"),
    [
        ("ERROR: Unable to place cell 'x', no BELs remaining", UserError, "does not fit the device"),
        ("ERROR: syntax error", BrokenRun, "failed with exit code 1 .ERROR: syntax error"),
    ],
)
def test_an_error_of_a_tool_is_one_line(message, error, wanted, tmp_path, monkeypatch):
    tool = f"""
        import sys
        def run_fake(args):
            assert args[:4] == ["--json", "timed.json", "--report", "report.json"]
            print({message!r}, file=sys.stderr)
            return 1
    """
    (tmp_path / "yowasp_fake.py").write_text(textwrap.dedent(tool))
    monkeypatch.syspath_prepend(tmp_path)
    device = dataclasses.replace(synthesis.DEVICES["ice40"], place=("fake",))
    with pytest.raises(error, match=wanted):
        synthesis.place(device, tmp_path, 25)
