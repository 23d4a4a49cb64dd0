import functools
import itertools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    compare_with_twin,
    cuda_program,
    formulas,
    normal,
    on_the_cpu,
    results_of,
    value_and_gradients,
)

import jaxbp
from jaxbp.pairing import IMPLEMENTATIONS

NWC, NCW = ("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")


@pytest.mark.parametrize("padding", ["SAME", "SAME_LOWER", "VALID", "CAUSAL", 1, ((2, 1),)], ids=str)
def test_conv1d_is_flax_conv(padding):
    x, w, b = normal((2, 7, 3), (3, 3, 4), (4,))
    layer = flax.linen.Conv(4, 3, strides=2, padding=padding)
    twin = lambda x, w, b: layer.apply({"params": {"kernel": w, "bias": b}}, x)  # noqa: E731
    ours = functools.partial(jaxbp.conv1d, stride=2, padding=padding, dimension_numbers=NWC)
    compare_with_twin(ours, twin, (x, w, b), IMPLEMENTATIONS)


@formulas
@pytest.mark.parametrize("dilation", [1, 2])
def test_depthwise_causal_conv1d_is_flax_conv(dilation, implementation):
    x, w, b = normal((2, 9, 4), (4, 1, 4), (4,))
    layer = flax.linen.Conv(4, 4, padding="CAUSAL", feature_group_count=4, kernel_dilation=dilation)
    twin = lambda x, w, b: layer.apply({"params": {"kernel": w, "bias": b}}, x)  # noqa: E731
    options = dict(padding="CAUSAL", groups=4, dilation=dilation, dimension_numbers=NWC, implementation=implementation)
    compare_with_twin(functools.partial(jaxbp.conv1d, **options), twin, (x, w, b))
    y, vjp = jax.vjp(twin, x, w, b)
    (dy,) = normal(y.shape, seed=1)
    assert_close(jaxbp.conv1d_backward(dy, x, w, **options), vjp(dy), "float32")


@formulas
def test_causal_conv1d_does_not_look_ahead(implementation):
    x, w = normal((1, 2, 8), (2, 1, 4))
    conv = functools.partial(jaxbp.conv1d, w=w, padding="CAUSAL", groups=2, implementation=implementation)
    later = conv(x.at[:, :, 5:].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(later[0, 0]), np.arange(8) >= 5)
    assert_close(later[:, :, :5], conv(x)[:, :, :5], "float32")


@formulas
def test_without_a_bias_and_in_the_default_layout_it_is_conv_general_dilated(implementation):
    x, w = normal((2, 4, 9), (6, 2, 3))
    options = dict(padding=((2, 1),), groups=2)
    twin = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, w, (1,), options["padding"], feature_group_count=2, dimension_numbers=("NCH", "OIH", "NCH")
    )
    compare_with_twin(functools.partial(jaxbp.conv1d, **options, implementation=implementation), twin, (x, w))


# name -> dimension_numbers, shapes of x, w, and b, padding
CASES = {
    "NWC": (NWC, [(2, 7, 3), (4, 1, 3), (3,)], ((3, 0),)),
    "NCW": (NCW, [(2, 3, 7), (3, 1, 2), (3,)], ((0, 2),)),
    "from NCW to NWC, without a bias": (("NCW", "WIO", "NWC"), [(2, 3, 7), (5, 1, 3)], ((6, 7),)),
    "other layouts": (("CWN", "IWO", "WNC"), [(3, 7, 2), (1, 3, 3), (3,)], ((0, 0),)),
}


@pytest.mark.parametrize(
    ("case", "implementation"),
    [*itertools.product(CASES, ("xla", "autodiff")), ("NCW", "pallas"), ("from NCW to NWC, without a bias", "pallas")],
)
def test_values_and_gradients_in_every_layout_are_those_of_lax(case, implementation):
    layout, shapes, padding = CASES[case]

    def twin(x, w, b=None):
        options = dict(dimension_numbers=layout, feature_group_count=3)
        y = jax.lax.conv_general_dilated(x, w, (1,), padding, **options)
        return y if b is None else y + jnp.expand_dims(b, [i for i, axis in enumerate(layout[2]) if axis != "C"])

    options = dict(padding=padding, groups=3, dimension_numbers=layout, implementation=implementation)
    compare_with_twin(functools.partial(jaxbp.conv1d, **options), twin, normal(*shapes))


def test_the_public_backward_is_the_gradient_in_every_layout():
    options = dict(padding="CAUSAL", groups=3, dimension_numbers=("NCW", "WIO", "NWC"), implementation="xla")
    x, w, b, dy = normal((2, 3, 7), (4, 1, 3), (3,), (2, 7, 3))
    _, vjp = jax.vjp(functools.partial(jaxbp.conv1d, **options), x, w, b)
    assert_close(jaxbp.conv1d_backward(dy, x, w, **options), vjp(dy), "float32")


@formulas
def test_the_gradient_is_exported_for_any_batch(implementation):
    (batch,) = jax.export.symbolic_shape("batch")
    (x, w), options = normal((3, 5, 2), (2, 1, 2)), dict(padding="CAUSAL", groups=2, dimension_numbers=NWC)
    op = functools.partial(jaxbp.conv1d, **options, implementation=implementation)
    gradients = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(op(x, w))), (0, 1)))
    with on_the_cpu():
        exported = jax.export.export(gradients)(*(jax.ShapeDtypeStruct(s, "float32") for s in [(batch, 5, 2), w.shape]))
        assert_close(exported.call(x, w), gradients(x, w), "float32")


def program(implementation, layout, *shapes, **options):
    options = dict(padding="CAUSAL", groups=128, dimension_numbers=layout, implementation=implementation) | options
    op, arrays = functools.partial(jaxbp.conv1d, **options), [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    return cuda_program(value_and_gradients(op), arrays, results_of(op, arrays))


@pytest.mark.parametrize("implementation", ["pallas", "xla", None])
def test_sequences_with_the_channels_last_are_not_transposed(implementation):
    text = program(implementation, NWC, (2, 9, 128), (4, 1, 128), (128,))
    assert "transpose" not in text and ("mosaic_gpu" in text) == (implementation == "pallas")


@pytest.mark.parametrize(
    ("layout", "shapes", "has_kernel"),
    [
        (NWC, [(2, 9, 128), (4, 1, 128)], True),
        (NCW, [(2, 128, 9), (128, 1, 4)], False),
    ],
)
def test_the_default_on_a_gpu_is_the_kernel_only_if_it_needs_no_transposes(layout, shapes, has_kernel, on_hopper):
    assert ("mosaic_gpu" in program(None, layout, *shapes)) == has_kernel


def test_formulas_do_not_transpose_sequences_with_the_channels_before_the_width():
    transposed = [line for line in program("xla", NCW, (2, 128, 9), (128, 1, 4)).splitlines() if "transpose" in line]
    assert all("tensor<2x" not in line for line in transposed)


STRUCT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
REFUSED = {
    "two filters per channel": ((8, 1, 4), dict(), "groups=4"),
    "two channels per group": ((4, 2, 4), dict(groups=2), "groups=2"),
    "a stride": ((4, 1, 4), dict(stride=2), "groups=4"),
    "a dilation": ((4, 1, 4), dict(dilation=2), r"dilation=\(1, 2\)"),
    "a wide filter": ((4, 1, 9), dict(), "filters of width 9, only up to 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_grouped_convolutions_have_no_kernel(case):
    filters, options, reason = REFUSED[case]
    op = functools.partial(jaxbp.conv1d, **dict(groups=4) | options)
    x, w = STRUCT((2, 4, 20)), STRUCT(filters)
    with pytest.raises(NotImplementedError, match=f"^conv1d: implementation='pallas' does not take {reason};"):
        jax.eval_shape(functools.partial(op, implementation="pallas"), x, w)
    assert jax.eval_shape(op, x, w).shape[:2] == (2, filters[0])


@pytest.mark.parametrize("channels", [2, 2**10])
def test_too_many_elements_for_the_kernel_have_a_formula(channels):
    x, w = STRUCT((2**21 // max(channels, 128), 2**10, channels)), STRUCT((4, 1, channels))
    op = functools.partial(jaxbp.conv1d, padding="CAUSAL", groups=channels, dimension_numbers=NWC)
    with pytest.raises(NotImplementedError, match=r"^conv1d: .*does not take 2\^31 or more elements"):
        jax.eval_shape(functools.partial(op, implementation="pallas"), x, w)
    assert jax.eval_shape(op, x, w).shape == x.shape
