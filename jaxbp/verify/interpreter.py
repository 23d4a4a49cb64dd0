"""Run JAX programs (jaxprs) with a rule that computes each equation. Values are arrays or pytrees of arrays."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

CALLS = frozenset({"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"})
CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
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
    for equation in jaxpr.eqns:
        with equation.ctx.manager:
            results = rule(equation, [read(v) for v in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


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
