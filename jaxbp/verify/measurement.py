import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.pairing import Implementation
from jaxbp.verify.arguments import Arguments
from jaxbp.verify.derivatives import has_no_forward_mode
from jaxbp.verify.timing import compile_program, device_seconds

CALLS = 10
"""Calls per timed program on a GPU, which does not wait for the host between them."""
KINDS = ("value", "gradient", "hessian product")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between an array a and the reference's array.

    Attributes:
      kind: one of `KINDS`.
      name: the result or the differentiated argument.
      absolute: the largest difference of an element; infinite if an element is NaN in only one array.
      relative: `‖a - reference‖ / ‖reference‖`.
      mistakes: the number of elements that rounding does not explain.
      worst: the element that exceeds the allowed difference most, its number, and the expected number, if any.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    mistakes: int = 0
    worst: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """The costs of a compiled program.

    Attributes:
      microseconds: the time per call, while further calls are queued. Small arrays stay in the device's cache.
      host_waited: the fraction of the time in which the host waits for the device. Near 0, the host limits the time.
      peak_bytes: the size of arguments, results, and temporaries, as XLA reports it.
      fastest, slowest: microseconds per call in the fastest and the slowest round.
    """

    microseconds: float
    host_waited: float
    compile_seconds: float
    peak_bytes: int
    temporary_bytes: int
    fastest: float | None = None
    slowest: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """The findings for one implementation.

    Attributes:
      failed: why all programs, or only the Hessian product, failed; else None.
      same_as: the earlier implementation with an identical program of value and gradients, or None.
      missing: whether the function has no implementation of this name.
    """

    implementation: str | None
    differences: tuple[Difference, ...] = ()
    gradients: Program | None = None
    hessian_product: Program | None = None
    failed: str | None = None
    same_as: str | None = None
    missing: bool = False

    @property
    def programs(self) -> list[tuple[str, Program]]:
        both = zip(KINDS[1:], (self.gradients, self.hessian_product), strict=True)
        return [(kind, program) for kind, program in both if program is not None]

    def difference(self, kind: str, name: str) -> Difference | None:
        return next((one for one in self.differences if (one.kind, one.name) == (kind, name)), None)

    def largest(self, kind: str) -> Difference | None:
        of_kind = [difference for difference in self.differences if difference.kind == kind]
        return max(of_kind, key=lambda difference: difference.relative, default=None)


def derivatives_of(
    function: Callable, arguments: Arguments, chosen: Sequence[int]
) -> tuple[Callable, Callable, Callable]:
    """Return functions for gradients, and for Hessian products in forward over reverse and reverse over reverse mode.

    `chosen` has the indices in `arguments.leaves` to differentiate with respect to.
    """

    def of_chosen(leaves, function):
        def call(*values):
            moved = dict(zip(chosen, values, strict=True))
            return function([moved.get(i, a) for i, a in enumerate(leaves)])

        return call, [leaves[i] for i in chosen]

    def gradients(leaves, cotangents):
        call, values = of_chosen(leaves, lambda leaves: arguments.call(function, leaves))
        y, vjp = jax.vjp(call, *values)
        return y, vjp(list(cotangents))

    def hessian_product(leaves, cotangents, direction):
        call, values = of_chosen(leaves, lambda leaves: gradients(leaves, cotangents)[1])
        return jax.jvp(call, values, list(direction))[1]

    def in_reverse(leaves, cotangents, direction):
        call, values = of_chosen(leaves, lambda leaves: gradients(leaves, cotangents)[1])
        slope = lambda *values: sum(jnp.vdot(d, g) for d, g in zip(direction, call(*values), strict=True))  # noqa: E731
        return jax.grad(slope, argnums=tuple(range(len(values))))(*values)

    return gradients, hessian_product, in_reverse


def measure(
    implementation: Implementation,
    functions: tuple[Callable, Callable, Callable],
    data: tuple[list, list, list],
    order: int,
    seconds: float,
    programs: dict[str, Implementation],
    *,
    may_fail: bool,
) -> tuple[Measured, dict[str, Any]]:
    """Return the costs of one implementation, and a dict from names in `KINDS` to arrays.

    Args:
      functions, data: the functions that `derivatives_of` returns, and their arguments.
      order: 2 to include the Hessian product.
      programs: maps the texts of programs to implementations, to find identical programs.
    """
    (gradients, hessian_product, in_reverse), one, results = functions, Measured(implementation), {}
    try:
        text = jax.jit(gradients).lower(*data[:2]).as_text()
        one = dataclasses.replace(one, same_as=programs.get(text))
        programs.setdefault(text, implementation)
        program, (y, gradient) = _run(gradients, data[:2], seconds)
        one, results = dataclasses.replace(one, gradients=program), {"value": y, "gradient": gradient}
        if order == 2:
            try:
                program, product = _run(hessian_product, data, seconds)
            except TypeError as error:
                if not has_no_forward_mode(error):
                    raise
                program, product = _run(in_reverse, data, seconds)
            one, results = dataclasses.replace(one, hessian_product=program), results | {"hessian product": product}
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
