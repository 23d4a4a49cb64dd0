import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.verify import interpreter
from jaxbp.verify.arguments import Arguments, bind, name_of, takes_implementation
from jaxbp.verify.derivatives import (
    Arrays,
    Derivatives,
    evenly,
    flat,
    float64,
    in_float64,
    is_symmetric,
    quickly_compiled,
    scale_of,
    value_and_gradients,
)
from jaxbp.verify.differences import EPS, STOP, Slopes, confirmed, decided, differences, held
from jaxbp.verify.points import Point

MOST_NOT_FINITE = 64


class Expected(NamedTuple):
    """The expected results of an op, or their expected derivatives of one order.

    Attributes:
      order: 0 for the results, 1 for the gradients, and 2 or 3 for higher derivatives.
      against: how `arrays` was computed, such as "autodiff" or "finite differences".
      arrays: one array per result at order 0, else one per floating argument.
      contradicted: None, or masks of the elements of `arrays` at which finite differences replace autodiff.
      undecided: None, or masks of the elements at which autodiff is not finite, and finite differences give no slope.
    """

    order: int
    against: str
    arrays: Arrays
    contradicted: Arrays | None = None
    undecided: Arrays | None = None


class Reference:
    """Expected results and derivatives of an op, computed from its forward in float64.

    Attributes:
      function, plain: the forward, and the forward without custom rules.
      independent: whether JAX differentiates the forward without custom rules, such as the op's backward.
      constants: numbers in the forward at which it may have kinks.
      symmetric: whether each floating argument is symmetric.
      notes: remarks on how the expected numbers are computed.
    """

    def __init__(
        self,
        op: Callable,
        arguments: Arguments,
        options: Mapping[str, Any],
        gradient_of: Callable | None = None,
        **compiling: Any,
    ):
        self.names, self._arguments = arguments.float_names, arguments.floats
        self.symmetric = [is_symmetric(np.asarray(a, np.float64)) for a in arguments.floats]
        forward, self.results, is_autodiff, refused = _plain_forward(op, arguments, options)
        self.result_names = ["value"] if len(self.results) == 1 else [f"value {i}" for i in range(len(self.results))]
        self.function = moved = forward
        if gradient_of is not None:
            moved = arguments.of_floats(functools.partial(gradient_of, **options))
            shapes, wanted = ([y.shape for y in of] for of in (jax.eval_shape(moved, *arguments.floats), self.results))
            if shapes != wanted:
                raise ValueError(
                    f"check: gradient_of={name_of(gradient_of)} has results of shapes {shapes}; wants {wanted}, as the "
                    "op's results"
                )
            self.function = _with_gradient_of(forward, moved)
        trace = _traced_in_float64 if refused is None else lambda f, *args: jax.make_jaxpr(f)(*args)
        program, of_forward = trace(moved, *arguments.floats), trace(forward, *arguments.floats)
        if _signature(program) != _signature(trace(lambda *values: moved(*values), *arguments.floats)):
            raise TypeError(
                f"check: {name_of(op)} is not pure: two traces of it differ; wants a function whose result depends "
                "on its arguments only"
            )
        has_rules = interpreter.has_custom_rules(of_forward)
        self.independent = is_autodiff or gradient_of is not None or not has_rules
        self.constants = _constants(jax.make_jaxpr(moved)(*arguments.floats))
        self._eps, self.notes, self._transform = EPS, [], lambda program: program
        if not (has_rules or takes_implementation(op)):
            self.notes.append(f"{name_of(op)} has no custom rule, so the check compares JAX's autodiff")
        if interpreter.stops_by_value(program):
            self._eps = float(jnp.finfo(np.float32).eps)
            self.notes.append("a condition on numbers stops a while_loop; finite differences take larger steps")
        programs = [program, of_forward]
        if not self.independent:
            with contextlib.suppress(Exception):  # no reverse mode
                programs.append(trace(value_and_gradients(forward), arguments.floats, self.results))
        if (dtype := interpreter.narrowest(*programs)) is not None and dtype != np.float64:
            gradients = programs[2].out_avals[len(self.results) :] if len(programs) > 2 else ()
            self._lift(op, dtype, refused, refused is not None or any(g.dtype != np.float64 for g in gradients))
        self._stops, transform = interpreter.has(program, STOP), self._transform
        self._compiling = compiling = {**quickly_compiled([*arguments.floats, *self.results]), **compiling}
        self._derivatives = Derivatives(self.function, transform=transform, primal=not self.independent, **compiling)
        self.plain, self._of_plain = self.function, self._derivatives
        if not self.independent:
            self.plain = interpreter.without_custom_rules(self.function)
            self._of_plain = Derivatives(self.plain, transform=transform, **compiling)
        results = transform(moved)
        moved_from = held(results) if self._stops else lambda moved, base: results(*moved)
        self._slopes = differences(moved_from, self._eps, **compiling)
        self._jumps, self._at_integers, self.less_precise = {}, None, functools.cache(self._less_precise)
        self._step, self._rtol = self._eps ** (1 / 3), 1e-6 if self._eps == EPS else 10 * self._eps ** (2 / 3)

    def _lift(self, op, dtype, refused, is_narrow):
        transform = interpreter.lifted
        if is_narrow:
            trace = interpreter.traced_in([a.dtype for a in self._arguments], [y.dtype for y in self.results])
            transform = functools.partial(interpreter.lifted, trace=trace)
        try:
            _traced_in_float64(transform(value_and_gradients(self.function)), self._arguments, self.results)
        except Exception as error:
            if refused is not None:
                raise TypeError(
                    f"check: {name_of(op)} does not take float64, which the reference needs: {refused}"
                ) from error
            reason = str(error) if isinstance(error, interpreter.CannotLiftError) else type(error).__name__
            self._eps = float(jnp.finfo(dtype).eps)
            self.notes.append(
                f"computes in {dtype.name}, not in float64 ({reason}); finite differences take larger steps"
            )
        else:
            self.notes.append(f"computes in {dtype.name}; the reference runs the same program in float64")
            self._transform = transform

    def _less_precise(self, *dtypes: np.dtype) -> np.dtype | None:
        """Return the least precise dtype in which the forward computes, or None if an argument is not more precise.
        `dtypes` are the arguments' dtypes."""
        shapes = [jax.ShapeDtypeStruct(a.shape, dtype) for a, dtype in zip(self._arguments, dtypes, strict=True)]
        eps = lambda dtype: float(jnp.finfo(dtype).eps)  # noqa: E731
        try:
            narrow = interpreter.narrowest(jax.make_jaxpr(self.function)(*shapes))
        except Exception:  # the check of a dtype reports it
            return None
        return narrow if narrow is not None and eps(narrow) > max(map(eps, dtypes)) else None

    def value_and_gradients(self, point: Point) -> tuple[Arrays, Arrays]:
        return in_float64(self._derivatives.value_and_gradients, *_arrays(point)[:2])

    def derivative(self, order: int, point: Point) -> Arrays:
        return in_float64(self._derivatives, order, *_arrays(point))

    def by_rules_of_jax(self, order: int, point: Point) -> Arrays:
        return in_float64(self._of_plain, order, *_arrays(point))

    def at_integers(self, programs: Any, point: Point, integers: Sequence[Any]) -> Arrays:
        """Return the results and gradients of `programs`, which use JAX's autodiff, at `point` in float64, with
        `integers` instead of the arguments that are not floating."""
        if self._at_integers is None:
            self._at_integers = programs.of_integers(self._transform)
        return in_float64(self._at_integers, *_arrays(point)[:2], integers)

    def first_orders(
        self, point: Point, steps: Sequence[float | None], most: int, nan_is_wrong: bool = True
    ) -> tuple[Expected, Expected]:
        """Return the expected results and gradients. Finite differences check about `most` elements per gradient.

        `steps` has the step of finite differences for each argument. None is as in `Tolerance`. With
        `nan_is_wrong`, the mean of two one-sided slopes replaces a NaN of autodiff.
        """
        y, autodiff = self.value_and_gradients(point)
        arrays = [np.array(g) for g in autodiff]
        contradicted, undecided = ([np.zeros(g.shape, bool) for g in autodiff] for _ in range(2))
        told, sampled = True, []

        @functools.cache
        def error():
            moved = self.rounding(0, point)
            return sum(float(np.sum(np.abs(c) * m)) for c, m in zip(point.cotangents, moved, strict=True))

        def look(i, indices):
            return lambda which, by: self._slopes(point, i, indices[which], by)

        for i, (step, gradient) in enumerate(zip(steps, map(np.ravel, autodiff), strict=True)):
            indices = self._sampled(point, i, gradient, most)
            if not indices.size:
                continue
            if indices.size < gradient.size:
                sampled.append(f"{indices.size:,} of {gradient.size:,}")
            by = self._steps(i, point.values[i], step)
            slope, other, agreed = confirmed(gradient[indices], by[indices], look(i, indices), error, self._rtol)
            if not (self.independent or agreed.all()) and (by_rules := self._by_rules(point, i)) is not None:
                by_rules = by_rules[indices]
                # The slopes of the median of equal numbers are 0.
                other &= ~np.isclose(gradient[indices], by_rules, rtol=self._rtol, atol=0)
                slope = np.where(agreed | other | ~np.isfinite(by_rules), slope, by_rules)
            arrays[i].flat[indices], contradicted[i].flat[indices] = slope, other
            told &= bool(agreed.all())
            undecided[i].flat[:] = ~np.isfinite(gradient)
            if (infinite := np.flatnonzero(undecided[i])[:MOST_NOT_FINITE]).size:
                slope, mean = decided(by[infinite], look(i, infinite))
                undecided[i].flat[infinite] = unknown = np.isnan(slope)
                kink = nan_is_wrong & unknown & np.isfinite(mean) & np.isnan(gradient[infinite])
                for where, slopes in ((np.isfinite(slope), slope), (kink, mean)):
                    arrays[i].flat[infinite[where]], contradicted[i].flat[infinite[where]] = slopes[where], True
        against = "finite differences" if told else "finite differences; autodiff where there is a kink"
        if sampled:
            against += f"; autodiff except for {', '.join(sampled)} elements"
        return Expected(0, "float64", y), Expected(1, against, arrays, contradicted, undecided)

    def _sampled(self, point, i, gradient, most):
        spread = evenly(gradient.size, most)
        if self.independent or gradient.size <= most or (other := self._by_rules(point, i)) is None:
            return spread
        off = np.nan_to_num(np.abs(other - gradient), nan=np.inf)
        worst = np.argsort(-off, kind="stable")[: most // 2]
        return np.unique(np.concatenate([spread, worst[off[worst] > 0]]))

    def _by_rules(self, point, i):
        try:
            return np.ravel(self.by_rules_of_jax(1, point)[i])
        except Exception:  # no reverse mode
            return None

    def _steps(self, i, a, step):
        """Return the largest step of finite differences for each element of a, as a vector.

        a is the value of argument i. `step` is the step of the tolerance, or None for a step in proportion to the
        elements of a: see `Tolerance`.
        """
        scale = scale_of(a)
        if self._eps != EPS:  # in added data, all elements may be tiny
            scale = max(scale, scale_of(np.asarray(self._arguments[i], np.float64)))
        by_scale = np.maximum(scale, np.abs(np.nan_to_num(a.ravel(), posinf=0, neginf=0))) * self._step
        if step is None:
            return by_scale
        return np.full(a.size, step) if self._eps == EPS else np.maximum(step, by_scale)

    def higher(self, order: int, point: Point) -> Expected:
        """Return the second or third derivative by autodiff, checked by finite differences of the lower derivative."""
        autodiff, lower = self.derivative(order, point), functools.partial(self._derivatives.with_square, order - 1)
        values, *others = _arrays(point)
        if self._stops:
            in_float64(lower, values, *others)
            near = jax.jit(held(self._derivatives.plain(order - 1, square=True)), **self._compiling)
            # Arguments of `stop_gradient` inside the op keep the values that they have at this point.
            lower = lambda moved, *others: near((moved, *others), (values, *others))  # noqa: E731
        gradient_at = lambda moved: flat(in_float64(lower, moved, *others))  # noqa: E731
        gradient = gradient_at(values)

        def look(which, by):
            left, right = (
                gradient_at([a + by * d for a, d in zip(values, point.directions[order - 2], strict=True)])[which]
                for by in (-by[0], by[0])
            )
            noise = np.full(right.shape, 8 * self._eps * scale_of(gradient) / by[0])
            slopes = (right - gradient[which]) / by[0], (gradient[which] - left) / by[0]
            return Slopes((right - left) / (2 * by[0]), *np.sort(slopes, axis=0), *slopes, noise, noise)

        error = lambda: float(flat(self.rounding(order - 1, point)).max())  # noqa: E731
        of_all = flat(autodiff)
        slope, other, agreed = confirmed(of_all, np.full(of_all.shape, self._step), look, error, self._rtol)
        against = "finite differences of gradients" + ("" if agreed.all() else "; autodiff at a kink")
        sizes = np.cumsum([a.size for a in autodiff])[:-1]
        shaped = lambda whole: [p.reshape(a.shape) for p, a in zip(np.split(whole, sizes), autodiff, strict=True)]  # noqa: E731
        return Expected(order, against, shaped(slope), shaped(other))

    def rounding(self, order: int, point: Point, dtype: Any = np.float64) -> Arrays:
        """Return how far each element of the results or of a derivative moves if operations are rounded to `dtype`."""
        self.derivative(order, point)
        with float64():
            run, arrays = self._derivatives.plain(order), _arrays(point)
            if order > 1:
                return interpreter.rounding(run, *arrays, dtype=dtype)
            found, count = interpreter.rounding(run, *arrays[:2], dtype=dtype), len(point.cotangents)
            return found[count:] if order else found[:count]

    def rounded_otherwise(self, values: Arrays, parts: Arrays, **settings: Any) -> list[np.ndarray]:
        """Compute gradients for n sets of cotangents, with random rounding errors.

        `parts` has the cotangents, as one array `(n, *y.shape)` per result y. Return one array
        `(1 + settings["runs"], n, *x.shape)` per argument x. Index 0 of axis 0 has the exact gradients.
        """

        def gradients(values, parts):
            y, vjp = jax.vjp(self.plain, *values)
            return jax.vmap(lambda *parts: vjp([c.astype(a.dtype) for c, a in zip(parts, y, strict=True)]))(*parts)

        with float64():
            return interpreter.rounded_otherwise(self._transform(gradients), list(values), list(parts), **settings)

    def jumps(
        self, order: int, i: int, point: Point, ends: Sequence[Arrays], indices: np.ndarray, halvings: int
    ) -> np.ndarray:
        """Return, for each k, how far one element of a derivative jumps on the line from `point.values` to `ends[k]`.

        The element has the flat index `indices[k]` in the derivative with respect to argument i. Halve the line
        `halvings` times, and keep the half on which the element changes more. Return the change on the last piece. A
        smooth change shrinks with the piece, but a jump remains.
        """
        self.derivative(order, point)
        if (order, i) not in self._jumps:
            run = self._derivatives.plain(order)

            def all_jumps(values, others, halvings, ends, indices):
                def jump(line):
                    end, index = line

                    def slope(t):
                        found = run([a + t * (b - a) for a, b in zip(values, end, strict=True)], *others)
                        return (found if order > 1 else found[1])[i].ravel()[index]

                    def halve(_, state):
                        t0, g0, t1, g1 = state
                        t = (t0 + t1) / 2
                        left = jnp.abs((g := slope(t)) - g0) >= jnp.abs(g1 - g)
                        return tuple(jnp.where(left, a, b) for a, b in ((t0, t), (g0, g), (t, t1), (g, g1)))

                    start = (0.0, slope(0.0), 1.0, slope(1.0))
                    _, before, _, after = lax.fori_loop(0, halvings, halve, start)
                    return after - before

                return lax.map(jump, (ends, indices))

            self._jumps[order, i] = jax.jit(all_jumps)
        values, *others = _arrays(point) if order > 1 else _arrays(point)[:2]
        ends = [np.stack(a) for a in zip(*ends, strict=True)]
        return in_float64(self._jumps[order, i], values, others, halvings, ends, indices)


def _arrays(point):
    return list(point.values), list(point.cotangents), list(point.directions)


def _plain_forward(op, arguments, options):
    """Return the op's first implementation that takes float64, the shapes and dtypes of its results, whether its name
    is "autodiff", and JAX's error if it cannot be traced in 64-bit mode."""
    names = ("autodiff", "xla", "pallas") if takes_implementation(op) else (None,)
    for name in names:
        function = arguments.of_floats(bind(op, name, options))
        try:
            results = jax.eval_shape(function, *arguments.floats)
        except NotImplementedError:
            continue
        refused = None
        try:
            _traced_in_float64(function, *arguments.floats)
        except NotImplementedError:
            continue
        except (TypeError, ValueError) as error:
            refused = error
        if not results:
            raise ValueError(f"check: {name_of(op)} has no floating result; wants at least one, to differentiate")
        return function, results, name == "autodiff", refused
    raise TypeError(
        f"check: no implementation of {name_of(op)} takes float64; wants at least one that does, for the reference"
    )


def _with_gradient_of(forward, surrogate):
    @jax.custom_jvp
    def function(*values):
        return forward(*values)

    @function.defjvp
    def _(primals, tangents):
        y, moved = function(*primals), jax.jvp(surrogate, primals, tangents)[1]
        return y, [t.astype(a.dtype) for t, a in zip(moved, y, strict=True)]

    return function


def _traced_in_float64(function: Callable, *args: Any) -> Any:
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float64), args)
    with float64():
        return jax.make_jaxpr(function)(*wide)


def _signature(program):
    literals = lambda e: [repr(np.asarray(v.val)) for v in e.invars if hasattr(v, "val") and v.aval.shape == ()]  # noqa: E731
    return [(e.primitive.name, [str(v.aval) for v in e.outvars], literals(e)) for e in interpreter.equations(program)]


def _constants(program: Any) -> list[float]:
    found = set()
    for equation in interpreter.equations(program):
        for variable in equation.invars:
            value = getattr(variable, "val", None)
            if value is not None and np.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.floating):
                found.add(float(value))
    return sorted(c for c in found if 1e-3 <= abs(c) <= 1e3)
