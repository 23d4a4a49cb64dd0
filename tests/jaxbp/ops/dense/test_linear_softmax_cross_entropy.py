"""Dense layer, softmax, and cross-entropy in chunks of rows: options, dropped rows, chunks, memory, and products."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, normal
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jaxbp import linear_softmax_cross_entropy, linear_softmax_cross_entropy_backward
from jaxbp.ops.dense import linear_softmax_cross_entropy as op

ROWS, FEATURES, CLASSES = 7, 5, 6
LABELS = jnp.array([0, 5, 2, 2, 1, 3, 4])
WHERE = jnp.array([True, False, True, True, False, True, True])
ALL_OPTIONS = {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0}
with_or_without_options = pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
by_formula_and_definition = pytest.mark.parametrize("implementation", ["xla", "autodiff"])


@pytest.fixture(params=[3, 8], ids=lambda rows: f"chunks of {rows}")
def chunks(request, monkeypatch):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * request.param * 4 * CLASSES)
    jax.clear_caches()


def arrays(dtype="float32"):
    x, w, b = normal((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    return tuple(a.astype(dtype) for a in (x, w, b))


def reference(x, w, b, where=None, *, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"):
    """Compute the loss by Optax and `jax.numpy`, as users would."""
    z = x @ w.T + b
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    y = optax.smooth_labels(jax.nn.one_hot(LABELS, CLASSES, dtype=z.dtype), label_smoothing)
    loss = optax.softmax_cross_entropy(z, y) + z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    kept = jnp.ones(ROWS, bool) if where is None else where
    if reduction is None:
        return jnp.where(kept, loss, 0)
    total = jnp.sum(jnp.where(kept, loss, 0))
    return total / kept.sum() if reduction == "mean" else total


def in_float64(function, *args, **options):
    with jax.enable_x64(True):
        return function(*(jnp.asarray(np.asarray(a, np.float64)) for a in args), **options)


def loss_of(x, w, b, implementation=None, where=None, **options):
    return linear_softmax_cross_entropy(x, w, LABELS, b, where=where, implementation=implementation, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("where", [None, WHERE], ids=["all rows", "some rows"])
@with_or_without_options
@by_formula_and_definition
def test_losses_and_gradients_are_those_of_float64(chunks, options, where, reduction, implementation):
    weights = jnp.arange(1.0, ROWS + 1) if reduction is None else 2.0
    options = options | dict(reduction=reduction)

    def weighed(f, x, w, b):
        return jnp.sum(f(x, w, b, where=where, **options) * weights)

    run = jax.value_and_grad(
        functools.partial(weighed, functools.partial(loss_of, implementation=implementation)), (0, 1, 2)
    )
    expected = in_float64(jax.value_and_grad(functools.partial(weighed, reference), (0, 1, 2)), *arrays())
    assert_close(run(*arrays()), expected, "float32")


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_each_option_is_that_of_optax_and_numpy(option):
    options = {option: ALL_OPTIONS[option]}
    run = jax.value_and_grad(functools.partial(loss_of, implementation="xla", **options), (0, 1, 2))
    expected = in_float64(jax.value_and_grad(functools.partial(reference, **options), (0, 1, 2)), *arrays())
    assert_close(run(*arrays()), expected, "float32")


@with_or_without_options
def test_pallas_pads_the_classes_for_the_kernel_and_nothing_else_changes(chunks, options):
    runs = [
        jax.value_and_grad(functools.partial(loss_of, implementation=name, where=WHERE, **options), (0, 1, 2))
        for name in ("pallas", "xla")
    ]
    assert "launch" in str(jax.make_jaxpr(runs[0])(*arrays())) and "launch" not in str(
        jax.make_jaxpr(runs[1])(*arrays())
    )
    assert_close(runs[0](*arrays()), runs[1](*arrays()), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_half_precision_is_no_farther_from_float64_than_plain_jax(chunks, dtype, offset):
    x, w, b = arrays(dtype)
    b = b + jnp.asarray(offset, dtype)
    expected = in_float64(jax.value_and_grad(reference, (0, 1, 2)), x, w, b)
    ours = jax.value_and_grad(functools.partial(loss_of, implementation="xla"), (0, 1, 2))(x, w, b)
    plain = jax.value_and_grad(reference, (0, 1, 2))(x, w, b)

    def error(results):
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        return max(np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e) for a, e in pairs)

    assert error(ours) <= 1.5 * error(plain) + 1e-3
    assert all(a.dtype == dtype for a in jax.tree.leaves(ours))


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@by_formula_and_definition
def test_dropped_rows_are_not_read_and_have_no_gradient(chunks, reduction, implementation):
    x, w, b = arrays()
    spoiled = jnp.where(WHERE[:, None], x, jnp.nan)
    labels = jnp.where(WHERE, LABELS, -100)

    def loss(x, w, b, labels):
        options = dict(where=WHERE, reduction=reduction, implementation=implementation)
        return linear_softmax_cross_entropy(x, w, labels, b, **options).sum()

    run = jax.value_and_grad(loss, (0, 1, 2))
    value, (dx, dw, db) = run(spoiled, w, b, labels)
    assert_close((value, (dx, dw, db)), run(x, w, b, LABELS), "float32")
    np.testing.assert_array_equal(dx[~WHERE], 0)


@by_formula_and_definition
def test_if_every_row_is_dropped_loss_and_gradients_are_zero(chunks, implementation):
    nothing = jnp.zeros(ROWS, bool)
    f = functools.partial(loss_of, where=nothing, implementation=implementation)
    value, gradients = jax.value_and_grad(f, (0, 1, 2))(*arrays())
    assert value == 0 and all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("reduction", ["mean", None])
@by_formula_and_definition
def test_a_label_that_is_no_class_gives_a_nan_loss_and_gradient(reduction, implementation):
    x, w, b = arrays()
    for label in (-1, CLASSES):
        labels = LABELS.at[2].set(label)
        f = functools.partial(linear_softmax_cross_entropy, reduction=reduction, implementation=implementation)
        loss = f(x, w, labels, b)
        assert jnp.isnan(loss).all() if reduction else jnp.isnan(loss).nonzero()[0].tolist() == [2]
        assert jnp.isnan(jax.grad(lambda x, f=f, labels=labels: f(x, w, labels, b).sum())(x)[2]).all()


@with_or_without_options
@pytest.mark.parametrize("reduction", ["mean", None])
@by_formula_and_definition
def test_derivatives_of_order_two(monkeypatch, options, reduction, implementation):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 3 * 4 * CLASSES)
    jax.clear_caches()
    f = functools.partial(loss_of, implementation=implementation, reduction=reduction, where=WHERE, **options)
    check_grads(f, arrays(), order=2, modes=("rev",), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@by_formula_and_definition
def test_the_public_backward_has_the_gradients(chunks, reduction, implementation):
    x, w, b = arrays()
    options = dict(where=WHERE, reduction=reduction, implementation=implementation, z_loss=0.1)
    loss, vjp = jax.vjp(lambda x, w, b: linear_softmax_cross_entropy(x, w, LABELS, b, **options), x, w, b)
    (dy,) = normal(loss.shape, seed=3)
    backward = linear_softmax_cross_entropy_backward(dy, x, w, LABELS, b, **options)
    assert_close(backward, vjp(dy), "float32")
    without = linear_softmax_cross_entropy_backward(dy, x, w, LABELS, **options)
    assert_close(without, linear_softmax_cross_entropy_backward(dy, x, w, LABELS, 0 * b, **options), "float32")


def products(jaxpr):
    """Return the number of matrix products of a jaxpr, where the body of a scan counts once."""
    own = sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)
    inner = [j for equation in jaxpr.eqns for j in jaxprs_in_params(equation.params)]
    return own + sum(map(products, inner))


@pytest.mark.parametrize(("reduction", "count"), [("mean", 3), ("sum", 3), (None, 4)])
def test_both_directions_compute_three_products_or_four_without_a_reduction(monkeypatch, reduction, count):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 3 * 4 * CLASSES)
    jax.clear_caches()
    f = functools.partial(loss_of, implementation="xla", reduction=reduction)
    gradient = jax.make_jaxpr(jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1, 2)))(*arrays())
    forward = jax.make_jaxpr(f)(*arrays())
    assert products(gradient.jaxpr) == count and products(forward.jaxpr) == 1


@pytest.mark.parametrize("reduction", ["mean", None])
def test_the_logits_never_exist_as_a_whole(monkeypatch, reduction):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 16 * 4 * 4096)
    jax.clear_caches()
    shapes = (512, 8), (4096, 8), (4096,)
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jnp.zeros(512, int)

    def temporaries(implementation):
        def loss(x, w, b):
            options = dict(reduction=reduction, implementation=implementation)
            return linear_softmax_cross_entropy(x, w, labels, b, **options).sum()

        compiled = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*structs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 512 * 4096
    assert temporaries("xla") < logits / 4 and temporaries("autodiff") > logits


def test_vmap_checkpoint_and_jit_agree_with_a_loop(monkeypatch):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 3 * 4 * CLASSES)
    jax.clear_caches()
    x, w, b = arrays()
    ws = jnp.stack([w, 2 * w])
    gradient = jax.value_and_grad(functools.partial(loss_of, implementation="xla", where=WHERE), (0, 1, 2))
    expected = [gradient(x, each, b) for each in ws]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *expected)
    assert_close(jax.jit(jax.vmap(gradient, (None, 0, None)))(x, ws, b), expected, "float32")
    remade = jax.checkpoint(functools.partial(loss_of, implementation="xla", where=WHERE))
    assert_close(jax.value_and_grad(remade, (0, 1, 2))(x, w, b), gradient(x, w, b), "float32")


def test_leading_axes_and_one_row_and_one_class():
    x, w, b = arrays()
    many = linear_softmax_cross_entropy(x[:6].reshape(2, 3, FEATURES), w, LABELS[:6].reshape(2, 3), b, reduction=None)
    one = linear_softmax_cross_entropy(x[:6], w, LABELS[:6], b, reduction=None)
    assert_close(many.reshape(6), one, "float32")
    assert linear_softmax_cross_entropy(x[0], w, LABELS[0], b).shape == ()
    assert linear_softmax_cross_entropy(x, w[:1], 0 * LABELS, b[:1]) == 0
    assert linear_softmax_cross_entropy(x[:0], w, LABELS[:0], b) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(labels=LABELS.astype(float)), "labels has dtype float32; wants integers"),
        (dict(labels=LABELS[:3]), r"labels has shape \(3,\)"),
        (dict(where=LABELS), "where has dtype int32; wants bool"),
        (dict(where=WHERE[:2]), r"where has shape \(2,\)"),
        (dict(w=jnp.ones((6, 4))), r"x has shape \(7, 5\); wants \(..., 4\)"),
        (dict(b=jnp.ones(4)), r"b has shape \(4,\)"),
        (dict(reduction="none"), "reduction is 'none'; wants 'mean', 'sum', or None"),
        (dict(softcap=0.0), "softcap is 0.0; wants a number above 0, or None"),
        (dict(label_smoothing=2.0), "label_smoothing is 2.0; wants a number in"),
        (dict(z_loss=-1.0), "z_loss is -1.0; wants a number in"),
    ],
)
def test_bad_arguments_are_named(change, message):
    x, w, b = arrays()
    arguments = dict(x=x, w=w, labels=LABELS, b=b) | change
    with pytest.raises((TypeError, ValueError), match=f"^linear_softmax_cross_entropy: {message}"):
        linear_softmax_cross_entropy(**arguments)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize(
    ("rows", "classes", "reduced"),
    [
        # The maxima, the sums, and dx of each chunk.
        (None, "model", [["[64]", "[64]"], ["[64]", "[64]", "[64]"], ["[64,32]"]]),
        # dw and the loss, once.
        ("data", None, [["[1024,32]"], ["[]"]]),
        ("data", "model", [["[32]", "[32]"], ["[32]", "[32]", "[32]"], ["[32,32]"], ["[256,32]"], ["[]"]]),
    ],
    ids=["classes divided", "rows divided", "both divided"],
)
def test_on_a_mesh_only_sums_and_gradients_are_communicated(monkeypatch, rows, classes, reduced):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 64 * 4 * 1024)
    jax.clear_caches()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w = normal((256, 32), (1024, 32))
    labels = jax.random.randint(jax.random.key(0), (256,), 0, 1024)
    f = jax.value_and_grad(lambda x, w: linear_softmax_cross_entropy(x, w, labels, implementation="xla"), (0, 1))
    divided = [jax.device_put(a, NamedSharding(mesh, P(axis))) for a, axis in ((x, rows), (w, classes))]
    compiled = jax.jit(f).lower(*divided).compile()
    assert_close(compiled(*divided), f(x, w), "float32")
    collectives = re.findall(
        r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text()
    )
    assert {kind for _, kind in collectives} == {"all-reduce"}
    assert sorted(re.findall(r"\[[\d,]*\]", shapes) for shapes, _ in collectives) == sorted(reduced)
