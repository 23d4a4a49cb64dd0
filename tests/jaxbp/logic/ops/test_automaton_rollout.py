import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, in_float64, on_the_cpu, put

import jaxbp
from experiments.bench.peers.published_automaton import tick as published_tick
from jaxbp.logic.gates import PARAMETERS, PASS_THROUGH
from jaxbp.logic.ops import _automaton_kernels

KEY = jax.random.key(7)


@functools.cache
def automaton(periodic=False):
    return jaxbp.Automaton.create(2, 1, [8, 4, 2], [3, 2], periodic, seed=1)


@functools.cache
def deeper():
    return jaxbp.Automaton.create(2, 2, [8, 4, 2], [6, 3, 2], False, seed=1)


def operands(automaton, shape=(2, 3, 4), parametrization="softmax", seed=0, pass_through=0.0):
    """With a large `pass_through`, most gates pass on an input. Otherwise, gradients vanish over many ticks."""
    random, parameters = np.random.default_rng(seed), PARAMETERS[parametrization]
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    bias = np.float32(pass_through) * (np.arange(parameters) == PASS_THROUGH)
    logits = (
        [put(bias + normal(automaton.kernels, w.gates, parameters)) for w in automaton.perception],
        [put(bias + normal(w.gates, parameters)) for w in automaton.update],
    )
    shape = (*shape, automaton.channels)
    return logits, put(random.uniform(size=shape).astype(np.float32)), put(normal(*shape))


def gradients(rollout, logits, state, dlast):
    @jax.jit
    def run(logits, state, dlast):
        last, vjp = jax.vjp(rollout, logits, state)
        return last, vjp(dlast)

    return run(logits, state, dlast)


def published(automaton, shape, steps, fire_rate=1.0):
    keys = [jax.random.fold_in(KEY, t) for t in range(steps)]
    fires = jnp.stack([jax.random.bernoulli(key, fire_rate, shape) for key in keys])

    def rollout(logits, state):
        return jax.lax.scan(lambda s, f: (published_tick(logits, automaton, s, f), None), state, fires)[0]

    return rollout


@pytest.mark.parametrize(
    "wires, shape, fire_rate",
    [
        (automaton(periodic=True), (1, 3, 5), 0.6),
        (automaton(periodic=True), (2, 1, 1), 1.0),
        (deeper(), (2, 3, 4), 1.0),
    ],
    ids=["fire rate", "one cell", "deeper"],
)
def test_gradients_are_those_of_the_published_formulation_in_float64(wires, shape, fire_rate):
    arrays = operands(wires, shape)
    want = in_float64(functools.partial(gradients, published(wires, shape, 2, fire_rate)), *arrays)
    for memory in ("all", "logarithmic") if fire_rate < 1 else ("states",):
        options = dict(key=KEY, fire_rate=fire_rate, memory=memory, implementation="xla")
        got = gradients(lambda p, s, o=options: jaxbp.automaton_rollout(p, wires, s, 2, **o), *arrays)
        assert_close(got, want, "float32")


def test_twenty_ticks_are_those_of_the_published_formulation_in_float64():
    wires, arrays = automaton(), operands(automaton(), pass_through=4.0)
    want = in_float64(functools.partial(gradients, published(wires, (2, 3, 4), 20)), *arrays)
    got = gradients(lambda p, s: jaxbp.automaton_rollout(p, wires, s, 20, implementation="xla"), *arrays)
    assert_close(got, want, 1e-4)


def gradients_of_rollout(steps, memory="states", **options):
    wires = automaton(True)

    @jax.jit
    def run(logits, state, dlast):
        rollout = functools.partial(jaxbp.automaton_rollout, memory=memory, **options)
        last, vjp = jax.vjp(lambda logits, state: rollout(logits, wires, state, steps), logits, state)
        backward = jaxbp.automaton_rollout_backward(dlast, logits, wires, state, steps, memory=memory, **options)
        return last, vjp(dlast), backward

    with on_the_cpu():
        return run(*operands(wires))


@functools.cache
def gradients_of_formula():
    return gradients_of_rollout(2, key=KEY, fire_rate=0.7, implementation="xla")[:2]


@pytest.mark.parametrize("implementation", ["pallas", "autodiff", None])
def test_implementations_agree(implementation):
    found = gradients_of_rollout(2, key=KEY, fire_rate=0.7, implementation=implementation)
    last, want = gradients_of_formula()
    assert_close(found, (last, want, want), "float32")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older versions trace a backward in another context")
def test_the_forward_and_the_backward_trace_the_preparation_for_the_kernels_once(monkeypatch):
    calls = []
    rows = _automaton_kernels.perceived_rows
    monkeypatch.setattr(_automaton_kernels, "perceived_rows", lambda *sizes: calls.append(sizes) or rows(*sizes))
    # No other test has this shape, so JAX has not traced it before.
    arrays = operands(automaton(), (5, 1, 3))

    def rollout(logits, state):
        return jaxbp.automaton_rollout(logits, automaton(), state, steps=1, implementation="pallas")

    jax.eval_shape(functools.partial(gradients, rollout), *arrays)
    assert len(calls) == 2  # one per kernel


def test_a_step_is_a_rollout_of_one():
    wires = automaton()
    logits, state, dlast = operands(wires, parametrization="input_wise")
    options = dict(fire_rate=0.5, parametrization="input_wise")
    first_key = jax.random.fold_in(KEY, 0)
    step = gradients(lambda p, s: jaxbp.automaton_step(p, wires, s, key=first_key, **options), logits, state, dlast)
    rollout = gradients(lambda p, s: jaxbp.automaton_rollout(p, wires, s, 1, key=KEY, **options), logits, state, dlast)
    assert_close(step, rollout, 1e-7)
    of_step = functools.partial(jaxbp.automaton_step_backward, key=first_key, **options)
    of_rollout = functools.partial(jaxbp.automaton_rollout_backward, steps=1, key=KEY, **options)
    both = jax.jit(lambda d, p, s: [backward(d, p, wires, s) for backward in (of_step, of_rollout)])
    for found in both(dlast, logits, state):
        assert_close(found, step[1], "float32")


def test_no_step_is_the_state_itself():
    logits, state, dlast = operands(automaton())
    last, (dlogits, dstate) = gradients(
        lambda p, s: jaxbp.automaton_rollout(p, automaton(), s, 0), logits, state, dlast
    )
    assert_close((last, dstate), (state, dlast), 1e-12)
    assert not any(map(jnp.any, jax.tree.leaves(dlogits)))


def test_a_batch_is_its_grids_one_by_one():
    logits, state, _ = operands(automaton())
    together = jaxbp.automaton_rollout(logits, automaton(), state, 4)
    one_by_one = [jaxbp.automaton_rollout(logits, automaton(), state[i : i + 1], 4) for i in range(2)]
    assert_close(together, jnp.concatenate(one_by_one), 1e-6)
    mapped = jax.vmap(lambda s: jaxbp.automaton_rollout(logits, automaton(), s[None], 4)[0])(state)
    assert_close(together, mapped, 1e-6)


def test_cells_that_do_not_fire_keep_their_state():
    logits, state, dlast = operands(automaton())
    options = dict(key=KEY, fire_rate=0.0)
    last, (_, dstate) = gradients(
        lambda p, s: jaxbp.automaton_rollout(p, automaton(), s, 3, **options), logits, state, dlast
    )
    assert_close((last, dstate), (state, dlast), 1e-12)


@pytest.mark.parametrize("implementation", ["xla", "autodiff"])
def test_rounding_errors_do_not_grow(implementation):
    """The XNOR of 1 + e with itself is about 1 + 2 e, which would grow to infinity."""
    wires = automaton(periodic=True)
    xnor = lambda *shape: jnp.full((*shape, 16), -1e3).at[..., 9].set(1e3)  # noqa: E731
    logits = [xnor(wires.kernels, w.gates) for w in wires.perception], [xnor(w.gates) for w in wires.update]
    ones = jnp.ones((1, 2, 3, wires.channels))
    last = jaxbp.automaton_rollout(logits, wires, ones + 1e-6, 10, implementation=implementation)
    assert (last == 1).all()
    step_backward = functools.partial(jaxbp.automaton_step_backward, ones, logits, wires, implementation=implementation)
    want, got = (step_backward(state)[1] for state in (ones, ones + 1e-6))
    assert (want != 0).all()
    assert_close(got, want, 1e-3)


@functools.cache
def rounded_gradients(rounding_rate):
    return _rounding_loop(rounding_rate, *operands(automaton(True)))


@jax.jit
def _rounding_loop(rounding_rate, logits, state, dlast):
    def loop(logits, state):
        for t in range(2):
            key = jax.random.fold_in(KEY, t)
            chosen = jax.random.uniform(jax.random.fold_in(key, 1), state.shape, jnp.float32) < rounding_rate
            state = jnp.where(chosen, state + jax.lax.stop_gradient(jnp.round(state) - state), state)
            options = dict(key=key, fire_rate=0.6, implementation="xla")
            state = jaxbp.automaton_step(logits, automaton(True), state, **options)
        return state

    last, vjp = jax.vjp(loop, logits, state)
    return last, vjp(dlast)


ROUNDED_MEMORIES = [("pallas", "states"), ("xla", 2), ("autodiff", "states")]
"""Policies for what a scan of ticks keeps. They do not change how a tick is computed."""


@pytest.mark.parametrize(("implementation", "memory"), ROUNDED_MEMORIES)
def test_values_are_rounded_before_each_tick_straight_through(implementation, memory):
    options = dict(key=KEY, fire_rate=0.6, rounding_rate=0.5, implementation=implementation)
    last, want = rounded_gradients(0.5)
    assert_close(gradients_of_rollout(2, memory, **options), (last, want, want), "float32")


def test_half_precision_states_are_rounded_where_others_are():
    logits, state, _ = operands(automaton())
    state = state.astype(jnp.bfloat16)
    rollout = functools.partial(jaxbp.automaton_rollout, key=KEY, fire_rate=0.0, rounding_rate=0.5)
    half, full = (rollout(logits, automaton(), s, 1) for s in (state, state.astype(jnp.float32)))
    assert half.dtype == jnp.bfloat16
    assert jnp.array_equal(half, full) and 0 < jnp.sum(half != state) < state.size


def test_at_a_rounding_rate_of_0_nothing_is_drawn_or_changed():
    logits, state, dlast = operands(automaton())

    def run(**options):
        rollout = functools.partial(jaxbp.automaton_rollout, key=KEY, fire_rate=0.6, **options)
        return gradients(lambda p, s: rollout(p, automaton(), s, 2), logits, state, dlast)

    assert jax.tree.all(jax.tree.map(np.array_equal, run(rounding_rate=jnp.zeros(())), run()))
    rollout = functools.partial(jaxbp.automaton_rollout, logits, automaton(), state, 2, implementation="xla")
    programs = {str(jax.make_jaxpr(functools.partial(rollout, **options))()) for options in ({}, dict(rounding_rate=0))}
    assert len(programs) == 1


def test_at_a_rounding_rate_of_1_all_values_are_rounded():
    logits, state, dlast = operands(automaton())
    options = dict(key=KEY, fire_rate=0.0, rounding_rate=1.0)
    last, (_, dstate) = gradients(
        lambda p, s: jaxbp.automaton_rollout(p, automaton(), s, 3, **options), logits, state, dlast
    )
    assert jnp.array_equal(last, jnp.round(state)) and jnp.array_equal(dstate, dlast)


def test_which_cells_fire_does_not_depend_on_the_rounding():
    logits, state, _ = operands(automaton())
    rollout = functools.partial(jaxbp.automaton_rollout, key=KEY, fire_rate=0.5)
    last = [rollout(logits, automaton(), jnp.round(state), 1, rounding_rate=rate) for rate in (0.0, 0.5)]
    assert jnp.array_equal(*last)


@pytest.mark.parametrize("implementation", ["pallas", "xla", "autodiff"])
def test_a_rounding_rate_may_be_traced_and_has_no_gradient(implementation):
    logits, state, dlast = operands(automaton(True))
    options = dict(key=KEY, fire_rate=0.6, implementation=implementation)

    @jax.jit
    def gradient(rate):
        def loss(logits, state, rate):
            last = jaxbp.automaton_rollout(logits, automaton(True), state, 2, rounding_rate=rate, **options)
            return jnp.sum(dlast * last)

        return jax.grad(loss, (0, 1, 2))(logits, state, rate)

    with on_the_cpu():
        for rate in (0.25, 0.75):
            *got, of_rate = gradient(rate)
            assert of_rate == 0
            assert_close(tuple(got), rounded_gradients(rate)[1], "float32")


def test_half_precision_states_are_computed_in_float32():
    logits, state, _ = operands(automaton())
    half = state.astype(jnp.bfloat16)
    got = jaxbp.automaton_step(logits, automaton(), half)
    assert got.dtype == jnp.bfloat16
    assert_close(got, jaxbp.automaton_step(logits, automaton(), half.astype(jnp.float32)), "bfloat16")


def test_kept_memory_grows_as_the_policy_says():
    wires, (logits, state, _) = deeper(), operands(deeper(), (4, 32, 32))

    def states(memory, steps):
        rollout = functools.partial(jaxbp.automaton_rollout, memory=memory, implementation="xla")
        gradient = jax.jit(jax.grad(lambda p: jnp.sum(rollout(p, wires, state, steps))))
        return gradient.lower(logits).compile().memory_analysis().temp_size_in_bytes / state.nbytes

    def growth(memory):
        return states(memory, 256) - states(memory, 64)

    assert growth("states") == pytest.approx(256 - 64, abs=2)
    assert growth("logarithmic") <= 2 * 2 + 2


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(automaton=3), TypeError, "automaton is a int; wants a jaxbp.Automaton"),
        (
            dict(state=jnp.ones((2, 3, 2))),
            ValueError,
            r"state has shape \(2, 3, 2\); wants \(batch, height, width, 2\)",
        ),
        (dict(state=jnp.ones((2, 3, 3, 2), int)), TypeError, "state has dtype int32; wants a floating dtype"),
        (dict(logits=([], [])), ValueError, "logits is not a pair of lists with one array per layer; wants 3 arrays"),
        (dict(steps=-1), ValueError, "steps is -1; wants an int of at least 0"),
        (dict(steps=True), ValueError, "steps is True; wants an int of at least 0"),
        (dict(memory="some"), ValueError, "memory is 'some'; wants 'all', 'states', 'logarithmic', or"),
        (dict(fire_rate=0.5), ValueError, "key is None and fire_rate is 0.5; wants a key"),
        (dict(fire_rate=1.5, key=KEY), ValueError, r"fire_rate is 1.5; wants a number in \[0.0, 1.0\]"),
        (dict(rounding_rate=-0.1, key=KEY), ValueError, r"rounding_rate is -0.1; wants a number in \[0.0, 1.0\]"),
        (dict(rounding_rate=1.5, key=KEY), ValueError, r"rounding_rate is 1.5; wants a number in \[0.0, 1.0\]"),
        (dict(rounding_rate="a", key=KEY), ValueError, r"rounding_rate is 'a'; wants a number in \[0.0, 1.0\]"),
        (dict(rounding_rate=np.nan, key=KEY), ValueError, r"rounding_rate is nan; wants a number in \[0.0, 1.0\]"),
        (dict(rounding_rate=jnp.float32(2), key=KEY), ValueError, r"rounding_rate is 2.0; wants a number in"),
        (
            dict(rounding_rate=jnp.ones(3), key=KEY),
            ValueError,
            r"rounding_rate has dtype float32 and shape \(3,\); wants a num",
        ),
        (dict(rounding_rate=0.5), ValueError, "key is None and rounding_rate is 0.5; wants a key, which"),
        (dict(rounding_rate=jnp.zeros(())), ValueError, "key is None and rounding_rate is an array; wants a key"),
        (dict(parametrization="walsh"), ValueError, r"logits\[0\]\[0\] has shape \(1, 8, 16\); wants \(1, 8, 4\)"),
    ],
)
def test_bad_input_is_named(change, error, message):
    logits, state, _ = operands(automaton())
    arguments = dict(logits=logits, automaton=automaton(), state=state, steps=2) | change
    with pytest.raises(error, match=f"automaton_rollout: {message}"):
        jaxbp.automaton_rollout(**arguments)


@pytest.mark.parametrize("key", [0, jnp.zeros(3), jax.random.split(KEY)])
def test_what_is_no_key_is_named(key):
    logits, state, _ = operands(automaton())
    with pytest.raises(TypeError, match=r"automaton_step: key (is a|has) .*; wants one key, say jax.random.key\(0\)"):
        jaxbp.automaton_step(logits, automaton(), state, key=key, fire_rate=0.5)


def test_an_empty_batch():
    logits, state, _ = operands(automaton(), (0, 3, 4))
    last, (dlogits, dstate) = gradients(
        lambda p, s: jaxbp.automaton_rollout(p, automaton(), s, 2), logits, state, state
    )
    assert last.shape == dstate.shape == state.shape
    assert not any(map(jnp.any, jax.tree.leaves(dlogits)))
