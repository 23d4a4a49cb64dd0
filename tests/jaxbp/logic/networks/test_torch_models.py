"""Classes with the names and attributes of difflogic 0.1.0 and torchlogix 0.2.2, and with their formulas in NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, softmax

from jaxbp import LearnedWires
from jaxbp.logic.gates import COEFFICIENTS
from jaxbp.nn import LogicNetwork, from_difflogic, from_torchlogix, to_difflogic, to_torchlogix

INPUTS, WIDTHS, CLASSES = 5, (8, 6), 3


class Tensor:
    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape = self.values.shape

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return (Tensor(row) for row in self.values)  # views, as in PyTorch

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.values

    def new_tensor(self, values):
        return Tensor(np.array(values, self.values.dtype))

    def copy_(self, other):
        self.values[...] = other.values


def wires(inputs, gates, random):
    return Tensor(random.integers(inputs, size=(2, gates)))


class Flatten:
    pass


class GroupSum:
    def __init__(self, k=CLASSES, tau=2.0, **attributes):
        self.k, self.tau = k, tau
        vars(self).update(attributes)

    def __call__(self, x, training):
        return x.reshape(len(x), self.k, -1).sum(-1) / self.tau


def polynomial(c, a, b):
    return c[:, 0] + c[:, 1] * a + c[:, 2] * b + c[:, 3] * a * b


class LogicLayer:
    def __init__(self, inputs, gates, random):
        self.in_dim, self.out_dim = inputs, gates
        self.weights = Tensor(random.normal(size=(gates, 16)))
        self.indices = tuple(wires(inputs, gates, random))

    def __call__(self, x, training):
        weights = self.weights.values
        p = softmax(weights, axis=-1) if training else np.eye(16)[weights.argmax(-1)]
        a, b = (x[:, i.values] for i in self.indices)
        return polynomial(p @ COEFFICIENTS, a, b)


class FixedDenseConnections:
    def __init__(self, inputs, gates, random):
        self.indices = wires(inputs, gates, random)


class RawLUTParametrization:
    parameters, temperature = 16, 1.5

    def __call__(self, weight, a, b, training):
        p = softmax(weight / self.temperature, axis=-1) if training else np.eye(16)[weight.argmax(-1)]
        return polynomial(p @ COEFFICIENTS, a, b)


class LightLUTParametrization:
    parameters, temperature = 4, 0.5

    def __call__(self, weight, a, b, training):
        r = expit(weight / self.temperature) if training else weight > 0
        return sum(r[:, i] * basis for i, basis in enumerate([(1 - a) * (1 - b), (1 - a) * b, a * (1 - b), a * b]))


class WarpLUTParametrization:
    parameters, temperature = 4, 2.0

    def __call__(self, weight, a, b, training):
        a, b = 1 - 2 * a, 1 - 2 * b
        x = weight[:, 0] + weight[:, 1] * b + weight[:, 2] * a + weight[:, 3] * a * b
        return expit(-x / self.temperature) if training else (-x > 0).astype(float)


class LogicDense:
    def __init__(self, inputs, gates, random, parametrization=RawLUTParametrization):
        self.in_dim, self.out_dim, self.lut_rank = inputs, gates, 2
        self.parametrization = parametrization()
        self.weight = Tensor(random.normal(size=(gates, parametrization.parameters)))
        self.connections = FixedDenseConnections(inputs, gates, random)

    def __call__(self, x, training):
        a, b = (x[:, i] for i in self.connections.indices.values)
        return self.parametrization(self.weight.values, a, b, training)


class LogicConv2d:
    pass


def model_of(layer, *options, seed=0):
    random = np.random.default_rng(seed)
    layers = [layer(i, g, random, *options) for i, g in zip((INPUTS, *WIDTHS), WIDTHS, strict=False)]
    return [Flatten(), [*layers], GroupSum()]


DIFFLOGIC = from_difflogic, to_difflogic, (LogicLayer,)
RAW = from_torchlogix, to_torchlogix, (LogicDense, RawLUTParametrization)
LIGHT = from_torchlogix, to_torchlogix, (LogicDense, LightLUTParametrization)
WARP = from_torchlogix, to_torchlogix, (LogicDense, WarpLUTParametrization)
MODELS = pytest.mark.parametrize("kind", [DIFFLOGIC, RAW, LIGHT, WARP], ids=["difflogic", "raw", "light", "warp"])


def scores(model, x, training):
    for module in [*model[1], model[2]]:
        x = module(x, training)
    return x


BITS = (np.arange(2**INPUTS)[:, None] >> np.arange(INPUTS) & 1).astype(float)


@MODELS
def test_scores_equal_those_of_the_model(kind):
    read, _, model = kind
    model = model_of(*model)
    with jax.enable_x64(True):
        network = read(model, dtype=jnp.float64, implementation="autodiff")
        hard, x = network(BITS, hard=True), np.random.default_rng(1).random((20, INPUTS))
        np.testing.assert_allclose(hard, scores(model, BITS, training=False), rtol=1e-15)
        if kind is WARP:  # equal only where inputs are 0 or 1
            first = network.layers[0](BITS)
            np.testing.assert_allclose(first, model[1][0](BITS, training=True), rtol=1e-12)
        else:
            np.testing.assert_allclose(network(x), scores(model, x, training=True), rtol=1e-12)


@MODELS
def test_parameters_that_are_written_into_a_model_and_read_again_are_the_same(kind):
    read, write, model = kind
    network, other = read(model_of(*model)), model_of(*model, seed=1)
    other[2].tau = 7.0
    write(network, other)
    again = read(other)
    assert again.tau == network.tau == other[2].tau == 2.0
    for mine, theirs in zip(network.layers, again.layers, strict=True):
        assert mine.wires.get_value() == theirs.wires.get_value()
        np.testing.assert_allclose(mine.logits[...], theirs.logits[...], rtol=1e-6)


@pytest.mark.parametrize(
    "kind", [(LogicLayer, from_difflogic, to_difflogic), (LogicDense, from_torchlogix, to_torchlogix)]
)
def test_learned_wires_are_written_hardened(kind):
    layer, read, write = kind
    wiring = functools.partial(LearnedWires.random, candidates=4)
    network = LogicNetwork(INPUTS, WIDTHS, CLASSES, wiring=wiring, rngs=nnx.Rngs(0))
    model = model_of(layer)
    write(network, model)
    found = [layer.wires.get_value() for layer in read(model).layers]
    assert found == [layer.hard_wires() for layer in network.layers]


def test_hardened_logits_are_written_as_they_are():
    network, model = from_difflogic(model_of(LogicLayer)), model_of(LogicLayer, seed=1)
    layer = network.layers[0]
    layer.logits = nnx.Param(jnp.where(jnp.arange(16) == layer.harden()[:, None], 0.0, -jnp.inf))
    to_difflogic(network, model)
    assert (from_difflogic(model).layers[0].logits[...] == layer.logits[...]).all()


def test_the_gates_that_read_each_input_are_written_too():
    model = model_of(LogicLayer)
    network, layer = from_difflogic(model), model[1][0]
    layer.given_x_indices_of_y = layer.given_x_indices_of_y_start = Tensor(np.zeros(1, np.int64))
    to_difflogic(network, model)
    a, b = (i.values for i in layer.indices)
    starts, gates = layer.given_x_indices_of_y_start.values, layer.given_x_indices_of_y.values
    assert starts[0] == 0 and len(starts) == INPUTS + 1
    for i in range(INPUTS):
        assert gates[starts[i] : starts[i + 1]].tolist() == sorted([*np.flatnonzero(a == i), *np.flatnonzero(b == i)])


def changed(**attributes):
    model = model_of(LogicDense)
    for path, value in attributes.items():
        owner, name = path.split("__") if "__" in path else ("layer", path)
        vars(model[2] if owner == "sum" else model[1][1])[name] = value
    return model


SIX = LogicDense(WIDTHS[0], 6, np.random.default_rng(0), LightLUTParametrization)
LEARNED = type("LearnableDenseConnections", (), {})()


@pytest.mark.parametrize(
    "model, error, message",
    [
        (changed(lut_rank=4), NotImplementedError, "layer 1 has gates of 4 inputs; wants gates of 2 inputs"),
        (changed(lut_rank=6), NotImplementedError, "layer 1 has gates of 6 inputs; wants gates of 2 inputs"),
        (
            changed(connections=LEARNED),
            NotImplementedError,
            "connections of layer 1 is a LearnableDenseConnections; wants a FixedDenseConnections",
        ),
        ([LogicConv2d(), GroupSum()], NotImplementedError, "layer 0 is a LogicConv2d; wants a LogicDense"),
        (changed(sum__beta=1.0), NotImplementedError, "beta of GroupSum is 1.0; wants 0"),
        (
            [*changed()[1][:1], SIX, GroupSum()],
            NotImplementedError,
            "model mixes the parametrizations input_wise, softmax; wants one",
        ),
        (changed(sum__k=4), ValueError, "k of GroupSum is 4; wants a divisor of 6, the width of the last layer"),
        (changed(sum__k=0), ValueError, "k of GroupSum is 0; wants a divisor of 6, the width of the last layer"),
        (changed(in_dim=7), ValueError, "layer 1 reads 7 inputs; wants 8, the width of layer 0"),
        (changed(weight=Tensor(np.zeros((6, 4)))), ValueError, r"weight of layer 1 has shape (6, 4); wants (6, 16)"),
        (changed()[:2], ValueError, "model ends with LogicDense; wants layers of gates, then a GroupSum"),
        ([], ValueError, "model is empty; wants layers of gates, then a GroupSum"),
        ([GroupSum()], ValueError, "model has no layers of gates; wants at least one"),
        (LogicConv2d(), TypeError, "model is a LogicConv2d; wants a torch.nn.Sequential, or a list of modules"),
    ],
)
def test_other_models_are_refused_by_name(model, error, message):
    with pytest.raises(error, match=re.escape(message)):
        from_torchlogix(model)


def test_a_model_of_other_shapes_is_refused_and_left_unchanged():
    network = LogicNetwork(INPUTS, WIDTHS, CLASSES, parametrization="input_wise", rngs=nnx.Rngs(0))
    model = model_of(LogicDense)
    before = model[1][0].weight.values.copy()
    with pytest.raises(ValueError, match=r"^to_torchlogix: model has layers with .*softmax.*; wants .*input_wise"):
        to_torchlogix(network, model)
    assert (model[1][0].weight.values == before).all() and model[2].tau == 2.0
