import jax.numpy as jnp
import numpy as np

from pallas_kernels.norm.statistics import inverse_root


def test_the_inverse_root_of_what_overflowed_is_nan_and_not_0():
    mean_squares = jnp.array([0.0, 3.75, 1e38, jnp.inf, jnp.nan])
    np.testing.assert_allclose(inverse_root(mean_squares, 0.25), [2, 0.5, 1e-19, np.nan, np.nan], rtol=1e-6)
