import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, on_the_cpu

from pallas_kernels.conv import conv2d
from pallas_kernels.conv import conv2d_weights_gradient_sm90 as tensor_cores
from pallas_kernels.conv.conv2d_relu_max_pool2d_weights_gradient import weights_gradient
from pallas_kernels.conv.conv2d_weights_gradient_sm90 import Config
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.layouts import LANES
from pallas_kernels.core.simulator import simulated

WINDOW = (2, 2)
can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)


def operands(draw, K, P, Q, C, F, *, N=LANES, dtype="float32"):
    dy, x = draw((K, P, Q, N), (C, 2 * P + F - 1, 2 * Q + F - 1, N))
    place = np.random.default_rng(2).integers(0, 5, (K, P, Q, N), np.uint8)
    return dy.astype(dtype), jnp.asarray(place), x.astype(dtype)


def integers(*shapes):
    """The tensor cores compute with small integers exactly."""
    random = np.random.default_rng(0)
    return [jnp.asarray(random.integers(-3, 4, shape), jnp.float32) for shape in shapes]


exact_gradient = functools.partial(weights_gradient, window=WINDOW)


def gradient(*arrays):
    return tensor_cores.weights_gradient(*arrays, window=WINDOW, config=config_of(*arrays))


def config_of(*arrays):
    large = (jax.ShapeDtypeStruct((*a.shape[:-1], 4096), a.dtype) for a in arrays)
    return tensor_cores.weights_gradient.plan(*large, window=WINDOW)


def pooled_shapes(block, N=LANES):
    return jax.eval_shape(lambda: operands(normal, *BLOCKS[block], N=N))


BLOCKS = {
    "image": (8, 2, 3, 2, 3),
    "gradient": (16, 2, 2, 4, 5),
    "lenet1": (6, 12, 12, 1, 5),
    "lenet2": (16, 4, 4, 6, 5),
}


@pytest.mark.parametrize(
    ("block", "config"),
    [
        ("image", Config(channels=1, places=4, images_on_left=True, stages=4)),
        ("gradient", Config(channels=2, places=4, images_on_left=False, stages=4)),
        ("lenet1", Config(channels=1, places=2, images_on_left=True, stages=4)),
        ("lenet2", Config(channels=2, places=4, images_on_left=False, stages=4)),
    ],
)
def test_configs(block, config):
    assert config_of(*pooled_shapes(block)) == config


def test_rows_that_do_not_come_in_eights_are_refused():
    dy, place, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((3, 2, 3, LANES), (3, 2, 3, LANES), (1, 6, 8, LANES)))
    assert "do not come in eights" in tensor_cores.weights_gradient.unsupported(dy, place, x, window=WINDOW)
    dy, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 5, 5, LANES), (1, 7, 7, LANES)))
    assert "do not come in eights" in tensor_cores.correlate_batch.unsupported(dy, x)


def test_a_convolution_takes_rows_of_a_channel_that_come_in_eights():
    dy, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 8, 6, LANES), (8, 8, 8, LANES)))
    # A CTA would copy 6 or 12 rows per channel, no multiple of 8.
    assert tensor_cores.correlate_batch.unsupported(dy, x) is not None
    dy, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 8, 8, LANES), (6, 12, 12, LANES)))
    assert tensor_cores.correlate_batch.plan(dy, x) == Config(2, 2, images_on_left=False, stages=3)


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
def test_other_architectures_are_refused(gpu):
    dy, place, x = pooled_shapes("lenet2", 4096)
    with targeting(gpu):
        for reason in (
            tensor_cores.weights_gradient.unsupported(dy, place, x, window=WINDOW),
            tensor_cores.correlate_batch.unsupported(jax.ShapeDtypeStruct((16, 8, 8, 4096), "float32"), x),
        ):
            assert reason.startswith(f"compute capability {gpu.capability[0]}.0")


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shared_bytes", [232_448, 160_000, 101_376, 49_152])
def test_the_stages_fit_shared_memory_or_the_kernel_refuses(block, shared_bytes):
    dy, place, x = pooled_shapes(block, 4096)
    with targeting(dataclasses.replace(HOPPER, shared_bytes=shared_bytes)):
        if reason := tensor_cores.weights_gradient.unsupported(dy, place, x, window=WINDOW):
            assert shared_bytes < 160_000 and "shared memory" in reason
            return
        config = tensor_cores.weights_gradient.plan(dy, place, x, window=WINDOW)
    (K, P, Q, _), (_, H, W, _) = dy.shape, x.shape
    routed, images = config.places * K * Q, config.channels * (H - 2 * P + 2) * W + 8
    if config.images_on_left:
        images = -(-images // 64) * 64
    assert config.stages >= 2
    assert config.stages * (128 * (images + K * Q) + K * Q * 32) + 2 * 128 * routed <= shared_bytes


@can_simulate
@pytest.mark.parametrize("block", ["image", "gradient"])
def test_the_simulator_finds_the_pooled_gradient_right(block):
    arrays = operands(integers, *BLOCKS[block])
    with on_the_cpu():
        expected = exact_gradient(*arrays)
        with simulated():
            actual = jax.jit(gradient)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@can_simulate
@pytest.mark.parametrize(("K", "I", "J", "C", "F"), [(4, 4, 4, 2, 5), (8, 4, 4, 4, 5)])
def test_the_simulator_finds_the_convolutions_gradient_right(K, I, J, C, F):  # noqa: E741
    dy, x = integers((K, I, J, LANES), (C, I + F - 1, J + F - 1, LANES))
    with on_the_cpu():
        expected = conv2d.correlate_batch(dy, x), dy.sum((1, 2, 3))
        with simulated():
            actual = jax.jit(tensor_cores.correlate_batch)(dy, x)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@can_simulate
def test_rounding_keeps_a_nan_of_all_ones():
    dy, place, x = operands(integers, *BLOCKS["image"])
    nan = np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0]
    with on_the_cpu(), simulated():
        dw, db = jax.jit(gradient)(dy.at[3, 0, 0, 0].set(nan), place.at[3, 0, 0, 0].set(0), x)
    assert np.isnan(db[3]) and np.isnan(dw[3]).all() and np.isfinite(np.delete(db, 3)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_they_lower_for_cuda(block, dtype):
    dy, place, x = jax.eval_shape(lambda: operands(normal, *BLOCKS[block], N=1024, dtype=dtype))
    program = jax.jit(gradient).trace(dy, place, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in program
    K, P, Q, N = dy.shape
    dz = jax.ShapeDtypeStruct((K, 2 * P, 2 * Q, N), dtype)
    program = jax.jit(tensor_cores.correlate_batch).trace(dz, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in program


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("N", [LANES, 5 * LANES, 4096])
@pytest.mark.parametrize("block", ["lenet1", "lenet2"])
def test_gpu_gradients_match_float64_and_repeat_their_bits(block, N, dtype):
    arrays = operands(normal, *BLOCKS[block], N=N, dtype=dtype)
    dy, place, x = (np.asarray(a, np.float64) for a in arrays)
    K, P, Q, _ = dy.shape
    dz = np.where(place[..., None] == np.arange(4), dy[..., None], 0).reshape(K, P, Q, N, 2, 2)
    dz = dz.transpose(0, 1, 4, 2, 5, 3).reshape(K, 2 * P, 2 * Q, N)
    patches = np.lib.stride_tricks.sliding_window_view(x, dz.shape[1:3], axis=(1, 2))
    expected = np.einsum("kijn,cuvnij->kcuv", dz, patches, optimize=True), dz.sum((1, 2, 3))

    def both(dy, place, x, dz):
        return *gradient(dy, place, x), *tensor_cores.correlate_batch(dz, x)

    once, again = (jax.jit(both)(*arrays, jnp.asarray(dz, dtype)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    for actual, wanted in zip(once, (*expected, *expected), strict=True):
        assert np.linalg.norm(actual - wanted) <= 1e-3 * np.linalg.norm(wanted)
