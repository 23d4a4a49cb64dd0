import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, cuda_program, in_float64, put

import jaxbp
from jaxbp.logic.gates import softmax
from jaxbp.logic.ops import _automaton_formula as formula
from jaxbp.logic.ops import _automaton_kernels as arrays_of
from pallas_kernels.core.device import BLACKWELL, HOPPER, targeting
from pallas_kernels.core.simulator import simulated
from pallas_kernels.logic import automaton as kernels
from pallas_kernels.logic.automaton import Config

PUBLISHED = dict(perception_kernels=16, perception_widths=[8, 4, 2], update_widths=[256] * 10 + [128, 64, 32, 16, 8, 8])
SHALLOW = PUBLISHED | dict(update_widths=[256, 256, 128, 64, 32, 16, 8, 8])  # more layers would repeat the same code
CHECKERBOARD = (8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8])
LIZARD = (128, 4, [8, 4, 2, 1], [512] * 8 + [256, 128])


def operands(channels, kernels, perception, update, periodic, shape, fires, seed=0):
    random = np.random.default_rng(seed)
    normal = lambda *shape: put(random.standard_normal(shape).astype(np.float32))  # noqa: E731
    automaton = jaxbp.Automaton.create(channels, kernels, perception, update, periodic, seed=1)
    # With arbitrary coefficients, the results of many layers would overflow.
    of_gates = jax.jit(lambda logits: [jnp.moveaxis(softmax(a), -1, 0) for a in logits])
    coefficients = (
        of_gates([normal(w.gates, kernels, 16) for w in automaton.perception]),
        of_gates([normal(w.gates, 16) for w in automaton.update]),
    )
    shape = (*shape, channels)
    mask = put(random.uniform(size=shape[:-1]) < 0.6) if fires else None
    return automaton, coefficients, put(random.uniform(size=shape).astype(np.float32)), mask, normal(*shape)


def reference(automaton, coefficients, state, fires, dnew):
    def run(coefficients, state, dnew):
        prepared = formula.prepare(coefficients, automaton, state.shape)
        state, dnew = formula.enter(state), formula.enter(dnew)
        dstate, dc = formula.tick_backward(prepared, dnew, formula.zeros(prepared), state, fires)
        return formula.leave(formula.tick(prepared, state, fires), None), formula.leave(dstate, None), dc

    return in_float64(jax.jit(run), coefficients, state, dnew)


def by_kernels(automaton, coefficients, state, fires, dnew, config=None):
    """Launch the backward twice, so that the coefficients' gradients add up."""
    prepared, sizes = (
        arrays_of.prepare(coefficients, automaton, state.shape),
        arrays_of.sizes_of(automaton, state.shape),
    )
    flat, mask, options = arrays_of.enter(state), arrays_of._flat(fires), dict(sizes=sizes)
    if config:
        options["config"] = config
    new = kernels.tick(prepared.lanes, prepared.wires, flat, mask, **options)
    total = jnp.zeros((config.programs, sizes.gates, 4), jnp.float32) if config else arrays_of.zeros(prepared)
    for _ in range(2):
        gradient = arrays_of.enter_gradient(prepared, dnew)
        *gradient, total = kernels.tick_backward(
            prepared.lanes, prepared.backward_wires, prepared.consumers, flat, mask, *gradient, total, **options
        )
    dstate = arrays_of.leave_gradient(prepared, gradient, jnp.float32)
    dc = jax.tree.map(lambda a: a / 2, arrays_of.finish(prepared, total))
    return arrays_of.leave(new, state.shape), dstate, dc


def jitted(automaton, config=None):
    return jax.jit(lambda *arrays: by_kernels(automaton, *arrays, config))


@pytest.mark.parametrize(
    "config, grid",
    [
        (Config(2, 1, lanes=128, lookahead=3, warpgroups=1), (1, 1, 3)),
        (Config(8, 1, lanes=128, lookahead=2, warpgroups=1, totals_in_registers=True), (1, 3, 3)),
    ],
    ids=["two cells", "two slices"],
)
def test_simulated_kernels_are_the_formula(config, grid):
    """Two warpgroups would race, because the simulator treats a gather as a read of all rows."""
    arguments = operands(8, 3, [8, 4, 2], [32, 16, 8], True, grid, True)
    assert (arguments[0].orders[0][0] != np.arange(32)).any()
    with simulated():
        got = jax.block_until_ready(jitted(arguments[0], config)(*arguments[1:]))
    assert_close(got, reference(*arguments), "float32")


@pytest.mark.parametrize(
    "device, grid",
    [(HOPPER, (2, 16, 16, 8)), (HOPPER, (4, 32, 32, 8)), (BLACKWELL, (2, 16, 16, 8))],
    ids=["9.0", "9.0, several groups", "10.0"],
)
def test_the_published_automaton_with_fewer_layers_lowers_for_cuda(device, grid):
    with targeting(device):
        automaton = jaxbp.Automaton.create(8, periodic=False, seed=0, **SHALLOW)
        logits = (
            [jax.ShapeDtypeStruct((16, w.gates, 16), jnp.float32) for w in automaton.perception],
            [jax.ShapeDtypeStruct((w.gates, 16), jnp.float32) for w in automaton.update],
        )
        state = jax.ShapeDtypeStruct(grid, jnp.float32)
        rollout = functools.partial(jaxbp.automaton_rollout, implementation="pallas")
        gradient = jax.grad(lambda p, s: jnp.sum(rollout(p, automaton, s, 1)))
        text = cuda_program(gradient, logits, state)
    assert "automaton_tick_backward" in text
    assert "scatter" not in text.replace("wires", "")


def test_cells_at_a_time_are_as_many_as_fit_and_keep_all_programs_busy():
    with targeting(HOPPER):
        small = jaxbp.Automaton.create(*CHECKERBOARD, False, seed=0)
        one_group = kernels.tick_backward.plan(sizes=arrays_of.sizes_of(small, (2, 16, 16, 8)))
        assert (one_group.cells, one_group.totals_in_registers) == (4, False)
        several = arrays_of.sizes_of(small, (4, 32, 32, 8))
        groups, forward = (kernel.plan(sizes=several) for kernel in (kernels.tick_backward, kernels.tick))
        assert (groups.cells, groups.totals_in_registers) == (8, True)
        assert forward.programs > HOPPER.multiprocessors >= groups.programs
        assert forward.programs * forward.cells * 2 == several.cells
        lizard = jaxbp.Automaton.create(*LIZARD, True, seed=0)
        large = kernels.tick_backward.plan(sizes=arrays_of.sizes_of(lizard, (1, 20, 20, 128)))
        assert large.cells < 4 and not large.totals_in_registers


def test_says_what_does_not_fit():
    with targeting(HOPPER):
        wide = jaxbp.Automaton.create(256, 16, [8, 4, 2], [4352, 2176, 1088, 544, 272, 256], True, seed=0)
        sizes = arrays_of.sizes_of(wide, (1, 4, 4, 256))
        assert "do not fit into shared memory" in kernels.tick_backward.unsupported(sizes=sizes)
        state = jnp.zeros((1, 4, 4, 256))
        logits = (
            [jnp.zeros((16, w.gates, 16)) for w in wide.perception],
            [jnp.zeros((w.gates, 16)) for w in wide.update],
        )
        with pytest.raises(NotImplementedError, match="automaton_step: implementation='pallas' does not take"):
            jaxbp.automaton_step(logits, wide, state, implementation="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        (8, 16, [8, 4, 2], PUBLISHED["update_widths"], False, (2, 16, 16), False),
        (8, 16, [8, 4, 2], PUBLISHED["update_widths"], True, (3, 13, 17), True),
        (8, 16, [8, 4, 2], PUBLISHED["update_widths"], True, (5, 32, 32), False),
        (1, 16, [8, 4, 2, 1], [128] * 3 + [64, 32, 16, 8, 4, 2, 1], True, (20, 3, 3), False),
        (128, 4, [8, 4, 2, 1], [512] * 2 + [256, 128], True, (1, 20, 20), False),
        (3, 2, [8, 4], [14, 7, 5, 3], False, (1, 1, 1), True),
    ],
    ids=["checkerboard", "asynchronous", "several groups", "life", "lizard", "one cell"],
)
def test_kernels_are_the_formula_on_a_gpu(sizes):
    arguments = operands(*sizes)
    run = jitted(arguments[0])
    got = run(*arguments[1:])
    assert_close(got, reference(*arguments), "float32")
    for _ in range(100):
        again = run(*arguments[1:])
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True))
