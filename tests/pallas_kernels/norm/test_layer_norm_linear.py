import jax
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu

from pallas_kernels.norm import layer_norm_linear as kernels
from pallas_kernels.norm.layer_norm_linear import Config


def draw(outputs, hidden, dtype="bfloat16"):
    s, db, *others = normal((outputs, hidden), (outputs,), (hidden,), (hidden,), (outputs, hidden))
    return [s, db, *(a.astype(dtype) for a in others)]


def expected(s, db, scale, bias, w):
    s, db, scale, bias, w = (np.asarray(a, np.float64) for a in (s, db, scale, bias, w))
    return s * scale + db[:, None] * bias, (w * s).sum(0), (w * db[:, None]).sum(0)


@pytest.mark.parametrize(
    ("outputs", "hidden", "dtype", "config"),
    [
        (24, 256, "float32", Config(outputs=6, columns=128)),
        (3, 128, "float32", None),
        (5, 384, "bfloat16", None),
    ],
    ids=str,
)
def test_they_match_float64(outputs, hidden, dtype, config):
    arrays = draw(outputs, hidden, dtype)
    with on_the_cpu():
        actual = kernels.parameter_gradients(*arrays, config=config)
    assert actual[0].dtype == dtype
    assert_close(actual, expected(*arrays), dtype)


@pytest.mark.parametrize(
    ("outputs", "hidden", "config"),
    [
        (1024, 1024, Config(16, 256)),
        (4096, 1024, Config(16, 256)),
        (4096, 4096, Config(32, 256)),
        (10, 128, Config(10, 128)),
        (37, 384, Config(1, 128)),
    ],
)
def test_the_plan_divides_the_outputs_and_fills_the_multiprocessors(outputs, hidden, config, on_hopper):
    assert kernels.parameter_gradients.plan(*draw(outputs, hidden)) == config


@pytest.mark.parametrize(("outputs", "hidden"), [(3, 5), (3, 200), (0, 128)])
def test_other_rows_are_refused(outputs, hidden, on_hopper):
    reason = f"weights of shape ({outputs}, {hidden}), only rows of a multiple of 128"
    assert kernels.parameter_gradients.unsupported(*draw(outputs, hidden)) == reason


def test_they_lower_for_cuda():
    assert "mosaic_gpu" in cuda_program(kernels.parameter_gradients, *draw(64, 256))


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "hidden"), [(1024, 4096), (384, 128), (96, 1152)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gpu_results_match_float64_and_repeat_their_bits(outputs, hidden, dtype):
    arrays, run = draw(outputs, hidden, dtype), jax.jit(kernels.parameter_gradients)
    first, second = run(*arrays), run(*arrays)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert_close(first, expected(*arrays), dtype)
