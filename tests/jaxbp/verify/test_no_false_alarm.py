"""JAX's own gradient never fails a check, whatever the data and its dtype.

CI runs a part that differs from day to day; this runs all of it, and the whole catalogue:

    python tests/jaxbp/verify/test_no_false_alarm.py
"""

import datetime
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbp
from jaxbp.verify import check

pytestmark = pytest.mark.once

SEEDS, SCALES, DTYPES = range(10), (1.0, 1e-3, 1e3), ("float32", "bfloat16", "float16", "float64")
X, WIDE = (3, 4), (4, 2)

_NUMPY = [
    "sin",
    "tan",
    "tanh",
    "sinh",
    "arctan",
    "exp",
    "expm1",
    "log",
    "sqrt",
    "abs",
    "square",
    "sinc",
    "max",
    "min",
    "prod",
    "mean",
    "std",
    "var",
    "cumsum",
    "sort",
    "median",
]
_BINARY = ["maximum", "minimum", "logaddexp", "hypot", "divide", "arctan2"]
_NN = [
    "relu",
    "relu6",
    "elu",
    "selu",
    "gelu",
    "silu",
    "softplus",
    "sigmoid",
    "log_sigmoid",
    "hard_tanh",
    "hard_swish",
    "softmax",
    "log_softmax",
    "standardize",
    "glu",
]
# Name -> (function, shapes of its arguments).
FUNCTIONS = {
    **{f"jnp.{name}": (getattr(jnp, name), (X,)) for name in _NUMPY},
    **{f"jnp.{name}": (getattr(jnp, name), (X, X)) for name in _BINARY},
    **{f"jax.nn.{name}": (getattr(jax.nn, name), (X,)) for name in _NN},
    "jnp.matmul": (jnp.matmul, (X, WIDE)),
    "jnp.linalg.norm": (jnp.linalg.norm, (X,)),
    "jnp.clip": (functools.partial(jnp.clip, min=-0.7, max=0.5), (X,)),
    "jax.nn.logsumexp": (functools.partial(jax.nn.logsumexp, axis=-1), (X,)),
}
ALL = list(itertools.product(FUNCTIONS, SEEDS, SCALES, DTYPES))
TODAY = np.random.default_rng(datetime.date.today().toordinal())
A_FEW = [ALL[i] for i in TODAY.choice(len(ALL), 12, replace=False)]


def alarms(name, seed, scale, dtype, order=1):
    """The failures of a right function, as lines."""
    function, shapes = FUNCTIONS[name]
    random = np.random.default_rng(seed)
    data = [(scale * random.standard_normal(shape)).astype(dtype) for shape in shapes]
    return [str(row) for row in check(function, *data, seed=seed, order=order).failures]


def test_there_are_thirty_functions_of_jax():
    assert len(FUNCTIONS) >= 30


@pytest.mark.parametrize(("name", "seed", "scale", "dtype"), A_FEW)
def test_a_function_of_jax_passes(name, seed, scale, dtype):
    assert alarms(name, seed, scale, dtype) == []


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm"])
def test_data_from_the_generator_that_everybody_uses_is_no_cotangent(name):
    random = np.random.default_rng(0)
    shapes = {"layer_norm": ((4, 8), (8,), (8,)), "rms_norm": ((4, 8), (8,)), "batch_norm": ((4, 3), (3,), (3,))}
    data = [random.standard_normal(shape).astype(np.float32) for shape in shapes[name]]
    check(getattr(jaxbp, name), *data, order=1, implementations=["xla", "autodiff"]).raise_if_failed()


def test_a_step_of_a_difference_may_cross_a_near_tie():
    x = np.float32([[0.5, 0.5 + 1e-6, -1.0, 0.25]]).reshape(1, 1, 2, 2)
    check(jaxbp.max_pool2d, x, window=2, implementations=["xla", "autodiff"]).raise_if_failed()


@pytest.mark.parametrize("x", [1e-9, 2e-6, -4e-6, 1e-4])
def test_a_kink_may_lie_within_a_step(x):
    relu = jaxbp.Pair(jax.nn.relu, {"xla": lambda dy, x: jnp.where(x > 0, dy, 0)}, name="relu")
    check(relu, np.float32([x, 1.0, -2.0]), implementations=["xla", "autodiff"]).raise_if_failed()


@pytest.mark.parametrize("seed", range(6))
def test_right_functions_pass_in_half_precision(seed):
    data = [np.random.default_rng(seed).standard_normal(s).astype(jnp.bfloat16) for s in ((4, 8), (8,), (8,))]
    check(jaxbp.layer_norm, *data, order=1, implementations=["xla", "autodiff"], seed=seed).raise_if_failed()


def main(parts):
    """Everything, or `parts` of it: functions, catalogue. Prints every alarm; returns 1 if there is one."""
    found = run = 0
    for case in ALL if "functions" in parts else []:
        lines, run = alarms(*case), run + 1
        if run % 500 == 0:
            print(run, "checks", file=sys.stderr, flush=True)
        found += bool(lines)
        if lines:
            print(*case, *lines, sep="\n    ", flush=True)
    if "catalogue" in parts:
        from experiments.check import CheckConfig, check_entry
        from jaxbp.catalogue import CATALOGUE

        for entry, seed, scale, dtype in itertools.product(CATALOGUE, SEEDS, SCALES, DTYPES):
            config = CheckConfig(implementations=("xla", "autodiff"), order=1, seed=seed, scale=scale)
            result, run = check_entry(entry, dtype, config), run + 1
            found += not result
            for failure in result.failures:
                print(entry.name, seed, scale, failure, flush=True)
    print(f"{found} alarms in {run} checks")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["functions", "catalogue"]))
