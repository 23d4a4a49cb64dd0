import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal
from jax.test_util import check_grads

import jaxbp
from jaxbp.training.checkpointing import _binomial, _schedule

POLICIES = ["states", 1, 3, 50, "logarithmic"]


def walk(weights, memory, scan=None, **options):
    def body(carry, x):
        s, count = carry
        s = jnp.tanh(weights @ s + 0.5 * x["a"])
        return (s, count + 1), {"sum": s.sum() * x["a"].sum(), "i": x["i"] + count}

    def run(s, xs):
        scan_ = scan or functools.partial(jaxbp.checkpointed_scan, memory=memory)
        (s, count), ys = scan_(body, (s, jnp.int32(0)), {"a": xs, "i": jnp.arange(len(xs))}, **options)
        return jnp.sum(s**2) + jnp.sum(ys["sum"] ** 2), (count, ys["i"])

    return run


def value_and_gradients(memory, weights, s, xs, scan=None, **options):
    def of_all(weights, s, xs):
        return walk(weights, memory, scan, **options)(s, xs)

    return jax.jit(jax.value_and_grad(of_all, (0, 1, 2), has_aux=True))(weights, s, xs)


@pytest.mark.parametrize("steps", [1, 7, 20])
def test_every_policy_has_the_scans_values_and_gradients(steps):
    arrays = normal((3, 3), (3,), (steps, 3))
    want = value_and_gradients(None, *arrays, scan=jax.lax.scan)
    for memory in ["all", *POLICIES]:
        assert_close(value_and_gradients(memory, *arrays), want, "float32")


@pytest.mark.parametrize("memory", ["all", *POLICIES])
def test_in_reverse_too(memory):
    arrays = normal((3, 3), (3,), (7, 3))
    want = value_and_gradients(None, *arrays, scan=jax.lax.scan, reverse=True)
    assert_close(value_and_gradients(memory, *arrays, reverse=True), want, "float32")


def test_second_derivatives():
    with jax.enable_x64(True):
        weights, s, xs = (a.astype(jnp.float64) / 2 for a in normal((3, 3), (3,), (5, 3)))
        for memory in (2, "logarithmic"):

            def of_all(weights, s, xs, memory=memory):
                return walk(weights, memory)(s, xs)[0]

            check_grads(jax.jit(of_all), (weights, s, xs), order=2, modes=["rev"])


def test_kept_bytes_are_those_of_the_table():
    """The compiled gradient may differ by a few arrays of one step."""
    size, steps = 2**14, 64

    def loss(memory, w, s):
        last, _ = jaxbp.checkpointed_scan(lambda s, _: (jnp.sin(w * s), None), s, length=steps, memory=memory)
        return jnp.sum(last)

    def states(memory):
        s = jax.ShapeDtypeStruct((size,), jnp.float32)
        compiled = jax.jit(jax.grad(functools.partial(loss, memory), (0, 1))).lower(s, s).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * size)

    few = 8
    assert states("all") > 2 * steps - few
    assert steps <= states("states") <= steps + few
    assert 16 <= states(8) <= 16 + few
    assert states("logarithmic") <= 2 * math.log2(steps) + few


def test_a_schedule_visits_all_segments_with_what_is_kept_then():
    for n in (*range(1, 40), 1000):
        slots = max(1, n.bit_length())
        visits, kept, times = _binomial(n, slots), {0: 0}, np.zeros(n, int)
        assert [segment for segment, *_ in visits] == list(range(n))[::-1]
        for segment, slot, start, stores in visits:
            assert kept[slot] == start
            times[start:segment] += 1
            kept |= {slot: i for i, slot in stores.items()}
        assert max(kept) < slots
        repeats = next(r for r in range(n + 1) if math.comb(slots - 1 + r, r) >= n)
        assert times.max() <= repeats


def test_a_schedules_arrays_fit_together():
    schedule = _schedule(100)
    segments, slots, starts, first = schedule.visits
    assert (segments >= starts).all()
    assert (slots < schedule.slots).all()
    assert first[-1] + segments[-1] - starts[-1] <= len(schedule.slots_on_the_way)


@pytest.mark.parametrize("memory", [0, -1, True, 2.0, "none"])
def test_refuses_unknown_policies(memory):
    with pytest.raises(ValueError, match=r"checkpointed_scan: memory is .*; wants 'all', 'states', 'logarithmic', or"):
        jaxbp.checkpointed_scan(lambda s, x: (s, x), 1.0, length=3, memory=memory)


def test_refuses_unclear_lengths():
    for xs, length in ((None, None), (jnp.ones(3), 4)):
        with pytest.raises(ValueError, match=r"checkpointed_scan: xs and length have .* steps; wants one number"):
            jaxbp.checkpointed_scan(lambda s, x: (s, x), 1.0, xs, length)


def test_refuses_xs_without_rows():
    with pytest.raises(ValueError, match=r"checkpointed_scan: xs has an array of shape \(\); wants arrays whose first"):
        jaxbp.checkpointed_scan(lambda s, x: (s, x), 1.0, 3.0)


def stack(layers, width):
    weights = jax.random.normal(jax.random.key(0), (layers, width, width)) / 4
    return weights, jax.random.normal(jax.random.key(1), (1024, width))


def loss_of(weights, x, memory):
    layers = [lambda x, w=w: jnp.tanh(x @ w) for w in weights]
    return jnp.sum(jnp.square(jaxbp.checkpointed(layers, memory)(x)))


@pytest.mark.parametrize("memory", ["all", "states", 1, 3, 100, "logarithmic", None])
def test_layers_have_their_values_and_gradients_under_every_policy(memory):
    weights, x = stack(7, 4)
    value, gradients = jax.value_and_grad(loss_of, (0, 1))(weights, x, memory)
    wanted = x
    for w in weights:
        wanted = jnp.tanh(wanted @ w)
    np.testing.assert_allclose(value, jnp.sum(jnp.square(wanted)), rtol=1e-5)
    plain = jax.grad(loss_of, (0, 1))(weights, x, "all")
    for ours, theirs in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("memory", "states"), [("states", 64), (4, 64 / 4 + 4), (None, 8 + 8), ("logarithmic", 6 + 2)])
def test_64_layers_need_the_memory_that_is_documented(memory, states):
    weights, x = stack(64, 8)
    compiled = jax.jit(jax.grad(loss_of), static_argnums=2).lower(weights, x, memory).compile()
    assert states <= compiled.memory_analysis().temp_size_in_bytes / x.nbytes <= states + 2


def test_layers_that_are_none_are_named():
    with pytest.raises(TypeError, match="checkpointed_scan: f is 3; wants a function"):
        jaxbp.checkpointed_scan(3, 0.0, jnp.ones(2))
    with pytest.raises(TypeError, match="checkpointed: layers is 3; wants a list of functions"):
        jaxbp.checkpointed(3)
    with pytest.raises(ValueError, match="checkpointed: layers is empty"):
        jaxbp.checkpointed([])
    with pytest.raises(TypeError, match=r"checkpointed: layers\[1\] is a float"):
        jaxbp.checkpointed([jnp.sin, 2.0])
    with pytest.raises(ValueError, match="checkpointed: memory is 'sqrt'"):
        jaxbp.checkpointed([jnp.sin], "sqrt")
