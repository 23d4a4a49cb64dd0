import dataclasses
import functools
import html
import io
import re
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

import jaxbp
from jaxbp import Pair
from jaxbp.nnx import Linear
from jaxbp.verify import compare
from jaxbp.verify.compare import _one_after_another
from jaxbp.verify.comparison import Comparison, Difference, Measured, Program

X = np.linspace(-2, 2, 6, dtype=np.float32)
RIGHT = Pair(jnp.sin, {"xla": lambda dy, x: dy * jnp.cos(x)}, name="sine")
WRONG = Pair(jnp.sin, {"xla": lambda dy, x: 1.5 * dy * jnp.cos(x)}, name="wrong")

quickly = functools.partial(compare, seconds=1e-3)


def test_implementations_that_compute_the_same_do_not_differ():
    result = quickly(RIGHT, X)
    assert [one.implementation for one in result.measured] == ["autodiff", "pallas", "xla"]
    xla = result.measured[2]
    assert {one.kind for one in xla.differences} == {"value", "gradient", "hessian product"}
    assert all(one.relative < 1e-6 for one in xla.differences)


def test_a_difference_is_measured_where_it_is():
    (_, xla) = quickly(WRONG, X, implementations=["xla"]).measured
    assert xla.difference("value", "value").relative == 0
    assert xla.difference("gradient", xla.differences[1].name).relative == pytest.approx(0.5, rel=1e-5)
    assert xla.largest("hessian product").relative == pytest.approx(0.5, rel=1e-5)


def test_a_nan_is_as_far_off_as_can_be_unless_both_have_it():
    broken = Pair(jnp.sqrt, {"xla": lambda dy, x: (dy / (2 * jnp.sqrt(x))).at[0].set(jnp.nan)}, name="broken")
    for first, off in ((1.0, np.inf), (-1.0, 0.0)):
        x = np.array([first, 4.0], np.float32)
        (_, xla) = quickly(broken, x, implementations=["xla"], second_order=False).measured
        assert xla.largest("gradient").absolute == off


def test_costs_are_those_of_the_compiled_programs():
    (_, xla) = quickly(RIGHT, np.ones(1000, np.float32), implementations=["xla"]).measured
    assert xla.gradients.microseconds > 0 and xla.gradients.compile_seconds > 0
    assert xla.gradients.peak_bytes >= 4 * 4000
    assert xla.hessian_product.peak_bytes > xla.gradients.temporary_bytes


def test_the_program_that_is_timed_on_a_gpu_computes_every_call():
    calls = []

    def function(x):
        jax.debug.callback(lambda: calls.append(1))
        return (jnp.sin(x), {"twice": 2 * x})

    run = jax.jit(functools.partial(_one_after_another, function, 3, function(X)))
    calls.clear()
    sine, twice = jax.block_until_ready(run(X))
    jax.effects_barrier()
    assert len(calls) == 3
    np.testing.assert_allclose(sine, np.sin(X), rtol=1e-6)
    np.testing.assert_array_equal(twice["twice"], 2 * X)


def test_an_implementation_that_fails_says_why_and_the_others_are_compared():
    result = quickly(RIGHT, X, second_order=False)
    _, pallas, xla = result.measured
    assert "has no implementation 'pallas'" in pallas.failed and pallas.gradients is None
    assert xla.failed is None and xla.gradients is not None and xla.hessian_product is None
    assert "sine has no kernel" in str(result) and "failed" not in str(result)


def test_parameters_are_named_in_pytrees_and_in_models():
    def of_pytree(params, x, *, implementation):
        return jnp.mean(jaxbp.linear(x, params["w"], params["b"], implementation=implementation))

    def of_model(model, x, *, implementation):
        return jnp.mean(jaxbp.linear(x, model.kernel[...].T, model.bias[...], implementation=implementation))

    x, w, b = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32), np.ones(4, np.float32)
    model = Linear(3, 4, rngs=nnx.Rngs(0))
    for function, first, names in (
        (of_pytree, {"w": w, "b": b}, {"params.w", "params.b"}),
        (of_model, model, {"model.kernel", "model.bias"}),
    ):
        result = quickly(function, first, x, implementations=["xla"], argnums=[0])
        assert {one.name for one in result.measured[1].differences if one.kind == "gradient"} == names
        assert all(one.relative < 1e-6 for one in result.measured[1].differences)
        assert all(name in str(result) for name in names)


def test_integers_and_keys_are_arguments_like_others():
    def noisy(x, labels, key, *, implementation):
        logits = x + jax.random.normal(key, x.shape)
        return jaxbp.softmax_cross_entropy(logits, labels, implementation=implementation)

    arguments = (np.ones((2, 3), np.float32), np.array([0, 2]), jax.random.key(0))
    (_, xla) = quickly(noisy, *arguments, implementations=["xla"]).measured
    assert xla.failed is None and [one.name for one in xla.differences] == ["value", "x", "x"]


def test_the_costs_fit_80_columns():
    program = Program(12345.6, 1.0, 12.34, 2**27, 2**27)
    differences = (Difference("gradient", "params.block.weight", (3,), 1e-7, 1e-7),)
    measured = Measured("autodiff", differences, program, program)
    text = io.StringIO()
    Comparison("f", "cpu", "autodiff", (measured,)).show(Console(file=text, width=80))
    costs, _ = text.getvalue().split("differences from")
    assert all(len(line) <= 80 for line in costs.splitlines()) and "…" not in costs
    assert re.search(r"│ autodiff │ gradient │ 12345.6 │ +100% │ 128.00, 128.00 │ +12.34 │ 1.0e-07 +│", costs)


def test_a_reference_that_fails_and_nothing_to_differentiate_are_refused():
    with pytest.raises(NotImplementedError, match="sine: has no implementation 'pallas'"):
        quickly(RIGHT, X, reference="pallas")
    with pytest.raises(ValueError, match="compare: sine has no floating argument"):
        quickly(RIGHT, np.arange(3))
    with pytest.raises(ValueError, match="compare: sine has no floating argument among argnums 1"):
        quickly(RIGHT, X, argnums=1)
    with pytest.raises(TypeError, match="compare: implementations is 'xla'; wants a sequence"):
        quickly(RIGHT, X, implementations="xla")


def test_a_function_that_ignores_the_implementation_is_told_so():
    result = quickly(lambda x, *, implementation: jnp.sin(x) * x, X, second_order=False)
    assert [one.same_as for one in result.measured] == [None, "autodiff", "autodiff"]
    assert result.verdict[0].startswith("pallas compiles to the same program as autodiff")
    assert "does the function pass `implementation=` on?" in str(result)
    assert quickly(WRONG, X, implementations=["xla"], second_order=False).measured[1].same_as is None


def test_the_verdict_says_how_fast_and_how_far_off():
    comparison = quickly(RIGHT, X, implementations=["xla", "pallas"], second_order=False)
    gradients = dataclasses.replace(comparison.measured[0].gradients, microseconds=10.0, host_waited=1.0, fastest=None)

    def verdict(ratio, relative):
        wrong = dict(mistakes=2, worst="x[3] is 1.5; wants 1") if relative > 0.1 else {}
        difference = Difference("gradient", "x", (6,), relative, relative, **wrong)
        slower = dataclasses.replace(gradients, microseconds=10.0 * ratio)
        other = Measured("xla", (difference,), slower)
        return dataclasses.replace(comparison, measured=(Measured("autodiff", (), gradients), other)).verdict[0]

    assert verdict(1 / 48, 3e-7) == "xla 48x faster; differences at most 3e-07: rounding"
    assert verdict(2.5, 0) == "xla 2.5x slower; no difference"
    assert (
        verdict(1.01, 0.5) == "xla as fast; more than rounding in 2 of 6 elements of gradient x: x[3] is 1.5; wants 1"
    )
    assert comparison.verdict[1] == "sine has no kernel"


def test_a_ratio_has_the_spread_of_its_rounds():
    reference, one = (Program(t, 1.0, 0.1, 0, 0, t - 1, t + 1) for t in (20.0, 5.0))
    same = (Difference("value", "x", (), 0.0, 0.0),)
    measured = Measured("autodiff", same, reference), Measured("xla", same, one)
    (said,) = Comparison("f", "cpu", "autodiff", measured).verdict
    assert said == "xla 4.0x faster (3.2x to 5.2x); no difference"
    (said,) = Comparison("f", "cpu", "xla", measured[::-1]).verdict
    assert said.startswith("autodiff 4.0x slower (3.2x to 5.2x)")


def test_a_custom_rule_whose_forward_calls_the_function_has_a_hessian_in_reverse():
    def pair(implementation):
        @jax.custom_vjp
        def sine(x):
            return jnp.sin(x)

        sine.defvjp(lambda x: (sine(x), x), lambda x, dy: (dy * jnp.cos(x),))
        return jnp.sin if implementation == "autodiff" else sine

    function = lambda x, *, implementation: pair(implementation)(x)  # noqa: E731
    (_, xla) = quickly(function, X, implementations=["xla"]).measured
    assert xla.failed is None and xla.largest("hessian product").relative < 1e-6


def test_a_comparison_is_a_page_of_its_own(tmp_path):
    comparison = quickly(WRONG, X, implementations=["xla", "pallas"], second_order=False)
    comparison.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    first = next(element for element in root.iter("p"))
    assert first.get("class") == "verdict" and "more than rounding" in first.text
    assert "wrong: autodiff, xla, pallas" in text and "wrong has no kernel" in html.unescape(text)
    assert not {element.tag for element in root.iter()} & {"script", "link", "img"}
    bars = [len(bar) for bar in re.findall("█+", text)]
    assert len(bars) == 4 and max(bars) == 60


def _sums(wrong):
    """Sum rows of x, times w, by a backward with the mistake `wrong(dx, dw)`."""
    forward = lambda x, w: (x * w).sum(axis=0)  # noqa: E731
    right = lambda dy, x, w: (dy * w * jnp.ones_like(x), (dy * x).sum(axis=0))  # noqa: E731
    return Pair(forward, {"xla": lambda dy, x, w: wrong(*right(dy, x, w))}, name="sums")


MISTAKES = {
    "a lost row": (_sums(lambda dx, dw: (dx.at[700].set(0), dw)), (1024, 4), jnp.bfloat16),
    "4% too large": (_sums(lambda dx, dw: (dx, (1.04 * dw).astype(dw.dtype))), (8, 16), jnp.bfloat16),
    "one element": (_sums(lambda dx, dw: (dx.at[5, 7].multiply(1.03), dw)), (1000, 100), np.float32),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_more_than_rounding(name):
    pair, shape, dtype = MISTAKES[name]
    data = [np.random.default_rng(0).standard_normal(s).astype(dtype) for s in (shape, shape[1:])]
    (verdict,) = quickly(pair, *data, implementations=["xla"], second_order=False).verdict
    assert "more than rounding in" in verdict
    if name == "one element":
        assert "in 1 of 100,000 elements of gradient x: x[5, 7] is " in verdict
    right = quickly(_sums(lambda *gradients: gradients), *data, implementations=["xla"], second_order=False)
    assert "more than rounding" not in right.verdict[0]


def test_another_choice_at_ties_is_no_mistake():
    x = np.round(2 * np.random.default_rng(0).standard_normal((8, 16))).astype(jnp.bfloat16)
    ties = quickly(jaxbp.max, x, axis=1, implementations=["xla"], second_order=False)
    assert ties.measured[1].largest("gradient").absolute > 0.1 and "more than rounding" not in ties.verdict[0]


def test_a_reference_with_larger_rounding_errors_is_no_mistake_of_the_others():
    def one_by_one(x):
        return jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros_like(x[0]), x)[0]

    exact = lambda x: (x.astype(jnp.float32).sum(axis=0).astype(x.dtype), (x,))  # noqa: E731
    backward = lambda dy, x: jnp.broadcast_to(dy, x.shape)  # noqa: E731
    pair = Pair(one_by_one, {"xla": backward}, save=exact, name="sum")
    x = np.random.default_rng(0).uniform(1, 2, (400, 3)).astype(jnp.bfloat16)
    result = quickly(pair, x, implementations=["xla"], second_order=False)
    assert result.measured[1].largest("value").relative > 0.1 and "more than rounding" not in result.verdict[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    return factor * jnp.sin(x)


scaled.defvjp(lambda x, factor: (scaled(x, factor), x), lambda factor, x, dy: (1.5 * factor * dy * jnp.cos(x),))


def test_a_custom_vjp_is_compared_with_autodiff_of_its_forward():
    result = quickly(lambda x: scaled(x, 2.0), X, second_order=False)
    autodiff, rules = result.measured
    assert [one.implementation for one in (autodiff, rules)] == ["autodiff", "custom rules"]
    assert rules.largest("gradient").relative == pytest.approx(0.5, rel=1e-5)
    assert rules.largest("value").relative == 0
    (verdict,) = quickly(jnp.sin, X, second_order=False).verdict
    assert verdict.endswith(
        "the same program as autodiff; does the function have a custom rule, or take `implementation=`?"
    )


@pytest.mark.parametrize("function", [compare, jaxbp.verify.check, jaxbp.verify.find_nan])
def test_an_array_for_nondiff_argnums_is_explained(function):
    message = rf"^{function.__name__}: scaled passes an array or a number at a position in `nondiff_argnums`, which"
    with pytest.raises(TypeError, match=message):
        function(scaled, X, np.float32(2))


def test_times_of_the_interpreter_are_marked():
    text = str(quickly(jaxbp.relu, X, implementations=["pallas", "xla"], second_order=False))
    assert ("pallas, interpreter" in text) == (jax.default_backend() == "cpu") and "xla, interpreter" not in text
