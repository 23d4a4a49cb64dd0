"""The kernels of LayerNorm and RMSNorm: plain ones of any length, those that stream rows in the simulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal, on_the_cpu

from pallas_kernels.core.simulator import simulated
from pallas_kernels.norm import layer_norm as kernels

pytestmark = pytest.mark.once

can_simulate = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="older simulators lack bulk copies")
centred_or_not = pytest.mark.parametrize("center", [True, False], ids=["layer_norm", "rms_norm"])


def draw(rows, hidden, dtype="float32"):
    """dy, x, scale and bias."""
    return [a.astype(dtype) for a in normal((rows, hidden), (rows, hidden), (hidden,), (hidden,))]


def run(dy, x, scale, bias, *, center, known, **sizes):
    """(y, statistics), (gradients, y again)."""
    options = dict(eps=1e-5, center=center, **sizes)
    bias = bias if center else None
    y, *statistics = kernels.normalise(x, scale, bias, **options)
    return (y, *statistics), kernels.gradients(dy, x, scale, bias, *statistics * known, again=True, **options)


def expected(dy, x, scale, bias, *, center):
    dy, x, scale, bias = (np.asarray(a, np.float64) for a in (dy, x, scale, bias))
    mean = lambda a: a.mean(-1, keepdims=True)  # noqa: E731
    centred = x - mean(x) if center else x
    inv_std = 1 / np.sqrt(mean(centred**2) + 1e-5)
    normalised, t = centred * inv_std, dy * scale
    y = normalised * scale + (bias if center else 0)
    dx = inv_std * (t - mean(t) * center - normalised * mean(t * normalised))
    statistics = [(mean(x) - x[:, :1])[:, 0]] * center + [inv_std[:, 0]]
    return (y, *statistics), (dx, (dy * normalised).sum(0), *[dy.sum(0)] * center, y)


@centred_or_not
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [(3, 1, "float32"), (70, 5, "float32"), (2, 200, "float16"), (2, 1000, "float32"), (2, 4608, "bfloat16")],
)
def test_plain_kernels_take_any_length(rows, hidden, dtype, center):
    arrays = draw(rows, hidden, dtype)
    with on_the_cpu():
        actual = jax.jit(functools.partial(run, center=center, known=False))(*arrays)
    assert_close(actual, expected(*arrays, center=center), dtype if hidden > 1 else 1e-2)


def test_plain_kernels_divide_rows_among_parts_and_columns_among_owners(monkeypatch):
    monkeypatch.setattr(kernels, "_OWN", 256)
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 1)
    arrays = draw(9, 700)
    with on_the_cpu():
        actual = jax.jit(functools.partial(run, center=True, known=False))(*arrays)
    assert_close(actual, expected(*arrays, center=True), "float32")


# Rows of a warp and of a warpgroup; groups of several blocks; a last group that is not full; a ring of two.
STREAMED = {
    "warps": ((37, 256, "float32"), dict(rows=8)),
    "warps, half precision, ring of two": ((21, 384, "bfloat16"), dict(rows=4, slots=2)),
    "warpgroup": ((5, 2048, "float32"), dict(rows=2)),
    "warpgroup, one row": ((3, 1280, "float16"), dict(rows=1)),
    "fewer rows than a group": ((3, 128, "float32"), dict(rows=8)),
}


@can_simulate
@pytest.mark.parametrize(
    ("name", "center", "known"),
    [(name, center, center) for name in STREAMED for center in (True, False)]
    + [(name, True, False) for name in ("warps", "warpgroup")],
)
def test_the_simulator_finds_the_streamed_kernels_right(name, center, known, monkeypatch):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 2)
    shape, sizes = STREAMED[name]
    arrays = draw(*shape)
    with on_the_cpu(), simulated():
        run_ = jax.jit(functools.partial(run, center=center, known=known, programs=1, **sizes))
        actual = jax.block_until_ready(run_(*arrays))
    assert_close(actual, expected(*arrays, center=center), shape[2])


@pytest.mark.parametrize(
    ("hidden", "dtype", "streamed"),
    [
        (128, "bfloat16", True),
        (1024, "float32", True),
        (4096, "bfloat16", True),
        (1152, "bfloat16", False),
        (100, "float32", False),
        (16384, "bfloat16", False),
    ],
)
def test_rows_that_come_in_whole_pieces_are_streamed(hidden, dtype, streamed):
    x = jax.ShapeDtypeStruct((1000, hidden), dtype)
    for arrays in (1, 2):
        tile = kernels._tile(x, arrays=arrays)
        assert (tile is not None) == streamed
        if streamed:
            per_slot = arrays * tile.rows * hidden * jnp.dtype(dtype).itemsize
            assert tile.programs * tile.slots * per_slot < 225 * 1024
