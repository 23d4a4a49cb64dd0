import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_twins import ROWS, assert_agree, assert_layers_agree, make
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxbp


@pytest.mark.parametrize(
    "options",
    [
        dict(use_bias=False, precision="highest", param_dtype=jnp.float16),
        dict(preferred_element_type=jnp.float32, dtype=jnp.bfloat16),
        dict(dot_general=lambda *args, **options: 2 * lax.dot_general(*args, **options)),
        dict(promote_dtype=lambda arrays, dtype: tuple(a.astype(jnp.float16) for a in arrays)),
    ],
    ids=lambda options: ", ".join(options),
)
def test_linear_takes_the_options_of_flax(options):
    assert_layers_agree("Linear", 6, 4, tolerance=1e-5 if "promote_dtype" not in options else 5e-3, **options)


def test_a_bfloat16_input_with_float32_parameters_gives_float32():
    assert_layers_agree("Linear", x=ROWS.astype(jnp.bfloat16), tolerance=1e-2)


def test_linear_takes_a_sharding_of_its_result():
    mesh = jax.make_mesh((2,), ("examples",), axis_types=(jax.sharding.AxisType.Explicit,))
    reported = "jaxbp.nnx.Linear: Flax computes this layer, because jaxbp does not take out_sharding"
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match=reported):
        y = make(jaxbp.nnx, "Linear")(ROWS, out_sharding=P("examples"))
        assert y.sharding.spec == P("examples", None, None)
        np.testing.assert_allclose(y, make(nnx, "Linear")(ROWS), rtol=1e-6)


def test_options_that_only_flax_has_are_refused_with_an_implementation():
    wanted = "^Linear: implementation='xla' does not take preferred_element_type; wants 'autodiff' or None"
    with pytest.raises(NotImplementedError, match=wanted):
        make(jaxbp.nnx, "Linear", preferred_element_type=jnp.float32, implementation="xla")
    layer = make(jaxbp.nnx, "Linear", implementation="pallas")
    with pytest.raises(NotImplementedError, match=r"^Linear: implementation='pallas' does not take out_sharding"):
        layer(ROWS, out_sharding=P())
    with pytest.raises(NotImplementedError, match=r"^Linear: implementation='pallas' does not take dtype complex64"):
        layer(ROWS + 1j)


def test_complex_numbers_are_computed_by_flax():
    assert_layers_agree("Linear", x=ROWS.astype(jnp.complex64), call=lambda layer, x: jnp.abs(layer(x)))


def test_no_transpose_is_left_in_the_program():
    graph, state = nnx.split(make(jaxbp.nnx, "Linear", 8, 16))
    loss = jax.grad(lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x))))
    lowered = jax.jit(loss).lower(state, jnp.ones((4, 8)))
    assert " transpose(" in lowered.as_text("hlo")
    assert " transpose(" not in lowered.compile().as_text()


def test_attend_multiplies_by_the_embeddings():
    assert_layers_agree("Embed", 7, 6, x=ROWS, call=lambda layer, x: layer.attend(x))


def test_one_embedding_is_broadcast_as_in_flax():
    assert_layers_agree("Embed", 1, 4)


def test_an_index_out_of_range_gives_nan_as_in_flax():
    np.testing.assert_array_equal(*(make(module, "Embed")(jnp.array([7, -8, -7])) for module in (jaxbp.nnx, nnx)))


def test_indices_are_integers():
    with pytest.raises(ValueError, match="must be an integer"):
        make(jaxbp.nnx, "Embed")(ROWS)


def test_an_embedding_in_half_precision_has_the_dtype_of_flax():
    assert_layers_agree("Embed", param_dtype=jnp.bfloat16, tolerance=2e-2)


LABELS = jnp.array([[0, 3, 1], [2, 2, 0]])
KEPT = jnp.array([[True, True, False], [True, False, True]])


def optax_loss(layer, x):
    logits = layer(x)
    losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(LABELS, 4), 0.1))
    return jnp.sum(losses + 0.01 * jax.nn.logsumexp(logits, axis=-1) ** 2, where=KEPT)


def loss_of(layer, x):
    return (
        layer.loss(x, LABELS, where=KEPT)
        if isinstance(layer, jaxbp.nnx.LinearSoftmaxCrossEntropy)
        else optax_loss(layer, x)
    )


def test_the_loss_and_its_gradients_are_those_of_a_linear_layer_and_optax():
    head = jaxbp.nnx.LinearSoftmaxCrossEntropy
    ours = head(6, 4, label_smoothing=0.1, z_loss=0.01, reduction="sum", implementation="xla", rngs=nnx.Rngs(1))
    assert_agree(ours, make(nnx, "Linear"), ROWS, call=loss_of)


def test_the_head_has_the_arguments_of_linear_and_of_its_loss():
    names = list(inspect.signature(jaxbp.nnx.LinearSoftmaxCrossEntropy).parameters)
    added = ["label_smoothing", "z_loss", "softcap", "reduction", "implementation"]
    assert names == [*list(inspect.signature(nnx.Linear.__init__).parameters)[1:], *added]


def test_a_call_of_the_head_returns_the_logits_with_the_cap():
    head = jaxbp.nnx.LinearSoftmaxCrossEntropy(6, 4, softcap=0.5, rngs=nnx.Rngs(1))
    logits = 0.5 * jnp.tanh(make(nnx, "Linear")(ROWS) / 0.5)
    np.testing.assert_allclose(head(ROWS), logits, rtol=1e-5)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()
    np.testing.assert_allclose(head.loss(ROWS, LABELS), expected, rtol=1e-5)


def test_the_head_refuses_options_that_its_loss_would_ignore():
    with pytest.raises(
        NotImplementedError, match="LinearSoftmaxCrossEntropy: preferred_element_type is not the default"
    ):
        jaxbp.nnx.LinearSoftmaxCrossEntropy(6, 4, preferred_element_type=jnp.float32, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match=r"LinearSoftmaxCrossEntropy: softcap is 0\.0; wants a finite number above 0"):
        jaxbp.nnx.LinearSoftmaxCrossEntropy(6, 4, softcap=0.0, rngs=nnx.Rngs(1))
