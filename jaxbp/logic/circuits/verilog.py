"""Verilog modules of circuits."""

import collections
import itertools
import string
from collections.abc import Iterable, Mapping, Sequence

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
        held = self._define(name, values, width, levels)
        self.lines.append(f"wire {_range(width)}{name} = {expression.format(*held)};")
        return name

    def instance(self, module: str, name: str, *values: str, width: int = 1) -> list[str]:
        """Add an instance of a module with an input x and an output y, one level above its inputs. Its x consists of
        the values, the first in the lowest bits, and its y is the value `name`. Return the bits of `name`."""
        held = self._define(name, values, width, levels=1)
        self.lines.append(f"wire {_range(width)}{name};")
        self.lines.append(f"{module} table_{name} (.x({{{', '.join(reversed(held))}}}), .y({name}));")
        bits = [f"{name}[{i}]" for i in range(width)] if width > 1 else [name]
        for bit in bits:
            self._level[bit], self._stage[bit], self._width[bit] = self._level[name], self._stage[name], 1
        return bits

    def _define(self, name: str, values: Iterable[str], width: int, levels: int) -> list[str]:
        """Set the level and stage of a new value, and return the names of `values` in this stage."""
        level = levels + max((self._level.get(value, 0) for value in values), default=0)
        stage = (level - 1) // self.every if self.every and level else 0
        self._level[name], self._stage[name], self._width[name] = level, stage, width
        return [self.at(value, stage) for value in values]

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
    table_inputs: int = 6,
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
    count, count_latency = count_module(f"{name}_count", group, registers, table_inputs)
    maximum, maximum_latency = maximum_module(f"{name}_maximum", classes, planes, digits, registers, table_inputs)
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


def count_module(name: str, bits: int, registers: int | None = None, table_inputs: int = 6) -> tuple[str, int]:
    """Return modules, and the latency of the last, whose output y is the number of ones among the bits of its input x.

    A counter replaces bits of a column by the digits of their sum, one for the column and the others for later columns.
    The bits that are ready first are added first (L. Dadda, Some Schemes for Parallel Multipliers, 1965). With tables
    of six inputs, a counter replaces six bits by three, in one table per digit. Else, it is a full adder of three bits.
    """
    counters, planes = itertools.count(), bits.bit_length()
    columns = [collections.deque(f"x[{i}]" for i in range(bits)), *(collections.deque() for _ in range(planes + 1))]
    pipeline, modules = Pipeline(columns[0], registers), {}
    for plane in range(planes):
        column, following = columns[plane : plane + 2]
        while len(column) > 1:
            summed = [column.popleft() for _ in range(min(6 if table_inputs >= 6 else 3, len(column)))]
            ones, counter = len(summed), next(counters)
            if table_inputs >= 6:
                # A sum of at most seven has three digits, so bits of the next column are added at no cost.
                summed += [following.popleft() for _ in range(min(len(following), 6 - ones, (7 - ones) // 2))]
                width = min((2 * len(summed) - ones).bit_length(), planes - plane)
                module = f"{name}_{ones}_{len(summed)}_{width}"
                terms = [f"x[{i}]" if i < ones else f"{{x[{i}], 1'b0}}" for i in range(len(summed))]
                modules[module] = _table(module, len(summed), width, " + ".join(terms))
                digits = pipeline.instance(module, f"sum{counter}", *summed, width=width)
            else:
                total, carry = ("{0} ^ {1} ^ {2}", "({0} & {1}) | ({2} & ({0} ^ {1}))")
                if ones == 2:
                    total, carry = "{0} ^ {1}", "{0} & {1}"
                added = (f"sum{counter}", total), (f"carry{counter}", carry)
                digits = [pipeline.add(digit, expression, *summed) for digit, expression in added]
            for digit, target in zip(digits, columns[plane:], strict=False):
                target.append(digit)
    latency = pipeline.assign({f"y[{plane}]": columns[plane][0] for plane in range(planes)})
    ports = [f"input wire [{bits - 1}:0] x", f"output wire [{planes - 1}:0] y"]
    count = _module(name, ports, pipeline.lines, latency if registers else None)
    return "\n".join([*modules.values(), count]), latency


def maximum_module(
    name: str, classes: int, planes: int, digits: int, registers: int | None = None, table_inputs: int = 6
) -> tuple[str, int]:
    """Return modules, and the latency of the last, the number of registers on each path. Its output `label`, of
    `digits` bits, is the index of the first maximum of `classes` numbers of `planes` bits.

    One table of six inputs selects one of four bits. With such tables, all pairs of up to four numbers are compared,
    which is one level (see `Pipeline`), and the selection of the maximum is the next level. Else, the comparison of two
    numbers and the selection are one level.
    """
    numbers = [(f"votes[{_slice(c, planes)}]", f"{digits}'d{c}") for c in range(classes)]
    pipeline, names = Pipeline([number for number, _ in numbers], registers, planes), itertools.count()
    larger, size = (f"{name}_larger", 4) if table_inputs >= 6 else (None, 2)
    while len(numbers) > 1:
        groups = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        numbers = [_select(pipeline, next(names), g, planes, digits, larger) if g[1:] else g[0] for g in groups]
    latency = pipeline.assign({"label": numbers[0][1]})
    ports = [f"input wire [{classes * planes - 1}:0] votes", f"output wire [{digits - 1}:0] label"]
    maximum = _module(name, ports, pipeline.lines, latency if registers else None)
    return "\n".join([*_larger_modules(larger, planes), maximum] if larger else [maximum]), latency


def _select(
    pipeline: Pipeline, name: int, numbers: Sequence[tuple[str, str]], planes: int, digits: int, larger: str | None
) -> tuple[str, str]:
    """Add statements for the first maximum of two to four numbers, and for its label. Return their names."""
    more = {}
    for (i, (a, _)), (j, (b, _)) in itertools.combinations(enumerate(numbers), 2):
        more[i, j] = f"more{name}" if len(numbers) == 2 else f"more{name}_{i}{j}"
        if larger:
            pipeline.instance(larger, more[i, j], a, b)
        else:
            pipeline.add(more[i, j], "{0} > {1}", b, a)
    choose, bits, levels = "{0} ? {1} : {2}", [more[0, 1]], int(larger is not None)
    if len(numbers) > 2:
        # Compare the larger of the last two numbers with the larger of the first two. A missing number is not larger.
        four = "{0} ? ({1} ? {2} : {3}) : ({1} ? {4} : {5})"
        last, first, *others = (more.get(pair, "1'b0") for pair in ((2, 3), (0, 1), (1, 3), (0, 3), (1, 2), (0, 2)))
        upper = pipeline.add(f"upper{name}", four, last, first, *others, levels=levels)
        bits = [upper, pipeline.add(f"lower{name}", choose, upper, last, first, levels=0)]
        choose, numbers, levels = four, [*numbers, *numbers[:1]][:4], 0
    values, labels = zip(*reversed(numbers), strict=True)
    most = pipeline.add(f"most{name}", choose, *bits, *values, width=planes, levels=levels)
    return most, pipeline.add(f"label{name}", choose, *bits, *labels, width=digits, levels=levels)


def _larger_modules(name: str, planes: int) -> list[str]:
    """Return modules. The last has the output y = b > a, where a is the lower half of x, and b is the upper half. The
    others are tables that compare two or three bits of a and b, and the result for the lower bits."""
    modules, lines, low, more = {}, [], 0, ""
    while low < planes:
        high = min(planes, low + (2 if more else 3))
        middle, zero = (f", {more}", ", 1'b0") if more else ("", "")
        inputs = 2 * (high - low) + bool(more)
        module = f"{name}{inputs}"
        modules[module] = _table(module, inputs, 1, f"x[{inputs - 1}:{high - low}] > {{x[{high - low - 1}:0]{zero}}}")
        x = f"x[{planes + high - 1}:{planes + low}]{middle}, x[{high - 1}:{low}]"
        low, more = high, f"more{high}"
        lines += [f"wire {more};", f"{module} table{high} (.x({{{x}}}), .y({more}));"]
    ports = [f"input wire [{2 * planes - 1}:0] x", "output wire y"]
    return [*modules.values(), _module(name, ports, [*lines, f"assign y = {more};"], None)]


def _table(name: str, inputs: int, width: int, expression: str) -> str:
    """Return a module with an input x of at most six bits. Its output y is an expression of x. Tools that keep the
    module in the hierarchy map each bit of y to one table of six inputs."""
    ports = [f"input wire [{inputs - 1}:0] x", f"output wire {_range(width)}y"]
    return "(* keep_hierarchy *)\n" + _module(name, ports, [f"assign y = {expression};"], None)


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
