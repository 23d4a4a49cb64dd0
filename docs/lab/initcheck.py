"""Does initcheck of compute-sanitizer know of bulk copies? A kernel that copies an array, and a sum of the copy.

    compute-sanitizer --tool initcheck python docs/lab/initcheck.py stores     # the kernel stores registers
    compute-sanitizer --tool initcheck python docs/lab/initcheck.py tensor     # shared memory, by cp.async.bulk.tensor

It prints whether the sum is right. Where it is, and the tool still says that the sum read memory which nothing had
written, the tool does not know of that way of writing. XLA_PYTHON_CLIENT_ALLOCATOR=platform is to be set.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, operand, store


def copy(x: jax.Array, how: str) -> jax.Array:
    """x, as a kernel copies it."""

    def body(x, y, tile, barrier, *, program):
        del program
        plgpu.copy_gmem_to_smem(x, tile, barrier)
        plgpu.barrier_wait(barrier)
        if how == "stores":
            store(y, load(tile, plgpu.Layout.WGMMA, optimized=False))
            return
        plgpu.copy_smem_to_gmem(tile, y)
        plgpu.wait_smem_to_gmem(0)

    scratch = [operand(x.shape, x.dtype), plgpu.Barrier()]
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(body, x, out=struct, grid={"program": 1}, scratch=scratch, name=f"copy_by_{how}")


def main(how: str) -> int:
    x = np.random.default_rng(0).integers(0, 100, (64, 32)).astype(np.float32)
    summed = jax.jit(lambda x: jnp.sum(copy(x, how)))(x)
    print(f"{how}: the sum is {'right' if summed == x.sum() else 'wrong'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
