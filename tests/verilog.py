import re
import shutil
import subprocess

import numpy as np
import pytest

needs_yosys = pytest.mark.skipif(shutil.which("yosys") is None, reason="needs Yosys")
needs_icarus = pytest.mark.skipif(shutil.which("iverilog") is None, reason="needs Icarus Verilog")


def simulate(source, x):
    """Return the outputs of a module of `to_verilog` for bits `(inputs, samples)`. ~ & ^ | have the same precedence in
    Verilog and Python."""
    lines = [line.strip() for line in source.splitlines()]
    assert re.fullmatch(r"module \w+ \(", lines[0]) and lines[-1] == "endmodule"
    values = {}
    for kind, high, name in re.findall(r"^\s*(input wire|output wire|wire) \[(\d+):0\] (\w+)", source, re.MULTILINE):
        values[name] = x if kind == "input wire" else np.full((int(high) + 1, x.shape[1]), 2)
        assert len(values[name]) == int(high) + 1
    for line in (line for line in lines if " = " in line):
        word, target, expression = re.fullmatch(r"(assign|wire) (\S+) = (.+);", line).groups()
        if expression in values and target in values:
            values[target][...] = values[expression]
            continue
        terms = re.sub(r"1'b([01])", r"one * \1", expression)
        assert re.fullmatch(r"(\w+\[\d+\]|\w+|one \* [01]|[~&^|() ])+", terms)
        value = eval(terms, {"one": np.ones(x.shape[1], int)}, values) & 1
        if word == "wire":
            assert target not in values
            values[target] = value
        else:
            name, index = re.fullmatch(r"(\w+)\[(\d+)\]", target).groups()
            values[name][int(index)] = value
    assert all((value < 2).all() for value in values.values()), "some bit has no driver"
    return values["y"]


def run_in_icarus(source, folder):
    (folder / "test.v").write_text(source)
    subprocess.run(["iverilog", "-Wall", "-o", "test", "test.v"], cwd=folder, check=True)
    return subprocess.run(["./test"], cwd=folder, capture_output=True, text=True, check=True).stdout.split()


def in_icarus(source, bits, outputs, folder, port="y"):
    """Return an output of the module `circuit`. If it has a clock, it takes one sample per cycle."""
    samples, inputs = bits.shape
    rows = ["".join("01"[int(bit)] for bit in sample[::-1]) for sample in bits]
    (folder / "samples.txt").write_text("\n".join(rows))
    latency = re.findall(r"LATENCY = (\d+);", source)
    bench = f"""
        module test;
          localparam LATENCY = {latency[-1] if latency else 0};
          reg [{inputs - 1}:0] samples [0:{samples - 1}];
          reg [{inputs - 1}:0] x;
          reg clock = 0;
          wire [{outputs - 1}:0] y;
          integer i;
          circuit gates({".clock(clock), " if latency else ""}.x(x), .{port}(y));
          initial begin
            $readmemb("samples.txt", samples);
            for (i = 0; i < {samples} + LATENCY; i = i + 1) begin
              x = samples[i];
              #1 if (i >= LATENCY) $display("%b", y);
              clock = 1;
              #1 clock = 0;
            end
          end
        endmodule
    """
    lines = run_in_icarus(source + bench, folder)
    return np.array([[bit == "1" for bit in line[::-1]] for line in lines])
