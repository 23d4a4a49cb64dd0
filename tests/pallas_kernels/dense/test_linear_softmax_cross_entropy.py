import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, last_program_first, normal, on_the_cpu, relative_error

from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense.linear_softmax_cross_entropy import Config, gradient, statistics

ROWS = 3
PLAIN = dict(label_smoothing=0.0, z_loss=0.0, softcap=None)
OPTIONS = dict(label_smoothing=0.1, z_loss=0.01, softcap=2.0)


def both(logits, labels, dy, b, *, classes, label_smoothing, z_loss, softcap, config=None):
    options = dict(classes=classes, softcap=softcap, config=config)
    found = statistics(logits, labels, b, **options, with_sum=label_smoothing > 0)
    options |= dict(label_smoothing=label_smoothing, z_loss=z_loss)
    return *found, gradient(logits, labels, b, dy, *found[:2], **options)


def drawn(columns, classes, dtype="float32", bias=False, rows=ROWS):
    logits, dy, b = normal((rows, columns), (rows,), (columns,))
    labels = jnp.asarray(np.random.default_rng(0).integers(0, classes, rows), jnp.int32)
    return (3 * logits).astype(dtype), labels, dy, b.astype(dtype) if bias else None


def expected(logits, labels, dy, b, classes, label_smoothing, z_loss, softcap):
    z = np.asarray(logits, np.float64)[:, :classes]
    z = z if b is None else z + np.asarray(b, np.float64)[:classes]
    z = z if softcap is None else softcap * np.tanh(z / softcap)
    largest = z.max(axis=1)
    total = np.exp(z - largest[:, None]).sum(axis=1)
    lse = (largest + np.log(total))[:, None]
    y = np.full(z.shape, label_smoothing / classes)
    y[np.arange(len(z)), labels] += 1 - label_smoothing
    dz = np.asarray(dy, np.float64)[:, None] * (np.exp(z - lse) * (1 + 2 * z_loss * lse) - y)
    dz = dz if softcap is None else dz * (1 - (z / softcap) ** 2)
    statistics = [largest, total, *([z.sum(axis=1)] if label_smoothing else []), z[np.arange(len(z)), labels]]
    return np.stack(statistics), dz


@pytest.mark.parametrize(
    ("columns", "classes", "bias", "options", "config"),
    [
        (384, 384, False, PLAIN, Config(128, 1, 2)),  # three vectors, the last twice
        (1280, 1280, False, PLAIN, Config(128, 4, 2)),  # 3, 3, 2, 2 vectors
        (512, 500, True, OPTIONS, Config(256, 2, 1)),  # the end is no class
        (128, 1, True, OPTIONS, Config(128, 1, 1)),
    ],
    ids=["one part", "several parts", "all options", "one class"],
)
@pytest.mark.parametrize("simulate", [False, True], ids=["interpreter", "simulator"])
def test_statistics_and_gradients_are_right(columns, classes, bias, options, config, simulate):
    arguments = drawn(columns, classes, bias=bias)
    run = lambda: jax.block_until_ready(both(*arguments, classes=classes, **options, config=config))  # noqa: E731
    with on_the_cpu():
        if simulate:
            with simulated():
                *found, dlogits = run()
        else:
            *found, dlogits = run()
            with last_program_first():
                jax.tree.map(np.testing.assert_array_equal, run(), (*found, dlogits))
    wanted, dz = expected(*arguments, classes, **options)
    assert relative_error(np.stack([a for a in found if a is not None]), wanted) < 1e-6
    assert np.abs(np.asarray(dlogits[:, :classes]) - dz).max() < 2e-6
    assert (dlogits[:, classes:] == 0).all()


def test_infinite_logits_have_no_probability():
    logits, labels, dy, _ = drawn(256, 256)
    logits = logits.at[:, ::2].set(-jnp.inf)
    *_, dlogits = both(logits, labels * 0 + 1, dy, None, classes=256, **PLAIN)
    assert (dlogits[:, ::2] == 0).all() and np.isfinite(dlogits).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", [PLAIN, OPTIONS], ids=["plain", "all options"])
def test_it_lowers_for_cuda(dtype, options):
    arguments = drawn(128256, 128256, dtype, bias=bool(options["z_loss"]))
    program = cuda_program(lambda *a: both(*a, classes=128256, **options), *arguments)
    assert program.count("mosaic_gpu_v2") == 2


def test_a_row_is_divided_into_as_many_parts_as_have_enough_vectors():
    def config(columns):
        return statistics.plan(drawn(columns, columns)[0])

    assert config(128256) == Config(256, 16, 16)
    assert config(151936) == Config(128, 16, 16)
    assert config(32000) == Config(256, 4, 16)
    assert config(1024) == Config(256, 1, 16)


def test_columns_that_are_no_vectors_are_unsupported():
    arguments = drawn(100, 100)
    assert statistics.unsupported(*arguments) == gradient.unsupported(*arguments) == "logits of shape (3, 100)"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [128, 1024, 32000, 128256, 151936])
def test_gpu_statistics_and_gradients_match_float64_and_repeat_their_bits(columns, dtype):
    classes, options = columns - 5, OPTIONS
    arguments = drawn(columns, classes, dtype, bias=True, rows=min(2000, 2**26 // columns))
    run = jax.jit(lambda *a: both(*a, classes=classes, **options))
    *found, dlogits = run(*arguments)
    wanted, dz = expected(*arguments, classes, **options)
    assert relative_error(np.stack(found), wanted) < 1e-5
    assert relative_error(dlogits[:, :classes], dz) < (1e-5 if dtype == "float32" else 1e-2)
    for _ in range(20):
        for again, first in zip(run(*arguments), (*found, dlogits), strict=True):
            np.testing.assert_array_equal(again, first)
