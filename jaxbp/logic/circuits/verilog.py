"""Verilog modules of circuits."""

import collections
import string
from collections.abc import Iterable, Mapping

import numpy as np

from jaxbp.logic.circuits.sources import class_sizes


class Pipeline:
    """Statements of a module, with registers after each `registers` levels of logic, or with none if it is None.

    A value's level is the greatest number of statements on a path to the value. The level of an input is 0. A value
    that is read in a later stage passes through one register per stage.
    """

    def __init__(self, inputs: Iterable[str], registers: int | None, width: int = 1):
        self.every, self.lines = registers, []
        self._level = dict.fromkeys(inputs, 0)
        self._stage = dict.fromkeys(self._level, 0)
        self._width = dict.fromkeys(self._level, width)
        self._register: dict[str, str] = {}

    def add(self, name: str, expression: str, *values: str, width: int = 1, levels: int = 1) -> str:
        """Add the statement `name = expression.format(*values)`, and return `name`. Values that are not in the module
        are constants. The new value's level is `levels` above the greatest level of `values`."""
        level = levels + max((self._level.get(value, 0) for value in values), default=0)
        stage = (level - 1) // self.every if self.every and level else 0
        held = [self.at(value, stage) for value in values]
        self.lines.append(f"wire {_range(width)}{name} = {expression.format(*held)};")
        self._level[name], self._stage[name], self._width[name] = level, stage, width
        return name

    def at(self, name: str, stage: int) -> str:
        """Return the name of a value in a stage. Add the registers that are missing."""
        while self._stage.get(name, stage) < stage:
            if name not in self._register:
                held = self._register[name] = f"held{len(self._register)}"
                width = self._width[held] = self._width[name]
                self._level[held], self._stage[held] = self._level[name], self._stage[name] + 1
                self.lines.append(f"reg {_range(width)}{held}; always @(posedge clock) {held} <= {name};")
            name = self._register[name]
        return name

    def assign(self, outputs: Mapping[str, str]) -> int:
        """Assign values to the outputs, from registers of one stage. Return the number of registers on each path."""
        latency = -(-max(self._level.get(value, 0) for value in outputs.values()) // self.every) if self.every else 0
        self.lines += [f"assign {output} = {self.at(value, latency)};" for output, value in outputs.items()]
        return latency


def circuit_module(
    name: str,
    inputs: int,
    outputs: int,
    lines: Iterable[str],
    latency: int | None = None,
    classes: int | None = None,
    registers: int | None = None,
) -> str:
    """Return the module of `BitCircuit.to_verilog`, whose gates are `lines`.

    If `classes` is given, the module consists of `{name}_gates`, a `{name}_count` per class, and `{name}_maximum`. With
    registers among the votes, it does not have the port y, which would have the values for a later x.
    `latency` is the number of registers on each path through the gates, or None if the module has no clock.
    """
    ports = [f"input wire [{inputs - 1}:0] x", f"output wire [{outputs - 1}:0] y"]
    if classes is None:
        return _module(name, ports, lines, latency)
    sizes = class_sizes(outputs, classes)
    group, planes, digits = sizes["group"], sizes["planes"], sizes["digits"]
    count, count_latency = count_module(f"{name}_count", group, registers)
    maximum, maximum_latency = maximum_module(f"{name}_maximum", classes, planes, digits, registers)
    total = None if latency is None else latency + count_latency + maximum_latency
    clock = "" if latency is None else ".clock(clock), "
    clocked = clock if registers else ""
    counts = (
        f"{name}_count count{c} ({clocked}.x(y[{_slice(c, group)}]), .y(votes[{_slice(c, planes)}]));"
        for c in range(classes)
    )
    parts = [
        *([f"wire [{outputs - 1}:0] y;"] if registers else []),
        f"{name}_gates gates ({clock}.x(x), .y(y));",
        "// label is the first class with the most outputs on.",
        f"wire [{classes * planes - 1}:0] votes;",
        *counts,
        f"{name}_maximum maximum ({clocked}.votes(votes), .label(label));",
    ]
    whole = _module(name, [*ports[: 1 if registers else 2], f"output wire [{digits - 1}:0] label"], parts, total)
    return "\n".join([_module(f"{name}_gates", ports, lines, latency), count, maximum, whole])


def count_module(name: str, bits: int, registers: int | None = None) -> tuple[str, int]:
    """Return a module whose output y is the number of ones among the bits of its input x, and its latency.

    A full adder replaces three bits of a column by their sum and by a carry for the next column. The bits that are
    ready first are added first (L. Dadda, Some Schemes for Parallel Multipliers, 1965).
    """
    adders, planes = 0, bits.bit_length()
    column = collections.deque(f"x[{i}]" for i in range(bits))
    pipeline, outputs = Pipeline(column, registers), {}
    for plane in range(planes):
        carries = collections.deque()
        while len(column) > 1:
            abc = [column.popleft() for _ in range(min(3, len(column)))]
            total, carry = ("{0} ^ {1} ^ {2}", "({0} & {1}) | ({2} & ({0} ^ {1}))")
            if len(abc) == 2:
                total, carry = "{0} ^ {1}", "{0} & {1}"
            column.append(pipeline.add(f"sum{adders}", total, *abc))
            carries.append(pipeline.add(f"carry{adders}", carry, *abc))
            adders += 1
        outputs[f"y[{plane}]"] = column[0]
        column = carries
    latency = pipeline.assign(outputs)
    ports = [f"input wire [{bits - 1}:0] x", f"output wire [{planes - 1}:0] y"]
    return _module(name, ports, pipeline.lines, latency if registers else None), latency


def maximum_module(name: str, classes: int, planes: int, digits: int, registers: int | None = None) -> tuple[str, int]:
    """Return a module and its latency, the number of registers on each path. The module's output `label`, of `digits`
    bits, is the index of the first maximum of `classes` numbers of `planes` bits. A comparison of two numbers is one
    level (see `Pipeline`)."""
    numbers = [(f"votes[{_slice(c, planes)}]", f"{digits}'d{c}") for c in range(classes)]
    pipeline, pairs = Pipeline([number for number, _ in numbers], registers, planes), 0
    while len(numbers) > 1:
        larger = []
        for (a, a_label), (b, b_label) in zip(numbers[::2], numbers[1::2], strict=False):
            more, choose = pipeline.add(f"more{pairs}", "{0} > {1}", b, a), "{0} ? {1} : {2}"
            most = pipeline.add(f"most{pairs}", choose, more, b, a, width=planes, levels=0)
            label = pipeline.add(f"label{pairs}", choose, more, b_label, a_label, width=digits, levels=0)
            larger.append((most, label))
            pairs += 1
        numbers = larger + numbers[2 * len(larger) :]
    latency = pipeline.assign({"label": numbers[0][1]})
    ports = [f"input wire [{classes * planes - 1}:0] votes", f"output wire [{digits - 1}:0] label"]
    return _module(name, ports, pipeline.lines, latency if registers else None), latency


def _range(width: int) -> str:
    return f"[{width - 1}:0] " if width > 1 else ""


def _slice(index: int, size: int) -> str:
    return f"{(index + 1) * size - 1}:{index * size}"


def _module(name: str, ports: Iterable[str], lines: Iterable[str], latency: int | None) -> str:
    if latency is not None:
        ports = ["input wire clock", *ports]
        comment = "// The outputs belong to the x that was taken LATENCY rising edges of the clock ago."
        lines = [comment, f"localparam LATENCY = {latency};", *lines]
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
