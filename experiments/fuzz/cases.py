"""Draw random programs and their data. A program is an op with shapes, options, and a transformation."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz.references import REFERENCES
from experiments.fuzz.transformations import SECOND_ORDER, TRANSFORMATIONS
from jaxbp.catalogue import (
    CATALOGUE,
    Argument,
    AutomatonArgument,
    Case,
    Entry,
    FixedArgument,
    TreeWiresArgument,
    WiresArgument,
)
from jaxbp.common.checks import KERNEL_DTYPES
from jaxbp.logic.gates import PARAMETERS
from jaxbp.verify.arguments import Arguments, bind, floats, take_apart

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
"""Kinds of data. Each program runs on all kinds, because compilation takes most of the time.

"with ruled-out entries" puts -inf into random entries and whole rows of the first argument, and zeros into weights.
"under a mask" sets half of the cotangents to 0, and uses special values.
"""
INVALID_LABELS = (-100, -1, 2**31 - 1)

MOST_DRAWS = 30
"""The largest number of draws of shapes and options, which are repeated until the plain formula accepts them."""


@dataclasses.dataclass(frozen=True)
class Program:
    """An op with its implementation, dtype, transformation, shapes, and options. Two programs with equal fields compute
    the same function."""

    entry: Entry
    case: Case
    dtype: str
    implementation: str | None
    transformation: str
    exact: bool = True
    """Whether products of float32 are computed in full precision, not in TF32."""
    invalid_labels: bool = False
    """Whether some labels are not classes. The cotangents of their examples are 0."""

    @property
    def kink_convention(self) -> bool:
        """Whether the reference defines the same derivative as the op at points where the derivative does not exist."""
        return self.entry.kink_convention or self.entry.name in REFERENCES

    def arguments(self, random: np.random.Generator, kind: str) -> Arguments:
        """Draw the arguments. Floats are of the given kind of `DATA`; integers are part of the program."""
        integers, floats = np.random.default_rng(0), []

        def drawn(argument):
            if isinstance(argument, FixedArgument):
                return argument.draw(None, 0, self.dtype)
            if argument.below is not None:
                x = integers.integers(0, argument.below, argument.shape).astype(argument.dtype)
                return np.where(self._is_valid(x.shape), x, integers.choice(INVALID_LABELS)).astype(argument.dtype)
            floats.append(self._floats(random, argument, kind, infinite=not floats and self.takes_infinities))
            is_dy = "_backward" in self.entry.name and len(floats) == 1
            return self.masked(floats[-1], random, kind) if is_dy else floats[-1]

        return take_apart(self.entry.function, jax.tree.map(drawn, self.case.arguments))

    def masked(self, cotangent: np.ndarray, random: np.random.Generator, kind: str) -> np.ndarray:
        """Set a cotangent of the op's result to zero at invalid labels and, for "under a mask", at random."""
        if self.invalid_labels:
            cotangent = cotangent * self._is_valid(cotangent.shape)
        return cotangent * (random.random(cotangent.shape) < 0.5) if kind == "under a mask" else cotangent

    def _is_valid(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return a mask that is true where a label is a class. Along the last axis, two of every three are."""
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
        if kind == "far from zero" and not argument.weights:
            x = x + random.choice([1e3, 1e4] if argument.positive else [1e3, -1e4, 3e4])
        # If a probability is 0, autodiff of the definition of a divergence gives a wrong second derivative.
        if not x.size or not (self.differentiated_once or not argument.weights):
            return x.astype(self.dtype)
        if kind == "with ruled-out entries" and argument.weights:
            x = x * (random.random(shape) < 0.7)
        if kind == "with ruled-out entries" and infinite and not argument.weights and not argument.positive:
            x = np.where(random.random(shape) < 0.3, -np.inf, x)
            x = np.where(random.random((*shape[:-1], 1) if shape else ()) < 0.2, -np.inf, x)
        if kind == "with subnormal numbers" and self.dtype != "float64" and not argument.weights:
            x.flat[random.integers(x.size, size=2)] = float(limits.tiny) / random.choice([-4, 4, 64], 2)
        if kind in ("with special values", "under a mask"):
            # A norm is NaN if the sum of squares of its row overflows, which it does not in the float64 reference.
            most = float(limits.max) ** 0.5 / (8 if "norm" in self.entry.name else 1)
            # The reference of an op in float64 is also in float64. The op and its reference may then underflow in
            # different terms.
            least = float(limits.tiny) ** (0.5 if self.dtype == "float64" else 1)
            special = [0.0, -0.0, least, *[most, -most, np.nan, np.inf, -np.inf] * infinite]
            x.flat[random.integers(x.size, size=2)] = random.choice(special[:3] if argument.weights else special, 2)
        return x.astype(self.dtype)

    @property
    def differentiated_once(self) -> bool:
        """Whether the program takes only first derivatives of a forward.

        At infinities, second derivatives depend on how a formula is written, even in autodiff.
        """
        return "_backward" not in self.entry.name and self.transformation not in SECOND_ORDER

    @property
    def takes_infinities(self) -> bool:
        """Whether the special values of the first argument include NaN, infinities, and values whose square overflows.

        Convolutions get none of these, because they may be computed as products with zeros.
        """
        return self.differentiated_once and not self.entry.name.startswith(("conv1d", "conv2d"))

    def function(self, arguments: Arguments, implementation: str | None) -> Callable:
        """Return the transformed op as a function of its floating arguments that returns the list of its floating
        results."""
        function = bind(self.entry.function, implementation, self.case.options)
        if implementation == "autodiff" and self.entry.name in REFERENCES:
            function = functools.partial(REFERENCES[self.entry.name], **self.case.options)
        function = arguments.of_floats(function)
        return TRANSFORMATIONS[self.transformation](function)


def draw_program(seed: int, number: int, entries: Sequence[Entry], on_gpu: bool) -> Program:
    """Draw the program with this number. It depends only on the arguments."""
    random = np.random.default_rng([seed, number])
    entry = entries[random.integers(len(entries))]
    shares = {"pallas": 0.6, "xla": 0.15, None: 0.25} if on_gpu else {"pallas": 0.04, "xla": 0.6, None: 0.36}
    implementation = list(shares)[random.choice(3, p=list(shares.values()))]
    dtypes = [*entry.kernel_dtypes, "float64"] if implementation != "pallas" else entry.kernel_dtypes or KERNEL_DTYPES
    dtype = str(random.choice(dtypes))
    transformation = str(random.choice(list(TRANSFORMATIONS)))
    exact = bool(random.random() < 0.8) or dtype != "float32"
    case = _case(random, entry)
    has_labels = "cross_entropy" in entry.name and any(getattr(a, "below", None) for a in case.leaves)
    return Program(entry, case, dtype, implementation, transformation, exact, has_labels and random.random() < 0.5)


def takes(function: Callable, case: Case) -> bool:
    """Return whether the plain formula accepts the shapes and options of a case, and has floating results."""
    return bool(_results(function, case))


def _results(function, case):
    """Return the shapes of the floating results, or None if the op rejects the arguments."""
    structs = case.structs()
    try:
        return floats(jax.eval_shape(bind(function, "autodiff", case.options), *structs))
    except (ValueError, TypeError):
        return None


# --------------------------------------------------------------------------------------------------- shapes and options


def _case(random: np.random.Generator, entry: Entry) -> Case:
    """Return a case with random shapes and options, drawn again until the op accepts them. If all draws fail, return
    the small case of the catalogue."""
    forward = FORWARDS[entry.name.partition("_backward")[0]]
    for _ in range(MOST_DRAWS):
        case = _GEOMETRY.get(forward.name, _renamed)(random, forward)
        if (results := _results(forward.function, case)) and entry is not forward:
            case = _of_backward(random, entry, forward, case, results[0].shape)
        if results and _results(entry.function, case) is not None:
            return case
    return entry.small


FORWARDS = {entry.name: entry for entry in CATALOGUE if "_backward" not in entry.name}


def _size(random: np.random.Generator, zero: bool = True) -> int:
    if zero and random.random() < 0.02:
        return 0
    return int(random.choice([1, 2, 3, 4, 5, 7, 8, 9, 16, 33], p=[0.12, *[0.12] * 6, 0.08, 0.05, 0.03]))


def _renamed(random: np.random.Generator, entry: Entry) -> Case:
    """Return the small case of the catalogue with other shapes.

    Each distinct size is replaced by a random number. In some cases, one leading axis is added or removed.
    """
    small = entry.small
    sizes = {1: 1}
    layer = entry.name == "gate_layer"
    new = lambda size: sizes.setdefault(size, _size(random, zero=not layer))  # noqa: E731
    options = dict(small.options) | (dict(parametrization=str(random.choice(list(PARAMETERS)))) if layer else {})
    arguments = []
    for argument in small.arguments:
        if isinstance(argument, FixedArgument):
            try:
                argument = WiresArgument(new(argument.inputs), new(argument.gates))
                argument.draw(None, 0, "float32")
            except ValueError:
                argument = WiresArgument(5, 6)
                sizes |= {5: 5, 6: 6}
        elif argument.dtype != jnp.uint32:  # a key
            shape = tuple(
                PARAMETERS[options["parametrization"]] if layer and n == 16 else new(n) for n in argument.shape
            )
            below = None if argument.below is None else max(new(argument.below), 1)
            argument = dataclasses.replace(argument, shape=shape, below=below)
        arguments.append(argument)
    if layer:  # the shapes of the logits and of x must match the wires
        gates = arguments[1].gates
        arguments[0] = dataclasses.replace(arguments[0], shape=(gates, arguments[0].shape[1]))
        arguments[2] = dataclasses.replace(arguments[2], shape=(*arguments[2].shape[:-1], arguments[1].inputs))
    first = next((a.shape[0] for a in arguments if a.shape and a.shape != (2,)), None)
    change = random.choice(["none", "less", "more"], p=[0.6, 0.2, 0.2])
    if change != "none" and not layer:
        front = _size(random)
        for i, a in enumerate(arguments):
            if a.shape and a.shape[0] == first and a.dtype != jnp.uint32:
                shape = a.shape[1:] if change == "less" else (front, *a.shape)
                arguments[i] = dataclasses.replace(a, shape=shape)
    return Case(tuple(_without_bias(random, entry, arguments)), _options(random, entry, options, arguments))


def _cross_entropy(random: np.random.Generator, entry: Entry) -> Case:
    """Draw a case whose labels are either one class per example or one weight per example and class."""
    case = _renamed(random, entry)
    logits, weights = case.arguments
    classes = Argument(logits.shape[:-1], below=max(logits.shape[-1], 1)) if logits.shape else weights
    return dataclasses.replace(case, arguments=(logits, classes if random.random() < 0.5 else weights))


def _without_bias(random, entry, arguments):
    parameters = list(inspect.signature(entry.function).parameters.values())[: len(arguments)]
    optional = parameters[-1].name == "b" and parameters[-1].default is None
    return arguments[:-1] if optional and random.random() < 0.3 else arguments


def _axis(random, ndim, takes_several):
    if takes_several and random.random() < 0.2:
        return None
    if not takes_several or random.random() < 0.4:
        return int(random.integers(-ndim, ndim)) if ndim else -1
    axes = random.permutation(ndim)[: random.integers(0, ndim + 1)]
    return tuple(int(axis - ndim * random.integers(2)) for axis in axes)


def _options(random, entry, options, arguments):
    names = inspect.signature(entry.function).parameters
    ndim = len(arguments[0].shape)
    drawn = dict(options)
    choices = {
        "keepdims": [False, True],
        "ddof": [0, 1, 2],
        "negative_slope": [0.0, 0.01, 0.3, 1.0],
        "delta": [0.5, 1.0, 2.0],
        "eps": [1e-5, 1e-3, 1e-6],
        "epsilon": [1e-5, 1e-3, 1e-6],
        "approximate": [False, True],
        "min": [-1.0, -0.3, None],
        "max": [0.5, 1.0, None],
        "rate": [0.0, 0.3, 0.9],
        "interleaved": [False, True],
        "activation": ["silu", "gelu", "gelu_exact", "relu", "sigmoid"],
    }
    for name in [name for name in choices if name in names]:
        drawn[name] = choices[name][random.integers(len(choices[name]))]
    if entry.name == "elu":
        drawn["alpha"] = [0.3, 1.0, 2.0][random.integers(3)]
    if "axis" in names:
        drawn["axis"] = _axis(random, ndim, takes_several="keepdims" in names)
    if "axes" in names:
        drawn["axes"] = None if random.random() < 0.2 else tuple(map(int, random.permutation(ndim)))
    return drawn


def _pair(random, low, high):
    both = tuple(int(random.integers(low, high + 1)) for _ in range(2))
    return both if random.random() < 0.7 else both[0]


def _images(random):
    return int(random.integers(1, 4)), int(random.integers(1, 5)), *(int(random.integers(3, 11)) for _ in range(2))


def _convolution(random, entry):
    batch, channels, height, width = _images(random)
    groups, out, filters = 1, int(random.integers(1, 6)), tuple(map(int, random.integers(1, 5, 2)))
    options = dict(stride=_pair(random, 1, 3), padding=_pair(random, 0, 2))
    if entry.name == "conv2d":
        groups = int(random.choice([1, 1, 1, 2]))
        options |= dict(dilation=_pair(random, 1, 2) if random.random() < 0.3 else 1, groups=groups)
        if random.random() < 0.3:
            options["padding"] = _named_or_uneven(random, 2)
    else:
        options |= dict(window=_pair(random, 1, 3))
    arguments = [
        Argument((batch, channels * groups, height, width)),
        Argument((out * groups, channels, *filters)),
        Argument((out * groups,)),
    ]
    return Case(tuple(_without_bias(random, entry, arguments)), options)


def _sequences(random, entry):
    batch, channels, _, width = _images(random)
    groups, out, filters = int(random.choice([1, 1, channels])), int(random.integers(1, 4)), int(random.integers(1, 5))
    options = dict(stride=int(random.integers(1, 4)), groups=groups)
    options["padding"] = [1, "SAME", "CAUSAL", ((2, 1),)][random.integers(4)]
    options["dilation"] = int(random.integers(1, 3)) if random.random() < 0.3 else 1
    filters_of = Argument((out * groups, channels // groups, filters))
    arguments = [Argument((batch, channels, width)), filters_of, Argument((out * groups,))]
    return Case(tuple(_without_bias(random, entry, arguments)), options)


def _trees(random, entry):
    batch, channels, height, width = _images(random)
    wires = TreeWiresArgument(
        channels, int(random.integers(1, 6)), tuple(map(int, random.integers(1, 4, 2))), int(random.integers(1, 4))
    )
    parametrization = str(random.choice(list(PARAMETERS)))
    options = dict(stride=_pair(random, 1, 2), padding=_pair(random, 0, 2), parametrization=parametrization)
    if "or_pool2d" in entry.name:
        options["pool"] = _pair(random, 1, 3)
    logits = Argument((wires.kernels, 2**wires.depth - 1, PARAMETERS[parametrization]))
    return Case((logits, wires, Argument((batch, channels, height, width))), options)


def _automaton(random, entry):
    channels, perception = int(random.integers(2, 5)), (8, 4, 2)[: int(random.integers(1, 4))]
    kernels, update = int(random.integers(1, 4)), []
    inputs = channels * (1 + kernels * perception[-1])
    while (inputs := -(-inputs // 2)) > channels:
        update.append(inputs)
    wires = AutomatonArgument(channels, kernels, perception, (*update, channels), bool(random.integers(2)))
    options = dict(parametrization=str(random.choice(list(PARAMETERS))))
    if "rollout" in entry.name:
        memory = ("all", "states", "logarithmic", 2)[random.integers(4)]
        options |= dict(steps=int(random.integers(4)), memory=memory)
    state = wires.state(*map(int, random.integers(1, 5, 3)))
    return Case((wires.logits(PARAMETERS[options["parametrization"]]), wires, state), options)


def _named_or_uneven(random, high):
    """Draw the name of a padding, or a pair (before, after) of at most `high` for rows and for columns."""
    uneven = tuple(tuple(map(int, random.integers(0, high + 1, 2))) for _ in range(2))
    return uneven if random.random() < 0.5 else str(random.choice(["SAME", "SAME_LOWER", "VALID"]))


def _pool(random, entry):
    options = dict(window=_pair(random, 1, 4), padding=_pair(random, 0, 1), ceil_mode=bool(random.random() < 0.3))
    if random.random() < 0.3:
        options["padding"] = _named_or_uneven(random, 1)
    if random.random() < 0.3:
        options["dilation"] = _pair(random, 1, 2)
    if "count_include_pad" in inspect.signature(entry.function).parameters:
        options["count_include_pad"] = bool(random.random() < 0.7)
    if random.random() < 0.7:
        options["stride"] = _pair(random, 1, 3)
    apart = entry.small.arguments[0].apart
    return Case((Argument(_images(random), apart=apart),), options)


_GEOMETRY: Mapping[str, Callable[[np.random.Generator, Entry], Case]] = {
    **dict.fromkeys(("conv2d", "conv2d_relu_max_pool2d", "conv2d_relu_max_pool2d_with_indices"), _convolution),
    **dict.fromkeys(("logic_conv2d", "logic_conv2d_or_pool2d", "logic_conv2d_or_pool2d_with_indices"), _trees),
    **dict.fromkeys(("automaton_step", "automaton_rollout"), _automaton),
    "conv1d": _sequences,
    "softmax_cross_entropy": _cross_entropy,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices", "avg_pool2d"), _pool),
}


def _of_backward(random, entry: Entry, forward: Entry, case: Case, dy: tuple[int, ...]) -> Case:
    """Return a case for the public backward of a function, given a case of the function. Arguments with the same name
    are the same."""
    window = case.options.get("pool", case.options.get("window", 1))
    places = int(np.prod([window] * 2 if isinstance(window, int) else window))
    given: dict[str, Any] = dict(zip(_names(forward, case), case.arguments, strict=False))
    given |= dict(
        dict.fromkeys(("dy", "dnext", "dlast"), Argument(dy)),
        indices=Argument(dy, below=places, dtype=jnp.uint8),
        places=Argument(dy, below=places + ("relu" in entry.name), dtype=jnp.uint8),
    )
    sizes = {}
    for name, of in (("input_size", 0), ("filter_size", 1)):
        if name in inspect.signature(entry.function).parameters:
            sizes[name] = case.arguments[of].shape[-2:]
    layers = case.arguments[2:] if forward.name.startswith("mlp_") else ()
    parameters = inspect.signature(entry.function).parameters
    arguments = [given[name] for name in parameters if name in given]
    options = {name: value for name, value in (*case.options.items(), *sizes.items()) if name in parameters}
    return Case((*arguments, *layers), options)


def _names(entry, case):
    parameters = inspect.signature(entry.function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return list(itertools.islice(names, len(case.arguments)))


# ------------------------------------------------------------------------------------------------------------- smaller


def smaller(program: Program) -> list[Program]:
    """Return programs that are each simpler in one respect, and that the plain formula accepts."""
    found = []
    if program.transformation != "plain":
        found.append(dataclasses.replace(program, transformation="plain"))
    shapes = [a.shape for a in program.case.arguments if isinstance(a, Argument)]
    if any(isinstance(a, FixedArgument) for a in program.case.arguments):
        return found
    for size in sorted({size for shape in shapes for size in shape if size > 1}, reverse=True):
        for less in (1, size // 2):
            arguments = [
                a
                if isinstance(a, FixedArgument) or a.dtype == jnp.uint32
                else dataclasses.replace(a, shape=tuple(less if n == size else n for n in a.shape))
                for a in program.case.arguments
            ]
            case = dataclasses.replace(program.case, arguments=tuple(arguments))
            if takes(program.entry.function, case):
                found.append(dataclasses.replace(program, case=case))
    return found
