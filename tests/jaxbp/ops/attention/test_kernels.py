"""The connection of the op to its kernels. The kernels' own tests cover their options."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import FEW_CTAS, can_simulate
from helpers import cuda_program, in_float64, normal, on_the_cpu, poison_memory, relative_error

from jaxbp import dot_product_attention
from jaxbp.ops.attention import _kernels
from pallas_kernels.attention.scores_sm90 import HEADS
from pallas_kernels.core.device import BLACKWELL, HOPPER, targeting
from pallas_kernels.core.simulator import simulated

OP = "dot_product_attention"
KERNELS = [f"attention_{name}" for name in ("forward", "backward_queries", "backward_keys", "backward_bias")]


def structs(features, value_features, dtype="bfloat16", queries=100, keys=150):
    shapes = (2, queries, 4, features), (2, keys, 2, features), (2, keys, 2, value_features), (4, 1, keys)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def value_and_gradients(implementation, wanted=4, **options):
    def run(*arrays):
        op = functools.partial(dot_product_attention, **options, return_residual=True, implementation=implementation)
        (y, residual), vjp = jax.vjp(lambda *moved: op(*moved, *arrays[wanted:]), *arrays[:wanted])
        return y, residual, *vjp((jnp.cos(y), jnp.cos(residual)))

    return jax.jit(run)


@can_simulate
@pytest.mark.parametrize(
    ("features", "value_features", "dtype"), [(64, 64, "bfloat16"), (128, 128, "float16"), (192, 128, "bfloat16")]
)
def test_the_simulator_finds_the_results_and_gradients_of_the_kernels_right(features, value_features, dtype):
    # The tests of each kernel have the same heads with the other dtype.
    shapes = (1, 200, 2, features), (1, 200, 1, features), (1, 200, 1, value_features), (2, 1, 200)
    arrays = [a.astype(dtype) for a in normal(*shapes)]
    options = dict(is_causal=True, softcap=3.0)
    expected = in_float64(value_and_gradients("autodiff", **options), *arrays)
    with on_the_cpu(), targeting(HOPPER), simulated():
        found = jax.block_until_ready(value_and_gradients("pallas", **options)(*arrays))
    assert [a.dtype for a in found] == [dtype, "float32", *[dtype] * 4]
    for a, wanted in zip(found, expected, strict=True):
        assert relative_error(a, wanted) <= (1e-2 if dtype == "bfloat16" else 1e-3)


@can_simulate
@pytest.mark.parametrize(
    "shapes", [[(1, 140, 2, 96), (1, 150, 1, 96), (1, 150, 1, 64)], [(2, 140, 2, 4, 64)]], ids=["features", "packed"]
)
def test_the_simulator_finds_the_gradients_of_one_kernel_right(shapes, monkeypatch):
    for least in ("LEAST_ROWS", "LEAST_PAIRS"):
        monkeypatch.setattr(_kernels, least, 0)
    for other in ("backward_queries", "backward_keys"):
        monkeypatch.delattr(_kernels, other)
    arrays = [a.astype("float16") for a in normal(*shapes)]
    gradients = functools.partial(value_and_gradients, wanted=len(shapes), is_causal=True)
    expected = in_float64(gradients("autodiff"), *arrays)
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        found = jax.block_until_ready(gradients("pallas")(*arrays))
    assert all(relative_error(*pair) <= 1e-3 for pair in zip(found, expected, strict=True))


@can_simulate
def test_vmap_maps_the_kernels():
    arrays = [a.astype("bfloat16") for a in normal((2, 1, 70, 2, 64), *[(2, 1, 70, 1, 64)] * 2)]
    mapped = lambda implementation: jax.vmap(value_and_gradients(implementation, wanted=3, is_causal=True))  # noqa: E731
    expected = in_float64(mapped("autodiff"), *arrays)
    with on_the_cpu(), targeting(HOPPER), simulated():
        found = jax.block_until_ready(jax.jit(mapped("pallas"))(*arrays))
    assert all(relative_error(*pair) <= 1e-2 for pair in zip(found, expected, strict=True))


@can_simulate
def test_a_saturated_softmax_keeps_the_digits_of_the_gradient_of_queries():
    q, k, v, dy = (a.astype("bfloat16") for a in normal(*[(1, 128, 1, 64)] * 4))
    q, k = 4 * q, 4 * k

    def gradient(implementation):
        op = functools.partial(dot_product_attention, implementation=implementation)
        return jax.jit(lambda q, k, v, dy: jax.vjp(op, q, k, v)[1](dy)[0])

    expected = in_float64(gradient("autodiff"), q, k, v, dy)
    with on_the_cpu(), targeting(HOPPER), simulated():
        found = jax.block_until_ready(gradient("pallas")(q, k, v, dy))
    # The rounding error of the saved y alone would cause twice this error.
    assert relative_error(found, expected) <= 3.5e-3


@pytest.mark.parametrize(
    ("features", "value_features"), [(size, size) for size in (32, 64, 80, 96, 128, 256)] + [(192, 128)]
)
def test_on_cuda_kernels_compute_the_results_and_gradients(features, value_features, on_hopper):
    dtype = ("bfloat16", "float16")[features % 3 == 0]
    program = cuda_program(value_and_gradients("pallas"), *structs(features, value_features, dtype))
    assert [program.count(f"{name}_mosaic_gpu") for name in KERNELS] == [1, 1, 1, 1]
    assert "stablehlo.while" not in program and "stablehlo.dot_general" not in program


@pytest.mark.parametrize(
    ("batch", "length", "key_heads", "options", "one_kernel"),
    [
        (1, 8192, 16, dict(is_causal=True), True),
        (4, 8192, 4, {}, True),
        (4, 4096, 4, {}, False),
        (64, 1024, 16, dict(is_causal=True), False),
        (4, 8192, 16, dict(segment_ids=np.zeros((4, 8192), np.int32)), False),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_one_kernel_computes_the_gradients_of_many_long_rows(
    batch, length, key_heads, options, one_kernel, packed, on_hopper
):
    sizes = [(key_heads, 16 // key_heads + 2)] if packed else [(16,), (key_heads,), (key_heads,)]
    arrays = [jax.ShapeDtypeStruct((batch, length, *heads, 64), "bfloat16") for heads in sizes]
    assert kernels_of_gradients(*arrays, **options) == ([1, 0, 0] if one_kernel else [0, 1, 1])


@pytest.mark.parametrize(("queries", "keys"), [(128, 8192), (8192, 128)])
def test_two_kernels_compute_the_gradients_of_short_rows(queries, keys, on_hopper):
    q, k = (jax.ShapeDtypeStruct((64, length, 16, 64), "bfloat16") for length in (queries, keys))
    assert kernels_of_gradients(q, k, k) == [0, 1, 1]


def kernels_of_gradients(*arrays, **options):
    """Return how many kernels compute all gradients, the gradient of queries, and the gradients of keys and values."""

    def gradients(*qkv):
        y, vjp = jax.vjp(functools.partial(dot_product_attention, **options, implementation="pallas"), *qkv)
        return vjp(y)

    program = cuda_program(gradients, *arrays)
    return [program.count(f"attention_{name}_mosaic_gpu") for name in ("backward", "backward_queries", "backward_keys")]


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_no_array_has_all_scores_also_with_the_gradient_of_a_bias_that_all_examples_share(implementation, on_hopper):
    q, bias = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((384, 384, 4, 32), (4, 384, 384)))
    program = cuda_program(value_and_gradients(implementation), q, q, q, bias)
    sizes = [math.prod(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<((?:\d+x)+)", program)]
    assert 384 * 384 * 4 * 32 <= max(sizes) < 384 * 4 * 384 * 384 / 10


def test_a_result_without_gradients_takes_one_kernel_and_no_other_product(on_hopper):
    program = cuda_program(functools.partial(dot_product_attention, implementation="pallas"), *structs(64, 64))
    assert [program.count(f"{name}_mosaic_gpu") for name in KERNELS] == [1, 0, 0, 0]
    assert "stablehlo.while" not in program and "stablehlo.dot_general" not in program


def test_tiles_of_masks_that_shapes_determine_are_constants(on_hopper):
    def gradient(q, k, v, dy):
        op = functools.partial(dot_product_attention, is_causal=True, local_window_size=40, implementation="pallas")
        return jax.vjp(op, q, k, v)[1](dy)

    q, k, v = (jax.ShapeDtypeStruct((1, 256, 2, 64), "bfloat16"),) * 3
    program = cuda_program(gradient, q, k, v, q)
    # Without queries that lack a key, no copy of dy is masked.
    assert "stablehlo.sort" not in program and "256x2x64xi1" not in program


UNSUPPORTED = {
    "dtype float32, only bfloat16 and float16": (structs(64, 64, "float32"), {}),
    "heads of 257 features, at most 256": (structs(64, 257), {}),
    "a bias of dtype float64, only": ([*structs(64, 64)[:3], jax.ShapeDtypeStruct((150,), "float64")], {}),
    "a scale of -1.0, only positive numbers": (structs(64, 64), dict(scale=-1.0)),
    "segments of dtype int64, only integers of at most 32 bits": (
        structs(64, 64, keys=100),
        dict(segment_ids=np.zeros((2, 100), np.int64)),
    ),
    r"2\^31 or more elements": (structs(64, 64), dict(mask=jax.ShapeDtypeStruct((2, 4, 2**14, 2**14), bool))),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_unsupported_arguments_are_refused_with_the_reason(reason, on_hopper):
    arrays, options = UNSUPPORTED[reason]
    if "mask" in options:
        arrays = structs(64, 64, queries=2**14, keys=2**14)
    mask = options.pop("mask", None)
    op = functools.partial(dot_product_attention, **options, implementation="pallas")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=f"^{OP}: .*'pallas' does not take {reason}"):
        jax.eval_shape(op, *arrays, mask)


def test_other_devices_are_refused():
    with (
        targeting(BLACKWELL),
        pytest.raises(NotImplementedError, match=r"does not take compute capability 10\.0, only 9\.0"),
    ):
        jax.eval_shape(functools.partial(dot_product_attention, implementation="pallas"), *structs(64, 64)[:3])


def test_the_largest_head_of_the_kernels_is_the_limit():
    assert max(HEADS) == 256


MASKS = {
    "a bias": {},
    "causal": dict(is_causal=True),
    "a window": dict(is_causal=True, local_window_size=200),
    "documents": dict(is_causal=True),
    "lengths": dict(query_seq_lengths=np.array([900, 0]), key_value_seq_lengths=np.array([640, 7])),
    "a softcap": dict(softcap=3.0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    ("features", "positions", "one_kernel"),
    [
        *((32, 1000, False), (64, 1000, False), (64, 2100, False), (96, 999, False), (128, 1000, False)),
        *((256, 1000, False), (64, 2050, True), (96, 1001, True), (128, 1003, True)),
    ],
)
def test_gpu_kernels_match_float64_repeat_their_bits_and_take_packed_arrays(
    features, positions, one_kernel, masks, monkeypatch
):
    if one_kernel:  # where the program knows the masks
        monkeypatch.setattr(_kernels, "LEAST_ROWS", 0)
        monkeypatch.setattr(_kernels, "LEAST_PAIRS", 0)
    packed = normal((2, positions, 2, 4, features))[0].astype("bfloat16")
    q, k, v = packed[:, :, :, :2].reshape(2, positions, 4, features), packed[:, :, :, 2], packed[:, :, :, 3]
    arrays = [q, k, v, *([normal((4, 1, positions))[0]] if masks == "a bias" else [])]
    options = dict(MASKS[masks])
    if masks == "documents":
        options.update(segment_ids=np.arange(2 * positions).reshape(2, positions) // 170)

    def run(implementation, *arrays):
        poison_memory()
        return value_and_gradients(implementation, wanted=len(arrays), **options)(*arrays)

    found, again = run("pallas", *arrays), run("pallas", *arrays)
    expected = in_float64(functools.partial(run, "autodiff"), *arrays)
    for a, b, wanted in zip(found, again, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        finite = np.isfinite(wanted)  # a query without a key has a log-sum-exp of -inf
        np.testing.assert_array_equal(finite, np.isfinite(a))
        assert relative_error(a[finite], wanted[finite]) <= 1e-2
    if masks != "a bias":
        y, residual, gradient = run("pallas", packed)
        parts = gradient[:, :, :, :2].reshape(q.shape), gradient[:, :, :, 2], gradient[:, :, :, 3]
        for a, b in zip(found, (y, residual, *parts), strict=True):
            np.testing.assert_array_equal(a, b)
