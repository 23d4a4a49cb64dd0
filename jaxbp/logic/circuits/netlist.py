import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, Shaped, UInt8

from jaxbp.common import checks
from jaxbp.common.content import ByContent
from jaxbp.logic.circuits import truth_tables
from jaxbp.logic.circuits.bits import WORD_BITS, booleans, pack_bits, unpack_bits
from jaxbp.logic.circuits.sources import (
    C_WORDS,
    EXPRESSIONS,
    VERILOG_WORDS,
    CSource,
    check_name,
)
from jaxbp.logic.circuits.verilog import Pipeline, circuit_module, verilog_testbench
from jaxbp.logic.gates import GATES
from jaxbp.logic.wires.wires import bounded_count, require_below

_OPERANDS = dict(a="a", b="b", zero="a ^ a", one="~(a ^ a)")
FUNCTIONS = tuple(eval(f"lambda a, b: {expression.format(**_OPERANDS)}") for expression in EXPRESSIONS)
_WITH_INVERTED = np.array(
    [
        [[[FUNCTIONS[g](3 ^ 15 * a, 5 ^ 15 * b) & 15 ^ 15 * y for g in range(GATES)] for b in (0, 1)] for a in (0, 1)]
        for y in (0, 1)
    ]
)
"""The function of each gate if its output, its input a, or its input b is inverted."""
GATES_AT_A_TIME = 4096
"""The approximate number of gates per block of outputs. Their values should fit into the CPU's cache."""
SAMPLES_AT_A_TIME = 32 * WORD_BITS
TABULATED_LEAVES = truth_tables.MOST_VARIABLES
_INPUT = (0,)


class BitCircuit(ByContent):
    """Base of circuits of gates with fixed functions.

    A subclass has the attributes `inputs` and `outputs`, and the methods `evaluate(x)` and `netlist()`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a sample, which is flattened in row-major order."""
        return (self.inputs,)

    def __call__(self, bits: Bool[np.ndarray, "samples *shape"]) -> Bool[np.ndarray, "samples outputs"]:
        op, bits = type(self).__name__, np.asarray(bits)
        if bits.shape[1:] != self.shape:
            wanted = ", ".join(map(str, self.shape))
            raise ValueError(f"{op}: bits has shape {bits.shape}; wants (samples, {wanted})")
        bits = booleans(op, bits).reshape(len(bits), self.inputs)
        y = np.empty((self.outputs, len(bits)), bool).T  # in the memory order of `unpack_bits`
        for begin in range(0, len(bits), SAMPLES_AT_A_TIME):  # limits memory
            some = bits[begin : begin + SAMPLES_AT_A_TIME]
            y[begin : begin + len(some)] = unpack_bits(self.evaluate(pack_bits(some)), len(some))
        return y

    def check_words(self, x: Any) -> None:
        if x.shape[:1] != (self.inputs,):
            raise ValueError(f"{type(self).__name__}: x has shape {x.shape}; wants ({self.inputs}, words)")

    def to_c(self, name: str = "circuit", classes: int | None = None) -> str:
        """Return C99 source of `void name(size_t words, const uint32_t *x, uint32_t *y)`, which computes `evaluate`.

        Bit k of `x[i * words + w]` is input i of sample `32 * w + k`, and y has the same layout. Fewer than 16 words
        take as long as 16. Compile with `-Dname_block=1` for single samples and small memories.

        The code allocates no memory. It uses static memory, one copy per thread, so that threads may call it at the
        same time. Without an operating system, or with `-Dname_static=static`, there is one copy, and only one call
        may run at a time.

        Args:
          classes: number of classes. The outputs form one group of equal size per class, and a sample's class is the
            first group with the most ones. If given, the source has two more functions.
            `void name_classify_words(size_t words, const uint32_t *x, int *classes)` computes the class of each sample.
            `int name_classify(const uint8_t *bits)` returns the class of one sample.
        """
        op = type(self).__name__
        check_name(op, name, C_WORDS)
        self.check_classes(classes)
        source = CSource(name)
        outputs, rows = self.add_to(source)
        return source.text(self.inputs, outputs, rows, classes)

    def check_classes(self, classes: Any) -> None:
        if classes is not None and not (checks.is_int(classes) and classes >= 1 and self.outputs % classes == 0):
            wanted = f"None or a divisor of the {self.outputs} outputs"
            raise ValueError(f"{type(self).__name__}: classes is {classes!r}; wants {wanted}")

    def add_to(self, source: CSource, first: int = 0) -> tuple[list[int], int]:
        # Reads input i from row `first + i`. Returns the row of each output, and the number of rows of the memory.
        return self.netlist().add_to(source, first)

    def to_verilog(
        self,
        name: str = "circuit",
        *,
        classes: int | None = None,
        registers: int | None = None,
        table_inputs: int = 6,
    ) -> str:
        """Return a Verilog module with the ports `input [inputs-1:0] x` and `output [outputs-1:0] y`.

        Args:
          classes: number of classes, as in `to_c`. If given, the module also has a port `label`, the sample's class.
          registers: the number of levels of logic between registers, at least 1. A level is a gate, a counter of votes,
            or a comparison of classes. If given, the module also has an `input clock` and takes a new x at each rising
            edge. The module's parameter LATENCY is the number of rising edges from x to y. With `classes`, it is the
            number of edges from x to `label`, and there is no port y.
          table_inputs: the number of inputs of a lookup table of the chip, at least 3. With 6 or more, a counter of
            votes replaces up to six bits by three. Up to four classes are compared at once, and the selection of one of
            them is another level. With fewer inputs, a counter is a full adder, and two classes are compared.
        """
        op = type(self).__name__
        check_name(op, name, VERILOG_WORDS)
        self.check_classes(classes)
        if registers is not None:
            registers = checks.count(op, "registers", registers, 1)
        table_inputs = checks.count(op, "table_inputs", table_inputs, 3)
        netlist, names = self.netlist(), [f"x[{i}]" for i in range(self.inputs)]
        pipeline = Pipeline(names, registers)
        expressions = [e.format(a="{0}", b="{1}", zero="1'b0", one="1'b1") for e in EXPRESSIONS]
        sources = zip(netlist.gates.tolist(), netlist.a.tolist(), netlist.b.tolist(), strict=True)
        for g, (gate, a, b) in enumerate(sources):
            names.append(pipeline.add(f"g{g}", expressions[gate], names[a], names[b]))
        latency = pipeline.assign({f"y[{i}]": names[source] for i, source in enumerate(netlist.results.tolist())})
        latency = latency if registers else None
        return circuit_module(
            name, self.inputs, self.outputs, pipeline.lines, latency, classes, registers, table_inputs
        )

    def to_verilog_testbench(self, bits: Bool[np.ndarray, "samples *shape"], name: str = "circuit") -> str:
        """Return a Verilog module `{name}_test`, for the module of `to_verilog(name)`, which has no clock.

        The simulation compares the module's outputs with this circuit's outputs for these samples. It prints each
        sample whose outputs differ, then "PASS: 9 samples", or "FAIL: 1 of 9 samples".

        Raises:
          ValueError: the name is reserved or not ASCII; there are no samples, their shape is not `(samples, *shape)`,
            or they contain other numbers than 0 and 1.
        """
        op = f"{type(self).__name__}.to_verilog_testbench"
        check_name(op, name, VERILOG_WORDS)
        wanted = self(bits)
        if not len(wanted):
            raise ValueError(f"{op}: bits has no samples; wants at least one")
        return verilog_testbench(name, booleans(op, bits).reshape(len(wanted), -1), wanted)


@dataclasses.dataclass(frozen=True, eq=False)
class Netlist(BitCircuit):
    """A circuit as a list of gates, in which each gate comes after the gates that it reads.

    A source is an input or a gate: number i means input i, and `inputs + g` means gate g. The constructor sorts the
    gates by depth (the number of gates on the longest path from an input), then by function.

    Attributes:
      gates: the function of each gate, 0 to 15.
      a, b: the two sources that each gate reads.
      results: the source of each output.
      groups: the range `(begin, end)` of each group of gates with equal depth and function.
    """

    inputs: int
    gates: UInt8[np.ndarray, " gates"]
    a: Int[np.ndarray, " gates"]
    b: Int[np.ndarray, " gates"]
    results: Int[np.ndarray, " outputs"]
    groups: Sequence[tuple[int, int]] = dataclasses.field(init=False)

    def __post_init__(self):
        inputs = bounded_count("Netlist", "inputs", self.inputs)
        names = "gates", "a", "b", "outputs"
        gates, a, b, outputs = map(_integers, names, (self.gates, self.a, self.b, self.results))
        if not gates.size == a.size == b.size:
            raise ValueError(
                f"Netlist: there are {gates.size} gates, {a.size} inputs a, and {b.size} inputs b; "
                "wants one a and one b per gate"
            )
        if not outputs.size:
            raise ValueError("Netlist: there are no outputs; wants at least one output")
        require_below("Netlist", "gates", gates, GATES, "the number of functions")
        for name, sources in (("a", a), ("b", b)):
            require_below("Netlist", name, sources, inputs + np.arange(gates.size), "the source of the gate itself")
        require_below("Netlist", "outputs", outputs, inputs + gates.size, "the number of sources")
        depth = [0] * inputs
        for i, j in zip(a.tolist(), b.tolist(), strict=True):
            depth.append(1 + max(depth[i], depth[j]))
        runs = _runs(gates, np.array(depth[inputs:], int))
        order = np.concatenate([np.arange(0), *runs])
        now_at = np.arange(inputs + gates.size)
        now_at[inputs + order] = inputs + np.arange(gates.size)
        sorted_ = dict(gates=gates[order].astype(np.uint8), a=now_at[a[order]], b=now_at[b[order]])
        groups = tuple(itertools.pairwise(itertools.accumulate(map(len, runs), initial=0)))
        for name, value in dict(inputs=inputs, **sorted_, results=now_at[outputs], groups=groups).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_gates(cls, inputs: int, gates: ArrayLike, a: ArrayLike, b: ArrayLike, outputs: ArrayLike) -> "Netlist":
        """Make a netlist from gates, each after the gates that it reads.

        `gates` has the number of each gate's function, 0 to 15. a, b, and `outputs` have sources (see `Netlist`).

        Raises:
          ValueError: there are no inputs or outputs; the lengths of `gates`, a, and b differ; or a number is out of
            range.
        """
        return cls(inputs, gates, a, b, outputs)

    @classmethod
    def of(cls, circuit: BitCircuit) -> "Netlist":
        if not isinstance(circuit, BitCircuit):
            raise TypeError(f"Netlist.of: circuit is {circuit!r}; wants a Circuit or another circuit of bits")
        return circuit.netlist()

    def netlist(self) -> "Netlist":
        return self

    @property
    def outputs(self) -> int:
        return self.results.size

    def __len__(self) -> int:
        return self.gates.size

    def evaluate(self, x: Shaped[Array, "inputs *words"]) -> Shaped[Array, "outputs *words"]:
        """Return the outputs for samples packed into words of any unsigned dtype, one bit per sample. A NumPy x gives a
        NumPy array."""
        self.check_words(x)
        return self.applied(x, lambda function, a, b: FUNCTIONS[function](a, b))

    def applied(self, x: Array, function: Callable[[int, Array, Array], Array]) -> Array:
        # Computes the gates of one group by `function(number, a, b)`. x has one value per input.
        host = isinstance(x, np.ndarray)
        values = (np if host else jnp).empty((self.inputs + len(self), *x.shape[1:]), x.dtype)

        def with_rows(first, rows):
            if not host:
                return values.at[first : first + len(rows)].set(rows)
            values[first : first + len(rows)] = rows
            return values

        values = with_rows(0, x)
        for begin, end in self.groups:
            y = function(self.gates[begin], values[self.a[begin:end]], values[self.b[begin:end]])
            values = with_rows(self.inputs + begin, y)
        return values[self.results]

    def histogram(self) -> np.ndarray:
        """Return the number of gates with each function, `(16,)`."""
        return np.bincount(self.gates, minlength=GATES)

    def simplify(self) -> "Netlist":
        """Return a netlist that computes the same function with fewer gates.

        - Constants, pass-throughs, and inverters become part of the gates that read them. If a gate depends only on the
          two sources of another gate, it then reads these sources directly.
        - Gates become one gate if they have the same function and sources, up to an inversion and the order of sources.
        - Gates become one gate if their truth tables are equal. The tables' variables are up to ten inputs or gates.
        - Gates on which no output depends are removed.
        """
        builder = _Builder(self.inputs)
        literals = [2 * (1 + i) for i in range(self.inputs)]
        for function, a, b in zip(self.gates.tolist(), self.a.tolist(), self.b.tolist(), strict=True):
            literals.append(builder.literal(function, literals[a], literals[b]))
        return builder.netlist([literals[source] for source in self.results.tolist()])

    def cones(self) -> list[list[int]]:
        """Return, for each output, the indices of the gates on which it depends, in topological order."""
        cones = []
        for result in self.results.tolist():
            cone, found = set(), [result - self.inputs]
            while found:
                gate = found.pop()
                if gate >= 0 and gate not in cone:
                    cone.add(gate)
                    found += (int(self.a[gate]) - self.inputs, int(self.b[gate]) - self.inputs)
            cones.append(sorted(cone))
        return cones

    def statements(self, declaration: str, inputs: Sequence[str], zero: str, one: str) -> tuple[list[str], list[str]]:
        # Returns one statement per gate, such as `{declaration} g2 = x[0] & ~g1;`, and the name of each output.
        names = [*inputs, *(f"g{g}" for g in range(len(self)))]
        expressions = (
            EXPRESSIONS[gate].format(a=names[a], b=names[b], zero=zero, one=one)
            for gate, a, b in zip(self.gates.tolist(), self.a.tolist(), self.b.tolist(), strict=True)
        )
        lines = [f"{declaration} g{g} = {expression};" for g, expression in enumerate(expressions)]
        return lines, [names[source] for source in self.results.tolist()]

    def add_to(self, source: CSource, first: int = 0) -> tuple[list[int], int]:
        # The outputs are divided into blocks. One step has all gates of equal depth and function whose values are first
        # needed for the same block. A row is used again after the last step that reads it.
        inputs, blocks = self.inputs, max(1, len(self) // GATES_AT_A_TIME)
        block = np.full(inputs + len(self), blocks)
        np.minimum.at(block, self.results, np.arange(self.outputs) * blocks // self.outputs)
        for begin, end in reversed(self.groups):
            for sources in (self.a, self.b):
                np.minimum.at(block, sources[begin:end], block[inputs + begin : inputs + end])
        group = np.repeat(np.arange(len(self.groups)), [end - begin for begin, end in self.groups])
        steps = _runs(group, block[inputs:])

        last = np.full(inputs + len(self), len(steps))  # the last step that reads each source
        for i, step in enumerate(steps):
            last[inputs + step] = last[self.a[step]] = last[self.b[step]] = i
        last[:inputs] = last[self.results] = len(steps)
        counts = np.bincount(last, minlength=len(steps) + 1)
        read_last_by = np.split(np.argsort(last, kind="stable"), np.cumsum(counts)[:-1])
        row, free, unused = np.arange(inputs + len(self)), [], itertools.count(inputs)
        for step, done in zip(steps, read_last_by[:-1], strict=True):
            row[inputs + step] = [free.pop() if free else next(unused) for _ in step]
            numbers = np.stack([row[inputs + step] - inputs, row[self.a[step]], row[self.b[step]]], axis=1)
            source.add_gates(int(self.gates[step[0]]), first, first + inputs, numbers)
            free.extend(row[done].tolist())
        return (first + row[self.results]).tolist(), first + next(unused)


class GateList:
    def __init__(self, inputs: int):
        self.inputs, self.sources, self.listed = inputs, inputs, []

    def add(self, gates: ArrayLike, a: ArrayLike, b: ArrayLike) -> Int[np.ndarray, "..."]:
        """Add gates with the functions `gates`, which read the sources a and b (see `Netlist`). Return the new gates'
        sources."""
        gates, a, b = np.broadcast_arrays(gates, a, b)
        self.listed.append(np.stack([gates.ravel(), a.ravel(), b.ravel()]))
        begin, self.sources = self.sources, self.sources + a.size
        return np.arange(begin, self.sources).reshape(a.shape)

    def netlist(self, outputs: ArrayLike) -> Netlist:
        functions, a, b = np.concatenate([np.empty((3, 0), int), *self.listed], axis=1)
        return Netlist.from_gates(self.inputs, functions, a, b, outputs)


class _Builder:
    """A netlist that is simplified while gates are added.

    Node 0 is the constant 0, nodes 1 to `inputs` are the inputs, and the others are gates. Literal `2 * n` is node n,
    and literal `2 * n + 1` is its inversion. Gates are in a normal form, so that equal gates are found: a gate reads
    two nodes in ascending order, depends on both, and is 0 if both are 0.
    """

    def __init__(self, inputs: int):
        self.inputs = inputs
        self.gates: dict[int, tuple[int, int, int]] = {}  # node -> function and the two nodes that it reads
        # node -> variables (leaves) of its truth table, and the table. A node with too many leaves is its only leaf.
        self.tables = {node: ((node,), truth_tables.IDENTITY) for node in range(1, 1 + inputs)}
        self.node_of: dict[Any, int] = {table: node for node, table in self.tables.items()}
        self.node_of[(), 0] = 0

    def literal(self, function: int, a: int, b: int) -> int:
        """Return the literal (node or inverted node) that equals `function` of the literals a and b. Add a gate if no
        such literal exists."""
        first, second = sorted((a >> 1, b >> 1))
        # Replace nodes by the nodes that they read, if at most two nodes remain.
        below = self.gates.get(second, _INPUT)[1:]
        is_replaced = below and 0 < first < second and (first in below or below == self.gates.get(first, _INPUT)[1:])
        if is_replaced:
            first, second = below
        function = FUNCTIONS[function](self._function(a, first, second), self._function(b, first, second)) & 15
        if is_replaced:
            return self.literal(function, 2 * first, 2 * second)
        inverted = function >> 3
        if function >> 2 == function & 3:  # does not depend on the first literal
            first = 0
        if function >> 1 & 5 == function & 5:  # nor on the second literal
            second = 0
        if not (first and second):
            return 2 * (first or second) + inverted
        return 2 * self._node((function ^ 15 * inverted, first, second)) + inverted

    def _function(self, literal: int, first: int, second: int) -> int:
        """Return the number of the function, 0 to 15, by which a literal (node or inverted node) depends on the nodes
        `first` and `second`."""
        node, functions = literal >> 1, {first: 3, second: 5, 0: 0}
        if node not in functions:
            function, *sources = self.gates[node]
            functions[node] = FUNCTIONS[function](*(functions[source] for source in sources)) & 15
        return functions[node] ^ 15 * (literal & 1)

    def _node(self, gate: tuple[int, int, int]) -> int:
        if gate not in self.node_of:
            new = 1 + self.inputs + len(self.gates)
            table = self._table(gate) or ((new,), truth_tables.IDENTITY)
            node = self.node_of[gate] = self.node_of.setdefault(table, new)
            if node == new:
                self.gates[node], self.tables[node] = gate, table
        return self.node_of[gate]

    def _table(self, gate: tuple[int, int, int]) -> tuple[tuple[int, ...], int] | None:
        function, first, second = gate
        tables = self.tables[first], self.tables[second]
        leaves = {*tables[0][0], *tables[1][0]}
        if len(leaves) > TABULATED_LEAVES:
            return None
        leaves = sorted(leaves)
        a, b = (truth_tables.widened(table, variables, leaves) for variables, table in tables)
        return truth_tables.reduced(FUNCTIONS[function](a, b) & (1 << (1 << len(leaves))) - 1, leaves)

    def netlist(self, outputs: Sequence[int]) -> Netlist:
        begin = 1 + self.inputs
        functions, first, second = np.array(list(self.gates.values()), int).reshape(-1, 3).T
        live, turned = bytearray(begin + len(functions)), np.zeros(begin + len(functions), int)
        for literal in outputs:
            live[literal >> 1] = turned[literal >> 1] = 1
        turned[[literal >> 1 for literal in outputs if not literal & 1]] = turned[:begin] = 0
        for node, a, b in zip(
            range(len(live) - 1, begin - 1, -1), *(x[::-1].tolist() for x in (first, second)), strict=True
        ):
            if live[node]:
                live[a] = live[b] = 1
        kept = np.flatnonzero(np.frombuffer(live, np.uint8)[begin:])
        source = np.arange(-1, self.inputs + len(functions))
        source[begin + kept] = self.inputs + np.arange(kept.size)
        functions, first, second = functions[kept], first[kept], second[kept]
        functions = _WITH_INVERTED[turned[begin + kept], turned[first], turned[second], functions]
        gates = GateList(self.inputs)
        gates.add(functions, source[first], source[second])

        @functools.cache
        def result(literal):
            node, inverted = literal >> 1, literal & 1
            if not node:
                return gates.add(15 * inverted, 0, 0)
            return source[node] if turned[node] == inverted else gates.add(12, source[node], source[node])

        return gates.netlist([int(result(literal)) for literal in outputs])


def _runs(*keys: np.ndarray) -> list[np.ndarray]:
    """Divide entries into groups with equal keys. Return one array per group, with the indices of its entries.

    Each key has one value per entry. The groups are sorted by the last key, then by the key before it, and so on.
    """
    keys = np.stack(keys)
    order = np.lexsort(keys)
    return np.split(order, 1 + np.flatnonzero(np.diff(keys[:, order]).any(axis=0))) if order.size else []


def _integers(name: str, values: ArrayLike) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise ValueError(
            f"Netlist: {name} has shape {values.shape} and dtype {values.dtype}; wants a vector of integers"
        )
    return values.astype(np.int64)
