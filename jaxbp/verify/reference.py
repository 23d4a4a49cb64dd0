"""What a backward should give, in float64: JAX's own differentiation of the plain forward, confirmed by differences."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.verify.arguments import Arguments, bind, name_of, takes_implementation
from jaxbp.verify.rounding import rounded_otherwise, rounding

EPS = float(np.finfo(np.float64).eps)
STEP = EPS ** (1 / 3)
"""As a share of an argument's scale: the error of the difference by curvature is then about that by rounding."""
NEARER, STEPS = 8, 5
"""Each step of a difference is by so much smaller than the one before, and so many are tried."""
AT_ONCE = 256
"""Elements that are moved in one call."""
NEIGHBOURS = 16
"""Points near a point, whose gradients tell whether it lies at a kink."""
HAIR = 1e-12
"""As a share of an argument's scale: a kink within it is at the point itself."""

Function = Callable[..., list[Array]]
"""Of floating arrays, with floating results."""
Arrays = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What should come out of an op.

    Attributes:
      order: 0 for values, 1 for gradients, 2 and 3 for derivatives of these.
      against: how it was found.
      arrays: of the results, or of the arguments to differentiate in.
      contradicted: where differences say something else than JAX's own differentiation, and are what is expected.
    """

    order: int
    against: str
    arrays: Arrays
    contradicted: Arrays


def value_and_gradients(function: Function, **options: Any) -> Callable:
    """`(values, cotangents) -> (results, gradients)`, jitted, with options of `jax.jit`."""

    def run(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        return y, vjp(list(cotangents))

    return jax.jit(run, **options)


def derivative(function: Function, order: int, reverse: bool = False, **options: Any) -> Callable:
    """`(values, cotangents, directions) -> ` the gradient of `Σ c (y + y²/2)`, differentiated along directions. Jitted.

    At order 2 it is the Hessian times a direction. By the square, the backward is differentiated in its dy as well,
    also where the op is linear. It is taken forward over reverse; or all in reverse, which is dearer, but does with a
    backward that has a backward of its own, and so no forward mode.
    """

    def gradient(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        return vjp([c * (1 + a) for c, a in zip(cotangents, y, strict=True)])

    def along(function, direction):
        if not reverse:
            return lambda values: jax.jvp(lambda *values: function(values), tuple(values), tuple(direction))[1]

        def slope(values):
            return sum(jnp.vdot(d, g) for d, g in zip(direction, function(values), strict=True))

        return jax.grad(slope)

    def run(values, cotangents, directions):
        function = lambda values: gradient(values, cotangents)  # noqa: E731
        for direction in directions[: order - 1]:
            function = along(function, tuple(direction))
        return function(tuple(values))

    return jax.jit(run, **options)


class Derivatives:
    """The results of a function, its gradients and their derivatives, each compiled when it is first asked for.

    Args:
      modes: whether a derivative of a gradient is taken in reverse, in the order in which this is tried.
      options: of `jax.jit`.
    """

    def __init__(self, function: Function, modes: Sequence[bool] = (False, True), **options: Any):
        self._function, self._modes, self._options = function, modes, options
        self.value_and_gradients, self._higher = value_and_gradients(function, **options), {}

    def __call__(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """The results, the gradients, or from order 2 on what `derivative` gives."""
        if order < 2:
            return self.value_and_gradients(values, cotangents)[order]
        return self.with_square(order, values, cotangents, directions)

    def with_square(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """Return what `derivative` gives, from order 1 on: the gradient of `Σ c (y + y²/2)` and its derivatives."""
        for reverse in self._modes:
            if order not in self._higher:
                self._higher[order] = derivative(self._function, order, reverse, **self._options)
            try:
                return self._higher[order](values, cotangents, directions)
            except TypeError as error:
                del self._higher[order]
                if reverse == self._modes[-1] or not has_no_forward_mode(error):
                    raise

    def plain(self, order: int) -> Callable:
        """The program that gives an order, or for orders below 2 both, not compiled. It has been asked for before."""
        return (self.value_and_gradients if order < 2 else self._higher[order]).__wrapped__


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Within it, JAX computes in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), np.errstate(all="ignore"):
        yield


class Reference:
    """The forward of an op that JAX differentiates by itself, in float64, and what should come out of it.

    Attributes:
      function: the plain forward.
      names, result_names: of the floating arguments and results.
      results: shapes and dtypes, from the arguments as they are.
      independent: whether JAX differentiates it by its own rules alone, so that the op's backward has no part in it.
      constants: the numbers that stand in its program: at one of them may be a kink.
    """

    def __init__(self, op: Callable, arguments: Arguments, options: Mapping[str, Any], **compiling: Any):
        self.names = arguments.float_names
        self.function, self.results, native = _plain_forward(op, arguments, options)
        self.result_names = ["value"] if len(self.results) == 1 else [f"value {i}" for i in range(len(self.results))]
        equations = list(_equations(jax.make_jaxpr(self.function)(*arguments.floats).jaxpr))
        self.independent = native or not any("custom" in e.primitive.name for e in equations)
        self.constants = _constants(equations)
        self._derivatives = Derivatives(self.function, **compiling)
        self._slopes = jax.jit(self._slopes_of_elements)

    def value_and_gradients(self, values: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        with float64():
            return _arrays(self._derivatives.value_and_gradients(list(values), list(cotangents)))

    def first_orders(
        self, values: Arrays, cotangents: Arrays, steps: Sequence[float | None], most: int
    ) -> tuple[Expected, Expected]:
        """Values and gradients; of each argument at most so many elements are moved, by its step, to confirm them.

        A step of None is one by the scale of the argument.
        """
        y, autodiff = self.value_and_gradients(values, cotangents)
        error = functools.cache(lambda: self._rounding_of_sum(values, cotangents))
        arrays = [np.array(g) for g in autodiff]
        contradicted, told = [np.zeros(g.shape, bool) for g in autodiff], True
        for i, (step, gradient) in enumerate(zip(steps, autodiff, strict=True)):
            places = np.unique(np.linspace(0, gradient.size - 1, min(gradient.size, most)).astype(int))
            if not places.size:
                continue
            a = values[i].ravel()[places]
            by = np.maximum(scale_of(values[i]), np.abs(a)) * STEP if step is None else np.full(a.shape, step)
            look = lambda which, by, i=i, places=places: self._look(values, cotangents, i, places[which], by)  # noqa: E731
            slope, other, confirmed = _confirmed(gradient.ravel()[places], by, look, error)
            arrays[i].flat[places], contradicted[i].flat[places] = slope, other
            told &= bool(confirmed.all())
        against = "differences" if told else "differences; autodiff where there is a kink"
        uncontradicted = [np.zeros(a.shape, bool) for a in y]
        return Expected(0, "float64", y, uncontradicted), Expected(1, against, arrays, contradicted)

    def higher(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Expected:
        """The derivative of this order by JAX, confirmed by differences of the order below."""
        autodiff = self.derivative(order, values, cotangents, directions)
        below = directions[: order - 2]

        def gradient_at(values):
            with float64():
                return flat(_arrays(self._derivatives.with_square(order - 1, list(values), list(cotangents), below)))

        gradient = gradient_at(values)

        def look(which, by):
            found = []
            for sign in (1, -1):
                moved = [a + sign * by[0] * d for a, d in zip(values, directions[order - 2], strict=True)]
                found.append(gradient_at(moved)[which])
            upper, lower = found
            noise = 8 * EPS * scale_of(gradient) / by[0]
            slopes = (upper - gradient[which]) / by[0], (gradient[which] - lower) / by[0]
            noise = np.full(upper.shape, noise)
            return (upper - lower) / (2 * by[0]), *np.sort(slopes, axis=0), noise, noise

        of_all = flat(autodiff)
        error = lambda: float(flat(self.rounding(order - 1, values, cotangents, below)).max())  # noqa: E731
        slope, other, confirmed = _confirmed(of_all, np.full(of_all.shape, STEP), look, error)
        against = "differences of gradients" if confirmed.all() else "differences of gradients; autodiff at a kink"
        sizes = np.cumsum([a.size for a in autodiff])[:-1]
        shaped = lambda whole: [p.reshape(a.shape) for p, a in zip(np.split(whole, sizes), autodiff, strict=True)]  # noqa: E731
        return Expected(order, against, shaped(slope), shaped(other))

    def derivative(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays] = ()) -> Arrays:
        """The results, the gradients, or from order 2 on what `derivative` gives, in float64."""
        with float64():
            return _arrays(self._derivatives(order, list(values), list(cotangents), list(directions)))

    def rounding(
        self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays], dtype: Any = np.float64
    ) -> Arrays:
        """How far rounding to a dtype moves the results of order 0 and 1, or the derivative of another order."""
        self.derivative(order, values, cotangents, directions)  # finds the mode that it has
        with float64():
            run, arguments = self._derivatives.plain(order), [list(values), list(cotangents)]
            if order < 2:
                found = rounding(run, *arguments, dtype=dtype)
                return found[len(cotangents) :] if order else found[: len(cotangents)]
            return rounding(run, *arguments, list(directions), dtype=dtype)

    def rounded_otherwise(self, values: Arrays, parts: Arrays, **settings: Any) -> list[np.ndarray]:
        """The gradients, and what they would be with other roundings: `(1 + runs, parts, ...)` each.

        Args:
          parts: cotangents, several of each result: their first axis.
          settings: of `rounding.rounded_otherwise`.
        """

        def gradients(values, parts):
            vjp = jax.vjp(self.function, *values)[1]
            return jax.vmap(lambda *cotangents: vjp(list(cotangents)))(*parts)

        with float64():
            return rounded_otherwise(gradients, list(values), list(parts), **settings)

    def _rounding_of_sum(self, values, cotangents):
        """How far rounding moves `Σ c y` at most."""
        moved = self.rounding(0, values, cotangents, [])
        return sum(float(np.sum(np.abs(c) * m)) for c, m in zip(cotangents, moved, strict=True))

    def _look(self, values, cotangents, argument, places, by):
        """(slope, the lower and the higher of the one-sided slopes, rounding, rounding at most) in elements.

        Results that do not depend on an element cancel exactly. Only the last bound counts them, as the dependence may
        be too small to see.
        """
        x, size, slopes_of_calls = values[argument].ravel()[places], min(AT_ONCE, values[argument].size), []
        masks = [np.float64(i == argument) for i in range(len(values))]
        with float64():
            for start in range(0, len(places), AT_ONCE):
                # One size of call, so one program.
                call = (np.resize(a[start : start + AT_ONCE], size) for a in (places, x, x + by, x - by))
                slopes = self._slopes(list(values), list(cotangents), masks, *call)
                slopes_of_calls.append(np.stack(slopes)[:, : len(places) - start])
        return tuple(np.concatenate(slopes_of_calls, axis=1))

    def _slopes_of_elements(self, values, cotangents, masks, *places):
        results = lambda values: jnp.concatenate([y.ravel() for y in self.function(*values)])  # noqa: E731
        c, y = jnp.concatenate([c.ravel() for c in cotangents]), results(values)
        largest = jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0.0), initial=0.0)

        def with_element(place, value):
            # All arguments take part, so that one program does for each of them.
            return [
                jnp.where(mask, a.ravel().at[place].set(value).reshape(a.shape), a) if a.size else a
                for a, mask in zip(values, masks, strict=True)
            ]

        def slopes(of):
            place, x, upper, lower = of
            y_upper, y_lower = (results(with_element(place, value)) for value in (upper, lower))
            rounding = 8 * EPS * largest / (upper - lower)
            noise = rounding * jnp.sum(jnp.where(y_upper != y_lower, jnp.abs(c), 0.0))
            right, left = c * (y_upper - y) / (upper - x), c * (y - y_lower) / (x - lower)
            low, high = jnp.sum(jnp.minimum(left, right)), jnp.sum(jnp.maximum(left, right))
            return c @ (y_upper - y_lower) / (upper - lower), low, high, noise, rounding * jnp.sum(jnp.abs(c))

        return lax.map(slopes, places)


def _confirmed(
    autodiff: np.ndarray, steps: np.ndarray, look: Callable, error: Callable[[], float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(what is expected, where differences contradict autodiff, where they confirm it).

    `look(which, steps)` gives slope, lower and higher one-sided slope, their rounding, and that at most. A slope that
    is autodiff's at any step confirms it: a larger step crossed a kink or was too coarse, a smaller one is all
    rounding. Autodiff is contradicted where two steps agree with each other, on both sides, and not with it.
    Elsewhere, as at a kink, differences can not tell, and autodiff stands. Nor can they where the slopes are no further
    apart than the function's rounding `error()` makes them: in steps of its rounding a function is flat, or a ramp.
    """
    expected, contradicted = np.array(autodiff), np.zeros(autodiff.shape, bool)
    confirmed, open_, before = ~np.isfinite(autodiff), np.isfinite(autodiff), None
    for k in range(STEPS):
        which = np.flatnonzero(open_)
        if not which.size:
            break
        g = autodiff[which]
        slope, low, high, noise, at_most = look(which, steps[which] / NEARER**k)
        size = np.maximum(np.abs(slope), np.abs(g))
        sharp = noise <= 0.01 * size
        agrees = np.abs(slope - g) <= 1e-6 * size + 4 * noise
        agrees &= sharp | (k == 0)
        confirmed[which] |= agrees
        if before is not None:
            last = before[which]
            same = np.abs(slope - last) <= 1e-4 * size + 4 * noise
            same &= (high - low <= 1e-2 * size + 8 * noise) & sharp & ~agrees
            same &= np.abs(slope - g) > 10 * np.abs(slope - last) + 8 * at_most
            if same.any():
                same &= np.abs(slope - g) > 4 * error() / (steps[which] / NEARER**k)
            expected[which[same]], contradicted[which[same]] = slope[same], True
            open_[which[same]] = False
        before = np.full(autodiff.shape, np.nan)
        before[which] = slope
        open_[which[agrees]] = False
    return expected, contradicted, confirmed


def has_no_forward_mode(error: TypeError) -> bool:
    return "forward-mode" in str(error) or "forward mode" in str(error)


def scale_of(a: np.ndarray) -> float:
    """The largest finite size of an element; 1 if all are 0."""
    return float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) or 1.0


def _plain_forward(op: Callable, arguments: Arguments, options: Mapping[str, Any]) -> tuple[Function, list[Any], bool]:
    """The forward that takes float64, shapes and dtypes of its results from the arguments as they are, and whether it
    is the one that has no hand-written backward."""
    names = ("autodiff", "xla", "pallas") if takes_implementation(op) else (None,)
    wide = [jax.ShapeDtypeStruct(a.shape, np.float64) for a in arguments.floats]
    for name in names:
        function = arguments.of_floats(bind(op, name, options))
        try:
            results = jax.eval_shape(function, *arguments.floats)
            with float64():
                in_float64 = jax.eval_shape(function, *wide)
        except NotImplementedError:
            continue
        if not results:
            raise ValueError(f"check: {name_of(op)} has no floating result; wants at least one, to differentiate")
        if dtypes := {y.dtype.name for y in in_float64} - {"float64"}:
            raise TypeError(
                f"check: {name_of(op)} gives {', '.join(dtypes)} for float64 arguments; wants float64, in which "
                "differences are exact enough"
            )
        return function, results, name == "autodiff"
    raise TypeError(f"check: {name_of(op)} takes float64 in no implementation; wants one that does, for differences")


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a program, and of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _constants(equations: Sequence[Any]) -> list[float]:
    """The floating numbers in a program that are no bound of what a dtype holds."""
    found = set()
    for equation in equations:
        for variable in equation.invars:
            value = getattr(variable, "val", None)
            if value is not None and np.ndim(value) == 0 and jnp.issubdtype(jnp.result_type(value), jnp.floating):
                found.add(float(value))
    return sorted(c for c in found if 1e-3 <= abs(c) <= 1e3)


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([np.ravel(a) for a in arrays])


def _arrays(tree):
    return jax.tree.map(np.asarray, tree)
