"""Finite differences of `Σ c y`, with results y and cotangents c. They confirm, contradict, or replace a gradient."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.verify.derivatives import Arrays, float64

EPS = float(np.finfo(np.float64).eps)
STEP_DIVISOR, STEPS = 8, 5
"""The ratio of successive step sizes, and the largest number of step sizes."""
AT_ONCE = 256
CONVERGED, DIVERGED = 1e-3, 1.5
"""Slopes with two step sizes are equal within the fraction `CONVERGED`. A slope is infinite if each smaller step size
multiplies it by more than `DIVERGED`."""


@dataclasses.dataclass(frozen=True)
class Slopes:
    """Slopes of `Σ c y` with respect to single elements of the arguments, one number per element.

    Attributes:
      central: the slopes between a step up and a step down.
      right, left: the one-sided slopes, for a step up and for a step down.
      low: the sum, over all terms of `Σ c y`, of the smaller of the term's two one-sided slopes.
      high: the sum of the larger of each term's two one-sided slopes.
      noise: the rounding error of the slopes, counting only results that change with the element.
      noise_of_all: the rounding error of the slopes, counting all results. A step may be too small to change a result.
    """

    central: np.ndarray
    low: np.ndarray
    high: np.ndarray
    right: np.ndarray
    left: np.ndarray
    noise: np.ndarray
    noise_of_all: np.ndarray


class Differences:
    """Computes slopes of `Σ c y`, given the relative rounding error `eps` of y.

    `moved(values, base)` returns the results y at `values`. Arguments of `stop_gradient` keep their values at `base`.
    """

    def __init__(self, moved: Callable, eps: float = EPS):
        self._moved, self._eps, self._slopes = moved, eps, jax.jit(self._slopes_of_elements)

    def __call__(
        self, values: Arrays, cotangents: Arrays, argument: int, indices: np.ndarray, steps: np.ndarray
    ) -> Slopes:
        """Return the slopes with respect to elements of one argument, given their flat `indices` and their steps."""
        x, size, found = values[argument].ravel()[indices], min(AT_ONCE, values[argument].size), []
        masks = [np.float64(i == argument) for i in range(len(values))]
        with float64():
            for start in range(0, len(indices), AT_ONCE):
                call = (np.resize(a[start : start + AT_ONCE], size) for a in (indices, x, x + steps, x - steps))
                slopes = self._slopes(list(values), list(cotangents), masks, *call)
                found.append(np.stack(slopes)[:, : len(indices) - start])
        return Slopes(*np.concatenate(found, axis=1))

    def _slopes_of_elements(self, values, cotangents, masks, *elements):
        results = lambda moved: jnp.concatenate([y.ravel() for y in self._moved(tuple(moved), tuple(values))])  # noqa: E731
        c, y = jnp.concatenate([c.ravel() for c in cotangents]), results(values)
        largest = jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0.0), initial=0.0)

        def with_element(index, value):
            # The moved argument is selected by masks, so that one compiled program serves all arguments.
            return [
                jnp.where(mask, a.ravel().at[index].set(value).reshape(a.shape), a) if a.size else a
                for a, mask in zip(values, masks, strict=True)
            ]

        def slopes(of):
            index, x, upper, lower = of
            y_upper, y_lower = (results(with_element(index, value)) for value in (upper, lower))
            rounding = 8 * self._eps * largest / (upper - lower)
            noise = rounding * jnp.sum(jnp.where(y_upper != y_lower, jnp.abs(c), 0.0))
            right, left = c * (y_upper - y) / (upper - x), c * (y - y_lower) / (x - lower)
            low, high = jnp.sum(jnp.minimum(left, right)), jnp.sum(jnp.maximum(left, right))
            central = c @ (y_upper - y_lower) / (upper - lower)
            return central, low, high, jnp.sum(right), jnp.sum(left), noise, rounding * jnp.sum(jnp.abs(c))

        return lax.map(slopes, elements)


def confirmed(
    autodiff: np.ndarray, steps: np.ndarray, look: Callable, error: Callable[[], float], rtol: float = 1e-6
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (expected, contradicted, confirmed): the expected gradient, and two masks of its elements.

    An element is confirmed if its slope with one of the step sizes equals autodiff's gradient. Several step sizes are
    tried, because a large step may cross a kink, and a small step may show only rounding errors.

    An element is contradicted if three conditions hold: its slopes with two successive step sizes agree, its left and
    right slopes agree, and its slope differs from autodiff's gradient by more than rounding explains. The slope is then
    expected. Otherwise, such as at a kink, autodiff's gradient is expected.

    Args:
      steps: the largest step of each element.
      look: `(which, steps) -> Slopes`, which computes the slopes of the elements with the indices `which`.
      error: returns the rounding error of `Σ c y`.
      rtol: the relative difference up to which two slopes count as equal.
    """
    expected, contradicted = np.array(autodiff), np.zeros(autodiff.shape, bool)
    agreed, open_, before = ~np.isfinite(autodiff), np.isfinite(autodiff), None
    for k in range(STEPS):
        which = np.flatnonzero(open_)
        if not which.size:
            break
        step, g = steps[which] / STEP_DIVISOR**k, autodiff[which]
        slopes = look(which, step)
        slope, noise = slopes.central, slopes.noise
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
            if same.any():
                same &= np.abs(slope - g) > 4 * error() / step
            expected[which[same]], contradicted[which[same]] = slope[same], True
            open_[which[same]] = False
        before = np.full(autodiff.shape, np.nan)
        before[which] = slope
        open_[which[agrees]] = False
    return expected, contradicted, agreed


def decided(steps: np.ndarray, look: Callable) -> np.ndarray:
    """Return the slopes of elements at which autodiff is not finite.

    A one-sided slope exists if it converges, or grows to infinity, with smaller steps. If only one side has a slope,
    this slope is the result. If neither side has a slope, or the two sides disagree, the result is NaN.
    """
    found = [look(np.arange(len(steps)), steps / STEP_DIVISOR**k) for k in range(3)]
    right, left = (_limit(*(getattr(slopes, side) for slopes in found)) for side in ("right", "left"))
    same = (right == left) | (np.abs(right - left) <= CONVERGED * np.abs(right))
    return np.where(np.isnan(right), left, np.where(np.isnan(left) | same, right, np.nan))


def _limit(first, second, third):
    with np.errstate(all="ignore"):
        converged = (np.abs(third - second) <= CONVERGED * np.abs(second)) & np.isfinite(second)
        grows = np.isinf(third) | (
            (np.abs(third) > DIVERGED * np.abs(second))
            & (np.abs(second) > DIVERGED * np.abs(first))
            & (np.sign(third) == np.sign(second))
        )
    return np.where(converged, third, np.where(grows, np.sign(third) * np.inf, np.nan))
