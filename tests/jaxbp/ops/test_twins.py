"""Comparisons with other libraries. One program per family saves time."""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    assert_close,
    assert_second_derivatives_match_differences,
    cuda_program,
    draw_cotangents,
    every_implementation,
    floats,
    is_float,
    normal,
    of_floats,
    on_the_cpu,
    ours,
    put,
    results_of,
    value_and_gradients,
    with_floats,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp

EXAMPLES = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of an op, and the same call of another library.

    Attributes:
      arrays: the arguments, whose first axis is the batch.
      masked: the indices of the arrays from which the last array, a mask, selects elements.
      unsupported: why the kernel refuses the call, or None.
    """

    ours: Callable
    twin: Callable
    arrays: tuple
    masked: tuple[int, ...] = ()
    unsupported: str | None = None


def drawn_mask(*shape):
    """Return a mask that selects at least one element along every axis."""
    mask = np.random.default_rng(7).random(shape) < 0.7
    mask[..., 0] = True
    return mask


X, Y = normal((EXAMPLES, 3, 4), (EXAMPLES, 3, 4), seed=3)
# A finite difference swaps no two numbers, and none is at a kink.
X = put((np.argsort(np.ravel(X)).reshape(X.shape).astype(np.float32) - 47.5) / 24)
WEIGHTS, CLASSES = jax.nn.softmax(Y), put(np.argmax(Y, axis=-1).astype(np.int32))
ROWS, MASK = (
    put(drawn_mask(3, EXAMPLES).T),
    put(drawn_mask(EXAMPLES, 3, 4) | (np.max(Y, -1, keepdims=True) == np.asarray(Y))),
)
POSITIVE = put(np.abs(X) + 0.5)


def cross_entropy(*arrays, implementation, **options):
    return jaxbp.softmax_cross_entropy(*arrays, **options, implementation=implementation)


integer_labels, float_labels = optax.softmax_cross_entropy_with_integer_labels, optax.softmax_cross_entropy
PER_CLASS = "where with one boolean per class, only with one per example"


def smoothed(logits, labels, where=None):
    return float_labels(logits, optax.smooth_labels(labels, 0.1, where=where), where=where)


LOSSES_AND_ACTIVATIONS = {
    "classes": Case(cross_entropy, integer_labels, (X, CLASSES)),
    "classes, where": Case(
        lambda x, y, where, **i: cross_entropy(x, y, where=where, **i),
        lambda x, y, where: integer_labels(x, y, where=where),
        (X, CLASSES, ROWS),
        masked=(0, 1),
    ),
    "classes, where of logits": Case(
        lambda x, y, where, **i: cross_entropy(x, y, where=where, **i),
        lambda x, y, where: integer_labels(x, y, where=where),
        (X, CLASSES, MASK),
        masked=(0,),
        unsupported=PER_CLASS,
    ),
    "classes, axis": Case(
        lambda x, y, **i: cross_entropy(x, y, axis=1, **i), lambda x, y: integer_labels(x, y, axis=1), (X, Y.argmax(1))
    ),
    "classes, axes": Case(
        lambda x, y, **i: cross_entropy(x, y, axis=(-1, 1), **i),
        lambda x, y: integer_labels(x, y, axis=(-1, 1)),
        (X, Y.reshape(EXAMPLES, -1).argmax(1)),
    ),
    "classes, label_smoothing": Case(
        lambda x, y, **i: cross_entropy(x, y, label_smoothing=0.1, **i),
        lambda x, y: smoothed(x, jax.nn.one_hot(y, 4)),
        (X, CLASSES),
        unsupported="label_smoothing",
    ),
    "weights, where": Case(
        lambda x, y, where, **i: cross_entropy(x, y, where=where, **i),
        lambda x, y, where: float_labels(x, y, where=where),
        (X, WEIGHTS, ROWS),
        masked=(0, 1),
    ),
    "weights, where of logits": Case(
        lambda x, y, where, **i: cross_entropy(x, y, where=where, **i),
        lambda x, y, where: float_labels(x, y, where=where),
        (X, WEIGHTS, MASK),
        masked=(0, 1),
        unsupported=PER_CLASS,
    ),
    "weights, axes": Case(
        lambda x, y, **i: cross_entropy(x, y, axis=(1, 2), **i),
        lambda x, y: float_labels(x, y, axis=(1, 2)),
        (X, WEIGHTS),
    ),
    "weights, label_smoothing, where": Case(
        lambda x, y, where, **i: cross_entropy(x, y, label_smoothing=0.1, where=where, **i),
        smoothed,
        (X, WEIGHTS, MASK),
        masked=(0, 1),
        unsupported="label_smoothing",
    ),
    "classes, z_loss": Case(
        lambda x, y, **i: cross_entropy(x, y, z_loss=0.1, **i),
        lambda x, y: integer_labels(x, y) + 0.1 * jax.nn.logsumexp(x, axis=-1) ** 2,
        (X, CLASSES),
        unsupported="z_loss",
    ),
    "weights, z_loss, label_smoothing": Case(
        lambda x, y, **i: cross_entropy(x, y, z_loss=0.1, label_smoothing=0.1, **i),
        lambda x, y: smoothed(x, y) + 0.1 * jax.nn.logsumexp(x, axis=-1) ** 2,
        (X, WEIGHTS),
        unsupported="label_smoothing",
    ),
    "sigmoid_binary_cross_entropy": Case(
        jaxbp.sigmoid_binary_cross_entropy, optax.sigmoid_binary_cross_entropy, (X, (Y > 0).astype(jnp.int32))
    ),
    "sigmoid_binary_cross_entropy, pos_weight": Case(
        lambda x, y, w, **i: jaxbp.sigmoid_binary_cross_entropy(x, y, pos_weight=w, **i),
        lambda x, y, w: -w * y * jax.nn.log_sigmoid(x) - (1 - y) * jax.nn.log_sigmoid(-x),
        (X, WEIGHTS, POSITIVE[0, 0]),
    ),
    "leaky_relu": Case(jaxbp.leaky_relu, jax.nn.leaky_relu, (X, jnp.float32(0.3))),
    "elu": Case(jaxbp.elu, jax.nn.elu, (X, jnp.float32(0.3))),
    "huber": Case(jaxbp.huber, lambda x, y, delta: optax.huber_loss(x, y, delta=delta), (X, Y, jnp.float32(0.7))),
}

IMAGES, CHANNELS_1, CHANNELS_2 = normal((EXAMPLES, 3, 6), (6,), (6,), seed=4)
KEY = jax.random.key_data(jax.random.key(1))
ROW_1, ROW_2 = normal((3, 4), (3, 4), seed=5)


def flax_layer(layer, x, scale, bias, **statistics):
    layer.scale[...] = scale
    if bias is not None:
        layer.bias[...] = bias
    for name, value in statistics.items():
        getattr(layer, name)[...] = value
    return layer(x), *((layer.mean[...], layer.var[...]) if statistics else ())


def flax_norm(layer, *options, **keywords):
    def twin(x, scale, bias=None, **statistics):
        made = layer(*options, **keywords, epsilon=1e-5, rngs=nnx.Rngs(0))
        results = flax_layer(made, x, scale, bias, **statistics)
        return results if statistics else results[0]

    return twin


def batch_norms(**keywords):
    ours = functools.partial(jaxbp.batch_norm, momentum=0.9, channel_axis=-1, **keywords)
    keywords = dict(use_fast_variance=False) | keywords
    twin = flax_norm(nnx.BatchNorm, 6, momentum=0.9, **keywords)
    return Case(
        lambda x, scale, bias, mean, var, **i: ours(x, scale, bias, (mean, var), **i),
        lambda x, scale, bias, mean, var: twin(x, scale, bias, mean=mean, var=var),
        (IMAGES, CHANNELS_1, CHANNELS_2, CHANNELS_2, CHANNELS_1**2 + 0.5),
    )


NORMS_AND_DROPOUT = {
    "layer_norm, axes": Case(
        lambda *a, **i: jaxbp.layer_norm(*a, axis=(-2, -1), **i),
        lambda x, scale, bias: jax.nn.standardize(x, axis=(1, 2), epsilon=1e-5) * scale + bias,
        (X, ROW_1, ROW_2),
    ),
    "layer_norm, None": Case(
        jaxbp.layer_norm, nnx.LayerNorm(4, use_bias=False, use_scale=False, epsilon=1e-5, rngs=nnx.Rngs(0)), (X,)
    ),
    "layer_norm, no scale": Case(
        lambda x, bias, **i: jaxbp.layer_norm(x, None, bias, **i),
        lambda x, bias: jax.nn.standardize(x, epsilon=1e-5) + bias,
        (X, ROW_1[0]),
    ),
    "rms_norm, axes": Case(
        lambda *a, **i: jaxbp.rms_norm(*a, axis=(1, 2), **i),
        lambda x, scale: jax.nn.standardize(x, axis=(1, 2), mean=0.0, epsilon=1e-5) * scale,
        (X, ROW_1),
    ),
    "rms_norm, None": Case(jaxbp.rms_norm, nnx.RMSNorm(4, use_scale=False, epsilon=1e-5, rngs=nnx.Rngs(0)), (X,)),
    "group_norm": Case(
        lambda *a, **i: jaxbp.group_norm(*a, 2, epsilon=1e-5, channel_axis=-1, **i),
        flax_norm(nnx.GroupNorm, 6, 2, use_fast_variance=False),
        (IMAGES, CHANNELS_1, CHANNELS_2),
    ),
    "group_norm, None": Case(
        lambda x, **i: jaxbp.group_norm(x, num_groups=3, channel_axis=2, **i),
        nnx.GroupNorm(6, 3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0)),
        (IMAGES,),
    ),
    "batch_norm": batch_norms(),
    "batch_norm, use_fast_variance": batch_norms(use_fast_variance=True),
    "batch_norm, use_running_average": batch_norms(use_running_average=True),
    "dropout": Case(
        lambda x, key, **i: jaxbp.dropout(x, key, jnp.float32(0.3), **i),
        lambda x, key: nnx.Dropout(0.3)(x, rngs=key),
        (X, KEY),
    ),
    "dropout, broadcast_dims": Case(
        lambda x, key, **i: jaxbp.dropout(x, key, 0.5, (1,), **i),
        lambda x, key: nnx.Dropout(0.5, broadcast_dims=(1,))(x, rngs=key),
        (X, KEY),
    ),
}


def softmaxes(name, axis):
    ours, twin = getattr(jaxbp, name), getattr(jax.nn, name)
    return Case(
        lambda x, where, **i: ours(x, axis, where, **i), lambda x, where: twin(x, axis, where), (X, MASK), masked=(0,)
    )


def reductions(name, **options):
    ours, twin = getattr(jaxbp, name), getattr(jax.nn if name == "logsumexp" else jnp, name)
    return Case(
        lambda x, where, **i: ours(x, where=where, **options, **i),
        lambda x, where: twin(x, where=where, **options),
        (X, MASK),
        masked=(0,),
        unsupported="where" if name == "var" else None,
    )


def numbers(name):
    ours, twin = getattr(jaxbp, name), getattr(jnp, name)
    return Case(
        lambda x, **i: ours(2, ours(ours(x, 1.5, **i), 1, **i), **i),
        lambda x: twin(2, twin(twin(x, 1.5), 1)),
        (POSITIVE,),
    )


SOFTMAXES = {
    f"{name}, {axis}": softmaxes(name, axis) for name in ("softmax", "log_softmax") for axis in (-1, (1, 2), None)
}
REDUCTIONS = {
    f"{name}, {axis_name}": reductions(name, **axis, **options)
    for name, options in {
        "sum": {},
        "mean": {},
        "logsumexp": {},
        "var": dict(ddof=1),
        "max": dict(initial=0.2),
        "min": dict(initial=-0.2),
    }.items()
    for axis_name, axis in {
        "2": dict(axis=2),
        "None": dict(axis=None),
        "keepdims": dict(axis=(1, -1), keepdims=True),
    }.items()
}
NUMBERS = {
    f"{name}, numbers": numbers(name)
    for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")
}
FAMILIES = {
    "losses and activations": LOSSES_AND_ACTIVATIONS,
    "norms and dropout": NORMS_AND_DROPOUT,
    "softmaxes and numbers": SOFTMAXES | NUMBERS,
    "reductions": REDUCTIONS,
}
CASES = {name: case for family in FAMILIES.values() for name, case in family.items()}

every_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def drawn(family):
    return {name: (case.arrays, draw_cotangents(case.twin, case.arrays)) for name, case in FAMILIES[family].items()}


def value_and_gradients_of(ops):
    runs = {name: value_and_gradients(op) for name, op in ops.items()}
    return jax.jit(lambda drawn: {name: runs[name](*arrays) for name, arrays in drawn.items()})


@functools.cache
def compiled(family, implementation):
    ops = {n: functools.partial(case.ours, implementation=implementation) for n, case in FAMILIES[family].items()}
    return value_and_gradients_of(ops)


def supported(family, implementation, drawn):
    cases = FAMILIES[family]
    return {n: arrays for n, arrays in drawn.items() if implementation != "pallas" or not cases[n].unsupported}


@every_implementation
@every_family
def test_values_and_gradients_are_the_twins(family, implementation):
    found = compiled(family, implementation)(supported(family, implementation, drawn(family)))
    for name, (y, gradients) in found.items():
        case, (twins_y, twins_gradients) = CASES[name], _twins_results(family)[name]
        twins_gradients = list(twins_gradients)
        assert [a.dtype for a in (*y, *gradients)] == [a.dtype for a in (*twins_y, *twins_gradients)], name
        # The logarithms of excluded probabilities are infinite.
        np.testing.assert_array_equal(np.isinf(y[0]), np.isinf(twins_y[0]), name)
        for i in case.masked[: len(gradients)]:  # where Optax multiplies the logarithms by 0, its gradients are NaN
            twins_gradients[i] = np.where(_included(case, twins_gradients[i]), twins_gradients[i], 0)
        assert_close((_finite(y[0]), gradients), (_finite(twins_y[0]), twins_gradients), "float32", name)


@functools.cache
def _twins_results(family):
    return value_and_gradients_of({name: case.twin for name, case in FAMILIES[family].items()})(drawn(family))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.unsupported])
def test_kernels_refuse_by_name_what_they_do_not_take(name):
    case = CASES[name]
    with pytest.raises(NotImplementedError, match=f"'pallas' does not take {case.unsupported}; wants 'xla'"):
        case.ours(*case.arrays, implementation="pallas")


SLOPES = ("leaky_relu", "elu")
"""Ops in which a scalar, even as an array, does not change the dtype."""
FLOAT_LABELS = Case(jaxbp.sigmoid_binary_cross_entropy, optax.sigmoid_binary_cross_entropy, (X, WEIGHTS))


def test_arrays_of_two_dtypes_give_the_dtypes_that_the_twin_gives():
    for name, case in {**CASES, "float labels": FLOAT_LABELS}.items():
        first, *others = floats(case.arrays)
        if others and name not in SLOPES:
            arrays = with_floats(case.arrays, [first.astype(jnp.bfloat16), *others])
            ours = functools.partial(case.ours, implementation="xla")
            ours, twins = (results_of(function, arrays) for function in (ours, case.twin))
            assert [a.dtype for a in ours] == [a.dtype for a in twins], name


def _included(case, a):
    where = np.asarray(case.arrays[-1])
    return where if a.ndim == where.ndim else where[..., None]


def _finite(a):
    return jnp.where(jnp.isinf(a), 0, a)


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
@every_family
def test_excluded_entries_are_never_read(family, implementation):
    masked = {
        name: arrays for name, arrays in supported(family, implementation, drawn(family)).items() if CASES[name].masked
    }
    run = compiled(family, implementation)
    expected = run(masked)
    for name, (y, gradients) in run({name: _spoiled(CASES[name], *arrays) for name, arrays in masked.items()}).items():
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), (y, gradients), expected[name])
        for gradient in gradients:
            np.testing.assert_array_equal(np.where(_included(CASES[name], gradient), 0, gradient), 0, name)


def _spoiled(case, arrays, cotangents):
    arrays = list(arrays)
    for i in case.masked:
        excluded = jnp.asarray(np.nan if is_float(arrays[i]) else -100, arrays[i].dtype)
        arrays[i] = np.where(_included(case, arrays[i]), arrays[i], excluded)
    return tuple(arrays), cotangents


NOTHING = {"sum": 0, "mean": np.nan, "var": np.nan, "max": -np.inf, "min": np.inf, "logsumexp": -np.inf}
NOTHING |= {"softmax": 0, "log_softmax": -np.inf}


@every_implementation
@pytest.mark.parametrize("name", NOTHING)
def test_if_everything_is_excluded_the_gradient_is_0(name, implementation):
    if (name, implementation) == ("var", "pallas"):
        return
    x, where = jnp.array([[1.0, jnp.nan, 2.0], [3.0, 4.0, 5.0]]), jnp.array([[False], [True]])
    y, vjp = jax.vjp(lambda x: getattr(jaxbp, name)(x, -1, where=where, implementation=implementation), x)
    np.testing.assert_array_equal(y[0], jnp.broadcast_to(NOTHING[name], y[0].shape))
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0][0], np.zeros(3))
    backward = getattr(jaxbp, f"{name}_backward")
    np.testing.assert_array_equal(backward(jnp.ones_like(y), x, -1, where=where, implementation=implementation)[0], 0)


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_a_label_whose_class_is_excluded_is_no_label(implementation):
    logits, labels, where = jnp.ones((2, 3)), jnp.array([0, 1]), jnp.array([[False, True, True]])
    loss, vjp = jax.vjp(lambda x: cross_entropy(x, labels, where=where, implementation=implementation), logits)
    np.testing.assert_allclose(loss, [np.nan, np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(jnp.isnan(vjp(jnp.ones(2))[0]).any(-1), [True, False])
    np.testing.assert_array_equal(vjp(jnp.array([0.0, 1.0]))[0][0], 0)


@ours
@every_family
def test_under_vmap_each_result_is_the_same(family, implementation):
    run = compiled(family, implementation)
    arrays = supported(family, implementation, drawn(family))
    stacked = jax.tree.map(lambda a: np.stack([a, np.roll(a, 1)]), arrays)
    each = [run(jax.tree.map(lambda a, i=i: a[i], stacked)) for i in range(2)]
    found, expected = jax.vmap(run)(stacked), jax.tree.map(lambda *a: np.stack(a), *each)
    for name in arrays:
        _agree(found[name], expected[name], name)


def _agree(actual, expected, name):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=name)
    jax.tree.map(close, actual, expected)


@every_family
def test_first_and_second_derivatives_match_finite_differences(family):
    functions, values = {}, {}
    for name, case in FAMILIES[family].items():
        arrays = jax.tree.map(lambda a: np.asarray(a, "float64") if is_float(a) else a, case.arrays)
        op = of_floats(functools.partial(case.ours, implementation="xla"), arrays)
        # Running averages, which have no gradient, follow the first result.
        functions[name], values[name] = lambda *values, op=op: [_finite(op(*values)[0])], floats(arrays)
    assert_second_derivatives_match_differences(functions, values)


@ours
@every_family
def test_half_precisions_stay_and_match_float32(family, implementation):
    def as_dtype(name, dtype):
        arrays, cotangents = drawn(family)[name]
        arrays = tuple(a.astype(dtype) if is_float(a) and a.ndim else a for a in arrays)
        return arrays, [c.astype(dtype) for c in cotangents]

    names = supported(family, implementation, drawn(family))
    dtypes = {name: ("bfloat16", "float16")[i % 2] for i, name in enumerate(names)}
    rounded = {name: as_dtype(name, dtype) for name, dtype in dtypes.items()}
    run = compiled(family, implementation)
    expected = run(jax.tree.map(lambda a: a.astype("float32") if is_float(a) else a, rounded))
    for name, (y, gradients) in run(rounded).items():
        assert [a.dtype for a in y] == [dtypes[name]] * len(y), name
        assert [a.dtype for a in gradients] == [a.dtype for a in floats(rounded[name][0])], name
        assert_close(*(jax.tree.map(_finite, tree) for tree in ((y, gradients), expected[name])), 2e-2, name)


@pytest.mark.skipif(jax.device_count() < EXAMPLES, reason="needs eight devices")
@pytest.mark.parametrize(
    ("family", "implementation", "axes"),
    # An op computes on explicit axes as on automatic axes.
    [(family, implementation, AxisType.Explicit) for family in FAMILIES for implementation in ("pallas", "xla")]
    + [("reductions", "pallas", AxisType.Auto)],
)
def test_on_a_mesh_the_results_are_those_of_one_device(family, implementation, axes):
    mesh = jax.make_mesh((EXAMPLES,), ("examples",), axis_types=(axes,))

    def place(a):
        spec = P("examples") if a.ndim and len(a) == EXAMPLES else P()
        return jax.device_put(a, NamedSharding(mesh, spec))

    arrays, run = supported(family, implementation, drawn(family)), compiled(family, implementation)
    expected = run(arrays)
    with jax.set_mesh(mesh):
        found = run(jax.tree.map(place, arrays))
    for name in arrays:
        _agree(found[name], expected[name], name)


def test_all_cases_can_be_exported_to_every_platform_at_once():
    def run(arrays):
        return {name: CASES[name].ours(*arrays[name], implementation="xla") for name in CASES}

    arrays = {name: case.arrays for name, case in CASES.items()}
    with on_the_cpu():
        exported = jax.export.export(jax.jit(run), platforms=("cpu", "cuda", "tpu"))(arrays)
        found, expected = exported.call(arrays), jax.jit(run)(arrays)
    for name in CASES:
        _agree(found[name], expected[name], name)


def test_kernels_of_all_cases_lower_for_cuda_without_a_gpu():
    for family in FAMILIES:
        for name, arrays in supported(family, "pallas", drawn(family)).items():
            run = value_and_gradients(functools.partial(CASES[name].ours, implementation="pallas"))
            assert "mosaic_gpu" in cuda_program(run, *arrays), name


@pytest.mark.skipif(jax.device_count() < EXAMPLES, reason="needs eight devices")
@pytest.mark.parametrize("fast", [False, True])
def test_batch_norm_over_devices_has_the_statistics_of_all_examples(fast):
    mesh, arrays = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,)), (IMAGES, CHANNELS_1, CHANNELS_2)
    options = dict(channel_axis=-1, implementation="xla", use_fast_variance=fast)

    def on_each(x, scale, bias):
        y, *running = jaxbp.batch_norm(x, scale, bias, (CHANNELS_1, CHANNELS_2), axis_name="i", **options)
        return y, *running

    sharded = jax.shard_map(on_each, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=(P("i"), P(), P()))
    whole = functools.partial(jaxbp.batch_norm, running=(CHANNELS_1, CHANNELS_2), **options)

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, *arrays):
        results = function(*arrays)
        return results, jax.grad(lambda *arrays: jnp.sum(jnp.sin(function(*arrays)[0])), (0, 1, 2))(*arrays)

    assert_close(both(sharded, *arrays), both(whole, *arrays), 1e-4 if fast else "float32")


UNARY = ["relu", "leaky_relu", "elu", "gelu", "silu", "mish", "sigmoid", "softplus", "tanh", "softmax", "log_softmax"]
UNARY += ["exp", "log", "sqrt", "abs", "sin", "cos", "clip", "negative", "transpose"]
UNARY += ["sum", "mean", "var", "max", "min", "logsumexp"]
BINARY = ["add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "matmul", "dot", "outer"]
OPTAX = {
    "huber": optax.huber_loss,
    "sigmoid_binary_cross_entropy": optax.sigmoid_binary_cross_entropy,
    "kl_divergence": optax.kl_divergence,
    "softmax_cross_entropy": optax.softmax_cross_entropy,
}
WEAK, STRONG, HALF = jnp.full((3, 3), 0.5), jnp.arange(1.0, 10.0).reshape(3, 3) / 8, jnp.ones((3, 3), jnp.bfloat16)
INTEGERS, BYTES, BITS = jnp.arange(1, 10).reshape(3, 3), jnp.ones((3, 3), jnp.uint8), jnp.eye(3, dtype=bool)
ARRAYS = [WEAK, HALF, INTEGERS, BYTES, BITS]
NUMBERS_OF_PYTHON_AND_NUMPY = [2.0, 2, True, np.float32(2), np.int32(2)]


def _op_and_twin(name):
    return getattr(jaxbp, name), OPTAX.get(name) or getattr(jax.nn, name, None) or getattr(jnp, name)


def _compare_with_twin(name, calls):
    """Compare an op with its twin, which may raise an error. One program runs all calls that raise none."""
    op, twin = _op_and_twin(name)
    supported = []
    for arguments in calls:
        try:
            jax.eval_shape(lambda arguments=arguments: twin(*arguments))
        except (TypeError, ValueError):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                op(*arguments)
        else:
            supported.append(arguments)
    results = jax.jit(lambda: [[function(*arguments) for arguments in supported] for function in (op, twin)])()
    for arguments, found, expected in zip(supported, *results, strict=True):
        kinds, twins_kinds = ((y.shape, y.dtype, y.weak_type) for y in (found, expected))
        assert kinds == twins_kinds, arguments
        tolerance = 1e-2 if expected.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(np.asarray(found, float), np.asarray(expected, float), tolerance, tolerance)


@pytest.mark.parametrize("name", UNARY)
def test_numbers_integers_and_weak_types_give_what_the_twin_gives(name):
    _compare_with_twin(name, [(x,) for x in [*NUMBERS_OF_PYTHON_AND_NUMPY, *ARRAYS]])


@pytest.mark.parametrize("name", BINARY)
def test_two_dtypes_give_what_the_twin_gives(name):
    calls = list(itertools.combinations_with_replacement(ARRAYS, 2))
    if name == "power":  # JAX multiplies for integer exponents
        calls = [(x2, x1) for x1, x2 in calls]
    if name not in ("matmul", "dot"):
        calls += itertools.product((HALF, INTEGERS), NUMBERS_OF_PYTHON_AND_NUMPY)
    _compare_with_twin(name, calls)


def test_integer_powers_have_the_dtype_of_the_base():
    _compare_with_twin("power", list(itertools.product([2, True, BITS, INTEGERS, BYTES, jnp.int8(2)], repeat=2)))


@pytest.mark.parametrize("name", ["add", "divide", "maximum"])
def test_booleans_do_not_change_the_weak_type_of_integers(name):
    _compare_with_twin(name, [call for x in (2, jnp.full(3, 2)) for call in ((x, True), (True, x))])


@pytest.mark.parametrize("name", OPTAX)
def test_labels_of_other_dtypes_and_shapes_give_what_the_twin_gives(name):
    labels = [*ARRAYS, STRONG[0], STRONG[:, :1], BITS[:1], 0.5, np.float32(0.5)]
    _compare_with_twin(name, [*((STRONG, each) for each in labels), (BITS, STRONG)])
    for labels in (STRONG[0], STRONG[:, :1]):
        found, expected = (jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1))(STRONG, labels) for f in _op_and_twin(name))
        assert_close(found, expected, "float32")


@ours
def test_gradients_of_weakly_typed_arguments_are_weakly_typed(implementation):
    for name in [*UNARY, *BINARY]:
        if (name, implementation) == ("transpose", "pallas"):
            continue  # there is no kernel
        op = functools.partial(_op_and_twin(name)[0], implementation=implementation)
        arrays = (WEAK,) * (2 if name in BINARY else 1)
        results = jax.eval_shape(lambda *a, op=op: jax.vjp(op, *a)[1](jnp.zeros_like(op(*a))), *arrays)
        assert all(gradient.weak_type for gradient in results), name


@every_implementation
@pytest.mark.parametrize("name", ["relu", "silu", "sin", "add"])
def test_a_weakly_typed_result_does_not_change_half_precision(name, implementation):
    op = functools.partial(getattr(jaxbp, name), implementation=implementation)
    arrays = (WEAK,) * (2 if name == "add" else 1)
    for compile in (lambda f: f, jax.jit):
        assert (compile(op)(*arrays) * HALF).dtype == jnp.bfloat16


PAGE = Path(__file__).parents[3] / "docs" / "twins.md"


def _rows():
    for op, twin, arguments in re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \| ([^|]*)\|", PAGE.read_text(), re.M):
        yield op, twin, re.findall(r"`(\w+)`", arguments)


def _same():
    (sentence,) = re.findall(r"^([^|.]*) have the arguments of their twins\.", PAGE.read_text(), re.M)
    return re.findall(r"`(\w+)`", sentence)


def _named(path):
    root, *names = path.split(".")
    return functools.reduce(getattr, names, {"jax": jax, "optax": optax, "flax": flax}[root])


TWINS = {op: twin for op, twin, _ in _rows()}


@pytest.mark.parametrize("op", TWINS)
def test_the_book_lists_every_difference_between_the_arguments(op):
    ours, twin = functools.reduce(getattr, op.split("."), jaxbp), _named(TWINS[op])
    is_layer = inspect.isclass(twin)
    our_defaults, defaults = (
        {name: p.default for name, p in inspect.signature(f).parameters.items()}
        for f in (ours, twin.__init__ if is_layer else twin)
    )
    our_defaults.pop("implementation", None)
    different = {name for name in our_defaults.keys() & defaults.keys() if our_defaults[name] != defaults[name]}
    listed = {name for row, _, arguments in _rows() if row == op for name in arguments}
    if not is_layer:
        assert listed == different | (our_defaults.keys() ^ defaults.keys())
        return
    assert listed >= different - {"scale", "bias"}
    assert listed <= our_defaults.keys() | defaults.keys()
    assert our_defaults.keys() - defaults.keys() - {"x", "scale", "bias"} <= listed


def test_ops_without_a_difference_have_the_signatures_of_their_twins():
    for name in _same():
        ours, twin = getattr(jaxbp, name), getattr(jax.nn if hasattr(jax.nn, name) else jnp, name)
        *parameters, implementation = inspect.signature(ours).parameters.values()
        assert implementation.name == "implementation"
        wanted = inspect.signature(twin).parameters.values()
        assert [(p.name, p.default) for p in parameters] == [(p.name, p.default) for p in wanted], name
