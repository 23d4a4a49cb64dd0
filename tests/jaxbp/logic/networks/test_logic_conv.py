import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxbp
from jaxbp import Netlist, TreeWires
from jaxbp.logic.gates import PARAMETERS
from jaxbp.logic.networks.logic_conv import halving_convolutions
from jaxbp.nn import LogicConv2d, LogicConvNetwork, LogicConvolution, image_thermometer

WIRES = TreeWires.random(3, 4, 2, depth=2, seed=0)
CONVOLUTIONS = [LogicConvolution(4, 3, padding=1, pool=2, depth=2), LogicConvolution(6, (2, 1), stride=(1, 2), depth=1)]


def bits(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5, jnp.float32)


def network(convolutions=CONVOLUTIONS, **options):
    options = dict(initialization="normal", rngs=nnx.Rngs(0)) | options
    return LogicConvNetwork((2, 6, 6), convolutions, [15, 10], 5, **options)


def test_a_thermometer_of_images_has_a_channel_a_threshold():
    x = jnp.asarray(np.random.default_rng(0).random((2, 3, 4, 5)), jnp.float32)
    y = image_thermometer(x, [0.25, 0.5])
    assert y.shape == (2, 6, 4, 5) and y.dtype == x.dtype
    for channel in range(3):
        assert (y[:, 2 * channel] == (x[:, channel] > 0.25)).all()
        assert (y[:, 2 * channel + 1] == (x[:, channel] > 0.5)).all()


def test_convolutions_halve_images_until_they_are_small():
    def sizes(*shape):
        return [(c.kernels, c.pool) for c in halving_convolutions(*shape, 1, 32)]

    assert sizes(3, 2) == [(1, (1, 1))]
    assert sizes(8, 3) == [(1, (2, 1)), (4, (2, 1))]
    assert sizes(64, 32) == [(1, (2, 2)), (4, (2, 2)), (16, (2, 2)), (32, (2, 2)), (32, (2, 1))]


@pytest.mark.parametrize("pool", [None, 2])
def test_a_layer_is_the_op_with_its_parameters(pool):
    options = dict(stride=(1, 2), padding=1)
    layer = LogicConv2d(WIRES, pool=pool, initialization="normal", **options, rngs=nnx.Rngs(0))
    assert layer.logits[...].shape == (4, 3, 16) and np.unique(layer.logits[...]).size == 4 * 3 * 16
    y = jaxbp.logic_conv2d(layer.logits[...], WIRES, bits((3, 3, 6, 6)), **options)
    assert (layer(bits((3, 3, 6, 6))) == (jaxbp.logic_or_pool2d(y, pool) if pool else y)).all()


@pytest.mark.parametrize("parametrization", PARAMETERS)
def test_a_hard_layer_is_that_of_its_gates_functions(parametrization):
    options = dict(initialization="normal", parametrization=parametrization, rngs=nnx.Rngs(0))
    layer = LogicConv2d(WIRES, **options)
    gates = layer.harden()
    assert gates.shape == (4, 3) and gates.dtype == jnp.uint8
    assert (gates[1] == jaxbp.harden(layer.logits[...][1], parametrization)).all()
    y = layer(bits((3, 3, 6, 6)), hard=True)
    assert set(np.unique(y)) <= {0.0, 1.0}


def test_residual_gates_pass_on_their_first_input_with_the_probability_asked_for():
    kernel = LogicConv2d(WIRES, residual_logit=2.0, rngs=nnx.Rngs(0)).logits[...][0, 0]
    assert kernel[3] == 2.0 and jnp.count_nonzero(kernel) == 1


def test_the_network_is_its_layers_flattened_and_summed_over_tau():
    net = network(tau=3.0)
    x = y = bits((3, 2, 6, 6))
    for layer in net.convolutions:
        y = layer(y)
    y = jaxbp.flatten(y)
    for layer in net.head.layers:
        y = layer(y)
    np.testing.assert_allclose(net(x), y.reshape(3, 5, 2).sum(axis=-1) / 3, rtol=1e-6)


def test_only_the_logits_are_trained():
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(network(), nnx.Param))]
    assert shapes == [(4, 3, 16), (6, 1, 16), (15, 16), (10, 16)]


def test_seeds_tell_the_wires_of_networks_apart():
    def leaves(seed):
        return np.asarray(network(seed=seed).convolutions[0].wires.get_value().leaves).tolist()

    assert leaves(0) == leaves(0) != leaves(7)


@pytest.mark.parametrize(("parametrization", "arity"), [*((name, 2) for name in PARAMETERS), ("walsh", 4)])
def test_the_hardened_network_is_its_circuit(parametrization, arity):
    net = network(parametrization=parametrization, arity=arity)
    x, circuit = bits((40, 2, 6, 6)), net.harden()
    outputs = circuit(np.asarray(x) > 0)
    assert np.array_equal(Netlist.of(circuit).simplify()(np.asarray(x).reshape(40, -1) > 0), outputs)
    assert np.array_equal(net(x, hard=True), outputs.reshape(40, 5, 2).sum(axis=-1).astype(np.float32))
    assert not np.array_equal(net(x), net(x, hard=True))


def test_half_precision_is_that_of_what_flows_through_the_gates_alone():
    net = network(dtype=jnp.bfloat16)
    assert net.convolutions[0](bits((3, 2, 6, 6))).dtype == jnp.bfloat16
    assert net(bits((3, 2, 6, 6))).dtype == net.convolutions[0].logits[...].dtype == jnp.float32


def test_every_logit_has_a_gradient():
    net = network()
    graph, params, wires = nnx.split(net, nnx.Param, ...)

    def loss(params):
        return jnp.sum(jnp.sin(nnx.merge(graph, params, wires)(bits((8, 2, 6, 6)))))

    gradients = jax.jit(jax.grad(loss))(params)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradients))


def test_convolutions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="the window is 7 x 7; wants at most 6 x 6"):
        network([LogicConvolution(4, 7)])


def build(shape=(2, 6, 6), convolutions=CONVOLUTIONS):
    return lambda: LogicConvNetwork(shape, convolutions, [15, 10], 5, rngs=nnx.Rngs(0))


NETWORK = "LogicConvNetwork"
REFUSED = {
    "other wires": (
        lambda: LogicConv2d(jaxbp.Wires.moore(), rngs=nnx.Rngs(0)),
        TypeError,
        "LogicConv2d: wires is a Wires; wants a jaxbp.TreeWires",
    ),
    "an image of one channel": (
        build(shape=(6, 6)),
        ValueError,
        f"{NETWORK}: shape is (6, 6); wants (channels, height, width), each at least 1",
    ),
    "no convolutions": (
        build(convolutions=[]),
        ValueError,
        f"{NETWORK}: convolutions is empty; wants at least one convolution. Without convolutions, use LogicNetwork or "
        "LogicClassifier",
    ),
    "a convolution as a tuple": (
        build(convolutions=[(4, 3)]),
        TypeError,
        f"{NETWORK}: convolutions is [(4, 3)]; wants a list of jaxbp.nn.LogicConvolution",
    ),
    "a number of convolutions": (
        build(convolutions=3),
        TypeError,
        f"{NETWORK}: convolutions is 3; wants a list of jaxbp.nn.LogicConvolution",
    ),
    "an image of one axis": (
        build(shape=6),
        ValueError,
        f"{NETWORK}: shape is 6; wants (channels, height, width), each at least 1",
    ),
    "no seed": (
        lambda: LogicConvNetwork((2, 6, 6), CONVOLUTIONS, [15, 10], 5, seed=None, rngs=nnx.Rngs(0)),
        ValueError,
        f"{NETWORK}: seed is None; wants an int of at least 0",
    ),
    "images of another size": (
        lambda: network()(bits((3, 2, 6, 5))),
        ValueError,
        f"{NETWORK}: x has shape (3, 2, 6, 5); wants (batch, 2, 6, 6)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()
