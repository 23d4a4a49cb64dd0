import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cuda_program, on_the_cpu, relative_error

from pallas_kernels.core.device import BLACKWELL, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.dense import grouped_linear_sm90 as kernels
from pallas_kernels.dense.products_sm90 import Config

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
TWO_MULTIPROCESSORS = dataclasses.replace(HOPPER, multiprocessors=2)
MIXTRAL, SMALL = (16384, 8, 4096, 14336), (65536, 128, 2048, 768)
PING_PONG = dict(columns=128, consumers=1)


def arrays(rows, inputs, outputs, offsets):
    """Return x, w, bias, and dy of small integers. The rows without a group are NaN."""
    random = np.random.default_rng(0)
    groups = len(offsets) - 1
    shapes = (rows, inputs), (groups, inputs, outputs), (groups, outputs), (rows, outputs)
    x, w, bias, dy = (random.integers(-3, 4, shape).astype(np.float16) for shape in shapes)
    for a in (x, dy):
        a[: offsets[0]] = a[offsets[-1] :] = np.nan
    return x, w, bias, dy


def rows_of(offsets):
    return [slice(*pair) for pair in itertools.pairwise(offsets)]


def ranges_of(offsets):
    return jnp.array([*itertools.pairwise(offsets)], jnp.int32)


def expected(x, w, bias, offsets):
    y = np.zeros((len(x), w.shape[2]))
    for g, rows in enumerate(rows_of(offsets)):
        y[rows] = x[rows].astype(np.float64) @ w[g].astype(np.float64) + (0 if bias is None else bias[g])
    return y


def simulate(function, *arrays):
    with on_the_cpu(), targeting(TWO_MULTIPROCESSORS), simulated():
        return jax.block_until_ready(jax.jit(function)(*arrays))


# Groups without rows, borders within tiles of eight rows, tiles of one row, rows before and after the groups.
@can_simulate
@pytest.mark.parametrize(
    ("shape", "offsets", "transposed", "config"),
    [
        ((230, 100, 70), [0, 0, 70, 75, 200, 200], False, dict(columns=128)),
        ((150, 72, 200), [5, 70, 75, 140], True, PING_PONG),
        ((300, 64, 130), [0, 300, 300], False, dict(columns=64, cluster=2, raster=1)),
        ((40, 64, 64), [0, 0, 0], True, PING_PONG),
    ],
    ids=str,
)
def test_the_simulator_finds_products_right(shape, offsets, transposed, config):
    x, w, bias, _ = arrays(*shape, offsets)
    if transposed:
        bias = None
    config = Config(**dict(rows=128, stages=2) | config)
    product = functools.partial(kernels.product, transposed=transposed, dtype=jnp.float32, config=config)
    actual = simulate(product, x, w.swapaxes(1, 2) if transposed else w, bias, ranges_of(offsets))
    np.testing.assert_array_equal(actual, expected(x, w, bias, offsets))


@can_simulate
@pytest.mark.parametrize(
    ("shape", "offsets", "config"),
    [
        ((230, 130, 70), [0, 0, 70, 75, 200, 200], dict(columns=128)),
        ((150, 72, 200), [5, 70, 75, 140], dict(PING_PONG, raster=1)),
        ((200, 64, 64), [0, 150, 150], dict(columns=64, cluster=2)),
    ],
    ids=str,
)
def test_the_simulator_finds_gradients_of_weights_right(shape, offsets, config):
    x, _, _, dy = arrays(*shape, offsets)
    # Infinities of a group stay in the group.
    x[offsets[2]] = np.inf
    config = Config(**dict(rows=128, stages=2) | config)
    gradient = functools.partial(kernels.weights_gradient, dtype=jnp.float32, config=config)
    actual = simulate(gradient, x, dy, ranges_of(offsets))
    for dw, rows in zip(np.asarray(actual), rows_of(offsets), strict=True):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(dw, x[rows].T.astype(np.float32) @ dy[rows].astype(np.float32))


@can_simulate
def test_vmap_maps_them():
    both = [0, 30, 30, 70], [5, 6, 26, 69]
    x, w, bias, dy = map(np.stack, zip(*(arrays(70, 64, 72, offsets) for offsets in both), strict=True))

    def run(x, w, bias, dy, ranges):
        return kernels.product(x, w, bias, ranges), kernels.weights_gradient(x, dy, ranges, dtype=jnp.float32)

    y, dw = simulate(jax.vmap(run), x, w, bias, dy, jnp.stack(list(map(ranges_of, both))))
    for i, offsets in enumerate(both):
        np.testing.assert_array_equal(y[i], expected(x[i], w[i], bias[i], offsets))
        for g, rows in enumerate(rows_of(offsets)):
            np.testing.assert_array_equal(dw[i, g], x[i, rows].T.astype(np.float32) @ dy[i, rows].astype(np.float32))


def structs(rows, groups, inputs, outputs, dtype="bfloat16"):
    shapes = (rows, inputs), (groups, inputs, outputs), (groups, outputs), (rows, outputs)
    return *(jax.ShapeDtypeStruct(s, dtype) for s in shapes), jax.ShapeDtypeStruct((groups, 2), "int32")


@pytest.mark.parametrize(
    ("shape", "dtype"), [(MIXTRAL, "float16"), (SMALL, "bfloat16"), ((1001, 3, 100, 70), "float16")], ids=str
)
def test_they_lower_for_cuda(shape, dtype, on_hopper):
    x, w, bias, dy, ranges = structs(*shape, dtype)
    assert "mosaic_gpu" in cuda_program(kernels.product, x, w, bias, ranges)
    product = functools.partial(kernels.product, transposed=True)
    assert "mosaic_gpu" in cuda_program(product, dy, w, None, ranges)
    assert "mosaic_gpu" in cuda_program(kernels.weights_gradient, x, dy, ranges)


def test_short_sums_take_the_ping_pong_schedule(on_hopper):
    for shape, consumers in ((MIXTRAL, 2), (SMALL, 1)):
        x, w, bias, dy, ranges = structs(*shape)
        assert kernels.product.plan(x, w, bias, ranges).consumers == consumers
        assert kernels.weights_gradient.plan(x, dy, ranges).consumers == consumers


def test_the_largest_groups_come_first():
    groups, starts, ends = kernels.largest_first(ranges_of([2, 5, 5, 9, 12]))
    assert groups.tolist() == [2, 0, 3, 1]
    assert (starts.tolist(), ends.tolist()) == ([5, 2, 9, 5], [9, 5, 12, 5])


def test_what_they_do_not_take_is_named(on_hopper):
    x, w, bias, dy, ranges = structs(*MIXTRAL, "float32")
    wanted = "dtypes float32 and float32, only bfloat16 or float16 for both"
    assert kernels.product.unsupported(x, w, bias, ranges) == wanted
    assert kernels.weights_gradient.unsupported(x, dy, ranges) == wanted
    x, w, bias, dy, ranges = structs(0, 2, 64, 64)
    assert kernels.product.unsupported(x, w, bias, ranges) == "an axis of size 0"
    with targeting(BLACKWELL):
        assert "only 9.0" in kernels.product.unsupported(x, w, bias, ranges)


@pytest.mark.parametrize("name", ["product", "weights_gradient"])
def test_rasters_that_would_leave_tiles_out_are_refused(name, on_hopper):
    x, w, _, dy, ranges = structs(256, 2, 64, 1024)
    arguments = (x, w, None, ranges) if name == "product" else (x, dy, ranges)
    call = functools.partial(getattr(kernels, name), config=Config(rows=128, columns=128, stages=2, raster=3))
    with pytest.raises(ValueError, match="raster is 3; wants a divisor of 8"):
        jax.eval_shape(call, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offsets", [[0, 0, 70, 75, 900, 900], [5, 1000, 1000], [0, 0, 0]], ids=str)
def test_gpu_products_match_float64_and_repeat_their_bits(offsets, dtype):
    x, w, bias, dy = (jnp.asarray(a, dtype) for a in arrays(1003, 200, 330, offsets))
    on_device = ranges_of(offsets)
    calls = [
        lambda: jax.jit(kernels.product)(x, w, bias, on_device),
        lambda: jax.jit(functools.partial(kernels.product, transposed=True))(dy, w, None, on_device),
        lambda: jax.jit(kernels.weights_gradient)(x, dy, on_device),
    ]
    x64, w64, bias64, dy64 = (np.asarray(a, np.float64) for a in (x, w, bias, dy))
    wanted = [
        expected(x64, w64, bias64, offsets),
        expected(dy64, w64.swapaxes(1, 2), None, offsets),
        np.stack([x64[rows].T @ dy64[rows] for rows in rows_of(offsets)]),
    ]
    for call, exact in zip(calls, wanted, strict=True):
        first, second = call(), call()
        np.testing.assert_array_equal(first, second)
        assert relative_error(first, exact) < 4e-3 or not exact.any()
        assert not np.asarray(first)[exact == 0].any() or exact.any()
