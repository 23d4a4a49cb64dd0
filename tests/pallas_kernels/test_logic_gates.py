"""The gates' backward, in one kernel and apart: in the simulator, lowered for CUDA, and on a GPU."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program, in_float64, normal, on_the_cpu

from jaxbp import Wires
from jaxbp.ops import logic_gates as op
from pallas_kernels import logic_gates as kernels
from pallas_kernels.launch import LANES, simulated

WIRES = {
    "few consumers": lambda: Wires.unique(6, 6, seed=0),  # at most three
    "many consumers": lambda: Wires.random(3, 10, seed=0),
    "no consumers": lambda: Wires.from_pairs([0, 0, 7], [7, 0, 1], 8),
}
every_wiring = pytest.mark.parametrize("wires", WIRES.values(), ids=WIRES)


def operands(wires, N, dtype="float32"):
    dy, coefficients, x = normal((wires.gates, N), (wires.gates, 4), (wires.inputs, N))
    return dy.astype(dtype), coefficients, wires, x.astype(dtype)


def reference(dy, coefficients, wires, x):
    dc, _, dx = in_float64(lambda *a: op._gradients_formula(a[0].T, a[1], wires, a[2].T), dy, coefficients, x)
    return dx.T, dc


@every_wiring
@pytest.mark.parametrize("name", ["_gradients_in_one", "_gradients_apart"])
def test_the_simulator_finds_them_right(name, wires):
    if name == "_gradients_apart" and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    arrays = operands(wires(), LANES)
    with on_the_cpu(), simulated():
        results = getattr(kernels, name)(*arrays)
    assert_close(results, reference(*arrays), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 4096])
def test_they_lower_for_cuda(N, dtype):
    text = cuda_program(kernels.gradients, *operands(WIRES["many consumers"](), N, dtype))
    assert text.count("mosaic_gpu") >= (1 if N > kernels._SMALL_BATCH else 2)


@pytest.mark.parametrize(("gates", "N", "apart"), [(8000, 1024, True), (8000, 1152, False), (64000, 256, False)])
def test_small_arrays_go_apart(gates, N, apart):
    wires = jax.eval_shape(lambda: Wires.random(gates, gates, seed=0))
    rows = jax.ShapeDtypeStruct((gates, N), jnp.float32)
    program = jax.make_jaxpr(kernels.gradients)(rows, jax.ShapeDtypeStruct((gates, 4), jnp.float32), wires, rows)
    assert ("gate_layer_backward_input" in str(program)) == apart


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 1024, 1152])
@pytest.mark.parametrize("inputs", [784, 8000])
def test_gpu_results_match_float64_and_repeat_their_bits(inputs, N, dtype):
    arrays = operands(Wires.unique(inputs, 8000, seed=0), N, dtype)
    run = jax.jit(kernels.gradients)
    results = run(*arrays)
    dx, dc = reference(*arrays)
    assert_close(results[0], dx, dtype)
    assert_close(results[1], dc, "float32")
    assert all(jnp.array_equal(a, b) for a, b in zip(results, run(*arrays), strict=True))
