import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, formulas, in_float64, normal, on_the_cpu, relative_error
from jax.ad_checkpoint import checkpoint_policies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from experiments.studies.many_devices import COLLECTIVE, executed
from jaxbp import dot_product_attention, dot_product_attention_backward
from jaxbp.ops.attention import _chunks

B, T, S, N, K, H = 2, 6, 9, 4, 2, 3
RANDOM = np.random.default_rng(0)
QUERY, KEY, VALUE, DY = normal((B, T, N, H), (B, S, K, H), (B, S, K, 5), (B, T, N, 5))
MASK = RANDOM.random((B, N, T, S)) < 0.7
LENGTHS = np.array([4, 6]), np.array([9, 3])
SEGMENTS = RANDOM.integers(0, 2, (B, T)), RANDOM.integers(0, 2, (B, S))
BIASES = [(B, N, T, S), (N, T, S), (1, 1, T, S), (B, 1, 1, S), (S,)]
CONSTANT = [(N, 1, 1), (B, N, T, 1), ()]
"""Shapes of biases that do not change the result, because a softmax does not depend on a common summand."""

values = pytest.mark.parametrize("implementation", ["xla", "autodiff"])


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chunks, "LARGEST_SIDE", 4)
        jax.clear_caches()
        yield
    jax.clear_caches()


def valid_pairs(shape, mask=None, is_causal=False, window=None, lengths=None, segments=None):
    valid = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape).copy()
    for b, n, t, s in np.ndindex(*shape):
        valid[b, n, t, s] &= not is_causal or s <= t
        valid[b, n, t, s] &= window is None or t - window[0] <= s <= t + window[1]
        valid[b, n, t, s] &= lengths is None or (t < lengths[0][b] and s < lengths[1][b])
        valid[b, n, t, s] &= segments is None or segments[0][b, t] == segments[1][b, s]
    return valid


def reference(query, key, value, bias=None, scale=None, softcap=None, **masks):
    """Return the result and the log-sum-exp `(batch, T, N)` by the definition."""
    key, value = (jnp.repeat(a, query.shape[2] // a.shape[2], axis=2) for a in (key, value))
    z = jnp.einsum("btnh,bsnh->bnts", query, key) * (query.shape[3] ** -0.5 if scale is None else scale)
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    z = z if bias is None else z + bias
    valid = valid_pairs(z.shape, **masks)
    e = jnp.where(valid, jnp.exp(z), 0.0)
    total, has_key = jnp.sum(e, 3, keepdims=True), valid.any(3, keepdims=True)
    p = e / jnp.where(has_key, total, 1.0)
    residual = jnp.where(has_key, jnp.log(jnp.where(has_key, total, 1.0)), -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", p, value), jnp.swapaxes(residual[..., 0], 1, 2)


def finite(residual):
    return jnp.where(jnp.isinf(residual), 0.0, residual)


FACTORS = {
    # name -> (options of the op, options of the reference)
    "mask": (dict(mask=MASK), dict(mask=MASK)),
    "causal": (dict(is_causal=True), dict(is_causal=True)),
    "window": (dict(local_window_size=(3, 2)), dict(window=(3, 2))),
    "lengths": (dict(query_seq_lengths=LENGTHS[0], key_value_seq_lengths=LENGTHS[1]), dict(lengths=LENGTHS)),
    "segments": (
        dict(query_segment_ids=SEGMENTS[0], key_value_segment_ids=SEGMENTS[1]),
        dict(segments=SEGMENTS),
    ),
    "scale": (dict(scale=1.5), dict(scale=1.5)),
    "softcap": (dict(softcap=0.8), dict(softcap=0.8)),
    "bias": ({}, {}),
    "one key head": ({}, {}),
    "one head size": ({}, {}),
    "residual": ({}, {}),
}
# Rows of a Plackett-Burman design: each pair of factors occurs in all four combinations.
FIRST = [1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0]
DESIGN = [*(FIRST[-i:] + FIRST[:-i] for i in range(11)), [0] * 11]


def test_every_pair_of_options_occurs_in_every_combination():
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        assert {(row[i], row[j]) for row in DESIGN} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def calls():
    """Yield the arrays, the options of the op, the options of the reference, and whether to return the residual."""
    for at, row in enumerate(DESIGN):
        used = [name for name, is_used in zip(FACTORS, row, strict=True) if is_used]
        ours, theirs = ({k: v for name in used for k, v in FACTORS[name][i].items()} for i in (0, 1))
        heads = slice(1) if "one key head" in used else slice(None)
        features = slice(3) if "one head size" in used else slice(None)
        bias = normal(BIASES[at % len(BIASES)], seed=at) if "bias" in used else []
        arrays = (QUERY, KEY[:, :, heads], VALUE[:, :, heads, features], *bias)
        yield arrays, ours, theirs, "residual" in used


def results(op, arrays, with_residual):
    """Return the results and the gradients."""

    def both(*arrays):
        y, residual = op(*arrays)
        return (y, finite(residual)) if with_residual else (y,)

    y, vjp = jax.vjp(both, *arrays)
    return y, vjp(tuple(jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in y))


def of_calls(implementation):
    def run(all_arrays):
        found = []
        for arrays, (_, options, of_reference, with_residual) in zip(all_arrays, calls(), strict=True):
            if implementation is None:
                op = functools.partial(reference, **of_reference)
            else:
                op = functools.partial(_op, **options, implementation=implementation, with_residual=with_residual)
            found.append(results(op, arrays, with_residual))
        return found

    return jax.jit(run)


def _op(*arrays, with_residual, **options):
    found = dot_product_attention(*arrays, **options, return_residual=with_residual)
    return found if with_residual else (found, jnp.zeros(()))


@functools.cache
def expected_of_calls():
    return in_float64(of_calls(None), [call[0] for call in calls()])


@values
def test_each_pair_of_options_matches_the_definition_in_float64(implementation):
    found_of_calls = of_calls(implementation)([call[0] for call in calls()])
    for at, (found, wanted) in enumerate(zip(found_of_calls, expected_of_calls(), strict=True)):
        assert_close(found, wanted, "float32", str(DESIGN[at]))


@values
def test_the_gradient_of_a_bias_is_summed_over_the_axes_that_broadcast(implementation):
    biases = normal(*BIASES, *CONSTANT)
    op = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
    gradients = jax.jit(lambda biases: [jax.vjp(lambda b: op(QUERY, KEY, VALUE, b), b)[1](DY)[0] for b in biases])
    run = functools.partial(reference, QUERY, KEY, VALUE, is_causal=True)
    (of_scores,) = jax.jit(lambda b: jax.vjp(lambda b: run(b)[0], b)[1](DY))(jnp.zeros((B, N, T, S)))
    for bias, found in zip(biases, gradients([jnp.zeros(b.shape) for b in biases]), strict=True):
        wanted = jax.linear_transpose(lambda b: jnp.broadcast_to(b, (B, N, T, S)), bias)(of_scores)[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@values
def test_without_a_batch_axis_the_results_are_those_of_one_example(implementation):
    options = dict(is_causal=True, return_residual=True, implementation=implementation)
    (bias,) = normal((N, T, S))
    of_one = dict(query_seq_lengths=LENGTHS[0][:1], mask=MASK[0])
    one = dot_product_attention(QUERY[0], KEY[0], VALUE[0], bias, **options, **of_one)
    whole = dot_product_attention(QUERY[:1], KEY[:1], VALUE[:1], bias, **options, **of_one)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[0]), one, whole)
    backward = dot_product_attention_backward(
        DY[0], QUERY[0], KEY[0], VALUE[0], bias, is_causal=True, **of_one, implementation=implementation
    )
    assert [a.shape for a in backward] == [(T, N, H), (S, K, H), (S, K, 5), (N, T, S)]


PACKED, DY_OF_PACKED = normal((B, T, K, N // K + 2, H), (B, T, N, H))
OF_PACKED = {
    "causal": dict(is_causal=True),
    "lengths": dict(query_seq_lengths=LENGTHS[0], key_value_seq_lengths=LENGTHS[0] + 1),
    "bias": dict(bias=normal((N, T, T))[0]),
}


def separate(packed):
    return packed[:, :, :, :-2].reshape(B, T, N, H), packed[:, :, :, -2], packed[:, :, :, -1]


@pytest.mark.parametrize("implementation", [None, "xla", "autodiff"])
@pytest.mark.parametrize("name", OF_PACKED)
def test_packed_queries_keys_and_values_give_the_results_and_the_packed_gradient_of_their_parts(name, implementation):
    options = OF_PACKED[name] | dict(implementation=implementation)
    of_parts = functools.partial(dot_product_attention, **options)

    @jax.jit
    def run(packed, dy):
        expected, vjp = jax.vjp(lambda packed: of_parts(*separate(packed)), packed)
        actual, packed_vjp = jax.vjp(of_parts, packed)
        gradients = jax.tree.leaves(dot_product_attention_backward(dy, packed, **options))
        plain = functools.partial(dot_product_attention, implementation=implementation)
        return expected, vjp(dy)[0], actual, packed_vjp(dy)[0], gradients, plain(packed[0]), plain(packed)[0]

    expected, dx, actual, packed_dx, gradients, of_one, of_first = run(PACKED, DY_OF_PACKED)
    assert_close((actual, packed_dx, gradients[0], of_one), (expected, dx, dx, of_first), "float32")
    assert len(gradients) == 1 + ("bias" in options)


def _of_empty(op, *arrays):
    def run(*arrays):
        y, vjp = jax.vjp(op, *arrays)
        return y, *vjp(y)

    return jax.jit(run)(*(np.asarray(a)[:0] for a in arrays))


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
def test_an_empty_batch_may_be_packed(implementation):
    y, dx = _of_empty(functools.partial(dot_product_attention, implementation=implementation), PACKED)
    assert y.shape == (0, T, N, H) and dx.shape == (0, *PACKED.shape[1:])


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths", "segment_ids"])
def test_an_empty_batch_may_have_lengths_and_segments(name, implementation):
    options = {name: np.zeros((0, T) if name == "segment_ids" else 0, np.int32)}
    op = functools.partial(dot_product_attention, **options, implementation=implementation)
    y, *gradients = _of_empty(op, QUERY, KEY[:, :T], VALUE[:, :T])
    assert y.size == 0 and [a.shape[0] for a in gradients] == [0, 0, 0]


@values
def test_one_segment_per_position_of_both_is_segment_ids(implementation):
    options = dict(segment_ids=SEGMENTS[0], implementation=implementation)
    both = dict(query_segment_ids=SEGMENTS[0], key_value_segment_ids=SEGMENTS[0], implementation=implementation)
    key, value = KEY[:, :T], VALUE[:, :T]
    found, wanted = (dot_product_attention(QUERY, key, value, **of) for of in (options, both))
    np.testing.assert_array_equal(found, wanted)


WITHOUT_KEYS = {
    "mask": dict(mask=np.arange(T)[:, None] != 1),
    "bias": dict(bias=jnp.where(jnp.arange(T)[:, None] == 1, -jnp.inf, 0.0)),
    "segments": dict(query_segment_ids=np.arange(T)[None] == np.ones((B, 1)), key_value_segment_ids=np.zeros((B, S))),
    "window": dict(mask=np.arange(S) > 1, is_causal=True),
    "no keys": dict(key_value_seq_lengths=np.zeros(B, np.int32)),
}
WITHOUT_KEYS["segments"] = {name: a.astype(np.int32) for name, a in WITHOUT_KEYS["segments"].items()}


@values
def test_a_query_without_a_valid_key_gives_0_and_has_gradients_of_0(implementation):
    def run(masks):
        op = functools.partial(dot_product_attention, **masks, return_residual=True, implementation=implementation)
        (y, residual), vjp = jax.vjp(op, QUERY, KEY, VALUE)
        # The result does not depend on this query, even if its gradient is unknown.
        dy = jnp.zeros_like(y).at[:, 1].set(jnp.nan), jnp.zeros_like(residual).at[:, 1].set(jnp.nan)
        return y[:, 1], residual[:, 1], vjp(dy), vjp((y, finite(residual)))

    for name, (y, residual, gradients, others) in jax.jit(
        lambda: {n: run(m) for n, m in WITHOUT_KEYS.items()}
    )().items():
        np.testing.assert_array_equal(y, np.zeros((B, N, 5)), name)
        np.testing.assert_array_equal(residual, np.full((B, N), -np.inf), name)
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, np.zeros(gradient.shape), name)
        assert all(jnp.isfinite(gradient).all() for gradient in others), name


EXCLUDING = {
    # name -> (options, which queries have no key, which keys have no query)
    "lengths": (
        dict(query_seq_lengths=LENGTHS[0], key_value_seq_lengths=LENGTHS[1]),
        np.arange(T) >= LENGTHS[0][:, None],
        np.arange(S) >= LENGTHS[1][:, None],
    ),
    "mask": (dict(mask=np.outer(np.arange(T) != 2, np.arange(S) != 5)), np.arange(T) == 2, np.arange(S) == 5),
    "mask per head": (
        dict(mask=(np.arange(N)[:, None] > 1)[..., None] | (np.arange(S) != 4)),
        np.zeros(T, bool),
        (np.arange(S) == 4)[:, None] & (np.arange(K) == 0),
    ),
    "causal": (dict(is_causal=True), np.zeros(T, bool), np.arange(S) >= T),
    "window": (dict(local_window_size=(4, 1)), np.zeros(T, bool), np.arange(S) > T),
    "segments": (
        dict(
            query_segment_ids=np.full((B, T), 1) + (np.arange(T) == 3),
            key_value_segment_ids=np.eye(S, dtype=int)[[0, 4]],
        ),
        np.arange(T) == 3,
        np.eye(S)[[0, 4]] == 0,
    ),
}


@values
def test_queries_and_keys_that_a_mask_excludes_from_all_pairs_are_never_read(implementation):
    def run(options, arrays, dy):
        op = functools.partial(dot_product_attention, **options, implementation=implementation)
        y, vjp = jax.vjp(op, *arrays)
        return y, *vjp(dy)

    def spoiled(a, excluded):
        excluded = excluded if excluded.ndim < 2 or excluded.shape[0] == S else excluded[..., None]
        excluded = np.broadcast_to(excluded if excluded.ndim > 1 else excluded[:, None], a.shape[:3])
        return jnp.where(excluded[..., None], jnp.nan, a)

    @jax.jit
    def both():
        found = {}
        for name, (options, queries, keys) in EXCLUDING.items():
            bad = spoiled(QUERY, queries), spoiled(KEY, keys), spoiled(VALUE, keys)
            clean = [jnp.where(jnp.isnan(a), 0.0, a) for a in bad]
            found[name] = run(options, bad, spoiled(DY, queries)), run(options, clean, DY)
        return found

    for name, (found, wanted) in both().items():
        jax.tree.map(functools.partial(np.testing.assert_array_equal, err_msg=name), found, wanted)


def test_scores_that_all_overflow_give_nan():
    query, key = jnp.full((1, 1, 1, 1), 1e30), jnp.full((1, 2, 1, 1), -1e30)
    y, residual = dot_product_attention(query, key, key, return_residual=True, implementation="xla")
    assert jnp.isnan(y).all() and jnp.isnan(residual).all()


@values
def test_large_scores_do_not_overflow(implementation):
    query, key = 100 * QUERY, 100 * KEY
    y = dot_product_attention(query, key, VALUE, implementation=implementation)
    assert_close(
        y, in_float64(functools.partial(dot_product_attention, implementation="autodiff"), query, key, VALUE), 1e-3
    )


def test_second_derivatives_match_differences():
    options = dict(is_causal=True, local_window_size=3, softcap=1.5, return_residual=True, implementation="xla")
    options |= dict(query_segment_ids=SEGMENTS[0], key_value_segment_ids=SEGMENTS[1])
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.asarray(a, np.float64)) for a in (QUERY, KEY, VALUE, *normal((N, 1, S)))]

        def op(*arrays):
            y, residual = dot_product_attention(*arrays, **options)
            return y, finite(residual)

        check_grads(jax.jit(op), arrays, order=2, modes=("rev",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precisions_are_as_exact_as_autodiff_with_a_bias_of_float32(dtype):
    shapes = (1, 64, 2, 32), (1, 64, 1, 32), (1, 64, 1, 32), (1, 64, 2, 32)
    *arrays, dy = (a.astype(dtype) for a in normal(*shapes))
    (bias,) = normal((2, 1, 64))

    def run(implementation):
        op = functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
        return jax.jit(lambda *a: (lambda y, vjp: (y, *vjp(a[-1])))(*jax.vjp(op, *a[:-1])))

    exact = in_float64(run("autodiff"), *arrays, bias, dy)
    by_autodiff = run("autodiff")(*arrays, bias, dy)
    for implementation in ("xla", "pallas"):  # without a GPU, the formula instead of the kernels
        found = run(implementation)(*arrays, bias, dy)
        assert [a.dtype for a in found] == [*[dtype] * 4, jnp.float32]
        for a, b, wanted in zip(found, by_autodiff, exact, strict=True):
            assert relative_error(a, wanted) <= 1.1 * relative_error(b, wanted)


@values
def test_vmap_maps_arrays_and_masks(implementation):
    @jax.jit
    def gradient(query, lengths):
        op = functools.partial(dot_product_attention, key_value_seq_lengths=lengths, implementation=implementation)
        return jax.grad(lambda q: jnp.sum(jnp.sin(op(q, KEY, VALUE))))(query)

    queries, lengths = np.stack([QUERY, 2 * QUERY]), np.stack([LENGTHS[1], LENGTHS[1][::-1]])
    each = np.stack([gradient(*one) for one in zip(queries, lengths, strict=True)])
    assert_close(jax.jit(jax.vmap(gradient))(queries, lengths), each, "float32")


def gradients_of_segments(implementation):
    def run(query, key, value, segments):
        op = functools.partial(
            dot_product_attention, segment_ids=segments, is_causal=True, implementation=implementation
        )
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), (0, 1, 2))(query, key, value)

    return jax.jit(run)


@formulas
def test_the_gradient_is_exported_for_any_batch_and_length(implementation):
    batch, length = jax.export.symbolic_shape("batch, length")
    structs = [jax.ShapeDtypeStruct((batch, length, heads, H), jnp.float32) for heads in (N, K, K)]
    structs.append(jax.ShapeDtypeStruct((batch, length), jnp.int32))
    run = gradients_of_segments(implementation)
    with on_the_cpu():
        exported = jax.export.export(run)(*structs)
        for count, size in ((2, T), (1, 5)):
            arrays = QUERY[:count, :size], KEY[:count, :size], VALUE[:count, :size, :, :H]
            segments = SEGMENTS[0][:count, :size].astype(np.int32)
            assert_close(exported.call(*arrays, segments), run(*arrays, segments), "float32")


AUTO, EXPLICIT, BY_BOTH = AxisType.Auto, AxisType.Explicit, P("examples", None, "heads")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize(
    ("implementation", "sizes", "axes", "spec"),
    [
        ("xla", (4, 2), AUTO, BY_BOTH),
        ("xla", (4, 2), EXPLICIT, BY_BOTH),
        ("autodiff", (4, 2), AUTO, BY_BOTH),
        ("pallas", (4, 2), AUTO, BY_BOTH),
        ("pallas", (4, 2), EXPLICIT, BY_BOTH),
    ],
)
def test_on_a_mesh_each_device_has_its_examples_and_heads(implementation, sizes, axes, spec):
    mesh = jax.make_mesh(sizes, ("examples", "heads"), axis_types=(axes,) * 2, devices=jax.devices()[:8])
    dtype = jnp.bfloat16 if implementation == "pallas" else jnp.float32
    arrays = [a.astype(dtype) for a in normal((8, T, N, H), (8, T, K, H), (8, T, K, H))]
    segments = RANDOM.integers(0, 2, (8, T)).astype(np.int32)
    run, sharded = gradients_of_segments(implementation), NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, sharded) for a in arrays]
        placed.append(jax.device_put(segments, NamedSharding(mesh, P(*spec[:1]))))
        program = run.lower(*placed).compile()
        found = program(*placed)
    assert "all-gather" not in program.as_text() and all(a.sharding.is_equivalent_to(sharded, 4) for a in found)
    expected = gradients_of_segments("autodiff")(*(a.astype(jnp.float32) for a in arrays), segments)
    assert_close(found, expected, dtype.__name__)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize(
    ("spec", "kinds"),
    [(P("devices"), {"all-reduce"}), (P(None, "devices"), {"all-gather"})],
    ids=["examples", "positions"],
)
def test_devices_communicate_before_or_after_the_loops(monkeypatch, spec, kinds):
    monkeypatch.setattr(_chunks, "LARGEST_SIDE", 6)
    jax.clear_caches()
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AUTO,), devices=jax.devices()[:8])
    *arrays, bias = normal((16, 16, 2, 3), (16, 16, 1, 3), (16, 16, 1, 3), (1, 2, 16, 16))
    placed = [
        *(jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays),
        jax.device_put(bias, NamedSharding(mesh, P())),
    ]

    @jax.jit
    def gradients(*arrays):
        op = functools.partial(dot_product_attention, is_causal=True, implementation="xla")
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(op(*arrays))), (0, 1, 2, 3))(*arrays)

    program = gradients.lower(*placed).compile()
    assert_close(program(*placed), gradients(*arrays, bias), "float32")
    found = [(COLLECTIVE.search(line), depth) for line, depth, _ in executed(program.as_text())]
    assert {(collective["kind"], depth) for collective, depth in found if collective} == {(kind, 0) for kind in kinds}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices to shard over")
def test_shard_map_gives_the_gradients_of_the_whole():
    mesh = jax.make_mesh((2,), ("examples",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    arrays = QUERY, KEY[:, :T], VALUE[:, :T], SEGMENTS[0].astype(np.int32)
    sharded = jax.shard_map(gradients_of_segments("xla"), mesh=mesh, in_specs=P("examples"), out_specs=P("examples"))
    assert_close(jax.jit(sharded)(*arrays), gradients_of_segments("autodiff")(*arrays), "float32")


@pytest.mark.parametrize(("implementation", "saved"), [("xla", {(B, N, T)}), ("pallas", {(B, N, T), (B, T, N, 5)})])
def test_policies_of_checkpoint_save_the_statistics_by_name(implementation, saved):
    query, key, value = (a.astype(jnp.bfloat16) for a in (QUERY, KEY, VALUE))
    op = functools.partial(dot_product_attention, implementation=implementation)
    policy = checkpoint_policies.save_only_these_names("dot_product_attention")
    _, vjp = jax.vjp(jax.checkpoint(lambda q: jnp.sum(jnp.sin(op(jnp.sin(q), key, value))), policy=policy), query)
    assert {a.shape for a in jax.tree.leaves(vjp)} == saved | {a.shape for a in (query, key, value)}


def test_lengths_of_narrow_dtypes_and_large_windows_do_not_overflow():
    q = np.ones((1, 300, 1, 4), np.float32)
    of_key = np.arange(300, dtype=np.float32)[None, :, None, None] * q
    y = dot_product_attention(q, q, of_key, key_value_seq_lengths=np.array([100], np.uint8), implementation="xla")
    np.testing.assert_allclose(y, np.full(q.shape, 49.5), rtol=1e-5)
    y = dot_product_attention(q, q, of_key, local_window_size=(0, 2**31 - 1), implementation="xla")
    np.testing.assert_allclose(y[0, :, 0, 0], (np.arange(300) + 299) / 2, rtol=1e-5)


def test_none_is_autodiff_in_float32_and_the_formula_in_half_precision():
    for dtype, name in (("float32", "autodiff"), ("float64", "autodiff"), ("bfloat16", "xla"), ("float16", "xla")):
        with jax.enable_x64(True):
            arrays = [jax.ShapeDtypeStruct(a.shape, dtype) for a in (QUERY, KEY, VALUE)]
            text = jax.jit(dot_product_attention).lower(*arrays).as_text(debug_info=True)
        assert {one for one in ("xla", "autodiff") if f"/{one}/" in text} == {name}


def test_none_never_calls_cudnn():
    arrays = [jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)] * 3
    gradient = jax.jit(jax.grad(lambda *a: jnp.sum(dot_product_attention(*a)).astype(jnp.float32)))
    assert "cudnn" not in gradient.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text().lower()


ZEROS = {name: jnp.zeros(a.shape) for name, a in zip(("query", "key", "value"), (QUERY, KEY, VALUE), strict=True)}
OP = "dot_product_attention"
REFUSED = {
    "query of two axes": (
        ValueError,
        dict(query=jnp.zeros((T, N))),
        r"query has shape \(6, 4\); wants \(batch, T, N, H\)",
    ),
    "no queries": (
        ValueError,
        dict(query=jnp.zeros((B, 0, N, H))),
        r"query has shape .*; wants .* with T of at least 1",
    ),
    "value without key": (
        TypeError,
        dict(key=None),
        "key is None, but value is given; wants both, or neither for a packed query",
    ),
    "packed query without values": (
        ValueError,
        dict(query=jnp.zeros((B, T, K, 2, H)), key=None, value=None),
        r"query has shape \(2, 6, 2, 2, 3\); wants \(batch, T, K, N // K \+ 2, H\) or .*, without a key",
    ),
    "head size": (ValueError, dict(key=jnp.zeros((B, S, K, 4))), r"key has shape \(2, 9, 2, 4\); wants \(2, S, K, 3\)"),
    "batch": (ValueError, dict(key=jnp.zeros((3, S, K, H))), r"key has shape \(3, 9, 2, 3\); wants \(2, S, K, 3\)"),
    "values": (
        ValueError,
        dict(value=jnp.zeros((B, T, K, H))),
        r"value has shape \(2, 6, 2, 3\); wants \(2, 9, 2, value_features\)",
    ),
    "heads": (
        ValueError,
        dict(query=jnp.zeros((B, T, 3, H))),
        "query has 3 heads; wants a multiple of 2, the number of key heads",
    ),
    "bias": (
        ValueError,
        dict(bias=jnp.zeros((K, T, S))),
        r"bias has shape \(2, 6, 9\); wants a shape that broadcasts to \(2, 4, 6, 9\)",
    ),
    "boolean bias": (TypeError, dict(bias=MASK), "bias has dtype bool; wants a floating dtype"),
    "mask": (ValueError, dict(mask=MASK[..., :2]), r"mask has shape \(2, 4, 6, 2\); wants a shape that broadcasts to"),
    "five axes": (
        ValueError,
        dict(mask=MASK[None]),
        r"mask has shape \(1, 2, 4, 6, 9\); wants a shape that broadcasts",
    ),
    "floating mask": (TypeError, dict(mask=np.ones((T, S), np.float32)), "mask has dtype float32; wants bool"),
    "lengths": (
        ValueError,
        dict(query_seq_lengths=np.ones(3, np.int32)),
        r"query_seq_lengths has shape \(3,\); wants \(2,\)",
    ),
    "floating lengths": (
        TypeError,
        dict(key_value_seq_lengths=np.ones(B, np.float32)),
        "key_value_seq_lengths has dtype float32; wants integers",
    ),
    "segments of different sizes": (
        ValueError,
        dict(segment_ids=SEGMENTS[0]),
        "segment_ids is given, but T is 6 and S is 9; wants query_segment_ids and key_value_segment_ids",
    ),
    "segments twice": (
        ValueError,
        dict(segment_ids=SEGMENTS[0], query_segment_ids=SEGMENTS[0]),
        "segment_ids is given; wants no query_segment_ids and no key_value_segment_ids",
    ),
    "segments of queries only": (
        ValueError,
        dict(query_segment_ids=SEGMENTS[0]),
        "query_segment_ids is given; wants key_value_segment_ids, too",
    ),
    "window": (
        ValueError,
        dict(local_window_size=(-1, 2)),
        r"local_window_size is \(-1, 2\); wants an int of at least 0, or a pair of such ints",
    ),
    "softcap": (ValueError, dict(softcap=0.0), "softcap is 0.0; wants a finite number above 0, or None"),
    "scale": (ValueError, dict(scale="half"), r"scale is 'half'; wants a number in \[-inf, inf\]"),
    "is_causal": (ValueError, dict(is_causal=1), "is_causal is 1; wants True or False"),
    "return_residual": (ValueError, dict(return_residual="yes"), "return_residual is 'yes'; wants True or False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    error, arguments, message = REFUSED[case]
    with pytest.raises(error, match=f"^{OP}: {message}"):
        dot_product_attention(**(ZEROS | arguments))


def test_a_dy_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=rf"^{OP}_backward: dy has shape \(2, 6, 4, 3\); wants \(2, 6, 4, 5\)"):
        dot_product_attention_backward(QUERY, *ZEROS.values())
