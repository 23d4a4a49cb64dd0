import jax
from exact_blocks import WINDOW

from pallas_kernels.conv.conv2d_relu_max_pool2d_forward import forward
from pallas_kernels.conv.conv2d_relu_max_pool2d_input_gradient import input_gradient
from pallas_kernels.conv.conv2d_relu_max_pool2d_weights_gradient import weights_gradient
from pallas_kernels.core.layouts import LANES


def test_what_does_not_unroll_is_refused_by_every_kernel():
    x, w, b, dy, place = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in ((1, 10, 9, LANES), (2, 1, 9, 8), (2,), (2, 1, 1, LANES), (2, 1, 1, LANES))
    )
    reason, size = "filters of 9 x 8, which have more than 64 positions", dict(input_size=(10, 9))
    assert forward.unsupported(x, w, b, window=WINDOW) == reason
    assert weights_gradient.unsupported(dy, place, x, window=WINDOW) == reason
    assert input_gradient.unsupported(dy, place, w, window=WINDOW, **size) == reason
    w = jax.ShapeDtypeStruct((2, 1, 2, 2), "float32")
    assert forward.unsupported(x, w, b, window=(5, 4)) == "window=(5, 4), which has more than 16 positions"
