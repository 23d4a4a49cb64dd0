import dataclasses

import jax
import pytest
from helpers import on_the_cpu

from pallas_kernels.core.device import BLACKWELL_RTX, HOPPER, targeting
from pallas_kernels.norm import layer_norm as kernels
from pallas_kernels.norm.layer_norm import GradientsConfig, NormalizeConfig

centered_or_not = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])


@centered_or_not
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [(3, 1, "float32"), (70, 5, "float32"), (2, 200, "float16"), (2, 1000, "float32"), (2, 4608, "bfloat16")],
)
def test_they_take_rows_of_any_length(rows, hidden, dtype, center, assert_right):
    with on_the_cpu():
        assert_right(kernels, rows, hidden, dtype, dtype if hidden > 1 else 1e-2, center=center, known=False)


def test_programs_divide_the_rows_and_own_columns(assert_right):
    configs = NormalizeConfig(vector=128), GradientsConfig(vector=256, rows=2, columns=256)
    with on_the_cpu():
        assert_right(kernels, 9, 700, "float32", "float32", center=True, known=False, configs=configs)


def structs(rows, hidden):
    x, scale = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, hidden), (hidden,)))
    return x, scale


@pytest.mark.parametrize(
    ("rows", "hidden", "config"),
    [
        (5, 1, GradientsConfig(128, 1, 128)),
        (8192, 768, GradientsConfig(256, 15, 768)),
        (65536, 4096, GradientsConfig(512, 32, 4096)),
        (65536, 9216, GradientsConfig(512, 32, 3072)),
    ],
)
def test_the_plan_divides_rows_among_multiprocessors_and_columns_among_registers(rows, hidden, config, on_hopper):
    x, scale = structs(rows, hidden)
    options = dict(epsilon=1e-5, center=True)
    assert kernels.gradients.plan(x, x, scale, scale, None, None, **options) == config
    assert kernels.normalize.plan(x, scale, scale, **options) == NormalizeConfig(config.vector)


def test_more_multiprocessors_have_fewer_rows_each():
    x, scale = structs(8192, 768)
    with targeting(dataclasses.replace(HOPPER, multiprocessors=512)):
        assert kernels.gradients.plan(x, x, scale, scale, None, None, epsilon=1e-5, center=True).rows == 4


def test_every_gpu_with_kernels_takes_them():
    x, scale = structs(3, 5)
    for device in (HOPPER, BLACKWELL_RTX):
        with targeting(device):
            assert not kernels.normalize.unsupported(x, scale, scale, epsilon=1e-5, center=True)
            assert not kernels.gradients.unsupported(x, x, scale, scale, None, None, epsilon=1e-5, center=True)
