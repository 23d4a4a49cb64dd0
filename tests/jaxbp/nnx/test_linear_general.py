import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import IMAGES, ROWS, assert_layers_agree, make

import jaxbp


@pytest.mark.parametrize(
    "options",
    [dict(axis=(-1, 1), use_bias=False), dict(axis=(1, -1), batch_axis={0: 2})],
    ids=["two axes", "a batch axis"],
)
def test_linear_general_takes_the_axes_of_flax(options):
    assert_layers_agree("LinearGeneral", (4, 6), (2, 3), x=IMAGES, implementation="xla", **options)


def test_sizes_in_another_order_are_an_error():
    with pytest.raises(TypeError, match="contracting dimensions to have the same shape"):
        make(jaxbp.nnx, "LinearGeneral", (6, 4), 2, axis=(1, -1))(IMAGES)


@pytest.mark.parametrize(
    ("formula", "kernel", "bias"),
    [("...ti,ik->...kt", (6, 3), (3,)), ("bhwi,hik->bwk", (4, 6, 3), None), ("bhwi,hik->hbk", (4, 6, 3), (4, 3))],
    ids=["an ellipsis", "a sum over the image", "a batch axis of both"],
)
def test_einsum_takes_the_formulas_of_flax(formula, kernel, bias):
    assert_layers_agree("Einsum", formula, kernel, bias, x=IMAGES, implementation="xla")


def test_a_call_of_einsum_may_have_another_formula():
    ours, twin = (make(module, "Einsum", "bti,ik->btk", (6, 3)) for module in (jaxbp.nnx, nnx))
    np.testing.assert_allclose(ours(ROWS, "bti,ik->kbt"), twin(ROWS, "bti,ik->kbt"), rtol=1e-5)
    with pytest.raises(ValueError, match="must be explicit"):
        ours(ROWS, "bti,ik")


@pytest.mark.parametrize("name", ["LinearGeneral", "Einsum"])
def test_options_that_only_flax_has_are_refused_with_an_implementation_and_reported_without(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: implementation='xla' does not take preferred_element_ty"):
        make(jaxbp.nnx, name, preferred_element_type=jnp.float32, implementation="xla")
    with pytest.warns(UserWarning, match=f"{name}: Flax computes this layer, because .* preferred_element_type"):
        make(jaxbp.nnx, name, preferred_element_type=jnp.float32)
