"""What a backward is held against: differences in float64, and autodiff at kinks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.verify.arguments import take_apart
from jaxbp.verify.reference import Reference


def reference(function, *args, kink_convention=True):
    return Reference(function, take_apart(function, args), {}, 0, kink_convention)


def test_values_and_gradients_are_those_of_calculus():
    x = np.float32([0.5, -2.0])
    found = reference(jnp.sin, x)
    values, gradients = found.first_orders([None], most_elements=2)
    assert (values.order, gradients.order, gradients.against) == (0, 1, "differences")
    np.testing.assert_allclose(values.arrays[0], np.sin(x, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(gradients.arrays[0], found.cotangents[0] * np.cos(x, dtype=np.float64), rtol=1e-7)


@pytest.mark.parametrize("kink_convention", [True, False])
def test_a_kink_has_autodiffs_gradient_or_any(kink_convention):
    found = reference(jnp.abs, np.float32([0.0, 3.0]), kink_convention=kink_convention)
    _, gradients = found.first_orders([None], most_elements=2)
    assert gradients.against == "differences, autodiff at 1 kinks" and not found.smooth
    assert gradients.rounding[0][0] == (0 if kink_convention else np.inf)
    np.testing.assert_allclose(gradients.arrays[0][1], found.cotangents[0][1], rtol=1e-9)
