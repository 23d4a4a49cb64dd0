import functools

import jax
import jax.numpy as jnp
import optax
from clients.namespaces import STEPS, assert_same_losses, every_implementation, ours, theirs, tokens
from helpers import normal
from jax import lax

VOCABULARY, WIDTH, INNER, STATE, RANK, TAPS = 16, 8, 16, 4, 2, 4


class Functions:
    def conv1d(x, w, b, padding, groups, dimension_numbers):
        assert padding == "CAUSAL"
        padding = [(w.shape[0] - 1, 0)]
        y = lax.conv_general_dilated(
            x, w, (1,), padding, dimension_numbers=dimension_numbers, feature_group_count=groups
        )
        return y + b

    def rms_norm(x, scale, epsilon):
        return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon) * scale

    def embedding(indices, table):
        return table[indices]


def initial():
    shapes = dict(in_proj=(WIDTH, 2 * INNER), conv=(TAPS, 1, INNER), x_proj=(INNER, RANK + 2 * STATE))
    shapes |= dict(dt_proj=(RANK, INNER), out_proj=(INNER, WIDTH), table=(VOCABULARY, WIDTH))
    weights = dict(zip(shapes, (0.3 * w for w in normal(*shapes.values())), strict=True))
    scales = {name: jnp.ones(size) for name, size in dict(norm=WIDTH, norm_f=WIDTH, D=INNER).items()}
    biases = {name: jnp.zeros(INNER) for name in ("conv_bias", "dt_bias")}
    return weights | scales | biases | dict(A_log=jnp.log(jnp.tile(jnp.arange(1.0, STATE + 1), (INNER, 1))))


def selective_scan(n, x, delta, A, B, C, D):
    def step(state, at):
        x, delta, B, C = at
        state = n.exp(delta[..., None] * A) * state + (delta * x)[..., None] * B[:, None]
        return state, (state * C[:, None]).sum(-1)

    first = jnp.zeros((x.shape[0], *A.shape), x.dtype)
    _, y = lax.scan(step, first, jax.tree.map(lambda a: a.swapaxes(0, 1), (x, delta, B, C)))
    return y.swapaxes(0, 1) + x * D


def mixer(n, p, x):
    x, residual = jnp.split(n.matmul(x, p["in_proj"]), 2, axis=-1)
    layout = ("NHC", "HIO", "NHC")
    x = n.conv1d(x, p["conv"], p["conv_bias"], padding="CAUSAL", groups=INNER, dimension_numbers=layout)
    x = n.silu(x)
    delta, B, C = jnp.split(n.matmul(x, p["x_proj"]), [RANK, RANK + STATE], axis=-1)
    delta = n.softplus(n.add(n.matmul(delta, p["dt_proj"]), p["dt_bias"]))
    y = selective_scan(n, x, delta, -n.exp(p["A_log"]), B, C, p["D"])
    return n.matmul(n.multiply(y, n.silu(residual)), p["out_proj"])


def model(n, parameters, indices):
    x = n.embedding(indices, parameters["table"])
    x += mixer(n, parameters, n.rms_norm(x, parameters["norm"], epsilon=1e-5))
    return n.matmul(n.rms_norm(x, parameters["norm_f"], epsilon=1e-5), parameters["table"].T)


def losses(n):
    text = tokens(2, 9, VOCABULARY)
    optimizer = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    parameters = initial()
    state = optimizer.init(parameters)

    def loss(parameters):
        targets = jax.nn.one_hot(text[:, 1:], VOCABULARY)
        return n.softmax_cross_entropy(model(n, parameters, text[:, :-1]), targets).mean()

    @jax.jit
    def step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    found = []
    for _ in range(STEPS):
        parameters, state, value = step(parameters, state)
        found.append(value)
    return found


@functools.cache
def expected():
    return losses(theirs(Functions))


@every_implementation
def test_losses_are_those_of_jax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
