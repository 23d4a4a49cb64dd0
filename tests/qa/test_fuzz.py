"""Compare random ops with float64. A long run draws other examples than the test suite:

    FUZZ_EXAMPLES=10000 python -m pytest tests/qa/test_fuzz.py -k right

Hypothesis shrinks a failing program and prints it. With `-n 1`, a crash does not end pytest.
"""

import dataclasses
import itertools
import os
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp.catalogue import CATALOGUE
from jaxbp.pairing import Pair
from pallas_kernels.core.device import kernels_run
from tests.qa.programs import DATA, Program, programs
from tests.qa.trial import Trial

ENTRIES = {entry.name: entry for entry in CATALOGUE}
LONG = int(os.environ.get("FUZZ_EXAMPLES", "0"))
RUN = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
CLEARED_EVERY = 200
_runs = itertools.count(1)


def failure(program: Program, seed: int, kinds: Sequence[str] = DATA) -> str | None:
    """Run a program once per kind of data. Return what is wrong, or None, also for arguments that a kernel refuses."""
    if next(_runs) % CLEARED_EVERY == 0:
        jax.clear_caches()
    trial, precision = None, "highest" if program.exact else "default"
    with jax.enable_x64(program.dtype == "float64"), jax.default_matmul_precision(precision):
        for kind in kinds:
            random = np.random.default_rng(seed)
            arguments = program.arguments(random, kind)
            try:
                trial = trial or Trial(program, arguments)
                cotangents = [random.standard_normal(y.shape).astype(y.dtype) for y in trial.results]
                if "_backward" not in program.entry.name:
                    cotangents = [program.masked(c, random, kind) for c in cotangents]
                if message := trial.run(arguments.floats, cotangents):
                    return f"{kind}: {message}"
            except NotImplementedError:
                if program.implementation != "pallas":
                    raise
                hypothesis.event("refused by a kernel")
                return None
    return None


# Seed 17 draws a second derivative of batch_norm that overflowed where the gradients of two uses of dy were added.
@pytest.mark.parametrize("seed", [0] if LONG else [17, *range(100, 139)])
def test_random_programs_are_right(seed):
    """In a short run, each seed draws the simplest program and a random one. In a longer run, Hypothesis would vary the
    random program, and most examples would have the same op."""

    @hypothesis.settings(RUN, max_examples=LONG or 2, derandomize=False)
    @hypothesis.given(programs(CATALOGUE, kernels_run()), st.integers(0, 2**16))
    def run(program, seed_of_data):
        assert failure(program, seed_of_data) is None

    if not LONG:
        hypothesis.seed(seed)(run)
    run()


def test_a_mistake_is_found():
    pair = Pair(jnp.tanh, {"xla": lambda dy, x: dy}, name="tanh")

    def tanh(x, *, implementation=None):
        return pair(x, implementation="autodiff" if implementation == "autodiff" else "xla")

    entry = dataclasses.replace(ENTRIES["tanh"], function=tanh)
    assert "(float64)" in failure(Program(entry, entry.small, "float32", "xla", "plain"), seed=0)


def test_a_failing_program_shrinks_and_is_printed():
    @hypothesis.settings(RUN, max_examples=100)
    @hypothesis.given(programs([ENTRIES["sum"]], False))
    def run(program):
        assert all(size < 3 for argument in program.case.arguments for size in argument.shape)

    with pytest.raises(AssertionError) as raised:
        run()
    printed = "\n".join(raised.value.__notes__)  # In CI, Hypothesis adds a line that reproduces the example.
    assert "sum(Argument(shape=(1, 1, 3)," in printed and "'float32', 'implementation': 'xla'" in printed


def found(strategy, count=60):
    drawn = []

    @hypothesis.settings(RUN, max_examples=count)
    @hypothesis.given(strategy)
    def run(program):
        drawn.append(program)

    run()
    return drawn


def test_shapes_options_dtypes_and_transformations_vary():
    drawn = found(programs([ENTRIES["sum"]], True))
    for field in ("case", "dtype", "implementation", "transformation", "exact"):
        assert len({str(getattr(program, field)) for program in drawn}) > 1
    assert len({program.case.options["axis"] for program in drawn}) > 5
    assert any(0 in argument.shape for program in drawn for argument in program.case.arguments)


def test_attention_with_one_query_one_head_no_length_and_nothing_valid_is_drawn():
    cases = [program.case for program in found(programs([ENTRIES["dot_product_attention"]], False), 200)]
    shapes = [(case.arguments[0].shape, case.arguments[1].shape) for case in cases]
    assert any(query[1] == 1 for query, _ in shapes) and any(query[2] == 1 for query, _ in shapes)
    assert any(query[2] > key[2] for query, key in shapes) and any(query[1] % 16 for query, _ in shapes)
    masks, lengths, ids = (
        [case.options[name] for case in cases if name in case.options]
        for name in ("mask", "key_value_seq_lengths", "query_segment_ids")
    )
    assert any(not mask.any() for mask in masks) and any(0 in length for length in lengths)
    assert any((np.diff(of) < 0).any() for of in ids)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1.2e-38), ("float64", 1.5e-154)])
def test_the_least_number_can_be_held_against_float64(dtype, least):
    entry = ENTRIES["kl_divergence"]
    program = Program(entry, entry.small, dtype, "xla", "plain")
    with jax.enable_x64(dtype == "float64"):
        drawn = [program.arguments(np.random.default_rng(seed), "with special values").floats[1] for seed in range(20)]
    assert np.min([p[p > 0].min() for p in drawn]) == pytest.approx(least, rel=0.1)


def drawn(name, kind, invalid_labels=False):
    program = Program(ENTRIES[name], ENTRIES[name].small, "float32", "xla", "plain", invalid_labels=invalid_labels)
    random = np.random.default_rng(0)
    arguments = program.arguments(random, kind)
    return arguments, program.masked(np.ones(ENTRIES[name].small.arguments[0].shape[:-1]), random, kind)


def test_numbers_at_the_edges_are_drawn():
    tiny = np.finfo(np.float32).tiny
    (x,) = drawn("logsumexp", "with subnormal numbers")[0].floats
    assert ((np.abs(x) > 0) & (np.abs(x) < tiny)).any()
    (x,) = drawn("logsumexp", "far from zero")[0].floats
    assert np.abs(x).min() > 900
    rows = [drawn("softmax", "with ruled-out entries")[0].floats[0].reshape(-1, 4)]
    assert (rows[0] == -np.inf).any() and np.isfinite(rows[0]).any()
    _, cotangent = drawn("softmax", "under a mask")
    assert 0 < cotangent.mean() < 1


def test_an_invalid_label_is_under_a_mask():
    arguments, cotangent = drawn("mlp_softmax_cross_entropy", "normal", invalid_labels=True)
    _, labels, *_ = arguments.leaves
    is_valid = (labels >= 0) & (labels < 4)
    assert not is_valid.all() and is_valid.any()
    np.testing.assert_array_equal(cotangent, is_valid)
