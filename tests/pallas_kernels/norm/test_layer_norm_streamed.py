import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal, on_the_cpu, skipped_outputs

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.norm import layer_norm_streamed as kernels
from pallas_kernels.norm.layer_norm_streamed import Config

can_simulate = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack bulk copies")

CASES = {
    "warps": ((37, 256, "float32"), dict(rows=8)),
    "warps, half precision, ring of two": ((21, 384, "bfloat16"), dict(rows=4, stages=2)),
    "warpgroup": ((5, 2048, "float32"), dict(rows=2)),
    "warpgroup, one row": ((3, 1280, "float16"), dict(rows=1)),
    "fewer rows than a group": ((3, 128, "float32"), dict(rows=8)),
}


@can_simulate
@pytest.mark.parametrize(
    ("name", "center", "known"),
    [(name, center, center) for name in CASES for center in (True, False)]
    + [(name, True, False) for name in ("warps", "warpgroup")],
)
def test_the_simulator_finds_them_right(name, center, known, assert_right):
    (rows, hidden, dtype), sizes = CASES[name]
    configs = [Config(**{"stages": stages, "programs": 1} | sizes) for stages in (4, 3)]
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)):
        assert_right(kernels, rows, hidden, dtype, dtype, center=center, known=known, configs=configs)


def assert_input_gradient_right(rows, hidden, dtype, config):
    t, x = (a.astype(dtype) for a in normal((rows, hidden), (rows, hidden)))
    inv_std = abs(normal((rows,), seed=1)[0])

    @jax.jit
    def both(t, x, inv_std):
        from_x = kernels.input_gradient_from_x(t, x, epsilon=1e-5, config=config)
        return kernels.input_gradient(t, x, inv_std, config=config), from_x

    actual = jax.block_until_ready(both(t, x, inv_std))
    t, x, inv_std = (np.asarray(a, np.float64) for a in (t, x, inv_std[:, None]))
    mean = lambda a: a.mean(-1, keepdims=True)  # noqa: E731
    centered = x - mean(x)
    own_inv_std = 1 / np.sqrt(mean(centered**2) + 1e-5)

    def dx(hat, inv_std):
        return inv_std * (t - mean(t) - hat * mean(t * hat))

    hat = centered * own_inv_std
    assert_close(actual, (dx(x, inv_std), (dx(hat, own_inv_std), hat)), dtype)


@can_simulate
@pytest.mark.parametrize("name", CASES)
def test_the_simulator_finds_dx_alone_right(name):
    (rows, hidden, dtype), sizes = CASES[name]
    config = Config(**{"stages": 3, "programs": 1} | sizes)
    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=2)):
        assert_input_gradient_right(rows, hidden, dtype, config)


@can_simulate
def test_dx_is_the_same_if_the_normalized_rows_are_not_wanted():
    t, x, scale = normal((8, 128), (8, 128), (128,))

    def run():
        config = Config(4, 2, 1)
        dx, _, _, y = kernels.gradients(
            t, x, scale, scale, None, None, epsilon=1e-5, center=True, with_y=True, config=config
        )
        return [(dx, y), kernels.input_gradient_from_x(t, x, epsilon=1e-5, config=config)]

    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=1)):
        expected = run()
        with skipped_outputs(kernels, 2):
            found = run()[:1]
        with skipped_outputs(kernels, 1):
            found += run()[1:]
    for (dx, rows), (expected_dx, expected_rows) in zip(found, expected, strict=True):
        assert not rows.any() and expected_rows.any()
        np.testing.assert_array_equal(dx, expected_dx)


@can_simulate
def test_a_row_whose_squares_overflow_is_nan_and_no_other():
    t, x = normal((4, 128), (4, 128))
    x = x.at[2, 5].set(1e20)

    @jax.jit
    def run(t, x):
        y, _, inv_std = kernels.normalize(x, jnp.ones(128), None, epsilon=1e-5, center=False, config=Config(4, 2, 1))
        return y, inv_std[:, None], *kernels.input_gradient_from_x(t, x, epsilon=1e-5, config=Config(4, 2, 1))

    with on_the_cpu(), simulated(), targeting(dataclasses.replace(HOPPER, multiprocessors=1)):
        for rows in jax.block_until_ready(run(t, x)):
            np.testing.assert_array_equal(np.isnan(rows).all(axis=1), [False, False, True, False])
            assert np.isfinite(rows[:2]).all()


def arguments(hidden, dtype):
    x, scale = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1000, hidden), (hidden,)))
    return [(kernels.normalize, (x, scale, scale), 1), (kernels.gradients, (x, x, scale, scale, None, None), 2)]


OPTIONS = dict(epsilon=1e-5, center=True)


@pytest.mark.parametrize(
    ("hidden", "dtype", "streamed"),
    [
        (128, "bfloat16", True),
        (1024, "float32", True),
        (4096, "bfloat16", True),
        (1152, "bfloat16", False),
        (100, "float32", False),
        (16384, "bfloat16", False),
    ],
)
def test_they_take_rows_that_come_in_whole_pieces(hidden, dtype, streamed, on_hopper):
    for kernel, arrays, _ in arguments(hidden, dtype):
        assert (kernel.unsupported(*arrays, **OPTIONS) is None) == streamed


@pytest.mark.parametrize(
    ("hidden", "dtype", "forward", "backward"),
    [
        (128, "bfloat16", Config(32, 4, 3), Config(32, 3, 4)),
        (256, "float32", Config(8, 4, 3), Config(16, 3, 2)),
        (1024, "bfloat16", Config(4, 4, 3), Config(4, 3, 4)),
        (1024, "float32", Config(4, 4, 3), Config(4, 3, 2)),
        (4096, "bfloat16", Config(1, 4, 3), Config(2, 3, 2)),
        (4096, "float32", Config(1, 4, 3), Config(1, 3, 2)),
        (4352, "float32", Config(1, 4, 2), Config(1, 3, 1)),
        (8192, "float32", Config(1, 4, 1), Config(1, 3, 1)),
    ],
)
def test_the_plan_is_the_sweeps_on_hopper(hidden, dtype, forward, backward, on_hopper):
    found = [kernel.plan(*arrays, **OPTIONS) for kernel, arrays, _ in arguments(hidden, dtype)]
    assert found == [forward, backward]


@pytest.mark.parametrize(
    ("hidden", "by_hat", "from_x"),
    [(1024, Config(4, 3, 2), Config(4, 2, 3)), (4096, Config(2, 2, 3), Config(2, 2, 3))],
)
def test_the_plan_of_dx_alone_is_the_sweeps_on_hopper(hidden, by_hat, from_x, on_hopper):
    x = jax.ShapeDtypeStruct((1000, hidden), "bfloat16")
    assert kernels.input_gradient.plan(x, x, None) == by_hat
    assert kernels.input_gradient_from_x.plan(x, x, epsilon=1e-5) == from_x


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("hidden", [256, 1024, 4096])
def test_gpu_dx_alone_matches_float64(hidden, dtype):
    assert_input_gradient_right(5001, hidden, dtype, None)


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rings_fit_into_shared_memory_or_are_refused(dtype, device):
    refused = []
    with targeting(device):
        for hidden in (*range(128, 1025, 128), *range(1280, 8193, 256)):
            for kernel, arrays, streamed in arguments(hidden, dtype):
                if reason := kernel.unsupported(*arrays, **OPTIONS):
                    refused.append((kernel.name.partition(".")[2], hidden))
                    assert "shared memory" in reason
                    continue
                config = kernel.plan(*arrays, **OPTIONS)
                ring = config.stages * streamed * config.rows * hidden * jnp.dtype(dtype).itemsize
                # Sums across warps take 2 KiB, and barriers 8 bytes per stage.
                assert ring + 2048 + 8 * config.stages <= device.shared_bytes
                assert config.programs * (ring + 2048 + 1024 + 1024) <= device.shared_bytes + 1024
                assert config.stages >= 2
    lengths = range(6400, 8193, 256) if (dtype, device) == ("float32", BLACKWELL_RTX) else ()
    assert refused == [("gradients", hidden) for hidden in lengths]
