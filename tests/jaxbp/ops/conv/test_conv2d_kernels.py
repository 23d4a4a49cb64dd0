import functools

import jax
import numpy as np
import pytest
from helpers import cuda_program, normal, on_the_cpu, value_and_gradients

from jaxbp import conv2d, conv2d_backward_input
from pallas_kernels.core.device import BLACKWELL, BLACKWELL_RTX, HOPPER, targeting


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
@pytest.mark.parametrize("implementation", ["pallas", None])
def test_only_hopper_gets_its_own_tensor_core_instructions(implementation, gpu, wgmma):
    run = value_and_gradients(functools.partial(conv2d, precision="default", implementation=implementation))
    with targeting(gpu):
        program = cuda_program(run, normal(*IN_EIGHTS), normal((2, 4, 4, 4)))
    assert "custom_call @mosaic_gpu" in program
    assert ("wgmma" in program) == wgmma


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
