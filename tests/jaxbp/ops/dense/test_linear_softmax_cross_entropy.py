import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cuda_compiler import missing
from helpers import assert_close, in_float64, normal, relative_error
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from numpy.testing import assert_array_equal

from experiments.ahead_of_time import gpus
from experiments.studies.many_devices import communicated, executed
from jaxbp import linear_softmax_cross_entropy, linear_softmax_cross_entropy_backward
from jaxbp.ops.dense import linear_softmax_cross_entropy as op
from pallas_kernels.core.device import HOPPER

ROWS, FEATURES, CLASSES = 7, 5, 6
LABELS = jnp.array([0, 5, 2, 2, 1, 3, 4])
WHERE = jnp.array([True, False, True, True, False, True, True])
ALL_OPTIONS = {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0}
OPTIONS = {"plain": {}, "all options": ALL_OPTIONS}


@contextlib.contextmanager
def in_chunks(rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "CHUNK_BYTES", 2 * rows * 4 * CLASSES)
        jax.clear_caches()
        yield


@pytest.fixture
def three_chunks():
    with in_chunks(3):
        yield


@pytest.fixture(params=[("xla", 3), ("xla", 8), ("autodiff", 8)], ids=lambda param: "{}-chunks of {}".format(*param))
def implementation(request):
    with in_chunks(request.param[1]):
        yield request.param[0]


def arrays(dtype="float32"):
    x, w, b = normal((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,))
    return tuple(a.astype(dtype) for a in (x, w, b))


def reference(x, w, b, where=None, *, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"):
    z = x @ w.T + b
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    y = optax.smooth_labels(jax.nn.one_hot(LABELS, CLASSES, dtype=z.dtype), label_smoothing)
    loss = optax.softmax_cross_entropy(z, y) + z_loss * jax.nn.logsumexp(z, axis=-1) ** 2
    kept = jnp.ones(ROWS, bool) if where is None else where
    if reduction is None:
        return jnp.where(kept, loss, 0)
    total = jnp.sum(jnp.where(kept, loss, 0))
    return total / kept.sum() if reduction == "mean" else total


def loss_of(x, w, b, implementation=None, where=None, **options):
    return linear_softmax_cross_entropy(x, w, LABELS, b, where=where, implementation=implementation, **options)


def value_and_gradients(f):
    return jax.value_and_grad(f, (0, 1, 2))


def all_losses(f):
    masks = {"all rows": None, "some rows": WHERE}

    def one(arrays, options, where, reduction):
        weights = jnp.arange(1.0, ROWS + 1) if reduction is None else 2.0
        weighed = lambda *arrays: jnp.sum(f(*arrays, where=where, reduction=reduction, **options) * weights)  # noqa: E731
        return value_and_gradients(weighed)(*arrays)

    @jax.jit
    def run(*arrays):
        cases = itertools.product(OPTIONS, masks, ["mean", "sum", None])
        return {f"{o}, {m}, {r}": one(arrays, OPTIONS[o], masks[m], r) for o, m, r in cases}

    return run


@functools.cache
def expected_losses():
    return in_float64(all_losses(reference), *arrays())


def test_losses_and_gradients_are_those_of_float64(implementation):
    found = all_losses(functools.partial(loss_of, implementation=implementation))(*arrays())
    for name, expected in expected_losses().items():
        assert_close(found[name], expected, "float32", name)


def test_each_option_is_that_of_optax_and_numpy():
    def run(f):
        one = lambda option: value_and_gradients(functools.partial(f, **{option: ALL_OPTIONS[option]}))  # noqa: E731
        return jax.jit(lambda *arrays: {option: one(option)(*arrays) for option in ALL_OPTIONS})

    found = run(functools.partial(loss_of, implementation="xla"))(*arrays())
    for option, expected in in_float64(run(reference), *arrays()).items():
        assert_close(found[option], expected, "float32", option)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [3, 8])
def test_pallas_pads_the_classes_for_the_kernel_and_nothing_else_changes(rows, options):
    with in_chunks(rows):
        pallas, xla = (
            jax.jit(value_and_gradients(functools.partial(loss_of, implementation=name, where=WHERE, **options)))
            for name in ("pallas", "xla")
        )
        assert "launch" in str(jax.make_jaxpr(pallas)(*arrays()))
        assert "launch" not in str(jax.make_jaxpr(xla)(*arrays()))
        assert_close(pallas(*arrays()), xla(*arrays()), "float32")


@functools.cache
def gradients_of_plain_jax(dtype, offset):
    x, w, b = arrays(dtype)
    b = (np.asarray(b) + offset).astype(dtype)
    run = jax.jit(value_and_gradients(reference))
    return (x, w, b), run(x, w, b), in_float64(run, x, w, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [3, 8])
def test_half_precision_is_no_farther_from_float64_than_plain_jax(rows, dtype):
    with in_chunks(rows):
        run = jax.jit(value_and_gradients(functools.partial(loss_of, implementation="xla")))
        for offset in (0.0, 100.0):
            inputs, plain, exact = gradients_of_plain_jax(dtype, offset)
            ours = run(*inputs)
            error, allowed = (max(jax.tree.leaves(jax.tree.map(relative_error, a, exact))) for a in (ours, plain))
            assert error <= 1.5 * allowed + 1e-3
            loss, *gradients = jax.tree.leaves(ours)
            assert loss.dtype == "float32" and all(a.dtype == dtype for a in gradients)


@pytest.mark.parametrize(("implementation", "chunk_bytes"), [("pallas", 2**30), ("xla", 2**30), ("xla", 2**10)])
def test_sums_that_overflow_in_float16_are_divided_before_they_are_rounded(monkeypatch, implementation, chunk_bytes):
    monkeypatch.setattr(op, "CHUNK_BYTES", chunk_bytes)
    jax.clear_caches()
    x, w, b = jnp.full((200, 1), 512, jnp.float16), jnp.zeros((4, 1), jnp.float16), jnp.zeros(4, jnp.float16)

    def gradients(reduction, divisor):
        def loss(w, b):
            options = dict(reduction=reduction, implementation=implementation)
            return linear_softmax_cross_entropy(x, w, jnp.zeros(len(x), int), b, **options).astype("float32") / divisor

        return jax.grad(loss, (0, 1))(w, b)

    for dw, db in jax.jit(lambda: (gradients("mean", 1), gradients("sum", len(x))))():
        np.testing.assert_allclose(dw[:, 0], [-384, 128, 128, 128], rtol=1e-3)
        np.testing.assert_allclose(db, [-0.75, 0.25, 0.25, 0.25], rtol=1e-3)
        assert dw.dtype == db.dtype == "float16"


@pytest.mark.parametrize(("implementation", "reduction"), [("xla", "mean"), (None, None)])
def test_a_program_for_any_number_of_rows_pads_less_than_one_row_per_chunk(implementation, reduction):
    (rows,) = jax.export.symbolic_shape("rows")
    w = jnp.zeros((CLASSES, FEATURES))
    assert {(1 + op._chunk_rows(rows, w))._evaluate({"rows": n}) for n in (1, 2, 7)} == {3, 4, 9}
    with in_chunks(3):
        assert op._chunk_rows(rows, w)._evaluate({"rows": 1000}) == 3
        f = functools.partial(linear_softmax_cross_entropy, reduction=reduction, implementation=implementation)
        gradients = jax.jit(jax.value_and_grad(lambda x, labels: jnp.sum(jnp.sin(f(x, w + 1, labels)))))
        structs = (jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in [((rows, FEATURES), w), ((rows,), LABELS)])
        exported = jax.export.export(gradients, platforms=["cpu"])(*structs)
        (x, *_) = arrays()
        assert_close(exported.call(x, LABELS), gradients(x, LABELS), "float32")


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
def test_dropped_rows_are_not_read_and_have_no_gradient(reduction, implementation):
    x, w, b = arrays()
    spoiled, labels = np.where(WHERE[:, None], x, np.float32(np.nan)), np.where(WHERE, LABELS, -100)

    def loss(x, w, b, labels):
        options = dict(where=WHERE, reduction=reduction, implementation=implementation)
        return linear_softmax_cross_entropy(x, w, labels, b, **options).sum()

    run = jax.jit(value_and_gradients(loss))
    value, (dx, dw, db) = run(spoiled, w, b, labels)
    assert_close((value, (dx, dw, db)), run(x, w, b, LABELS), "float32")
    np.testing.assert_array_equal(dx[~WHERE], 0)


def test_if_every_row_is_dropped_loss_and_gradients_are_zero(implementation):
    nothing = jnp.zeros(ROWS, bool)
    f = functools.partial(loss_of, where=nothing, implementation=implementation)
    value, gradients = jax.jit(value_and_gradients(f))(*arrays())
    assert value == 0 and all((g == 0).all() for g in gradients)


@functools.cache
def program_of_labels(reduction, implementation, dtype):
    x, w, b = (np.asarray(a, dtype) for a in arrays())
    loss_of = functools.partial(linear_softmax_cross_entropy, reduction=reduction, implementation=implementation)

    def run(labels, dy):
        loss, vjp = jax.vjp(lambda x, w, b: loss_of(x, w, labels, b), x, w, b)
        return loss, *vjp(jnp.full_like(loss, dy))

    @jax.jit
    def with_dy_gradient(labels, dy):
        total = lambda dy: sum(jnp.sum(a, dtype="float32") for a in run(labels, dy)[1:])  # noqa: E731
        return run(labels, dy), jax.grad(total)(dy)

    return with_dy_gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
@pytest.mark.parametrize("implementation", ["xla", "pallas", "autodiff"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_invalid_label_gives_a_nan_loss_and_gradients_that_are_nan_or_0_if_dy_is_0(reduction, implementation, dtype):
    run, autodiff = (program_of_labels(reduction, name, dtype) for name in (implementation, "autodiff"))
    for label in (-1, CLASSES):
        labels = np.where(np.arange(ROWS) == 2, label, LABELS)
        (loss, dx, dw, db), dy_gradient = run(labels, 1.0)
        assert np.isnan(loss).all() if reduction else np.isnan(loss).nonzero()[0].tolist() == [2]
        assert_array_equal(np.isnan(dx), np.arange(ROWS)[:, None] == np.full(FEATURES, 2))
        assert np.isnan(dw).all() and np.isnan(db).all()
        assert not any(np.any(a) for a in run(labels, 0.0)[0][1:])
        assert_close(dy_gradient, autodiff(labels, 1.0)[1], dtype)


@pytest.mark.parametrize(
    ("implementation", "reduction", "options"),
    [*itertools.product(["xla"], ["mean", None], OPTIONS), ("autodiff", "mean", "all options")],
)
def test_derivatives_of_order_two(three_chunks, options, reduction, implementation):
    options = OPTIONS[options] | dict(reduction=reduction, where=WHERE)
    f = functools.partial(loss_of, implementation=implementation, **options)
    check_grads(jax.jit(f), arrays(), order=2, modes=("rev",), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("reduction", ["mean", "sum", None])
def test_the_public_backward_has_the_gradients(reduction, implementation):
    options = dict(where=WHERE, reduction=reduction, implementation=implementation, z_loss=0.1)
    backward = functools.partial(linear_softmax_cross_entropy_backward, **options)

    @jax.jit
    def run(dy, x, w, b):
        _, vjp = jax.vjp(lambda x, w, b: linear_softmax_cross_entropy(x, w, LABELS, b, **options), x, w, b)
        without, expected = backward(dy, x, w, LABELS), backward(dy, x, w, LABELS, 0 * b)
        return (backward(dy, x, w, LABELS, b), without), (vjp(dy), expected)

    (dy,) = normal(() if reduction else (ROWS,), seed=3)
    assert_close(*run(dy, *arrays()), "float32")


def products(jaxpr):
    """Count products. The body of a scan counts once."""
    own = sum(equation.primitive.name == "dot_general" for equation in jaxpr.eqns)
    inner = [j for equation in jaxpr.eqns for j in jaxprs_in_params(equation.params)]
    return own + sum(map(products, inner))


@pytest.mark.parametrize(("reduction", "count"), [("mean", 3), ("sum", 3), (None, 4)])
def test_both_directions_compute_three_products_or_four_without_a_reduction(three_chunks, reduction, count):
    f = functools.partial(loss_of, implementation="xla", reduction=reduction)
    gradient = jax.make_jaxpr(value_and_gradients(lambda *a: f(*a).sum()))(*arrays())
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

        compiled = jax.jit(value_and_gradients(loss)).lower(*structs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * 512 * 4096
    assert temporaries("xla") < logits / 4 and temporaries("autodiff") > logits


def test_vmap_checkpoint_and_jit_agree_with_a_loop(three_chunks):
    x, w, b = arrays()
    ws = jnp.stack([w, 2 * w])
    gradient = value_and_gradients(functools.partial(loss_of, implementation="xla", where=WHERE))
    gradient = jax.jit(gradient)
    expected = [gradient(x, each, b) for each in ws]
    expected = jax.tree.map(lambda *a: jnp.stack(a), *expected)
    assert_close(jax.jit(jax.vmap(gradient, (None, 0, None)))(x, ws, b), expected, "float32")
    remade = jax.checkpoint(functools.partial(loss_of, implementation="xla", where=WHERE))
    assert_close(jax.jit(value_and_gradients(remade))(x, w, b), gradient(x, w, b), "float32")


@pytest.mark.parametrize("rows", [4187, 6200, 32768])
def test_chunks_are_whole_tiles_of_the_tensor_cores(rows):
    w = jnp.zeros((128256, 1), jnp.bfloat16)
    size = op._chunk_rows(rows, w)
    assert size % 128 == 0 and size * w.size * 2 <= op.CHUNK_BYTES / 2
    assert op._chunk_rows(4096, w) is None


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
        (dict(softcap=0.0), "softcap is 0.0; wants a finite number above 0, or None"),
        (dict(softcap=np.inf), "softcap is inf; wants a finite number above 0, or None"),
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
@pytest.mark.parametrize("implementation", ["autodiff", "xla"])
def test_explicit_axes_may_divide_the_features(implementation):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x, w, b = normal((4, 8), (CLASSES, 8), (CLASSES,))
    gradients = jax.value_and_grad(
        lambda x, w, b, labels: linear_softmax_cross_entropy(x, w, labels, b, implementation=implementation), (0, 1, 2)
    )
    expected = jax.jit(gradients)(x, w, b, LABELS[:4])
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P(None, "model"), P(), P("data")
        divided = [jax.device_put(a, spec) for a, spec in zip((x, w, b, LABELS[:4]), specs, strict=True)]
        found = jax.jit(gradients)(*divided)
    assert_close(found, expected, "float32")
    assert [a.sharding.spec for a in found[1][:2]] == list(specs[:2])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize(
    ("rows", "classes", "reduced"),
    [
        # Maxima, sums, dx, and dw are reduced once per chunk, and the loss once in all.
        (None, "model", [["[64]", "[64]"], ["[64]", "[64]", "[64]"], ["[64,32]"]]),
        ("data", None, [["[1024,32]"], ["[]"]]),
        ("data", "model", [["[32]", "[32]"], ["[32]", "[32]", "[32]"], ["[32,32]"], ["[256,32]"], ["[]"]]),
    ],
    ids=["classes divided", "rows divided", "both divided"],
)
def test_on_a_mesh_only_sums_and_gradients_are_communicated(monkeypatch, rows, classes, reduced):
    monkeypatch.setattr(op, "CHUNK_BYTES", 2 * 8 * 4 * 1024)
    jax.clear_caches()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w = normal((240, 32), (1024, 32))  # each device has 30 rows, in chunks of 8
    labels = jax.random.randint(jax.random.key(0), (240,), 0, 1024)
    f = jax.value_and_grad(lambda x, w: linear_softmax_cross_entropy(x, w, labels, implementation="xla"), (0, 1))
    divided = [jax.device_put(a, NamedSharding(mesh, P(axis))) for a, axis in ((x, rows), (w, classes))]
    compiled = jax.jit(f).lower(*divided).compile()
    assert_close(compiled(*divided), f(x, w), "float32")
    collectives = re.findall(
        r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", compiled.as_text()
    )
    assert {kind for _, kind in collectives} == {"all-reduce"}
    assert sorted(re.findall(r"\[[\d,]*\]", shapes) for shapes, _ in collectives) == sorted(reduced)


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_gpus_that_divide_the_rows_add_dw_once_and_have_the_chunks_of_one_gpu():
    # On a CPU, XLA adds dw over the devices in each chunk. On GPUs, it moves this sum out of the loop.
    def chunks_and_collectives(devices, rows_per_device):
        mesh = Mesh(devices, ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        of_rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        rows = rows_per_device * len(devices)
        x = jax.ShapeDtypeStruct((rows, 64), "bfloat16", sharding=of_rows)
        labels = jax.ShapeDtypeStruct((rows,), "int32", sharding=of_rows)
        w = jax.ShapeDtypeStruct((50304, 64), "bfloat16", sharding=whole)
        loss = lambda x, w, labels: linear_softmax_cross_entropy(x, w, labels, implementation="xla")  # noqa: E731
        traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, w, labels)
        options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
        program = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options).as_text()
        chunks = max((times for _, depth, times in executed(program) if depth), default=1)
        return chunks, communicated(program)["collectives"], communicated(program)["bytes"]

    with gpus(HOPPER, 8) as devices:
        one = chunks_and_collectives(devices[:1], 32 * 1024)
        eight, without_chunks = (chunks_and_collectives(devices, rows) for rows in (32 * 1024, 1024))
    assert one == (7, {}, 0)
    # Sums of bfloat16 over devices are in float32, also without chunks.
    once = {"all-reduce": 1}, 50304 * 64 * 4
    assert (eight, without_chunks) == ((7, *once), (1, *once))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices to shard over")
def test_no_kernel_runs_if_only_the_mask_lies_on_a_mesh():
    x, w = normal((128, 32), (1024, 32))
    labels, mask = jnp.zeros(128, jnp.int32), jnp.ones(128, bool)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.device_put(mask, NamedSharding(mesh, P("data")))
    loss = lambda x, where: linear_softmax_cross_entropy(x, w, labels, where=where, implementation="pallas")  # noqa: E731
    launches = [str(jax.jit(jax.grad(loss)).trace(x, where).jaxpr).count("launch[") for where in (mask, divided)]
    assert launches[0] > 0 and launches[1] == 0


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices to shard over")
def test_chunks_on_each_device_of_shard_map_give_the_gradients_of_the_whole(three_chunks):
    x, w, b = arrays()
    x, labels = jnp.concatenate([x, 2 * x]), jnp.tile(LABELS, 2)

    def loss(x, w, b, labels, implementation="xla"):
        return linear_softmax_cross_entropy(x, w, labels, b, reduction="sum", implementation=implementation)

    sharded = jax.shard_map(
        lambda *arrays: jax.lax.psum(loss(*arrays), "shard"),
        mesh=Mesh(jax.devices()[:2], ("shard",)),
        in_specs=(P("shard"), P(), P(), P("shard")),
        out_specs=P(),
    )
    of_all = functools.partial(loss, implementation="autodiff")
    expected = jax.grad(of_all, (0, 1, 2))(x, w, b, labels)
    assert_close(jax.jit(jax.grad(sharded, (0, 1, 2)))(x, w, b, labels), expected, "float32")
