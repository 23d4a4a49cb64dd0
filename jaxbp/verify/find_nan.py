import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxbp
import pallas_kernels
from jaxbp import pairing
from jaxbp.pairing import IMPLEMENTATIONS
from jaxbp.verify.arguments import name_of
from jaxbp.verify.interpreter import bind, called, evaluate, scan_sizes
from pallas_kernels.core import launch
from pallas_kernels.core.source_lines import JAX_FOLDER, RuleLines

_LIBRARY = tuple(str(Path(package.__file__).parent) for package in (jaxbp, pallas_kernels))
_HIDDEN = (JAX_FOLDER, "<frozen", __file__, str(Path(pairing.__file__).parent), launch.__file__)
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first operation at which a value or a cotangent stops being finite.

    Attributes:
      operation: JAX's primitive, such as "log"; or "argument" if an argument is not finite.
      op, implementation: the enclosing op of jaxbp and its implementation, or "".
      cotangent: whether the operation belongs to the backward pass.
      source: the line of the user's code, as "file:line".
      inner_source: the line in jaxbp or in its kernels, or "".
      loops: the enclosing loops, outermost first, such as `("scan, iteration 3",)`.
    """

    operation: str
    op: str
    implementation: str
    cotangent: bool
    source: str
    inner_source: str
    loops: tuple[str, ...]
    inputs: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    def __str__(self) -> str:
        what = "cotangent" if self.cotangent else "value"
        kinds = " and ".join(name for name in ("NaN", "inf") if any(_has(name, a) for a in self.results))
        within = f" in {self.op}, implementation={self.implementation!r}" if self.op else ""
        lines = [f"{self.operation}{within}: a {what} becomes {kinds}"]
        lines += [f"  at {source}" for source in (self.source, self.inner_source) if source]
        lines += [f"  in {loop}" for loop in self.loops]
        for title, arrays in (("input", self.inputs), ("result", self.results)):
            lines += [f"  {title} {i}: {_summary(a)}" for i, a in enumerate(arrays[:_SHOWN])]
        return "\n".join(lines)


def find_nan(function: Callable, *arguments: Any, **options: Any) -> NonFinite | None:
    """Run a function and its gradients, and return the first operation that makes a value or cotangent not finite.

    The sum of the floating results is differentiated. Operations run one after another, also inside `jax.jit`, custom
    rules, loops, and branches, so that they may round differently. A kernel, a `shard_map`, or a linear solve is one
    operation. For an operation in a custom rule, such as the backward of a `custom_vjp`, `source` is the line in the
    rule.

    A value counts only if it makes a result or a gradient not finite. Infinite constants, such as the -inf of a mask,
    and infinite values made from them do not count, but a NaN made from them counts.

    Args:
      arguments: pytrees of arrays.
      options: static.

    Raises:
      TypeError: the function has a hand-written derivative that JAX cannot transpose.

    Example:
      >>> print(jaxbp.verify.find_nan(lambda x: jnp.sqrt(x).sum(), jnp.array([0.0, 1.0])))
      div: a value becomes inf
        at example.py:3
        ...
    """
    leaves, structure = jax.tree.flatten(arguments)
    leaves = list(map(jnp.asarray, leaves))
    floating = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def results_of(leaves):
        def of_floating(*values):
            given = dict(zip(floating, values, strict=True))
            y = function(*structure.unflatten([given.get(i, a) for i, a in enumerate(leaves)]), **options)
            return [a for a in jax.tree.leaves(y) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]

        return of_floating, [leaves[i] for i in floating]

    def value_and_gradients(leaves, cotangents):
        of_floating, values = results_of(leaves)
        y, vjp = jax.vjp(of_floating, *values)
        return y, vjp(cotangents)

    lines = RuleLines()
    with lines.recording():
        of_floating, values = results_of(leaves)
        cotangents = [jnp.ones(y.shape, y.dtype) for y in jax.eval_shape(of_floating, *values)]
        program = jax.make_jaxpr(value_and_gradients)(leaves, cotangents)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(arguments)[0]]
    describe = functools.partial(_argument, name_of(function))
    inputs = [_Value(a, None if _finite(a) else describe(name, a)) for name, a in zip(names, leaves, strict=True)]
    results = _run(program, [*inputs, *map(_Value, cotangents)], _Place(lines))
    return next((a.origin for a in results if not _finite(a.array) and a.origin is not None), None)


@dataclasses.dataclass(frozen=True)
class _Value:
    array: Any
    origin: NonFinite | None = None
    is_constant: bool = False


@dataclasses.dataclass(frozen=True)
class _Place:
    lines: RuleLines
    scope: str = ""
    loops: tuple[str, ...] = ()
    sources: tuple[str, str] = ("", "")

    def inside(self, equation: Any, loop: str | None = None) -> "_Place":
        sources = tuple(map(lambda new, old: new or old, _sources(self.lines, equation), self.sources))
        scope = f"{self.scope}/{equation.source_info.name_stack}"
        return _Place(self.lines, scope, self.loops if loop is None else (*self.loops, loop), sources)


def _run(program: Any, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    rule = lambda equation, inputs: _run_equation(equation, inputs, place)  # noqa: E731
    return evaluate(program, inputs, rule, lambda a: _Value(a, is_constant=True))


def _run_equation(equation: Any, inputs: Sequence[_Value], place: _Place) -> list[_Value]:
    params, name = equation.params, equation.primitive.name
    program = called(equation) or params.get("program")  # of jaxbp's `linear_call`
    if program is not None:
        return _run(program, inputs, place.inside(equation))
    if name == "cond":
        branch = params["branches"][int(np.clip(inputs[0].array, 0, len(params["branches"]) - 1))]
        return _run(branch, inputs[1:], place.inside(equation))
    arrays = [a.array for a in inputs]
    results = bind(equation, arrays)
    is_constant = all(a.is_constant for a in inputs)
    if all(map(_finite, results)) or (is_constant and not any(_has("NaN", a) for a in results)):
        return [_Value(a, is_constant=is_constant) for a in results]
    # A loop runs again, one iteration at a time.
    origins = _LOOPS[name](equation, inputs, place) if name in _LOOPS else [None]
    if not any(origins):
        origins = [_origin(equation, inputs, results, place)] * len(results)
    return [_Value(a, None if _finite(a) else origin) for a, origin in zip(results, origins, strict=True)]


def _origin(equation: Any, inputs: Sequence[_Value], results: Sequence[Any], place: _Place) -> NonFinite | None:
    wrong = [a for a in inputs if not _finite(a.array)]
    from_constant = wrong and not any(_has("NaN", a) for a in results)
    origin = next((a.origin for a in wrong if a.origin is not None), None)
    if origin is not None or from_constant:
        return origin
    return _operation(equation, [a.array for a in inputs], results, place.inside(equation))


def _run_scan(equation: Any, inputs: Sequence[_Value], place: _Place) -> list[NonFinite | None]:
    params = equation.params
    consts, carry = scan_sizes(params)
    fixed, state, xs = inputs[:consts], list(inputs[consts : consts + carry]), inputs[consts + carry :]
    of_rows: list[NonFinite | None] = [None] * (len(equation.outvars) - carry)
    for i in sorted(range(params["length"]), reverse=params["reverse"]):
        row = [_Value(a.array[i], a.origin, a.is_constant) for a in xs]
        results = _run(params["jaxpr"], [*fixed, *state, *row], place.inside(equation, f"scan, iteration {i}"))
        state = results[:carry]
        of_rows = [old or new.origin for old, new in zip(of_rows, results[carry:], strict=True)]
    return [*(a.origin for a in state), *of_rows]


def _run_while(equation: Any, inputs: Sequence[_Value], place: _Place) -> list[NonFinite | None]:
    params = equation.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body, state = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
    for i in itertools.count():
        (condition,) = _run(params["cond_jaxpr"], [*of_condition, *state], place.inside(equation))
        if not condition.array:
            return [a.origin for a in state]
        state = _run(params["body_jaxpr"], [*of_body, *state], place.inside(equation, f"while_loop, iteration {i}"))


_LOOPS = {"scan": _run_scan, "while": _run_while}


def _argument(function: str, name: str, a: Any) -> NonFinite:
    array = np.asarray(a)
    return NonFinite("argument", "", "", False, f"{function}, argument {name}", "", (), (), (array,))


def _operation(equation: Any, inputs: Sequence[Any], results: Sequence[Any], place: _Place) -> NonFinite:
    op, implementation = _op_in(place.scope)
    arrays = (tuple(np.asarray(a) for a in side) for side in (inputs, results))
    name = equation.params["name"] if equation.primitive.name == "launch" else equation.primitive.name
    return NonFinite(name, op, implementation, "transpose(" in place.scope, *place.sources, place.loops, *arrays)


def _op_in(scope: str) -> tuple[str, str]:
    """Return the outermost op and its implementation in a scope like `transpose(jvp(relu))/xla`."""
    names = [name for name in re.split(r"[/()]+", scope) if name]
    pairs = [(op, name) for op, name in itertools.pairwise(names) if name in IMPLEMENTATIONS]
    return pairs[0] if pairs else ("", "")


def _sources(lines: RuleLines, equation: Any) -> tuple[str, str]:
    frames = [f"{file}:{line}" for file, line in lines.frames(equation.source_info.traceback)]
    shown = [f for f in frames if not f.startswith(_HIDDEN)]
    return tuple(next((f for f in shown if f.startswith(_LIBRARY) == inner), "") for inner in (False, True))


def _finite(a: Any) -> bool:
    return not any(_has(name, a) for name in ("NaN", "inf"))


def _has(name: str, a: Any) -> bool:
    dtype = a.dtype if hasattr(a, "dtype") else np.result_type(a)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return bool(jnp.any(jnp.isnan(a) if name == "NaN" else jnp.isinf(a)))


def _summary(a: np.ndarray) -> str:
    kind = f"{a.dtype}{list(a.shape)}"
    if a.size == 1:
        return f"{kind} {a.item()}"
    if not jnp.issubdtype(a.dtype, jnp.number):
        return kind
    wide = np.abs(a) if jnp.iscomplexobj(a) else a.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    parts = [f"{finite.min():.6g} to {finite.max():.6g}"] if finite.size else []
    parts += [f"{count} {name}" for name in ("NaN", "inf") if (count := int(_COUNTS[name](wide).sum()))]
    return f"{kind}, {', '.join(parts)}"


_COUNTS = {"NaN": np.isnan, "inf": np.isinf}
