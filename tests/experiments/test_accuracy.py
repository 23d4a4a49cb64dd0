import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ENTRIES
from rich.console import Console

import jaxbp
from experiments import accuracy as measuring
from experiments import check
from experiments.accuracy import Accuracy, Place, accuracy
from jaxbp.catalogue import CATALOGUE, Argument, Case, Entry


def _softmax_of_result(x):
    y = jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)
    return y, (y,)


def _softmax_backward(dy, y):
    wide_dy, wide_y = dy.astype(jnp.float32), y.astype(jnp.float32)
    return (wide_y * (wide_dy - jnp.sum(wide_dy * wide_y, -1, keepdims=True))).astype(y.dtype)


def _rows(pair, dtype, offset, scale):
    case = Case((Argument((2, 4)),))

    def function(x, *, implementation):
        return pair(x, implementation=implementation)

    entry = Entry(function, case, {})
    return list(accuracy(entry, case, ("xla",), (dtype,), (offset,), (scale,)))


def test_a_result_that_is_rounded_and_saved_for_the_backward_is_found():
    wide = lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)  # noqa: E731
    pair = jaxbp.Pair(wide, {"xla": _softmax_backward}, save=_softmax_of_result, name="softmax")
    rows = {row.result: row for row in _rows(pair, "bfloat16", 0.0, 10.0)}
    value, gradient = rows["value 0"], rows["gradient in x"]
    assert value.excess <= 1 < gradient.excess
    assert gradient.place == Place(0.0, 10.0, "x")
    assert gradient.error > 5 * gradient.native


def test_a_mean_that_is_rounded_and_taken_off_is_found():
    def backward(dy, x):
        return dy * 2 * (x - jnp.mean(x)) / x.size

    pair = jaxbp.Pair(jnp.var, {"xla": backward}, name="var")
    assert all(row.excess <= 1 for row in _rows(pair, "float32", 0.0, 1.0))
    assert any(row.excess > 100 for row in _rows(pair, "float32", 1e5, 1e-2))


def test_what_the_dtype_cannot_hold_is_left_out():
    entry = ENTRIES["exp"]
    rows = list(accuracy(entry, entry.small, ("xla",), ("float16",), (0.0, 1e5), (1.0,)))
    assert {row.place.offset for row in rows} == {0.0}


REDUCING = {
    **{name: (ENTRIES[name], ENTRIES[name].small) for name in ("softmax", "log_softmax", "logsumexp", "var", "matmul")},
    "batch_norm": (ENTRIES["batch_norm"], ENTRIES["batch_norm"].small),
    "softmax_cross_entropy": (ENTRIES["softmax_cross_entropy"], ENTRIES["softmax_cross_entropy"].real["classes"]),
    "softmax_cross_entropy_backward": (
        ENTRIES["softmax_cross_entropy_backward"],
        ENTRIES["softmax_cross_entropy_backward"].real["classes"],
    ),
    "mlp_softmax_cross_entropy": (ENTRIES["mlp_softmax_cross_entropy"], ENTRIES["mlp_softmax_cross_entropy"].small),
}
"""Ops in which rounding a saved value or a sum's terms would lose digits."""


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 10.0), ("float32", 1e2)])
def test_no_op_that_reduces_is_further_from_float64_than_autodiff(dtype, scale):
    rows = (accuracy(*of, ("xla",), (dtype,), (0.0, 1e4), (scale,)) for of in REDUCING.values())
    found = list(itertools.chain.from_iterable(rows))
    assert {row.op for row in found} == set(REDUCING)
    assert [row for row in found if row.excess > 1] == []


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_logsumexp_far_from_zero_keeps_the_digits_of_its_gradient(implementation):
    # Bfloat16 rounds 299 to 300. With the result, 300, the gradient would be (1, 1, 0).
    a = jnp.array([300.0, 299.0, 200.0], jnp.bfloat16)
    da = jax.grad(functools.partial(jaxbp.logsumexp, implementation=implementation))(a)
    exact = np.exp([0.0, float(a[1] - a[0]), -100.0])
    np.testing.assert_allclose(np.asarray(da, np.float64), exact / exact.sum(), rtol=2**-8, atol=1e-30)


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_var_and_batch_norm_far_from_zero_keep_the_digits_of_their_gradients(implementation):
    near = np.arange(24, dtype="f").reshape(8, 3) ** 2 / 512
    var, norm = (functools.partial(f, implementation=implementation) for f in (jaxbp.var, jaxbp.batch_norm))

    def gradients(x):
        scale = jnp.ones(3)
        loss = lambda x: jnp.sum(jnp.sin(norm(x, scale, scale)[0]))  # noqa: E731
        return jax.grad(var)(x), jax.grad(loss)(x)

    for far, expected in zip(gradients(jnp.asarray(8192 + near)), gradients(jnp.asarray(near)), strict=True):
        np.testing.assert_allclose(far, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
def test_the_mean_of_nothing_is_nan_and_so_is_what_depends_on_it(implementation):
    empty, options = jnp.zeros(0), dict(implementation=implementation)
    backwards = {
        "mean": lambda dy: jaxbp.mean_backward(dy, empty, **options),
        "squared": lambda dy: jaxbp.mean_squared_error_backward(dy, empty, empty, **options)[0],
        "absolute": lambda dy: jaxbp.mean_absolute_error_backward(dy, empty, empty, **options)[0],
    }
    for name, backward in backwards.items():
        assert jnp.isnan(jax.grad(lambda dy: jnp.sum(backward(dy)))(1.0)), name  # noqa: B023


RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_an_op_is_measured_and_a_second_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "FULL", dict(offsets=(0.0, 1e2), scales=(1.0,), draws=4))
    path = tmp_path / "rows.json"
    run = ["sigmoid", "--accuracy", "--implementations", "xla", "autodiff", "--json", str(path)]
    assert check.main(run) == 0
    report = json.loads(path.read_text())
    assert report["passed"] and [row["op"] for row in report["rows"]] == ["sigmoid", "sigmoid_backward"]
    assert all(row["places"] == 2 and row["implementation"] == "xla" for row in report["rows"])
    monkeypatch.setattr(measuring, "accuracy", None)
    assert check.main(run) == 0


def _row(excess, draws):
    return Accuracy("tanh", "float32", "xla", "value 0", Place(0.0, 1.0, "x"), draws / 1e9, 1e-9, excess)


@pytest.mark.parametrize(("again", "passed"), [(0.5, True), (2.0, False)])
def test_what_is_beyond_is_measured_again_with_more_draws(again, passed, monkeypatch):
    asked = []

    def measured(entry, case, implementations, dtypes, offsets, scales, draws):
        asked.append((offsets, draws))
        return [_row(2.0 if len(asked) == 1 else again, draws)]

    monkeypatch.setattr(measuring, "accuracy", measured)
    entries = [entry for entry in CATALOGUE if entry.name == "tanh"]
    assert measuring.measure(entries, ("xla",), ("float32",), "command", Console(quiet=True)) == passed
    assert asked == [(measuring.FULL["offsets"], 32), ((0.0,), 256)]


SLIGHTLY_BEYOND = {
    ("power", "float32", "pallas"): 1.35,
    ("batch_norm_backward", "bfloat16", "pallas"): 1.06,
    ("batch_norm_backward", "float16", "xla"): 1.05,
    ("group_norm_backward", "float16", "xla"): 1.15,
    ("linear_softmax_cross_entropy", "float32", "xla"): 1.2,
    ("dot_product_attention_backward", "bfloat16", "pallas"): 1.1,
}
"""Largest permitted `Accuracy.excess` for known faults."""


def test_the_committed_rows_are_of_every_op_and_none_is_too_far():
    for path in RESULTS.glob("accuracy*.json"):
        rows = json.loads(path.read_text())["rows"]
        of_kernels = {row["implementation"] for row in rows} == {"pallas"}
        wanted = {entry.name for entry in CATALOGUE if entry.kernel_dtypes or not of_kernels}
        assert {row["op"] for row in rows} == wanted
        for row in rows:
            key = row["op"], row["dtype"], row["implementation"]
            assert row["excess"] <= SLIGHTLY_BEYOND.get(key, 1), key
