"""What a backward should give, in float64: differences of the plain forward, and where there are none, autodiff."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxbp.verify.arguments import Arguments, bind, name_of, takes_implementation

EPS = float(np.finfo(np.float64).eps)
STEP = EPS ** (1 / 3)
"""As a share of an argument's scale: the error of the difference by curvature is then about that by rounding."""

Function = Callable[..., list[Array]]
"""Of floating arrays, with floating results."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What should come out of an op.

    Attributes:
      order: 0 for values, 1 for gradients, 2 for second derivatives.
      against: how it was found.
      names, arrays: of the results, or of the arguments to differentiate in.
      at: the floating arguments, in float64.
      rounding: how far the float64 result itself may be off, an array or a number for each of `arrays`.
    """

    order: int
    against: str
    names: Sequence[str]
    arrays: Sequence[np.ndarray]
    at: Sequence[np.ndarray]
    rounding: Sequence[np.ndarray | float]


def value_and_gradients(function: Function) -> Callable:
    """`(values, cotangents) -> (results, gradients)`, jitted."""

    @jax.jit
    def run(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        return y, vjp(list(cotangents))

    return run


def hessian_product(function: Function) -> Callable:
    """`(values, cotangents, direction) -> ` the Hessian of `Σ c (y + y²/2)` times the direction, jitted.

    Forward over reverse: the derivative of the gradient along the direction. By the square, the backward is
    differentiated in its dy as well, also where the op is linear.
    """

    def gradient(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        return vjp([c * (1 + a) for c, a in zip(cotangents, y, strict=True)])

    @jax.jit
    def run(values, cotangents, direction):
        return jax.jvp(lambda *values: gradient(values, cotangents), tuple(values), tuple(direction))[1]

    return run


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Within it, JAX computes in float64, on the CPU."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


class Reference:
    """The forward of an op that JAX differentiates by itself, in float64, and what should come out of it.

    Attributes:
      names, result_names: of the floating arguments and results.
      result_dtypes: from the arguments as they are.
      cotangents, direction: random numbers that the dtypes that they are for can hold, in float64.
      smooth: whether no difference met a kink.
    """

    def __init__(
        self, op: Callable, arguments: Arguments, options: Mapping[str, Any], seed: int, kink_convention: bool
    ):
        # Where there is no derivative, anything may be right.
        self.rounding_at_kinks = 0.0 if kink_convention else np.inf
        self.names = arguments.float_names
        self.values = [np.asarray(a, np.float64) for a in arguments.floats]
        self.function, results = _plain_forward(op, arguments, options)
        self.result_names = ["value"] if len(results) == 1 else [f"value {i}" for i in range(len(results))]
        self.result_dtypes = [y.dtype for y in results]
        self.smooth = True
        random = np.random.default_rng(seed)

        def draw(a, scale=1.0):
            return np.asarray((scale * random.standard_normal(a.shape)).astype(a.dtype), np.float64)

        self.cotangents = [draw(y) for y in results]
        self.direction = [draw(a, scale=_scale(np.asarray(a, np.float64))) for a in arguments.floats]
        self._gradients = value_and_gradients(self.function)
        self._hessian_product = hessian_product(self.function)
        self._concatenated = jax.jit(lambda *values: jnp.concatenate([y.ravel() for y in self.function(*values)]))

    def first_orders(self, steps: Sequence[float | None], most_elements: int) -> tuple[Expected, Expected]:
        """The values, and the gradients by central differences, each argument's elements moved by its step.

        A step of None is one by the scale of the argument.
        """
        with float64(), np.errstate(all="ignore"):
            y, autodiff = self._at(self.values)
            differences = _Differences(self._concatenated, self.cotangents, self.values)
            arrays, rounding = [g.copy() for g in autodiff], [np.zeros(g.shape) for g in autodiff]
            kinks = 0
            for i, (step, gradient) in enumerate(zip(steps, autodiff, strict=True)):
                count = min(gradient.size, most_elements)
                for at in np.unique(np.linspace(0, gradient.size - 1, count).astype(int)):
                    if (found := differences.slope(i, at, step, gradient.flat[at])) is None:
                        kinks += 1
                        rounding[i].flat[at] = self.rounding_at_kinks
                    else:
                        arrays[i].flat[at], rounding[i].flat[at] = found
        self.smooth = kinks == 0
        against = "differences" if self.smooth else f"differences, autodiff at {kinks} kinks"
        return (
            Expected(0, "float64", self.result_names, y, self.values, [0.0] * len(y)),
            Expected(1, against, self.names, arrays, self.values, rounding),
        )

    def at_kink(self, argument: int, kink: float, step: float | None) -> Expected:
        """The gradient in an argument of which one element, the middle one, is `kink`: its own by a difference."""
        values, at = [np.array(a) for a in self.values], self.values[argument].size // 2
        values[argument].flat[at] = kink
        with float64(), np.errstate(all="ignore"):
            gradient = self._at(values)[1][argument].copy()
            rounding = np.zeros(gradient.shape)
            differences = _Differences(self._concatenated, self.cotangents, values)
            found = differences.slope(argument, at, step, gradient.flat[at])
        against = f"one element {kink:g}: {'autodiff' if found is None else 'difference'}"
        gradient.flat[at], rounding.flat[at] = found or (gradient.flat[at], self.rounding_at_kinks)
        return Expected(1, against, [self.names[argument]], [gradient], values, [rounding])

    def second_order(self, step: float) -> Expected:
        """The Hessian of `hessian_product` times the direction, by the difference of two gradients.

        Where a difference met a kink, it is JAX's own.
        """
        if not self.smooth:
            with float64():
                arrays = _arrays(self._hessian_product(self.values, self.cotangents, self.direction))
            return Expected(2, "autodiff", self.names, arrays, self.values, [0.0] * len(arrays))
        with float64(), np.errstate(all="ignore"):
            ahead, behind = (self._gradient_of_squares(by) for by in (step, -step))
        arrays = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
        rounding = 8 * EPS * max(_scale(a) for a in ahead) / (2 * step)
        return Expected(2, "differences of autodiff", self.names, arrays, self.values, [rounding] * len(arrays))

    def brought_to_size_1(self, function: Function, dtype: str) -> tuple[Function, list[np.ndarray]]:
        """A function of the same arguments as `function`, but with arguments and results of about 1, and those."""
        with float64():
            results = [_scale(y) for y in self._at(self.values)[0]]
        scales = [_scale(a) for a in self.values]

        def scaled(*values):
            y = function(*(a * scale for a, scale in zip(values, scales, strict=True)))
            return [a / scale for a, scale in zip(y, results, strict=True)]

        return jax.jit(scaled), [(a / scale).astype(dtype) for a, scale in zip(self.values, scales, strict=True)]

    def _at(self, values):
        return _arrays(self._gradients(values, self.cotangents))

    def _gradient_of_squares(self, by):
        values = [a + by * v for a, v in zip(self.values, self.direction, strict=True)]
        y, _ = self._at(values)
        return _arrays(self._gradients(values, [c * (1 + a) for c, a in zip(self.cotangents, y, strict=True)]))[1]


class _Differences:
    """Central differences of `Σ c y` in one element at a time."""

    def __init__(self, results: Callable, cotangents: Sequence[np.ndarray], values: Sequence[np.ndarray]):
        self.results, self.values = results, [np.array(a) for a in values]
        self.cotangents = np.concatenate([c.ravel() for c in cotangents])
        self.here = np.asarray(results(*self.values))
        self.largest = _scale(self.here)

    def slope(self, argument: int, at: int, step: float | None, autodiff: float) -> tuple[float, float] | None:
        """The slope in an element and what of it may be rounding; None where there is no derivative.

        There is none at a kink, where the slopes on both sides differ however small the step, nor where the function
        jumps or is infinite. Both are looked into where the slopes differ much, or differ from autodiff's.
        """
        a = self.values[argument]
        by = step or STEP * max(_scale(a), abs(a.flat[at]))
        slope, gap, noise = self._at(a, at, by)
        if not np.isfinite((slope, gap, noise)).all():
            return None
        if not abs(gap) <= 0.01 * abs(slope) + 4 * noise or not abs(slope - autodiff) <= 0.01 * abs(slope) + 4 * noise:
            nearer, smaller_gap, noise_there = self._at(a, at, by / 4)
            is_kink = not abs(smaller_gap) <= 0.5 * abs(gap) + 4 * noise_there
            is_jump = not abs(nearer - slope) <= 0.5 * abs(slope) + abs(gap) + 4 * noise_there
            if is_kink or is_jump:  # or something is not finite
                return None
        return slope, noise

    def _at(self, a, at, by):
        """(slope, right less left slope, what of the slope may be rounding)."""
        value = a.flat[at]
        a.flat[at] = ahead = value + by
        after = np.asarray(self.results(*self.values))
        a.flat[at] = behind = value - by
        before = np.asarray(self.results(*self.values))
        a.flat[at] = value
        # What an element does not reach cancels exactly; of the rest, each difference is of rounded results.
        moved = after != before
        noise = 8 * EPS * self.largest * np.abs(self.cotangents[moved]).sum() / (ahead - behind)
        right = self.cotangents @ (after - self.here) / (ahead - value)
        left = self.cotangents @ (self.here - before) / (value - behind)
        return self.cotangents @ (after - before) / (ahead - behind), right - left, noise


def _plain_forward(op: Callable, arguments: Arguments, options: Mapping[str, Any]) -> tuple[Function, list[Any]]:
    """The forward that takes float64, and the shapes and dtypes of its results from the arguments as they are."""
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
        return function, results
    raise TypeError(f"check: {name_of(op)} takes float64 in no implementation; wants one that does, for differences")


def _arrays(tree):
    return jax.tree.map(np.asarray, tree)


def _scale(a: np.ndarray) -> float:
    """The largest finite size of an element; 1 if all are 0."""
    return float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) or 1.0
