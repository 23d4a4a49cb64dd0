"""Decide whether rounding explains the differences between two implementations."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxbp.verify.derivatives import has_no_forward_mode, in_numpy, scale_of
from jaxbp.verify.interpreter import traced
from jaxbp.verify.judge import KINK_RTOL, NEIGHBOURS, is_as_exact, is_between
from jaxbp.verify.lifting import lifted
from jaxbp.verify.points import generator
from jaxbp.verify.tolerance import Tolerance, allowed, excess_and_difference


class Exact:
    """The results of the reference implementation, as computed and in float64.

    Args:
      functions, data: the functions that `derivatives_of` returns, and their arguments.
      chosen: the indices of the arrays to differentiate with respect to.
      results: the computed results, a dict from kinds of results to arrays.
    """

    def __init__(
        self,
        functions: Sequence[Callable],
        data: tuple[list, list, list],
        chosen: Sequence[int],
        results: Mapping[str, Sequence[Any]],
        tolerance: Tolerance,
    ):
        self._data, self._chosen, self._results = data, chosen, results
        self.tolerance, self._mode = tolerance, jax.config.jax_enable_x64
        gradients, *hessian_products = functions
        self._programs = {
            "value": (lambda *data: gradients(*data[:2])[0],),
            "gradient": (lambda *data: gradients(*data[:2])[1],),
            "hessian product": hessian_products,
        }
        self._in_float64 = functools.cache(lambda kind: self._compute(kind, data[0]))
        self._nearby = functools.cache(self._compute_nearby)

    def by_reference(self, kind: str, i: int) -> np.ndarray:
        return np.asarray(self._results[kind][i], np.float64)

    def mistakes(self, kind: str, i: int, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a mask of the wrong elements of `a`, and the expected array."""
        reference, tolerance = self.by_reference(kind, i), self.tolerance
        wrong = excess_and_difference(a, reference, tolerance)[0] > 1
        if not wrong.any():
            return wrong, reference
        try:
            e = self._in_float64(kind)[i]
        except Exception:  # such as the error of a callback in float32
            return wrong, reference
        wrong = excess_and_difference(a, e, tolerance)[0] > 1
        if wrong.any():
            with np.errstate(invalid="ignore"):
                off = np.abs(reference - e)
            error = float(off[np.isfinite(off)].max(initial=0.0))
            wrong &= ~is_as_exact(a, e, reference, np.ones(a.shape, bool), tolerance, lambda: error)
        if wrong.any() and kind != "value":
            near = np.stack([e, *(results[i] for results in self._nearby(kind))])
            wrong &= ~is_between(a, near, allowed(e, tolerance))
        return wrong, e

    def _compute_nearby(self, kind):
        """Compute near the data, where ties are broken."""
        random, found = generator(2), []
        for _ in range(NEIGHBOURS):
            leaves = list(self._data[0])
            for i in self._chosen:
                a = np.asarray(leaves[i], np.float64)
                leaves[i] = a + KINK_RTOL * scale_of(a) * random.uniform(-1, 1, a.shape)
            found.append(self._compute(kind, leaves))
        return found

    def _compute(self, kind, leaves):
        *others, last = self._programs[kind]
        for function in others:  # in forward mode
            try:
                return self._run(function, leaves)
            except TypeError as error:
                if not has_no_forward_mode(error):
                    raise
        return self._run(last, leaves)

    @functools.cache  # noqa: B019
    def _compiled(self, function):
        def trace(function, _):
            with jax.enable_x64(self._mode):
                return traced(function, self._data)

        return jax.jit(lifted(function, trace))

    def _run(self, function, leaves):
        with jax.enable_x64(True), np.errstate(all="ignore"):
            return in_numpy(self._compiled(function)(leaves, *self._data[1:]))
