import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import ROWS, assert_agree, assert_layers_agree, make

import jaxbp


def test_a_base_module_is_added_and_gets_the_arguments_of_the_call():
    def scaled(module):
        class Scaled(nnx.Module):
            def __init__(self):
                self.linear = make(module, "Linear")

            def __call__(self, x, scale):
                return scale * self.linear(x)

        return make(module, "LoRA", base_module=Scaled())

    assert_agree(scaled(jaxbp.nnx), scaled(nnx), ROWS, call=lambda layer, x: layer(x, scale=2.0))
    with pytest.raises(ValueError, match="must be callable"):
        make(jaxbp.nnx, "LoRA", base_module=nnx.Dict())(ROWS)


def test_lora_linear_takes_the_options_of_linear_and_of_lora():
    options = dict(use_bias=False, lora_dtype=jnp.float16, param_dtype=jnp.float16, precision="highest")
    assert_layers_agree("LoRALinear", tolerance=5e-3, implementation="xla", **options)


def test_complex_numbers_of_lora_are_computed_by_flax():
    with pytest.warns(UserWarning, match="LoRALinear: Flax computes this layer, because .* dtype complex64"):
        y = make(jaxbp.nnx, "LoRALinear", lora_dtype=jnp.complex64)(ROWS)
    np.testing.assert_allclose(y, make(nnx, "LoRALinear", lora_dtype=jnp.complex64)(ROWS), rtol=1e-5)
