import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import CASES, FEW_CTAS, arrays, can_simulate, masks_of, reference, structs
from helpers import cuda_program, on_the_cpu

from pallas_kernels.attention import forward_sm90 as kernels
from pallas_kernels.attention.tiles import visited_tiles
from pallas_kernels.core.device import targeting
from pallas_kernels.core.simulator import simulated


def forward(q, k, v, masks, config=None, **options):
    config = config or kernels.forward.plan(q, k, v, **options)
    visits, _ = visited_tiles(masks, k.shape[1], config.tile)
    return kernels.forward(q, k, v, masks, visits, config=config, **options)


OF_LONG_SEQUENCES = kernels.Config(consumers=3, alternate=False)


@can_simulate
@pytest.mark.parametrize(("name", "config"), [*((name, None) for name in CASES), ("causal", OF_LONG_SEQUENCES)])
def test_the_simulator_finds_it_right(name, config):
    case = CASES[name]
    q, k, v, _ = arrays(case)
    masks = masks_of(case)
    options = dict(scale=0.3, softcap=case.get("softcap"))
    of_case = functools.partial(forward, masks=masks, config=config, **options)
    with on_the_cpu(), targeting(FEW_CTAS), simulated():
        o, error, lse = jax.block_until_ready(jax.jit(of_case)(q, k, v))
    expected = reference(q, k, v, masks, **options)
    o, error = (np.asarray(a, np.float64) for a in (o, error))
    np.testing.assert_allclose(o, expected.o, atol=case.get("atol", 4e-3))
    assert np.all(np.abs(error) <= np.abs(o) * float(jnp.finfo(q.dtype).eps) / 2)
    np.testing.assert_allclose(lse, expected.lse, atol=1e-4)


@pytest.mark.parametrize("head", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_head_dimension_lowers_for_cuda(head, dtype, on_hopper):
    plain, all_options = structs(head, dtype), structs(head, dtype, queries=1, keys=200, options=True)
    assert "mosaic_gpu" in cuda_program(functools.partial(forward, scale=0.1), *plain)
    assert "mosaic_gpu" in cuda_program(functools.partial(forward, scale=0.1, softcap=30.0), *all_options)


def test_the_plan_says_why_arguments_are_unsupported(on_hopper):
    q, k, v, _ = structs(64)
    assert kernels.forward.unsupported(q, k, v, scale=1.0) is None
    assert "scale of -1" in kernels.forward.unsupported(q, k, v, scale=-1.0)
    assert "head dimensions of 96" in kernels.forward.unsupported(*structs(96)[:3], scale=1.0)
    assert "float32" in kernels.forward.unsupported(*structs(64, "float32")[:3], scale=1.0)
    assert "3 key heads" in kernels.forward.unsupported(*structs(64, heads=(16, 3))[:3], scale=1.0)
