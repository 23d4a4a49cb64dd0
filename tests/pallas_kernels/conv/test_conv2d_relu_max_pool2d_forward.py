import pytest
from exact_blocks import BLOCKS, WINDOW, shapes

from pallas_kernels.conv.conv2d_relu_max_pool2d_forward import ForwardConfig, forward
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, targeting
from pallas_kernels.core.layouts import LANES


@pytest.mark.parametrize(
    ("block", "N", "config"),
    [
        ("lenet1", 1024, ForwardConfig(3, 4, 2 * LANES, 4)),
        ("lenet2", 1024, ForwardConfig(4, 2, LANES, 1)),
        ("lenet2", 2048, ForwardConfig(2, 4, 2 * LANES, 3)),
    ],
)
def test_the_forward_has_short_vectors_where_there_are_fewer_programs_than_multiprocessors(block, N, config, on_hopper):
    x, w, b, *_ = shapes(block, N)
    assert forward.plan(x, w, b, window=WINDOW) == config


@pytest.mark.parametrize("gpu", [BLACKWELL, BLACKWELL_RTX], ids=["B200", "RTX"])
@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_a_kernel_of_later_gpus_too(block, gpu):
    x, w, b, *_ = shapes(block, 1024)
    with targeting(gpu):
        assert forward.unsupported(x, w, b, window=WINDOW) is None
