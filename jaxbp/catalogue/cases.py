import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxbp.catalogue.schema import BATCH, Argument, AutomatonArgument, Case, Entry, TreeWiresArgument, WiresArgument
from jaxbp.common.checks import KERNEL_DTYPES
from jaxbp.logic.gates import PASS_THROUGH
from jaxbp.ops.pointwise import arithmetic


def case_of(*arguments: Any, **options: Any) -> Case:
    return Case(tuple(Argument(a) if isinstance(a, tuple) else a for a in arguments), options)


ANY = dict(stride=(2, 1), padding=(1, 0))
POOL_ANY = dict(window=(3, 2), stride=(2, 1), padding=(1, 0))
# A step of finite differences does not change the maximum's position.
APART = Argument((1, 2, 5, 6), apart=True)
CLASS = Argument((BATCH,), below=10)

LABELS = Argument((2, 3), below=4)
LAYERS = ((6, 5), (6,), (4, 6), (4,))
# With larger activations, the softmax would give one class nearly all the probability.
LENET_TAIL = (
    (BATCH, 256),
    CLASS,
    *(a for n, m in ((256, 120), (120, 84), (84, 10)) for a in (Argument((m, n), scale=n**-0.5), (m,))),
)

BLOCKS = (
    ((BATCH, 1, 28, 28), (6, 1, 5, 5), (BATCH, 6, 24, 24), (BATCH, 6, 12, 12)),
    ((BATCH, 6, 12, 12), (16, 6, 5, 5), (BATCH, 16, 8, 8), (BATCH, 16, 4, 4)),
)
"""Shapes of images x, filters w, convolution z, and pool y in LeNet's blocks."""


def block_cases(name: str, of: Callable[..., Case]) -> dict[str, Case]:
    return {f"{name}{i}": of(*shapes) for i, shapes in enumerate(BLOCKS, 1)}


FUSED_ANY = dict(window=(2, 3), padding=(1, 0))


def indices_of(*shape: int | str, below: int) -> Argument:
    return Argument(shape, below=below, dtype=jnp.uint8)


MAMBA = ("NWC", 8, 2048, 1536), ("NWC", 8, 2048, 5120), ("NCW", 8, 5120, 2048)
"""Layouts and sizes in the Mamba models with 130 million and 2.8 billion parameters."""


def depthwise_case(layout: str, batch: int | str, *sizes: int) -> Case:
    x, channels = (BATCH, *sizes), sizes[layout.index("C") - 1]
    filters, w = ("WIO", (4, 1, channels)) if layout == "NWC" else ("OIW", (channels, 1, 4))
    options = dict(padding="CAUSAL", groups=channels, dimension_numbers=(layout, filters, layout))
    return Case(tuple(map(Argument, (x, x, w, (channels,)))), options, None if batch == BATCH else batch)


def pair_entries(
    function: Callable,
    small: Case,
    real: Mapping[str, Case],
    takes: Any = slice(None),
    like: str = "",
    kernel_dtypes: tuple[str, ...] = KERNEL_DTYPES,
) -> tuple[Entry, Entry]:
    """Return the catalogue's entries of a function and of its public backward.

    `small`, `real`, `like`, and `kernel_dtypes` are as in `Entry`, but cases contain `(dy, *arguments)`. The function
    takes `arguments`, and the backward `(dy, *arguments[takes])`. If `like` names the function, only the backward gets
    it.
    """
    backward = getattr(sys.modules[function.__module__], f"{function.__name__}_backward")

    def without_dy(case):
        return dataclasses.replace(case, arguments=case.arguments[1:])

    def with_dy(case):
        dy, *arguments = case.arguments
        return dataclasses.replace(case, arguments=(dy, *arguments[takes]))

    forward_cases, backward_cases = ({place: of(case) for place, case in real.items()} for of in (without_dy, with_dy))
    forward_like = "" if like == function.__name__ else like
    return (
        Entry(function, without_dy(small), forward_cases, kernel_dtypes, forward_like),
        Entry(backward, with_dy(small), backward_cases, kernel_dtypes, like),
    )


SMALL_APART = Argument((2, 3, 4), apart=True)


def unary_entries(function: Callable, small: Argument = SMALL_APART, **options: Any) -> tuple[Entry, ...]:
    real = dataclasses.replace(small, shape=(BATCH, 1024))
    small_case, real_case = (case_of(a.shape, a, **options) for a in (small, real))
    return pair_entries(function, small_case, {"hidden": real_case}, like="relu")


def binary_entries(function: Callable, **of: Mapping[str, Any]) -> tuple[Entry, ...]:
    x1, x2 = (functools.partial(Argument, **of.get(name, {})) for name in ("x1", "x2"))
    rows = 2 if function is arithmetic.divide else 1
    small = case_of((3, 2, 4), x1((3, rows, 4)), x2((2, 1)))
    real = case_of((BATCH, 1024), x1((BATCH, 1024)), x2((1024,)))
    return pair_entries(function, small, {"bias": real}, like="divide")


def loss_entries(function: Callable, *of: Mapping[str, Any], dy: Callable = lambda *shape: shape, **options: Any):
    shapes = (2, 3, 4), (BATCH, 1024)
    small, real = (case_of(dy(*shape), *(Argument(shape, **a) for a in of), **options) for shape in shapes)
    return pair_entries(function, small, {"hidden": real}, like="divide")


def reduction_entries(
    function: Callable, axis: Any, keepdims: bool, dy: tuple, of: Mapping[str, Any] = {}, **options: Any
):
    small = case_of(dy, Argument((2, 3, 4), **of), axis=axis, keepdims=keepdims, **options)
    real = case_of((BATCH,), Argument((BATCH, 1024), **of), axis=-1, **options)
    return pair_entries(function, small, {"rows": real}, like="divide")


def rowwise_entries(function: Callable) -> tuple[Entry, ...]:
    return pair_entries(
        function, case_of((2, 3, 4), (2, 3, 4)), {"rows": case_of((BATCH, 1024), (BATCH, 1024))}, like="divide"
    )


def without_convention(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    # These ops send the whole gradient to the first of equal numbers. Autodiff divides it among them.
    return tuple(dataclasses.replace(entry, kink_convention=False) for entry in entries)


SMOOTH = Argument((2, 3, 4))
KEY = Argument((2,), below=2**31 - 1, dtype=jnp.uint32)


def classifier_case(features: int, classes: int, *dy: tuple, bias: bool = True, **options: Any) -> Case:
    w, labels = Argument((classes, features), scale=features**-0.5), Argument((BATCH,), below=classes)
    return case_of(*dy, (BATCH, features), w, labels, *([(classes,)] if bias else []), **options)


def row_cases(*sizes: tuple[int, ...], of: Callable[..., Case]) -> dict[str, Case]:
    return {f"{rows}x{'x'.join(map(str, size))}": dataclasses.replace(of(*size), batch=rows) for rows, *size in sizes}


def token_case(num_embeddings: int, features: int) -> Case:
    indices = Argument((BATCH,), below=num_embeddings)
    return case_of((BATCH, features), indices, (num_embeddings, features))


NORMALIZED_ROWS = (65536, 1024), (32768, 4096), (262144, 256)
VOCABULARY_ROWS = (32768, 2560, 128256), (4096, 4096, 128256)
PROJECTED_ROWS = (65536, 1024, 4096), (65536, 1024, 1024), (32768, 4096, 4096), (262144, 256, 256)


def gate_case(inputs: int, gates: int, *dy: tuple) -> Case:
    case = case_of(*dy, (gates, 16), WiresArgument(inputs, gates), (BATCH, inputs))
    return dataclasses.replace(case, batch=8192)


TREES = TreeWiresArgument(2, 2, (2, 2), depth=2)


def tree_case(channels: int, size: int, kernels: int, *dy: Argument | tuple, window: int = 3, **options: Any) -> Case:
    wires, x = TreeWiresArgument(channels, kernels, (window, window)), (BATCH, channels, size, size)
    case = case_of(*dy, (kernels, 7, 16), wires, x, padding=1 if window == 3 else 0, **options)
    return dataclasses.replace(case, batch=128)


CELL = AutomatonArgument(2, 1, (8, 4, 2), (4, 2))
CHECKERBOARD = AutomatonArgument(8, 16, (8, 4, 2), (*[256] * 10, 128, 64, 32, 16, 8, 8), periodic=False)


def tick_entries(function: Callable, **options: int) -> tuple[Entry, Entry]:

    def at(automaton, grid, logits):
        state = automaton.state(*grid)
        return case_of(state.shape, logits, automaton, state, **options)

    # Most gates pass one input through. With random functions, the gradient would vanish.
    passing = CHECKERBOARD.logits(offset=tuple(6.0 * (i == PASS_THROUGH) for i in range(16)))
    published = dataclasses.replace(at(CHECKERBOARD, (BATCH, 16, 16), passing), batch=2)
    return pair_entries(
        function, at(CELL, (BATCH, 2, 3), CELL.logits()), {"checkerboard": published}, like="automaton_step"
    )
