import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal
from jax.test_util import check_grads

import jaxbp
from jaxbp.common import barriers

by_calls = pytest.mark.parametrize("by_calls", [False, True])
"""Whether a call replaces the barrier, which works in every version of jaxlib."""


@pytest.mark.parametrize("barrier", [barriers.optimization_barrier, barriers.on_cpu])
def test_equal_computations_on_two_sides_of_a_barrier_are_not_merged(barrier):
    def program(barrier):
        compiled = jax.jit(lambda x: jnp.sin(x) + jnp.sin(barrier(x))).lower(jnp.ones(1000)).compile()
        return compiled.as_text()

    assert program(lambda x: x).count(" sine(") == 1
    merges = barrier is barriers.on_cpu and jax.default_backend() != "cpu"
    assert program(barrier).count(" sine(") == (1 if merges else 2)


def test_what_is_checkpointed_is_computed_again_in_the_backward_pass_and_not_before():
    weights, x = jnp.ones((4, 4)), jnp.ones(10_000)

    def segment(x, weights):
        for w in weights:
            x = barriers.checkpoint(lambda x, w=w: jnp.sin(w * x))(x)
        return x

    def loss(weights, x):
        for four in weights:
            x = barriers.checkpoint(lambda x, four=four: segment(x, four))(x)
        return jnp.sum(jnp.square(x))

    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    # The inputs of 4 segments and of 4 layers, a gradient, and one other array.
    assert compiled.memory_analysis().temp_size_in_bytes / x.nbytes <= 4 + 4 + 2


@by_calls
def test_derivatives_are_those_of_the_function(by_calls, monkeypatch):
    monkeypatch.setattr(barriers, "REMOVED_EARLY", by_calls)
    weights, x = normal((3, 3), (3,))

    def plain(x):
        return {"y": jnp.tanh(weights @ x["a"]), "i": x["i"] + 1}

    def behind_barriers(x):
        return barriers.checkpoint(lambda x: plain(barriers.optimization_barrier(x)))(x)

    def of_a(f):
        return lambda a: f({"a": a, "i": jnp.arange(2)})

    assert_close(jax.jit(of_a(behind_barriers))(x), of_a(plain)(x), "float32")
    y_of_a = lambda a: of_a(behind_barriers)(a)["y"]  # noqa: E731
    check_grads(y_of_a, (x,), order=2, modes=["fwd", "rev"], atol=1e-2, rtol=1e-2)
    batch = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(y_of_a)(batch), jnp.tanh(batch @ weights.T), rtol=1e-5, atol=1e-6)


def test_calls_in_a_checkpointed_function_are_inlined(monkeypatch):
    monkeypatch.setattr(barriers, "REMOVED_EARLY", True)
    f = barriers.checkpoint(jax.jit(jnp.sin))
    gradient = jax.grad(lambda x: jnp.sum(f(x) ** 2))
    if jax.default_backend() == "cpu":
        assert jax.jit(gradient).lower(jnp.ones(1000)).compile().as_text().count(" call(") == 2


@by_calls
def test_other_backends_have_jaxs_barrier_alone(by_calls, monkeypatch):
    monkeypatch.setattr(barriers, "REMOVED_EARLY", by_calls)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    f = barriers.checkpoint(lambda x: jnp.sin(barriers.optimization_barrier(x)))
    program = cuda_program(jax.grad(lambda x: jnp.sum(f(x) ** 2)), jnp.ones(1000))
    assert "optimization_barrier" in program
    assert "inlineable" not in program


@pytest.mark.parametrize("op", [jaxbp.gelu, jaxbp.gated_linear_unit, jaxbp.log_softmax])
def test_xla_cannot_merge_a_backward_with_its_forward_on_a_gpu(op):
    """The backward multiplies x by a 1 behind a barrier. On a CPU, it has no barrier."""
    arrays = normal(*[(8, 16)] * (2 if op is jaxbp.gated_linear_unit else 1))
    gradient = jax.grad(lambda *arrays: jnp.sum(op(*arrays, implementation="xla") ** 2))
    assert re.search(r"optimization_barrier %\w+ : tensor<f32>", cuda_program(gradient, *arrays))
    assert "optimization_barrier" not in jax.jit(gradient).lower(*arrays).as_text()


@pytest.mark.parametrize("shapes", [[(8, 16), (16,)], [(8, 16), ()], [(8, 1), (8, 16)]])
@pytest.mark.parametrize("backward", [jaxbp.maximum_backward, jaxbp.divide_backward, jaxbp.power_backward])
def test_no_array_is_multiplied_that_is_broadcast(backward, shapes):
    """Its product with the 1 behind a barrier would need a launch. Where all arrays are, the products are needed."""
    arrays = [abs(a) for a in normal((8, 16), *shapes)]
    program = cuda_program(functools.partial(backward, implementation="xla"), *arrays)
    assert program.count("stablehlo.optimization_barrier") == 1
    program = cuda_program(functools.partial(backward, implementation="xla"), *normal((8, 16), (8, 1), (16,)))
    assert program.count("stablehlo.optimization_barrier") == 2


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")])
@pytest.mark.parametrize("op", [jaxbp.relu, jaxbp.softmax])
def test_xla_stores_the_result_of_an_op_that_keeps_only_its_result(op, dtype, name):
    gradient = jax.grad(lambda x: jnp.sum(op(x, implementation="xla") ** 2))
    program = cuda_program(gradient, jnp.ones((8, 16), dtype))
    stored = [line for line in program.splitlines() if "optimization_barrier" in line]
    assert [f"tensor<8x16x{name}>" in line for line in stored] == [True]
