import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import arrays, can_simulate, masks_of, reference, structs
from helpers import cuda_program, on_the_cpu

from pallas_kernels.attention import backward_bias_sm90 as kernels
from pallas_kernels.attention.tiles import intervals
from pallas_kernels.core.device import HOPPER, targeting
from pallas_kernels.core.simulator import simulated

CASES = {
    "a tile": dict(queries=100, keys=100, bias=(1, 1, 100, 100), is_causal=True),
    "examples and heads are summed": dict(
        batch=3, queries=140, keys=140, heads=2, bias=(1, 1, 140, 140), lengths=([140, 90, 0], [140, 140, 140])
    ),
    "queries are summed": dict(queries=140, keys=100, heads=2, bias=(1, 2, 1, 100), softcap=2.0),
    "keys are summed": dict(batch=2, queries=100, keys=140, bias=(2, 1, 100, 1), segments=3),
}


@can_simulate
@pytest.mark.parametrize("name", CASES)
def test_the_simulator_finds_it_right(name):
    case = CASES[name]
    q, k, v, do = arrays(case)
    masks, options = masks_of(case), dict(scale=0.3, softcap=case.get("softcap"))
    masks = masks._replace(**{n: jnp.broadcast_to(getattr(masks, n), (len(q), q.shape[1])) for n in ("first", "end")})
    if masks.query_segments is not None:
        ids = {n: jnp.broadcast_to(a, (len(q), a.shape[1])) for n, a in masks._asdict().items() if "segments" in n}
        masks = masks._replace(**ids)
    e = reference(q, k, v, masks, do, **options)
    lse, delta = (jnp.asarray(a, jnp.float32) for a in (e.lse, e.delta))
    with on_the_cpu(), targeting(HOPPER), simulated():
        gradient = functools.partial(kernels.backward_bias, **options)
        found = jax.block_until_ready(jax.jit(gradient)(q, k, v, do, lse, delta, masks))
    assert found.shape == masks.bias.shape and found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found, np.float64), e.dbias, atol=4e-3 * max(1, np.abs(e.dbias).max()))


@pytest.mark.parametrize("head", [32, 64, 128, 256])
def test_every_head_dimension_lowers_for_cuda(head, on_hopper):
    q, k, v, masks = structs(head, queries=200, keys=300, options=True)
    statistics = [jax.ShapeDtypeStruct((4, 16, 200), "float32")] * 2
    gradient = functools.partial(kernels.backward_bias, scale=0.1)
    assert "attention_backward_bias" in cuda_program(gradient, q, k, v, q, *statistics, masks)


def test_all_multiprocessors_get_ctas(on_hopper):
    q = jax.ShapeDtypeStruct((384, 384, 4, 64), "bfloat16")
    for shape, parts in {(1, 4, 384, 384): 4, (384, 4, 384, 384): 1, (1, 1, 1, 1): 132}.items():
        masks = kernels.Masks(*intervals(384, 384), bias=jax.ShapeDtypeStruct(shape, "float32"))
        assert kernels.backward_bias.plan(q, q, q, masks=masks, scale=1.0).parts == parts
