"""Expansion of lookup tables of four inputs into gates of two inputs.

`jaxbp.lut_layer` numbers the tables. An expression is the index of an input, 0 to 3, or a tuple of the number of a
gate's function and of the two expressions that the gate reads.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

_ONE = 2**16 - 1
_VARIABLES = 0x00FF, 0x0F0F, 0x3333, 0x5555
"""The tables of the four inputs."""
_AND, _NOT_AND, _XOR, _NOT = 1, 4, 6, 15
"""Functions of two inputs a and b. The second is `~a & b`. A function and its inversion have the sum 15."""


@functools.cache
def expanded(table: int) -> Any:
    """Return an expression with few gates that computes a table.

    Let s be a bit that depends on one or two inputs, and let f0 and f1 be tables of the other inputs. If the table
    equals f0 where s is 0, and f1 where s is 1, then it is `f0 ^ (s & (f0 ^ f1)) = f1 ^ (~s & (f0 ^ f1))`. This is the
    expansion of Shannon and Davio. Try every such s, and return the expression with the fewest gates.
    """
    inputs = [v for v in range(4) if _with(table, v, 0) != _with(table, v, 1)]
    if len(inputs) <= 2:
        u, v = (inputs[0], inputs[-1]) if inputs else (0, 0)
        function = int("".join(str(_with(_with(table, u, i), v, j) & 1) for i, j in _BITS), 2)
        return u if inputs == [u] and function == 3 else (function, u, v)
    found = (e for s, f0, f1 in _selections(table, inputs) for e in _selected(s, f0, f1))
    return min(found, key=lambda expression: len(gates_of(expression)))


def gates_of(expression: Any) -> dict[Any, None]:
    """Return the different gates of an expression, each after the gates that it reads."""
    if isinstance(expression, int):
        return {}
    _, a, b = expression
    return gates_of(a) | gates_of(b) | {expression: None}


_BITS = tuple(itertools.product((0, 1), repeat=2))


def _with(table: int, v: int, bit: int) -> int:
    """Return the table with a constant in place of input v."""
    kept, shift = table & (_VARIABLES[v] if bit else ~_VARIABLES[v]), 8 >> v
    return kept | (kept << shift if bit else kept >> shift)


def _selections(table: int, inputs: list[int]) -> Iterator[tuple[Any, int, int]]:
    """Yield (s, f0, f1). The bit s, an expression of one or two `inputs`, selects between the tables f0 (for 0) and f1
    (for 1) of the other inputs."""
    for v in inputs:
        yield v, _with(table, v, 0), _with(table, v, 1)
    for u, v in itertools.combinations(inputs, 2):
        of_others = [_with(_with(table, u, i), v, j) for i, j in _BITS]
        f0, *rest = dict.fromkeys(of_others)
        if len(rest) == 1:
            yield (int("".join(str(int(f != f0)) for f in of_others), 2), u, v), f0, rest[0]


def _selected(s: Any, f0: int, f1: int) -> Iterator[Any]:
    """Yield expressions of the table that is f0 where the bit s is 0, and f1 where it is 1."""
    difference = f0 ^ f1
    for f, function in ((f0, _AND), (f1, _NOT_AND)):
        if f in (0, _ONE):
            yield (function if f == 0 else _NOT - function, s, expanded(difference))
        elif difference == _ONE:
            yield (_XOR if f == f0 else _NOT - _XOR, s, expanded(f))
        else:
            yield (_XOR, expanded(f), (function, s, expanded(difference)))
