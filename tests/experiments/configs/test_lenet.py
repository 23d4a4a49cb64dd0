import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.configs.lenet import LeNetConfig


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_is_that_of_the_computation_alone(dtype):
    config = LeNetConfig(precision=f"mixed_{dtype}")
    images, labels = jnp.zeros((1, 1, 28, 28)), jnp.zeros(1, jnp.int32)

    def run():
        model, loss = config.build(jax.random.key(0))
        return nnx.state(model, nnx.Param), model(images), loss(model, images, labels)[0]

    parameters, logits, losses = jax.eval_shape(run)
    assert logits.dtype == dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters)} == {jnp.dtype("float32")}
    assert losses.dtype == jnp.float32
