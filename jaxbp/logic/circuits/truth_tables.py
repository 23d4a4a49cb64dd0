"""Truth tables of a few variables as integers.

Bit i of a table is the function's value if variable v is bit v of i. A table of n variables has 2^n bits. Integers of
up to 1024 bits are several times as fast as NumPy arrays.
"""

from collections.abc import Sequence

MOST_VARIABLES = 10
IDENTITY = 0b10
"""The table of a variable."""
_ONE = tuple(sum(1 << i for i in range(2 ** (MOST_VARIABLES + 1)) if i >> v & 1) for v in range(MOST_VARIABLES + 1))
"""For each variable, the table of the variable itself, as a table of all variables."""


def widened(table: int, variables: Sequence[int], wanted: Sequence[int]) -> int:
    """Return a table of sorted variables as a table of more variables, `wanted`, which are also sorted."""
    count = len(variables)
    if count == len(wanted):
        return table
    present = set(variables)
    for v, variable in enumerate(wanted):
        if variable not in present:
            for u in range(count - 1, v - 1, -1):  # Variable u becomes variable u + 1.
                moved = table & _ONE[u]
                table ^= moved ^ moved << (1 << u)
            table |= table << (1 << v)
            count += 1
    return table


def reduced(table: int, variables: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the variables on which a table depends, and the same function as a table of only these variables."""
    kept = list(variables)
    for v in range(len(kept) - 1, -1, -1):
        if not (table ^ table >> (1 << v)) & ~_ONE[v]:
            table &= ~_ONE[v]
            for u in range(v + 1, len(kept)):  # Variable u becomes variable u - 1.
                moved = table & _ONE[u]
                table ^= moved ^ moved >> (1 << (u - 1))
            del kept[v]
    return tuple(kept), table
