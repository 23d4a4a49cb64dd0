import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_the_cpu, relative_error, skipped_outputs

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense import mlp_softmax_cross_entropy_sm90 as kernels
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, row_widths
from pallas_kernels.dense.mlp_weighed_gradients_sm90 import weighed_gradients

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
SMALL, LENET = (40, 33, 31, 5), (256, 120, 84, 10)


def draw(sizes, N, seed=0):
    random = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    x = jnp.zeros((row_widths(sizes)[0], N)).at[: sizes[0]].set(normal(sizes[0], N))
    weights = tuple(normal(n, m) / np.sqrt(m) for m, n in itertools.pairwise(sizes))
    labels = jnp.asarray(random.integers(0, sizes[-1], N), jnp.int32)
    return x, labels, weights, tuple(normal(n) for n in sizes[1:]), normal(N)


@jax.jit
def both(x, labels, weights, biases, dy):
    loss, logits, hidden = kernels.forward(x, labels, weights, biases)
    return loss, logits, hidden, kernels.backward(dy, labels, logits, hidden, weights)


def check(results, x, labels, weights, biases, dy):
    """The float64 backward takes ReLU's masks from the rounded forward."""
    loss, logits, hidden, gradients = jax.tree.map(lambda a: np.asarray(a, np.float64), results)
    weights, biases = ([np.asarray(a, np.float64) for a in arrays] for arrays in (weights, biases))
    labels, h = np.asarray(labels), np.asarray(x, np.float64)[: weights[0].shape[1]].T
    for w, b, actual in zip(weights, biases, (*hidden, logits), strict=True):
        z = h @ w.T + b
        h = np.maximum(z, 0) if actual is not logits else z
        assert relative_error(actual[:, : len(w)], h) < 1e-3
        behind = actual[:, len(w) :]
        assert actual is logits or (behind == np.eye(1, behind.shape[1])).all()
    expected = np.logaddexp.reduce(z, axis=1) - z[np.arange(len(z)), labels]
    assert relative_error(loss, expected) < 1e-3

    gradient = np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None]) - np.eye(z.shape[1])[labels]
    gradient *= np.asarray(dy, np.float64)[:, None]
    for w, actual, h in zip(reversed(weights), gradients, (*reversed(hidden), None), strict=False):
        assert relative_error(actual[:, : len(w)], gradient) < 1e-3 and not actual[:, len(w) :].any()
        gradient = gradient @ w * (1 if h is None else h[:, : w.shape[1]] > 0)
    assert relative_error(gradients[-1][: weights[0].shape[1]], gradient.T) < 1e-3


@jax.jit
def at_once(x, labels, weights, biases, dy):
    loss, logits, hidden, gradients = kernels.forward_and_gradients(x, labels, weights, biases)
    sizes = (weights[0].shape[1], *(len(w) for w in weights))
    return (loss, logits, hidden, gradients), weighed_gradients(dy, x, hidden, gradients, sizes=sizes)


def check_at_once(results, x, labels, weights, biases, dy):
    check(results[0], x, labels, weights, biases, jnp.ones_like(dy))
    x, dy, (_, _, hidden, gradients), (dx, *layers) = jax.tree.map(
        lambda a: np.asarray(a, np.float64), (x, dy, *results)
    )
    assert relative_error(dx, gradients[-1] * dy) < 1e-6
    for i, (w, dz, h) in enumerate(zip(weights, reversed(gradients[:-1]), (x.T, *hidden), strict=True)):
        dz = dz[:, : len(w)] * dy[:, None]
        assert relative_error(layers[2 * i], dz.T @ h[:, : w.shape[1]]) < 1e-3
        assert relative_error(layers[2 * i + 1], dz.sum(axis=0)) < 1e-3


@can_simulate
@pytest.mark.parametrize(("sizes", "N"), [(SMALL, 128), ((32, 7), 256)], ids=["three layers", "one layer"])
def test_the_simulator_finds_rows_and_gradients_at_once_right(sizes, N):
    arrays = draw(sizes, N)
    with on_the_cpu(), simulated():
        results = jax.block_until_ready(at_once(*arrays))
    check_at_once(results, *arrays)


def structs(sizes, N, dtype="float32"):
    weights = tuple(jax.ShapeDtypeStruct((n, m), dtype) for m, n in itertools.pairwise(sizes))
    biases = tuple(jax.ShapeDtypeStruct((n,), dtype) for n in sizes[1:])
    x = jax.ShapeDtypeStruct((row_widths(sizes)[0], N), dtype)
    return x, jax.ShapeDtypeStruct((N,), "int32"), weights, biases


def test_rows_and_gradients_are_made_at_once_where_they_fit(on_hopper):
    assert kernels.forward_and_gradients.unsupported(*structs(LENET, 8192)) is None
    large = structs((224, 216, 160, 10), 128)
    assert kernels.forward.unsupported(*large) is None
    reason = "layers whose activations leave no shared memory for two slices of the weights"
    assert kernels.forward_and_gradients.unsupported(*large) == reason


@can_simulate
@pytest.mark.parametrize("sizes", [SMALL, (32, 7)], ids=["three layers", "one layer"])
def test_the_simulator_finds_them_right(sizes):
    arrays = draw(sizes, EXAMPLES)
    with on_the_cpu(), simulated():
        results = jax.block_until_ready(both(*arrays))
    check(results, *arrays)


@can_simulate
@pytest.mark.parametrize("sizes", [(32, 9, 4), (32, 7)], ids=["two layers", "one layer"])
def test_the_other_gradients_are_the_same_if_dx_is_not_wanted(sizes):
    x, labels, weights, biases, dy = draw(sizes, EXAMPLES)
    with on_the_cpu(), simulated():
        _, logits, hidden = kernels.forward(x, labels, weights, biases)
        run = functools.partial(kernels.backward, dy, labels, logits, hidden, weights)
        *expected, _ = run()
        with skipped_outputs(kernels, 1):
            *gradients, dx = run()
    assert not dx.any()
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)


@can_simulate
def test_a_label_that_is_no_class_gives_nan_to_its_example_alone_and_0_where_dy_is_0():
    x, labels, *others, dy = draw((32, 9, 4), EXAMPLES)
    with on_the_cpu(), simulated():
        labels, dy = labels.at[3].set(4).at[5].set(-1).at[7].set(-1), dy.at[7].set(0)
        loss, *_, gradients = jax.block_until_ready(both(x, labels, *others, dy))
    for rows, invalid in ((loss[:, None], (3, 5, 7)), (gradients[-1].T, (3, 5)), (gradients[1][:, :9], (3, 5))):
        assert (np.isnan(rows).any(axis=1) == np.isin(np.arange(EXAMPLES), invalid)).all()


@can_simulate
def test_an_infinite_input_that_relu_excludes_leaves_rows_and_gradients_finite():
    x, labels, (w, *weights), *others, dy = draw(SMALL, LANES)
    arrays = x.at[0, 3].set(-jnp.inf), labels, (w.at[:, 0].set(1.0), *weights), *others
    with on_the_cpu(), simulated():
        apart = jax.block_until_ready(both(*arrays, dy))
        results, _ = jax.block_until_ready(at_once(*arrays, dy))
    check(apart, *arrays, dy)
    check(results, *arrays, jnp.ones_like(dy))


@can_simulate
def test_the_padding_of_rows_stays_0_whatever_the_examples_and_dy_are():
    x, labels, weights, biases, dy = draw(SMALL, LANES)
    infinities = jnp.array([jnp.inf, -jnp.inf, jnp.nan])
    x, dy = x.at[0, :3].set(infinities), dy.at[3:6].set(infinities)
    with on_the_cpu(), simulated():
        apart = jax.block_until_ready(both(x, labels, weights, biases, dy))
        results, _ = jax.block_until_ready(at_once(x, labels, weights, biases, dy))
    for _, _, hidden, (*gradients, _) in (apart, results):
        for n, h in zip(SMALL[1:-1], hidden, strict=True):
            assert (h[:, n:] == jnp.eye(1, h.shape[1] - n)).all()
        for n, gradient in zip(reversed(SMALL[1:]), gradients, strict=True):
            assert not gradient[:, n:].any()


@can_simulate
def test_gradients_at_once_are_0_where_the_label_is_no_class():
    x, labels, *others, dy = draw((32, 9, 4), LANES)
    with on_the_cpu(), simulated():
        (loss, _, _, gradients), made = jax.block_until_ready(at_once(x, labels.at[3].set(-1), *others, dy))
    assert np.isnan(loss).nonzero()[0].tolist() == [3]
    assert not gradients[-1][:, 3].any() and np.isfinite(made[1]).all()


@pytest.mark.parametrize(
    ("sizes", "N", "dtype", "reason"),
    [
        (LENET, 64, "float32", None),
        (LENET, 64, "bfloat16", "dtype bfloat16, only float32"),
        (LENET, 100, "float32", "a batch of 100, only multiples of 64"),
        (LENET, 0, "float32", "a batch of 0, only multiples of 64"),
        ((256, 256, 10), 64, "float32", "rows as wide as 288 when padded, at most 256"),
        ((288, 10), 64, "float32", "rows as wide as 288 when padded, at most 256"),
        ((256, *[224] * 4), 64, "float32", "layers whose activations leave no shared memory for two slices"),
    ],
    ids=str,
)
def test_what_they_take(sizes, N, dtype, reason, on_hopper):
    x, labels, weights, biases = structs(sizes, N, dtype)
    logits = jax.ShapeDtypeStruct((N, row_widths(sizes)[-1]), dtype)
    found = kernels.forward.unsupported(x, labels, weights, biases)
    backward = kernels.backward.unsupported(jax.ShapeDtypeStruct((N,), dtype), labels, logits, (), weights)
    assert found == backward
    assert found is None if reason is None else found.startswith(reason)


def test_stages_are_those_that_shared_memory_has_room_for():
    arrays = structs(LENET, 128)
    wanted = {HOPPER.shared_bytes: (6, 5), 200 * 1024: (4, 3), 180 * 1024: (3, 2)}
    for shared_bytes, stages in wanted.items():
        with targeting(dataclasses.replace(HOPPER, shared_bytes=shared_bytes)):
            found = (kernels.forward.plan(*arrays), kernels.forward_and_gradients.plan(*arrays))
            assert tuple(config.stages for config in found) == stages
    with targeting(dataclasses.replace(HOPPER, shared_bytes=BLACKWELL_RTX.shared_bytes)):
        assert "no shared memory for two slices" in kernels.forward.unsupported(*arrays)


@pytest.mark.parametrize("device", [BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_they_are_hoppers_alone(device):
    arrays = structs(LENET, 128)
    with targeting(device):
        for kernel in (kernels.forward, kernels.forward_and_gradients):
            assert "only 9.0" in kernel.unsupported(*arrays)


@pytest.mark.parametrize("run", [both, at_once], ids=["apart", "at once"])
@pytest.mark.parametrize("sizes", [LENET, SMALL, (64, 3)])
def test_they_lower_for_cuda(sizes, run, on_hopper):
    program = run.trace(*draw(sizes, 256)).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("custom_call @mosaic_gpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("run", "check", "N"),
    [*((both, check, N) for N in (64, 1024, 8192)), *((at_once, check_at_once, N) for N in (128, 256, 1024))],
)
def test_gpu_results_match_float64_and_repeat_their_bits(run, check, N):
    arrays = draw(LENET, N)
    first, second = run(*arrays), run(*arrays)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    check(first, *arrays)
