"""The kernel of the losses and gradients of rows of logits: tiles, clusters, options, and padding, in the simulator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu, relative_error

from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense.linear_softmax_cross_entropy import Config, statistics_and_gradient

ROWS = 3
PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=None)
OPTIONS = dict(label_smoothing=0.1, z_loss=0.01, softcap=2.0)
needs_cluster_barriers = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="this version's simulator has no barriers of clusters"
)


def drawn(columns, classes, dtype="float32", bias=False):
    logits, dy, b = normal((ROWS, columns), (ROWS,), (columns,))
    labels = jnp.asarray(np.random.default_rng(0).integers(0, classes, ROWS), jnp.int32)
    return (3 * logits).astype(dtype), labels, dy, b.astype(dtype) if bias else None


def expected(logits, labels, dy, b, classes, label_smoothing, z_loss, softcap):
    """Return the results in float64. The statistics are one array."""
    z = np.asarray(logits, np.float64)[:, :classes]
    z = z if b is None else z + np.asarray(b, np.float64)[:classes]
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    largest = z.max(axis=1)
    total = np.exp(z - largest[:, None]).sum(axis=1)
    lse = (largest + np.log(total))[:, None]
    y = np.eye(classes)[labels] * (1 - label_smoothing) + label_smoothing / classes
    dz = np.asarray(dy, np.float64)[:, None] * (np.exp(z - lse) * (1 + 2 * z_loss * lse) - y)
    dz = dz if softcap is None else dz * (1 - (z / softcap) ** 2)
    statistics = [largest, total, *([z.sum(axis=1)] if label_smoothing else []), z[np.arange(ROWS), labels]]
    return np.stack(statistics), dz


@pytest.mark.parametrize(
    ("columns", "classes", "bias", "options", "config"),
    [
        (384, 384, False, PLAIN, Config(128, 1, 2)),  # three vectors, of which the last is read twice
        pytest.param(1280, 1280, False, PLAIN, Config(128, 4, 2), marks=needs_cluster_barriers),  # 3, 3, 2, 2 vectors
        pytest.param(512, 500, True, OPTIONS, Config(256, 2, 1), marks=needs_cluster_barriers),  # the end is no class
        (128, 1, True, OPTIONS, Config(128, 1, 1)),
    ],
    ids=["one CTA", "a cluster", "all options", "one class"],
)
def test_the_simulator_finds_statistics_and_gradients_right(columns, classes, bias, options, config):
    arguments = drawn(columns, classes, bias=bias)
    with on_the_cpu(), simulated():
        *statistics, dlogits = statistics_and_gradient(*arguments, classes=classes, **options, config=config)
    wanted, dz = expected(*arguments, classes, **options)
    assert relative_error(np.stack([a for a in statistics if a is not None]), wanted) < 1e-6
    assert np.abs(np.asarray(dlogits[:, :classes]) - dz).max() < 2e-6
    assert (dlogits[:, classes:] == 0).all()


def test_without_a_cotangent_only_statistics_are_computed():
    logits, labels, _, _ = drawn(256, 256)
    with on_the_cpu(), simulated():
        *statistics, dlogits = statistics_and_gradient(logits, labels, None, None, classes=256, **PLAIN)
    wanted, _ = expected(logits, labels, jnp.ones(ROWS), None, 256, **PLAIN)
    assert dlogits is None and relative_error(np.stack([a for a in statistics if a is not None]), wanted) < 1e-6


def test_infinite_logits_have_no_probability():
    logits, labels, dy, _ = drawn(256, 256)
    logits = logits.at[:, ::2].set(-jnp.inf)
    with on_the_cpu(), simulated():
        *_, dlogits = statistics_and_gradient(logits, labels * 0 + 1, dy, None, classes=256, **PLAIN)
    assert (dlogits[:, ::2] == 0).all() and np.isfinite(dlogits).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", [PLAIN, OPTIONS], ids=["plain", "all options"])
def test_it_lowers_for_cuda(dtype, options):
    arguments = drawn(128256, 128256, dtype, bias=bool(options["z_loss"]))
    assert "mosaic_gpu" in cuda_program(lambda *a: statistics_and_gradient(*a, classes=128256, **options), *arguments)


def test_a_row_is_divided_among_as_many_ctas_as_have_enough_vectors():
    def config(columns):
        return statistics_and_gradient.heuristic(*drawn(columns, columns), classes=columns, **PLAIN)

    assert config(128256) == Config(256, 8, 16)
    assert config(151936) == Config(128, 8, 16)
    assert config(32000) == Config(256, 4, 16)
    assert config(1024) == Config(256, 1, 16)


def test_columns_that_are_no_vectors_are_unsupported():
    arguments = drawn(100, 100)
    assert statistics_and_gradient.unsupported(*arguments, classes=100, **PLAIN) == "logits of shape (3, 100)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [128, 1024, 32000, 128256, 151936])
def test_gpu_statistics_and_gradients_match_float64_and_repeat_their_bits(columns, dtype):
    classes, options = columns - 5, OPTIONS
    arguments = drawn(columns, classes, dtype, bias=True)
    run = jax.jit(lambda *a: statistics_and_gradient(*a, classes=classes, **options))
    *statistics, dlogits = run(*arguments)
    wanted, dz = expected(*arguments, classes, **options)
    assert relative_error(np.stack(statistics), wanted) < 1e-5
    assert relative_error(dlogits[:, :classes], dz) < (1e-5 if dtype == "float32" else 1e-2)
    for _ in range(100):
        for again, first in zip(run(*arguments), (*statistics, dlogits), strict=True):
            np.testing.assert_array_equal(again, first)
