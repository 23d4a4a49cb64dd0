import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import in_float64, launching_program, put, relative_error
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxbp.nn import GPT
from jaxbp.nn.gpt import segment_positions
from jaxbp.nnx import Linear

VOCABULARY, LENGTH = 12, 9
BASE = dict(num_layers=2, features=16, num_heads=4)
FORMS = {
    "gpt2": dict(position_embedding="learned", max_length=LENGTH, hidden_features=12),
    "llama": dict(num_key_value_heads=2, normalization="rms_norm", gate="silu", hidden_features=12)
    | dict(use_bias=False, tied=False, num_layers=1),
}
"""The options in two forms. Kernels in the interpreter are slow, so only one form has several layers."""


@functools.cache
def parts(form, **options):
    """Return the structure and the parameters of a model."""
    model = GPT(VOCABULARY, **BASE | FORMS[form] | options, rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(model, nnx.Param)
    random = np.random.default_rng(0)
    # Biases of 0 and scales of 1 would hide some mistakes.
    return graph, jax.tree.map(lambda a: a + put(np.float32(0.2 * random.standard_normal(a.shape))), parameters)


def model_of(form, **options):
    return nnx.merge(*parts(form, **options))


TEXT = put(np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH + 1)).astype(np.int32))
TOKENS, TARGETS = TEXT[:, :-1], TEXT[:, 1:]
SEGMENTS = np.array([[0] * 4 + [1] * 5, [3] * LENGTH], np.int32)


@functools.cache
def loss_and_gradients(form, **options):
    graph, _ = parts(form, **options)
    return jax.jit(jax.value_and_grad(lambda parameters, *data: nnx.merge(graph, parameters).loss(*data)))


def results(form, **options):
    return loss_and_gradients(form, **options)(parts(form, **options)[1], TOKENS, TARGETS, SEGMENTS)


@functools.cache
def reference(form):
    return in_float64(loss_and_gradients(form, implementation="autodiff"), parts(form)[1], TOKENS, TARGETS, SEGMENTS)


def wrong_parameters(gradients, expected):
    """Return the relative errors in norm of the parameters whose gradient differs."""
    found = jax.tree_util.tree_leaves_with_path(gradients)
    errors = {
        jax.tree_util.keystr(path): relative_error(a, b)
        for (path, a), b in zip(found, jax.tree.leaves(expected), strict=True)
    }
    return {path: error for path, error in errors.items() if not error < 1e-5}


@pytest.mark.parametrize(
    ("form", "implementation"),
    [("llama", "pallas"), ("llama", "xla"), ("gpt2", "pallas"), ("gpt2", "xla"), ("gpt2", "autodiff")],
)
def test_the_gradient_of_every_parameter_agrees_with_float64(form, implementation):
    loss, gradients = results(form, implementation=implementation)
    expected_loss, expected = reference(form)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert wrong_parameters(gradients, expected) == {}


def test_a_wrong_gradient_of_one_bias_is_noticed(monkeypatch):
    expected_loss, expected = reference("gpt2")  # cached, so computed before the mistake is planted
    right = Linear.__call__

    def planted(self, inputs):
        y = right(self, inputs)
        if self.in_features != self.out_features:
            return y
        bias = self.bias[...]
        return y + 1e-4 * (bias - jax.lax.stop_gradient(bias))  # y, but the bias's gradient is too large

    monkeypatch.setattr(Linear, "__call__", planted)
    run = loss_and_gradients.__wrapped__("gpt2", implementation="autodiff")
    loss, gradients = run(parts("gpt2")[1], TOKENS, TARGETS, SEGMENTS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    biases = {f"['blocks'][{i}]['output']['bias'].value" for i in range(2)}
    assert wrong_parameters(gradients, expected).keys() == biases


def test_a_checkpointed_block_has_the_same_gradients_and_keeps_its_input_and_attention():
    assert wrong_parameters(results("llama", implementation="xla", checkpoint=True)[1], reference("llama")[1]) == {}

    def kept(checkpoint):
        graph, parameters = parts("llama", implementation="xla", checkpoint=checkpoint)
        hidden = lambda parameters: nnx.merge(graph, parameters).hidden(TOKENS)  # noqa: E731
        pullback = jax.eval_shape(lambda parameters: jax.vjp(hidden, parameters)[1], parameters)
        return {a.shape for a in jax.tree.leaves(pullback)}

    statistics, hidden, heads = (2, 4, LENGTH), (2, LENGTH, 12), (2, LENGTH, 2, 4, 4)
    assert {statistics, hidden, heads} <= kept(False)
    assert statistics in kept(True) and not {hidden, heads} & kept(True)


def test_the_backward_of_a_checkpointed_block_does_not_repeat_the_attention_kernel(on_hopper):
    options = dict(implementation="pallas", dtype=jnp.bfloat16, checkpoint=True)
    run, (_, parameters) = loss_and_gradients("llama", **options), parts("llama", **options)
    program = launching_program(run, parameters, TOKENS, TARGETS)
    kernels = "attention_forward", "attention_backward_queries", "attention_backward_keys"
    assert [program.count(f"@kernel.{kernel}(") for kernel in kernels] == [1, 1, 1]


def test_two_runs_from_one_seed_have_the_same_bits():
    def run():
        parameters = nnx.state(GPT(VOCABULARY, **BASE | FORMS["llama"], rngs=nnx.Rngs(7)), nnx.Param)
        for _ in range(3):
            value, gradients = loss_and_gradients("llama", implementation="xla")(parameters, TOKENS, TARGETS, SEGMENTS)
            parameters = jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients)
        return [np.asarray(a).tobytes() for a in jax.tree.leaves((parameters, value))]

    assert run() == run()


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_gives_the_logits_of_the_whole_text(form):
    model, tokens = model_of(form), TOKENS
    decode = nnx.jit(GPT.decode)
    cache, found = model.init_cache(len(tokens), LENGTH), []
    for first, last in ((0, 4), *((i, i + 1) for i in range(4, LENGTH))):
        logits, cache = decode(model, tokens[:, first:last], cache)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), nnx.jit(GPT.__call__)(model, tokens), atol=1e-5)
    assert cache.index == LENGTH
    # The cache is full.
    assert np.isnan(decode(model, tokens[:, :1], cache)[0]).all()


def test_a_packed_row_has_the_losses_of_its_documents():
    losses = nnx.jit(functools.partial(GPT.loss, reduction=None))
    model = model_of("gpt2")
    packed = losses(model, TOKENS, TARGETS, SEGMENTS)
    for row, first, last in ((0, 0, 4), (0, 4, LENGTH), (1, 0, LENGTH)):
        of_document = slice(row, row + 1), slice(first, last)
        alone = losses(model, TOKENS[of_document], TARGETS[of_document])
        np.testing.assert_allclose(packed[of_document], alone, rtol=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_logits_at_the_kept_tokens():
    where = np.asarray(TOKENS) != TOKENS[0, 0]
    both = nnx.jit(lambda model: (model(TOKENS), model.loss(TOKENS, TARGETS, where=where)))
    logits, loss = both(model_of("llama"))
    expected = -np.take_along_axis(jax.nn.log_softmax(logits), TARGETS[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss, expected[where].mean(), rtol=1e-5)


def test_positions_restart_in_each_run_of_equal_segments():
    ids = jnp.array([[0, 0, 0, 1, 1, 0], [5, 4, 4, 4, 4, 4]])
    assert segment_positions(ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
def test_a_step_on_a_mesh_of_data_and_model_equals_a_step_on_one_device():
    form, options = "llama", dict(num_key_value_heads=4, use_bias=True)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    expected = results(form, **options)
    _, parameters = parts(form, **options)
    sharded = jax.device_put(parameters, model_of(form, **options).shardings(mesh, "model"))
    data = jax.device_put((TOKENS, TARGETS, SEGMENTS), NamedSharding(mesh, P("data")))
    loss, gradients = loss_and_gradients(form, **options)(sharded, *data)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert wrong_parameters(gradients, expected[1]) == {}
    for tree, name in itertools.product((sharded, gradients), ("query_key_value", "output", "up", "down")):
        kernel = tree["blocks"][0][name]["kernel"][...]
        axis = name in ("query_key_value", "up")
        assert kernel.sharding.shard_shape(kernel.shape)[axis] == kernel.shape[axis] // 4


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
def test_with_kernels_the_devices_of_a_model_gather_no_heads_and_no_hidden_features():
    form, options = "gpt2", dict(implementation="pallas", dtype=jnp.bfloat16, num_layers=1)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    parameters = jax.device_put(parts(form, **options)[1], model_of(form, **options).shardings(mesh, "model"))
    data = jax.device_put((TOKENS, TARGETS, SEGMENTS), NamedSharding(mesh, P("data")))
    program = loss_and_gradients(form, **options).lower(parameters, *data).compile()
    assert "all-gather" not in program.as_text()
    loss, gradients = program(parameters, *data)
    expected_loss, expected = results(form, **options | dict(implementation="xla"))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-3)
    pairs = zip(*map(jax.tree.leaves, (gradients, expected)), strict=True)
    assert max(relative_error(*pair) for pair in pairs) < 3e-2


def test_in_mixed_precision_parameters_and_gradients_are_float32():
    loss, gradients = results("llama", dtype=jnp.bfloat16)
    dtypes = {a.dtype.name for a in jax.tree.leaves((parts("llama", dtype=jnp.bfloat16)[1], gradients, loss))}
    assert dtypes == {"float32"}
    assert 0 < abs(loss / float(reference("llama")[0]) - 1) < 1e-2
    options = BASE | FORMS["llama"] | dict(dtype=jnp.bfloat16)
    model = nnx.eval_shape(lambda: GPT(VOCABULARY, **options, rngs=nnx.Rngs(0)))
    shapes = nnx.eval_shape(lambda model: (model.hidden(TOKENS), model(TOKENS), model.init_cache(1, 2)), model)
    assert [a.dtype.name for a in shapes[:2]] == ["bfloat16", "float32"]
    assert shapes[2].keys[0].shape == (1, 2, 2, 4) and shapes[2].keys[0].dtype == jnp.bfloat16


def test_initial_weights_have_the_standard_deviations_of_gpt2():
    model = GPT(97, num_layers=8, features=64, num_heads=4, rngs=nnx.Rngs(0))
    block = model.blocks[3]
    for layer, std in ((block.up, 0.02), (block.query_key_value, 0.02), (block.output, 0.005), (block.down, 0.005)):
        assert np.std(layer.kernel[...]) == pytest.approx(std, rel=0.05) and not np.any(layer.bias[...])
    assert np.std(model.embed.embedding[...]) == pytest.approx(0.02, rel=0.05)


def test_hidden_layers_are_by_default_as_wide_as_published():
    def width(**options):
        sizes = dict(num_layers=1, features=2048, num_heads=16)
        return nnx.eval_shape(lambda: GPT(8, **sizes, **options, rngs=nnx.Rngs(0))).blocks[0].up.out_features

    assert width() == 8192 and width(gate="silu") == 5632


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(features=0), "features is 0; wants an int of at least 1"),
        (dict(num_heads=3), "num_heads is 3; wants a divisor of 16, the features"),
        (dict(num_key_value_heads=3), "num_key_value_heads is 3; wants a divisor of 4, the num_heads"),
        (dict(num_heads=16), "num_heads is 16; wants heads with an even number of features for rotary embedding"),
        (dict(normalization="batch_norm"), "normalization is 'batch_norm'; wants one of 'layer_norm', 'rms_norm'"),
        (dict(gate="swish"), "gate is 'swish'; wants one of None, 'silu', "),
        (dict(position_embedding="alibi"), "position_embedding is 'alibi'; wants one of 'rotary', 'learned'"),
        (dict(position_embedding="learned"), "max_length is None; wants an int of at least 1"),
        (dict(max_length=8), "max_length is 8; wants None, because rotary embedding has no largest position"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(f"GPT: {message}")):
        GPT(VOCABULARY, **BASE | wrong, rngs=nnx.Rngs(0))


def test_tokens_that_do_not_fit_are_refused():
    model = model_of("gpt2")
    with pytest.raises(ValueError, match=re.escape("GPT: tokens has shape (4,); wants (batch, length)")):
        model(jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="GPT: tokens has 10 positions; wants at most 9, the max_length"):
        model(TEXT)
    with pytest.raises(ValueError, match=r"GPT\.init_cache: length is 0; wants an int of at least 1"):
        model.init_cache(1, 0)
    with pytest.raises(ValueError, match="GPT: tokens has 9 positions; wants at most 4, the length of the cache"):
        model.decode(TOKENS, model.init_cache(2, 4))
    with pytest.raises(TypeError, match="GPT: tokens has dtype float32; wants integers"):
        model(jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match=re.escape("GPT: tokens has shape (2, 0); wants (batch, length) with length")):
        model(TOKENS[:, :0])
    with pytest.raises(ValueError, match=re.escape("GPT: tokens has shape (2, 9); wants (1, length)")):
        model.decode(TOKENS, model.init_cache(1, 9))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["segment_ids", "positions"])
def test_segments_and_positions_that_do_not_fit_are_refused(name, form):
    model = model_of(form)
    for shape in ((LENGTH,), (2, LENGTH - 1), (3, LENGTH)):
        message = f"GPT: {name} has shape {shape}; wants (2, {LENGTH})"
        with pytest.raises(ValueError, match=re.escape(message)):
            model(TOKENS, **{name: jnp.zeros(shape, jnp.int32)})
    with pytest.raises(TypeError, match=f"GPT: {name} has dtype float32; wants integers"):
        model(TOKENS, **{name: jnp.zeros((2, LENGTH))})


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch_has_empty_logits(form):
    assert nnx.eval_shape(lambda model: model(TOKENS[:0]), model_of(form)).shape == (0, LENGTH, VOCABULARY)
