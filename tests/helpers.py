import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import launches
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import mlir

from jaxbp.catalogue import CATALOGUE, FixedArgument
from jaxbp.pairing import IMPLEMENTATIONS
from pallas_kernels.core import launch

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
ours = pytest.mark.parametrize("implementation", ["pallas", "xla"])
formulas = pytest.mark.parametrize("implementation", ["xla", "autodiff", None])

ENTRIES = {entry.name: entry for entry in CATALOGUE}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "float64": 1e-12}
"""Largest relative error in norm against float64."""


put = jax.device_put
"""`jnp.asarray` would compile a program per shape."""


REMAT3_ALONE = getattr(jax.config, "jax_remat3", False) and not jax.config.jax_custom_vjp3
"""Without `jax_custom_vjp3`, `jax_remat3` finds no names within a `custom_vjp`, and has no Hessians of it."""


def normal(*shapes, seed=0):
    random = np.random.default_rng(seed)
    return [put(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(tree):
    return [a for a in jax.tree.leaves(tree) if is_float(a)]


def with_floats(tree, values):
    values = iter(values)
    return jax.tree.map(lambda a: next(values) if is_float(a) else a, tree)


def of_floats(op, arrays):
    def function(*values):
        return floats(op(*with_floats(tuple(arrays), values)))

    return function


def value_and_gradients(op):
    """Return the jitted function `(arrays, cotangents) -> (results, gradients)`."""

    @jax.jit
    def run(arrays, cotangents):
        y, vjp = jax.vjp(of_floats(op, arrays), *floats(arrays))
        return y, list(vjp(cotangents))

    return run


@functools.cache
def _with_options(function, options):
    return value_and_gradients(functools.partial(function, **dict(options)))


def results_and_gradients(function, arrays, cotangents, **options):
    return _with_options(function, tuple(sorted(options.items(), key=str)))(arrays, cotangents)


def gradients_of(function, arrays, cotangents, **options):
    return results_and_gradients(function, arrays, cotangents, **options)[1]


def results_of(op, arrays):
    return floats(jax.eval_shape(op, *arrays))


def draw_cotangents(op, arrays, seed=1):
    random = np.random.default_rng(seed)
    return [put(random.standard_normal(a.shape).astype(a.dtype)) for a in results_of(op, arrays)]


def dot(one, other):
    return sum(np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(one, other, strict=True))


def compare_with_twin(op, twin, arrays, implementations=None):
    """Compare an op with the same function of JAX or Flax in float64. One program runs all `implementations`."""
    cotangents = draw_cotangents(twin, arrays)
    expected = in_float64(value_and_gradients(twin), arrays, cotangents)
    ops = {name: functools.partial(op, implementation=name) for name in implementations or ()} or {"op": op}
    run = jax.jit(lambda *arrays: [value_and_gradients(op)(*arrays) for op in ops.values()])
    for name, found in zip(ops, run(arrays, cotangents), strict=True):
        assert_close(found, expected, "float32", str(name))


def numerical_gradients(op, arrays, cotangents, step):
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
    op = functools.partial(function, **options, implementation=implementation)
    cotangents = draw_cotangents(op, arrays)
    gradients = gradients_of(function, arrays, cotangents, implementation=implementation, **options)
    assert_close(gradients, numerical_gradients(op, arrays, cotangents, step), 1e-3)


def assert_second_derivatives_match_differences(functions, values):
    """Compare gradients and Hessian-vector products of `Σ sin(y)` with central differences."""
    random, step = np.random.default_rng(0), 1e-5

    def derivatives(function, values, direction):
        loss = lambda values: sum(jnp.sum(jnp.sin(y)) for y in function(*values))  # noqa: E731
        (value, gradient), vjp = jax.vjp(jax.value_and_grad(loss), values)
        return value, gradient, *vjp((jnp.zeros_like(value), direction))

    with jax.enable_x64(True):
        values = {name: [np.asarray(a, np.float64) for a in arrays] for name, arrays in values.items()}
        direction = jax.tree.map(lambda a: random.standard_normal(a.shape), values)
        run = jax.jit(lambda values: {n: derivatives(f, values[n], direction[n]) for n, f in functions.items()})
        moved = [jax.tree.map(lambda a, d, by=by: a + by * d, values, direction) for by in (0, step, -step)]
        here, ahead, behind = (jax.tree.map(np.asarray, run(values)) for values in moved)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for name, (_, gradient, product) in here.items():
        (value_ahead, after, _), (value_behind, before, _) = ahead[name], behind[name]
        close(dot(gradient, direction[name]), (value_ahead - value_behind) / (2 * step), err_msg=name)
        for p, a, b in zip(product, after, before, strict=True):
            close(p, (a - b) / (2 * step), err_msg=name)


def on_the_cpu():
    """On a CPU the context is empty, because JAX would lower again for an explicit device."""
    return contextlib.nullcontext() if jax.default_backend() == "cpu" else jax.default_device(jax.devices("cpu")[0])


def in_float64(function, *arguments):
    with jax.enable_x64(True), on_the_cpu():
        return function(*jax.tree.map(lambda a: put(np.asarray(a, np.float64 if is_float(a) else a.dtype)), arguments))


def case_of(name, place=None):
    return ENTRIES[name].small if place is None else ENTRIES[name].real[place]


def op_of(name, place, implementation):
    return functools.partial(ENTRIES[name].function, **case_of(name, place).options, implementation=implementation)


@functools.cache
def compiled(name, place, implementation):
    return value_and_gradients(op_of(name, place, implementation))


@functools.cache
def drawn(name, place=None, dtype="float32", batch=2, seed=0):
    seed += 40_000  # finite differences then cross no kink of ReLU, and no probability is nearly 0
    random = np.random.default_rng(seed)
    arrays = jax.tree.map(lambda a: _draw(a, random, batch, jnp.dtype(dtype)), case_of(name, place).arguments)
    return arrays, draw_cotangents(op_of(name, place, "autodiff"), arrays, seed + 1000)


def _draw(argument, random, batch, dtype):
    """Draw with NumPy, because JAX would compile its generators for every shape."""
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
    return put(x.astype(struct.dtype))


@functools.cache
def reference(name, place=None, dtype="float32", batch=2, seed=0):
    return in_float64(compiled(name, place, "autodiff"), *drawn(name, place, dtype, batch, seed))


def relative_error(a, reference):
    a, reference = np.asarray(a, np.float64), np.asarray(reference, np.float64)
    error = np.linalg.norm(a - reference) / max(np.linalg.norm(reference), 1e-300)
    return np.inf if np.isnan(error) else error


def assert_close(actual, reference, tolerance, label=""):
    """`tolerance` is a relative error in norm, or the dtype of the computation."""
    limit = TOLERANCE[jnp.dtype(tolerance).name] if isinstance(tolerance, str) else tolerance
    actual, reference = jax.tree.leaves(actual), jax.tree.leaves(reference)
    assert len(actual) == len(reference), label
    for a, r in zip(actual, reference, strict=True):
        assert a.shape == r.shape, label
        assert relative_error(a, r) < limit, label


EXTREMES = {"0": 0, "-0": -0.0, "inf": np.inf, "-inf": -np.inf, "nan": np.nan, "largest": np.finfo(np.float32).max}


def with_extreme(arrays, at, value):
    """Replace the first element of an op's float argument number `at`."""
    values = [np.array(a, np.float64) for a in floats(arrays)]
    values[at].flat[0] = value
    return with_floats(tuple(arrays), values)


def expected_at(extreme, run):
    """Return the results of `run(x)` in float64 at an extreme x, or their limits. NaN means that no limit is known."""
    if extreme not in ("inf", "-inf"):
        return jax.tree.map(np.asarray, run(EXTREMES[extreme]))
    sign = np.sign(EXTREMES[extreme])
    return jax.tree.map(_limit, *(jax.tree.map(np.asarray, run(sign * far)) for far in (1e30, 1e60)))


def _limit(near, far):
    with np.errstate(invalid="ignore"):
        grows = (np.abs(near) > 30) & (np.abs(far) > 1.5 * np.abs(near)) & (np.sign(near) == np.sign(far))
        settled = np.isclose(near, far, rtol=1e-6, atol=1e-6)
    return np.where(grows, np.sign(far) * np.inf, np.where(settled, far, np.nan))


NAN_AT_INFINITY = {
    # inf - inf, in a softmax, a mean, or a variance
    *("softmax", "log_softmax", "logsumexp", "var", "batch_norm", "group_norm", "layer_norm", "rms_norm"),
    *("layer_norm_linear", "softmax_cross_entropy", "linear_softmax_cross_entropy", "mlp_softmax_cross_entropy"),
    "dot_product_attention",
    *("gate_layer", "lut_layer", "wire_layer", "logic_conv2d", "logic_conv2d_or_pool2d"),
    *("automaton_step", "automaton_rollout"),
    # 0 inf, where zeros pad an image, or an argument is outside of the function's domain
    *("conv2d", "conv1d", "conv2d_relu_max_pool2d", "power"),
    *("binary_cross_entropy", "sigmoid_binary_cross_entropy", "kl_divergence"),
}
"""Ops whose results may be NaN where their limit exists. Other results must be the limits."""
NAN_SPREADS = {"grouped_linear"}
"""Ops whose reference multiplies NaN by 0, so that NaN reaches results that do not depend on it."""
EQUAL_MAXIMA = {
    *itertools.product(("conv2d_relu_max_pool2d", "logic_conv2d_or_pool2d"), ("inf", "-inf")),
    ("conv2d_relu_max_pool2d", "largest"),  # float32 rounds every sum with this bias to the bias
}
"""Pools whose maxima are equal, infinite, or NaN at an extreme. The first gets the gradient. The float64 reference
has one maximum."""


def wrong_at(extreme, found, expected, op=""):
    """Return the names of results, among "value" and "gradient", that differ from `expected_at(extreme)`.

    NaN must give NaN in the value. An overflow must give the right number, infinity, or NaN, but never another number.
    With `op`, the exceptions above are no differences.
    """
    wrong = []
    for kind, ours, theirs in zip(("value", "gradient"), found[:2], expected[:2], strict=True):
        for a, e in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
            right = np.isclose(a, e, rtol=1e-3, atol=1e-3) | np.isnan(e)
            if extreme == "nan" and op not in NAN_SPREADS:
                right = ~np.isnan(e) | np.isnan(a) if kind == "value" else True
            elif extreme == "largest":
                right |= np.isnan(a) | (np.isinf(a) & (np.abs(e) > 1e30))
                right |= kind == "gradient" and (op, extreme) in EQUAL_MAXIMA
            elif op in NAN_AT_INFINITY and extreme in ("inf", "-inf"):
                right |= np.isnan(a) | (kind == "gradient" and (op, extreme) in EQUAL_MAXIMA)
            if not np.all(right):
                wrong.append(kind)
    return wrong


_last_first = jax.make_user_context(False)


@contextlib.contextmanager
def last_program_first():
    """Reverse the order in which Pallas' interpreter runs CTAs."""
    program_id = pl.program_id
    # The context is part of jit's cache key.
    with _last_first(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "program_id", lambda axis: pl.num_programs(axis) - 1 - program_id(axis))
        yield


def poison_memory():
    """Fill the memory of the next results with NaN, so that elements that no kernel writes are found."""
    # One gibibyte, because twelve processes share a GPU.
    jax.block_until_ready([jnp.full(1 << 26, jnp.nan) for _ in range(4)])


def cuda_program(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def launching_program(function, *arrays):
    """Return the program for CUDA, with a call `@kernel.NAME` for each kernel, whose body is not lowered."""

    def call(context, *arrays, name, **_):
        call = jax.ffi.ffi_call(f"kernel.{name}", [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in context.avals_out])
        return mlir.lower_fun(call, multiple_results=True)(context, *arrays)

    register = functools.partial(mlir.register_lowering, launch._launch_p, platform="cuda")
    register(call)
    try:
        return cuda_program(lambda *arrays: function(*arrays), *arrays)  # JAX keeps the programs of a function
    finally:
        register(launch._lower_for_cuda)


def kernel_results(function, *arrays):
    with jax.numpy_dtype_promotion("strict"):
        program = launching_program(function, *arrays)
    calls = [line for line in program.splitlines() if "@kernel." in line]
    return [line.rpartition(" -> ")[2].count("tensor<") for line in calls]


BROADCASTING = ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum")
"""Ops that the catalogue calls with arrays of different ranks."""


def promoting_nothing(broadcasts=False):
    """Return a context in which JAX refuses to promote a dtype, and a rank except if the op `broadcasts`."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.numpy_dtype_promotion("strict"))
    stack.enter_context(jax.numpy_rank_promotion("allow" if broadcasts else "raise"))
    return stack


def assert_launches_as_recorded(name, place, dtype):
    with promoting_nothing(broadcasts=name in BROADCASTING):
        found = launches.launches(ENTRIES[name], place, dtype)
    # Older versions of JAX lack kernels in TF32.
    if jax.__version_info__ >= (0, 11, 1):
        assert found == launches.recorded()[name][dtype][place], f"run `python docs/launches.py {name}`"


@contextlib.contextmanager
def skipped_outputs(module, *indices):
    """Return a context in which the kernels of a module skip `out[i]` for these indices i, and return zeros."""

    def skipping(*arrays, out, skippable=(), **options):
        if not {*indices} <= {*skippable}:
            return launch.launch(*arrays, out=out, **options)
        results = list(
            launch.launch(*arrays, out=tuple(None if i in indices else a for i, a in enumerate(out)), **options)
        )
        for i in indices:
            results[i] = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), out[i])
        return tuple(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "launch", skipping)
        yield
