"""Most gradients have a separate kernel, which JAX removes. Other kernels skip unused results."""

import jax
import jax.numpy as jnp
import pytest
from helpers import ENTRIES, assert_close, is_float, kernel_results

# (op, case, batch, dtype) -> numbers of results of the forward's kernels, and of the backward's kernels for all
# gradients or for the gradient of one argument.
PROGRAMS = {
    ("conv2d", "conv2", 1024, "float32"): ([], {"all": [2, 1], 0: [1], 1: [2]}),
    ("conv2d_relu_max_pool2d", "block1", 128, "float32"): ([2], {"all": [1, 1], 0: [1], 1: [1]}),
    ("conv1d", "sequences", 128, "float32"): ([1], {"all": [3], 0: [1], 1: [1]}),
    ("add", "bias", 128, "float32"): ([], {"all": [1, 1], 0: [1], 1: [1]}),
    ("gated_linear_unit", "hidden", 128, "float32"): ([], {"all": [2], 0: [1], 1: [1]}),
    ("huber", "hidden", 128, "float32"): ([], {"all": [2], 0: [1], 1: [1]}),
    ("group_norm", "images", 128, "float32"): ([], {"all": [2, 2, 1], 0: [2, 1], 1: [2]}),
    ("layer_norm_linear", "65536x1024x1024", 65536, "bfloat16"): ([3, 1], {"all": [1, 2, 2], 0: [1], 3: [2, 2]}),
    ("layer_norm_linear", "262144x256x256", 262144, "bfloat16"): ([3], {"all": [2, 2, 2], 0: [1], 3: [2, 2, 2]}),
    ("layer_norm_linear", "65536x1024x1024", 65536, "float32"): ([3], {"all": [3], 0: [1], 3: [2]}),
    ("mlp_softmax_cross_entropy", "fc1 to fc3", 8192, "float32"): ([4], {"all": [4], 0: [4], 1: [3]}),
    ("gate_layer", "8000->8000", 8192, "float32"): ([1], {"all": [2], 0: [1], -1: [1]}),
    ("dot_product_attention", "384x4x32 bias", 2, "bfloat16"): ([3], {"all": [1, 2, 1], 0: [1], 1: [2], 3: [1]}),
    ("logic_conv2d_or_pool2d", "mnist-m1", 128, "float32"): ([2], {"all": [2, 1], 0: [1], -1: [1, 1]}),
}


def gradient(op, case, batch, dtype, wanted):
    entry = ENTRIES[op]
    leaves, structure = jax.tree.flatten(entry.real[case].structs(batch, jnp.dtype(dtype)))
    places = [i for i, a in enumerate(leaves) if is_float(a)]
    places = places if wanted == "all" else [places[wanted]]

    def total(moving, leaves):
        leaves = list(leaves)
        for place, array in zip(places, moving, strict=True):
            leaves[place] = array
        y = entry.function(*structure.unflatten(leaves), implementation="pallas", **entry.real[case].options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return lambda *leaves: jax.grad(total)([leaves[i] for i in places], leaves), *leaves


every_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: "-".join(map(str, program)))


@every_program
def test_programs_have_the_kernels_of_the_wanted_gradients(program):
    forward, backward = PROGRAMS[program]
    with jax.default_matmul_precision("default"):
        found = {wanted: kernel_results(*gradient(*program, wanted)) for wanted in backward}
    assert found == {wanted: forward + kernels for wanted, kernels in backward.items()}


@pytest.mark.gpu
@every_program
def test_gpu_gradients_do_not_depend_on_which_others_are_wanted(program):
    op, case, batch, dtype = program
    arrays = jax.tree.leaves(ENTRIES[op].real[case].draw(0, batch, jnp.dtype(dtype)))
    with jax.default_matmul_precision("default"):
        every, *alone = (jax.jit(gradient(*program, wanted)[0])(*arrays) for wanted in PROGRAMS[program][1])
    for wanted, (found,) in zip([*PROGRAMS[program][1]][1:], alone, strict=True):
        assert_close(found, every[wanted].astype(jnp.float32), dtype)
