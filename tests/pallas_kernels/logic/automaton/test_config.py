import jax.numpy as jnp
import pytest

import jaxbp
from jaxbp.logic.ops import _automaton_kernels as arrays_of
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.logic.automaton import kernels

CHECKERBOARD = (8, 16, [8, 4, 2], [256] * 10 + [128, 64, 32, 16, 8, 8])
LIZARD = (128, 4, [8, 4, 2, 1], [512] * 8 + [256, 128])


def test_cells_at_a_time_are_as_many_as_fit_and_keep_all_programs_busy():
    with targeting(HOPPER):
        small = jaxbp.Automaton.create(*CHECKERBOARD, False, seed=0)
        one_group = kernels.tick_backward.heuristic(plan=arrays_of.plan(small, (2, 16, 16, 8)))
        assert (one_group.cells, one_group.totals_in_registers) == (4, False)
        several = arrays_of.plan(small, (4, 32, 32, 8))
        groups, forward = (kernel.heuristic(plan=several) for kernel in (kernels.tick_backward, kernels.tick))
        assert (groups.cells, groups.totals_in_registers) == (8, True)
        assert forward.programs > HOPPER.multiprocessors >= groups.programs
        assert forward.programs * forward.cells * 2 == several.cells
        lizard = jaxbp.Automaton.create(*LIZARD, True, seed=0)
        large = kernels.tick_backward.heuristic(plan=arrays_of.plan(lizard, (1, 20, 20, 128)))
        assert large.cells < 4 and not large.totals_in_registers


def test_says_what_does_not_fit():
    with targeting(HOPPER):
        wide = jaxbp.Automaton.create(256, 16, [8, 4, 2], [4352, 2176, 1088, 544, 272, 256], True, seed=0)
        plan = arrays_of.plan(wide, (1, 4, 4, 256))
        assert "do not fit into shared memory" in kernels.tick_backward.unsupported(plan=plan)
        state = jnp.zeros((1, 4, 4, 256))
        logits = (
            [jnp.zeros((16, w.gates, 16)) for w in wide.perception],
            [jnp.zeros((w.gates, 16)) for w in wide.update],
        )
        with pytest.raises(NotImplementedError, match="automaton_step: implementation='pallas' does not take"):
            jaxbp.automaton_step(logits, wide, state, implementation="pallas")
