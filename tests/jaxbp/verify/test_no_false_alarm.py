"""Autodiff never fails a check, for any data and dtype.

The tests check a few combinations. To check all of them, and the catalogue:

    python tests/jaxbp/verify/test_no_false_alarm.py --processes 14
"""

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxbp
from experiments.check import CheckConfig, check_entry
from jaxbp.catalogue import CATALOGUE
from jaxbp.verify import check
from tests.qa.children import Done, in_children

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
# name -> (function, shapes of its arguments)
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
A_FEW = [ALL[i] for i in np.random.default_rng(0).choice(len(ALL), 12, replace=False)]


def alarms(name, seed, scale, dtype, order=1):
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


HALF = np.ones((1, 1), np.float16)
ROWS = np.float32([[0.3, -1.2, 0.8, 0.1], [-0.4, 0.9, 1.7, -2.0]])
_RANDOM = np.random.default_rng(1200)
_DY, _LOGITS, _INPUTS = (np.float32(1000 * _RANDOM.standard_normal(shape)) for shape in ((1, 1), (1, 16), (1, 2)))
ONE_GATE = [_DY, _LOGITS, jaxbp.Wires.from_pairs([0], [1], 2), _INPUTS]
# Correct ops that once failed a check.
ONCE_WRONG = {
    "ties that go to the first": (
        jaxbp.max, [ROWS], dict(axis=1, kink_convention=False, added=["zeros"], seed=2),
    ),
    "a side of a tie that few points reach": (
        jaxbp.max_backward, [ROWS[0, :3], np.stack([ROWS, -ROWS, 2 * ROWS], axis=1)],
        dict(axis=(0, 2), kink_convention=False, added=["zeros"], seed=7),
    ),
    "a value that jumps at a tie": (
        jaxbp.max_backward, [ROWS[0, :2], ROWS], dict(axis=1, kink_convention=False, added=["ties"]),
    ),
    "terms that overflow and cancel": (
        jaxbp.matmul_backward, [HALF, 3000 * HALF, 3000 * HALF], dict(added=["cotangents"]),
    ),
    "a difference between two roundings": (
        jaxbp.sigmoid_backward, [np.array([900.0, -20.0]), np.array([28.0, 30.0])], dict(added=()),
    ),
    "a difference that rounding hides in part": (
        jaxbp.softmax_backward, [np.array([900.0, -700.0, 30.0]), np.array([23.0, 0.0, -1.0])], dict(added=()),
    ),
    "the rounding of JAX in float64": (
        jaxbp.mish_backward, [np.array([-1830.8034723729559]), np.array([19.500427245410556])],
        dict(added=(), seed=7),
    ),
    "rounding in float32 at this data, but not nearby": (
        jaxbp.gate_layer_backward, ONE_GATE, dict(added=()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_once_called_wrong_passes(name):
    op, args, settings = ONCE_WRONG[name]
    check(op, *args, order=1, implementations=["xla", "autodiff"], **settings).raise_if_failed()


def masked_softmax(x, mask):
    return jax.nn.softmax(jnp.where(mask, x, -1e9))


def rows_of(x, rows):
    return x[rows]


# name -> (function, arguments)
RIGHT_RULES = {
    "medians of equal numbers": (functools.partial(jnp.median, axis=-1), [ROWS]),
    "rows": (rows_of, [ROWS, np.array([1, 0, 1])]),
    "a mask": (masked_softmax, [ROWS, np.array([[True, False, True, True]])]),
    "products": (jnp.matmul, [ROWS, ROWS.T]),
    "squares that overflow in float16": (lambda x: x * x / 4, [np.tile(ROWS, 8)]),
}


@pytest.mark.parametrize("name", RIGHT_RULES)
def test_a_rule_that_is_autodiff_passes(name):
    function, args = RIGHT_RULES[name]
    op = jax.custom_vjp(lambda *args: function(*args))
    op.defvjp(lambda *args: (function(*args), args), lambda args, dy: jax.vjp(function, *args)[1](dy))
    check(op, *args, order=1).raise_if_failed()


def with_rule(forward, backward):
    function = jax.custom_vjp(forward)
    function.defvjp(lambda *args: (function(*args), (*args, function(*args))), backward)
    return function


def factored_solve(a, b):
    """Solve as `jnp.linalg.solve` does: factor a constant matrix outside of a jit that contains the solve."""
    inverse = lax.stop_gradient(jnp.linalg.inv(a))
    solve = lambda matvec, b: inverse @ b  # noqa: E731
    return jax.jit(lambda a, b: lax.custom_linear_solve(lambda x: a @ x, b, solve, lambda _, b: inverse.T @ b))(a, b)


def square_in_a_loop(x):
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * x), (0, jnp.ones_like(x)))[1]


def fixed_point(a):
    """Solve y = sin(y) / 3 + a up to 1e-7."""
    moves = lambda s: (jnp.abs(s[0] - s[1]) > 1e-7).any() & (s[2] < 99)  # noqa: E731
    return lax.while_loop(moves, lambda s: (s[1], jnp.sin(s[1]) / 3 + a, s[2] + 1), (a + 1, a, 0))[1]


def narrow(dy, x):
    return (3 * dy.astype(jnp.float32) * x.astype(jnp.float32) ** 2).astype(dy.dtype)


MATRIX, VECTOR = np.float32([[2.0, 0.3, -0.5], [0.1, -1.5, 0.4], [0.7, 0.2, 1.8]]), np.float32([0.5, -1.0, 2.0])
SYMMETRIC = np.float32([[2.0, 0.3, -0.5], [0.3, 1.5, 0.4], [-0.5, 0.4, 1.8]])
RIGHT = {
    "a solve with a factor": (factored_solve, MATRIX, VECTOR),
    "a jit inside of inv": (jnp.linalg.inv, MATRIX),
    "a slope of 1e38": (
        with_rule(lambda x: jnp.log(jnp.abs(x)), lambda r, dy: (dy / r[0],)), np.float32([1.5e-38, 1.2, 3.0]),
    ),
    "a slope of 1e19": (jnp.cbrt, np.float32([1e-30, 1.0, -2.0])),
    "a loop without reverse mode, and rounding": (
        with_rule(square_in_a_loop, lambda r, dy: (2 * dy * ((r[0] + 1e4) - 1e4),)), VECTOR / 3,
    ),
    "a loop that stops at a tolerance": (
        with_rule(fixed_point, lambda r, dy: (dy / (1 - jnp.cos(r[1]) / 3),)), VECTOR,
    ),
    "a backward in float32": (with_rule(lambda x: x**3, lambda r, dy: (narrow(dy, r[0]),)), -VECTOR),
    "indices of two integer dtypes in 64-bit mode": (
        lambda x, i: lax.dynamic_slice(jnp.sin(x), (i, 0), (2, 1)), MATRIX, np.int32(1),
    ),
    "a constant in float32": (lambda x: lax.mul(x, np.ones(3, np.float32)), VECTOR),
    "one triangle": (lambda a, b: jax.scipy.linalg.solve(a, b, assume_a="pos"), SYMMETRIC, VECTOR),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_passes(name):
    function, *args = RIGHT[name]
    added = ("zeros",) if name == "a loop that stops at a tolerance" else ()
    check(function, *args, added=added).raise_if_failed()


def test_added_data_of_the_least_normal_numbers_pass():
    function, *args = RIGHT["a slope of 1e38"]
    check(function, *args, added=("small",)).raise_if_failed()


def test_the_program_counts_checks_and_alarms(monkeypatch, capsys):
    @jax.custom_vjp
    def wrong(x):
        return jnp.sin(x)

    wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy,))
    monkeypatch.setitem(FUNCTIONS, "wrong", (wrong, (X,)))
    names = ("jnp.sin", "wrong", "relu", "hung")

    def in_children(work, tasks, processes, limit):
        for part, name, _ in [task for task in tasks if task[1] in names]:
            yield Done((part, name), [next(alarms_of(part, name))])
        yield Done(("functions", "hung"), [[]], "no answer in 1 s")

    monkeypatch.setitem(globals(), "in_children", in_children)
    assert main(["--processes", "2"]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    found = json.loads(summary)
    assert (found["checks"], found["alarms"], found["died"]) == (4, 1, 1)
    assert {line.split(",")[0] for line in lines if line} == {"wrong", "functions hung: no answer in 1 s"}


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = {"catalogue": [entry.name for entry in CATALOGUE], "functions": list(FUNCTIONS)}
    parser.add_argument("part", nargs="?", choices=names, help="default: both")
    parser.add_argument("--processes", type=int, default=1)
    config = parser.parse_args(args)
    checks = alarms = died = 0
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tasks = [(part, name, folder) for part in names if config.part in (None, part) for name in names[part]]
        for i, done in enumerate(in_children(work, tasks, config.processes, limit=600), start=1):
            part, name, *_ = done.task
            checks, alarms = checks + len(done.results), alarms + sum(map(bool, done.results))
            for line in itertools.chain(*done.results):
                print(line, flush=True)
            if done.death is not None:
                died += 1
                print(f"{part} {name}: {done.death}", done.said, sep="\n", flush=True)
            seconds = time.perf_counter() - start
            print(f"{i} of {len(tasks)}, {seconds:.0f} s: {checks} checks, {name}", file=sys.stderr, flush=True)
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps(dict(checks=checks, alarms=alarms, died=died, seconds=seconds, processes=config.processes)))
    return 1 if alarms or died else 0


def work(task: tuple[str, str, str]) -> Iterator[list[str]]:
    """Most programs of a function differ only in their data, so they share a cache."""
    part, name, folder = task
    jax.config.update("jax_compilation_cache_dir", os.path.join(folder, str(os.getpid())))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    yield from alarms_of(part, name)


def alarms_of(part: str, name: str) -> Iterator[list[str]]:
    for seed, scale, dtype in itertools.product(SEEDS, SCALES, DTYPES):
        if part == "functions":
            lines = alarms(name, seed, scale, dtype)
        else:
            (entry,) = (entry for entry in CATALOGUE if entry.name == name)
            config = CheckConfig(implementations=("xla", "autodiff"), order=1, seed=seed, scale=scale)
            lines = list(map(str, check_entry(entry, dtype, config).failures))
        yield [f"{name}, seed {seed}, scale {scale:g}: {line}" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
