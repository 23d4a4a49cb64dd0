import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxbp.training.precision import LossScale, Policy, all_finite, loss_scaled, where_finite

TINY = 2.0**-26
"""Rounds to 0 in float16."""


def tiny_slope(x):
    return jnp.sum(x.astype(jnp.float16).astype(jnp.float32) * TINY)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("float32", ("float32", "float32", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("params=float32,compute=bfloat16,output=float16", ("float32", "bfloat16", "float16")),
        ("output=float32, params=float64, compute=float32", ("float64", "float32", "float32")),
    ],
)
def test_a_policy_is_read_from_its_name_or_its_dtypes(text, dtypes):
    policy = Policy.parse(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == tuple(map(jnp.dtype, dtypes))
    assert Policy.parse(str(policy)) == policy and hash(Policy.parse(text)) == hash(policy)


@pytest.mark.parametrize("text", ["float8", "params=float32", "params=int8,compute=float32,output=float32", "", None])
def test_another_text_is_refused_with_what_is_wanted(text):
    with pytest.raises(ValueError, match=r"Policy.parse: text is .*(mixed_float16|a floating dtype)"):
        Policy.parse(text)


def test_only_floating_arrays_are_cast():
    tree = {"w": jnp.ones(2), "n": jnp.arange(3), "on": True, "key": jax.random.key(0)}
    cast = Policy.parse("mixed_bfloat16").cast_to_compute(tree)
    assert cast["w"].dtype == jnp.bfloat16 and cast["n"].dtype == jnp.int32 and cast["on"] is True
    assert cast["key"] is tree["key"]
    back = Policy.parse("mixed_bfloat16").cast_to_param(cast)
    assert back["w"].dtype == jnp.float32 == Policy.parse("mixed_bfloat16").cast_to_output(cast)["w"].dtype


def test_a_gradient_of_2_to_the_minus_26_is_0_in_float16_and_right_with_scaling():
    x = jnp.ones(3)
    assert (jax.grad(tiny_slope)(x) == 0).all()
    value, gradients, finite, scale = jax.jit(LossScale.create().value_and_grad(tiny_slope))(x)
    np.testing.assert_array_equal(gradients, TINY)
    assert gradients.dtype == jnp.float32 and finite and value == tiny_slope(x) and scale.finite_steps == 1


def test_an_overflow_halves_the_scale_and_skips_the_step():
    def loss(x):
        return jnp.sum(x.astype(jnp.float16) * jnp.float16(4.0)).astype(jnp.float32)

    scale, old = LossScale.create(initial=2.0**15), (jnp.ones(2), jnp.int32(7))
    value, gradients, finite, scale = scale.value_and_grad(loss)(old[0])
    assert value == 8 and not finite and np.isinf(gradients).all()
    assert (scale.value, scale.skipped_steps, scale.finite_steps) == (2.0**14, 1, 0)
    chex.assert_trees_all_equal(where_finite(finite, (old[0] - gradients, old[1] + 1), old), old)
    _, gradients, finite, scale = LossScale.create(initial=2.0**13).value_and_grad(loss)(old[0])
    assert finite and (gradients == 4).all() and scale.skipped_steps == 0


def test_it_grows_after_the_interval_and_never_passes_the_largest_finite_value():
    scale, values = LossScale.create(initial=2.0**125, interval=3), []
    for _ in range(12):
        scale = scale.update(jnp.bool(True))
        values.append(float(scale.value))
    assert values == [2.0**125] * 2 + [2.0**126] * 3 + [2.0**127] * 7


def test_a_skipped_step_begins_the_interval_again():
    scale = LossScale.create(initial=8.0, interval=2)
    values = []
    for finite in (True, False, True, True):
        scale = scale.update(jnp.bool(finite))
        values.append(float(scale.value))
    assert values == [8, 4, 4, 8]


def test_nan_in_the_data_ends_in_an_error_and_not_in_a_scale_of_0():
    step = jax.jit(lambda scale, x: scale.value_and_grad(tiny_slope)(x)[2:])
    scale = LossScale.create(initial=4.0)
    for steps in range(1, 11):
        finite, scale = step(scale, jnp.full(1, jnp.nan))
        assert not finite and scale.value == max(1.0, 4 / 2**steps)
        if steps < 10:
            scale.check(most_skipped=10)
    with pytest.raises(FloatingPointError, match=r"last 10 steps were skipped.* even at a scale of 1;.*NaN"):
        scale.check(most_skipped=10)


def test_an_infinite_loss_is_skipped_though_its_gradients_are_finite():
    finite = LossScale.create().value_and_grad(lambda x: x + jnp.inf)(jnp.float32(1))[2]
    assert not finite


def test_integers_booleans_and_auxiliary_results_pass_through():
    parameters = {"w": jnp.float32(3), "n": jnp.int32(2), "on": jnp.bool(True)}

    def loss(p):
        return p["w"] * p["n"] * p["on"], {"seen": p["n"]}

    (value, aux), gradients, finite, _ = LossScale.create().value_and_grad(loss, has_aux=True)(parameters)
    assert value == 6 and aux == {"seen": 2} and finite and gradients["w"] == 2
    assert gradients["n"].dtype == gradients["on"].dtype == jax.dtypes.float0
    chex.assert_trees_all_equal(where_finite(jnp.bool(False), parameters, parameters), parameters)
    assert all_finite({"n": 1, "key": jax.random.key(0)}) and not all_finite([jnp.ones(1), jnp.array([0, jnp.inf])])


def test_gradients_in_several_arguments_of_half_precision_come_in_float32():
    x, y = jnp.float16(2), jnp.ones(2, jnp.bfloat16)
    _, gradients, _, _ = LossScale.create(4.0).value_and_grad(lambda x, y: jnp.sum(x * y.astype(x.dtype)), (0, 1))(x, y)
    assert [g.dtype for g in gradients] == [jnp.float32] * 2
    np.testing.assert_array_equal(gradients[0], 2)
    np.testing.assert_array_equal(gradients[1], [2, 2])


def test_a_static_scale_stays_and_skips():
    scale = LossScale.static(128.0)
    for finite in (True, False, True):
        scale = scale.update(jnp.bool(finite))
        assert scale.value == 128
    assert LossScale.static(128.0).update(jnp.bool(False)).skipped_steps == 1


def train(loss, scale, x, steps):
    def step(carry, _):
        x, scale = carry
        _, gradients, finite, scale = scale.value_and_grad(loss)(x)
        return (where_finite(finite, x - 0.1 * gradients, x), scale), (finite, scale.value)

    return jax.lax.scan(step, (x, scale), length=steps)


def test_it_runs_in_scans_under_vmap_and_with_donated_buffers():
    run = functools.partial(train, lambda x: jnp.sum(jnp.square(x.astype(jnp.float16))).astype(jnp.float32), steps=6)
    scale = LossScale.create(initial=2.0**17, interval=3)
    xs = jnp.array([[1.0, 2.0], [4.0, 1.0]])
    one_by_one = [run(scale, x) for x in xs]
    together = jax.jit(jax.vmap(run, (None, 0)))(scale, xs)
    for i, alone in enumerate(one_by_one):
        chex.assert_trees_all_close(jax.tree.map(lambda a, i=i: a[i], together), alone, rtol=1e-3)
    finite = together[1][0]
    # The initial scale of 2^17 overflows.
    assert not finite[:, 0].any() and finite[:, -1].all()
    donating = jax.jit(run, donate_argnums=(0, 1))
    chex.assert_trees_all_close(
        donating(LossScale.create(initial=2.0**17, interval=3), xs[0] + 0), one_by_one[0], rtol=1e-3
    )


def test_in_a_chain_of_optax_it_is_the_plain_optimizer_and_skips_what_is_not_finite():
    plain = optax.chain(optax.clip(1.0), optax.adam(0.1))
    optimizer = loss_scaled(plain, LossScale.create(initial=2.0**10, interval=2))
    parameters, wanted = jnp.ones(2), jnp.ones(2)
    state, plain_state = optimizer.init(parameters), plain.init(wanted)
    loss = lambda p, c: jnp.sum(c * p**2)  # noqa: E731

    @jax.jit
    def step(parameters, state, c):
        gradients = jax.grad(lambda p: state.loss_scale.scale(loss(p, c)))(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for c in (1.0, jnp.inf, 2.0):
        before = state
        parameters, state = step(parameters, state, c)
        if c == jnp.inf:
            chex.assert_trees_all_equal(state.inner, before.inner)
            assert state.loss_scale.value == 2.0**9
        else:
            updates, plain_state = plain.update(jax.grad(loss)(wanted, c), plain_state, wanted)
            wanted = optax.apply_updates(wanted, updates)
        chex.assert_trees_all_close(parameters, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(initial=0.5), "initial is 0.5; wants a finite number of at least the minimum"),
        (dict(initial=np.inf), "initial is inf"),
        (dict(growth=0.5), "growth is 0.5; wants a finite number of at least 1"),
        (dict(backoff=0.0), "backoff is 0.0; wants a number above 0"),
        (dict(interval=0), "interval is 0; wants a whole number above 0"),
        (dict(interval=1.5), "interval is 1.5"),
        (dict(minimum=0.0), "minimum is 0.0; wants a finite number above 0"),
    ],
)
def test_no_scale_is_refused(options, message):
    with pytest.raises(ValueError, match=f"LossScale.create: {message}"):
        LossScale.create(**options)


def test_a_dtype_that_is_not_floating_is_refused():
    with pytest.raises(TypeError, match="Policy: compute_dtype is 'int32'; wants a floating dtype"):
        Policy("float32", "int32", "float32")


def test_what_differs_in_shape_or_dtype_is_named():
    with pytest.raises(TypeError, match=r"where_finite: new\['w'\] and old\['w'\] are float32\[2\] and float16\[2\]"):
        where_finite(jnp.bool(True), {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.float16)})
    with pytest.raises(ValueError, match="where_finite: new and old have the structures"):
        where_finite(jnp.bool(True), {"w": 1}, {"v": 1})
