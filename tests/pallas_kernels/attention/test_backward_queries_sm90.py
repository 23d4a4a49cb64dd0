import functools

import jax
import numpy as np
import pytest
from attention import CASES, FEW_CTAS, arrays, can_simulate, masks_of, reference, structs
from helpers import cuda_program, on_the_cpu

from pallas_kernels.attention import backward_queries_sm90 as kernels
from pallas_kernels.attention.tiles import visited_tiles
from pallas_kernels.core.device import targeting
from pallas_kernels.core.simulator import simulated


def gradient(q, k, v, do, lse, delta, masks, **options):
    config = kernels.backward_queries.plan(q, k, v, masks=masks, **options)
    visits, _ = visited_tiles(masks, k.shape[1], config.tile)
    return kernels.backward_queries(q, k, v, do, lse, delta, masks, visits, **options)


@can_simulate
@pytest.mark.parametrize("name", CASES)
def test_the_simulator_finds_it_right(name):
    case = CASES[name]
    q, k, v, do = arrays(case)
    masks = masks_of(case)
    options = dict(scale=0.3, softcap=case.get("softcap"))
    expected = reference(q, k, v, masks, do, **options)
    lse, delta = (a.astype(np.float32) for a in (expected.lse, expected.delta))
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        actual = jax.block_until_ready(
            jax.jit(functools.partial(gradient, masks=masks, **options))(q, k, v, do, lse, delta)
        )
    error = np.abs(np.asarray(actual, np.float64) - expected.dq).max()
    assert error <= case.get("atol", 4e-3) * max(1, np.abs(expected.dq).max())


@pytest.mark.parametrize("head", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dimension_lowers_for_cuda(head, dtype, on_hopper):
    for options, (q, k, v, masks) in (
        (dict(scale=0.1), structs(head, dtype)),
        (dict(scale=0.1, softcap=30.0), structs(head, dtype, queries=1, keys=200, options=True)),
    ):
        vector = jax.ShapeDtypeStruct((*q.shape[:3:2], q.shape[1]), "float32")
        program = cuda_program(functools.partial(gradient, **options), q, k, v, q, vector, vector, masks)
        assert "mosaic_gpu" in program
