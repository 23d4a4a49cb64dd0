import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, every_implementation, in_float64, normal, on_the_cpu, ours, value_and_gradients
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jaxbp import gated_linear_unit, gated_linear_unit_backward

TWINS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}
every_activation = pytest.mark.parametrize("activation", TWINS)


def op_of(activation, implementation):
    return functools.partial(gated_linear_unit, activation=activation, implementation=implementation)


def twin_of(activation):
    return lambda gate, up: TWINS[activation](gate) * up


@every_activation
@every_implementation
def test_it_is_the_product_with_the_activation_of_jax_nn(activation, implementation):
    gate, up, dy = normal((3, 50), (3, 50), (3, 50))
    expected = in_float64(value_and_gradients(twin_of(activation)), (gate, up), [dy])
    found = value_and_gradients(op_of(activation, implementation))((gate, up), [dy])
    assert_close(found, expected, "float32")
    backward = gated_linear_unit_backward(dy, gate, up, activation, implementation=implementation)
    assert_close(backward, expected[1], "float32")


@every_activation
@every_implementation
def test_gates_that_saturate_give_the_limits(activation, implementation):
    gate = jnp.array([-jnp.inf, -6e19, -200.0, 200.0, 6e19, jnp.inf])
    up = jnp.full(6, 2.0)
    y, vjp = jax.vjp(op_of(activation, implementation), gate, up)
    value = np.where(gate > 0, 1 if activation == "sigmoid" else gate, 0)
    slope = np.where((gate > 0) & (activation != "sigmoid"), 2, 0)
    for actual, expected in zip((y, *vjp(jnp.ones(6))), (2 * value, slope, value), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-30)


@every_implementation
def test_nan_stays_nan(implementation):
    gate, up = jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.nan])
    for activation in TWINS:
        assert jnp.isnan(op_of(activation, implementation)(gate, up)).all()
        _, dup = gated_linear_unit_backward(jnp.ones(2), gate, up, activation, implementation=implementation)
        np.testing.assert_array_equal(jnp.isnan(dup), [True, False])


@ours
def test_the_backward_keeps_only_gate_and_up(implementation):
    gate, up = normal((8, 64), (8, 64))
    program = jax.make_jaxpr(lambda gate, up: jax.vjp(op_of("silu", implementation), gate, up)[1])(gate, up)
    assert {*program.jaxpr.outvars} <= {*program.jaxpr.invars}


@ours
def test_half_precisions_are_rounded_once(implementation):
    gate, up = (a.astype(jnp.bfloat16) for a in normal((500,), (500,)))
    y = gated_linear_unit(gate, up, implementation=implementation)
    exact = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


@every_activation
def test_check_grads_to_second_order(activation):
    with jax.enable_x64(True):
        arguments = [jnp.asarray(np.random.default_rng(seed).standard_normal(9)) for seed in range(2)]
        check_grads(op_of(activation, "xla"), arguments, order=2, modes=("rev",))


@ours
def test_vmap_maps_one_argument_or_both(implementation):
    gate, up = normal((4, 3), (3, 4))
    op = op_of("gelu", implementation)
    both = jax.vmap(jax.grad(lambda gate, up: jnp.sum(op(gate, up))), (0, 1))(gate, up)
    one = jax.vmap(jax.grad(lambda gate, up: jnp.sum(op(gate, up))), (0, None))(gate, up[:, 0])
    gradient = jax.grad(lambda gate, up: jnp.sum(twin_of("gelu")(gate, up)))
    expected = gradient(gate, up.T), gradient(gate, jnp.broadcast_to(up[:, 0], (4, 3)))
    assert_close([both, one], expected, "float32")


@pytest.mark.parametrize("implementation", ["xla", "autodiff", None])
def test_the_gradient_is_exported_for_any_batch(implementation):
    (batch,) = jax.export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(lambda gate, up: jnp.sum(op_of("silu", implementation)(gate, up)), (0, 1)))
    with on_the_cpu():
        exported = jax.export.export(gradient)(*[jax.ShapeDtypeStruct((batch, 4), jnp.float32)] * 2)
        for count in (1, 3):
            gate, up = normal((count, 4), (count, 4))
            assert_close(exported.call(gate, up), gradient(gate, up), "float32")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@ours
def test_on_a_mesh_each_device_has_its_examples(axes, implementation):
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(axes,))
    sharding = NamedSharding(mesh, PartitionSpec("examples"))
    arrays = normal((8, 16), (8, 16), (8, 16))
    gradient = jax.jit(lambda dy, gate, up: jax.vjp(op_of("silu", implementation), gate, up)[1](dy))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, sharding) for a in arrays]
        program = gradient.lower(*placed).compile()
        found = program(*placed)
    assert "all-gather" not in program.as_text()
    assert all(a.sharding.is_equivalent_to(sharding, 2) for a in found)
    assert_close(found, gated_linear_unit_backward(*arrays, implementation="autodiff"), "float32")


@pytest.mark.parametrize("activation", ["swish", None, jax.nn.silu, ["silu"]])
def test_an_unknown_activation_is_refused(activation):
    wanted = "wants one of 'silu', 'gelu', 'gelu_exact', 'relu', 'sigmoid'"
    with pytest.raises(ValueError, match=f"^gated_linear_unit: activation is .*; {wanted}"):
        gated_linear_unit(jnp.ones(2), jnp.ones(2), activation)


def test_other_shapes_and_integers_are_refused():
    with pytest.raises(ValueError, match=r"^gated_linear_unit: up has shape \(3,\); wants \(2, 3\)"):
        gated_linear_unit(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"^gated_linear_unit_backward: dy has shape \(2,\); wants \(3,\)"):
        gated_linear_unit_backward(jnp.ones(2), jnp.ones(3), jnp.ones(3))
    with pytest.raises(TypeError, match=r"^gated_linear_unit: gate has dtype int32; wants a floating dtype"):
        gated_linear_unit(jnp.ones(3, jnp.int32), jnp.ones(3))
