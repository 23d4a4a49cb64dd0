import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES

FIRST = pl.ds(0, LANES)


def run(body, *arrays, shape=(2, LANES), dtype=jnp.float32, programs=2):
    return launch(body, *arrays, out=jax.ShapeDtypeStruct(shape, dtype), grid={"i": programs}, name="planted")


def rows():
    return jnp.arange(2.0 * LANES).reshape(2, LANES)


def double(x_ref, y_ref, *, i):
    y_ref[i, FIRST] = 2 * x_ref[i, FIRST]
