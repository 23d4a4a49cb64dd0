"""Decide whether a number that differs from the reference by more than the tolerance is a mistake
(docs/numerics.md, "What is not a mistake").

A kink is a point at which the slopes on the two sides differ.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxbp.verify.causes import cause
from jaxbp.verify.derivatives import Arrays, flat, scale_of
from jaxbp.verify.points import USER_DATA, Point, generator
from jaxbp.verify.reference import Expected, Reference
from jaxbp.verify.tolerance import Tolerance, allowed, excess_and_difference

NEAR, SAMPLES, ALLOWED = 0.01, 3, 4
"""An error of up to `ALLOWED` times autodiff's rounding error passes. The rounding error is measured on `SAMPLES` data
sets that differ from the data by at most the fraction `NEAR`."""
FACTOR_ELEMENTS = 8
"""The least number of elements for which an error by a common factor counts as a mistake."""
NOT_FINITE = "no expected number is finite"
MOST = 32
PARTS, RUNS, NUMBERS = 64, 16, 2**20
ROUNDINGS = 16
"""The largest distance of a kink "near" the data, in rounding errors of the largest element."""
NEIGHBOURS = 16
KINK_RTOL = 1e-12
"""The largest distance of a kink "at" the data, relative to the largest element."""
KINK_WIDTH, KINKS_LOOKED_AT, WORK = 1e-9, 1024, 2**26
"""A change of slope is a jump if it happens within `KINK_WIDTH` times the largest element."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """A comparison of result or derivative number i of an implementation, `a`, with the expected array `e`."""

    point: Point
    expected: Expected
    i: int
    a: np.ndarray
    e: np.ndarray
    dtype: str
    tolerance: Tolerance

    @property
    def contradicted(self) -> np.ndarray:
        return self.expected.contradicted[self.i]

    def excess(self, more: Any = 0.0) -> np.ndarray:
        return excess_and_difference(self.a, self.e, self.tolerance, more)[0]


class Judge:
    """Comparison of implementations' results and derivatives with a float64 reference.

    Args:
      convention: `kink_convention` of `check`.
      precision: the forward's dtype if it is less precise than the arguments.
    """

    def __init__(
        self,
        reference: Reference,
        autodiff: Any,
        tolerances: Mapping[str, Tolerance],
        directions: Sequence[Arrays],
        convention: bool,
        precision: np.dtype | None = None,
    ):
        self.reference, self.tolerances = reference, tolerances
        self.autodiff = autodiff if autodiff is not None and autodiff.takes_arguments() else None
        self.directions, self.convention = directions, convention
        self.precision = precision
        self._otherwise = None, None

    def verdict(self, point: Point, expected: Expected, i: int, actual: Any, checked: Any) -> dict[str, Any]:
        """Compare `actual`, which the implementation `checked` computed, with `expected.arrays[i]`. Return keyword
        arguments of `CheckRow`."""
        dtypes = [actual.dtype, *([checked.arguments.floats[i].dtype] if expected.order else [])]
        dtype, a, e, autodiff = self._least_precise(dtypes), np.asarray(actual, np.float64), expected.arrays[i], None
        if a.size == 0:
            return dict(verdict="skipped", reason="no elements")
        tolerance = self.tolerances[dtype]
        if self._sees_kinks(point, expected.order, dtype):
            autodiff = self._autodiff(point, expected.order, i)
        if autodiff is not None:
            # In a narrow dtype, the forward's kink may be at another number.
            e = np.where(
                expected.contradicted[i] | (excess_and_difference(autodiff, e, tolerance)[0] <= 1), e, autodiff
            )
        case = _Case(point, expected, i, a, e, dtype, tolerance)
        held, undecided = self._decided(case)
        wrong, reason, hint = held & (case.excess() > 1), None, None
        if wrong.any():
            wrong, reason = self._excused_by_rounding(case, wrong, held, autodiff)
        if wrong.any() and expected.order > 0 and self.reference.symmetric[i]:
            why = "the gradient of one triangle is spread over both, right for symmetric arguments"
            wrong, reason = _excused(wrong, _is_spread(a, e, tolerance), reason, why)
        if wrong.any() and expected.order > 0:
            wrong, reason, hint = self._excused_by_kinks(case, wrong, reason, checked)
        return self._fields(case, wrong, held, undecided, reason, hint)

    def _decided(self, case):
        """Return two masks: the elements to compare, and the elements whose expected number is unknown."""
        point, expected, a, e = case.point, case.expected, case.a, case.e
        # With finite arguments, a NaN in `e` is ignored, and an infinity unless kinks must have autodiff's slope.
        loose = point.maybe_undefined or expected.order > 1 or (point.kinks and not self.convention)
        told = np.isfinite(e) if loose else ~np.isnan(e)
        held = told if all(np.isfinite(v).all() for v in point.values) else np.ones(e.shape, bool)
        held &= ~np.isfinite(e) | (np.abs(point.dy_factor * e) <= float(jnp.finfo(case.dtype).max))
        undecided = np.zeros(a.shape, bool)
        if expected.undecided is not None and not loose:
            undecided = expected.undecided[case.i] & np.isfinite(a)
        elif any(np.isinf(v).any() for v in point.values) and not any(np.isnan(v).any() for v in point.values):
            undecided = ~np.isfinite(e) & np.isfinite(a)
        return held & ~undecided, undecided

    def _excused_by_rounding(self, case, wrong, held, autodiff):
        point, order, i, a, e, dtype = case.point, case.expected.order, case.i, case.a, case.e, case.dtype
        reason = None
        autodiff = self._autodiff(point, order, i) if autodiff is None else autodiff
        if autodiff is not None and not self._sees_kinks(point, order, dtype):
            as_autodiff = excess_and_difference(a, autodiff, case.tolerance)[0] <= 1
            # If custom rules avoid an overflow of autodiff, the overflow is no excuse, except for squares in float16.
            of_forward = order == 0 and dtype == "float16"
            as_autodiff &= np.isfinite(autodiff) | self.reference.independent | of_forward
            if self.reference.independent:
                as_autodiff |= ~np.isfinite(autodiff) & np.isfinite(e)
            fine = as_autodiff & ~case.contradicted
            wrong, reason = _excused(wrong, fine, reason, f"the same as autodiff in {dtype}")
        if wrong.any() and autodiff is not None:
            fine = is_as_exact(a, e, autodiff, held, case.tolerance, lambda: self._rounding(point, order, i))
            wrong, reason = _excused(wrong, fine, reason, "within the rounding error of autodiff")
        if wrong.any():
            # Ops in half precision accumulate in float32. Above order 1, they differentiate a rounded gradient.
            in_dtype = order > 1 or autodiff is None
            terms = np.dtype(jnp.dtype(dtype) if in_dtype else np.promote_types(jnp.dtype(dtype), np.float32)).name
            settings = point.values, point.cotangents, self.directions, jnp.dtype(terms)
            fine = case.excess(ALLOWED * self.reference.rounding(order, *settings)[i]) <= 1
            wrong, reason = _excused(wrong, fine, reason, f"within the rounding error of {terms}")
        if (wrong & ~np.isfinite(a)).any():
            fine = ~np.isfinite(a) & self._a_term_overflows(point, order, i, dtype)
            wrong, reason = _excused(wrong, fine, reason, f"a term of the sum overflows in {dtype}")
        return wrong, reason

    def _excused_by_kinks(self, case, wrong, reason, checked):
        point, order, i, a = case.point, case.expected.order, case.i, case.a
        fine, why, hint = self._at_kinks(point, order, i, a, case.e, case.dtype, case.tolerance)
        wrong, reason = _excused(wrong, fine & ~case.contradicted, reason, why)
        if wrong.any() and order == 1 and hint is not None:
            fine = self._decided_by_rounding(point, i, a, checked, case.dtype, case.tolerance) & ~case.contradicted
            why = f"rounding decides near-ties at {int((wrong & fine).sum())} elements"
            wrong, reason = _excused(wrong, fine, reason, why)
        return wrong, reason, hint

    def _fields(self, case, wrong, held, undecided, reason, hint):
        point, a, e, tolerance = case.point, case.a, case.e, case.tolerance
        excess, difference = excess_and_difference(a, e, tolerance)
        worst = np.unravel_index(np.argmax(np.where(wrong if wrong.any() else held, excess, 0.0)), a.shape)
        if wrong.any():
            reason = "; ".join(filter(None, (cause(a, e, wrong), hint)))
        elif undecided.any():
            worst = np.unravel_index(np.argmax(undecided), a.shape)
            reason = "autodiff is not finite, and finite differences cannot decide"
        elif not held.any():
            reason = NOT_FINITE
        verdict = "failed" if wrong.any() else "inconclusive" if undecided.any() else "ok"
        if verdict == "ok" and not held.any():
            verdict = "inconclusive" if point.name == USER_DATA else "skipped"
        largest = np.abs(e[np.isfinite(e)]).max(initial=0.0)
        difference = np.where(held, difference, 0.0)
        size = max(largest, tolerance.atol / tolerance.rtol)
        return dict(
            verdict=verdict,
            elements=int(held.sum()),
            absolute=float(difference.max()),
            relative=float(difference.max() / size),
            index=tuple(map(int, worst)),
            inputs=_inputs(point, self.reference.names, worst, a.shape),
            analytic=float(a[worst]),
            numeric=float(e[worst]),
            reason=reason or None,
        )

    def _sees_kinks(self, point, order, dtype):
        exact = dtype in ("float32", "float64")
        return point.kinks and point.of is not None and order == 1 and exact and self.reference.independent

    def _autodiff(self, point, order, i):
        if self.autodiff is None:
            return None
        try:
            found = self.autodiff.at(point, order, self.directions)[i]
        except Exception:  # such as the error of a `while_loop` in reverse mode
            return None
        return np.asarray(found, np.float64)

    def _a_term_overflows(self, point, order, i, dtype):
        beyond = np.zeros(point.values[i].shape if order else (), bool)
        for k in range(len(point.cotangents) if order else 0):
            cotangents = [c if j == k else np.zeros_like(c) for j, c in enumerate(point.cotangents)]
            of_one = self.reference.derivative(order, point.values, cotangents, self.directions)[i]
            beyond |= np.abs(point.dy_factor * of_one) > float(jnp.finfo(dtype).max)
        return beyond

    def _least_precise(self, dtypes):
        known = [dtype for dtype in (*dtypes, self.precision) if dtype is not None and dtype.name in self.tolerances]
        return max(known, key=lambda dtype: float(jnp.finfo(dtype).eps)).name

    def _rounding(self, point, order, i):
        autodiff = self.autodiff
        random, found = generator(1), []
        for _ in range(SAMPLES):
            values = autodiff.rounded([a * (1 + NEAR * random.uniform(-1, 1, a.shape)) for a in point.values])
            results = autodiff.results(order, values, point.cotangents, self.directions)
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(
                    np.asarray(results[i], np.float64)
                    - self.reference.by_rules_of_jax(order, values, point.cotangents, self.directions)[i]
                )
            found.append(error[np.isfinite(error)].max(initial=0.0))
        return float(np.median(found))

    def _at_kinks(self, point, order, i, a, e, dtype, tolerance):
        """Return a mask of the elements of the derivative `a` whose errors kinks excuse, the reason, and a hint if any.

        The hint has the slopes at a kink that does not excuse an error.
        """
        reach = ROUNDINGS * float(jnp.finfo(dtype).eps)
        indices, limit = np.flatnonzero(excess_and_difference(a, e, tolerance)[0] > 1), allowed(e, tolerance)
        (ends, near), (_, hair) = (self._around(point, order, i, share, indices[:MOST]) for share in (reach, KINK_RTOL))
        here = np.nan_to_num(e, nan=0.0, posinf=0.0, neginf=0.0)[None]
        at_it, jumps_near = np.ptp(hair[:-1], axis=0) > limit, np.zeros(a.shape, bool)
        jumps_near.flat[indices] = self._jump(point, order, i, (reach, ends, near), indices, limit)
        found = np.concatenate([np.where(jumps_near, near, here), hair, here])
        low, high = found.min(axis=0), found.max(axis=0)
        inside = (a >= low - limit) & (a <= high + limit)
        loose = not self.convention or (dtype in ("float16", "bfloat16") and point.of is None) or order > 1
        fine = inside & (at_it | jumps_near) & (~at_it | loose)
        if loose and order == 1:
            fine &= ~at_it | _sums_are_right(a, np.concatenate([near, hair, here]), limit)
        hint = None
        if (where := at_it & ~fine).any():
            at = np.unravel_index(np.argmax(where), a.shape)
            hint = f"at a kink with slopes from {low[at]:.3g} to {high[at]:.3g}"
        return fine, "any slope is right at a kink" if (at_it & fine).any() else "within rounding error of a kink", hint

    def _jump(self, point, order, i, around, indices, limit):
        reach, ends, near = around
        halvings = max(0, int(np.ceil(np.log2(reach / KINK_WIDTH))))
        change = np.abs(near.reshape(len(near), -1)[:, indices] - near[-1].ravel()[indices])
        limit, jumps = limit.ravel()[indices], np.zeros(indices.size, bool)
        numbers = sum(a.size for a in point.values) * max(1, halvings)
        for rank in range(2):
            open_ = np.flatnonzero(~jumps & (np.sort(change, axis=0)[-1 - rank] > limit))
            if not open_.size:
                break
            chosen = open_[
                np.unique(np.linspace(0, open_.size - 1, max(1, min(KINKS_LOOKED_AT, WORK // numbers))).astype(int))
            ]
            to = np.argsort(change, axis=0)[-1 - rank, chosen]
            size = 2 ** int(np.ceil(np.log2(chosen.size)))  # to compile few programs
            arguments = [ends[k] for k in np.resize(to, size)], np.resize(indices[chosen], size), halvings
            data = point.values, point.cotangents, self.directions
            found = self.reference.jumps(order, i, *data, *arguments)[: chosen.size]
            jumps[chosen] = (jump := np.abs(found) > limit[chosen])
            if jump.all():
                jumps[open_] = True
        return jumps

    def _decided_by_rounding(self, point, i, a, checked, dtype, tolerance):
        """Return a mask of the elements of the gradient `a` whose errors rounding explains.

        The implementation `checked` computed `a` from dy. Each of several parts of dy keeps some elements; the others
        are 0. For each part, the gradient by `checked` must lie within the range of the reference's gradients with
        random rounding errors.
        """
        sizes = [c.size for c in point.cotangents]
        count = max(1, min(PARTS, sum(sizes), NUMBERS // sum(v.size for v in point.values)))
        numbers = np.split(np.arange(sum(sizes)) % count, np.cumsum(sizes)[:-1])
        parts = [
            np.stack([np.where(number.reshape(c.shape) == k, c, 0) for k in range(count)])
            for c, number in zip(point.cotangents, numbers, strict=True)
        ]
        if self._otherwise[0] is not point:
            settings = dict(dtype=dtype, roundings=ALLOWED, runs=RUNS)
            try:
                self._otherwise = point, self.reference.rounded_otherwise(point.values, parts, **settings)
            except NotImplementedError:  # `vmap` does not support the program
                return np.zeros(a.shape, bool)
        fine, whole = np.ones(a.shape, bool), np.zeros(a.shape)
        for k in range(count):
            part = checked.results(1, point.values, [c[k] for c in parts], self.directions)
            part = [np.asarray(g, np.float64) for g in part]
            found = [np.nan_to_num(g[:, k], nan=0.0, posinf=0.0, neginf=0.0) for g in self._otherwise[1]]
            limits = [allowed(np.abs(g).max(axis=0), tolerance) for g in found]
            fine &= is_between(part[i], found[i], limits[i])
            of_all = np.stack([flat(run) for run in zip(*found, strict=True)])
            fine &= _sums_are_right(flat(part), of_all, flat(limits)).all()
            whole += part[i]
        # A backward is linear in dy, so its parts add up.
        return fine & (excess_and_difference(whole, a, tolerance)[0] <= 1)

    def _around(self, point, order, i, share, places):
        """Return neighbors of `point.values`, and the derivatives there with respect to argument i.

        The last derivative is at `point.values`. In each neighbor, elements move at random by at most the fraction
        `share` of their array's largest element. At order 1, further neighbors move one element by twice this limit, to
        break ties. In argument i, these elements have the flat indices `places`.
        """
        random, ends, found = generator(2), [], []
        moves = [(None, None, 0)] * NEIGHBOURS
        if order == 1:
            for j, a in enumerate(point.values):
                chosen = places if j == i else np.unique(np.linspace(0, a.size - 1, min(a.size, MOST)).astype(int))
                moves += [(j, place, sign) for place in chosen for sign in (2, -2)]
        for j, place, sign in moves:
            values = [a + share * scale_of(a) * random.uniform(-1, 1, a.shape) for a in point.values]
            if place is not None:
                values[j].flat[place] = point.values[j].flat[place] + sign * share * scale_of(point.values[j])
            ends.append(values)
        for values in (*ends, point.values):
            found.append(self.reference.derivative(order, values, point.cotangents, self.directions)[i])
        return ends, np.nan_to_num(np.stack(found), nan=0.0, posinf=0.0, neginf=0.0)


def _excused(wrong, fine, reason, why):
    return wrong & ~fine, why if (wrong & fine).any() else reason


def is_as_exact(
    a: np.ndarray, e: np.ndarray, autodiff: np.ndarray, held: Any, tolerance: Tolerance, error: Callable[[], float]
) -> np.ndarray:
    """Return a mask of the elements of `a` that `ALLOWED` times autodiff's rounding error `error()` explains.

    The mask is empty if `a` differs from `e` by a factor, but `autodiff` does not.
    """
    if _is_multiple(a, e, autodiff, held, tolerance):
        return np.zeros(a.shape, bool)
    return excess_and_difference(a, e, tolerance, ALLOWED * error())[0] <= 1


def is_between(a: np.ndarray, found: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return a mask of the elements of `a` in the range of the arrays `found`, if sums along each axis are, too."""
    inside = (a >= found.min(axis=0) - limit) & (a <= found.max(axis=0) + limit)
    return inside & _sums_are_right(a, found, limit)


def _is_multiple(a, e, autodiff, held, tolerance):
    held = held & np.isfinite(a) & np.isfinite(e)
    if held.sum() < FACTOR_ELEMENTS or not np.isfinite(autodiff[held]).all() or not e[held].any():
        return False
    factor, own = (abs(float(b[held] @ e[held]) / float(e[held] @ e[held]) - 1) for b in (a, autodiff))
    return factor > tolerance.rtol and own < factor / ALLOWED


def _is_spread(a, e, tolerance):
    transposed = lambda x: np.swapaxes(x, -1, -2)  # noqa: E731
    if not any(np.triu(g, 1).any() != np.tril(g, -1).any() for g in (a, e)):  # neither is triangular
        return np.zeros(a.shape, bool)
    return excess_and_difference(a + transposed(a), e + transposed(e), tolerance)[0] <= 1


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
