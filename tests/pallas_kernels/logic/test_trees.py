import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from cuda_compiler import kernels_compiled, missing
from helpers import assert_close, in_float64, normal

import jaxbp
from jaxbp import TreeWires
from pallas_kernels.core.device import HOPPER
from pallas_kernels.logic.trees import input_gradient

CHANNELS, KERNELS, LEAVES = 6, 16, 8
WIRES = TreeWires.random(CHANNELS, KERNELS, 3, seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("size", range(1, 9))
def test_gradients_of_small_images(size, pool):
    options = dict(padding=2 if size == 1 else 1, pool=pool)
    logits, x = normal((KERNELS, 7, 16), (3, CHANNELS, size, size))
    x = jax.nn.sigmoid(x)
    forward = jaxbp.logic_conv2d_or_pool2d_with_indices
    y, places = forward(logits, WIRES, x, **options, implementation="pallas")
    (dy,) = normal(y.shape, seed=1)
    expected = in_float64(
        lambda *arrays: jaxbp.logic_conv2d_or_pool2d_backward(*arrays, **options, implementation="autodiff"),
        *(dy, places, logits, WIRES, x),
    )
    results = jaxbp.logic_conv2d_or_pool2d_backward(dy, places, logits, WIRES, x, **options, implementation="pallas")
    assert_close(results, expected, "float32")


def _of_four_by_four():
    """The compiler unrolls the loops for images this small."""
    options = dict(stride=(1, 1), pool=(2, 2), size=(CHANNELS, 4, 4), padding=(1, 1))
    arrays = [
        jax.ShapeDtypeStruct((KERNELS * LEAVES, 2, 2, 128), jnp.float32),
        jax.ShapeDtypeStruct((KERNELS, 2, 2, 128), jnp.uint8),
        *(WIRES.leaves, WIRES.readers, WIRES.reader_offsets),
    ]
    return kernels_compiled(HOPPER, lambda *arrays: input_gradient(*arrays, **options), *arrays)


@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_sums_in_shared_memory_are_read_after_they_were_added_to(tmp_path):
    # Without fences in the kernel, LLVM writes the zeros to which the sums were set.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parents[3], Path(__file__).parents[2])))
    subprocess.run([sys.executable, __file__], check=True, env=environment)
    (program,) = tmp_path.glob("*.ptx")
    behind_the_loops = program.read_text().rpartition("bra")[2]
    assert behind_the_loops.count("ld.shared") == behind_the_loops.count("st.global") == 4


if __name__ == "__main__":
    _of_four_by_four()
