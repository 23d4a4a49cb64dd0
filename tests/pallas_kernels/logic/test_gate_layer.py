"""The gates' backward, along the trail, input by input and apart: in the simulator, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program, in_float64, normal, on_the_cpu

from jaxbp import Wires
from jaxbp.ops import gate_layer as op
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import gate_layer as kernels

WIRES = {
    "few consumers": lambda: Wires.unique(6, 6, seed=0),  # at most three
    "many consumers": lambda: Wires.random(3, 10, seed=0),
    "no consumers": lambda: Wires.from_pairs([0, 0, 7], [7, 0, 1], 8),
}
REGULAR = {
    "two consumers": lambda: Wires.random(6, 6, seed=0),
    "four consumers": lambda: Wires.random(5, 10, seed=0),
    "one input twice": lambda: Wires.from_pairs([2, 0, 1], [2, 1, 0], 3),
}


def operands(wires, N, dtype="float32"):
    dy, coefficients, x = normal((wires.gates, N), (wires.gates, 4), (wires.inputs, N))
    return dy.astype(dtype), coefficients, wires, x.astype(dtype)


def reference(dy, coefficients, wires, x):
    dc, _, dx = in_float64(lambda *a: op._gradients_formula(a[0].T, a[1], wires, a[2].T), dy, coefficients, x)
    return dx.T, dc


@pytest.mark.parametrize(
    ("name", "wires", "N"),
    [(name, wires, LANES) for name in ("_gradients_in_one", "_gradients_apart") for wires in WIRES]
    + [("_gradients_along_trail", wires, LANES) for wires in REGULAR]
    + [("_gradients_along_trail", "one input twice", 15 * LANES)],  # three programs of five vectors
)
def test_the_simulator_finds_them_right(name, wires, N):
    if name != "_gradients_in_one" and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    arrays = operands((WIRES | REGULAR)[wires](), N)
    with on_the_cpu(), simulated():
        results = getattr(kernels, name)(*arrays)
    assert_close(results, reference(*arrays), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 4096])
def test_they_lower_for_cuda(N, dtype):
    for name, wires in (WIRES | REGULAR).items():
        text = cuda_program(kernels.gradients, *operands(wires(), N, dtype))
        assert text.count("custom_call @mosaic_gpu") == (2 if name in WIRES and N <= kernels._SMALL_BATCH else 1)


@pytest.mark.parametrize(
    ("inputs", "gates", "N", "kernel"),
    [
        (8000, 8000, 128, "along_trail"),
        (4000, 8000, 8192, "along_trail"),
        (7999, 8000, 1024, "input"),
        (2000, 3000, 1024, "input"),
        (784, 64000, 1024, "input"),
        (7999, 8000, 1152, ""),
        (63999, 64000, 256, ""),
        (1000, 8000, 2048, ""),
    ],
)
def test_which_kernel_makes_them(inputs, gates, N, kernel):
    arrays = [((gates, N), jnp.float32), ((gates, 4), jnp.float32), ((inputs, N), jnp.float32)]
    dy, coefficients, x = (jax.ShapeDtypeStruct(*array) for array in arrays)
    wires = jax.eval_shape(lambda: Wires.random(inputs, gates, seed=0))
    program = str(jax.make_jaxpr(kernels.gradients)(dy, coefficients, wires, x))
    names = {name: f"gate_layer_backward_{name}" in program for name in ("along_trail", "input")}
    assert names == {name: name == kernel for name in names}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 1024, 1152])
@pytest.mark.parametrize("inputs", [784, 4000, 7999, 8000])
def test_gpu_results_match_float64_and_repeat_their_bits(inputs, N, dtype):
    arrays = operands(Wires.unique(inputs, 8000, seed=0), N, dtype)
    run = jax.jit(kernels.gradients)
    results = run(*arrays)
    dx, dc = reference(*arrays)
    assert_close(results[0], dx, dtype)
    assert_close(results[1], dc, "float32")
    assert all(jnp.array_equal(a, b) for a, b in zip(results, run(*arrays), strict=True))
