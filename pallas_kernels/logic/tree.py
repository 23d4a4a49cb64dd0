"""Arithmetic of a complete binary tree of gates, for vectors in a kernel's registers or `jax.numpy` arrays.

Gate g of a level computes `c0 + c1 a + c2 b + c3 ab`, where a and b are values `2 * g` and `2 * g + 1` of the level
before.
"""

from collections.abc import Sequence
from typing import Any


def levels_of_tree(c: Sequence[Sequence[Any]], leaves: Sequence[Any]) -> list[list[Any]]:
    """Return the values of a tree of gates, one list per level, leaves first. `c` has each gate's four coefficients,
    level by level, the root last."""
    levels, first = [list(leaves)], 0
    while (count := len(levels[-1]) // 2) > 0:
        pairs = zip(levels[-1][::2], levels[-1][1::2], strict=True)
        levels.append([_gate(c[first + g], a, b) for g, (a, b) in enumerate(pairs)])
        first += count
    return levels


def gradients_of_tree(
    c: Sequence[Sequence[Any]], levels: Sequence[Sequence[Any]], dy: Any
) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Return the gradients with respect to the coefficients `c` and to the leaves. `levels` is the result of
    `levels_of_tree`, and `dy` the gradient with respect to the root."""
    dc, gradients = [], [dy]
    end = sum(map(len, levels[1:]))
    for level in reversed(levels[:-1]):
        first = end - len(gradients)
        terms, input_gradients = [], []
        for g, (a, b) in enumerate(zip(level[::2], level[1::2], strict=True)):
            _, c1, c2, c3 = (c[first + g][i] for i in range(4))
            da = gradients[g] * a
            terms.append((gradients[g], da, gradients[g] * b, da * b))
            input_gradients += [gradients[g] * (c1 + c3 * b), gradients[g] * (c2 + c3 * a)]
        dc, gradients, end = terms + dc, input_gradients, first
    return dc, gradients


def _gate(c, a, b):
    c0, c1, c2, c3 = (c[i] for i in range(4))
    return c0 + c1 * a + (c2 + c3 * a) * b
