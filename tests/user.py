"""A user's program, which needs only an installation of jaxbp, and has no type errors."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxbp
from pallas_kernels.pointwise.elementwise import elementwise

absent = [name for name in ("flax", "optax", "rich") if name in sys.modules]
assert not absent, f"import jaxbp imports {absent}"


def cube(x: jax.Array) -> jax.Array:
    return x**3


def cube_backward(dy: jax.Array, x: jax.Array) -> jax.Array:
    return 3 * x**2 * dy


paired = jaxbp.Pair(cube, {"xla": cube_backward}, name="cube")
assert jaxbp.verify.check(paired, jnp.arange(1.0, 3.0), order=1).failures == ()

x, w = jnp.ones((2, 4)), jnp.ones((3, 4))
y: jax.Array = jaxbp.relu(jaxbp.linear(x, w, implementation="xla"))
dx, dw, db = jaxbp.linear_backward(y, x, w)
slope: jax.Array = jax.grad(lambda w: jaxbp.linear(x, w).sum())(w)
rows = np.ones((2, 4), np.float32)
loss: jax.Array = jaxbp.softmax_cross_entropy(jaxbp.linear(rows, np.ones((3, 4), np.float32)), np.array([0, 2]))

# Without a GPU, these two kernels run in the interpreter.
doubled: jax.Array = elementwise(lambda x: 2 * x, x)
dx_by_kernel: jax.Array = jaxbp.relu_backward(x, x, implementation="pallas")
assert (doubled == 2).all() and (dx_by_kernel == x).all()

wires = jaxbp.Wires.from_pairs(np.array([0, 1]), np.array([1, 0]), inputs=2)
bits: np.ndarray = jaxbp.Circuit.of([(np.array([6, 1], np.uint8), wires)])(np.array([[True, False]]))
assert jaxbp.catalogue.CATALOGUE and jaxbp.nn.lenet_memory_table(batch=1)
print([dx.shape, dw.shape, db.shape, slope.shape], bits.tolist())
