import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.common import checks
from jaxbp.pairing import IMPLEMENTATIONS, Implementation
from jaxbp.verify.arguments import (
    bind,
    name_of,
    require_several,
    take_apart,
    takes_implementation,
    tracers_explained,
)
from jaxbp.verify.comparison import CUSTOM_RULES, Comparison, Difference, Measured, Program
from jaxbp.verify.derivatives import along, in_a_mode, in_numpy, scale_of, value_and_gradients
from jaxbp.verify.interpreter import has, lifted, traced, without_custom_rules
from jaxbp.verify.judge import (
    KINK_RTOL,
    NEIGHBORS,
    TOLERANCES,
    allowed,
    close,
    excess_and_difference,
    is_as_exact,
    is_between,
)
from jaxbp.verify.points import generator
from jaxbp.verify.timing import compile_program, device_seconds

CALLS = 10
"""Calls per timed program on a GPU, which does not wait for the host between them."""


def compare(
    function: Callable,
    *args: Any,
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    reference: Implementation = "autodiff",
    argnums: int | Sequence[int] | None = None,
    second_order: bool = True,
    seconds: float = 0.05,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Run `function(*args, implementation=..., **options)` under each implementation, and compare results and costs.

    If the function takes no `implementation`, such as a `jax.custom_vjp`, compare its custom rules with JAX's autodiff
    of its forward.

    The costs are time, memory, and compilation time. The sum of all results is differentiated, with random weights for
    the elements of non-scalar results. The sum's Hessian is multiplied by a random direction, in forward over reverse
    mode, or in reverse over reverse mode if a custom rule has no forward mode.

    Elements that differ from the reference by more than the tolerance of `check` are compared with the reference in
    float64. Rounding explains an error of up to four times the reference's error, unless all elements are wrong by the
    same factor. At a tie or a kink, any number between the slopes near the data is accepted.

    Args:
      function: a `Pair`, an `Op`, or any function that takes `implementation=` and passes it on.
      args: arrays or pytrees of arrays, including models of Flax NNX.
      argnums: as in `jax.grad`; by default all floating arrays.
      seconds: the approximate duration of a round of timing.

    Returns:
      A `Comparison`. If an implementation fails, it contains the reason.

    Raises:
      ValueError: there is no floating argument.
      Errors of the reference are raised unchanged.
    """
    checks.function("compare", "function", function)
    require_several("compare", "implementations", implementations)
    arguments = take_apart(function, args)
    chosen = arguments.positions((argnums,) if isinstance(argnums, int) else argnums)
    if not chosen:
        among = "" if argnums is None else f" among argnums {argnums}"
        raise ValueError(
            f"compare: {name_of(function)} has no floating argument{among}; wants at least one, to differentiate"
        )
    if takes_implementation(function):
        variant = lambda name: functools.partial(arguments.call, bind(function, name, options))  # noqa: E731
    else:
        by_rules = functools.partial(arguments.call, functools.partial(function, **options))
        reference, implementations = "autodiff", (CUSTOM_RULES,)
        variant = {"autodiff": without_custom_rules(by_rules), CUSTOM_RULES: by_rules}.__getitem__
    leaves, random = list(arguments.leaves), np.random.default_rng(seed)
    normal = lambda a: random.standard_normal(a.shape).astype(a.dtype)  # noqa: E731
    with tracers_explained("compare", function):
        shapes = jax.eval_shape(variant(reference), leaves)
    cotangents = [normal(y) if y.shape else np.ones((), y.dtype) for y in shapes]
    data = leaves, cotangents, [normal(leaves[i]) for i in chosen]
    dtypes = {leaves[i].dtype.name for i in chosen} | {y.dtype.name for y in shapes}
    tolerance = max((TOLERANCES.get(dtype, TOLERANCES["bfloat16"]) for dtype in dtypes), key=lambda one: one.rtol)
    names = {kind: [arguments.names[i] for i in chosen] for kind in ("gradient", "hessian product")}
    names["value"] = ["value"] if len(shapes) == 1 else [f"value {i}" for i in range(len(shapes))]
    difference, measured, programs = None, [], {}
    for implementation in dict.fromkeys((reference, *implementations)):
        functions = _derivatives(variant(implementation), chosen)
        one, results = _measure(implementation, functions, data, second_order, seconds, programs, bool(measured))
        difference = difference or _difference_from(results, functions, data, chosen, tolerance)
        found = (difference(kind, i, name, results[kind][i]) for kind in results for i, name in enumerate(names[kind]))
        measured.append(dataclasses.replace(one, differences=tuple(found)))
    return Comparison(name_of(function), jax.devices()[0].device_kind, reference, tuple(measured))


def _derivatives(function: Callable, chosen: Sequence[int]) -> Mapping[str, Sequence[Callable]]:
    """Return, for each kind of result, functions of (arguments, cotangents, direction).

    The kinds are "value", "gradient", "both" (without a direction), and "hessian product" (in forward mode, then in
    reverse mode). `function` maps a list of arrays to results. Derivatives are with respect to the arguments with
    indices `chosen`.
    """

    def of_chosen(leaves):
        def call(*values):
            moved = dict(zip(chosen, values, strict=True))
            return function([moved.get(i, a) for i, a in enumerate(leaves)])

        return call, [leaves[i] for i in chosen]

    def gradients(leaves, cotangents):
        call, values = of_chosen(leaves)
        return value_and_gradients(call)(values, cotangents)

    def hessian_product(reverse, leaves, cotangents, direction):
        call, values = of_chosen(leaves)
        gradient = lambda values: value_and_gradients(call)(values, cotangents)[1]  # noqa: E731
        return along(gradient, direction, reverse)(values)

    value, gradient = (lambda *data, k=k: gradients(*data[:2])[k] for k in (0, 1))
    products = [functools.partial(hessian_product, reverse) for reverse in (False, True)]
    return {"both": [gradients], "value": [value], "gradient": [gradient], "hessian product": products}


def _measure(implementation, functions, data, second_order, seconds, programs, may_fail):
    """Return the costs of one implementation, and a dict from kinds of results to arrays.

    `functions` are from `_derivatives`, and `data` are their arguments. `second_order` adds the Hessian product.
    `seconds` is as in `compare`. `programs` maps the texts of programs to implementations, to find identical programs.
    With `may_fail`, errors are recorded, not raised.
    """
    (gradients,), one, results = functions["both"], Measured(implementation), {}
    try:
        traced_once = jax.jit(gradients).trace(*data[:2])
        text = traced_once.lower().as_text()
        interpreted = jax.default_backend() != "gpu" and has(traced_once.jaxpr, {"launch"})
        one = dataclasses.replace(one, same_as=programs.get(text), interpreted=interpreted)
        programs.setdefault(text, implementation)
        program, (y, gradient) = _run(gradients, data[:2], seconds)
        one, results = dataclasses.replace(one, gradients=program), {"value": y, "gradient": gradient}
        if second_order:
            run = lambda function: _run(function, data, seconds)  # noqa: E731
            program, results["hessian product"] = in_a_mode(run, functions["hessian product"])
            one = dataclasses.replace(one, hessian_product=program)
    except Exception as error:
        if not may_fail:
            raise
        missing = isinstance(error, NotImplementedError) and "has no implementation" in str(error)
        failed = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        one = dataclasses.replace(one, failed=failed, missing=missing)
    return one, results


def _run(function: Callable, arguments: tuple, seconds: float) -> tuple[Program, Any]:
    arguments = jax.device_put(arguments)
    compiled, compile_seconds = compile_program(function, arguments)
    results = compiled(*arguments)
    calls = CALLS if jax.default_backend() == "gpu" else 1  # XLA's CPU compiler makes slower code from a loop
    program = compiled if calls == 1 else jax.jit(functools.partial(_one_after_another, function, calls, results))
    program_seconds, host_waited, rounds = device_seconds(program, arguments, seconds)
    memory = compiled.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    per_call = [seconds / calls * 1e6 for seconds in (program_seconds, min(rounds), max(rounds))]
    program = Program(per_call[0], host_waited, compile_seconds, whole + temporary, temporary, *per_call[1:])
    return program, jax.tree.map(np.asarray, results)


def _one_after_another(function: Callable, calls: int, results: Any, *arguments: Any) -> Any:

    def call(before, _):
        # The barrier prevents XLA from merging and overlapping calls.
        given, _ = lax.optimization_barrier((arguments, before))
        return function(*given), None

    return lax.scan(call, jax.tree.map(jnp.zeros_like, results), length=calls)[0]


def _difference_from(results, functions, data, chosen, tolerance):
    """Return a function that compares arrays with the `results` of the reference, as computed and in float64."""
    mode = jax.config.jax_enable_x64

    def trace(function, _):
        with jax.enable_x64(mode):
            return traced(function, data)

    compiled = functools.cache(lambda function: jax.jit(lifted(function, trace)))

    def compute(kind, leaves):
        with jax.enable_x64(True), np.errstate(all="ignore"):
            return in_a_mode(lambda function: in_numpy(compiled(function)(leaves, *data[1:])), functions[kind])

    in_float64 = functools.cache(lambda kind: compute(kind, data[0]))

    @functools.cache
    def nearby(kind):
        """Return the results of `compute(kind, ...)` for several arguments near the data, where ties are broken."""
        random, found = generator(2), []
        for _ in range(NEIGHBORS):
            leaves = list(data[0])
            for i in chosen:
                a = np.asarray(leaves[i], np.float64)
                leaves[i] = a + KINK_RTOL * scale_of(a) * random.uniform(-1, 1, a.shape)
            found.append(compute(kind, leaves))
        return found

    def mistakes(kind, i, a, reference):
        """Return a mask of the wrong elements of `a`, and the expected array: `reference`, or if `a` differs from it,
        the array computed in float64. Both are array i of the results of this kind, such as "gradient"."""
        wrong = ~close(a, reference, tolerance)
        try:
            e = in_float64(kind)[i] if wrong.any() else reference
        except Exception:  # such as the error of a callback in float32
            return wrong, reference
        wrong = ~close(a, e, tolerance)
        if wrong.any():
            with np.errstate(invalid="ignore"):
                off = np.abs(reference - e)
            error = float(off[np.isfinite(off)].max(initial=0.0))
            wrong &= ~is_as_exact(a, e, reference, np.ones(a.shape, bool), tolerance, lambda: error)
        if wrong.any() and kind != "value":
            near = np.stack([e, *(results[i] for results in nearby(kind))])
            wrong &= ~is_between(a, near, allowed(e, tolerance))
        return wrong, e

    def difference(kind, i, name, a):
        a, reference = np.asarray(a, np.float64), np.asarray(results[kind][i], np.float64)
        wrong, e = mistakes(kind, i, a, reference)
        _, off = excess_and_difference(a, reference, tolerance)
        with np.errstate(invalid="ignore", over="ignore"):
            relative = np.linalg.norm(off) / max(np.linalg.norm(reference[np.isfinite(reference)]), 1e-300)
        worst = ""
        if wrong.any():
            at = np.unravel_index(np.argmax(np.where(wrong, excess_and_difference(a, e, tolerance)[0], -1.0)), a.shape)
            index = f"[{', '.join(map(str, at))}]" if at else ""
            worst = f"{name}{index} is {a[at]:.6g}; wants {e[at]:.6g}"
        return Difference(kind, name, a.shape, float(off.max(initial=0.0)), float(relative), int(wrong.sum()), worst)

    return difference
