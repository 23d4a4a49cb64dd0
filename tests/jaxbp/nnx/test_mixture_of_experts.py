import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, in_float64, kernel_results, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp

FEATURES, HIDDEN, EXPERTS = 6, 5, 4
(X,) = normal((3, 7, FEATURES), seed=1)


def make(experts=EXPERTS, experts_per_token=2, **options):
    """Return a layer whose biases are not 0."""
    layer = jaxbp.nnx.MixtureOfExperts(FEATURES, HIDDEN, experts, experts_per_token, **options, rngs=nnx.Rngs(0))
    for name in ("router_bias", "gate_up_bias", "down_bias"):
        if (parameter := getattr(layer, name)) is not None:
            (parameter[...],) = normal(parameter.shape, seed=2)
    return layer


def total(y, load_balancing_loss, z_loss):
    return jnp.sum(jnp.sin(y).astype(z_loss.dtype)) + 0.3 * load_balancing_loss + 0.2 * z_loss


def loss_of(layer):
    graph, state = nnx.split(layer)

    def loss(state, x):
        y, routing = nnx.merge(graph, state)(x)
        return total(y, routing.load_balancing_loss, routing.z_loss), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)), state


def all_experts(x, router, gate_up, down, router_bias, gate_up_bias, down_bias, experts_per_token, normalize):
    """Evaluate every expert for every token."""
    tokens, experts = x.reshape(-1, x.shape[-1]), router.shape[1]
    logits = tokens @ router + router_bias
    p = jax.nn.softmax(logits)
    selected = jax.nn.one_hot(jax.lax.top_k(p, experts_per_token)[1], experts, dtype=x.dtype).sum(1)
    weights = p * selected
    weights = weights / weights.sum(1, keepdims=True) if normalize else weights
    gate, up = jnp.split(jnp.einsum("ti,eio->eto", tokens, gate_up) + gate_up_bias[:, None], 2, axis=-1)
    results = jnp.einsum("eth,eho->eto", jax.nn.silu(gate) * up, down) + down_bias[:, None]
    y = jnp.einsum("te,eto->to", weights, results).reshape(x.shape)
    balance = experts * jnp.sum(selected.mean(0) / experts_per_token * p.mean(0))
    return total(y, balance, jnp.mean(jax.nn.logsumexp(logits, axis=1) ** 2)), y


NAMES = "router", "gate_up", "down", "router_bias", "gate_up_bias", "down_bias"


@pytest.mark.parametrize(
    ("experts_per_token", "normalize", "implementation"),
    [(1, False, "xla"), (2, True, "xla"), (EXPERTS, False, "autodiff")],
)
def test_values_losses_and_gradients_are_those_of_all_experts_in_float64(experts_per_token, normalize, implementation):
    options = dict(experts_per_token=experts_per_token, normalize=normalize)
    layer = make(**options, use_bias=True, use_router_bias=True, implementation=implementation)
    run, state = loss_of(layer)
    (value, y), (of_state, dx) = run(state, X)
    dense = functools.partial(all_experts, **options)
    exact = jax.jit(jax.value_and_grad(dense, range(7), has_aux=True))
    (wanted, wanted_y), (wanted_dx, *gradients) = in_float64(exact, X, *(state[name][...] for name in NAMES))
    assert_close((value, y, dx), (wanted, wanted_y, wanted_dx), "float32")
    assert_close([of_state[name][...] for name in NAMES], gradients, "float32")


def test_no_token_is_dropped_if_all_go_to_one_expert():
    layer = make(experts_per_token=1, use_router_bias=True, implementation="xla")
    layer.router_bias[...] = jnp.array([0.0, 0.0, 100.0, 0.0])
    y, routing = layer(X)
    gate, up = jnp.split(X @ layer.gate_up[2], 2, axis=-1)
    assert set(routing.experts.ravel().tolist()) == {2}
    assert_close(y, (jax.nn.silu(gate) * up) @ layer.down[2], "float32")
    np.testing.assert_allclose(routing.load_balancing_loss, EXPERTS, rtol=1e-6)


def test_experts_whose_probabilities_round_to_0_keep_their_order():
    layer = jaxbp.nnx.MixtureOfExperts(1, 4, experts=3, experts_per_token=2, rngs=nnx.Rngs(0))
    layer.router[...] = jnp.array([[0.0, -120.0, -110.0]])
    assert layer.route(np.ones((1, 1), np.float32)).experts.tolist() == [[0, 2]]


def test_the_losses_of_a_uniform_router():
    layer = make(experts_per_token=EXPERTS)
    layer.router[...] = jnp.zeros((FEATURES, EXPERTS))
    routing = layer.route(X)
    np.testing.assert_allclose(routing.load_balancing_loss, 1, rtol=1e-6)
    np.testing.assert_allclose(routing.z_loss, np.log(EXPERTS) ** 2, rtol=1e-6)
    np.testing.assert_allclose(routing.weights, np.full((21, EXPERTS), 1 / EXPERTS), rtol=1e-6)


def test_jitter_changes_only_the_router_and_only_in_training():
    layer, without = make(jitter=0.5), make()
    nnx.update(layer, nnx.state(without, nnx.Param))
    first, second = (layer.route(X).z_loss for _ in range(2))
    assert len({float(first), float(second), float(without.route(X).z_loss)}) == 3
    of_key = [layer.route(X, rngs=nnx.Rngs(5)).z_loss for _ in range(2)]
    assert of_key[0] == of_key[1] != first
    layer.eval()
    jax.tree.map(np.testing.assert_array_equal, layer(X), without(X))
    layer.train()
    assert float(layer.route(X).z_loss) != float(without.route(X).z_loss)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_gradients_gather_and_do_not_scatter(implementation, on_hopper):
    run, state = loss_of(make(use_bias=True, implementation=implementation, dtype=jnp.bfloat16))
    program = run.lower(state, X.astype(jnp.bfloat16)).as_text()
    assert "stablehlo.gather" in program and "scatter" not in program


def test_kernels_compute_the_products_of_both_layers_and_their_gradients(on_hopper):
    run, state = loss_of(make(implementation="pallas", dtype=jnp.bfloat16))
    without = loss_of(make(implementation="xla", dtype=jnp.bfloat16))
    struct = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    products = sum(count == 1 for count in kernel_results(run, state, struct))
    assert products >= 6 and kernel_results(*without, struct) == []


def test_results_have_the_dtype_of_the_computation_and_routing_is_in_float32():
    y, routing = make(dtype=jnp.bfloat16)(X)
    assert y.dtype == jnp.bfloat16
    assert {a.dtype for a in routing[1:]} == {jnp.dtype("float32")}
    exact, of_float32 = make()(X)
    assert_close(y, exact, "bfloat16")
    np.testing.assert_array_equal(routing.experts, of_float32.experts)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
def test_devices_of_a_mesh_may_divide_the_experts():
    mesh = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
    run, state = loss_of(make(experts=8, use_bias=True, implementation="xla"))
    expected = run(state, X)

    def place(path, a):
        spec = P("experts") if path[0].key.startswith(("gate_up", "down")) else P()
        return jax.device_put(a, NamedSharding(mesh, spec))

    placed = jax.tree_util.tree_map_with_path(place, state)
    with jax.set_mesh(mesh):
        _, (of_state, _) = found = run(placed, X)
    assert_close(found, expected, "float32")
    assert of_state["gate_up"][...].sharding.spec[0] == "experts"


def test_an_empty_batch_has_an_empty_result_and_losses_and_gradients_of_0():
    run, state = loss_of(make(use_bias=True, use_router_bias=True, implementation="xla"))
    (loss, y), (gradients, dx) = run(state, X[:0])
    assert y.shape == dx.shape == (0, 7, FEATURES)
    assert not any(np.any(a) for a in jax.tree.leaves((loss, gradients)))


INVALID = {
    "no experts": (dict(experts=0), "MixtureOfExperts: experts is 0; wants an int of at least 1"),
    "more experts per token than experts": (
        dict(experts_per_token=5),
        "MixtureOfExperts: experts_per_token is 5; wants at most 4, all experts",
    ),
    "jitter": (dict(jitter=2.0), "MixtureOfExperts: jitter is 2.0; wants a number in [0.0, 1.0]"),
    "implementation": (
        dict(implementation="cuda"),
        "MixtureOfExperts: implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff', or None",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_options_are_refused(name):
    options, message = INVALID[name]
    with pytest.raises(ValueError) as raised:
        make(**options)
    assert str(raised.value) == message


def test_inputs_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"^MixtureOfExperts: inputs has shape \(2, 5\); wants \(..., 6\)"):
        make()(jnp.zeros((2, 5)))
    with pytest.raises(TypeError, match="MixtureOfExperts: inputs is a list; wants an array"):
        make()([[0.0]])
