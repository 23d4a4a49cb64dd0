import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import ROWS, assert_layers_agree, make, state_of

import jaxbp


def test_elements_drop_together_along_broadcast_dims():
    assert_layers_agree("Dropout", 0.5, broadcast_dims=(1,))


@pytest.mark.parametrize("rate", [0.0, 1, 1.0])
def test_a_rate_of_0_or_1_draws_no_key(rate):
    layer = make(jaxbp.nnx, "Dropout", rate)
    np.testing.assert_array_equal(layer(ROWS), (1 - rate) * ROWS)
    assert state_of(layer)[("rngs", "count")] == 0


@pytest.mark.parametrize(
    "rngs",
    [nnx.Rngs(5), nnx.Rngs(dropout=5), jax.random.key(5), nnx.Rngs(5).dropout.fork()],
    ids=["Rngs", "a stream of Rngs", "key", "RngStream"],
)
def test_rngs_of_a_call_are_used_first(rngs):
    graph, state = nnx.split(rngs) if not isinstance(rngs, jax.Array) else (None, None)
    of_call = lambda: rngs if graph is None else nnx.merge(graph, state, copy=True)  # noqa: E731
    ours, twin = (make(module, "Dropout")(ROWS, rngs=of_call()) for module in (jaxbp.nnx, nnx))
    np.testing.assert_allclose(ours, twin, rtol=1e-6)


def test_a_deterministic_call_returns_its_input():
    assert make(jaxbp.nnx, "Dropout")(ROWS, deterministic=True) is ROWS
    assert make(jaxbp.nnx, "Dropout", deterministic=True)(ROWS) is ROWS


def test_a_missing_key_is_the_error_of_flax():
    with pytest.raises(ValueError, match="no `rngs` argument was provided"):
        jaxbp.nnx.Dropout(0.5)(ROWS)
    with pytest.raises(ValueError, match="No `deterministic` argument was provided"):
        make(jaxbp.nnx, "Dropout", deterministic=None)(ROWS)


def test_half_precision_is_computed_in_float32():
    x = jnp.full((64, 2), 1.0, jnp.bfloat16)
    y = np.asarray(make(jaxbp.nnx, "Dropout", 0.3)(x), np.float32)
    assert set(y.ravel().tolist()) == {0.0, float(jnp.bfloat16(1 / 0.7))}
