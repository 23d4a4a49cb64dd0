import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.catalogue import CATALOGUE, Argument, Case
from jaxbp.common.numerics import upcast
from jaxbp.pairing import Pair
from jaxbp.verify.arguments import take_apart
from tests.qa.programs import Program
from tests.qa.trial import Trial

ENTRIES = {entry.name: entry for entry in CATALOGUE}


def judged(entry, values, cotangent, transformation="plain", **options):
    case = Case(tuple(Argument(a.shape) for a in values), options)
    program = Program(entry, case, cotangent.dtype.name, "xla", transformation)
    return Trial(program, take_apart(entry.function, values)).run(values, [cotangent])


def drawn(*shapes, size=1.0):
    random = np.random.default_rng(0)
    return [(size * random.standard_normal(shape)).astype(jnp.bfloat16) for shape in shapes]


def of_one_argument(forward, backward):
    pair = Pair(forward, {"xla": backward}, name="tanh")
    return dataclasses.replace(
        ENTRIES["tanh"], function=lambda x, *, implementation: pair(x, implementation=implementation)
    )


def test_arguments_that_an_implementation_does_not_take_are_refused():
    def forward(x, *, implementation):
        if implementation == "xla":
            raise NotImplementedError("tanh: implementation='xla' does not take them")
        return jnp.tanh(x)

    with pytest.raises(NotImplementedError, match="does not take them"):
        judged(dataclasses.replace(ENTRIES["tanh"], function=forward), [np.ones(3)], np.ones(3))


def test_terms_that_cancel_exactly_in_autodiff_by_luck_may_leave_a_rounding():
    *values, dy = drawn((3, 4, 1), (1,), (1,), (3, 4, 1))
    assert judged(ENTRIES["layer_norm"], values, dy, "gradient_of_gradient", epsilon=1e-6) is None


@pytest.mark.parametrize("columns", [1, 5])
def test_a_forgotten_term_is_found_also_where_the_gradient_is_0(columns):
    centered = lambda x: x - jnp.mean(x, axis=-1, keepdims=True)  # noqa: E731
    x, dy = drawn((6, columns), (6, columns))
    assert judged(of_one_argument(centered, lambda dy, x: centered(dy)), [x], dy) is None
    assert "(float64)" in judged(of_one_argument(centered, lambda dy, x: dy), [x], dy)


@pytest.mark.parametrize(("dy", "found"), [(2e3, True), (8e3, False)])
def test_a_sum_may_overflow_where_autodiff_nearly_does(dy, found):
    """The terms are in float16. Autodiff adds them in float32."""
    forward = lambda x: ((wide := upcast(x)) * 80 - 76 * wide).astype(x.dtype)  # noqa: E731
    entry = of_one_argument(forward, lambda dy, x: 80 * dy - 76 * dy)
    message = judged(entry, [np.ones(3, np.float16)], np.full(3, dy, np.float16))
    assert (message is not None) == found


@pytest.mark.parametrize(("dy", "found"), [(1e-2, True), (1e4, False)])
def test_nan_in_the_gradient_of_an_argument_that_is_not_mapped_needs_a_term_that_overflows(dy, found):
    """The terms of the two mapped examples cancel."""

    def backward(dy, x, w):
        return dy * w, dy * jnp.where(jnp.abs(x) > 100, jnp.nan, x)

    pair = Pair(lambda x, w: (upcast(x) * upcast(w)).astype(x.dtype), {"xla": backward}, name="multiply")
    multiply = lambda x, w, *, implementation: pair(x, w, implementation=implementation)  # noqa: E731
    entry = dataclasses.replace(ENTRIES["multiply"], function=multiply)
    x, w = np.full(3, 128, np.float16), np.ones(3, np.float16)
    message = judged(entry, [x, w], np.array([[dy] * 3, [-2 * dy] * 3], np.float16), "vmapped_in_one")
    assert (message is not None) == found


@pytest.mark.parametrize(("factor", "found"), [(2.0**40, False), (2.0**10, True)])
def test_infinity_is_accepted_only_where_a_rounding_error_reaches_it(factor, found):
    """The gradient is `factor dy - (factor - 1) dy`, which loses digits for a large factor."""
    forward = lambda x: ((wide := upcast(x)) * factor - wide * (factor - 1)).astype(x.dtype)  # noqa: E731
    entry = of_one_argument(forward, lambda dy, x: jnp.full_like(x, jnp.inf))
    message = judged(entry, [np.ones(3, np.float16)], np.ones(3, np.float16))
    assert (message is not None) == found


def test_an_invalid_label_may_give_nan_to_hidden_units_that_are_off_but_not_to_other_examples():
    entry = ENTRIES["mlp_softmax_cross_entropy"]
    program = Program(entry, entry.small, "float32", "pallas", "gradient_of_gradient", False, invalid_labels=True)
    arguments = program.arguments(np.random.default_rng(0), "normal")
    arguments.floats[2][0] = -100  # the bias of a hidden unit
    with jax.default_matmul_precision("default"):  # the kernels multiply in TF32
        trial, dy = Trial(program, arguments), np.ones((2, 3), np.float32)
        assert trial.run(arguments.floats, [dy]) is None
    ours = trial._ours.results
    trial._ours.results = lambda *point: [np.full_like(a, np.nan) for a in ours(*point)]
    assert "not finite" in trial.run(arguments.floats, [dy])
