import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, cuda_program, in_float64, normal, on_the_cpu, skipped_outputs

from jaxbp import Wires
from jaxbp.logic.ops import gate_layer as op
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import backward as kernels

WIRES = {
    "few consumers": lambda: Wires.unique(6, 6, seed=0),
    "many consumers": lambda: Wires.random(3, 10, seed=0),
    "no consumers": lambda: Wires.from_pairs([0, 0, 7], [7, 0, 1], 8),
}
REGULAR = {
    "two consumers": lambda: Wires.random(6, 6, seed=0),
    "four consumers": lambda: Wires.random(5, 10, seed=0),
    "one input twice": lambda: Wires.from_pairs([2, 0, 1], [2, 1, 0], 3),
}
ONE_CONSUMER = {
    "one consumer": lambda: Wires.unique(20, 10, seed=0),
    "one gate": lambda: Wires.from_pairs([1], [0], 2),
}
BY_GATE, BY_INPUT, ALONG_TRAIL = kernels.gradients_by_gate, kernels.gradients_by_input, kernels.gradients_along_trail
SEPARATE = (kernels.input_gradient, kernels.coefficients_gradient)


def operands(wires, N, dtype="float32"):
    dy, coefficients, x = normal((wires.gates, N), (wires.gates, 4), (wires.inputs, N))
    return dy.astype(dtype), coefficients, wires, x.astype(dtype)


def structs(inputs, gates, N, dtype="float32"):
    wires = jax.eval_shape(lambda: Wires.random(inputs, gates, seed=0))
    dy, coefficients, x = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((gates, N), dtype), ((gates, 4), "float32"), ((inputs, N), dtype))
    )
    return dy, coefficients, wires, x


def reference(dy, coefficients, wires, x):
    dc, dx = in_float64(jax.jit(lambda *a: op._gradients(a[0].T, a[1], wires, a[2].T)), dy, coefficients, x)
    return dx.T, dc


def separate(dy, coefficients, graph, x):
    return kernels.input_gradient(dy, coefficients, graph, x), kernels.coefficients_gradient(dy, graph, x)


def fastest(dy, coefficients, wires, x):
    return op._fastest_gradients(dy, coefficients, wires, x)


@pytest.mark.parametrize(
    ("function", "wires", "N"),
    [(function, wires, LANES) for function in (BY_INPUT, separate) for wires in WIRES]
    + [(ALONG_TRAIL, wires, LANES) for wires in REGULAR]
    + [(BY_GATE, wires, LANES) for wires in ONE_CONSUMER]
    + [(BY_GATE, "one consumer", 12 * LANES)]  # three CTAs of four vectors
    + [(ALONG_TRAIL, "one input twice", 15 * LANES)],  # three CTAs of five vectors
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_simulator_finds_them_right(function, wires, N):
    if function is not BY_INPUT and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    dy, coefficients, wires, x = operands((WIRES | REGULAR | ONE_CONSUMER)[wires](), N)
    with on_the_cpu(), simulated():
        results = jax.jit(function)(dy, coefficients, wires, x)
    assert_close(results, reference(dy, coefficients, wires, x), "float32")


@pytest.mark.parametrize("skipped", [0, 1], ids=["dc", "dx"])
@pytest.mark.parametrize(
    ("function", "wires"),
    [(BY_INPUT, "few consumers"), (ALONG_TRAIL, "four consumers")],
    ids=["by input", "along trail"],
)
def test_one_gradient_alone_is_the_same_in_the_simulator(function, wires, skipped):
    if function is not BY_INPUT and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    dy, coefficients, wires, x = operands((WIRES | REGULAR)[wires](), LANES)
    with on_the_cpu(), simulated(), skipped_outputs(kernels, skipped):
        results = function(dy, coefficients, wires, x)
    assert not results[skipped].any()
    assert_close(results[1 - skipped], reference(dy, coefficients, wires, x)[1 - skipped], "float32")


@pytest.mark.parametrize(
    ("function", "wires"),
    [
        (BY_INPUT, "few consumers"),
        (separate, "few consumers"),
        (ALONG_TRAIL, "two consumers"),
        (BY_GATE, "one consumer"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_neighboring_gates_may_share_a_row_of_dy_in_the_simulator(function, wires):
    if function is not BY_INPUT and jax.__version_info__ < (0, 12):
        pytest.skip("older simulators lack layouts of shared memory")
    dy, coefficients, wires, x = operands((WIRES | REGULAR | ONE_CONSUMER)[wires](), LANES)
    with on_the_cpu(), simulated():
        results = jax.jit(function)(dy[:2], coefficients, wires, x)
    repeated = jnp.repeat(dy[:2], wires.gates // 2, axis=0)
    assert_close(results, reference(repeated, coefficients, wires, x), "float32")


@pytest.mark.parametrize(("N", "dtype"), [(128, "bfloat16"), (384, "float32"), (4096, "float32")])
@pytest.mark.parametrize("wires", ["many consumers", "four consumers", "one consumer"])  # each has a different kernel
def test_they_lower_for_cuda(wires, N, dtype):
    text = cuda_program(fastest, *operands((WIRES | REGULAR | ONE_CONSUMER)[wires](), N, dtype))
    assert text.count("custom_call @mosaic_gpu") == (2 if wires in WIRES and N <= op._SHORT_ROW_IN_L2 else 1)


# The size of an H200's L2 cache according to its driver, and to XLA.
L2_BYTES = (HOPPER.l2_bytes, 50 * 2**20)


@pytest.mark.parametrize("l2_bytes", L2_BYTES)
@pytest.mark.parametrize(
    ("inputs", "gates", "N", "dtype", "kernel"),
    [
        (8000, 8000, 128, "float32", "along_trail"),
        (8000, 8000, 1024, "bfloat16", "along_trail"),
        (64000, 64000, 1024, "float32", "along_trail"),
        (4000, 8000, 8192, "float32", "along_trail"),
        (7999, 8000, 1024, "float32", "input"),
        (2000, 3000, 1024, "float32", "input"),
        (784, 64000, 128, "float32", "input"),
        (784, 64000, 1024, "float32", "input"),
        (784, 64000, 1024, "bfloat16", "input"),
        (63999, 64000, 128, "float32", "input"),
        (7999, 8000, 1152, "float32", ""),
        (63999, 64000, 256, "float32", "input"),
        (327680, 163840, 128, "float32", "by_gate"),
        (16000, 8000, 8192, "bfloat16", "by_gate"),
        (63999, 64000, 640, "float32", ""),
        (63999, 64000, 1024, "bfloat16", ""),
        (1000, 8000, 2048, "float32", ""),
        (4095, 8192, 8192, "float32", ""),
    ],
)
def test_which_kernel_makes_them(inputs, gates, N, dtype, kernel, l2_bytes):
    with targeting(dataclasses.replace(HOPPER, l2_bytes=l2_bytes)):
        program = str(jax.make_jaxpr(op._fastest_gradients)(*structs(inputs, gates, N, dtype)))
    names = {name: f"gate_layer_backward_{name}" in program for name in ("by_gate", "along_trail", "input")}
    assert names == {name: name == kernel for name in names}


def arguments(kernel, *operands):
    dy, _, graph, x = operands
    return (dy, graph, x) if kernel is kernels.coefficients_gradient else operands


@pytest.mark.parametrize("kernel", [BY_INPUT, BY_GATE, ALONG_TRAIL, *SEPARATE], ids=repr)
def test_a_batch_of_part_of_a_warpgroup_is_refused(kernel):
    reason = kernel.unsupported(*arguments(kernel, *structs(16 if kernel is BY_GATE else 8, 8, 130)))
    assert reason == "a batch of 130, only multiples of 128"


@pytest.mark.parametrize(("inputs", "gates", "most"), [(7, 8, 3), (5, 15, 6), (16, 8, 1)])
def test_the_trail_is_for_inputs_of_two_consumers_or_four(inputs, gates, most):
    reason = ALONG_TRAIL.unsupported(*structs(inputs, gates, 128))
    assert reason == f"wires with {most} consumers per input, only 2 or 4"


@pytest.mark.parametrize(("inputs", "gates", "most"), [(8, 8, 2), (7, 8, 3), (18, 8, 1)])
def test_one_pass_by_gate_is_for_inputs_of_one_consumer(inputs, gates, most):
    reason = f"wires with {most} consumers per input, only 1 consumer"
    assert BY_GATE.unsupported(*structs(inputs, gates, 128)) == reason
    assert BY_GATE.unsupported(*structs(16, 8, 128)) is None


@pytest.mark.parametrize("kernel", [ALONG_TRAIL, BY_GATE, kernels.coefficients_gradient], ids=repr)
def test_a_gpu_of_less_shared_memory_than_their_sums_is_refused(kernel):
    needed = (kernels.SUM_ROWS if kernel is ALONG_TRAIL else kernels.GATE_SUMS * kernels._GATES) * LANES * 4
    given = arguments(kernel, *structs(16 if kernel is BY_GATE else 8, 8, 128))
    for has, reason in (
        (needed, None),
        (needed - 1, f"{needed} bytes of shared memory per CTA, only {needed - 1}"),
    ):
        with targeting(dataclasses.replace(HOPPER, shared_bytes=has)):
            assert kernel.unsupported(*given) == reason


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=lambda gpu: gpu.kind)
def test_newer_gpus_are_supported(gpu):
    with targeting(gpu):
        given = structs(8, 8, 128)
        assert all(k.unsupported(*arguments(k, *given)) is None for k in (BY_INPUT, ALONG_TRAIL, *SEPARATE))
        assert BY_GATE.unsupported(*structs(16, 8, 128)) is None


def test_any_wires_and_batch_have_a_config_by_input():
    for inputs, gates, N in ((1, 1, 128), (63999, 64000, 8192), (784, 64000, 1024)):
        given = structs(inputs, gates, N)
        config = BY_INPUT.plan(*given)
        assert N % (config.blocks * config.length) == 0 and config.length % LANES == 0


def takes_two_kernels(*operands):
    program = str(jax.make_jaxpr(op._fastest_gradients)(*operands))
    takes = {name: f"gate_layer_backward_{name}" in program for name in ("input", "coefficients")}
    assert takes["input"] == takes["coefficients"]
    return takes["input"]


def test_two_kernels_are_for_short_rows_and_for_longer_ones_of_an_x_in_the_l2_cache():
    given = structs(1001, 1000, 1024)
    for l2_bytes, expected in ((1001 * 1024 * 4 * 5 // 4 + 4, True), (1001 * 1024 * 4 * 5 // 4 - 4, False)):
        with targeting(dataclasses.replace(HOPPER, l2_bytes=l2_bytes)):
            assert takes_two_kernels(*given) == expected
    with targeting(HOPPER):
        assert takes_two_kernels(*structs(327679, 163840, 512))
        assert not takes_two_kernels(*structs(7, 8, 1152))


def test_the_config_asked_for_is_taken():
    dy, coefficients, wires, x = operands(Wires.random(6, 6, seed=0), 4 * LANES)
    graph, expected = wires, reference(dy, coefficients, wires, x)
    with on_the_cpu():
        for config in (kernels.ByInputConfig(1, LANES), kernels.ByInputConfig(2, 2 * LANES)):
            assert_close(BY_INPUT(dy, coefficients, graph, x, config=config), expected, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("N", [128, 384, 1024, 1152])
@pytest.mark.parametrize("inputs", [784, 4000, 7999, 8000, 16000])
def test_gpu_results_match_float64_and_repeat_their_bits(inputs, N, dtype):
    arrays = operands(Wires.unique(inputs, 8000, seed=0), N, dtype)
    run = jax.jit(fastest)
    results = run(*arrays)
    dx, dc = reference(*arrays)
    assert_close(results[0], dx, dtype)
    assert_close(results[1], dc, "float32")
    assert all(jnp.array_equal(a, b) for a, b in zip(results, run(*arrays), strict=True))
