import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_twins import ROWS, assert_agree, assert_layers_agree, make, state_of
from helpers import assert_close, normal

import jaxbp

QUERY, KEY, VALUE, BIAS = normal((2, 3, 5, 4, 8), (2, 3, 7, 2, 8), (2, 3, 7, 2, 8), (4, 1, 7))
MASK = np.random.default_rng(0).random((2, 3, 1, 5, 7)) < 0.8
MASK[..., 0] = True


@pytest.mark.parametrize(
    ("options", "call"),
    [
        (dict(decode=False, num_kv_heads=1, normalize_qk=True, use_bias=False), dict(is_causal=True)),
        (dict(decode=False, use_bias=False, dtype=jnp.bfloat16), dict(mask=np.tri(3)[None, None])),
    ],
    ids=["grouped, causal", "half precision, mask of floats"],
)
@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_layer_computes_what_flax_computes(implementation, options, call):
    options |= dict(implementation=implementation, tolerance=2e-2 if "dtype" in options else 1e-5)
    assert_layers_agree("MultiHeadAttention", call=lambda layer, x: layer(x, x + 1, **call), **options)


def test_a_cache_of_keys_and_values_gives_the_causal_results():
    results = []
    for module in (jaxbp.nnx, nnx):
        layer = make(module, "MultiHeadAttention", decode=True)
        layer.init_cache(ROWS.shape)
        step = nnx.jit(lambda layer, x: layer(x))
        results.append((jnp.concatenate([step(layer, ROWS[:, i : i + 1]) for i in range(3)], 1), state_of(layer)))
    (found, cache), (wanted, cache_of_flax) = results
    assert_close(found, wanted, "float32")
    assert_close(found, layer(ROWS, decode=False, is_causal=True), "float32")
    assert cache.keys() == cache_of_flax.keys()
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), cache, cache_of_flax)


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
def test_a_layer_of_flax_takes_the_function(implementation):
    function = functools.partial(jaxbp.nnx.dot_product_attention, implementation=implementation)
    # A bias of the keys has a gradient of 0.
    make_flax = functools.partial(make, nnx, "MultiHeadAttention", decode=False, use_bias=False)
    ours = make_flax(attention_fn=function)
    assert_agree(ours, make_flax(), ROWS, call=lambda layer, x: layer(x, is_causal=True))
    with pytest.raises(NotImplementedError, match=r"^dot_product_attention: implementation='xla' does not take module"):
        jaxbp.nnx.dot_product_attention(QUERY, KEY, VALUE, module=ours, implementation="xla")


def test_a_layer_passes_on_its_implementation_and_takes_another_function():
    query = jax.ShapeDtypeStruct(ROWS.shape, "float32")
    for implementation in ("xla", "autodiff"):
        layer = make(jaxbp.nnx, "MultiHeadAttention", decode=False, implementation=implementation)
        text = jax.jit(layer).lower(query).as_text(debug_info=True)
        assert {name for name in ("xla", "autodiff") if f"/{name}/" in text} == {implementation}
    called = []
    other = lambda q, k, v, **options: called.append(options) or v  # noqa: E731
    with pytest.warns(UserWarning, match="Flax computes this layer, because jaxbp does not take attention_fn"):
        make(jaxbp.nnx, "MultiHeadAttention", decode=False, attention_fn=other)(ROWS)
    assert len(called) == 1


def test_batch_axes_biases_and_masks_are_those_of_flax():
    arrays = QUERY, KEY, VALUE, jnp.broadcast_to(BIAS, (2, 3, 4, 5, 7))
    masks = jnp.broadcast_to(MASK, (2, 3, 4, 5, 7))
    wanted = nnx.dot_product_attention(*arrays, masks)
    assert_close(jaxbp.nnx.dot_product_attention(*arrays, masks), wanted, "float32")
    assert_close(
        jaxbp.nnx.dot_product_attention(QUERY, KEY, VALUE, BIAS, MASK, implementation="xla"), wanted, "float32"
    )
    one = [a[0, 0] for a in (QUERY, KEY, VALUE)]
    assert_close(jaxbp.nnx.dot_product_attention(*one), nnx.dot_product_attention(*one), "float32")


def test_flax_drops_weights():
    options = dict(dropout_rng=jax.random.key(0), dropout_rate=0.5)
    with pytest.warns(UserWarning, match="Flax computes this layer, because jaxbp does not take dropout"):
        found = jaxbp.nnx.dot_product_attention(QUERY[0], QUERY[0], QUERY[0], **options)
    np.testing.assert_array_equal(found, nnx.dot_product_attention(QUERY[0], QUERY[0], QUERY[0], **options))
    with pytest.raises(
        NotImplementedError, match=r"^dot_product_attention: implementation='pallas' does not take dropout"
    ):
        jaxbp.nnx.dot_product_attention(QUERY, KEY, VALUE, **options, implementation="pallas")
    quiet = jaxbp.nnx.dot_product_attention(QUERY[0], QUERY[0], QUERY[0], **options, deterministic=True)
    assert_close(quiet, nnx.dot_product_attention(QUERY[0], QUERY[0], QUERY[0]), "float32")


def test_other_batch_axes_of_keys_are_refused_and_a_bias_for_all_is_not_copied():
    query, key, bias = (np.ones(shape, np.float32) for shape in ((2, 3, 4, 2, 8), (1, 3, 4, 2, 8), (1, 1, 2, 4, 4)))
    with pytest.raises(ValueError, match=r"^dot_product_attention: key has shape \(1, 3, 4, 2, 8\); wants the batch"):
        jaxbp.nnx.dot_product_attention(query, key, key)
    with pytest.raises(TypeError, match=r"^dot_product_attention: bias is a list; wants an array"):
        jaxbp.nnx.dot_product_attention(query, query, query, bias=[[0.0]])
    text = str(jax.make_jaxpr(lambda bias: jaxbp.nnx.dot_product_attention(query, query, query, bias))(bias))
    assert "[2,3,2,4,4]" not in text
