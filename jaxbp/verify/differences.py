import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxbp.verify.derivatives import flat, float64
from jaxbp.verify.interpreter import bind, evaluate, has, programs_in, structured
from jaxbp.verify.points import Point

STOP = frozenset({"stop_gradient"})
SOLVES = frozenset({"custom_linear_solve", "linear_solve"})
"""Primitives whose factorization is an argument of `stop_gradient`."""
EPS = float(np.finfo(np.float64).eps)
STEP_DIVISOR, STEPS = 8, 5
AT_ONCE, NUMBERS_AT_ONCE = 256, 2**21
CONVERGED, DIVERGED = 1e-3, 1.5
GROWTH = 1.01
"""The largest growth, per step, of one-sided slopes that converge."""


class Slopes(NamedTuple):
    """Finite-difference slopes of `Σ c y`, for the results y and the cotangents c.

    Attributes:
      low: the sum of the smaller one-sided slope of each term `c y`.
      high: the sum of the larger one-sided slope of each term `c y`.
      right, left: the one-sided slopes of the whole sum.
      noise: the rounding error of `central` if only the results y that the step changes are rounded.
      noise_of_all: the rounding error of `central` if all results y are rounded.
    """

    central: np.ndarray
    low: np.ndarray
    high: np.ndarray
    right: np.ndarray
    left: np.ndarray
    noise: np.ndarray
    noise_of_all: np.ndarray


def differences(moved: Callable, eps: float = EPS, **compiling: Any) -> Callable[..., Slopes]:
    """Return a function that computes finite differences with respect to elements of an op's arguments.

    The function is `slopes(point, argument, indices, steps) -> Slopes`. It changes the elements with flat indices
    `indices` of the argument with index `argument`, one at a time, by plus and minus their `steps`.

    Args:
      moved: `moved(values, base)` returns the op's results at `values`. Arguments of `stop_gradient` inside the op keep
        the values that they have at `base`.
      eps: the relative rounding error of these results.
      compiling: options of `jax.jit`.
    """

    def rows(values, count, indices, numbers):
        """Return the op's results after single elements of `values` are replaced, one row per k below `count`.

        In row k, element `indices[k]` of the flat, joined arguments is `numbers[k]`.
        """

        def results(index, number):
            first, replaced = 0, []
            for a in values:
                here = first + jnp.arange(a.size).reshape(a.shape) == index
                replaced.append(jnp.where(here, number, a))
                first += a.size
            return jnp.concatenate([y.ravel() for y in moved(tuple(replaced), tuple(values))])

        of_one = jax.eval_shape(results, indices[0], numbers[0])
        found = jnp.zeros((len(indices), *of_one.shape), of_one.dtype)
        return lax.fori_loop(0, count, lambda k, found: found.at[k].set(results(indices[k], numbers[k])), found)

    program = jax.jit(rows, **compiling)

    def slopes(point: Point, argument: int, indices: np.ndarray, steps: np.ndarray) -> Slopes:
        sizes, c = [a.size for a in point.values], flat(point.cotangents)
        # One number, because all arguments share one program.
        at_once = max(1, min(AT_ONCE, max(sizes), NUMBERS_AT_ONCE // max(1, c.size)))
        first, found = sum(sizes[:argument]), []

        def results(*replaced):
            padded = (np.resize(a, 2 * at_once) for a in replaced)
            return np.asarray(program(list(point.values), len(replaced[0]), *padded))[: len(replaced[0])]

        with float64():
            y = results(np.array([-1]), np.zeros(1))[0]
            error = 8 * eps * np.max(np.abs(y[np.isfinite(y)]), initial=0.0)
            for start in range(0, len(indices), at_once):
                which, step = indices[start : start + at_once], steps[start : start + at_once]
                x = point.values[argument].ravel()[which]
                ends = np.stack([x + step, x - step], axis=1)
                of_ends = results(np.repeat(first + which, 2), ends.ravel())
                y_upper, y_lower, (upper, lower) = of_ends[::2], of_ends[1::2], ends.T[..., None]
                # In NumPy, because XLA would compile this arithmetic for every function.
                right, left = c * (y_upper - y) / (upper - x[:, None]), c * (y - y_lower) / (x[:, None] - lower)
                low, high = np.minimum(left, right).sum(axis=1), np.maximum(left, right).sum(axis=1)
                width = (upper - lower)[:, 0]
                noise = error / width * np.sum(np.where(y_upper != y_lower, np.abs(c), 0.0), axis=1)
                noise = noise, error / width * np.sum(np.abs(c))
                central = (y_upper - y_lower) @ c / width
                found.append((central, low, high, right.sum(axis=1), left.sum(axis=1), *noise))
        return Slopes(*np.concatenate(found, axis=1))

    return slopes


def confirmed(
    autodiff: np.ndarray, steps: np.ndarray, look: Callable, error: Callable[[], float], rtol: float = 1e-6
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare the gradient `autodiff` with the slopes of finite differences, with smaller and smaller steps.

    Return the expected gradient, and masks of the elements that slopes contradict and confirm.

    - A slope confirms an element if they differ by at most `rtol` times the larger one plus rounding errors.
    - A slope contradicts and replaces an element if its one-sided slopes and the previous step agree, but autodiff
      differs. At a singularity, the one-sided slopes grow as the steps shrink, and contradict nothing.
    - Other elements keep autodiff's number. Elements that are not finite count as confirmed.

    `steps` has the largest step per element. `look(indices, steps)` returns `Slopes`. `error()` returns the rounding
    error of the differentiated function.
    """
    expected, contradicted = np.array(autodiff), np.zeros(autodiff.shape, bool)
    agreed, open_, before, steepest = ~np.isfinite(autodiff), np.isfinite(autodiff), None, None
    for k in range(STEPS):
        which = np.flatnonzero(open_)
        if not which.size:
            break
        step, g = steps[which] / STEP_DIVISOR**k, autodiff[which]
        slopes = look(which, step)
        slope, noise = slopes.central, slopes.noise
        steep = np.maximum(np.abs(slopes.right), np.abs(slopes.left))
        size = np.maximum(np.abs(slope), np.abs(g))
        sharp = noise <= 0.01 * size
        agrees = np.abs(slope - g) <= rtol * size + 4 * noise
        agrees &= sharp | (k == 0)
        agreed[which] |= agrees
        if before is not None:
            last = before[which]
            same = np.abs(slope - last) <= 100 * rtol * size + 4 * noise
            same &= (slopes.high - slopes.low <= 1e-2 * size + 8 * noise) & sharp & ~agrees
            same &= np.abs(slope - g) > 10 * np.abs(slope - last) + 8 * slopes.noise_of_all
            same &= steep <= GROWTH * steepest[which] + 8 * noise
            if same.any():
                same &= np.abs(slope - g) > 4 * error() / step
            expected[which[same]], contradicted[which[same]] = slope[same], True
            open_[which[same]] = False
        before, steepest = np.full((2, *autodiff.shape), np.nan)
        before[which], steepest[which] = slope, steep
        open_[which[agrees]] = False
    return expected, contradicted, agreed


def decided(steps: np.ndarray, look: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Return the slopes of finite differences at elements at which autodiff's gradient is not finite, and their means.

    A slope is infinite if it grows as the steps shrink. It is NaN if the slopes to the right and to the left differ, or
    if neither converges. A mean of both is NaN unless both converge. `steps` and `look` are as in `confirmed`.
    """
    found = [look(np.arange(len(steps)), steps / STEP_DIVISOR**k) for k in range(3)]
    right, left = (_limit(*(getattr(slopes, side) for slopes in found)) for side in ("right", "left"))
    same = (right == left) | (np.abs(right - left) <= CONVERGED * np.abs(right))
    with np.errstate(invalid="ignore"):
        mean = (right + left) / 2
    return np.where(np.isnan(right), left, np.where(np.isnan(left) | same, right, np.nan)), mean


def _limit(first, second, third):
    with np.errstate(all="ignore"):
        converged = (np.abs(third - second) <= CONVERGED * np.abs(second)) & np.isfinite(second)
        grows = np.isinf(third) | (
            (np.abs(third) > DIVERGED * np.abs(second))
            & (np.abs(second) > DIVERGED * np.abs(first))
            & (np.sign(third) == np.sign(second))
        )
        # The slopes of x sin(x) at 0 are proportional to the step.
        vanishes = (np.abs(second) > DIVERGED * np.abs(third)) & (np.abs(first) > DIVERGED * np.abs(second))
    limit = np.where(grows, np.sign(third) * np.inf, np.where(vanishes, 0.0, np.nan))
    return np.where(converged, third, limit)


class Streams(NamedTuple):
    """Three values of one variable of a program.

    Attributes:
      held: as `moved`, but arguments of `stop_gradient` have their values from `base`.
      base: the value at the original arguments.
      moved: the value at the arguments that a finite difference changed.
    """

    held: Array
    base: Array
    moved: Array


def held(function: Callable) -> Callable:
    """Return `function(*moved)` as a function of `(moved, base)`.

    Inside `function`, arguments of `stop_gradient` keep the values that they have in `function(*base)`.
    """

    def run(moved, base):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*moved)
        pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(base), strict=True)
        arguments = [Streams(m := jnp.asarray(a), jnp.asarray(b), m) for a, b in pairs]
        results = evaluate(program, arguments, _hold, _constant)
        return jax.tree.unflatten(jax.tree.structure(shapes), [y.held for y in results])

    return run


def _hold(equation, inputs):
    name, params = equation.primitive.name, equation.params
    if name in STOP:
        return [Streams(a.base, a.base, a.moved) for a in inputs]
    if any(has(program, STOP | SOLVES) for program in programs_in(equation)):
        results = structured(equation, inputs, _hold, _constant)
        if results is not None:
            return results
    given = list(inputs)
    if name == "custom_linear_solve":
        # JAX applies `stop_gradient` to the factorization. If it were fixed, the solution would ignore the matrix.
        lengths = params["const_lengths"]
        start = lengths.matvec + lengths.vecmat
        for i in range(start, start + lengths.solve + lengths.transpose_solve):
            given[i] = inputs[i]._replace(held=inputs[i].moved)
    elif name == "linear_solve":  # lineax does not pass the factorization separately
        given = [a._replace(held=a.moved) for a in inputs]
    found = {}
    for stream in Streams._fields:
        arguments = [getattr(a, stream) for a in given]
        same = next((f for f, (known, _) in found.items() if all(map(operator.is_, known, arguments))), None)
        found[stream] = found[same] if same else (arguments, bind(equation, arguments))
    return [Streams(*results) for results in zip(*(results for _, results in found.values()), strict=True)]


def _constant(a):
    return Streams(a, a, a)
