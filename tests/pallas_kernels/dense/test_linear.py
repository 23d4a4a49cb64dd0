import jax
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu, relative_error

from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.dense import linear as kernels

N, INPUTS, OUTPUTS = 128, 5, 3


@jax.jit
def gradients(dy, x, w):
    return kernels.input_gradient(dy, w), kernels.weight_gradient(dy, x), kernels.bias_gradient(dy)


def test_they_match_float64():
    dy, x, w = normal((OUTPUTS, N), (INPUTS, N), (OUTPUTS, INPUTS))
    with on_the_cpu():
        results = gradients(dy, x, w)
    dy, x, w = (np.asarray(a, np.float64) for a in (dy, x, w))
    for actual, expected in zip(results, (w.T @ dy, dy @ x.T, dy.sum(axis=1)), strict=True):
        assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
def test_they_hold_no_products_of_the_tensor_cores(device):
    arrays = normal((OUTPUTS, N), (INPUTS, N), (OUTPUTS, INPUTS))
    with targeting(device):
        program = cuda_program(lambda *a: gradients.__wrapped__(*a), *arrays)
    assert program.count("custom_call @mosaic_gpu") == 3
    assert "wgmma" not in program and "dot_general" not in program
