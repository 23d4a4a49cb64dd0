import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from helpers import assert_close, normal

import jaxbp
from jaxbp.linen import intercept_layers

(X,), IDS = normal((2, 4, 6), seed=5), jnp.array([[0, 1, 2, 3], [3, 4, 5, 6]])
RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}


class Program(linen.Module):
    """Every layer once."""

    @linen.compact
    def __call__(self, x, ids, train=True):
        embed = linen.Embed(7, 6)
        x = linen.Conv(6, (3, 3), strides=(1, 2))((x + embed(ids))[:, None])[:, 0]
        x = linen.BatchNorm(use_running_average=not train, momentum=0.7)(x)
        x = linen.remat(linen.Dense)(6, use_bias=False, name="fc")(x)
        x = linen.RMSNorm()(linen.LayerNorm(epsilon=1e-4)(x))
        x = linen.GroupNorm(num_groups=None, group_size=2)(x=x)
        x = linen.PReLU()(linen.MultiHeadDotProductAttention(num_heads=2)(x, x))
        x = linen.Einsum((6, 2, 3))(x, "bti,ijk->btjk")
        kernel_init = linen.with_partitioning(linen.initializers.normal(1.0), (None, "model"))
        x = linen.DenseGeneral(6, axis=(-2, -1), kernel_init=kernel_init)(x)
        x = linen.ConvTranspose(6, (3,), strides=(2,))(x)
        x = linen.Dropout(0.3, deterministic=not train)(x)
        return embed.attend(x)


@pytest.fixture(scope="module")
def variables():
    init = Program().init
    variables, of_context = jax.jit(lambda *args: (init(*args), intercept_layers("xla")(init)(*args)))(RNGS, X, IDS)
    assert jax.tree.structure(of_context) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, of_context, variables)
    return variables


def loss(parameters, others, x):
    y, new = Program().apply({"params": parameters, **others}, x, IDS, rngs=RNGS, mutable=["batch_stats"])
    return jnp.sum(jnp.sin(y)), (y, new)


def test_a_program_keeps_its_variables_and_its_values_and_gradients_and_calls_the_ops(variables):
    others, parameters = dict(variables), variables["params"]
    del others["params"]
    step = jax.value_and_grad(loss, has_aux=True)
    lowered = jax.jit(intercept_layers("xla")(lambda *args: step(*args))).lower(parameters, others, X)
    text = lowered.as_text(debug_info=True)
    ops = "embedding conv2d batch_norm linear layer_norm rms_norm group_norm prelu matmul add conv_transpose2d dropout"
    assert [op for op in ops.split() if f"{op}/xla/" not in text] == []
    assert "linear_backward/xla/" in text
    results = lowered.compile()(parameters, others, X), jax.jit(step)(parameters, others, X)
    # The gradient of the attention's key bias is 0, and rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *results)


def test_evaluation_uses_the_running_averages_and_drops_nothing(variables):
    apply = lambda variables: Program().apply(variables, X, IDS, train=False)  # noqa: E731
    assert_close(*jax.jit(lambda variables: (intercept_layers()(apply)(variables), apply(variables)))(variables), 1e-5)


def test_a_layer_that_only_linen_computes_is_reported_and_refused_with_an_implementation():
    class Twice(linen.Dense):
        def __call__(self, x):
            return 2 * super().__call__(x)

    for layer, lacking in (
        (Twice(3), "a subclass of Dense"),
        (linen.LayerNorm(force_float32_reductions=False), "force"),
    ):
        variables = layer.init(RNGS, X)
        with intercept_layers(), pytest.warns(UserWarning, match=f"Flax computes this layer, because .* {lacking}"):
            np.testing.assert_array_equal(layer.apply(variables, X), layer.apply(variables, X))
        with intercept_layers("xla"), pytest.raises(NotImplementedError, match=f"xla' does not take {lacking}"):
            layer.apply(variables, X)


@pytest.mark.parametrize(
    "layer", [linen.Dense(3), linen.DenseGeneral(3), linen.LayerNorm()], ids=["dense", "general", "norm"]
)
def test_a_missing_or_wrong_parameter_is_linens_error(layer):
    parameters = layer.init(RNGS, X)["params"]
    wrong = jax.tree.map(lambda a: jnp.ones((2, *a.shape)), parameters)
    with intercept_layers("xla"):
        with pytest.raises(flax.errors.ScopeParamNotFoundError):
            layer.apply({"params": {"bias": parameters["bias"]}}, X)
        with pytest.raises(flax.errors.ScopeParamShapeError):
            layer.apply({"params": wrong}, X)


def test_dropout_takes_a_key_and_needs_none_if_it_drops_nothing_or_everything():
    key = jax.random.key(3)
    for rate, options in ((0.5, dict(rng=key)), (0.5, dict(deterministic=True)), (1.0, {}), (0.0, {})):
        layer, options = linen.Dropout(rate), {"deterministic": False} | options
        with intercept_layers("xla"):
            y = layer.apply({}, X, **options)
        np.testing.assert_allclose(y, layer.apply({}, X, **options), rtol=1e-6)


def test_an_unknown_implementation_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"^intercept_layers: implementation is 'cuda'; wants 'pallas', 'xla'"):
        intercept_layers("cuda")


def test_the_options_of_a_layer_reach_the_op():
    promoted = []

    def promote(*arrays, dtype=None, **options):
        promoted.append(dtype)
        return linen.dtypes.promote_dtype(*arrays, dtype=dtype, **options)

    layer = linen.Dense(3, dtype=jnp.float16, promote_dtype=promote)
    variables = layer.init(RNGS, X)
    with intercept_layers("xla"):
        y = layer.apply(variables, inputs=X)
    assert y.dtype == jnp.float16 and promoted == [jnp.float16] * 2
    assert_close(y, layer.apply(variables, X), 1e-2)
    assert jaxbp.linen.intercept_layers is intercept_layers
