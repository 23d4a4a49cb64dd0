import dataclasses
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
from jaxbp.common import checks
from jaxbp.pairing import IMPLEMENTATIONS
from jaxbp.verify.arguments import name_of, tracers_explained
from jaxbp.verify.interpreter import bind, called, evaluate, scan_sizes, while_parts
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
      TypeError: `function` is not a function, or has a hand-written derivative that JAX cannot transpose.

    Example:
      >>> print(jaxbp.verify.find_nan(lambda x: jnp.sqrt(x).sum(), jnp.array([0.0, 1.0])))
      div: a value becomes inf
        at example.py:3
        ...
    """
    checks.function("find_nan", "function", function)
    leaves, structure = jax.tree.flatten(arguments)
    leaves = list(map(jnp.asarray, leaves))
    floating = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def of_floating(leaves):
        def run(*values):
            given = dict(zip(floating, values, strict=True))
            y = function(*structure.unflatten([given.get(i, a) for i, a in enumerate(leaves)]), **options)
            return [a for a in jax.tree.leaves(y) if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]

        return run, *(leaves[i] for i in floating)

    def value_and_gradients(leaves, cotangents):
        y, vjp = jax.vjp(*of_floating(leaves))
        return y, vjp(cotangents)

    lines, inputs = RuleLines(), []
    with lines.recording(), tracers_explained("find_nan", function):
        cotangents = [jnp.ones(y.shape, y.dtype) for y in jax.eval_shape(*of_floating(leaves))]
        program = jax.make_jaxpr(value_and_gradients)(leaves, cotangents)
    for (path, _), a in zip(jax.tree_util.tree_flatten_with_path(arguments)[0], leaves, strict=True):
        source = f"{name_of(function)}, argument {jax.tree_util.keystr(path)}"
        origin = None if _finite(a) else NonFinite("argument", "", "", False, source, "", (), (), (np.asarray(a),))
        inputs.append(_Value(a, origin))
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

    def inside(self, equation: Any, *loop: str) -> "_Place":
        frames = [f"{file}:{line}" for file, line in self.lines.frames(equation.source_info.traceback)]
        shown = [f for f in frames if not f.startswith(_HIDDEN)]
        sources = tuple(
            next((f for f in shown if f.startswith(_LIBRARY) == inner), old)
            for inner, old in zip((False, True), self.sources, strict=True)
        )
        return _Place(self.lines, f"{self.scope}/{equation.source_info.name_stack}", (*self.loops, *loop), sources)


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
    results = bind(equation, [a.array for a in inputs])
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
    origin = next((a.origin for a in wrong if a.origin is not None), None)
    from_constant = wrong and not any(_has("NaN", a) for a in results)
    if origin is not None or from_constant:
        return origin
    place, name = place.inside(equation), equation.primitive.name
    # The outermost op and its implementation, in a scope like `transpose(jvp(relu))/xla`
    pairs = itertools.pairwise(filter(None, re.split(r"[/()]+", place.scope)))
    op = next((pair for pair in pairs if pair[1] in IMPLEMENTATIONS), ("", ""))
    name = equation.params["name"] if name == "launch" else name
    arrays = (tuple(map(np.asarray, side)) for side in ([a.array for a in inputs], results))
    return NonFinite(name, *op, "transpose(" in place.scope, *place.sources, place.loops, *arrays)


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
    of_condition, of_body, state = while_parts(equation.params, inputs)
    for i in itertools.count():
        (condition,) = _run(equation.params["cond_jaxpr"], [*of_condition, *state], place.inside(equation))
        if not condition.array:
            return [a.origin for a in state]
        inside = place.inside(equation, f"while_loop, iteration {i}")
        state = _run(equation.params["body_jaxpr"], [*of_body, *state], inside)


_LOOPS = {"scan": _run_scan, "while": _run_while}


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
    counts = {"NaN": np.isnan(wide).sum(), "inf": np.isinf(wide).sum()}
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    return f"{kind}, {', '.join(parts)}"
