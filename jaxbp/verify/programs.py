"""Programs that run an implementation as users do."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.pairing import Implementation
from jaxbp.verify.arguments import Arguments, bind, is_float
from jaxbp.verify.derivatives import Arrays, Derivatives, Function, in_numpy, value_and_gradients


class Programs:
    def __init__(
        self,
        op: Callable,
        arguments: Arguments,
        options: Mapping[str, Any],
        implementation: Implementation,
        change: Callable[[Function], Function] = lambda function: function,
        **compiling: Any,
    ):
        self.implementation, self.arguments = implementation, arguments
        self._plain = change(arguments.of_floats(bind(op, implementation, options)))
        self.function = jax.jit(self._plain)
        self._derivatives = Derivatives(self.function, **compiling)

    def in_dtype(self, dtype: str) -> "Programs":
        leaves = [np.asarray(a).astype(dtype) if is_float(a) else a for a in self.arguments.leaves]
        other = object.__new__(Programs)
        other.__dict__ = self.__dict__ | dict(arguments=dataclasses.replace(self.arguments, leaves=tuple(leaves)))
        return other

    def result_dtypes(self) -> list[np.dtype]:
        return [y.dtype for y in jax.eval_shape(self.function, *self.arguments.floats)]

    def takes_arguments(self) -> bool:
        try:
            self.result_dtypes()
        except (NotImplementedError, TypeError, ValueError):
            return False
        return True

    def rounded(self, values: Arrays) -> list[np.ndarray]:
        return [np.asarray(v.astype(a.dtype), np.float64) for v, a in zip(values, self.arguments.floats, strict=True)]

    def results(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        dtypes = self.result_dtypes()
        with np.errstate(over="ignore"):
            directions = [self._in_dtypes(d) for d in directions]
            cotangents = [c.astype(dtype) for c, dtype in zip(cotangents, dtypes, strict=True)]
        return self._derivatives(order, self._in_dtypes(values), cotangents, directions)

    def outside_jit(self, values: Arrays, cotangents: Arrays) -> list[Any]:
        values = [jnp.asarray(v) for v in self._in_dtypes(values)]
        return _flat(value_and_gradients(self._plain)(values, cotangents))

    def vmapped(self, points: Sequence[tuple[Arrays, Arrays]], vmap: bool, remat: bool) -> list[list[Any]]:
        run = value_and_gradients(jax.checkpoint(self._plain) if remat else self._plain)
        stack = lambda arrays: [np.stack(a) for a in zip(*arrays, strict=True)]  # noqa: E731
        values = [self._in_dtypes(values) for values, _ in points]
        cotangents = [list(cotangents) for _, cotangents in points]
        if not vmap:
            jitted = jax.jit(run)
            return [_flat(jitted(v, c)) for v, c in zip(values, cotangents, strict=True)]
        found = in_numpy(_flat(jax.jit(jax.vmap(run))(stack(values), stack(cotangents))))
        return [[a[k] for a in found] for k in range(len(points))]

    def with_one_array(self, values: Arrays, cotangents: Arrays, same: Sequence[int]) -> tuple[list[Any], Any]:
        values = [jnp.asarray(v) for v in self._in_dtypes(values)]

        def function(array):
            return self._plain(*(array if i in same else a for i, a in enumerate(values)))

        y, (gradient,) = value_and_gradients(function)([values[same[0]]], cotangents)
        return y, gradient

    def _in_dtypes(self, values):
        with np.errstate(over="ignore"):
            return [v.astype(a.dtype) for v, a in zip(values, self.arguments.floats, strict=True)]


def _flat(results):
    values, gradients = results
    return [*values, *gradients]
