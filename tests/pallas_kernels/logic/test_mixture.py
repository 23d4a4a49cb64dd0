import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, in_float64, normal, on_the_cpu

from jaxbp.logic import gates
from jaxbp.logic.ops.gate_layer import _TABLE
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import mixture as kernels

FORWARD = functools.partial(kernels.mixture, table=_TABLE, config=kernels.Config())
BACKWARD = functools.partial(kernels.mixture_gradient, table=_TABLE, config=kernels.Config())


def operands(count, scale=1.0):
    dc, logits = normal((count, 4), (count, 16))
    return dc, scale * logits


@pytest.mark.parametrize("count", [1, 128, 150])
def test_the_simulator_finds_them_right(count):
    dc, logits = operands(count)
    with on_the_cpu(), simulated():
        c, dlogits = jax.jit(FORWARD)(logits), jax.jit(BACKWARD)(dc, logits)
    assert_close(c, in_float64(jax.jit(gates.softmax), logits), "float32")
    assert_close(dlogits, in_float64(jax.jit(gates.softmax_backward), dc, logits), "float32")


def test_gates_may_have_several_axes():
    dc, logits = (a.reshape(2, 3, -1) for a in operands(6))
    with on_the_cpu(), simulated():
        c, dlogits = jax.jit(FORWARD)(logits), jax.jit(BACKWARD)(dc, logits)
    assert_close(c, in_float64(jax.jit(gates.softmax), logits), "float32")
    assert_close(dlogits, in_float64(jax.jit(gates.softmax_backward), dc, logits), "float32")


def test_a_function_that_is_nearly_sure_keeps_its_small_gradient():
    dc, logits = operands(4)
    logits = logits.at[:, 6].add(25.0)
    with on_the_cpu(), simulated():
        dlogits = jax.jit(BACKWARD)(dc, logits)
    reference = in_float64(jax.jit(gates.softmax_backward), dc, logits)
    assert np.linalg.norm(reference) < 1e-8
    assert_close(dlogits, reference, "float32")


def test_they_lower_for_cuda_and_read_and_write_each_array_once():
    dc, logits = operands(1000)
    for function, arrays in ((FORWARD, (logits,)), (BACKWARD, (dc, logits))):
        assert cuda_program(function, *arrays).count("custom_call @mosaic_gpu") == 1


def test_what_they_take():
    dc, logits = operands(8)
    assert kernels.mixture_gradient.unsupported(dc, logits, table=_TABLE) is None
    assert (
        kernels.mixture_gradient.unsupported(dc, logits.astype("bfloat16"), table=_TABLE)
        == "dtype bfloat16, only float32"
    )
    assert kernels.mixture_gradient.unsupported(dc[:0], logits[:0], table=_TABLE) == "no gates"
    assert "a table of 15 x 4" in kernels.mixture.unsupported(logits, table=_TABLE[:15])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8000, 64000])
def test_gpu_results_match_float64_and_repeat_their_bits(count):
    dc, logits = operands(count, scale=3.0)
    c, dlogits = jax.jit(FORWARD)(logits), jax.jit(BACKWARD)(dc, logits)
    assert_close(c, in_float64(jax.jit(gates.softmax), logits), "float32")
    assert_close(dlogits, in_float64(jax.jit(gates.softmax_backward), dc, logits), "float32")
    for results, again in ((c, jax.jit(FORWARD)(logits)), (dlogits, jax.jit(BACKWARD)(dc, logits))):
        assert jnp.array_equal(results, again)
