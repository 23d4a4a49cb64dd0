"""Differences from JAX and Flax:

- `jax.lax.conv_general_dilated` also takes negative paddings, lhs_dilation, and batch_group_count.
- The default stride of jaxbp's pools is the window, in Flax 1.
- jaxbp's pools have two axes, and less padding than a window.
- JAX has no gradient of a dilated maximum.
"""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    compare_with_twin,
    every_implementation,
    formulas,
    normal,
    value_and_gradients,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbp
from jaxbp.pairing import IMPLEMENTATIONS

NHWC, NWC = ("NHWC", "HWIO", "NHWC"), ("NWC", "WIO", "NWC")
FORMULAS = ("xla", "autodiff", None)
PADDINGS = ["SAME", "SAME_LOWER", "VALID", ((1, 0), (0, 2))]


def distinct(*shape):
    """Return distinct numbers, so that each window has one maximum."""
    random = np.random.default_rng(0)
    return jnp.asarray(random.permutation(np.linspace(-2, 2, np.prod(shape))).reshape(shape), jnp.float32)


@pytest.mark.parametrize(
    ("layout", "padding"),
    [*((NHWC, padding) for padding in PADDINGS), (None, PADDINGS[-1]), (("HWNC", "OHWI", "NCHW"), "SAME")],
    ids=str,
)
def test_conv2d_is_conv_general_dilated(layout, padding):
    arrays = _in_layout(layout or ("NCHW", "OIHW"), *normal((2, 2, 6, 7), (3, 2, 3, 2)))
    common = dict(padding=padding, dimension_numbers=layout)
    ours = functools.partial(jaxbp.conv2d, stride=(1, 2), **common)
    twin = lambda x, w: lax.conv_general_dilated(x, w, (1, 2), **common)  # noqa: E731
    compare_with_twin(ours, twin, arrays, IMPLEMENTATIONS)


def _in_layout(layout, x, w):
    return x.transpose(*map("NCHW".index, layout[0])), w.transpose(*map("OIHW".index, layout[1]))


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", ((3, 1), (0, 2))], ids=str)
def test_dilated_conv2d_in_groups_is_conv_general_dilated(padding):
    x, w = normal((2, 6, 7, 4), (3, 2, 2, 6))
    common = dict(padding=padding, dimension_numbers=NHWC)
    ours = functools.partial(jaxbp.conv2d, dilation=(2, 1), groups=2, **common)
    twin = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), rhs_dilation=(2, 1), feature_group_count=2, **common)  # noqa: E731
    compare_with_twin(ours, twin, (x, w), FORMULAS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_public_backwards_of_conv2d_take_the_layout(implementation):
    x, w = normal((2, 5, 6, 2), (3, 2, 2, 4))
    y, vjp = jax.vjp(lambda x, w: lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=NHWC), x, w)
    (dy,) = normal(y.shape, seed=1)
    options = dict(stride=(2, 1), padding="SAME", dimension_numbers=NHWC, implementation=implementation)
    found = (
        jaxbp.conv2d_backward_input(dy, w, (5, 6), **options),
        jaxbp.conv2d_backward_weights(dy, x, (3, 2), **options),
    )
    assert_close(found, vjp(dy), "float32")
    db = jaxbp.conv2d_backward_bias(dy, dimension_numbers=NHWC, implementation=implementation)
    assert_close(db, dy.sum((0, 1, 2)), "float32")


@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_max_pool2d_is_flax_max_pool(padding):
    ours = functools.partial(jaxbp.max_pool2d, window=(3, 3), stride=(2, 1), padding=padding, channel_axis=-1)
    twin = lambda x: flax.linen.max_pool(x, (3, 3), (2, 1), padding)  # noqa: E731
    compare_with_twin(ours, twin, (distinct(2, 6, 7, 2),), IMPLEMENTATIONS)


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_avg_pool2d_is_flax_avg_pool(padding, count_include_pad):
    options = dict(count_include_pad=count_include_pad, padding=padding)
    ours = functools.partial(jaxbp.avg_pool2d, window=(3, 3), stride=(2, 1), channel_axis=-1, **options)
    twin = lambda x: flax.linen.avg_pool(x, (3, 3), (2, 1), **options)  # noqa: E731
    compare_with_twin(ours, twin, normal((2, 6, 7, 2)), IMPLEMENTATIONS)


@formulas
@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", ((2, 1), (0, 1))], ids=str)
def test_dilated_pools_are_reduce_window(padding, implementation):
    pads = padding if isinstance(padding, str) else ((0, 0), (0, 0), *padding)
    geometry = (1, 1, 2, 3), (1, 1, 1, 2), pads, None, (1, 1, 3, 2)
    options = dict(window=(2, 3), stride=(1, 2), padding=padding, dilation=(3, 2), implementation=implementation)
    mean = lambda x: lax.reduce_window(x, 0.0, lax.add, *geometry) / 6  # noqa: E731
    compare_with_twin(functools.partial(jaxbp.avg_pool2d, **options), mean, normal((2, 2, 7, 8)))
    x = distinct(2, 2, 7, 8)
    y, vjp = jax.vjp(functools.partial(jaxbp.max_pool2d, **options), x)
    np.testing.assert_array_equal(y, lax.reduce_window(x, -jnp.inf, lax.max, *geometry))
    dx = np.zeros(x.shape, np.float32)
    (dy,) = normal(y.shape, seed=1)
    for at in np.ndindex(*x.shape[:2]):
        for value, gradient in zip(y[at].ravel(), dy[at].ravel(), strict=True):
            dx[at] += np.where(x[at] == value, gradient, 0)
    assert_close(vjp(dy)[0], dx, "float32")


@every_implementation
def test_ceil_mode_pools_the_rest_of_the_input(implementation):
    x, options = jnp.arange(1.0, 16).reshape(1, 1, 3, 5), dict(window=2, ceil_mode=True, implementation=implementation)
    y, vjp = jax.vjp(functools.partial(jaxbp.max_pool2d, **options), x)
    np.testing.assert_array_equal(y[0, 0], [[7, 9, 10], [12, 14, 15]])
    expected = jnp.zeros((3, 5)).at[1, 1].set(1).at[1, 3].set(2).at[1, 4].set(3)
    expected = expected.at[2, 1].set(4).at[2, 3].set(5).at[2, 4].set(6)
    np.testing.assert_array_equal(vjp(jnp.arange(1.0, 7).reshape(y.shape))[0][0, 0], expected)
    # A mean at the edge is over the elements that exist.
    mean, vjp = jax.vjp(functools.partial(jaxbp.avg_pool2d, **options), x)
    np.testing.assert_allclose(mean[0, 0], [[4, 6, 7.5], [11.5, 13.5, 15]], rtol=1e-6)
    shares = [[0.25, 0.25, 0.25, 0.25, 0.5], [0.25, 0.25, 0.25, 0.25, 0.5], [0.5, 0.5, 0.5, 0.5, 1]]
    np.testing.assert_allclose(vjp(jnp.ones(mean.shape))[0][0, 0], shares, rtol=1e-6)


@every_implementation
def test_a_mean_counts_the_padding_but_not_what_ceil_mode_adds(implementation):
    options = dict(stride=2, padding=1, ceil_mode=True, implementation=implementation)
    y = jaxbp.avg_pool2d(jnp.full((1, 1, 4, 4), 36.0), 3, **options)
    np.testing.assert_allclose(y[0, 0], 36 * np.outer([2 / 3, 1, 1 / 2], [2 / 3, 1, 1 / 2]), rtol=1e-6)


@formulas
def test_a_dilated_window_of_padding_alone_has_no_maximum_and_no_mean(implementation):
    options = dict(padding=1, dilation=2, implementation=implementation)
    y, vjp = jax.vjp(functools.partial(jaxbp.max_pool2d, window=2, **options), jnp.ones((1, 1, 1, 1)))
    assert y.item() == -np.inf and vjp(jnp.ones(y.shape))[0].item() == 0
    assert np.isnan(jaxbp.avg_pool2d(jnp.ones((1, 1, 1, 1)), 2, count_include_pad=False, **options)).item()


@every_implementation
@pytest.mark.parametrize("channel_axis", [1, 2, -1, -3])
def test_channel_axis_moves_the_channels(channel_axis, implementation):
    x, options = distinct(2, 3, 5, 6), dict(window=(3, 2), stride=(2, 1), padding=((1, 0), (0, 1)))
    moved = lambda a: jnp.moveaxis(a, 1, channel_axis)  # noqa: E731
    axis = dict(channel_axis=channel_axis, implementation=implementation)
    y, indices = jaxbp.max_pool2d_with_indices(x, **options)
    found = jaxbp.max_pool2d_with_indices(moved(x), **options, **axis)
    for actual, expected in zip(found, (y, indices), strict=True):
        np.testing.assert_array_equal(actual, moved(expected))
    (dy,) = normal(y.shape, seed=1)
    dx = jaxbp.max_pool2d_backward(moved(dy), found[1], (5, 6), **options, **axis)
    assert_close(dx, moved(jaxbp.max_pool2d_backward(dy, indices, (5, 6), **options)), "float32")
    dx = jaxbp.avg_pool2d_backward(moved(dy), (5, 6), **options, **axis)
    assert_close(dx, moved(jaxbp.avg_pool2d_backward(dy, (5, 6), **options)), "float32")
    assert_close(jaxbp.global_avg_pool2d(moved(x), **axis), x.mean((2, 3)), "float32")
    dx = jaxbp.global_avg_pool2d_backward(x[:, :, 0, 0], (5, 6), **axis)
    assert_close(dx, moved(jaxbp.global_avg_pool2d_backward(x[:, :, 0, 0], (5, 6))), "float32")


@pytest.mark.parametrize("pool", [jaxbp.max_pool2d, jaxbp.avg_pool2d, jaxbp.logic_or_pool2d])
def test_pallas_refuses_dilation_by_name_and_none_takes_the_formula(pool):
    x = distinct(1, 1, 6, 6)
    with pytest.raises(NotImplementedError, match=rf"^{pool.__name__}: .* does not take dilation=\(2, 1\)"):
        pool(x, 2, dilation=(2, 1), implementation="pallas")
    assert_close(pool(x, 2, dilation=(2, 1)), pool(x, 2, dilation=(2, 1), implementation="xla"), "float32")


LAYERS = {
    "conv2d": (
        functools.partial(jaxbp.conv2d, padding="SAME", dimension_numbers=NHWC),
        (2, 5, 6, 3),
        [(3, 3, 3, 2), (2,)],
    ),
    "conv1d": (
        functools.partial(jaxbp.conv1d, padding="CAUSAL", groups=3, dimension_numbers=NWC),
        (2, 6, 3),
        [(4, 1, 3), (3,)],
    ),
    "max_pool2d": (
        functools.partial(jaxbp.max_pool2d, window=2, padding="SAME", ceil_mode=True, channel_axis=-1),
        (2, 5, 6, 3),
        [],
    ),
    "avg_pool2d": (
        functools.partial(jaxbp.avg_pool2d, window=2, dilation=2, count_include_pad=False, padding=1, channel_axis=-1),
        (2, 5, 6, 3),
        [],
    ),
}
every_layer = pytest.mark.parametrize(("op", "x_shape", "others"), LAYERS.values(), ids=LAYERS)


@every_layer
def test_vmap_over_an_ensemble_gives_the_gradients_of_each(op, x_shape, others):
    arrays = normal(*((3, *shape) for shape in (x_shape, *others)))
    run = value_and_gradients(op)
    cotangents = normal(*((3, *a.shape) for a in [jax.eval_shape(op, *(a[0] for a in arrays))]), seed=1)
    each = [run([a[i] for a in arrays], [c[i] for c in cotangents]) for i in range(3)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    assert_close(jax.vmap(run)(arrays, cotangents), expected, "float32")


EXPORTED = LAYERS | {
    "conv2d with stride": (
        functools.partial(jaxbp.conv2d, stride=2, padding="SAME", dimension_numbers=NHWC),
        (2, 5, 6, 3),
        [(3, 2, 3, 2)],
    ),
    "depthwise conv2d": (functools.partial(jaxbp.conv2d, stride=(1, 2), groups=3), (2, 3, 5, 6), [(3, 1, 3, 2)]),
    "max_pool2d with overlap": (functools.partial(jaxbp.max_pool2d, window=3, stride=2), (2, 3, 5, 6), []),
    "avg_pool2d with overlap": (functools.partial(jaxbp.avg_pool2d, window=3, stride=2), (2, 3, 5, 6), []),
    "conv2d_relu_max_pool2d": (
        functools.partial(jaxbp.conv2d_relu_max_pool2d, window=2),
        (2, 3, 5, 6),
        [(2, 3, 2, 3)],
    ),
}


@pytest.mark.parametrize("precision", ["highest", "default"])
@pytest.mark.parametrize(("op", "x_shape", "others"), EXPORTED.values(), ids=EXPORTED)
def test_export_with_a_symbolic_batch_and_symbolic_image_sizes(op, x_shape, others, precision):
    symbols = jax.export.symbolic_shape(", ".join(f"n{i}" for i in range(len(x_shape))))
    symbolic = tuple(size if size == 3 else symbol for size, symbol in zip(x_shape, symbols, strict=True))
    x, *parameters = normal([size if size == 3 else 2 * size - 1 for size in x_shape], *others)
    gradient = jax.jit(jax.value_and_grad(lambda x, *parameters: jnp.sum(jnp.sin(op(x, *parameters)))))
    with jax.default_matmul_precision(precision):
        exported = jax.export.export(gradient, platforms=("cpu",))(jax.ShapeDtypeStruct(symbolic, x.dtype), *parameters)
    assert_close(exported.call(x, *parameters), gradient(x, *parameters), "float32")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices to shard over")
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["automatic", "explicit"])
@every_layer
def test_on_a_mesh_the_gradients_are_those_of_one_device(op, x_shape, others, axes):
    arrays = normal((8, *x_shape[1:]), *others)
    cotangents = normal(*(a.shape for a in [jax.eval_shape(op, *arrays)]), seed=1)
    run = value_and_gradients(op)
    expected = run(arrays, cotangents)
    mesh = jax.make_mesh((8,), ("examples",), axis_types=(axes,))
    sharded, whole = NamedSharding(mesh, P("examples")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, whole if i else sharded) for i, a in enumerate(arrays)]
        assert_close(run(placed, jax.device_put(cotangents, sharded)), expected, "float32")
