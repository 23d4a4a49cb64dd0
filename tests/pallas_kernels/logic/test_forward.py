import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu

from jaxbp import Wires
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic.forward import Config, forward

WIRES = {
    "shared": lambda: Wires.from_pairs([0, 0, 1, 2, 0, 4], [1, 0, 4, 4, 4, 4], 5),
    "random": lambda: Wires.random(6, 9, seed=0),
    "one gate": lambda: Wires.from_pairs([1], [0], 2),
}


def operands(wires, N, dtype="float32"):
    coefficients, x = normal((wires.gates, 4), (wires.inputs, N))
    return coefficients, wires, x.astype(dtype)


def reference(coefficients, graph, x):
    a, b = x[graph.a].astype(jnp.float32), x[graph.b].astype(jnp.float32)
    c0, c1, c2, c3 = coefficients.T[..., None]
    return c0 + c1 * a + c2 * b + c3 * a * b


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wires", WIRES)
def test_the_simulator_finds_it_right(wires, dtype):
    arrays = operands(WIRES[wires](), 3 * LANES, dtype)
    with on_the_cpu(), simulated():
        y = forward(*arrays)
    assert y.dtype == dtype
    assert_close(y, reference(*arrays), dtype)


@pytest.mark.parametrize("config", [Config(1, LANES), Config(3, 2 * LANES), Config(9, 4 * LANES)], ids=str)
def test_the_config_asked_for_is_taken(config):
    arrays = operands(WIRES["random"](), 4 * LANES)
    with on_the_cpu():
        assert_close(forward(*arrays, config=config), reference(*arrays), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 8192])
def test_it_lowers_for_cuda(N, dtype):
    for wires in WIRES.values():
        assert cuda_program(forward, *operands(wires(), N, dtype)).count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("gates", "N", "dtype", "config"),
    [
        (8000, 128, "float32", Config(4, 128)),
        (8000, 1024, "float32", Config(2, 512)),
        (8000, 1024, "bfloat16", Config(2, 1024)),
        (8000, 384, "bfloat16", Config(2, 384)),
        (7, 128, "float32", Config(1, 128)),
    ],
)
def test_a_program_has_the_longest_lane_block_and_more_gates_of_a_short_one(gates, N, dtype, config):
    graph = jax.eval_shape(lambda: Wires.random(gates, gates, seed=0))
    coefficients, x = jax.ShapeDtypeStruct((gates, 4), "float32"), jax.ShapeDtypeStruct((gates, N), dtype)
    assert forward.plan(coefficients, graph, x) == config


def test_a_batch_of_part_of_a_warpgroup_is_refused():
    arrays = operands(WIRES["shared"](), 130)
    with pytest.raises(NotImplementedError, match=r"^forward.forward: does not take a batch of 130, only multiples of"):
        forward(*arrays)


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_newer_gpus_are_supported(gpu):
    with targeting(gpu):
        assert forward.unsupported(*operands(WIRES["shared"](), 128)) is None
