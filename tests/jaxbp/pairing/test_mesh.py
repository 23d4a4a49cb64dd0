import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp
from jaxbp.pairing import differentiable
from jaxbp.pairing.mesh import Axes, _sum, batched, mesh_of, over_devices
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over"),
]


def on_mesh(array, *spec, axes=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(axes,))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


@pytest.fixture
def product():
    """Return a kernel, its formula `(x, w) -> (x * w, sum of x)`, and the shapes of x that the kernel got."""
    seen = []

    def formula(x, w):
        return x @ w, jnp.sum(x, axis=0)

    def kernel(x, w):
        seen.append(x.shape)
        return formula(x, w)

    return kernel, formula, seen


def test_each_device_has_its_own_examples_and_sums_are_over_all(product):
    kernel, formula, seen = product
    x, w = normal((16, 4), (4, 3))
    run = jax.jit(differentiable(kernel, formula, batched("x")))
    y, total = run(on_mesh(x, "examples"), on_mesh(w))
    assert seen[-1] == (2, 4)
    assert y.sharding.spec == P("examples") and total.sharding.spec == P()
    assert_close((y, total), formula(x, w), "float32")


def test_what_a_kernel_made_is_shared_as_well():
    def kernel(x):
        row_of = lambda i: (i, pl.ds(0, LANES))  # noqa: E731

        def body(x_ref, y_ref, *, i):
            y_ref[row_of(i)] = 2 * x_ref[row_of(i)]

        return launch(body, x, out=x, grid={"i": len(x)}, name="double")

    double = lambda x: over_devices(kernel, lambda x: 2 * x, batched("x"), (x,))  # noqa: E731
    traced = jax.jit(lambda x: double(double(x))).trace(on_mesh(normal((16, LANES))[0], "examples"))
    assert str(traced.jaxpr).count("custom_partitioning[") == 2
    assert "all-gather" not in traced.lower().compile().as_text()


@pytest.mark.parametrize(("examples", "axes"), [(12, {"x": 0}), (16, {})])
def test_what_cannot_be_divided_evenly_or_has_no_examples_is_whole(product, examples, axes):
    kernel, formula, seen = product
    x, w = normal((examples, 4), (4, 3))
    run = jax.jit(differentiable(kernel, formula, Axes(axes)))
    divided = on_mesh(np.zeros(8), "examples").sharding  # XLA gives two of 12 examples to six devices
    constrained = jax.jit(lambda x, w: run(jax.lax.with_sharding_constraint(x, divided), w))
    assert_close(constrained(on_mesh(x), on_mesh(w)), formula(x, w), "float32")
    assert {shape[0] for shape in seen} <= {examples, 2 * examples}


def test_a_device_may_need_a_multiple_of_examples(product):
    kernel, formula, seen = product
    x, w = normal((32, 4), (4, 3))
    for multiple_of, rows in ((4, 4), (8, 32)):
        run = jax.jit(differentiable(kernel, formula, Axes({"x": 0}, multiple_of)))
        assert_close(run(on_mesh(x, "examples"), on_mesh(w)), formula(x, w), "float32")
        assert seen[-1] == (rows, 4)


def test_further_axes_are_divided_by_other_axes_of_the_mesh_and_may_be_grouped():
    seen = []

    def formula(queries, keys, scale):
        y = queries.reshape(*keys.shape, -1) * keys[..., None] * scale
        return y.reshape(queries.shape), jnp.sum(keys, axis=1), scale * jnp.sum(keys, axis=0)

    def kernel(*arrays):
        seen.append([a.shape for a in arrays])
        return formula(*arrays)

    mesh = jax.make_mesh((2, 4), ("examples", "heads"), axis_types=(AxisType.Auto,) * 2)
    arrays, specs = normal((4, 8), (4, 4), ()), (P("examples", "heads"), P("examples", "heads"), P())
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    heads = Axes({"queries": 1, "keys": 1})
    run = jax.jit(differentiable(kernel, formula, Axes({"queries": 0, "keys": 0}, others=[heads])))
    found = run(*placed)
    assert seen[-1] == [(2, 2), (2, 1), ()]
    assert [a.sharding.spec for a in found] == [P("examples", "heads"), P("examples"), P("heads")]
    assert_close(found, formula(*arrays), "float32")
    # One mesh axis divides only one set of axes.
    diagonal = jax.device_put(arrays[0], NamedSharding(mesh, P("heads"))), placed[1], placed[2]
    assert_close(run(*diagonal), formula(*arrays), "float32")


def test_results_that_do_not_depend_on_the_divided_axis_are_not_summed():
    def formula(x, w):
        return x @ w, jnp.sum(x, axis=1)

    axes = Axes({"x": 0}, others=[Axes({"w": 1}, sums=False)])
    x, w = normal((4, 5), (5, 16))
    found = jax.jit(differentiable(formula, formula, axes))(on_mesh(x), on_mesh(w, None, "examples"))
    assert found[0].sharding.spec == P(None, "examples")
    assert_close(found, formula(x, w), "float32")


def test_an_unknown_argument_is_refused(product):
    kernel, formula, _ = product
    x, w = normal((16, 4), (4, 3))
    with pytest.raises(ValueError, match=r"^batch_axes: names \['y'\]; wants names among \['x', 'w'\]$"):
        differentiable(kernel, formula, batched("x", "y"))(on_mesh(x, "examples"), on_mesh(w))


def test_sums_of_half_precisions_over_devices_are_made_in_float32():
    total = lambda x: jnp.sum(x, axis=0)  # noqa: E731
    run = jax.jit(differentiable(total, total, batched("x")))
    # In bfloat16, 256 + 1 is 256.
    x = jnp.ones((8, 2), jnp.bfloat16).at[0].set(256)
    assert (run(on_mesh(x, "examples")) == 264).all()
    # On a CPU, XLA itself adds bfloat16 in float32, so the program's values do not show the dtype.
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(AxisType.Auto,))
    over_all = jax.shard_map(
        lambda x: _sum(x, ("examples",)), mesh=mesh, in_specs=P("examples"), out_specs=P(), check_vma=False
    )
    assert re.search(r":f32\[1,2\] = psum", str(jax.make_jaxpr(over_all)(x)))


def test_a_row_that_is_broadcast_to_all_examples_is_whole_on_each_device():
    gradients = jax.jit(
        jax.grad(lambda x, row: jnp.sum(jnp.sin(jaxbp.multiply(x, row, implementation="pallas"))), (0, 1))
    )
    x, row = normal((16, 4), (1, 4))
    expected = jnp.cos(x * row) * row, jnp.sum(jnp.cos(x * row) * x, axis=0, keepdims=True)
    assert_close(gradients(on_mesh(x, "examples"), on_mesh(row)), expected, "float32")


def test_under_vmap_it_is_the_same(product):
    kernel, formula, _ = product
    x, w = normal((3, 16, 4), (4, 3))
    run = jax.jit(jax.vmap(differentiable(kernel, formula, batched("x")), (0, None)))
    assert_close(run(on_mesh(x, None, "examples"), on_mesh(w)), jax.vmap(formula, (0, None))(x, w), "float32")


def test_on_one_device_and_within_shard_map_there_is_no_mesh():
    x = on_mesh(np.ones(8, np.float32), "examples")
    assert mesh_of((x,)) is not None and mesh_of((jnp.ones(8),)) is None
    inside = []
    jax.jit(
        jax.shard_map(
            lambda x: (inside.append(mesh_of((x,))), x)[1],
            in_specs=P("examples"),
            out_specs=P("examples"),
            mesh=jax.make_mesh((8,), ("examples",), axis_types=(AxisType.Auto,)),
        )
    )(x)
    assert inside == [None]


@functools.cache
def _scaled(shared):
    def gradients(dy, x, scale):
        return dy * scale, jnp.sum(dy * x, axis=0)

    kernel = lambda dy, x, scale: gradients(dy, x, scale)  # noqa: E731
    options = dict(batch_axes=batched("dy", "x")) if shared else {}
    return jaxbp.Pair(lambda x, scale: x * scale, {"xla": gradients, "pallas": kernel}, name="scaled", **options)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shared", [False, True])
def test_a_pair_of_a_users_own_works_on_a_mesh(shared, axes):
    pair = _scaled(shared)
    x, scale = normal((16, 4), (4,))
    x_, scale_ = on_mesh(x, "examples", axes=axes), on_mesh(scale, axes=axes)
    for implementation in ("pallas", "xla", None):
        loss = lambda x, scale, of=implementation: jnp.sum(jnp.sin(pair(x, scale, implementation=of)))  # noqa: E731
        with jax.set_mesh(x_.sharding.mesh):
            traced = jax.jit(jax.grad(loss, (0, 1))).trace(x_, scale_)
            found = traced.lower().compile()(x_, scale_)
        assert ("custom_partitioning[" in str(traced.jaxpr)) == (shared and implementation == "pallas")
        assert_close(found, jax.grad(loss, (0, 1))(x, scale), "float32")
    with jax.set_mesh(x_.sharding.mesh):
        found = jax.jit(jax.hessian(lambda s: jnp.sum(jnp.sin(pair(x_, s, implementation="pallas")))))(scale_)
    assert_close(found, jax.hessian(lambda s: jnp.sum(jnp.sin(x * s)))(scale), 1e-4)


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff", None])
def test_pools_on_explicit_axes_are_sharded_as_the_images(implementation):
    of_convolution = "xla" if implementation == "pallas" else implementation
    (images,), (w,) = normal((8, 2, 5, 5)), normal((3, 2, 2, 2), seed=1)

    @jax.jit
    def values_and_gradients(images):
        def loss(images):
            y, indices = jaxbp.max_pool2d_with_indices(images, 3, stride=2, implementation=implementation)
            z = jaxbp.conv2d_relu_max_pool2d(images, w, window=2, implementation=of_convolution)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(z)), (y, indices, z)

        return jax.value_and_grad(loss, has_aux=True)(images)

    placed = on_mesh(images, "examples", axes=AxisType.Explicit)
    with jax.set_mesh(placed.sharding.mesh):
        found = values_and_gradients(placed)
    assert_close(found, values_and_gradients(images), "float32")
    assert {a.sharding.spec for a in jax.tree.leaves(found) if a.ndim} == {P("examples", None, None, None)}


@pytest.mark.parametrize("options", [{}, dict(key=jax.random.key(1), fire_rate=0.6, rounding_rate=0.5)])
def test_an_automaton_on_explicit_axes_has_the_gradients_of_one_device(options):
    automaton = jaxbp.Automaton.create(2, 1, [8, 4, 2], [4, 2], periodic=True, seed=0)
    layers = [normal((automaton.kernels, w.gates, 16))[0] for w in automaton.perception]
    logits = layers, [normal((w.gates, 16))[0] for w in automaton.update]
    state = jax.random.uniform(jax.random.key(0), (8, 2, 2, 2))
    rollout = functools.partial(jaxbp.automaton_rollout, **options)
    gradient = jax.jit(jax.grad(lambda logits, s: jnp.sum(jnp.sin(rollout(logits, automaton, s, 2))), (0, 1)))
    placed = jax.tree.map(lambda a: on_mesh(a, axes=AxisType.Explicit), logits)
    placed_state = on_mesh(state, "examples", axes=AxisType.Explicit)
    with jax.set_mesh(placed_state.sharding.mesh):
        found = gradient(placed, placed_state)
    assert_close(found, gradient(logits, state), "float32")
    assert found[1].sharding.spec == P("examples", None, None, None)


LABELS = np.arange(24).reshape(4, 6) % 8
DIVIDED = {
    "layer_norm": (jaxbp.layer_norm, [(4, 6, 8), (8,), (8,)], "pallas"),
    "layer_norm by autodiff": (jaxbp.layer_norm, [(4, 6, 8), (8,), (8,)], "autodiff"),
    "rms_norm": (jaxbp.rms_norm, [(4, 6, 8), (8,)], None),
    "rotary_embedding": (lambda x, **of: jaxbp.rotary_embedding(x, jnp.arange(6)[None], **of), [(4, 6, 8)], None),
    "softmax_cross_entropy": (lambda x, **of: jaxbp.softmax_cross_entropy(x, LABELS, **of), [(4, 6, 8)], None),
}


@pytest.mark.parametrize("case", DIVIDED)
def test_features_may_be_divided_over_explicit_axes(case):
    op, shapes, implementation = DIVIDED[case]
    mesh = jax.make_mesh((4, 2), ("examples", "model"), axis_types=(AxisType.Explicit,) * 2)
    arrays = normal(*shapes)
    specs = [P("examples", None, "model"), P("model"), P("model")]
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=False)]

    @jax.jit
    def values_and_gradients(*arrays):
        y, vjp = jax.vjp(functools.partial(op, implementation=implementation), *arrays)
        return y, *vjp(jnp.sin(y))

    with jax.set_mesh(mesh):
        y, *gradients = found = values_and_gradients(*placed)
    assert_close(found, values_and_gradients(*arrays), "float32")
    assert y.sharding.spec == P(*specs[0][: y.ndim])
    assert [g.sharding.spec for g in gradients] == specs[: len(gradients)]


POSITIONS = jnp.arange(6)[None, :, None]
X, ROW, OUTPUTS = P("examples", None, "model"), P("model"), P("model", None)
DIVIDED_IN_KERNELS = {
    "gelu": (jaxbp.gelu, [(4, 6, 8)], [X]),
    "an array that is broadcast": (jaxbp.divide, [(4, 6, 8), (6, 1)], [X, P()]),
    "gated_linear_unit": (jaxbp.gated_linear_unit, [(4, 6, 8)] * 2, [X, X]),
    "rotary_embedding": (lambda x, **of: jaxbp.rotary_embedding(x, POSITIONS, **of), [(4, 6, 2, 8)], [X]),
    "outputs of linear": (jaxbp.linear, [(4, 6, 8), (10, 8), (10,)], [P("examples"), OUTPUTS, ROW]),
    "inputs of linear": (jaxbp.linear, [(4, 6, 8), (10, 8), (10,)], [X, P(None, "model"), P()]),
    "outputs of layer_norm_linear": (
        jaxbp.layer_norm_linear,
        [(4, 6, 8), (8,), (8,), (10, 8), (10,)],
        [P("examples"), P(), P(), OUTPUTS, ROW],
    ),
}


@pytest.mark.parametrize("case", DIVIDED_IN_KERNELS)
def test_kernels_do_not_gather_features_and_heads(case):
    op, shapes, specs = DIVIDED_IN_KERNELS[case]
    mesh = jax.make_mesh((4, 2), ("examples", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays = normal(*shapes)
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]

    @jax.jit
    def values_and_gradients(*arrays):
        y, vjp = jax.vjp(functools.partial(op, implementation="pallas"), *arrays)
        return y, *vjp(jnp.sin(y))

    program = values_and_gradients.lower(*placed).compile()
    assert "all-gather" not in program.as_text()
    assert_close(program(*placed), values_and_gradients(*arrays), "float32")


def test_gradients_of_overlapping_windows_work_if_a_mesh_divides_the_image():
    # XLA's partitioner aborts at negative paddings of a spaced-out dy.
    (images,) = normal((4, 2, 8, 8))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jaxbp.max_pool2d(x, 3, stride=2, padding=1)))))
    assert_close(gradient(on_mesh(images, None, None, "examples")), gradient(images), "float32")
