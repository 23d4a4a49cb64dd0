import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import assert_close, is_float, normal

import jaxbp

ROWS, IMAGES = normal((2, 3, 6), (2, 4, 5, 6), seed=8)
INDICES = jnp.array([[0, 6, 3], [3, -1, 2]])
LAYERS = {
    "Linear": ((6, 4), ROWS),
    "Conv": ((2, 3, (2, 2)), IMAGES[..., :2]),
    "LayerNorm": ((6,), ROWS),
    "RMSNorm": ((6,), ROWS),
    "GroupNorm": ((6, 3), IMAGES),
    "BatchNorm": ((6,), IMAGES),
    "Dropout": ((0.4,), ROWS),
    "Embed": ((7, 4), INDICES),
    "MultiHeadAttention": ((2, 6, 16), ROWS),
    "PReLU": ((0.2,), ROWS),
    "LinearGeneral": ((6, (2, 3)), ROWS),
    "Einsum": (("bti,ijk->btjk", (6, 2, 3), (2, 3)), ROWS),
    "ConvTranspose": ((2, 3, (2, 2), 2), IMAGES[..., :2]),
    "LoRA": ((6, 2, 4), ROWS),
    "LoRALinear": ((6, 4), ROWS),
}


def make(module, name, *arguments, seed=1, **options):
    rngs = {} if name == "PReLU" else {"rngs": nnx.Rngs(seed)}
    if name.startswith("LoRA"):  # by default, lora_b is 0, and so is the gradient of lora_a
        options = {"b_initializer": nnx.initializers.normal()} | options
    if name == "MultiHeadAttention":  # the gradient of the keys' bias is 0, up to rounding
        options = {"decode": False, "use_bias": False} | options
    if name == "LoRALinear":
        options = {"lora_rank": 2} | options
    return getattr(module, name)(*(arguments or LAYERS[name][0]), **rngs, **options)


def state_of(layer):
    flat = nnx.to_flat_state(nnx.state(layer))
    data = lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a  # noqa: E731
    return {path: np.asarray(data(variable[...])) for path, variable in flat}


def _results(layer, call):
    """Return a function `(states, x) -> (results and updated variables, gradients)`, and the layer's states."""
    graph, *states = nnx.split(layer, nnx.Param, ...)

    def loss(parameters, x, others):
        layer = nnx.merge(graph, parameters, others, copy=True)
        y = call(layer, x)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y.astype(jnp.float32) * weights), (y, nnx.state(layer, nnx.Not(nnx.RngKey)))

    def run(states, x):
        parameters, others = states
        (_, results), gradients = jax.value_and_grad(loss, (0, 1) if is_float(x) else 0, has_aux=True)(
            parameters, x, others
        )
        return results, gradients

    return run, states


def assert_agree(ours, twin, x, tolerance=1e-5, call=lambda layer, x: layer(x)):
    (run, states), (run_twin, states_of_twin) = _results(ours, call), _results(twin, call)
    both = jax.jit(lambda states, states_of_twin, x: (run(states, x), run_twin(states_of_twin, x)))
    found, wanted = map(jax.tree.leaves, both(states, states_of_twin, x))
    assert [a.dtype for a in found] == [a.dtype for a in wanted]
    assert_close(found, wanted, tolerance)


def assert_layers_agree(name, *arguments, x=None, tolerance=1e-5, implementation=None, call=None, **options):
    x = LAYERS[name][1] if x is None else x
    twin, ours = make(nnx, name, *arguments, **options), make(jaxbp.nnx, name, *arguments, **options)
    ours.implementation = implementation
    assert_agree(ours, twin, x, tolerance, **({} if call is None else {"call": call}))
