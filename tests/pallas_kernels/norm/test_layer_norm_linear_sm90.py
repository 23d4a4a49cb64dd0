"""LayerNorm and a dense layer in one pass: simulated, lowered for CUDA, and on a GPU."""

import jax
import numpy as np
import pytest
from helpers import assert_close, cuda_program, normal, on_the_cpu

from pallas_kernels.core.simulator import simulated
from pallas_kernels.norm import layer_norm_linear_sm90 as kernels

can_simulate = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="older simulators lack the tensor cores' instructions"
)
WIDTHS = pytest.mark.parametrize(("hidden", "out"), [(256, 256), (128, 256), (256, 128)])


def draw(rows, hidden, out, dtype="bfloat16", shift=0):
    """x, scale, bias, w, b and dz."""
    x, *others = normal(*shapes(rows, hidden, out))
    return [a.astype(dtype) for a in (x + shift, *others)]


def shapes(rows, hidden, out):
    return (rows, hidden), (hidden,), (hidden,), (out, hidden), (out,), (rows, out)


def structs(rows, hidden, out, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(rows, hidden, out)]


@jax.jit
def both(x, scale, bias, w, b, dz):
    z, *statistics = kernels.forward(x, scale, bias, w, b, eps=1e-5)
    return (z, *statistics), kernels.backward(dz, x, scale, bias, w, *statistics)


def expected(x, scale, bias, w, b, dz):
    first = np.asarray(x[:, 0], np.float64)
    x, scale, bias, w, b, dz = (np.asarray(a, np.float64) for a in (x, scale, bias, w, b, dz))
    mean = lambda a: a.mean(-1, keepdims=True)  # noqa: E731
    centred = x - mean(x)
    inv_std = 1 / np.sqrt(mean(centred**2) + 1e-5)
    hat, dn = centred * inv_std, dz @ w
    y, t = hat * scale + bias, dn * scale
    dx = inv_std * (t - mean(t) - hat * mean(t * hat))
    gradients = dx, (dn * hat).sum(0), dn.sum(0), dz.T @ y, dz.sum(0)
    return (y @ w.T + b, mean(x)[:, 0] - first, inv_std[:, 0]), gradients


@can_simulate
@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
@WIDTHS
def test_the_simulator_finds_them_right(hidden, out, shift, monkeypatch):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 1)
    arrays = draw(320, hidden, out, shift=shift)
    with on_the_cpu(), simulated():
        actual = jax.block_until_ready(both(*arrays))
    assert_close(actual, expected(*arrays), 5e-3)


def test_they_take_narrow_layers_of_half_precisions_and_many_rows():
    def pays(rows, hidden, out, dtype="bfloat16"):
        x, *_, w, _, _ = structs(rows, hidden, out, dtype)
        return kernels.pays(x, w)

    assert pays(65536, 256, 256) and pays(65536, 128, 256, "float16")
    assert not pays(65536, 256, 384) and not pays(65536, 96, 256) and not pays(65536, 256, 256, "float32")
    assert not pays(65540, 256, 256) and not pays(16384, 256, 256) and not pays(0, 256, 256)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@WIDTHS
def test_they_lower_for_cuda(hidden, out, dtype):
    assert "mosaic_gpu" in cuda_program(both, *structs(65536, hidden, out, dtype))


def test_without_a_gpu_separate_kernels_take_their_place():
    arrays = draw(64, 128, 128)
    with on_the_cpu():
        assert_close(both(*arrays), expected(*arrays), 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shift", [0, 100], ids=["", "far from zero"])
@WIDTHS
def test_gpu_results_match_float64_and_repeat_their_bits(hidden, out, shift, dtype):
    arrays = draw(64 * 1001, hidden, out, dtype, shift)
    once, again = both(*arrays), both(*arrays)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert_close(once, expected(*arrays), 5e-3)
