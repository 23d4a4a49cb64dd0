import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_numerical_gradients_agree,
    cuda_program,
    draw_cotangents,
    every_implementation,
    gradients_of,
    in_float64,
    launching_program,
    normal,
    on_the_cpu,
    ours,
    value_and_gradients,
)

from jaxbp import conv2d, conv2d_backward_input, conv2d_backward_weights
from jaxbp.ops.conv.conv2d import product_pays
from pallas_kernels.core import launch
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting

without_kernels = pytest.mark.parametrize("implementation", ["xla", "autodiff"])
LAX = dict(dimension_numbers=("NCHW", "OIHW", "NCHW"))


@every_implementation
def test_weight_gradient_of_a_5x5_input_with_a_3x3_filter_is_that_worked_out_by_hand(implementation):
    x = jnp.arange(25.0).reshape(1, 1, 5, 5)
    dy = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, -1.0, 0.0]])[None, None]
    # x[i, j] = 5 i + j, so dw[u, v] = (5 u + v) + 2 (5 u + v + 7) - (5 u + v + 11).
    dw = [[3.0, 5.0, 7.0], [13.0, 15.0, 17.0], [23.0, 25.0, 27.0]]
    _, gradient, _ = gradients_of(
        conv2d, (x, jnp.ones((1, 1, 3, 3)), jnp.zeros(1)), [dy], implementation=implementation
    )
    np.testing.assert_array_equal(gradient[0, 0], dw)


@every_implementation
def test_numerical_gradients_agree_to_a_thousandth(implementation):
    arrays = normal((1, 1, 5, 5), (1, 1, 3, 3), (1,))
    # A large step is exact, because the op is linear in each argument.
    assert_numerical_gradients_agree(conv2d, arrays, step=0.5, implementation=implementation)


def _check_against_lax(implementation, x_shape, w_shape, options, lax_options):
    arrays = normal(x_shape, w_shape, w_shape[:1])
    op = functools.partial(conv2d, **options, implementation=implementation)
    lax_op = lambda x, w, b: jax.lax.conv_general_dilated(x, w, **LAX, **lax_options) + b[:, None, None]  # noqa: E731
    cotangents = draw_cotangents(lax_op, arrays)
    expected = in_float64(value_and_gradients(lax_op), arrays, cotangents)
    assert_close(value_and_gradients(op)(arrays, cotangents), expected, "float32")


STRIDES_AND_PADDINGS = {
    "same": (dict(stride=2, padding="SAME"), ((2, 2), "SAME")),
    "valid": (dict(stride=(1, 2), padding="valid"), ((1, 2), "VALID")),
    "int": (dict(padding=1), ((1, 1), [(1, 1), (1, 1)])),
    "pair": (dict(stride=(2, 1), padding=(2, 0)), ((2, 1), [(2, 2), (0, 0)])),
    "stride beyond the filter": (dict(stride=4), ((4, 4), "VALID")),
}


@every_implementation
@pytest.mark.parametrize(("options", "meaning"), STRIDES_AND_PADDINGS.values(), ids=STRIDES_AND_PADDINGS)
def test_strides_and_paddings_mean_what_they_mean_to_lax(options, meaning, implementation):
    stride, padding = meaning
    _check_against_lax(
        implementation, (2, 1, 6, 7), (2, 1, 3, 2), options, dict(window_strides=stride, padding=padding)
    )


DILATIONS_AND_GROUPS = {
    "dilation": (dict(dilation=(2, 1)), (2, 1), 1),
    "groups": (dict(groups=2), (1, 1), 2),
    "depthwise, dilated, strided and padded": (dict(dilation=2, groups=4, stride=2, padding=1), (2, 2), 4),
}


@without_kernels
@pytest.mark.parametrize(("options", "dilation", "groups"), DILATIONS_AND_GROUPS.values(), ids=DILATIONS_AND_GROUPS)
def test_dilations_and_groups_mean_what_they_mean_to_lax(options, dilation, groups, implementation):
    stride, padding = options.get("stride", 1), options.get("padding", 0)
    lax_options = dict(
        window_strides=(stride, stride),
        padding=[(padding, padding)] * 2,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    _check_against_lax(implementation, (2, 4, 7, 6), (8, 4 // groups, 3, 2), options, lax_options)


UNSUPPORTED = {"dilation=(2, 1)": dict(dilation=(2, 1)), "groups=2": dict(groups=2)}
every_unsupported = pytest.mark.parametrize(("named", "options"), UNSUPPORTED.items(), ids=UNSUPPORTED)


def _calls(options):
    size = tuple(n - (f - 1) * d for n, f, d in zip((7, 6), (3, 2), options.get("dilation", (1, 1)), strict=True))
    x, dy, w = normal((2, 4, 7, 6), (2, 8, *size), (8, 4 // options.get("groups", 1), 3, 2))
    return {
        "conv2d": functools.partial(conv2d, x, w, **options),
        "conv2d_backward_input": functools.partial(conv2d_backward_input, dy, w, (7, 6), **options),
        "conv2d_backward_weights": functools.partial(conv2d_backward_weights, dy, x, (3, 2), **options),
    }


@every_unsupported
def test_pallas_refuses_dilation_and_groups_by_name(named, options):
    for name, call in _calls(options).items():
        with pytest.raises(NotImplementedError) as error:
            call(implementation="pallas")
        message = f"{name}: implementation='pallas' does not take {named}; wants 'xla', 'autodiff', or None"
        assert str(error.value) == message


@every_unsupported
def test_none_falls_back_quietly_for_dilation_and_groups_on_a_gpu(named, options, on_hopper):
    launch._warn_interpreted.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="jaxbp")
        for call in _calls(options).values():
            assert "mosaic_gpu" not in jax.jit(call).trace().lower(lowering_platforms=("cuda",)).as_text()
            assert_close(call(), call(implementation="xla"), "float32")


def test_the_product_on_the_tensor_cores_computes_the_same():
    options, lax_options = dict(stride=(2, 1), padding=(1, 0)), dict(window_strides=(2, 1), padding=[(1, 1), (0, 0)])
    _check_against_lax("pallas", (2, 2, 5, 6), (3, 2, 3, 2), options | dict(precision="default"), lax_options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("groups", [1, 3])
def test_filters_of_one_channel_are_as_exact_in_every_dtype(groups, dtype):
    arrays = [a.astype(dtype) for a in normal((2, groups, 9, 10), (6, 1, 3, 2), (6,))]
    xla, autodiff = (
        functools.partial(conv2d, stride=(2, 1), padding=(1, 2), dilation=(1, 3), groups=groups, implementation=name)
        for name in ("xla", "autodiff")
    )
    cotangents = draw_cotangents(xla, arrays)
    reference = in_float64(value_and_gradients(autodiff), arrays, cotangents)
    assert_close(value_and_gradients(xla)(arrays, cotangents), reference, dtype)


@ours
def test_without_a_bias_the_other_gradients_are_the_same(implementation):
    (x, w), (dy,) = normal((2, 1, 4, 4), (2, 1, 2, 2)), normal((2, 2, 3, 3), seed=1)
    with_bias = gradients_of(conv2d, (x, w, jnp.zeros(2)), [dy], implementation=implementation)
    assert_close(gradients_of(conv2d, (x, w), [dy], implementation=implementation), with_bias[:2], "float32")


@every_implementation
def test_an_empty_batch_has_zero_gradients_in_the_parameters(implementation):
    arrays = (jnp.zeros((0, 1, 4, 4)), *normal((2, 1, 2, 2), (2,)))
    dx, dw, db = gradients_of(conv2d, arrays, [jnp.zeros((0, 2, 3, 3))], implementation=implementation)
    assert dx.shape == (0, 1, 4, 4)
    np.testing.assert_array_equal(dw, np.zeros((2, 1, 2, 2)))
    np.testing.assert_array_equal(db, np.zeros(2))


def test_a_program_for_a_gpu_takes_any_batch(on_hopper):
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = (batch, 1, 28, 28), (6, 1, 5, 5), (6,)
    gradients = jax.jit(jax.grad(lambda *arrays: conv2d(*arrays).sum(), (0, 1, 2)))
    exported = jax.export.export(gradients, platforms=["cuda"])(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes))
    assert exported.out_avals[0].shape == shapes[0]


def test_gradients_of_groups_of_small_images_have_a_default():
    x, w = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((4, 6, 12, 12), (16, 3, 5, 5)))
    op = functools.partial(conv2d, groups=2, precision="default")
    dx, dw = jax.eval_shape(jax.grad(lambda x, w: jnp.sum(op(x, w)), (0, 1)), x, w)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)


@pytest.mark.parametrize(
    ("w_shape", "input_size", "output_size", "pays"),
    [
        ((16, 6, 5, 5), (12, 12), (8, 8), True),
        ((6, 1, 5, 5), (28, 28), (24, 24), True),
        ((16, 6, 5, 5), (28, 28), (24, 24), False),  # too large
        ((4, 1, 3, 3), (20, 20), (18, 18), False),  # mostly zeros
        ((32, 32, 1, 1), (5, 5), (5, 5), False),  # one tap
    ],
)
def test_the_filter_matrix_pays_for_small_images(w_shape, input_size, output_size, pays):
    w = jax.ShapeDtypeStruct(w_shape, "bfloat16")
    assert product_pays(w, input_size, output_size, None) == pays


def _input_gradient_program(dtype="float32", **options):
    dy, w = (a.astype(dtype) for a in normal((2, 3, 4, 5), (3, 2, 2, 2)))
    return cuda_program(functools.partial(conv2d_backward_input, input_size=(5, 6), **options), dy, w)


def _small_input_gradient(dtype="float32", **options):
    program = _input_gradient_program(dtype, **options)
    (found,) = [name for name in ("mosaic_gpu", "dot_general", "stablehlo.convolution") if name in program]
    return found


@pytest.mark.parametrize(
    ("dtype", "precision", "product"),
    [
        ("float32", None, False),
        ("float32", "float32", False),
        ("float32", (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST), False),
        ("float32", "default", True),
        ("float32", "tensorfloat32", True),
        ("bfloat16", None, True),
        ("float16", "highest", True),
    ],
)
def test_small_images_are_a_product_where_the_tensor_cores_are_allowed(dtype, precision, product):
    program = _input_gradient_program(dtype, precision=precision, implementation="pallas")
    assert ("wgmma" in program) == product
    assert "dot_general" not in program


@pytest.mark.parametrize(("precision", "found"), [("default", "dot_general"), ("highest", "stablehlo.convolution")])
def test_none_takes_the_product_or_the_library_for_a_gradient_in_the_input(precision, found, on_hopper):
    assert _small_input_gradient(precision=precision) == found


def test_none_takes_for_each_part_of_the_gradient_what_is_fastest_on_a_gpu(on_hopper):
    run = value_and_gradients(functools.partial(conv2d, precision="default"))
    program = cuda_program(run, normal((2, 2, 5, 6), (3, 2, 2, 2), (3,)), normal((2, 3, 4, 5)))
    assert program.count("dot_general") == 2
    assert program.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.convolution" not in program


# The tensor cores need rows in multiples of eight.
IN_EIGHTS = (2, 2, 8, 8), (4, 2, 5, 5), (4,)


@pytest.mark.parametrize(
    ("gpu", "wgmma"), [(HOPPER, True), (BLACKWELL, False), (BLACKWELL_RTX, False)], ids=["H200", "B200", "RTX"]
)
def test_only_hopper_gets_its_own_tensor_core_instructions(gpu, wgmma):
    def program(lowered, implementation):
        run = value_and_gradients(functools.partial(conv2d, precision="default", implementation=implementation))
        with targeting(gpu):
            return lowered(run, normal(*IN_EIGHTS), normal((2, 4, 4, 4)))

    of_pallas, of_none = (re.findall(r"@kernel\.\w+", program(launching_program, name)) for name in ("pallas", None))
    assert of_none and {*of_none} <= {*of_pallas}
    with_bodies = program(cuda_program, "pallas")
    assert with_bodies.count("custom_call @mosaic_gpu") == len(of_pallas)
    assert ("wgmma" in with_bodies) == wgmma
    assert any("tensor_cores" in name for name in of_none) == wgmma


def test_on_the_tensor_cores_one_kernel_makes_the_gradients_of_weights_and_bias(on_hopper):
    run = value_and_gradients(functools.partial(conv2d, precision="default"))
    program = cuda_program(run, normal(*IN_EIGHTS), normal((2, 4, 4, 4)))
    assert program.count("custom_call @mosaic_gpu") == 1
    assert program.count("stablehlo.convolution") == 0


def test_without_a_gpu_the_exact_kernels_take_the_place_of_those_on_the_tensor_cores():
    arrays, dy = normal((2, 2, 4, 4), (4, 2, 1, 1), (4,)), normal((2, 4, 4, 4))
    calls = (functools.partial(conv2d, precision=name, implementation="pallas") for name in ("default", "highest"))
    with on_the_cpu():
        (_, (_, *rounded)), (_, (_, *exact)) = (value_and_gradients(call)(arrays, dy) for call in calls)
    jax.tree.map(np.testing.assert_array_equal, rounded, exact)


def test_without_a_gradient_none_takes_the_product_too(on_hopper):
    program = cuda_program(functools.partial(conv2d, precision="default"), *normal((2, 2, 5, 6), (3, 2, 2, 2), (3,)))
    assert "dot_general" in program
    assert "stablehlo.convolution" not in program
