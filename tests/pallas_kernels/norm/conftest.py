import functools

import jax
import numpy as np
import pytest
from helpers import assert_close, normal


@pytest.fixture
def assert_right():
    def check(kernels, rows, hidden, dtype, tolerance, *, center, known, configs=(None, None)):
        arrays = [a.astype(dtype) for a in normal((rows, hidden), (rows, hidden), (hidden,), (hidden,))]
        run_ = jax.jit(functools.partial(run, kernels, center=center, known=known, configs=configs))
        assert_close(jax.block_until_ready(run_(*arrays)), expected(*arrays, center=center), tolerance)

    return check


def run(kernels, dy, x, scale, bias, *, center, known, configs):
    """Return the forward's (y, statistics) and the backward's (gradients, y). If `known`, the backward gets the
    statistics."""
    options = dict(epsilon=1e-5, center=center)
    bias, (forward, backward) = bias if center else None, configs
    y, *statistics = kernels.normalize(x, scale, bias, **options, config=forward)
    given = statistics if known else (None, None)
    return (y, *statistics), kernels.gradients(dy, x, scale, bias, *given, **options, with_y=True, config=backward)


def expected(dy, x, scale, bias, *, center):
    dy, x, scale, bias = (np.asarray(a, np.float64) for a in (dy, x, scale, bias))
    mean = lambda a: a.mean(-1, keepdims=True)  # noqa: E731
    centered = x - mean(x) if center else x
    inv_std = 1 / np.sqrt(mean(centered**2) + 1e-5)
    normalized, t = centered * inv_std, dy * scale
    y = normalized * scale + (bias if center else 0)
    dx = inv_std * (t - mean(t) * center - normalized * mean(t * normalized))
    statistics = (mean(x) - x[:, :1])[:, 0] if center else None, inv_std[:, 0]
    return (y, *statistics), (dx, (dy * normalized).sum(0), dy.sum(0) if center else None, y)
