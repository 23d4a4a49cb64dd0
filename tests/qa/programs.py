"""Random programs, which are JAX transformations of ops with random options, and their data."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.catalogue import Argument, Case, Entry, FixedArgument
from jaxbp.common.checks import KERNEL_DTYPES
from jaxbp.verify.arguments import Arguments, bind, take_apart
from tests.qa.cases import Draws, draw_case
from tests.qa.references import REFERENCES

DATA = (
    "normal",
    "moved",
    "of few values",
    "with special values",
    "far from zero",
    "with subnormal numbers",
    "with ruled-out entries",
    "under a mask",
)
"""The kinds of data. Each program runs on all, because compiling takes longer than running.

"with ruled-out entries" sets elements of the first argument to -inf, and elements of weights to 0.
"""
INVALID_LABELS = (-100, -1, 2**31 - 1)


def plain(function):
    return function


def vmapped(function):
    return lambda *values: jax.vmap(function)(*map(_and_half, values))


def vmapped_in_one(function):
    def vmapped(first, *others):
        return jax.vmap(function, in_axes=(0, *[None] * len(others)))(_and_half(first), *others)

    return vmapped


def scanned(function):
    def total(*values):
        def tick(totals, values):
            return [total + y for total, y in zip(totals, function(*values), strict=True)], None

        zeros = [jnp.zeros(y.shape, y.dtype) for y in jax.eval_shape(function, *values)]
        return jax.lax.scan(tick, zeros, [*map(_and_half, values)])[0]

    return total


def _and_half(a):
    return jnp.stack([a, a / 2])


SECOND_ORDER = ("gradient_of_gradient", "forward_over_reverse")
TRANSFORMATIONS = {
    **{function.__name__: function for function in (plain, vmapped, vmapped_in_one, scanned)},
    "rematerialized": jax.checkpoint,
    "donated": plain,  # `Trial` donates the arguments
    **dict.fromkeys(SECOND_ORDER, plain),
}


@dataclasses.dataclass(frozen=True)
class Program:
    entry: Entry
    case: Case
    dtype: str
    implementation: str | None
    transformation: str
    exact: bool = True
    """Whether matrix products of float32 arrays use float32, not TF32."""
    invalid_labels: bool = False
    """Whether some labels are not valid classes."""

    def __repr__(self) -> str:
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("entry", "case")}
        return f"{self.entry.name}{self.case.arguments}, {dict(self.case.options)}, {settings}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))

    @property
    def kink_convention(self) -> bool:
        """Whether the op and the float64 reference must have equal derivatives at kinks, such as relu's at 0."""
        return self.entry.kink_convention or self.entry.name in REFERENCES

    def arguments(self, random: np.random.Generator, kind: str) -> Arguments:
        """Draw the op's arguments. `kind`, an element of `DATA`, is the distribution of floats. `_floats` says which
        kinds an op does not get.

        Integers, such as labels, do not depend on `random` or `kind`, because they are constants in a compiled program.
        """
        integers, floats = np.random.default_rng(0), []

        def drawn(argument):
            if isinstance(argument, FixedArgument):
                return argument.draw(None, 0, self.dtype)
            if argument.below is not None:
                x = integers.integers(0, argument.below, argument.shape).astype(argument.dtype)
                return np.where(self.is_valid(x.shape), x, integers.choice(INVALID_LABELS)).astype(argument.dtype)
            floats.append(self._floats(random, argument, kind, infinite=not floats and self.takes_infinities))
            is_dy = "_backward" in self.entry.name and len(floats) == 1
            return self.masked(floats[-1], random, kind) if is_dy else floats[-1]

        return take_apart(self.entry.function, jax.tree.map(drawn, self.case.arguments))

    def masked(self, cotangent: np.ndarray, random: np.random.Generator, kind: str) -> np.ndarray:
        """Return the cotangent with 0 for examples with invalid labels. A scalar belongs to all examples, and stays.

        If `kind` is "under a mask", also set a random half of its elements to 0.
        """
        if self.invalid_labels:
            cotangent = cotangent * self.is_valid(cotangent.shape)
        return cotangent * (random.random(cotangent.shape) < 0.5) if kind == "under a mask" else cotangent

    def is_valid(self, shape: tuple[int, ...]) -> np.ndarray:
        if not self.invalid_labels or not shape:
            return np.ones(shape, bool)
        return np.broadcast_to(np.arange(shape[-1]) % 3 > 0, shape)

    def _floats(self, random: np.random.Generator, argument: Argument, kind: str, infinite: bool) -> np.ndarray:
        shape, limits = argument.shape, jnp.finfo(self.dtype)
        x = random.standard_normal(shape) * argument.scale
        if kind == "of few values" and not argument.weights:
            x = random.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0], shape)
        if argument.weights:
            x = np.exp(x) / np.exp(x).sum(-1, keepdims=True) if x.size else x
        if argument.positive:
            x = np.abs(x) + 0.5
        if kind == "moved" and not argument.weights:
            x = x * 10 ** random.uniform(-3, 2)
            if not argument.positive:
                x = x + random.choice([0.0, 1.0, 100.0])
        # Logits have the dtype of x, as the results of `linear`. In float16, they would overflow, and the loss is NaN.
        overflows = self.dtype == "float16" and self.entry.name.startswith("linear_softmax_cross_entropy")
        if kind == "far from zero" and not argument.weights and not overflows:
            # A cotangent `c (1 + y)` must stay below the largest float16, 65504, also for c = 4.
            x = x + random.choice([1e3, 1e4] if argument.positive else [1e3, -1e4, 1.5e4])
        # At probability 0, autodiff gives a wrong second derivative of a divergence.
        if not x.size or not (self.differentiated_once or not argument.weights):
            return x.astype(self.dtype)
        if kind == "with ruled-out entries" and argument.weights:
            x = x * (random.random(shape) < 0.7)
        if kind == "with ruled-out entries" and infinite and not argument.weights and not argument.positive:
            x = np.where(random.random(shape) < 0.3, -np.inf, x)
            x = np.where(random.random((*shape[:-1], 1) if shape else ()) < 0.2, -np.inf, x)
        # XLA's CPU programs take a subnormal number for 0, where a power jumps, and its logarithm is infinite.
        jumps = self.dtype == "float64" or argument.weights or "power" in self.entry.name
        if kind == "with subnormal numbers" and not jumps:
            x.flat[random.integers(x.size, size=2)] = float(limits.tiny) / random.choice([-4, 4, 64], 2)
        if kind in ("with special values", "under a mask"):
            # If a row's sum of squares overflows, a norm is NaN, but not in float64.
            most = float(limits.max) ** 0.5 / (8 if "norm" in self.entry.name else 1)
            # In float64, the op and its reference may underflow in different terms.
            least = float(limits.tiny) ** (0.5 if self.dtype == "float64" else 1)
            special = [0.0, -0.0, least, *[most, -most, np.nan, np.inf, -np.inf] * infinite]
            x.flat[random.integers(x.size, size=2)] = random.choice(special[:3] if argument.weights else special, 2)
        return x.astype(self.dtype)

    @property
    def differentiated_once(self) -> bool:
        return "_backward" not in self.entry.name and self.transformation not in SECOND_ORDER

    @property
    def spreads_invalid_labels(self) -> bool:
        """Whether an invalid label whose dy is not 0 may give NaN to gradients that do not depend on it, but not to the
        gradient with respect to x in the rows of other examples."""
        is_mlp = self.entry.name.startswith("mlp_") and "_backward" not in self.entry.name
        return is_mlp and self.invalid_labels and self.implementation == "pallas"

    @property
    def takes_infinities(self) -> bool:
        """Whether the op's first argument may contain NaN, infinities, and values whose squares overflow.

        It may not in convolutions and attention, which may multiply these values by zero. It may not in backward ops
        and in programs with second derivatives, which depend on the formula at infinities.
        """
        multiplies_by_zero = self.entry.name.startswith(("conv1d", "conv2d", "dot_product_attention"))
        return self.differentiated_once and not multiplies_by_zero

    def function(self, arguments: Arguments, implementation: str | None) -> Callable:
        function = bind(self.entry.function, implementation, self.case.options)
        if implementation == "autodiff" and self.entry.name in REFERENCES:
            function = functools.partial(REFERENCES[self.entry.name], **self.case.options)
        function = arguments.of_floats(function)
        return TRANSFORMATIONS[self.transformation](function)


@st.composite
def programs(draw: Callable, entries: Sequence[Entry], on_gpu: bool) -> Program:
    random = Draws(draw)
    entry = random.choice(entries)
    implementation = random.choice(
        [*["xla"] * 3, None, None, "pallas"] if not on_gpu else ["pallas", "pallas", "xla", None]
    )
    dtypes = entry.kernel_dtypes or KERNEL_DTYPES if implementation == "pallas" else [*KERNEL_DTYPES, "float64"]
    dtype, transformation = random.choice(dtypes), random.choice(list(TRANSFORMATIONS))
    exact = random.random() > 0.2 or dtype != "float32"
    case = draw_case(random, entry)
    has_labels = "cross_entropy" in entry.name and any(getattr(a, "below", None) for a in case.leaves)
    invalid_labels = has_labels and random.random() < 0.5
    return Program(entry, case, dtype, implementation, transformation, exact, invalid_labels)
