import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu, skipped_outputs

from jaxbp import LearnedWires
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import learned_wires as kernels

WIRES = {
    "half of a tile of sums": lambda: LearnedWires.random(5, 4, seed=0, candidates=2, gates_per_group=2),
    "a tile and a part": lambda: LearnedWires.random(9, 8, seed=0, candidates=5, gates_per_group=4),
    "four tiles": lambda: LearnedWires.random(20, 8, seed=0, candidates=8),
}


def operands(wires, N, dtype="float32"):
    dy, weights, x = normal((2 * wires.gates, N), (2 * wires.gates, wires.choices), (wires.inputs, N))
    return dy.astype(dtype), weights, wires.candidates, x.astype(dtype)


def reference(dy, weights, candidates, x):
    values, groups = x[candidates].astype(jnp.float32), len(candidates)
    weights, of_group = weights.reshape(groups, -1, candidates.shape[1]), dy.reshape(groups, -1, dy.shape[1])
    y = jnp.einsum("qwk,qkn->qwn", weights, values).reshape(dy.shape)
    dweights = jnp.einsum("qwn,qkn->qwk", of_group.astype(jnp.float32), values)
    dvalues = jnp.einsum("qwk,qwn->qkn", weights, of_group.astype(jnp.float32))
    return y, (dvalues.reshape(-1, dy.shape[1]), dweights.reshape(-1, candidates.shape[1]))


@pytest.mark.parametrize(
    ("wires", "N", "dtype"),
    list(zip(WIRES, (LANES, 6 * LANES, LANES), ("float32", "bfloat16", "float32"), strict=True)),
)
def test_the_simulator_finds_them_right(wires, N, dtype):
    if jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    arrays = operands(WIRES[wires](), N, dtype)
    y, gradients = reference(*arrays)
    with on_the_cpu(), simulated():
        assert_close(kernels.mixtures(*arrays[1:]), y, dtype)
        assert_close(kernels.mixtures_gradients(*arrays), gradients, "float32")


@pytest.mark.parametrize("skipped", [0, 1], ids=["dv", "dweights"])
def test_one_gradient_alone_is_the_same(skipped):
    arrays = operands(WIRES["a tile and a part"](), LANES)
    with on_the_cpu(), skipped_outputs(kernels, skipped):
        results = kernels.mixtures_gradients(*arrays)
    assert_close(results[1 - skipped], reference(*arrays)[1][1 - skipped], "float32")


@pytest.mark.parametrize(("N", "dtype"), [(128, "bfloat16"), (384, "float32"), (4096, "float16")])
def test_they_lower_for_cuda(N, dtype):
    arrays = operands(WIRES["four tiles"](), N, dtype)
    text = cuda_program(lambda *a: (kernels.mixtures(*a[1:]), kernels.mixtures_gradients(*a)), *arrays)
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("candidates", "N", "blocks"), [(8, 128, 1), (8, 8192, 4), (8, 384, 3), (16, 1024, 2), (32, 1024, 1)]
)
def test_the_rows_of_a_group_fit_in_registers(candidates, N, blocks):
    wires = jax.eval_shape(lambda: LearnedWires.random(8000, 8000, seed=0, candidates=candidates))
    shapes = (16000, N), (16000, candidates), (8000, N)
    dy, weights, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    assert kernels.mixtures_gradients.plan(dy, weights, wires.candidates, x) == kernels.Config(blocks)


def test_a_batch_of_part_of_a_warpgroup_is_refused():
    _, *arrays = operands(WIRES["four tiles"](), 130)
    with pytest.raises(NotImplementedError, match=r"does not take a batch of 130, only multiples of 128"):
        kernels.mixtures(*arrays)
