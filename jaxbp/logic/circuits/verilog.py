"""Verilog modules of circuits."""

import collections
import string
from collections.abc import Iterable

import numpy as np

from jaxbp.logic.circuits.sources import class_sizes


def circuit_module(
    name: str, inputs: int, outputs: int, lines: Iterable[str], clocked: bool = False, classes: int | None = None
) -> str:
    """Return the module of `BitCircuit.to_verilog`, whose gates are `lines`.

    If `classes` is given, the module consists of `{name}_gates`, a `{name}_count` per class, and `{name}_maximum`.
    """
    clock = ["input wire clock"] if clocked else []
    ports = [*clock, f"input wire [{inputs - 1}:0] x", f"output wire [{outputs - 1}:0] y"]
    if classes is None:
        return _module(name, ports, lines)
    sizes = class_sizes(outputs, classes)
    group, planes, digits = sizes["group"], sizes["planes"], sizes["digits"]
    counts = (
        f"{name}_count count{c} (.x(y[{_slice(c, group)}]), .y(votes[{_slice(c, planes)}]));" for c in range(classes)
    )
    parts = [
        f"{name}_gates gates ({'.clock(clock), ' * clocked}.x(x), .y(y));",
        "// label is the first class with the most outputs on.",
        f"wire [{classes * planes - 1}:0] votes;",
        *counts,
        f"{name}_maximum maximum (.votes(votes), .label(label));",
    ]
    return "\n".join(
        [
            _module(f"{name}_gates", ports, lines),
            count_module(f"{name}_count", group),
            maximum_module(f"{name}_maximum", classes, planes, digits),
            _module(name, [*ports, f"output wire [{digits - 1}:0] label"], parts),
        ]
    )


def count_module(name: str, bits: int) -> str:
    """Return a module whose output y is the number of ones among the bits of its input x.

    A full adder replaces three bits of a column by their sum and by a carry for the next column. The bits that are
    ready first are added first (L. Dadda, Some Schemes for Parallel Multipliers, 1965).
    """
    lines, adders, planes = [], 0, bits.bit_length()
    column = collections.deque(f"x[{i}]" for i in range(bits))
    for plane in range(planes):
        carries = collections.deque()
        while len(column) > 1:
            a, b = column.popleft(), column.popleft()
            c = column.popleft() if column else "1'b0"
            lines.append(f"wire sum{adders} = {a} ^ {b} ^ {c};")
            lines.append(f"wire carry{adders} = ({a} & {b}) | ({c} & ({a} ^ {b}));")
            column.append(f"sum{adders}")
            carries.append(f"carry{adders}")
            adders += 1
        lines.append(f"assign y[{plane}] = {column[0]};")
        column = carries
    return _module(name, [f"input wire [{bits - 1}:0] x", f"output wire [{planes - 1}:0] y"], lines)


def maximum_module(name: str, classes: int, planes: int, digits: int) -> str:
    """Return a module whose output `label` is the index of the first maximum of `classes` numbers of `planes` bits."""
    numbers = [(f"votes[{_slice(c, planes)}]", f"{digits}'d{c}") for c in range(classes)]
    lines, pairs = [], 0
    while len(numbers) > 1:
        larger = []
        for (a, a_label), (b, b_label) in zip(numbers[::2], numbers[1::2], strict=False):
            lines.append(f"wire more{pairs} = {b} > {a};")
            lines.append(f"wire [{planes - 1}:0] most{pairs} = more{pairs} ? {b} : {a};")
            lines.append(f"wire [{digits - 1}:0] label{pairs} = more{pairs} ? {b_label} : {a_label};")
            larger.append((f"most{pairs}", f"label{pairs}"))
            pairs += 1
        numbers = larger + numbers[2 * len(larger) :]
    ports = [f"input wire [{classes * planes - 1}:0] votes", f"output wire [{digits - 1}:0] label"]
    return _module(name, ports, [*lines, f"assign label = {numbers[0][1]};"])


def _slice(index: int, size: int) -> str:
    return f"{(index + 1) * size - 1}:{index * size}"


def _module(name: str, ports: Iterable[str], lines: Iterable[str]) -> str:
    separated = ",\n".join(f"  {port}" for port in ports)
    return "\n".join([f"module {name} (", separated, ");", *(f"  {line}" for line in lines), "endmodule", ""])


_VERILOG_TEST = string.Template("""\
module ${name}_test;
  reg [$x_high:0] samples [0:$last];
  reg [$y_high:0] wanted [0:$last];
  reg [$x_high:0] x;
  wire [$y_high:0] y;
  integer i, errors;
  $name tested (.x(x), .y(y));
  initial begin
$vectors
    errors = 0;
    for (i = 0; i <= $last; i = i + 1) begin
      x = samples[i];
      #1 if (y !== wanted[i]) begin
        errors = errors + 1;
        $$display("sample %0d: y is %b; wants %b", i, y, wanted[i]);
      end
    end
    if (errors == 0) $$display("PASS: $count samples");
    else $$display("FAIL: %0d of $count samples", errors);
    $$finish;
  end
endmodule
""")


def verilog_testbench(name: str, x: np.ndarray, y: np.ndarray) -> str:
    """Return the module `{name}_test`, which compares the module `{name}` with y for samples x, `(samples, bits)`."""
    vectors = "\n".join(
        f"    {memory}[{i}] = {bits.size}'b{''.join(map(str, bits[::-1].astype(int)))};"
        for memory, rows in (("samples", x), ("wanted", y))
        for i, bits in enumerate(rows)
    )
    sizes = dict(x_high=x.shape[1] - 1, y_high=y.shape[1] - 1, last=len(x) - 1, count=len(x))
    return _VERILOG_TEST.substitute(sizes, name=name, vectors=vectors)
