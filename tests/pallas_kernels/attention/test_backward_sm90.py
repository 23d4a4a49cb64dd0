import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import CASES, FEW_CTAS, arrays, can_simulate, masks_of, reference, structs
from helpers import cuda_program, on_the_cpu, poison_memory

from pallas_kernels.attention.backward_sm90 import backward, ranks
from pallas_kernels.attention.tiles import Known, Masks, Visits, visited_tiles
from pallas_kernels.core.device import targeting
from pallas_kernels.core.simulator import simulated

SIMULATED = {
    "causal": CASES["causal"],
    "mask, bias": CASES["mask, bias"],
    "rows of keys without a query": dict(queries=140, keys=400, is_causal=True),
    "tiles of queries without a key": dict(queries=400, keys=140, window=(20, 0)),
    "window, grouped heads, softcap, bfloat16": dict(
        batch=2, queries=200, keys=140, heads=2, head=128, window=(20, 5), softcap=2.0, dtype="bfloat16", atol=3e-2
    ),
}


def gradients(q, k, v, do, lse, delta, *, masks, **options):
    config = backward.plan(q, k, v, masks=masks, **options)
    _, visits = visited_tiles(masks, k.shape[1], config.tile)
    return backward(q, k, v, do, lse, delta, masks, visits, config=config, **options)


def arguments_and_exact(case, options):
    q, k, v, do = arrays(case)
    exact = reference(q, k, v, masks_of(case), do, **options)
    return (q, k, v, do, *(a.astype(np.float32) for a in (exact.lse, exact.delta))), (exact.dq, exact.dk, exact.dv)


def assert_near(found, exact, atol):
    for gradient, wanted in zip(found, exact, strict=True):
        assert np.abs(np.asarray(gradient, np.float64) - wanted).max() <= atol * max(1, np.abs(wanted).max())


@can_simulate
@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulator_finds_them_right(name):
    case = SIMULATED[name]
    options = dict(scale=0.3, softcap=case.get("softcap"))
    arguments, exact = arguments_and_exact(case, options)
    run = jax.jit(functools.partial(gradients, masks=masks_of(case), **options))
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        found = jax.block_until_ready(run(*arguments))
    assert_near(found, exact, case.get("atol", 4e-3))


def test_the_rank_of_a_visit_is_the_number_of_later_rows_that_visit_the_tile():
    # Row 0 visits all tiles, row 1 the tiles 2 and 1, and row 2 the tile 2. The other entries are not valid.
    order = np.array([[[0, 1, 2], [2, 1, 0], [2, 0, 1]]], np.int32)
    found = ranks(Visits(4 * order + 1, np.array([[3, 2, 1]], np.int32)))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[0, 0], [0, 1, 2])
    np.testing.assert_array_equal(found[0, 1, :2], [1, 0])
    assert found[0, 2, 0] == 0


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_both_head_dimensions_lower_for_cuda(head, dtype, on_hopper):
    q, k, v, _ = structs(head, dtype)
    masks = Masks(known=Known(after=0)).with_intervals(q.shape[1], k.shape[1], np)
    vector = jax.ShapeDtypeStruct((*q.shape[:3:2], q.shape[1]), "float32")
    run = functools.partial(gradients, masks=masks, scale=0.1, softcap=30.0)
    assert "mosaic_gpu" in cuda_program(run, q, k, v, q, vector, vector)


REFUSED = {
    "head dimensions of 32, only 64 and 128": (32, Masks(np.zeros((1, 8), np.int32))),
    "masks that are only known when the program runs": (64, Masks(jnp.zeros((1, 8), jnp.int32))),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_arguments_are_refused(reason, on_hopper):
    head, masks = REFUSED[reason]
    q, k, v, _ = structs(head)
    assert backward.unsupported(q, k, v, masks=masks, scale=0.1) == reason


def test_without_a_gpu_the_number_of_ctas_that_run_at_once_is_not_known():
    q, k, v, _ = structs(64)
    masks = Masks(known=Known(after=0)).with_intervals(q.shape[1], k.shape[1], np)
    with on_the_cpu():
        assert backward.unsupported(q, k, v, masks=masks, scale=0.1).startswith("a GPU that is not present")


def test_several_ctas_in_the_simulator_are_refused_because_it_has_no_semaphores(on_hopper):
    q, k, v, _ = structs(64)
    masks = Masks(known=Known(after=0)).with_intervals(q.shape[1], k.shape[1], np)
    with simulated():
        assert backward.unsupported(q, k, v, masks=masks, scale=0.1).startswith("several CTAs in the simulator")


@pytest.mark.gpu
@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(window=(300, 20), heads=2)], ids=str)
def test_gpu_they_match_float64_and_repeat_their_bits(head, options):
    case = dict(batch=3, queries=2100, keys=2050, head=head, dtype="bfloat16") | options
    arguments, exact = arguments_and_exact(case, dict(scale=head**-0.5))
    run = jax.jit(functools.partial(gradients, masks=masks_of(case), scale=head**-0.5))
    poison_memory()
    first = run(*arguments)
    assert_near(first, exact, 1e-2)
    for _ in range(100):
        for a, b in zip(first, run(*arguments), strict=True):
            assert bool(jnp.array_equal(a, b))
