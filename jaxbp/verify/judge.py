"""Decide whether a number that differs from the expected number by more than the tolerance is a mistake
(docs/numerics.md, "What is not a mistake").

A kink is a point at which the slopes on the two sides differ.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbp.verify.derivatives import evenly, flat, scale_of
from jaxbp.verify.points import USER_DATA, Point, generator, rounded
from jaxbp.verify.programs import Programs
from jaxbp.verify.reference import Expected, Reference

NEAR, SAMPLES, ALLOWED = 0.01, 3, 4
"""An error of up to `ALLOWED` times autodiff's rounding error passes. The rounding error is measured on `SAMPLES` data
sets that differ from the data by at most the fraction `NEAR`."""
FACTOR_ELEMENTS, PERCENT = 8, 0.1
"""The least number of elements for which an error by a common factor counts as a mistake. An error by less than
`PERCENT` is reported in percent."""
NOT_FINITE = "no expected number is finite"
MOST = 32
PARTS, RUNS, NUMBERS = 64, 16, 2**20
ROUNDINGS = 16
"""The largest distance of a kink "near" the data, in rounding errors of the largest element."""
NEIGHBORS = 16
KINK_RTOL = 1e-12
"""The largest distance of a kink "at" the data, relative to the largest element."""
KINK_WIDTH, KINKS_LOOKED_AT, WORK = 1e-9, 1024, 2**26
"""A change of slope is a jump if it happens within `KINK_WIDTH` times the largest element."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A number a passes if `|a - e| <= rtol * |e| + atol * max(1, max |e|)`, where e is the expected number.

    `max |e|` is the largest in the array. `step` is the step of finite differences, or None for a step in proportion to
    the argument's largest element.
    """

    rtol: float
    atol: float
    step: float | None


TOLERANCES: Mapping[str, Tolerance] = {
    "float16": Tolerance(rtol=1e-2, atol=1e-4, step=1e-3),
    "bfloat16": Tolerance(rtol=2e-2, atol=1e-3, step=1e-3),
    "float32": Tolerance(rtol=1e-4, atol=1e-7, step=None),
    "float64": Tolerance(rtol=1e-7, atol=1e-10, step=1e-7),
}


def allowed(e: np.ndarray, tolerance: Tolerance) -> np.ndarray:
    largest = np.abs(e[np.isfinite(e)]).max(initial=0.0)
    return tolerance.rtol * np.where(np.isfinite(e), np.abs(e), 0.0) + tolerance.atol * max(1.0, largest)


def excess_and_difference(
    a: np.ndarray, e: np.ndarray, tolerance: Tolerance, more: Any = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == e) | (np.isnan(a) & np.isnan(e))
        difference = np.where(same, 0.0, np.nan_to_num(np.abs(a - e), nan=np.inf, posinf=np.inf))
        return np.nan_to_num(difference / (allowed(e, tolerance) + more)), difference


def close(a: Any, e: Any, tolerance: Tolerance, more: Any = 0.0) -> np.ndarray:
    """Return a mask of the elements of `a` within the tolerance plus `more` of the expected `e`."""
    return excess_and_difference(np.asarray(a, np.float64), np.asarray(e, np.float64), tolerance, more)[0] <= 1


class Judge:
    """Comparison of implementations' results and derivatives with a float64 reference.

    Args:
      convention: `kink_convention` of `check`.
      precision: the forward's dtype if it is less precise than the arguments.
      rounded_once: the order up to which an op rounds its results and derivatives once. Derivatives of higher orders
        are sums of terms that are rounded to the arguments' dtype.
    """

    def __init__(
        self,
        reference: Reference,
        autodiff: Programs,
        tolerances: Mapping[str, Tolerance],
        convention: bool,
        precision: np.dtype | None = None,
        rounded_once: int = 1,
    ):
        self._rounded_once = rounded_once
        self.reference, self._autodiff = reference, autodiff if autodiff.takes_arguments() else None
        self._tolerances, self._convention, self._precision = tolerances, convention, precision
        self._rounded_otherwise = None, None

    def verdict(self, point: Point, expected: Expected, i: int, actual: Any, checked: Programs) -> dict[str, Any]:
        """Compare `actual`, which the implementation `checked` computed, with `expected.arrays[i]`. Return keyword
        arguments of `CheckRow`."""
        order, reference = expected.order, self.reference
        dtypes = [actual.dtype, self._precision, *([checked.arguments.dtypes[i]] if order else [])]
        known = [dtype for dtype in dtypes if dtype is not None and dtype.name in self._tolerances]
        dtype = max(known, key=lambda dtype: float(jnp.finfo(dtype).eps)).name
        if actual.size == 0:
            return dict(verdict="skipped", reason="no elements")
        a, e, tolerance = np.asarray(actual, np.float64), expected.arrays[i], self._tolerances[dtype]
        contradicted = np.zeros(a.shape, bool) if expected.contradicted is None else expected.contradicted[i]
        added_kinks = point.kinks and point.of is not None and order == 1 and dtype in ("float32", "float64")
        sees_kinks = added_kinks and reference.independent
        autodiff = self._autodiff_at(point, order, i) if sees_kinks else None
        if autodiff is not None:
            # In a narrow dtype, the forward's kink may be at another number.
            e = np.where(contradicted | close(autodiff, e, tolerance), e, autodiff)
        held, undecided = self._decided(point, expected, i, dtype, a, e)
        excess, difference = excess_and_difference(a, e, tolerance)
        wrong, reason, hint = held & (excess > 1), None, None
        if wrong.any():
            case = point, order, i, checked, dtype, tolerance, a, e
            for excuse in self._excuses(*case, held, excess, contradicted, sees_kinks):
                if wrong.any():
                    fine, why, *hints = excuse(wrong)
                    wrong, reason, hint = wrong & ~fine, why if (wrong & fine).any() else reason, hints or hint
        verdict = "failed" if wrong.any() else "inconclusive" if undecided.any() else "ok"
        worst = np.argmax(np.where(wrong if wrong.any() else held, excess, 0.0))
        if wrong.any():
            reason = "; ".join(filter(None, (_cause(a, e, wrong), *(hint or ()))))
        elif undecided.any():
            worst, reason = np.argmax(undecided), "autodiff is not finite, and finite differences cannot decide"
        elif not held.any():
            verdict, reason = "inconclusive" if point.name == USER_DATA else "skipped", NOT_FINITE
        worst, absolute = np.unravel_index(worst, a.shape), float(np.where(held, difference, 0.0).max())
        largest = np.abs(e[np.isfinite(e)]).max(initial=0.0)
        return dict(
            verdict=verdict,
            elements=int(held.sum()),
            absolute=absolute,
            relative=float(absolute / max(largest, tolerance.atol / tolerance.rtol)),
            index=tuple(map(int, worst)),
            inputs=_inputs(point, reference.names, worst, a.shape),
            analytic=float(a[worst]),
            numeric=float(e[worst]),
            reason=reason or None,
        )

    def _autodiff_at(self, point, order, i):
        try:
            return self._autodiff and np.asarray(self._autodiff.at(point, order)[0][i], np.float64)
        except Exception:  # such as the error of a `while_loop` in reverse mode
            return None

    def _decided(self, point, expected, i, dtype, a, e):
        """Return two masks: the elements to compare, and the elements whose expected number is unknown. `a` is array i
        of the results or gradients, and `e` has its expected numbers. `dtype` names the dtype whose tolerance
        applies."""
        # With finite arguments, a NaN in `e` is ignored, and an infinity unless kinks must have autodiff's slope.
        loose = point.maybe_undefined or expected.order > 1 or (point.kinks and not self._convention)
        told = np.isfinite(e) if loose else ~np.isnan(e)
        held = told if all(np.isfinite(v).all() for v in point.values) else np.ones(e.shape, bool)
        held &= ~np.isfinite(e) | (np.abs(point.dy_factor * e) <= float(jnp.finfo(dtype).max))
        undecided = np.zeros(a.shape, bool)
        if expected.undecided is not None and not loose:
            undecided = expected.undecided[i] & np.isfinite(a)
        elif any(np.isinf(v).any() for v in point.values) and not any(np.isnan(v).any() for v in point.values):
            undecided = ~np.isfinite(e) & np.isfinite(a)
        return held & ~undecided, undecided

    def _excuses(self, point, order, i, checked, dtype, tolerance, a, e, held, excess, contradicted, sees_kinks):
        """Return the excuses in the order in which they apply.

        Each takes a mask of the elements that are still wrong, and returns a mask of the elements that it excuses, and
        a sentence.
        """
        reference, autodiff = self.reference, self._autodiff_at(point, order, i)
        derivative = lambda point: reference.derivative(order, point)[i]  # noqa: E731

        def same_as_autodiff(_):
            finite = np.isfinite(autodiff)
            # If custom rules avoid an overflow of autodiff, the overflow is no excuse, except for squares in float16.
            fine = finite | reference.independent | (order == 0 and dtype == "float16")
            fine &= close(a, autodiff, tolerance)
            if reference.independent:
                fine |= ~finite & np.isfinite(e)
            return fine & ~contradicted, f"the same as autodiff in {dtype}"

        def as_exact_as_autodiff(_):
            def error():
                random, found = generator(1), []
                for _ in range(SAMPLES):
                    values = [v * (1 + NEAR * random.uniform(-1, 1, v.shape)) for v in point.values]
                    dtypes = self._autodiff.arguments.dtypes
                    near = point.at([rounded(v, dtype) for v, dtype in zip(values, dtypes, strict=True)])
                    result = np.asarray(self._autodiff.results(order, near)[i], np.float64)
                    with np.errstate(invalid="ignore", over="ignore"):
                        off = np.abs(result - reference.by_rules_of_jax(order, near)[i])
                    found.append(off[np.isfinite(off)].max(initial=0.0))
                return float(np.median(found))

            fine = is_as_exact(a, e, autodiff, held, tolerance, error)
            return fine, "within the rounding error of autodiff"

        def within_rounding(_):
            # Ops in half precision accumulate in float32. Above order 1, they differentiate a rounded gradient.
            in_dtype = order > self._rounded_once or autodiff is None
            terms = np.dtype(jnp.dtype(dtype) if in_dtype else np.promote_types(jnp.dtype(dtype), np.float32))
            off = reference.rounding(order, point, terms)[i]
            # An error may also reach infinity.
            number = np.where(np.isinf(a), np.copysign(float(jnp.finfo(dtype).max), a), a)
            return close(number, e, tolerance, ALLOWED * off), f"within the rounding error of {terms.name}"

        def overflow_of_a_term(wrong):
            overflows = np.zeros(a.shape, bool)
            for k in range(len(point.cotangents) if (wrong & ~np.isfinite(a)).any() and order else 0):
                cotangents = [c if j == k else np.zeros_like(c) for j, c in enumerate(point.cotangents)]
                term = point.dy_factor * derivative(dataclasses.replace(point, cotangents=cotangents))
                overflows |= np.abs(term) > float(jnp.finfo(dtype).max)
            return ~np.isfinite(a) & overflows, f"a term of the sum overflows in {dtype}"

        def spread_over_triangles(_):
            transposed = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
            is_triangular = any(np.triu(g, 1).any() != np.tril(g, -1).any() for g in (a, e))
            fine = is_triangular & close(a + transposed(a), e + transposed(e), tolerance)
            return fine, "the gradient of one triangle is spread over both, right for symmetric arguments"

        @functools.cache
        def around(share):
            """Return neighbors of `point.values`, and the derivatives there with respect to argument i.

            The last derivative is at `point.values`. In each neighbor, elements move at random by at most the fraction
            `share` of their array's largest element. At order 1, further neighbors move one element by twice this
            limit, to break ties.
            """
            random, ends = generator(2), []
            moves = [(None, None, 0)] * NEIGHBORS
            for j, v in enumerate(point.values if order == 1 else ()):
                chosen = np.flatnonzero(excess > 1)[:MOST] if j == i else evenly(v.size, MOST)
                moves += [(j, index, sign) for index in chosen for sign in (2, -2)]
            for j, index, sign in moves:
                values = [v + share * scale_of(v) * random.uniform(-1, 1, v.shape) for v in point.values]
                if index is not None:
                    own = point.values[j]
                    values[j].flat[index] = own.flat[index] + sign * share * scale_of(own)
                ends.append(values)
            found = [derivative(point.at(values)) for values in (*ends, point.values)]
            return ends, np.nan_to_num(np.stack(found), nan=0.0, posinf=0.0, neginf=0.0)

        def jumps(reach, limit):
            """Return a mask of the wrong elements of the derivative that jump on the way to a neighbor."""
            (ends, near), indices = around(reach), np.flatnonzero(excess > 1)
            halvings = max(0, int(np.ceil(np.log2(reach / KINK_WIDTH))))
            change = np.abs(near.reshape(len(near), -1)[:, indices] - near[-1].ravel()[indices])
            limit, found = limit.ravel()[indices], np.zeros(indices.size, bool)
            most = max(1, min(KINKS_LOOKED_AT, WORK // (sum(v.size for v in point.values) * max(1, halvings))))
            for rank in range(2):
                open_ = np.flatnonzero(~found & (np.sort(change, axis=0)[-1 - rank] > limit))
                if not open_.size:
                    break
                chosen = open_[evenly(open_.size, most)]
                to = np.argsort(change, axis=0)[-1 - rank, chosen]
                size = 2 ** int(np.ceil(np.log2(chosen.size)))  # to compile few programs
                lines = [ends[k] for k in np.resize(to, size)], np.resize(indices[chosen], size), halvings
                found[chosen] = jump = np.abs(reference.jumps(order, i, point, *lines)[: chosen.size]) > limit[chosen]
                if jump.all():
                    found[open_] = True
            mask = np.zeros(a.shape, bool)
            mask.flat[indices] = found
            return mask

        @functools.cache
        def kinks():
            """Return (mask, reason, slopes). The mask has the elements whose errors kinks excuse, for this reason. If a
            kink does not excuse an error, `slopes` is a text with its slopes, else None."""
            reach, limit = ROUNDINGS * float(jnp.finfo(dtype).eps), allowed(e, tolerance)
            near, hair = around(reach)[1], around(KINK_RTOL)[1]
            here = np.nan_to_num(e, nan=0.0, posinf=0.0, neginf=0.0)[None]
            at_it, jumps_near = np.ptp(hair[:-1], axis=0) > limit, jumps(reach, limit)
            found = np.concatenate([np.where(jumps_near, near, here), hair, here])
            low, high = found.min(axis=0), found.max(axis=0)
            inside = (a >= low - limit) & (a <= high + limit)
            loose = not self._convention or (dtype in ("float16", "bfloat16") and point.of is None) or order > 1
            fine = inside & (at_it | jumps_near) & (~at_it | loose)
            if loose and order == 1:
                fine &= ~at_it | _sums_are_right(a, np.concatenate([near, hair, here]), limit)
            why, hint = "within rounding error of a kink", None
            if (at_it & fine).any():
                why = "any slope is right at a kink"
            if (where := at_it & ~fine).any():
                at = np.unravel_index(np.argmax(where), a.shape)
                hint = f"at a kink with slopes from {low[at]:.3g} to {high[at]:.3g}"
            return fine & ~contradicted, why, hint

        def near_ties(wrong):
            """Excuse elements that rounding explains.

            Divide the elements of dy into parts. For each part, set all other elements to 0. The gradient by `checked`
            must then lie within the range of the reference's gradients with random rounding errors.
            """
            if order > 1 or kinks()[2] is None:
                return np.zeros(a.shape, bool), ""
            sizes = [c.size for c in point.cotangents]
            count = max(1, min(PARTS, sum(sizes), NUMBERS // sum(v.size for v in point.values)))
            numbers = np.split(np.arange(sum(sizes)) % count, np.cumsum(sizes)[:-1])
            parts = [
                np.stack([np.where(number.reshape(c.shape) == k, c, 0) for k in range(count)])
                for c, number in zip(point.cotangents, numbers, strict=True)
            ]
            if self._rounded_otherwise[0] is not point:
                settings = dict(dtype=dtype, roundings=ALLOWED, runs=RUNS)
                try:
                    self._rounded_otherwise = point, reference.rounded_otherwise(point.values, parts, **settings)
                except NotImplementedError:  # `vmap` does not support the program
                    return np.zeros(a.shape, bool), ""
            fine, whole = ~contradicted, np.zeros(a.shape)
            for k in range(count):
                part = checked.results(1, dataclasses.replace(point, cotangents=[c[k] for c in parts]))
                part = [np.asarray(g, np.float64) for g in part]
                found = [np.nan_to_num(g[:, k], nan=0.0, posinf=0.0, neginf=0.0) for g in self._rounded_otherwise[1]]
                limits = [allowed(np.abs(g).max(axis=0), tolerance) for g in found]
                fine &= is_between(part[i], found[i], limits[i])
                of_all = np.stack([flat(run) for run in zip(*found, strict=True)])
                fine &= _sums_are_right(flat(part), of_all, flat(limits)).all()
                whole += part[i]
            fine &= close(whole, a, tolerance)  # a backward is linear in dy, so its parts add up
            return fine, f"rounding decides near-ties at {int((wrong & fine).sum())} elements"

        excuses = [within_rounding, overflow_of_a_term]
        if autodiff is not None:
            excuses = [*([] if sees_kinks else [same_as_autodiff]), as_exact_as_autodiff, *excuses]
        if order and reference.symmetric[i]:
            excuses.append(spread_over_triangles)
        return [*excuses, lambda _: kinks(), near_ties] if order else excuses


def is_as_exact(
    a: np.ndarray, e: np.ndarray, autodiff: np.ndarray, held: Any, tolerance: Tolerance, error: Callable[[], float]
) -> np.ndarray:
    """Return a mask of the elements of `a` that differ from the expected `e` by at most the tolerance plus `ALLOWED`
    times autodiff's rounding error `error()`.

    If, within the mask `held`, all elements of `a` differ from `e` by the same factor, and the elements of `autodiff`
    do not, the result is False everywhere.
    """
    compared = held & np.isfinite(a) & np.isfinite(e)
    if compared.sum() >= FACTOR_ELEMENTS and np.isfinite(autodiff[compared]).all() and e[compared].any():
        wanted = e[compared]
        factor, own = (abs(float(b[compared] @ wanted) / float(wanted @ wanted) - 1) for b in (a, autodiff))
        if factor > tolerance.rtol and own < factor / ALLOWED:
            return np.zeros(a.shape, bool)
    return close(a, e, tolerance, ALLOWED * error())


def is_between(a: np.ndarray, found: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return a mask of the elements of `a` in the range of the arrays `found`, widened by `limit`. The sum along each
    axis through such an element must be in the range of the sums of `found`, too."""
    inside = (a >= found.min(axis=0) - limit) & (a <= found.max(axis=0) + limit)
    return inside & _sums_are_right(a, found, limit)


def _sums_are_right(a: np.ndarray, found: np.ndarray, limit: np.ndarray) -> np.ndarray:
    # At a tie, the gradient may go to another element, also of another argument, but the sum remains.
    right = np.ones(a.shape, bool)
    for axis in range(a.ndim):
        sums, nearby = a.sum(axis, keepdims=True), found.sum(axis + 1, keepdims=True)
        slack = limit.sum(axis, keepdims=True) + np.ptp(nearby, axis=0)
        right &= (sums >= nearby.min(axis=0) - slack) & (sums <= nearby.max(axis=0) + slack)
    return right


def _inputs(point: Point, names: Sequence[str], worst: tuple, shape: tuple[int, ...]) -> tuple[tuple[str, float], ...]:
    found = []
    for name, a in zip(names, point.values, strict=True):
        aligned = shape[len(shape) - a.ndim :] if a.ndim <= len(shape) else None
        if aligned is not None and all(n in (1, m) for n, m in zip(a.shape, aligned, strict=True)):
            index = worst[len(shape) - a.ndim :]
            found.append((name, float(a[tuple(0 if n == 1 else k for n, k in zip(a.shape, index, strict=True))])))
    return tuple(found)


def _cause(a: np.ndarray, e: np.ndarray, wrong: np.ndarray) -> str:
    """Return how the elements of `a` in the mask `wrong` differ from the expected `e`, or "" if unknown."""
    finite = np.isfinite(a) & np.isfinite(e)
    if not finite[wrong].all():
        return "not finite" if not np.isfinite(a[wrong]).all() else ""
    alike = lambda x, y: bool(np.allclose(x, y, rtol=0.02, atol=0.02 * scale_of(e)))  # noqa: E731
    a, e = np.where(finite, a, 0.0), np.where(finite, e, 0.0)
    some = "" if wrong[e != 0].all() else ", in some elements"
    if not a[wrong].any():
        return f"zero{some.replace(',', '')}"
    if (wrong.sum() > 1 or wrong.size == 1) and (factor := _factor(a[wrong], e[wrong])):
        return factor + some
    if a.ndim > 1 and a.shape[-1] == a.shape[-2] and alike(np.swapaxes(a, -1, -2), e):
        return "transposed"
    if not alike(a, e):
        for axis in range(a.ndim):
            if a.shape[axis] > 1 and alike(np.flip(a, axis), e):
                return "flipped"
            if a.shape[axis] > 1 and alike(np.roll(a, 1, axis), e):
                return "shifted by one"
        if a.ndim > 1 and alike(np.flip(a, (-1, -2)), e):
            return "flipped"
        if a.size > 2 and alike(np.sort(a, axis=None), np.sort(e, axis=None)):
            return "the right values in the wrong order"
    off = (a - e)[wrong]
    if wrong.all() and a.size > 1 and np.allclose(off, off.mean(), rtol=0.02):
        return "off by a constant"
    return "" if wrong.all() else f"wrong in {int(wrong.sum())} of {wrong.size} elements"


def _factor(a, e):
    size = float(e @ e)
    factor = float(a @ e) / size if size else 0.0
    off = abs(factor - 1)
    if not factor or np.abs(a - factor * e).max() > 0.05 * min(1.0, off) * np.abs(e).max():
        return ""
    if abs(factor + 1) < 0.02:
        return "the sign is wrong"
    if off < PERCENT:
        return f"{100 * off:.2g}% too {'large' if factor > 1 else 'small'}"
    return f"{factor:.3g} times what it should be"
