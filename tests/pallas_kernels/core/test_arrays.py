import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core.arrays import batch_first, batch_last


@pytest.mark.parametrize("shape", [(), (3, 2)], ids=str)
@pytest.mark.parametrize(("batch", "lanes"), [(0, 128), (1, 128), (127, 128), (128, 128), (129, 256)])
def test_batch_last_fills_up_with_zeros_and_batch_first_gives_it_back(batch, lanes, shape):
    x = 1 + jnp.arange(batch * int(np.prod(shape)), dtype=jnp.float32).reshape(batch, *shape)
    last = batch_last(x)
    assert last.shape == (*shape, lanes)
    assert jnp.all(last[..., batch:] == 0)
    np.testing.assert_array_equal(batch_first(last, batch), x)
