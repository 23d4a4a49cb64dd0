import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, every_implementation, launching_program, normal
from jax.sharding import PartitionSpec as P

import jaxbp
from jaxbp.ops.dense import mlp_softmax_cross_entropy as mlp
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting

SIZES = (12, 9, 7, 5)


def arguments(sizes=SIZES, batch=(2, 3), dtype="float32"):
    x, *layers = normal((*batch, sizes[0]), *(s for n, m in itertools.pairwise(sizes) for s in ((m, n), (m,))))
    labels = np.random.default_rng(1).integers(0, sizes[-1], batch, np.int32)
    return x.astype(dtype), jnp.asarray(labels), *(a.astype(dtype) for a in layers)


def one_by_one(x, labels, *layers):
    for i in range(0, len(layers), 2):
        x = jaxbp.linear(x, *layers[i : i + 2], implementation="autodiff")
        x = x if i == len(layers) - 2 else jax.nn.relu(x)
    return jaxbp.softmax_cross_entropy(x, labels, implementation="autodiff"), jnp.argmax(x, axis=-1)


@every_implementation
@pytest.mark.parametrize("sizes", [SIZES, (12, 5)], ids=["three layers", "one layer"])
def test_losses_classes_and_gradients_are_those_of_the_ops_one_by_one(implementation, sizes):
    x, labels, *layers = arguments(sizes)
    options = dict(implementation=implementation)
    loss, classes = jaxbp.mlp_softmax_cross_entropy_with_classes(x, labels, *layers, **options)
    expected, expected_classes = one_by_one(x, labels, *layers)
    assert_close(loss, expected, 1e-6)
    np.testing.assert_array_equal(classes, expected_classes)

    (dy,) = normal(labels.shape, seed=2)
    gradients = jaxbp.mlp_softmax_cross_entropy_backward(dy, x, labels, *layers, **options)
    vjp = jax.vjp(lambda x, *layers: one_by_one(x, labels, *layers)[0], x, *layers)[1]
    assert_close(gradients, vjp(dy), 1e-6)


@every_implementation
@pytest.mark.parametrize("sizes", [(0, 5), (12, 0, 5)], ids=str)
def test_layers_without_features_are_those_of_the_ops_one_by_one(implementation, sizes, on_hopper):
    x, labels, *layers = arguments(sizes, batch=(3,))

    def gradients(losses):
        return jax.vjp(lambda x, *layers: losses(x, labels, *layers), x, *layers)[1](jnp.ones(3))

    with jax.default_matmul_precision("default"):
        found = gradients(functools.partial(jaxbp.mlp_softmax_cross_entropy, implementation=implementation))
    assert_close(found, gradients(lambda *arrays: one_by_one(*arrays)[0]), 1e-6)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("implementation", ["autodiff", "xla"])
def test_explicit_axes_may_divide_the_features(implementation):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    arrays = arguments((12, 8, 5), batch=(4,))

    @jax.jit
    def gradients(x, labels, *layers):
        losses = functools.partial(jaxbp.mlp_softmax_cross_entropy, implementation=implementation)
        return jax.grad(lambda x, *layers: losses(x, labels, *layers).sum(), (0, 1, 3))(x, *layers)

    expected = gradients(*arrays)
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P("data"), P(None, "model"), P(), P(), P()
        divided = [jax.device_put(a, spec) for a, spec in zip(arrays, specs, strict=True)]
        assert_close(gradients(*divided), expected, "float32")


@every_implementation
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_is_no_class_makes_its_loss_and_gradients_nan(implementation, label):
    x, labels, *layers = arguments(batch=(3,))
    loss, vjp = jax.vjp(
        lambda x: jaxbp.mlp_softmax_cross_entropy(x, labels.at[1].set(label), *layers, implementation=implementation), x
    )
    (dx,) = vjp(jnp.ones_like(loss))
    assert np.isnan(loss).tolist() == np.isnan(dx).any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("batch", [3, 1025])  # below and above the rows of one launch
@every_implementation
def test_an_example_that_a_mask_leaves_out_has_no_part_in_the_gradients(implementation, batch, on_hopper):
    x, labels, *layers = arguments(batch=(batch,))

    @jax.jit
    def gradients(x, labels, *layers):
        def masked(x, *layers):
            loss = jaxbp.mlp_softmax_cross_entropy(x, labels, *layers, implementation=implementation)
            return jnp.sum(jnp.where(labels >= 0, loss, 0))

        return jax.grad(masked, range(1 + len(layers)))(x, *layers)

    with jax.default_matmul_precision("default"):
        dx, *found = gradients(x, labels.at[1].set(-100), *layers)
    expected = jaxbp.mlp_softmax_cross_entropy_backward(
        jnp.ones(batch).at[1].set(0), x, labels, *layers, implementation="autodiff"
    )
    assert_close((dx, *found), expected, 1e-5)
    np.testing.assert_array_equal(dx[1], 0)


@pytest.mark.parametrize("batch", [3, 1025])  # one kernel for both directions, and one per direction
@pytest.mark.parametrize("infinity", [-np.inf, np.inf])
@every_implementation
def test_an_infinite_weight_of_a_unit_that_is_0_for_all_examples_leaves_the_gradients_finite(
    implementation, infinity, batch, on_hopper
):
    x, labels, w, *layers = arguments(batch=(batch,))
    # In padding examples, x is 0, and the unit is 0 * infinity.
    x, w = x.at[:, 1].set(-np.sign(infinity)), w.at[1, 1].set(infinity)

    def losses(*layers):
        return jaxbp.mlp_softmax_cross_entropy(x, labels, *layers, implementation=implementation)

    dy = jnp.ones(batch)
    with jax.default_matmul_precision("default"):
        found = jax.vjp(losses, w, *layers)[1](dy)
    _, *expected = jaxbp.mlp_softmax_cross_entropy_backward(dy, x, labels, w, *layers, implementation="autodiff")
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("sizes", "dtype", "precision", "kernels"),
    [
        (SIZES, "float32", None, 2),
        (SIZES, "float32", "highest", 3),
        (SIZES, "bfloat16", None, 3),
        ((12, 600, 5), "float32", None, 2),
    ],
)
def test_one_kernel_per_direction_computes_tf32_where_the_layers_fit_and_else_one_per_product(
    sizes, dtype, precision, kernels
):
    x, labels, *layers = arguments(sizes, (64,), dtype)

    def loss(x):
        options = dict(precision=precision, implementation="pallas")
        return jaxbp.mlp_softmax_cross_entropy(x, labels, *layers, **options).sum()

    with jax.default_matmul_precision("default"):
        assert cuda_program(jax.grad(loss), x).count("custom_call @mosaic_gpu") == kernels


@pytest.mark.parametrize(
    ("implementation", "batch", "precision", "saved"),
    [
        ("xla", 64, "default", mlp.Rows),
        ("pallas", 64, "default", mlp.WideRowsAndGradients),
        ("pallas", 2048, "default", mlp.WideRows),
        ("pallas", 64, "highest", mlp.Rows),
    ],
)
def test_what_the_forward_saves_says_which_backward_follows(implementation, batch, precision, saved, on_hopper):
    save = {"xla": mlp._save, "pallas": mlp._save_kernel}[implementation]
    _, (found,) = jax.eval_shape(functools.partial(save, precision=precision), *arguments(batch=(batch,)))
    assert type(found) is saved


@pytest.mark.parametrize("device", [HOPPER, BLACKWELL, BLACKWELL_RTX], ids=lambda device: device.kind)
@pytest.mark.parametrize("implementation", ["pallas", None])
def test_kernels_of_the_tensor_cores_are_hoppers_alone(implementation, device):
    x, labels, *layers = arguments(batch=(64,))

    def loss(x):
        return jaxbp.mlp_softmax_cross_entropy(x, labels, *layers, implementation=implementation).sum()

    with jax.default_matmul_precision("default"), targeting(device):
        count = launching_program(jax.grad(loss), x).count("@kernel.")
    # Elsewhere, "pallas" multiplies on the CUDA cores.
    assert count == (2 if device is HOPPER else 0 if implementation is None else 3)


X, LABELS, *LAYERS = arguments()
REFUSED = {
    "no layer": (
        (X, LABELS),
        ValueError,
        "layers has 0 arrays; wants an even number of arrays, at least 2: w1, b1, w2, b2, ...",
    ),
    "a weight without a bias": (
        (X, LABELS, LAYERS[0]),
        ValueError,
        "layers has 1 arrays; wants an even number of arrays, at least 2: w1",
    ),
    "layers that do not follow": (
        (X, LABELS, *LAYERS[:2], *LAYERS[4:]),
        ValueError,
        "layers[2] has shape (5, 7); wants (classes, 9)",
    ),
    "a bias of another layer": ((X, LABELS, LAYERS[0], LAYERS[3]), ValueError, "layers[1] has shape (7,); wants (9,)"),
    "one label for all": ((X, LABELS[0], *LAYERS), ValueError, "labels has shape (3,); wants (2, 3)"),
    "labels that are weights": (
        (X, LABELS.astype(jnp.float32), *LAYERS),
        TypeError,
        "labels has dtype float32; wants integers, one class per example",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(given, error, message):
    with pytest.raises(error, match=re.escape(f"mlp_softmax_cross_entropy: {message}")):
        jaxbp.mlp_softmax_cross_entropy(*given)
