import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxbp import dot_product_attention, dot_product_attention_backward
from jaxbp.ops.attention import _chunks


def value_and_gradients(**options):
    def run(query, key, value, dy):
        y, vjp = jax.vjp(functools.partial(dot_product_attention, **options, implementation="xla"), query, key, value)
        return y, vjp(dy)

    return run


@pytest.mark.parametrize(("dtype", "length"), [("float32", 65536), ("bfloat16", 65537)])
def test_the_memory_of_forward_and_backward_is_linear_in_the_length(dtype, length):
    array = jax.ShapeDtypeStruct((1, length, 1, 128), dtype)
    compiled = jax.jit(value_and_gradients(is_causal=True)).lower(*[array] * 4).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * 4 * array.size * array.dtype.itemsize


@pytest.mark.parametrize(
    ("options", "visited"),
    [
        ({}, 36),
        (dict(is_causal=True), 21),
        (dict(local_window_size=(4, 0)), 11),
        (dict(key_value_seq_lengths=[9]), 18),
        (dict(segment_ids=[np.arange(24) // 9]), 20),
        (dict(segment_ids=[np.arange(24) % 9]), 34),
    ],
    ids=["all", "causal", "window", "lengths", "segments", "segments out of order"],
)
def test_tiles_without_a_valid_pair_are_skipped_in_the_forward_and_both_passes_of_the_backward(
    options, visited, monkeypatch
):
    counted, scores = [], _chunks.scores_and_slope

    def counting(*arrays, **options):
        jax.debug.callback(lambda: counted.append(1))
        return scores(*arrays, **options)

    monkeypatch.setattr(_chunks, "LARGEST_SIDE", 4)
    monkeypatch.setattr(_chunks, "scores_and_slope", counting)
    options = {name: np.array(value) if isinstance(value, list) else value for name, value in options.items()}
    jax.clear_caches()
    jax.block_until_ready(jax.jit(value_and_gradients(**options))(*[jnp.ones((1, 24, 1, 2))] * 4))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(counted) == 3 * visited


def test_tiles_are_of_nearly_equal_sides_and_smaller_for_many_examples_and_heads():
    assert _chunks.tile_sides(1, 1, 1024, 1) == (512, 1)
    assert _chunks.tile_sides(1, 1, 1025, 513) == (342, 257)
    assert _chunks.tile_sides(384, 4, 384, 384) == (64, 64)
    assert _chunks.tile_sides(2**20, 1, 64, 20) == (32, 20)


def test_second_derivatives_in_half_precision_are_rounded_once():
    # Large terms cancel in the derivative with respect to dy, and 2.3 remains.
    dy, query, key, value = (jnp.full((1, 1, 1, 1), a, jnp.bfloat16) for a in (1.0, 1.0, 100.0, 64.0))
    backward = functools.partial(dot_product_attention_backward, implementation="xla")
    _, vjp = jax.vjp(lambda dy: backward(dy, query, key, value), dy)
    (second,) = vjp((jnp.ones_like(query), jnp.ones_like(key), jnp.full_like(value, -2.3)))
    np.testing.assert_array_equal(second, jnp.full_like(dy, -2.3))


def test_gradients_are_right_where_rounding_errors_of_large_scores_differ_from_the_forwards():
    dy, query, key, value = (jnp.full((1, 1, 1, 1), a) for a in (1.0, -9999.87, 1000.64, 1000.1))
    dq, dk, dv = dot_product_attention_backward(dy, query, key, value, implementation="xla")
    terms = [abs(float(value[0, 0, 0, 0] * a[0, 0, 0, 0])) for a in (key, query)]
    np.testing.assert_allclose([dq.item() / terms[0], dk.item() / terms[1]], 0, atol=1e-6)
    assert dv.item() == 1
