import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import IMAGES, assert_layers_agree, make
from jax import lax

import jaxbp

SEQUENCES = IMAGES[0]
VOLUMES = IMAGES[None]
MASK = np.tile(np.tri(3, dtype=np.float32)[:, :, None, None], (6, 4))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((6, 4, 3), dict(padding="CAUSAL", kernel_dilation=2, use_bias=False)),
        ((6, 4, (3,), 2), dict(padding="REFLECT", dtype=jnp.float16)),
        ((6, 4, (3, 2), (2, 1)), dict(padding="CIRCULAR", kernel_dilation=(2, 1))),
        ((6, 6, (2, 3), None), dict(padding=[(0, 2), 1], feature_group_count=3)),
        ((6, 4, (3, 3)), dict(padding="VALID", mask=MASK)),
        ((6, 4, (2, 3)), dict(padding=2, input_dilation=(1, 2), precision="highest")),
        ((6, 4, (2, 2, 2)), {}),
        ((6, 4, (2, 3)), dict(conv_general_dilated=lambda *args, **o: 2 * lax.conv_general_dilated(*args, **o))),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_conv_takes_the_options_of_flax(arguments, options):
    axes = 1 if isinstance(arguments[2], int) else len(arguments[2])
    x = {1: SEQUENCES, 2: IMAGES, 3: VOLUMES}[axes]
    assert_layers_agree("Conv", *arguments, x=x, tolerance=5e-3 if "dtype" in options else 1e-5, **options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((6, 4, 3), dict(padding="VALID", kernel_dilation=2, use_bias=False, precision="highest")),
        ((6, 4, (2,), 3), dict(transpose_kernel=True)),
        ((6, 4, (1, 2), (3, 2)), dict(padding="VALID", transpose_kernel=True)),
        ((6, 4, (3, 2), (2, 1)), dict(padding=[(0, 4), 1], kernel_dilation=(1, 2))),
        ((6, 4, (3, 3), 2), dict(mask=MASK)),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_conv_transpose_takes_the_options_of_flax(arguments, options):
    x = SEQUENCES if arguments[2] == 3 or len(arguments[2]) == 1 else IMAGES
    assert_layers_agree("ConvTranspose", *arguments, x=x, implementation="xla", **options)


@pytest.mark.parametrize(("size", "options"), [((2, 2, 2), {}), ((3, 3), dict(padding="CIRCULAR"))])
def test_flax_computes_other_transposed_convolutions_and_a_warning_says_so(size, options):
    reported = f"ConvTranspose: Flax computes this layer, because jaxbp does not take {(*options, '3 spatial axes')[0]}"
    with pytest.warns(UserWarning, match=reported):
        ours = make(jaxbp.nnx, "ConvTranspose", 6, 4, size, **options)
    x = VOLUMES if len(size) == 3 else IMAGES
    np.testing.assert_array_equal(ours(x), make(nnx, "ConvTranspose", 6, 4, size, **options)(x))


@pytest.mark.parametrize("x", [IMAGES[0], IMAGES.reshape(1, 2, 4, 5, 6)], ids=["no batch", "two batch axes"])
def test_batch_axes_are_free(x):
    assert_layers_agree("Conv", 6, 4, (3, 3), x=x)


def test_a_padding_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="Invalid padding"):
        make(jaxbp.nnx, "Conv", 6, 4, (3, 3), padding=(1, 2, 3))(IMAGES)


def test_options_that_only_flax_has_are_refused_with_an_implementation():
    with pytest.raises(NotImplementedError, match=r"^Conv: implementation='xla' does not take input_dilation"):
        make(jaxbp.nnx, "Conv", 6, 4, (3, 3), input_dilation=2, implementation="xla")
    with pytest.raises(NotImplementedError, match=r"^Conv: implementation='pallas' does not take 3 spatial axes"):
        make(jaxbp.nnx, "Conv", 6, 4, (2, 2, 2), implementation="pallas")
