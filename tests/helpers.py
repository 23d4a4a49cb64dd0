"""What the tests share: an op's gradients as functions compiled once, a float64 reference, and the tolerances."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from jaxbp.catalogue import CATALOGUE, FixedArgument
from jaxbp.pairing import IMPLEMENTATIONS

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
ours = pytest.mark.parametrize("implementation", ["pallas", "xla"])

ENTRIES = {entry.name: entry for entry in CATALOGUE}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-12}
"""Largest relative norm of an error against float64."""


# ---------------------------------------------------------------------- any op, a function of arrays with options bound


def normal(*shapes, seed=0):
    """Standard normal arrays."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(tree):
    """The floating arrays of a pytree."""
    return [a for a in jax.tree.leaves(tree) if is_float(a)]


def with_floats(tree, values):
    """The pytree with other floating arrays."""
    values = iter(values)
    return jax.tree.map(lambda a: next(values) if is_float(a) else a, tree)


def of_floats(op, arrays):
    """The op as a function of its floating arguments, with its floating results as a list."""

    def function(*values):
        return floats(op(*with_floats(tuple(arrays), values)))

    return function


def value_and_gradients(op):
    """`(arrays, cotangents) -> (results, gradients)` of an op's floats, jitted."""

    @jax.jit
    def run(arrays, cotangents):
        y, vjp = jax.vjp(of_floats(op, arrays), *floats(arrays))
        return y, list(vjp(cotangents))

    return run


@functools.cache
def _with_options(function, options):
    return value_and_gradients(functools.partial(function, **dict(options)))


def results_and_gradients(function, arrays, cotangents, **options):
    """`value_and_gradients` of `function` with its options, compiled once for the same options."""
    return _with_options(function, tuple(sorted(options.items(), key=str)))(arrays, cotangents)


def gradients_of(function, arrays, cotangents, **options):
    return results_and_gradients(function, arrays, cotangents, **options)[1]


def results_of(op, arrays):
    """The shapes and dtypes of an op's floating results, from arrays or from their shapes and dtypes."""
    return floats(jax.eval_shape(op, *arrays))


def draw_cotangents(op, arrays, seed=1):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(a.shape).astype(a.dtype)) for a in results_of(op, arrays)]


def dot(one, other):
    """The inner product of two lists of arrays, in float64."""
    return sum(np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(one, other, strict=True))


def numerical_gradients(op, arrays, cotangents, step):
    """Central differences of `sum(cotangents * op(*arrays))` in every element of the floats, one by one."""
    forward, arrays = jax.jit(op), [np.array(a) for a in arrays]

    def loss():
        return dot(cotangents, floats(forward(*arrays)))

    gradients = []
    for a in floats(arrays):
        gradient = np.zeros(a.shape)
        for at in np.ndindex(a.shape):
            value = a[at]
            a[at] = ahead = value + step
            after = loss()
            a[at] = behind = value - step
            gradient[at] = (after - loss()) / (ahead - behind)
            a[at] = value
        gradients.append(gradient)
    return gradients


def assert_numerical_gradients_agree(function, arrays, *, step, implementation, **options):
    """The classic check of a backward in float32: every element by central differences, to a thousandth."""
    op = functools.partial(function, **options, implementation=implementation)
    cotangents = draw_cotangents(op, arrays)
    gradients = gradients_of(function, arrays, cotangents, implementation=implementation, **options)
    assert_close(gradients, numerical_gradients(op, arrays, cotangents, step), 1e-3)


def on_the_cpu():
    """A context for what only the CPU does, also on a machine with a GPU. Elsewhere it is none: JAX would trace and
    lower once more within it."""
    return contextlib.nullcontext() if jax.default_backend() == "cpu" else jax.default_device(jax.devices("cpu")[0])


def in_float64(function, *arguments):
    """`function` of the same numbers in float64, on the CPU."""
    with jax.enable_x64(True), on_the_cpu():
        return function(
            *jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64 if is_float(a) else a.dtype)), arguments)
        )


# --------------------------------------------------------------------------------------------- the entries of the table


def case_of(name, place=None):
    """An entry's case at one of its places; the small one by default."""
    return ENTRIES[name].small if place is None else ENTRIES[name].real[place]


def op_of(name, place, implementation):
    """An entry as a function of its arrays."""
    return functools.partial(ENTRIES[name].function, **case_of(name, place).options, implementation=implementation)


@functools.cache
def compiled(name, place, implementation):
    """`value_and_gradients` of an entry, shared by all tests: an interpreted kernel takes seconds to compile."""
    return value_and_gradients(op_of(name, place, implementation))


@functools.cache
def drawn(name, place=None, dtype="float32", batch=2, seed=0):
    """(arrays, cotangents) for an entry."""
    seed += 40_000  # where finite differences cross no ReLU's kink, and no probability is nearly 0
    random = np.random.default_rng(seed)
    arrays = jax.tree.map(lambda a: _draw(a, random, batch, jnp.dtype(dtype)), case_of(name, place).arguments)
    return arrays, draw_cotangents(op_of(name, place, "autodiff"), arrays, seed + 1000)


def _draw(argument, random, batch, dtype):
    """As `argument.draw`, by NumPy: JAX would compile its generators for every shape."""
    if isinstance(argument, FixedArgument):
        return argument.draw(None, batch, dtype)
    struct = argument.struct(batch, dtype)
    if argument.below is not None:
        x = random.integers(0, argument.below, struct.shape)
    elif argument.apart:
        x = random.permutation(np.linspace(-2, 2, struct.size)).reshape(struct.shape)
    else:
        x = random.standard_normal(struct.shape) * argument.scale + (argument.offset or 0)
        if argument.weights:
            x = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        if argument.positive:
            x = np.abs(x) + 0.5
    return jnp.asarray(x.astype(struct.dtype))


@functools.cache
def reference(name, place=None, dtype="float32", batch=2, seed=0):
    """(results, gradients) at what is `drawn`, by JAX's own differentiation in float64."""
    return in_float64(compiled(name, place, "autodiff"), *drawn(name, place, dtype, batch, seed))


# ----------------------------------------------------------------------------------------------------------- comparison


def relative_error(a, reference):
    """‖a - reference‖ / ‖reference‖ in float64; infinite when a has a NaN that the reference has not."""
    a, reference = np.asarray(a, np.float64), np.asarray(reference, np.float64)
    error = np.linalg.norm(a - reference) / max(np.linalg.norm(reference), 1e-300)
    return np.inf if np.isnan(error) else error


def assert_close(actual, reference, tolerance):
    """Requires the same arrays up to a relative norm, given as a number or by the dtype that was computed in."""
    limit = TOLERANCE[jnp.dtype(tolerance).name] if isinstance(tolerance, str) else tolerance
    actual, reference = jax.tree.leaves(actual), jax.tree.leaves(reference)
    assert len(actual) == len(reference)
    for a, r in zip(actual, reference, strict=True):
        assert a.shape == r.shape
        assert relative_error(a, r) < limit


# ------------------------------------------------------------------------------------------------------------- kernels


_last_first = jax.make_user_context(False)


@contextlib.contextmanager
def last_program_first():
    """Within it, Pallas' interpreter, which runs the programs of a grid one by one, runs them in the other order."""
    program_id = pl.program_id
    # The context is part of jit's cache key: what was traced outside is traced again.
    with _last_first(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "program_id", lambda axis: pl.num_programs(axis) - 1 - program_id(axis))
        yield


def poison_memory():
    """Leaves NaN in the GPU memory that the next results get, so that an element that a kernel does not write shows."""
    # A gibibyte: twelve processes share a card of 80 GB.
    jax.block_until_ready([jnp.full(1 << 26, jnp.nan) for _ in range(4)])


def cuda_program(function, *arrays):
    """What a function is lowered to for CUDA, which needs no GPU."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
