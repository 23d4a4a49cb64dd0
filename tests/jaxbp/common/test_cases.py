import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.catalogue import BATCH, Argument, Case, WiresArgument


def draw(argument, batch=4, dtype="float32", seed=0):
    return argument.draw(jax.random.key(seed), batch, jnp.dtype(dtype))


@pytest.mark.parametrize("argument", [Argument((BATCH, 3)), Argument((2,), below=5), Argument((3, 4), apart=True)])
def test_what_is_drawn_has_the_shape_and_dtype_that_is_said(argument):
    struct, array = argument.struct(4, jnp.dtype("bfloat16")), draw(argument, dtype="bfloat16")
    assert (struct.shape, struct.dtype) == (array.shape, array.dtype)


def test_the_batch_stands_in_shapes_by_its_name():
    assert Argument((BATCH, 3)).struct(7, jnp.float32).shape == (7, 3)


def test_integers_stay_below_their_bound():
    labels = draw(Argument((1000,), below=5))
    assert labels.dtype == jnp.int32 and set(np.asarray(labels)) == set(range(5))


def test_floats_are_what_their_options_say():
    weights, apart, positive = (draw(Argument((3, 4), **{option: True})) for option in ("weights", "apart", "positive"))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(np.diff(np.sort(apart.ravel())), 4 / 11, rtol=1e-5)
    assert positive.min() >= 0.5
    assert np.std(draw(Argument((1000,), scale=3.0))) > 2 * np.std(draw(Argument((1000,))))


def test_a_case_draws_other_arrays_for_another_seed_and_the_same_wires():
    case = Case((WiresArgument(5, 6), Argument((BATCH, 5))))
    (wires, x), (same_wires, other_x) = case.draw(0), case.draw(1)
    assert not np.array_equal(x, other_x)
    np.testing.assert_array_equal(wires.a, same_wires.a)
    assert jax.tree.map(jnp.shape, case.structs()[1]) == x.shape
