import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_numerical_gradients_agree, every_implementation, gradients_of

import jaxbp
from jaxbp import linear, relu, relu_backward


@every_implementation
def test_numerical_gradients_agree_to_a_thousandth(implementation):
    x = jnp.array([[-2.0, -0.1, 0.1, 3.0], [0.5, 1.5, -0.5, -1.5]])
    assert_numerical_gradients_agree(relu, (x,), step=0.05, implementation=implementation)


@every_implementation
def test_the_gradient_at_exactly_zero_is_zero(implementation):
    x = jnp.array([0.0, -0.0, jnp.finfo(jnp.float32).tiny])
    (dx,) = gradients_of(relu, (x,), [jnp.full(3, 7.0)], implementation=implementation)
    np.testing.assert_array_equal(dx, [0, 0, 7])


@every_implementation
def test_nan_stays_nan(implementation):
    y = relu(jnp.array([jnp.nan, -jnp.inf, jnp.inf]), implementation=implementation)
    np.testing.assert_array_equal(y, [jnp.nan, 0, jnp.inf])


@every_implementation
def test_a_gradient_that_is_not_finite_passes_only_where_x_is_positive(implementation):
    dy, x = jnp.array([jnp.nan, jnp.nan, jnp.inf, jnp.inf]), jnp.array([1.0, -1.0, 1.0, -1.0])
    np.testing.assert_array_equal(relu_backward(dy, x, implementation=implementation), [jnp.nan, 0, jnp.inf, 0])


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (513,)], ids=str)
@every_implementation
def test_any_shape_works(shape, implementation):
    x = jnp.ones(shape)
    (dx,) = gradients_of(relu, (x,), [x], implementation=implementation)
    np.testing.assert_array_equal(dx, x)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_relu_keeps_its_result_which_the_next_layer_keeps_too(implementation):
    assert _kept(lambda x, w: linear(relu(x, implementation=implementation), w)) == 1


def _kept(layers):
    program = jax.make_jaxpr(lambda x, w: jax.vjp(layers, x, w)[1])(jnp.ones((64, 32)), jnp.ones((2, 32)))
    return len({variable for variable in program.jaxpr.outvars if variable.aval.size == 64 * 32})


@pytest.mark.parametrize("name", ["gelu", "mish"])
def test_the_default_on_a_gpu_keeps_only_x_for_the_backward(name, on_hopper):
    x = jax.ShapeDtypeStruct((2, 128), jnp.float32)
    _, backward = jax.eval_shape(lambda x: jax.vjp(getattr(jaxbp, name), x), x)
    assert sum(a.size for a in jax.tree.leaves(backward)) == x.size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@every_implementation
def test_a_constant_cotangent_of_a_softmax_has_the_gradient_zero(dtype, implementation):
    x = jnp.linspace(-4, 4, 48, dtype=dtype).reshape(3, 16)
    (dx,) = gradients_of(jaxbp.softmax, (x,), [jnp.full_like(x, 3)], implementation=implementation)
    assert jnp.max(jnp.abs(dx)) <= 6 * jnp.finfo(dtype).eps


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_a_softmax_keeps_its_result_which_the_next_product_keeps_too(implementation):
    assert _kept(lambda x, w: linear(jaxbp.softmax(x, implementation=implementation), w)) == 1
