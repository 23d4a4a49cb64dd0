import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, normal

from jaxbp.ops.conv._conv_transpose2d import CONV_TRANSPOSE2D

OPTIONS = dict(
    output_size=(5, 5),
    added=((0, 2), (1, 0)),
    stride=(2, 1),
    padding=((0, 1), (1, 0)),
    dilation=(1, 1),
    groups=1,
    precision=None,
)
ARRAYS = normal((2, 3, 3, 4), (3, 2, 2, 3), (2,), seed=3)


def test_values_and_gradients_are_those_of_autodiff():
    def results(implementation):
        op = lambda *arrays: jnp.sin(CONV_TRANSPOSE2D(*arrays, implementation=implementation, **OPTIONS))  # noqa: E731
        return op(*ARRAYS), jax.grad(lambda *arrays: op(*arrays).sum(), (0, 1, 2))(*ARRAYS)

    found = jax.jit(lambda: [results(implementation) for implementation in ("autodiff", "xla", "pallas")])()
    assert found[0][0].shape == (2, 2, 7, 6)
    for other in found[1:]:
        assert_close(other, found[0], 1e-5)


def test_kernels_support_no_dilation():
    with pytest.raises(NotImplementedError, match=r"conv_transpose2d: .* dilation=\(2, 1\)"):
        options = OPTIONS | dict(dilation=(2, 1), output_size=(6, 5))
        CONV_TRANSPOSE2D(*ARRAYS, implementation="pallas", **options)
