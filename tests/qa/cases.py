"""Draw random shapes and options for an op, with Hypothesis."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.catalogue import (
    CATALOGUE,
    Argument,
    AutomatonArgument,
    Case,
    Entry,
    FixedArgument,
    LearnedWiresArgument,
    TreeWiresArgument,
    WiresArgument,
)
from jaxbp.logic.gates import BASES, PARAMETERS
from jaxbp.verify.arguments import bind, floats

MOST_DRAWS = 30


class Draws:
    """Methods of NumPy's `Generator` that draw with Hypothesis. A failing case shrinks to small numbers, to the first
    choice of each list, and to the outcome in which a rare event does not occur."""

    def __init__(self, draw: Callable):
        self.draw = draw

    def random(self) -> float:
        return 1 - self.draw(st.integers(0, 99)) / 100

    def integers(self, low: int, high: int | None = None, size: int | None = None) -> Any:
        low, high = (0, low) if high is None else (low, high)
        numbers = st.integers(low, high - 1)
        return self.draw(numbers if size is None else st.lists(numbers, min_size=size, max_size=size))

    def choice(self, values: Sequence) -> Any:
        return self.draw(st.sampled_from(values))

    def permutation(self, n: int) -> list[int]:
        return self.draw(st.permutations(range(n)))


def draw_case(random: Draws, entry: Entry) -> Case:
    """Return random shapes and options that autodiff accepts. If none are found, return the catalogue's example."""
    forward = FORWARDS[entry.name.partition("_backward")[0]]
    for _ in range(MOST_DRAWS):
        case = _GEOMETRY.get(forward.name, _renamed)(random, forward)
        if (results := _results(forward.function, case)) and entry is not forward:
            case = _of_backward(random, entry, forward, case, results[0].shape)
        if results and _results(entry.function, case) is not None:
            return case
    return entry.small


def takes(function: Callable, case: Case) -> bool:
    return bool(_results(function, case))


def _results(function, case):
    structs = case.structs()
    try:
        return floats(jax.eval_shape(bind(function, "autodiff", case.options), *structs))
    except (ValueError, TypeError):
        return None


FORWARDS = {entry.name: entry for entry in CATALOGUE if "_backward" not in entry.name}


def _size(random: Draws, zero: bool = True) -> int:
    if zero and random.random() < 0.02:
        return 0
    return random.choice([1, 2, 3, 4, 5, 7, 8, 9, 16, 33])


def _renamed(random: Draws, entry: Entry) -> Case:
    """Return the catalogue's example with random axis lengths, and sometimes one leading axis more or less."""
    small = entry.small
    sizes = {1: 1}
    layer = entry.name == "gate_layer"
    new = lambda size: sizes.setdefault(size, _size(random, zero=not layer))  # noqa: E731
    options = dict(small.options) | (dict(parametrization=random.choice(list(PARAMETERS))) if layer else {})
    arguments = []
    for argument in small.arguments:
        if isinstance(argument, FixedArgument):
            try:
                argument = WiresArgument(new(argument.inputs), new(argument.gates))
                argument.draw(None, 0, "float32")
            except ValueError:
                argument = WiresArgument(5, 6)
                sizes |= {5: 5, 6: 6}
        elif argument.dtype != jnp.uint32:  # a random key is uint32, and keeps its shape
            shape = tuple(
                PARAMETERS[options["parametrization"]] if layer and n == 16 else new(n) for n in argument.shape
            )
            below = None if argument.below is None else max(new(argument.below), 1)
            argument = dataclasses.replace(argument, shape=shape, below=below)
        arguments.append(argument)
    if layer:
        gates = arguments[1].gates
        arguments[0] = dataclasses.replace(arguments[0], shape=(gates, arguments[0].shape[1]))
        arguments[2] = dataclasses.replace(arguments[2], shape=(*arguments[2].shape[:-1], arguments[1].inputs))
    first = next((a.shape[0] for a in arguments if a.shape and a.shape != (2,)), None)
    change = random.choice(["none", "none", "none", "less", "more"])
    if change != "none" and not layer:
        front = _size(random)
        for i, a in enumerate(arguments):
            if a.shape and a.shape[0] == first and a.dtype != jnp.uint32:
                shape = a.shape[1:] if change == "less" else (front, *a.shape)
                arguments[i] = dataclasses.replace(a, shape=shape)
    return Case(tuple(_without_bias(random, entry, arguments)), _options(random, entry, options, arguments))


def _cross_entropy(random: Draws, entry: Entry) -> Case:
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
        return random.integers(-ndim, ndim) if ndim else -1
    axes = random.permutation(ndim)[: random.integers(0, ndim + 1)]
    return tuple(axis - ndim * random.integers(2) for axis in axes)


def _options(random, entry, options, arguments):
    names = inspect.signature(entry.function).parameters
    ndim = len(arguments[0].shape)
    drawn = dict(options)
    choices = {
        "keepdims": [False, True],
        "ddof": [0, 1, 2],
        "negative_slope": [0.0, 0.01, 0.3, 1.0],
        "delta": [0.5, 1.0, 2.0],
        "epsilon": [1e-5, 1e-3, 1e-6],
        "approximate": [False, True],
        "min": [-1.0, -0.3, None],
        "max": [0.5, 1.0, None],
        "rate": [0.0, 0.3, 0.9],
        "interleaved": [False, True],
        "activation": ["silu", "gelu", "gelu_exact", "relu", "sigmoid"],
        "reduction": ["mean", "sum", None],
    }
    for name in [name for name in choices if name in names]:
        drawn[name] = choices[name][random.integers(len(choices[name]))]
    if entry.name == "elu":
        drawn["alpha"] = [0.3, 1.0, 2.0][random.integers(3)]
    if "axis" in names:
        drawn["axis"] = _axis(random, ndim, takes_several="keepdims" in names)
    if "axes" in names:
        drawn["axes"] = None if random.random() < 0.2 else tuple(random.permutation(ndim))
    return drawn


def _pair(random, low, high):
    both = tuple(random.integers(low, high + 1) for _ in range(2))
    return both if random.random() < 0.7 else both[0]


def _images(random):
    return random.integers(1, 4), random.integers(1, 5), *(random.integers(3, 11) for _ in range(2))


def _convolution(random, entry):
    batch, channels, height, width = _images(random)
    groups, out, filters = 1, random.integers(1, 6), tuple(random.integers(1, 5, 2))
    options = dict(stride=_pair(random, 1, 3), padding=_pair(random, 0, 2))
    if entry.name == "conv2d":
        groups = random.choice([1, 1, 1, 2])
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
    groups, out, filters = random.choice([1, 1, channels]), random.integers(1, 4), random.integers(1, 5)
    options = dict(padding=[1, "SAME", "CAUSAL", ((2, 1),)][random.integers(4)])
    if random.random() < 0.5:  # a depthwise convolution, which has a GPU kernel
        groups, out = channels, 1
    else:
        options["stride"] = random.integers(1, 4)
        options["dilation"] = random.integers(1, 3) if random.random() < 0.3 else 1
    x, w = (batch, channels, width), (out * groups, channels // groups, filters)
    if random.random() < 0.5:
        x, w, options["dimension_numbers"] = (batch, width, channels), w[::-1], ("NWC", "WIO", "NWC")
    arguments = map(Argument, (x, w, (out * groups,)))
    return Case(tuple(_without_bias(random, entry, [*arguments])), options | dict(groups=groups))


def _trees(random, entry):
    batch, channels, height, width = _images(random)
    wires = TreeWiresArgument(channels, random.integers(1, 6), tuple(random.integers(1, 4, 2)), random.integers(1, 4))
    parametrization = random.choice(list(PARAMETERS))
    options = dict(stride=_pair(random, 1, 2), padding=_pair(random, 0, 2), parametrization=parametrization)
    if "or_pool2d" in entry.name:
        options["pool"] = _pair(random, 1, 3)
    logits = Argument((wires.kernels, 2**wires.depth - 1, PARAMETERS[parametrization]))
    return Case((logits, wires, Argument((batch, channels, height, width))), options)


def _wires(random, entry):
    choices, per_group = random.integers(1, 5), random.integers(2, 4)
    gates, inputs = per_group * random.integers(1, 4), random.integers(choices, 9)
    wires = LearnedWiresArgument(inputs, gates, choices, per_group)
    batch = tuple(_size(random) for _ in range(random.integers(3)))
    return Case((Argument((2 * gates, choices)), wires, Argument((*batch, inputs))))


def _tables(random, entry):
    gates, inputs = random.integers(1, 9), random.integers(1, 9)
    batch = tuple(_size(random) for _ in range(random.integers(3)))
    arguments = Argument((gates, 16)), WiresArgument(inputs, 2 * gates), Argument((*batch, inputs))
    return Case(arguments, dict(parametrization=random.choice(list(BASES))))


def _automaton(random, entry):
    channels, perception = random.integers(2, 5), (8, 4, 2)[: random.integers(1, 4)]
    kernels, update = random.integers(1, 4), []
    inputs = channels * (1 + kernels * perception[-1])
    while (inputs := -(-inputs // 2)) > channels:
        update.append(inputs)
    wires = AutomatonArgument(channels, kernels, perception, (*update, channels), random.random() < 0.5)
    options = dict(parametrization=random.choice(list(PARAMETERS)))
    if "rollout" in entry.name:
        memory = ("all", "states", "logarithmic", 2)[random.integers(4)]
        options |= dict(steps=random.integers(4), memory=memory)
    state = wires.state(*random.integers(1, 5, 3))
    return Case((wires.logits(PARAMETERS[options["parametrization"]]), wires, state), options)


def _attention(random, entry):
    batch, queries, keys, key_heads = (random.choice([1, 1, 2, 3, n]) for n in (4, 33, 40, 4))
    heads, features = key_heads * random.choice([1, 1, 2, 3]), random.choice([1, 2, 5, 8])
    if random.random() < 0.5:
        keys = queries
    values = np.random.default_rng(random.integers(100))
    key = Argument((batch, keys, key_heads, features))
    value = dataclasses.replace(key, shape=(*key.shape[:3], random.choice([features, features, 3])))
    scores = batch, heads, queries, keys
    broadcast = lambda: tuple(random.choice([size, size, 1]) for size in scores)[random.integers(0, 4) :]  # noqa: E731
    options = {
        "mask": lambda: values.random(broadcast()) < random.choice([0.7, 0.2, 0.0]),
        "is_causal": lambda: True,
        "query_seq_lengths": lambda: values.integers(0, queries + 1, batch),
        "key_value_seq_lengths": lambda: values.integers(0, keys + 1, batch),
        "local_window_size": lambda: _pair(random, 0, 4),
        "query_segment_ids": lambda: values.integers(0, 3, (batch, queries)),
        "softcap": lambda: random.choice([0.5, 10.0]),
        "scale": lambda: random.choice([0.3, 2.0, -1.0]),
        "return_residual": lambda: True,
    }
    options = {name: value() for name, value in options.items() if random.random() < 0.3}
    if "query_segment_ids" in options:
        options["key_value_segment_ids"] = values.integers(0, 3, (batch, keys))
    bias = [Argument(broadcast())] if random.random() < 0.3 else []
    return Case((Argument((batch, queries, heads, features)), key, value, *bias), options)


def _named_or_uneven(random, high):
    uneven = tuple(tuple(random.integers(0, high + 1, 2)) for _ in range(2))
    return uneven if random.random() < 0.5 else random.choice(["SAME", "SAME_LOWER", "VALID"])


def _pool(random, entry):
    options = dict(window=_pair(random, 1, 4), padding=_pair(random, 0, 1), ceil_mode=(random.random() < 0.3))
    if random.random() < 0.3:
        options["padding"] = _named_or_uneven(random, 1)
    if random.random() < 0.3:
        options["dilation"] = _pair(random, 1, 2)
    if "count_include_pad" in inspect.signature(entry.function).parameters:
        options["count_include_pad"] = random.random() < 0.7
    if random.random() < 0.7:
        options["stride"] = _pair(random, 1, 3)
    apart = entry.small.arguments[0].apart
    return Case((Argument(_images(random), apart=apart),), options)


_GEOMETRY: Mapping[str, Callable[[Draws, Entry], Case]] = {
    **dict.fromkeys(("conv2d", "conv2d_relu_max_pool2d", "conv2d_relu_max_pool2d_with_indices"), _convolution),
    **dict.fromkeys(("logic_conv2d", "logic_conv2d_or_pool2d", "logic_conv2d_or_pool2d_with_indices"), _trees),
    **dict.fromkeys(("automaton_step", "automaton_rollout"), _automaton),
    "conv1d": _sequences,
    "lut_layer": _tables,
    "wire_layer": _wires,
    "dot_product_attention": _attention,
    "softmax_cross_entropy": _cross_entropy,
    **dict.fromkeys(("max_pool2d", "max_pool2d_with_indices", "avg_pool2d"), _pool),
}


def _of_backward(random, entry: Entry, forward: Entry, case: Case, dy: tuple[int, ...]) -> Case:
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
