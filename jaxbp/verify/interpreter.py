"""Run JAX programs (jaxprs) with a rule that computes each equation: in float64, or with random rounding errors.

Values are arrays or pytrees of arrays. Random rounding errors measure the sensitivity of a program to rounding (Parker,
"Monte Carlo Arithmetic", 1997).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
FIXED = frozenset({"pallas_call", "mosaic_gpu_call", "core_map", "pure_callback", "io_callback", "ffi_call"})
"""Primitives whose code is fixed to the traced dtypes."""
ROUNDED = frozenset({
    "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "conv_general_dilated", "cos",
    "cosh", "cumlogsumexp", "cumprod", "cumsum", "digamma", "div", "dot_general", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "integer_pow", "lgamma", "log", "log1p", "logistic", "mul", "pow", "reduce_prod", "reduce_sum",
    "reduce_window_sum", "rsqrt", "scatter-add", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
})  # fmt: skip
RUNS, MANY = 4, 1024
MOST = 2.0**-10
"""The largest fraction by which `rounding` moves a result, unless one rounding is larger."""
JAX_FOLDER = str(Path(jax.__file__).parent)

Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""`rule(equation, inputs) -> results`."""

Trace = Callable[[Callable, tuple], tuple[Any, Any]]
"""`trace(function, args) -> (program, shapes of the results)`."""


def is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def called(equation: Any) -> Any:
    if equation.primitive.name not in CALLS:
        return None
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def programs_in(equation: Any) -> Iterator[Any]:
    return filter(is_program, jax.tree.leaves(list(equation.params.values()), is_leaf=is_program))


def equations(program: Any) -> Iterator[Any]:
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        yield from _inside(equation)


def _inside(equation):
    return itertools.chain(*map(equations, programs_in(equation)))


def evaluate(program: Any, args: Sequence[Any], rule: Rule, constant: Callable = lambda a: a) -> list[Any]:
    """Run a program by applying `rule` to each equation. `constant` converts each constant of the program to a value
    that `rule` takes."""
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(constant, consts), *args), strict=True))
    read = lambda v: constant(v.val) if hasattr(v, "val") else known[v]  # noqa: E731
    for equation in _needed(jaxpr):
        with equation.ctx.manager:
            results = rule(equation, [read(v) for v in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _needed(jaxpr):
    """Return the equations that the results depend on. Others may raise an error when they run, such as the tangent of
    a `custom_vjp` that `stop_gradient` discards."""
    needed, found = set(), []
    add = lambda variables: needed.update(v for v in variables if not hasattr(v, "val"))  # noqa: E731
    add(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            add(equation.invars)
            found.append(equation)
    return reversed(found)


def bind(equation: Any, inputs: Sequence[Any], **changed: Any) -> list[Any]:
    primitive = equation.primitive
    results = primitive.bind(*inputs, **primitive.get_bind_params({**equation.params, **changed}))
    return list(results) if primitive.multiple_results else [results]


def structured(equation: Any, inputs: Sequence[Any], rule: Rule, constant: Callable) -> list[Any] | None:
    """Run a call, loop, branch, or `shard_map` by applying `rule` to the equations inside. For others, return None.

    `constant` is as in `evaluate`. If values are pytrees, their first array decides when a loop stops, or which branch
    runs.
    """
    run = lambda program, args: evaluate(program, args, rule, constant)  # noqa: E731
    first = lambda value: jax.tree.leaves(value)[0]  # noqa: E731
    name, params = equation.primitive.name, equation.params
    if (program := called(equation)) is not None:
        return run(program, inputs)
    if name == "scan":
        consts, carry = scan_sizes(params)
        fixed, start, xs = inputs[:consts], inputs[consts : consts + carry], inputs[consts + carry :]

        def step(state, x):
            results = run(params["jaxpr"], [*fixed, *state, *x])
            return results[:carry], results[carry:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        end, ys = lax.scan(step, list(start), list(xs), **options)
        return [*end, *ys]
    if name == "while":
        of_condition, of_body, start = while_parts(params, inputs)
        condition = lambda state: first(run(params["cond_jaxpr"], [*of_condition, *state]))  # noqa: E731
        return lax.while_loop(condition, lambda state: run(params["body_jaxpr"], [*of_body, *state]), start)
    if name == "cond":
        branches = [lambda *args, branch=branch: run(branch, args) for branch in params["branches"]]
        return lax.switch(first(inputs[0]), branches, *inputs[1:])
    if name == "shard_map":
        specs = dict(in_specs=params["in_specs"], out_specs=list(params["out_specs"]))
        kept = dict(mesh=params["mesh"], check_vma=params["check_vma"], axis_names=set(params["newly_manual_axes"]))
        return jax.shard_map(lambda *args: run(params["jaxpr"], args), **specs, **kept)(*inputs)
    return None


def traced(function: Callable, args: tuple) -> tuple[Any, Any]:
    return jax.make_jaxpr(function, return_shape=True)(*args)


def rerun(function: Callable, rule: Rule, constant: Callable = lambda a: a, trace: Trace = traced) -> Callable:
    def run(*args):
        program, shapes = trace(function, args)
        results = evaluate(program, [constant(jnp.asarray(a)) for a in jax.tree.leaves(args)], rule, constant)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def without_custom_rules(function: Callable) -> Callable:
    """Return `function` without custom rules of derivatives, except for rules of JAX, such as the rule of `relu`."""

    def rule(equation, inputs):
        if not any(map(_is_custom, (equation, *_inside(equation)))):
            return bind(equation, inputs)
        results = structured(equation, inputs, rule, lambda a: a)
        return bind(equation, inputs) if results is None else results

    return rerun(function, rule)


def has(program: Any, names: frozenset[str] | set[str]) -> bool:
    return any(equation.primitive.name in names for equation in equations(program))


def stops_by_value(program: Any) -> bool:
    """Return whether the condition of a `while_loop` reads floating numbers."""
    loops = [equation.params["cond_jaxpr"] for equation in equations(program) if equation.primitive.name == "while"]
    read = (variable.aval for condition in loops for inner in condition.jaxpr.eqns for variable in inner.invars)
    return any(jnp.issubdtype(aval.dtype, jnp.floating) for aval in read)


def has_custom_rules(program: Any) -> bool:
    return any(map(_is_custom, equations(program)))


def _is_custom(equation):
    if equation.primitive.name not in CUSTOM_RULES:
        return False
    program = called(equation)
    sources = getattr(program, "jaxpr", program), equation.params.get("jvp_jaxpr_fun")
    sources = [getattr(getattr(source, "debug_info", None), "func_src_info", None) for source in sources]
    return not all(source is not None and JAX_FOLDER in source for source in sources)


def while_parts(params, inputs):
    """Return the inputs of the condition and of the body of a `while_loop`, and its state."""
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    return inputs[: split[0]], inputs[split[0] : split[1]], list(inputs[split[1] :])


def scan_sizes(params):
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.12
    return len(consts), len(carry)


class CannotLiftError(NotImplementedError):
    """A part of a program cannot run in float64."""


def lifted(function: Callable, trace: Trace = traced) -> Callable:
    """Return `function` in float64, which raises `CannotLiftError` if a kernel or a callback has a narrower result.

    If JAX cannot trace `function` in float64, `trace` traces it in other dtypes.
    """
    return rerun(function, _lift, _wide, trace)


def traced_in(values: Sequence[np.dtype], cotangents: Sequence[np.dtype]) -> Trace:
    """Return a `trace` for functions of values, cotangents, and directions, which traces them in these dtypes, in the
    current 64-bit mode. Other arrays, such as integers, keep their dtypes."""
    mode = jax.config.jax_enable_x64

    def trace(function, args):
        leaves, structure = jax.tree.flatten(args)
        dtypes = itertools.chain(values, cotangents, itertools.cycle(values))
        narrow = [dtype if _is_float(a) else a.dtype for a, dtype in zip(leaves, dtypes, strict=False)]
        shapes = [jax.ShapeDtypeStruct(a.shape, dtype) for a, dtype in zip(leaves, narrow, strict=True)]
        with jax.enable_x64(mode):
            return traced(function, structure.unflatten(shapes))

    return trace


def narrowest(*programs: Any) -> np.dtype | None:
    """Return the least precise dtype of the values that depend on floating arguments, or None."""
    found = set().union(*map(_computed_in, programs))
    return max(found, key=lambda dtype: float(jnp.finfo(dtype).eps), default=None)


def _computed_in(program):
    jaxpr, found = getattr(program, "jaxpr", program), set()
    moved = {v for v in jaxpr.invars if _is_float(v.aval)}
    for equation in jaxpr.eqns:
        if not any(v in moved for v in equation.invars if not hasattr(v, "val")):
            continue
        moved.update(equation.outvars)
        found |= {v.aval.dtype for v in equation.outvars if _is_float(v.aval)}
        if equation.primitive.name in FIXED:
            continue
        found = found.union(*map(_computed_in, programs_in(equation)))
        if equation.primitive.name == "reduce_precision":
            bits = equation.params["mantissa_bits"]
            widths = {10: jnp.bfloat16, 23: np.float16, 52: np.float32, 64: np.float64}
            found.add(np.dtype(next(dtype for most, dtype in widths.items() if bits < most)))
    return found


def _lift(equation, inputs):
    name, params = equation.primitive.name, equation.params
    if name == "custom_lin":  # JAX would raise this error when it lowers the program
        raise TypeError("a custom_vjp has no forward mode")
    if name in FIXED:
        if any(_is_float(v.aval) and v.aval.dtype != np.float64 for v in equation.outvars):
            raise CannotLiftError(f"{name} computes in {equation.outvars[0].aval.dtype}")
        return bind(equation, _as_traced(equation, inputs))
    if name == "reduce_precision":
        return inputs
    if name == "bitcast_convert_type":
        return [_wide(y) for y in bind(equation, _as_traced(equation, inputs))]
    if (results := structured(equation, inputs, _lift, _wide)) is not None:
        return results
    changed = {key: _wide_parameter(value) for key, value in params.items()}
    if isinstance(changed.get("precision"), lax.DotAlgorithm | lax.DotAlgorithmPreset):
        changed["precision"] = lax.Precision.HIGHEST
    return bind(equation, inputs, **changed)


def _as_traced(equation, inputs):
    return [
        jnp.asarray(a, v.aval.dtype) if _is_float(v.aval) else a for a, v in zip(inputs, equation.invars, strict=True)
    ]


def _wide_parameter(value):
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return _wide_dtype(np.dtype(value))
    if is_program(value):
        jaxpr = getattr(value, "jaxpr", value)
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, _wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        wide = jax.make_jaxpr(lambda *args: evaluate(value, args, _lift, _wide))(*shapes)
        return wide if isinstance(value, type(wide)) else wide.jaxpr
    if isinstance(value, tuple) and any(is_program(inner) for inner in jax.tree.leaves(value, is_leaf=is_program)):
        return jax.tree.map(_wide_parameter, value, is_leaf=is_program)
    return value


def _wide_dtype(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else dtype


def _wide(a):
    dtype = jnp.result_type(a)
    return a if (wide := _wide_dtype(dtype)) == dtype else jnp.asarray(a, wide)


def _is_float(aval):
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


def rounding(function: Callable, *args: Any, dtype: Any = np.float64) -> list[np.ndarray]:
    """Return how far each result of `function` moves at most if operations outside of loops are rounded to `dtype`.

    Change operations' results by a multiple of their rounding error, and divide the effect by this multiple. A jump
    of `function` does not grow with the multiple, so that the division makes it small.
    """
    eps = float(jnp.finfo(dtype).eps)
    many = max(1.0, min(MANY, MOST / eps))
    random, run = np.random.default_rng(0), _with_rounding(function, args)
    exactly = run(lambda equation, operands, y: y)
    change = lambda equation, operands, y: y * (1 + many * eps * random.choice((-1, 1), y.shape)).astype(y.dtype)  # noqa: E731
    moved = [run(change) for _ in range(RUNS)]
    with np.errstate(invalid="ignore"):
        off = [[np.abs(m - y) for m in some] for y, *some in zip(exactly, *moved, strict=True)]
    return [np.max([np.where(np.isfinite(m), m, 0.0) for m in some], axis=0) / many for some in off]


def rounded_otherwise(function: Callable, *args: Any, dtype: Any, roundings: float, runs: int) -> list[np.ndarray]:
    """Return one array `(1 + runs, *y.shape)` per result y of `function`. Run 0 is exact.

    In the other runs, the result of each operation changes at random by at most `roundings` rounding errors of `dtype`.
    Equal operands give equal changes, so that ties remain.
    """
    by = roundings * float(jnp.finfo(dtype).eps)
    narrow = np.float32 if jnp.dtype(dtype) == np.float64 else dtype

    def change(seed, equation, operands, y):
        if seed == 0:
            return y
        avals = [variable.aval for variable in equation.invars]
        mixed = [
            _mixed(seed, a).astype(aval.dtype) if _is_float(aval) else a
            for a, aval in zip(operands, avals, strict=True)
        ]
        alike = equation.primitive.bind(*mixed, **equation.primitive.get_bind_params(equation.params))
        # Sums of equal operands in another order differ in their last bits, which rounding to float32 removes.
        share = _mixed(seed, np.float32(np.abs(alike)))
        exact = _is_short(y, narrow)
        for a in itertools.compress(operands, map(_is_float, avals)):
            short = _is_short(a, narrow)
            exact &= short if short.shape == y.shape else short.all()
        return y * np.where(exact, 1, 1 + by * (4 * share - 3)).astype(y.dtype)

    run = _with_rounding(function, args)
    found = [run(functools.partial(change, seed)) for seed in range(1 + runs)]
    return [np.stack(each) for each in zip(*found, strict=True)]


def _with_rounding(function, args):
    """Return a function of `change` that runs `function(*args)`, and replaces each rounded number y by
    `change(equation, operands, y)`."""
    program, leaves = jax.make_jaxpr(function)(*args), [jnp.asarray(a) for a in jax.tree.leaves(args)]

    def run(change):
        def rule(equation, operands):
            if (inner := called(equation)) is not None:
                return evaluate(inner, operands, rule)
            results = bind(equation, operands)
            if equation.primitive.name not in ROUNDED:
                return results
            return [change(equation, operands, y) if _is_float(y) else y for y in results]

        return [np.asarray(y) for y in evaluate(program, leaves, rule)]

    return run


def _is_short(a, narrow):
    a = np.asarray(a, np.float64)
    return a == a.astype(narrow)


def _mixed(seed, a):
    bits = np.abs(np.asarray(a, np.float64)).view(np.uint64) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of SplitMix64
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    size = 0.5 + (bits >> np.uint64(11)) / 2.0**54
    return np.where(np.asarray(a) < 0, -size, size)
