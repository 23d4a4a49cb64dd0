import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu, relative_error

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense import linear_sm90 as kernels
from pallas_kernels.dense.linear_sm90 import Config

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
TWO_MULTIPROCESSORS = dataclasses.replace(HOPPER, multiprocessors=2)
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
    return [a.astype(dtype) for a in normal((rows, inputs), (outputs, inputs), (outputs,))]


def layer_structs(rows, outputs, inputs, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,))]


@can_simulate
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "sizes"),
    [
        (320, 128, 256, dict(splits=1)),
        (100, 128, 256, dict(splits=2)),  # the last block is not full
        (320, 256, 128, dict(splits=3)),  # several tiles per CTA
        (320, 256, 256, dict(splits=2, cluster=2, columns=128)),
        (192, 256, 512, dict(splits=1, raster=1)),
        (192, 256, 128, dict(splits=2, rows=256)),
    ],
    ids=str,
)
def test_the_simulator_finds_them_right(rows, outputs, inputs, sizes):
    random = np.random.default_rng(0)
    dy, x = (jnp.asarray(random.integers(-3, 4, (rows, width)), "float16") for width in (outputs, inputs))
    config = Config(**dict(rows=128, columns=min(256, inputs), stages=2) | sizes)
    gradients = jax.jit(lambda dy, x: kernels.weights_gradient(dy, x, dtype=jnp.float32, config=config))
    with on_the_cpu(), targeting(TWO_MULTIPROCESSORS), simulated():
        actual = jax.block_until_ready(gradients(dy, x))
    jax.tree.map(np.testing.assert_array_equal, actual, expected(dy, x))


@can_simulate
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "sizes"),
    [
        (256, 192, 128, {}),
        (640, 128, 128, {}),
        (300, 128, 512, dict(cluster=2, raster=2)),
        (128, 320, 512, dict(stages=3)),  # the steps are no multiple of the stages
    ],
    ids=str,
)
def test_the_simulator_finds_the_forward_right(rows, inputs, outputs, sizes):
    random = np.random.default_rng(0)
    x, w, b = (
        jnp.asarray(random.integers(-3, 4, shape), "float16") for shape in ((rows, inputs), (outputs, inputs), outputs)
    )
    config = Config(**dict(rows=128, columns=128, stages=2) | sizes)
    forward = jax.jit(lambda x, w, b: kernels.forward(x, w, b, config=config))
    with on_the_cpu(), targeting(TWO_MULTIPROCESSORS), simulated():
        actual = jax.block_until_ready(forward(x, w, b))
    np.testing.assert_array_equal(actual, expected_forward(x, w, b))


HALF, FULL = jnp.float16, jnp.float32
PING_PONG = dict(columns=128, consumers=1)


@can_simulate
@pytest.mark.parametrize(
    ("dtype", "transposed", "batches", "sizes", "config"),
    [
        (HALF, (False, False), (2, 2), (150, 100, 90), dict(columns=64)),
        (HALF, (False, False), (1, 3), (130, 65, 40), dict(PING_PONG, cluster=2)),
        (HALF, (True, True), (2, 1), (20, 200, 130), dict(columns=256, splits=3)),
        (HALF, (True, False), (1, 1), (300, 70, 20), dict(PING_PONG)),
        (FULL, (False, True), (2, 2), (150, 50, 90), dict(columns=128, splits=2)),
        (FULL, (True, False), (1, 1), (20, 50, 30), dict(columns=64)),
    ],
    ids=str,
)
def test_the_simulator_finds_products_of_any_size_right(dtype, transposed, batches, sizes, config):
    random = np.random.default_rng(0)
    (m, k, n), (left, right) = sizes, transposed
    shapes = (k, m) if left else (m, k), (n, k) if right else (k, n)
    a, b = (
        jnp.asarray(random.integers(-3, 4, (batch, *shape)), dtype)
        for batch, shape in zip(batches, shapes, strict=True)
    )
    config = Config(**dict(rows=128, stages=2) | config)
    product = jax.jit(lambda a, b: kernels.product(a, b, transposed=transposed, dtype=FULL, config=config))
    with on_the_cpu(), targeting(TWO_MULTIPROCESSORS), simulated():
        actual = jax.block_until_ready(product(a, b))
    np.testing.assert_array_equal(actual, (a.mT if left else a).astype(FULL) @ (b.mT if right else b).astype(FULL))


@pytest.mark.parametrize("rows", [1, 12, 8201])
def test_any_number_of_rows_lowers_for_cuda(rows, on_hopper):
    # Bulk copies to swizzled memory accept only multiples of eight rows.
    x, w, b = layer_structs(rows, 128, 100)
    assert "mosaic_gpu" in cuda_program(lambda *arrays: kernels.forward(*arrays, config=FORWARD), x, w, b)
    assert "mosaic_gpu" in cuda_program(kernels.weights_gradient, *structs(rows, 128, 100))
    assert "mosaic_gpu" in cuda_program(kernels.product, x, jax.ShapeDtypeStruct((100, 3), x.dtype))


FORWARD = Config(rows=128, columns=128, stages=2, consumers=1)


def test_products_fill_the_multiprocessors(on_hopper):
    def config(m, k, n, batch=1):
        return kernels.product.plan(*(jax.ShapeDtypeStruct((batch, *s), "bfloat16") for s in ((m, k), (k, n))))

    assert config(65536, 1024, 1024).consumers == 1
    assert config(256, 65536, 256).splits > 10
    assert config(1024, 84, 10).columns == 64


def weights_config(*shape):
    with targeting(HOPPER):
        return kernels.weights_gradient.plan(*structs(*shape))


def test_the_raster_walks_column_blocks_and_meets_every_tile_once():
    walked = [kernels.raster(i, rows=3, width=2) for i in range(12)]
    assert walked == [(row, 2 * block + column) for block in range(2) for row in range(3) for column in range(2)]


def test_splits_of_the_rows_fill_the_multiprocessors():
    assert [weights_config(*shape).splits for shape in REAL] == [1, 4, 1, 66]
    assert weights_config(65536, 3072, 768).splits == 7  # 504 tiles, in four turns of 132


def test_clusters_are_there_where_tiles_outnumber_the_multiprocessors():
    assert [weights_config(*shape).cluster for shape in REAL] == [1, 1, 2, 1]


@pytest.mark.parametrize(("outputs", "raster"), [(768, 6), (1024, 8), (2304, 9), (4096, 16)])
def test_the_forwards_blocks_are_the_widest_that_divide_the_result(outputs, raster, on_hopper):
    x, w, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((65536, 1024), (outputs, 1024), (outputs,)))
    assert kernels.forward.plan(x, w, b).raster == raster


def reasons(of, *shapes, dtype="bfloat16"):
    with targeting(HOPPER):
        return [of(*shape, dtype) for shape in shapes]


def weights_unsupported(*shape):
    return kernels.weights_gradient.unsupported(*structs(*shape))


def forward_unsupported(*shape):
    return kernels.forward.unsupported(*layer_structs(*shape))


def test_they_take_half_precisions_and_the_forward_whole_tiles():
    assert reasons(weights_unsupported, (65536, 4096, 1024), (100, 10, 84)) == [None, None]
    assert reasons(forward_unsupported, (65536, 4096, 1024), (100, 128, 84), dtype="float16") == [None, None]
    assert reasons(weights_unsupported, (0, 1024, 1024)) == ["an axis of size 0"]
    assert reasons(forward_unsupported, (8192, 1000, 4096), (8192, 0, 1024)) == [
        "1000 outputs, only multiples of 128",
        "an axis of size 0",
    ]
    wanted = "dtypes float32 and float32, only bfloat16 or float16 for both"
    assert reasons(weights_unsupported, REAL[0], dtype="float32") == [wanted]
    assert reasons(forward_unsupported, REAL[0], dtype="float32") == [wanted]


def test_the_ring_has_six_or_four_stages_on_hopper_and_as_many_as_fit_elsewhere():
    arrays = layer_structs(*REAL[0])
    with targeting(HOPPER):
        assert kernels.forward.plan(*arrays).stages == 6
        assert kernels.weights_gradient.plan(*arrays[:2]).stages == 4
    with targeting(dataclasses.replace(HOPPER, shared_bytes=160 * 1024)):
        config = kernels.forward.plan(*arrays)
        assert config.stages == 3
        assert (config.stages * (config.rows + config.columns) + 2 * config.rows) * 64 * 2 < 160 * 1024
    with targeting(dataclasses.replace(HOPPER, shared_bytes=80 * 1024)):
        assert "81920 bytes of shared memory" in kernels.forward.unsupported(*arrays)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        (dict(splits=2), "wants splits=1, and columns that divide 1024"),
        (dict(columns=192), "wants splits=1, and columns that divide 1024"),
        (dict(columns=256, consumers=1), "wants at most 16384 sums per consumer"),
        (dict(raster=3), "raster is 3; wants a divisor of 8"),
    ],
    ids=str,
)
def test_configs_that_would_leave_tiles_out_are_refused(sizes, wanted, on_hopper):
    config = Config(**dict(rows=128, columns=128, stages=2) | sizes)
    with pytest.raises(ValueError, match=wanted):
        jax.eval_shape(lambda *arrays: kernels.forward(*arrays, config=config), *layer_structs(*REAL[1]))


@pytest.mark.parametrize("device", [BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_they_are_hoppers_alone(device):
    with targeting(device):
        for reason in (weights_unsupported(*REAL[0]), forward_unsupported(*REAL[0])):
            assert "only 9.0" in reason
        with pytest.raises(NotImplementedError, match=r"linear_sm90\.forward: does not take compute capability"):
            jax.eval_shape(kernels.forward, *layer_structs(*REAL[0]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", REAL, ids=str)
def test_they_lower_for_cuda(shape, dtype, on_hopper):
    assert "mosaic_gpu" in cuda_program(kernels.weights_gradient, *structs(*shape, dtype))
    config = Config(rows=128, columns=128, stages=6, cluster=2)
    forward = lambda x, w, b: kernels.forward(x, w, b, config=config)  # noqa: E731
    assert "mosaic_gpu" in cuda_program(forward, *layer_structs(*shape, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*((8192, *shape[1:]) for shape in REAL), (8200, 256, 384)], ids=str)
def test_gpu_gradients_match_float64_and_repeat_their_bits(shape, dtype):
    rows, outputs, inputs = shape
    dy, x = (a.astype(dtype) for a in normal((rows, outputs), (rows, inputs)))
    first, second = (jax.jit(kernels.weights_gradient)(dy, x) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    for actual, wanted, tolerance in zip(first, expected(dy, x), (4e-3, 1e-6), strict=True):
        assert relative_error(actual, wanted) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)], ids=str)
@pytest.mark.parametrize("shape", [(8192, 1024, 1024), (1000, 84, 10), (120, 5000, 333), (3, 1024, 100, 65)], ids=str)
def test_gpu_products_match_float64_and_repeat_their_bits(shape, transposed, dtype):
    *batch, m, k, n = shape
    shapes = ((k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n))
    a, b = (x.astype(dtype) for x in normal(*((*batch, *s) for s in shapes)))
    first, second = (jax.jit(lambda a, b: kernels.product(a, b, transposed=transposed))(a, b) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    wanted = (a.swapaxes(-1, -2) if transposed[0] else a) @ (b.swapaxes(-1, -2) if transposed[1] else b)
    assert relative_error(first, wanted) < (1e-3 if dtype == "float32" else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*((8192, *shape[1:]) for shape in REAL[:3]), (8200, 384, 576)], ids=str)
def test_gpu_forward_matches_float64_and_repeats_its_bits(shape, dtype):
    arrays = layer(*shape, dtype)
    first, second = (jax.jit(kernels.forward)(*arrays) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert relative_error(first, expected_forward(*arrays)) < 4e-3
