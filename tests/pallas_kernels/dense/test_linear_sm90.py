"""A dense layer's products on the tensor cores: simulated, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu, relative_error

from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense import linear_sm90 as kernels

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
REAL = [(65536, 4096, 1024), (65536, 1024, 1024), (32768, 4096, 4096), (262144, 256, 256)]


def structs(rows, outputs, inputs, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct((rows, width), dtype) for width in (outputs, inputs)]


def expected(dy, x):
    dy, x = (np.asarray(a, np.float64) for a in (dy, x))
    return dy.T @ x, dy.sum(0)


def expected_forward(x, w, b):
    x, w, b = (np.asarray(a, np.float64) for a in (x, w, b))
    return x @ w.T + b


def layer(rows, outputs, inputs, dtype="bfloat16"):
    """x, w and b."""
    return [a.astype(dtype) for a in normal((rows, inputs), (outputs, inputs), (outputs,))]


def layer_structs(rows, outputs, inputs, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,))]


@can_simulate
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "sizes"),
    [
        (320, 128, 256, dict(parts=1)),
        (100, 128, 256, dict(parts=2)),  # a last block that is not full
        (320, 256, 128, dict(parts=3)),  # several tiles a program
        (320, 256, 256, dict(parts=2, mates=2, columns=128)),
        (192, 256, 512, dict(parts=1, wide=1)),
        (192, 256, 128, dict(parts=2, rows=256)),
    ],
    ids=str,
)
def test_the_simulator_finds_them_right(rows, outputs, inputs, sizes, monkeypatch):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 2)
    random = np.random.default_rng(0)
    dy, x = (jnp.asarray(random.integers(-3, 4, (rows, width)), "float16") for width in (outputs, inputs))
    tile = kernels.Tile(**dict(rows=128, columns=min(256, inputs), slots=2, mates=1) | sizes)
    with on_the_cpu(), simulated():
        gradients = jax.jit(functools.partial(kernels._weights_gradient, tile=tile, dtype=jnp.float32))
        actual = jax.block_until_ready(gradients(dy, x))
    jax.tree.map(np.testing.assert_array_equal, actual, expected(dy, x))


@can_simulate
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "sizes"),
    [
        (256, 192, 256, {}),
        (300, 128, 512, dict(columns=128, mates=2, wide=2)),  # a last block that is not full, several tiles a program
    ],
    ids=str,
)
def test_the_simulator_finds_the_forward_right(rows, inputs, outputs, sizes, monkeypatch):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 2)
    random = np.random.default_rng(0)
    x, w, b = (
        jnp.asarray(random.integers(-3, 4, shape), "float16") for shape in ((rows, inputs), (outputs, inputs), outputs)
    )
    tile = kernels.Tile(**dict(rows=128, columns=256, slots=2, parts=1, mates=1) | sizes)
    with on_the_cpu(), simulated():
        actual = jax.block_until_ready(jax.jit(functools.partial(kernels._forward, tile=tile))(x, w, b))
    np.testing.assert_array_equal(actual, expected_forward(x, w, b))


def test_parts_of_the_rows_fill_the_multiprocessors():
    assert [kernels.tile(*shape).parts for shape in REAL] == [1, 4, 1, 66]
    assert [kernels.tile(*shape).mates for shape in REAL] == [1, 1, 2, 1]
    assert kernels.tile(65536, 3072, 768).parts == 9  # 36 tiles, 72 would leave half of them idle
    assert kernels.tile(100, 128, 128).parts <= 2


def test_they_take_whole_tiles_of_half_precisions_and_many_rows():
    assert kernels.pays(*structs(65536, 4096, 1024)) and kernels.pays(*structs(65536, 128, 384, "float16"))
    for shape in [(65536, 4096, 1000), (65536, 64, 1024), (0, 1024, 1024), (128, 1024, 1024)]:
        assert not kernels.pays(*structs(*shape))
    assert not kernels.pays(*structs(*REAL[0], "float32"))


def test_the_forward_takes_whole_tiles_of_half_precisions_many_rows_and_inputs():
    def pays(*shape):
        x, w, _ = layer_structs(*shape)
        return kernels.forward_pays(x, w)

    assert pays(65536, 4096, 1024) and pays(8200, 128, 576, "float16")
    for shape in [(65536, 4096, 1000), (65536, 64, 1024), (65536, 256, 256), (0, 128, 1024), (65536, 0, 1024)]:
        assert not pays(*shape)
    assert not pays(*REAL[0], "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_they_lower_for_cuda(shape, dtype):
    assert "mosaic_gpu" in cuda_program(kernels.weights_gradient, *structs(*shape, dtype))
    assert "mosaic_gpu" in cuda_program(kernels.forward, *layer_structs(*shape, dtype))


def test_without_a_gpu_the_librarys_product_takes_their_place():
    dy, x = (a.astype("bfloat16") for a in normal((100, 128), (100, 256)))
    with on_the_cpu():
        dw, db = jax.jit(kernels.weights_gradient)(dy, x)
    assert dw.dtype == jnp.bfloat16 and db.dtype == jnp.float32
    assert relative_error(dw, expected(dy, x)[0]) < 4e-3 and relative_error(db, expected(dy, x)[1]) < 1e-6
    arrays = layer(100, 128, 64)
    with on_the_cpu():
        assert relative_error(jax.jit(kernels.forward)(*arrays), expected_forward(*arrays)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*((8192, *shape[1:]) for shape in REAL), (8200, 256, 384)], ids=str)
def test_gpu_gradients_match_float64_and_repeat_their_bits(shape, dtype):
    rows, outputs, inputs = shape
    dy, x = (a.astype(dtype) for a in normal((rows, outputs), (rows, inputs)))
    once, again = (jax.jit(kernels.weights_gradient)(dy, x) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    for actual, wanted, tolerance in zip(once, expected(dy, x), (4e-3, 1e-6), strict=True):
        assert relative_error(actual, wanted) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*((8192, *shape[1:]) for shape in REAL[:3]), (8200, 384, 576)], ids=str)
def test_gpu_forward_matches_float64_and_repeats_its_bits(shape, dtype):
    arrays = layer(*shape, dtype)
    once, again = (jax.jit(kernels.forward)(*arrays) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert relative_error(once, expected_forward(*arrays)) < 4e-3
