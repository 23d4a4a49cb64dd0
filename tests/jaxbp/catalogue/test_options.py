"""Options of the ops. Each one occurs in a case of the catalogue, in a call of this file, or in a named test."""

import ast
import contextlib
import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ENTRIES, assert_close, drawn, floats, is_float, normal, of_floats, put, with_floats

import jaxbp
from jaxbp.catalogue import CATALOGUE


def spatial(shape, channels_last):
    return shape[1:-1] if channels_last else shape[2:]


def conv2d_backwards(dy, x, w, b, **options):
    numbers = options.get("dimension_numbers") or ("NCHW", "OIHW", "NCHW")
    filter_size = w.shape[:2] if numbers[1] == "HWIO" else w.shape[2:]
    return (
        jaxbp.conv2d_backward_input(dy, w, spatial(x.shape, numbers[0] == "NHWC"), **options),
        jaxbp.conv2d_backward_weights(dy, x, filter_size, **options),
        jaxbp.conv2d_backward_bias(dy, dimension_numbers=numbers, implementation=options["implementation"]),
    )


def pool_backward(name):
    def backward(dy, x, **options):
        size = spatial(x.shape, options.get("channel_axis") == -1)
        if name == "max_pool2d":
            _, indices = jaxbp.max_pool2d_with_indices(x, **options)
            return jaxbp.max_pool2d_backward(dy, indices, size, **options)
        return getattr(jaxbp, f"{name}_backward")(dy, size, **options)

    return backward


def with_indices(name):
    def backward(dy, *arrays, **options):
        y, indices = getattr(jaxbp, f"{name}_with_indices")(*arrays, **options)
        arrays = arrays[:2] if name.startswith("conv2d") else arrays
        return getattr(jaxbp, f"{name}_backward")(dy.astype(y.dtype), indices, *arrays, **options)

    return backward


BACKWARDS = {
    "conv2d": conv2d_backwards,
    **{name: pool_backward(name) for name in ("max_pool2d", "avg_pool2d", "global_avg_pool2d")},
    **{name: with_indices(name) for name in ("conv2d_relu_max_pool2d", "logic_conv2d_or_pool2d")},
    "logic_or_pool2d": None,
}
"""Calls of the public backwards, or None, for ops whose backward takes other arguments than the op."""

FAMILY = {
    "conv2d": ("conv2d_backward_input", "conv2d_backward_weights", "conv2d_backward_bias"),
    **{f: (f"{f}_with_indices",) for f in ("max_pool2d", "conv2d_relu_max_pool2d", "logic_conv2d_or_pool2d")},
    "mlp_softmax_cross_entropy": ("mlp_softmax_cross_entropy_with_classes",),
}
"""Public functions besides `NAME_backward` that take the options of an op."""

IMAGE, LAST = normal((1, 2, 5, 6), (1, 5, 6, 2), seed=9)
ROWS, MASK = np.array([[True, False, True], [False, True, True]]), np.arange(24).reshape(2, 3, 4) % 5 != 0
WINDOW = dict(window=(2, 3))
LAYOUT = ("NHWC", "HWIO", "NHWC")
PRECISE = dict(precision="highest")
HALF = put(np.full(3, 0.5, np.float32))
LENGTHS, SEGMENTS = np.array([3, 2], np.int32), np.array([[0, 0, 1, 1], [2, 0, 2, 0]], np.int32)


def small(name):
    """Return the arrays of the catalogue's small case."""
    return drawn(name)[0]


def epsilon(name, value):
    (parameter,) = {"epsilon", "eps"} & inspect.signature(getattr(jaxbp, name)).parameters.keys()
    return {parameter: value}


def pools(name, **of):
    options = dict(dilation=(1, 2), ceil_mode=True, channel_axis=-1) | of
    for option, value in options.items():
        stride = dict(stride=(2, 2)) if option == "ceil_mode" else {}
        yield name, (LAST if option == "channel_axis" else IMAGE,), {option: value}, WINDOW | stride


def reductions(name, **of):
    for option, value in (dict(keepdims=True, where=MASK) | of).items():
        initial = dict(initial=0.0) if option == "where" and name in ("max", "min") else {}
        yield name, normal((2, 3, 4), seed=3), {option: value}, dict(axis=1) | initial


CALLS = [
    # (op, arrays, options that are tested, other options)
    ("conv2d", normal((1, 2, 6, 5), (2, 2, 2, 3), (2,)), dict(dilation=(2, 1)), {}),
    ("conv2d", normal((1, 4, 5, 4), (2, 2, 2, 2), (2,)), dict(groups=2), {}),
    ("conv2d", normal((1, 5, 6, 2), (3, 2, 2, 3), (3,)), dict(dimension_numbers=LAYOUT), {}),
    ("conv2d", normal((1, 2, 5, 4), (2, 2, 2, 2), (2,)), PRECISE, {}),
    *(
        ("conv1d", normal((2, 3, 8), (2, 3, 2), (2,)), {option: value}, {})
        for option, value in dict(stride=2, dilation=2, precision="highest").items()
    ),
    *pools("max_pool2d"),
    *pools("avg_pool2d"),
    ("avg_pool2d", (IMAGE,), dict(count_include_pad=False), WINDOW | dict(padding=1)),
    ("global_avg_pool2d", (LAST,), dict(channel_axis=-1), {}),
    ("conv2d_relu_max_pool2d", normal((1, 2, 6, 7), (2, 2, 2, 2), (2,)), dict(stride=2), WINDOW),
    ("conv2d_relu_max_pool2d", normal((1, 2, 6, 7), (2, 2, 2, 2), (2,)), PRECISE, WINDOW),
    *((name, small(name), PRECISE, {}) for name in ("linear", "grouped_linear", "matmul", "dot", "layer_norm_linear")),
    *((name, small(name), epsilon(name, 0.5), {}) for name in ("layer_norm", "rms_norm", "layer_norm_linear")),
    ("layer_norm", normal((2, 3, 4), (3, 4), (3, 4)), dict(axis=(1, 2)), {}),
    ("rms_norm", normal((2, 3, 4), (3, 4)), dict(axis=(1, 2)), {}),
    *(
        ("softmax_cross_entropy", small("softmax_cross_entropy"), {option: value}, {})
        for option, value in dict(axis=1, where=ROWS, label_smoothing=0.2, z_loss=0.3).items()
    ),
    *(
        ("linear_softmax_cross_entropy", small("linear_softmax_cross_entropy"), tested, {})
        for tested in (dict(where=ROWS), dict(softcap=2.0), PRECISE)
    ),
    ("mlp_softmax_cross_entropy", small("mlp_softmax_cross_entropy"), PRECISE, {}),
    *(
        (name, (IMAGE,), tested, {})
        for name in ("softmax", "log_softmax")
        for tested in (dict(axis=1), dict(where=IMAGE > -1))
    ),
    *(call for name in ("sum", "mean", "var", "logsumexp") for call in reductions(name)),
    *(call for name in ("max", "min") for call in reductions(name, initial=0.25)),
    ("sigmoid_binary_cross_entropy", small("sigmoid_binary_cross_entropy"), dict(pos_weight=put(np.float32(3))), {}),
    *(
        ("batch_norm", (*small("batch_norm"), (HALF, put(np.full(3, 2, np.float32)))), {option: value}, {})
        for option, value in dict(use_running_average=True, momentum=0.5, epsilon=0.5, use_fast_variance=True).items()
    ),
    ("batch_norm", small("batch_norm"), dict(running=(HALF, HALF)), {}),
    ("batch_norm", normal((4, 2, 3), (3,), (3,)), dict(channel_axis=-1), {}),
    ("group_norm", small("group_norm"), dict(epsilon=0.5), dict(num_groups=2)),
    ("group_norm", normal((2, 3, 4), (4,), (4,)), dict(channel_axis=-1), dict(num_groups=2)),
    ("dropout", small("dropout"), dict(broadcast_dims=(1,)), dict(rate=0.5)),
    ("gate_layer", (normal((6, 4))[0], *small("gate_layer")[1:]), dict(parametrization="walsh"), {}),
    ("gate_layer", small("gate_layer"), dict(groups=3), {}),
    ("lut_layer", small("lut_layer"), dict(parametrization="walsh"), {}),
    ("logic_conv2d", (normal((2, 3, 4))[0], *small("logic_conv2d")[1:]), dict(parametrization="walsh"), {}),
    *(
        ("logic_conv2d_or_pool2d", (normal(logits)[0], *small("logic_conv2d_or_pool2d")[1:]), tested, dict(pool=(2, 1)))
        for logits, tested in (((2, 3, 4), dict(parametrization="walsh")), ((2, 3, 16), dict(stride=(1, 2))))
    ),
    *(
        ("logic_or_pool2d", (LAST if "channel_axis" in tested else IMAGE,), tested, {})
        for tested in (dict(pool=(1, 3)), dict(stride=1), dict(padding=1), dict(dilation=2), dict(ceil_mode=True))
    ),
    ("logic_or_pool2d", (LAST,), dict(channel_axis=-1), {}),
    *(
        ("rotary_embedding", small("rotary_embedding"), {option: value}, {})
        for option, value in dict(base=100.0, frequencies=(1.0, 0.1), interleaved=True).items()
    ),
    *(
        ("dot_product_attention", normal((2, 4, 2, 3), (2, 4, 1, 3), (2, 4, 1, 3)), tested, {})
        for tested in (
            dict(mask=np.tri(4, dtype=bool)),
            dict(scale=0.3),
            dict(query_seq_lengths=LENGTHS),
            dict(key_value_seq_lengths=LENGTHS),
            dict(segment_ids=SEGMENTS),
            dict(query_segment_ids=SEGMENTS, key_value_segment_ids=SEGMENTS[::-1]),
            dict(return_residual=True),
        )
    ),
]

NAMED = {
    # test -> (ops, options)
    "jaxbp/ops/dense/test_grouped_linear.py::test_the_result_may_have_another_dtype": (
        *(["grouped_linear"], ["preferred_element_type"]),
    ),
    "jaxbp/logic/wires/test_learned_wires.py::test_a_layer_on_learned_wires_equals_a_layer_on_its_hardened_wires": (
        *(["gate_layer"], ["wire_logits"]),
    ),
    "jaxbp/ops/test_twins.py::test_batch_norm_over_devices_has_the_statistics_of_all_examples": (
        *(["batch_norm"], ["axis_name"]),
    ),
    "jaxbp/logic/ops/test_automaton_rollout.py::test_a_step_is_a_rollout_of_one": (
        ["automaton_step", "automaton_step_backward", "automaton_rollout", "automaton_rollout_backward"],
        ["key", "fire_rate", "parametrization"],
    ),
    "jaxbp/logic/ops/test_automaton_rollout.py::test_gradients_are_those_of_the_published_formulation_in_float64": (
        *(["automaton_rollout", "automaton_rollout_backward"], ["memory"]),
    ),
    "jaxbp/logic/ops/test_automaton_rollout.py::test_values_are_rounded_before_each_tick_straight_through": (
        *(["automaton_rollout", "automaton_rollout_backward"], ["rounding_rate"]),
    ),
}
"""Tests of options that need more than a call."""


def options_of(entry):
    """Return the parameters of an op that are no arrays of its small case."""
    parameters = inspect.signature(entry.function).parameters.values()
    parameters = [p for p in parameters if p.kind is not p.VAR_POSITIONAL and p.name != "implementation"]
    return {p.name: p.default for p in parameters[len(entry.small.arguments) :]}


def in_the_catalogue(entry):
    defaults = options_of(entry)
    given = [item for case in (entry.small, *entry.real.values()) for item in case.options.items()]
    return {name for name, value in given if name in defaults and not _same(defaults[name], value)}


def _same(default, value):
    return default is value or (type(default) is type(value) and default == value)


def options_elsewhere():
    for op, _, options, _ in CALLS:
        for name in (op, f"{op}_backward", *FAMILY.get(op, ())):
            yield from ((name, option) for option in options)
    for ops, options in NAMED.values():
        yield from ((name, option) for name in ops for option in options)


@pytest.mark.parametrize("name", [entry.name for entry in CATALOGUE])
def test_every_option_of_every_op_is_tested(name):
    entry = ENTRIES[name]
    tested = in_the_catalogue(entry) | {option for op, option in options_elsewhere() if op == name}
    assert options_of(entry).keys() - tested == set(), "add a case, or a call to CALLS"


@pytest.mark.parametrize("test", NAMED)
def test_the_named_tests_pass_the_options_that_they_are_named_for(test):
    path, _, function = test.partition("::")
    source = (Path(__file__).parents[2] / path).read_text()
    (found,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == function]
    in_file, in_test = (set(re.findall(r"[\w.]+", text)) for text in (source, ast.unparse(found)))
    ops, options = NAMED[test]
    assert {f"jaxbp.{op}" for op in ops} <= in_file and {*options} <= in_test


def _public_backward(op, dy, arrays, options):
    if op in BACKWARDS:
        found = BACKWARDS[op](dy, *arrays, **options) if BACKWARDS[op] else ()
    else:
        backward = getattr(jaxbp, f"{op}_backward")
        parameters = inspect.signature(backward).parameters
        named = inspect.signature(getattr(jaxbp, op)).bind_partial(*arrays).arguments
        taken = [a for name in parameters if name in named for a in _unpacked(parameters[name], named[name])]
        found = backward(dy, *taken, **{name: value for name, value in options.items() if name in parameters})
    return jax.tree.leaves(found)


def _unpacked(parameter, value):
    return value if parameter.kind is parameter.VAR_POSITIONAL else [value]


def _results(op, implementation, options, arrays):
    """Return the op's results and their gradients, and under "xla" the gradients by its public backward."""
    options = options | dict(implementation=implementation)
    function = of_floats(functools.partial(getattr(jaxbp, op), **options), arrays)
    y, vjp = jax.vjp(function, *floats(arrays))
    dy = jnp.cos(jnp.arange(y[0].size, dtype=y[0].dtype)).reshape(y[0].shape)
    public = _public_backward(op, dy, arrays, options) if implementation == "xla" else ()
    return y, vjp([dy, *map(jnp.zeros_like, y[1:])]), public


def _call_name(call):
    op, _, options, _ = call
    return f"{op}, {', '.join(options)}"


@functools.cache
def _all_results(implementation):
    """One program computes all calls."""
    run = jax.jit(
        lambda given: [
            _results(op, implementation, tested | other, with_floats(tuple(arrays), values))
            for (op, arrays, tested, other), values in zip(CALLS, given, strict=True)
        ]
    )
    return run([floats(arrays) for _, arrays, _, _ in CALLS])


@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda at: _call_name(CALLS[at]))
def test_gradients_with_an_option_are_those_of_autodiff_also_by_the_public_backward(at):
    (y, gradients, public), (y_autodiff, expected, _) = _all_results("xla")[at], _all_results("autodiff")[at]
    op, _, options, _ = CALLS[at]
    # The logarithms of excluded probabilities are infinite.
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.isinf(a), np.isinf(b)), y, y_autodiff)
    finite = functools.partial(jax.tree.map, lambda a: np.where(np.isinf(a), 0, a))
    assert_close((finite(y), gradients), (finite(y_autodiff), expected), 1e-4)
    # With running averages, the op is affine in x, and so is its backward.
    if "use_running_average" not in options:
        assert public or op == "logic_or_pool2d"
        assert_close(public, expected[: len(public)], 1e-4)


def _programs(op, arrays, options):
    """Yield the program, first without its constants, and then with them."""
    function = of_floats(functools.partial(getattr(jaxbp, op), **options, implementation="xla"), arrays)
    with jax.default_matmul_precision("default"):
        traced = jax.jit(function).trace(*floats(arrays))
        yield str(traced.jaxpr)
        yield traced.lower().as_text()


@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda at: _call_name(CALLS[at]))
def test_an_option_changes_the_program(at):
    op, arrays, tested, other = CALLS[at]
    try:
        without = _programs(op, arrays, other)
        with_option = _programs(op, arrays, tested | other)
        assert any(a != b for a, b in zip(without, with_option, strict=True))
    except (ValueError, TypeError):
        pass  # the arrays fit only with the option


@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda at: _call_name(CALLS[at]))
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_an_option_promotes_no_dtype(at, implementation):
    op, arrays, tested, other = CALLS[at]
    if any(isinstance(value, jax.Array) and is_float(value) for value in jax.tree.leaves(tested)):
        return  # the option is an array of float32
    if op == "batch_norm" and len(arrays) > 3:
        return  # its running averages have the promoted dtype
    half = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in floats(arrays)]

    def results(values):
        return _results(op, implementation, tested | other, with_floats(tuple(arrays), values))

    with jax.numpy_dtype_promotion("strict"), contextlib.suppress(NotImplementedError):
        jax.eval_shape(results, half)
