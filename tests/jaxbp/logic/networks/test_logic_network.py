import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp
from jaxbp import LearnedWires, Netlist, Wires
from jaxbp.logic.gates import PARAMETERS
from jaxbp.nn import LogicLayer, LogicNetwork, thermometer


def bits(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5, jnp.float32)


def test_the_example_of_the_page_on_logic_gates_runs():
    page = (Path(__file__).parents[4] / "docs" / "logic_gates.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, "logic_gates.md", "exec"), names)
    assert names["dlogits"].shape == (12, 16) and names["bits"].shape == (5, 12)


def test_a_thermometer_has_a_bit_a_threshold():
    x = jnp.array([[0.1, 0.6], [0.5, 1.0]])
    assert thermometer(x, [0.25, 0.5]).tolist() == [[0, 0, 1, 1], [1, 0, 1, 1]]


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_a_thermometer_compares_integers_with_the_thresholds_as_they_are(dtype):
    x = np.array([[True, False]], dtype)
    assert thermometer(x, [0.5]).tolist() == [[1, 0]]
    assert thermometer(x, [0.5, 1.0, 300.0]).dtype == dtype


def test_a_tau_that_is_no_divisor_is_refused():
    for tau in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=f"^LogicNetwork: tau is {tau}; wants a number above 0"):
            LogicNetwork(8, [12, 10], 5, tau=tau, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("widths", [12, "12", [10, None]], ids=repr)
def test_widths_are_checked(widths):
    message = f"LogicNetwork: widths is {widths!r}; wants a list with the number of gates in each layer"
    with pytest.raises(TypeError, match=re.escape(message)):
        LogicNetwork(8, widths, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="LogicNetwork: widths ends with 12; wants a multiple of the 5 classes"):
        LogicNetwork(8, [10, 12], 5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(arity="4"), "LogicNetwork: arity is '4'; wants one of 2, 4"),
        (dict(seed=None), "LogicNetwork: seed is None; wants an int of at least 0"),
        (dict(wiring="random"), "LogicNetwork: wiring is 'random'; wants a function, say jaxbp.Wires.random"),
        (dict(wiring=print), "LogicLayer: wires is a NoneType; wants a jaxbp.Wires or jaxbp.LearnedWires"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LogicNetwork(8, [12, 10], 5, **options, rngs=nnx.Rngs(0))


def test_a_layer_is_the_op_with_its_parameters():
    wires = Wires.random(5, 6, seed=0)
    layer = LogicLayer(wires, initialization="normal", rngs=nnx.Rngs(0))
    x = bits((3, 5))
    assert (layer(x) == jaxbp.gate_layer(layer.logits[...], wires, x)).all()
    assert (layer.harden() == jaxbp.harden(layer.logits[...])).all()


def test_only_the_logits_are_trained():
    network = LogicNetwork(8, [12, 10], 5, rngs=nnx.Rngs(0))
    assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(network, nnx.Param))] == [(12, 16), (10, 16)]


def test_the_scores_are_sums_of_groups_over_tau():
    options = dict(initialization="normal", seed=3)
    network = LogicNetwork(8, [12, 10], 5, tau=4.0, **options, rngs=nnx.Rngs(0))
    x = bits((3, 8))
    y = network.layers[1](network.layers[0](x))
    np.testing.assert_allclose(network(x), y.reshape(3, 5, 2).sum(axis=-1) / 4, rtol=1e-6)


def test_seeds_tell_the_wires_of_networks_and_layers_apart():
    def wires(seed):
        layers = LogicNetwork(8, [8, 8], 2, seed=seed, rngs=nnx.Rngs(0)).layers
        return [np.asarray(layer.wires.get_value().a).tolist() for layer in layers]

    assert wires(0) == wires(0) != wires(7)
    assert wires(0)[0] != wires(0)[1]


@pytest.mark.parametrize("parametrization", PARAMETERS)
def test_the_hardened_network_is_its_circuit(parametrization):
    options = dict(initialization="normal", parametrization=parametrization)
    network = LogicNetwork(16, [40, 30], 5, **options, rngs=nnx.Rngs(1))
    x = bits((50, 16))
    outputs = network.harden()(np.asarray(x) > 0)
    assert np.array_equal(network(x, hard=True), outputs.reshape(50, 5, 6).sum(axis=-1).astype(np.float32))
    assert not np.array_equal(network(x), network(x, hard=True))


@pytest.mark.parametrize("relaxation", ["straight_through", "softmax"])
def test_the_hardened_network_with_learned_wires_is_its_circuit(relaxation):
    wiring = functools.partial(LearnedWires.random, candidates=4, relaxation=relaxation)
    options = dict(wiring=wiring, initialization="normal", parametrization="walsh")
    network = LogicNetwork(16, [40, 30], 5, **options, rngs=nnx.Rngs(1))
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(network, nnx.Param))]
    assert sorted(shapes) == [(30, 4), (40, 4), (60, 4), (80, 4)]
    x, circuit = bits((50, 16)), network.harden()
    outputs = circuit(np.asarray(x) > 0)
    assert np.array_equal(network(x, hard=True), outputs.reshape(50, 5, 6).sum(axis=-1).astype(np.float32))
    assert not np.array_equal(network(x), network(x, hard=True))
    netlist = Netlist.of(circuit).simplify()
    read = {gate for cone in netlist.cones() for gate in cone}
    assert len(read) == len(netlist) < 70, "gates that no output needs are removed"
    assert np.array_equal(netlist(np.asarray(x) > 0), outputs)


@pytest.mark.parametrize("wiring", [Wires.random, functools.partial(LearnedWires.random, candidates=4)])
def test_the_hardened_network_of_gates_with_four_inputs_is_its_circuit(wiring):
    network = LogicNetwork(16, [40, 30], 5, arity=4, wiring=wiring, initialization="normal", rngs=nnx.Rngs(1))
    assert [(layer.logits.shape, layer.parametrization) for layer in network.layers] == [
        ((40, 16), "input_wise"),
        ((30, 16), "input_wise"),
    ]
    x, circuit = bits((50, 16)), network.harden()
    outputs = circuit(np.asarray(x) > 0)
    assert np.array_equal(network(x, hard=True), outputs.reshape(50, 5, 6).sum(axis=-1).astype(np.float32))
    assert not np.array_equal(network(x), network(x, hard=True))
    netlist, simple = Netlist.of(circuit), Netlist.of(circuit).simplify()
    assert len(simple) < len(netlist) < 6 * 70
    assert np.array_equal(netlist(np.asarray(x) > 0), outputs) and np.array_equal(simple(np.asarray(x) > 0), outputs)


@pytest.mark.parametrize("arity", [2, 4])
def test_straight_through_gates_are_hardened_and_have_the_gradients_of_relaxed_gates(arity):
    options = dict(arity=arity, initialization="normal", parametrization="input_wise")
    trained, relaxed = (
        LogicLayer(Wires.random(8, 3 * arity, 0), straight_through=through, rngs=nnx.Rngs(0), **options)
        for through in (True, False)
    )
    x = jax.random.uniform(jax.random.key(1), (5, 8))
    np.testing.assert_array_equal(trained(x), relaxed(x, hard=True))
    gradients = [nnx.grad(lambda layer: jnp.sum(layer(x)))(layer) for layer in (trained, relaxed)]
    assert_close(*(jax.tree.leaves(gradient) for gradient in gradients), 1e-6)


def test_half_precision_is_that_of_what_flows_through_the_gates_alone():
    network = LogicNetwork(8, [12, 10], 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert network.layers[0](bits((3, 8))).dtype == jnp.bfloat16
    assert network(bits((3, 8))).dtype == network.layers[0].logits[...].dtype == jnp.float32


def test_a_network_learns_the_parity_of_three_bits_and_keeps_it_when_hardened():
    x = jnp.asarray([[i >> k & 1 for k in range(3)] for i in range(8)], jnp.float32)
    parity = x.sum(axis=-1).astype(jnp.int32) % 2
    network = LogicNetwork(3, [32, 32, 16], 2, wiring=Wires.random, initialization="normal", rngs=nnx.Rngs(0))
    graph, params, constants = nnx.split(network, nnx.Param, ...)
    optimizer = optax.adam(0.1)

    @jax.jit
    def train(params):
        def loss(params):
            scores = nnx.merge(graph, params, constants)(x)
            return optax.softmax_cross_entropy_with_integer_labels(scores, parity).mean()

        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=300)[0][0]

    nnx.update(network, train(params))
    assert (jnp.argmax(network(x, hard=True), axis=-1) == parity).all()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_layers_may_be_sharded_over_their_gates(implementation):
    network = LogicNetwork(32, [256, 256], 8, initialization="normal", implementation=implementation, rngs=nnx.Rngs(0))
    graph, logits, wires = nnx.split(network, nnx.Param, ...)
    mesh = jax.make_mesh((8,), ("gates",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(logits, NamedSharding(mesh, P("gates")))
    x = jax.device_put(bits((32, 32)), NamedSharding(mesh, P()))

    def loss(logits, x):
        return jnp.sum(jnp.sin(nnx.merge(graph, logits, wires)(x)))

    one, eight = (
        jax.jit(jax.grad(loss), out_shardings=jax.tree.map(lambda a: a.sharding, of)).lower(of, a).compile()
        for of, a in ((logits, bits((32, 32))), (sharded, x))
    )
    found = eight(sharded, x)
    assert_close(found, one(logits, bits((32, 32))), "float32")
    assert {a.sharding.spec for a in jax.tree.leaves(found)} == {P("gates")}
    of_logits = sum(a.nbytes for a in jax.tree.leaves(logits))
    memory = [program.memory_analysis() for program in (one, eight)]
    assert memory[0].argument_size_in_bytes - memory[1].argument_size_in_bytes == of_logits * 7 // 8
    gathered = set(re.findall(r"(\S+)\{[\d,]*\} all-gather", eight.as_text()))
    if implementation == "xla":  # outputs of layers are gathered, but no parameters
        assert "f32[256,32]" in gathered and not gathered & {"f32[256,16]", "f32[256,4]", "f32[4,256]"}
        of_outputs = 256 * 32 * 4
        assert memory[1].temp_size_in_bytes < min(3 * of_outputs, memory[0].temp_size_in_bytes)
    else:
        assert gathered == {"f32[256,4]"}
