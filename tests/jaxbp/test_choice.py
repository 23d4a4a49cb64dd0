"""How an op picks its implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, on_the_cpu

import jaxbp
from jaxbp import Fastest, Op, Pair
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.pointwise.elementwise import elementwise

X = jnp.linspace(-1, 1, 5)
# Three functions that tell in a program which of them was taken.
MARKS = {"pallas": jnp.tan, "xla": jnp.sin, "autodiff": jnp.cos}
MARK = {"tan": "pallas", "sine": "xla", "cosine": "autodiff"}


def taken_in(program):
    (mark,) = [mark for mark in MARK if f".{mark} " in program]
    return MARK[mark]


def marked(names=jaxbp.IMPLEMENTATIONS, **settings):
    return Op("marked", {name: MARKS[name] for name in names}, **settings)


OLDER = dataclasses.replace(HOPPER, kind="NVIDIA A100", capability=(8, 0))


@pytest.fixture(params=[True, False], ids=["kernels run", "kernels do not run"])
def kernels_run(request):
    with targeting(HOPPER if request.param else OLDER):
        yield request.param


@pytest.fixture
def run_on_the_cpu():
    with on_the_cpu():
        yield


# ---------------------------------------------------------------------------------------------------- asked for by name


@pytest.mark.parametrize("implementation", jaxbp.IMPLEMENTATIONS)
def test_the_implementation_asked_for_is_taken_on_every_platform(implementation, kernels_run):
    call = functools.partial(marked(), implementation=implementation)
    np.testing.assert_array_equal(call(X), MARKS[implementation](X))
    assert taken_in(cuda_program(call, X)) == implementation


def test_an_op_with_an_unknown_implementation_cannot_be_made():
    with pytest.raises(
        ValueError, match=r"^marked: implementations has \['cuda', 'triton'\]; wants names among \('pallas'"
    ):
        Op("marked", dict.fromkeys(["xla", "triton", "cuda"], jnp.sin))


def test_what_a_kernel_does_not_take_is_refused_by_name():
    op = marked(unsupported=lambda x, **options: f"arrays of {x.size}" if x.size > 3 else None)
    np.testing.assert_array_equal(op(X[:3], implementation="pallas"), jnp.tan(X[:3]))
    with pytest.raises(NotImplementedError) as error:
        op(X, implementation="pallas")
    message = "marked: implementation='pallas' does not take arrays of 5; 'xla', 'autodiff' and None do"
    assert str(error.value) == message


def test_the_same_op_under_another_name_has_it_in_its_messages():
    with pytest.raises(ValueError, match=r"^renamed: implementation is 'cuda'; wants"):
        marked().named("renamed")(X, implementation="cuda")


# ---------------------------------------------------------------------------------------------------- None, the fastest


FASTEST = Fastest(gpu="pallas", older_gpu="autodiff", elsewhere="xla")


def test_none_takes_the_fastest_for_the_platform_that_it_is_lowered_for(kernels_run, run_on_the_cpu):
    op = marked(fastest=FASTEST)
    assert taken_in(cuda_program(op, X)) == ("pallas" if kernels_run else "autodiff")
    assert taken_in(jax.jit(op).lower(X).as_text()) == "xla"
    np.testing.assert_array_equal(jax.jit(op)(X), jnp.sin(X))


def test_none_without_jit_takes_the_fastest_for_the_platform_that_it_runs_on(kernels_run, run_on_the_cpu):
    np.testing.assert_array_equal(marked(fastest=FASTEST)(X), jnp.sin(X))


@pytest.mark.parametrize("gpu", jaxbp.IMPLEMENTATIONS)
@pytest.mark.parametrize("elsewhere", jaxbp.IMPLEMENTATIONS)
def test_what_is_said_to_be_fastest_is_taken(gpu, elsewhere, on_hopper, run_on_the_cpu):
    op = marked(fastest=Fastest(gpu=gpu, elsewhere=elsewhere))
    assert taken_in(cuda_program(op, X)) == gpu
    np.testing.assert_array_equal(op(X), MARKS[elsewhere](X))


def test_none_takes_what_is_fastest_on_older_gpus_for_what_a_kernel_does_not_take(on_hopper):
    op = marked(fastest=FASTEST, unsupported=lambda x: "anything")
    assert taken_in(cuda_program(op, X)) == "autodiff"


@pytest.mark.parametrize(
    ("has", "taken"),
    [(["autodiff"], "autodiff"), (["xla"], "xla"), (["pallas"], "pallas"), (["pallas", "autodiff"], "autodiff")],
    ids=str,
)
def test_none_takes_the_next_best_where_the_fastest_is_lacking(has, taken):
    np.testing.assert_array_equal(marked(has, fastest=Fastest("xla", "xla", "xla"))(X), MARKS[taken](X))


# ---------------------------------------------------------------------------------------------- None, with real kernels


def square_gradient(dy, x):
    return 2 * x * dy


SQUARE = Pair(
    lambda x: x * x,
    {"xla": square_gradient, "pallas": functools.partial(elementwise, square_gradient)},
    name="square",
)


gradient_of_square = jax.grad(lambda x: jnp.sum(SQUARE(x)))


def test_a_kernel_is_lowered_for_cuda_where_kernels_run(kernels_run):
    assert ("mosaic_gpu" in cuda_program(gradient_of_square, X)) == kernels_run


def test_the_same_function_lowered_for_the_cpu_is_right_and_has_nothing_of_the_kernel(on_hopper, run_on_the_cpu):
    compiled = jax.jit(gradient_of_square).lower(X).compile()
    assert_close(compiled(X), 2 * X, "float32")
    program = compiled.as_text()
    assert "conditional" not in program
    assert "custom-call" not in program


def test_second_derivatives_lower_for_both_platforms(on_hopper, run_on_the_cpu):
    second = jax.grad(lambda x: jnp.sum(gradient_of_square(x)))
    assert_close(jax.jit(second)(X), 2 + 0 * X, "float32")
    assert cuda_program(second, X)


def test_what_is_fastest_may_depend_on_the_arguments():
    fastest = lambda x: Fastest(elsewhere="xla" if x.size > 1 else "autodiff")  # noqa: E731
    op = Op("op", {"xla": lambda x: x + 1, "autodiff": lambda x: x + 2}, fastest=fastest)
    with on_the_cpu():
        assert [float(op(jnp.zeros(n))[0]) for n in (1, 2)] == [2.0, 1.0]
