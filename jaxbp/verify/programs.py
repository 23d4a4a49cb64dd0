"""Programs that run an implementation as users do."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.pairing import Implementation
from jaxbp.verify.arguments import Arguments, bind, is_float
from jaxbp.verify.derivatives import (
    Arrays,
    Derivatives,
    Function,
    in_numpy,
    quickly_compiled,
    value_and_gradients,
)
from jaxbp.verify.points import LEVELS, Point, sizes_of


def _in_cond(function):
    def run(*values):
        taken = lax.optimization_barrier(jnp.bool_(True))
        shapes = jax.eval_shape(function, *values)
        return lax.cond(taken, function, lambda *_: [jnp.zeros(s.shape, s.dtype) for s in shapes], *values)

    return run


def _in_scan(function):
    def run(*values):
        step = lambda carry, values: (carry, function(*values))  # noqa: E731
        return [y[0] for y in lax.scan(step, 0, tuple(a[None] for a in values))[1]]

    return run


WRAPPERS = {"remat": jax.checkpoint, "cond": _in_cond, "scan": _in_scan}


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
        self._of = lambda arguments: change(arguments.of_floats(bind(op, implementation, options)))
        self._plain = self._of(arguments)
        self.function, self._latest, self._narrowed = jax.jit(self._plain), (None, None), {}
        self._quickly = quickly_compiled(arguments.floats)
        self._derivatives = Derivatives(self.function, of_higher=self._quickly, **compiling)

    def in_dtype(self, dtype: str) -> "Programs":
        if dtype in self._narrowed:
            return self._narrowed[dtype]
        leaves = [np.asarray(a).astype(dtype) if is_float(a) else a for a in self.arguments.leaves]
        other = object.__new__(Programs)
        arguments = dataclasses.replace(self.arguments, leaves=tuple(leaves))
        derivatives = Derivatives(self.function, **self._quickly)
        other.__dict__ = self.__dict__ | dict(arguments=arguments, _derivatives=derivatives, _latest=(None, None))
        other.__dict__.pop("result_dtypes", None)
        self._narrowed[dtype] = other
        return other

    @functools.cached_property
    def result_dtypes(self) -> list[np.dtype]:
        return [y.dtype for y in jax.eval_shape(self.function, *self.arguments.floats)]

    def at(self, point: Point, order: int, directions: Sequence[Arrays]) -> list[np.ndarray]:
        """Return the results (order 0), or a derivative, divided by the point's factor of dy."""
        if order > 1:
            return in_numpy(self.results(order, point.values, point.cotangents, directions))
        if self._latest[0] is not point:
            cotangents = [c * point.dy_factor for c in point.cotangents]
            y, gradients = in_numpy(self.results(None, point.values, cotangents, directions))
            self._latest = point, (y, [g / g.dtype.type(point.dy_factor) for g in gradients])
        return self._latest[1][order]

    def takes_arguments(self) -> bool:
        try:
            _ = self.result_dtypes
        except (NotImplementedError, TypeError, ValueError):
            return False
        return True

    def rounded(self, values: Arrays) -> list[np.ndarray]:
        return [np.asarray(v.astype(a.dtype), np.float64) for v, a in zip(values, self.arguments.floats, strict=True)]

    def results(self, order: int | None, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """Return `Derivatives(order, ...)`, or both results and gradients if the order is None."""
        dtypes = self.result_dtypes
        with np.errstate(over="ignore"):
            directions = [self.in_dtypes(d) for d in directions]
            cotangents = [c.astype(dtype) for c, dtype in zip(cotangents, dtypes, strict=True)]
        if order is None:
            return self._derivatives.value_and_gradients(self.in_dtypes(values), cotangents)
        return self._derivatives(order, self.in_dtypes(values), cotangents, directions)

    def outside_jit(self, values: Arrays, cotangents: Arrays) -> list[Any]:
        values = [jnp.asarray(v) for v in self.in_dtypes(values)]
        return _flat(value_and_gradients(self._plain)(values, cotangents))

    def transformed(self, names: Collection[str], points: Sequence[Point]) -> list[list[Any]]:
        """Return results and gradients at each point, computed by one program under all transformations in `names`.

        `points` are `points.grid(..., names)`.
        """
        function = self._plain
        for name in names:
            function = WRAPPERS.get(name, lambda function: function)(function)
        run, mapped = value_and_gradients(function), [name for name in LEVELS if name in names]
        others = len(self.arguments.floats) - 1
        for name in reversed(mapped):
            _, *of = LEVELS[name]
            first, rest, dy = (0 if moved else None for moved in of)
            run = jax.vmap(run, ([first] + others * [rest], dy))
        if "shard_map" in names:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("checked",))
            spec = jax.sharding.PartitionSpec(*["checked"] * bool(mapped))
            run = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
        program = jax.jit(run, **self._quickly)

        def stacked(arrays, *moved):
            moved = [name in names and LEVELS[name][kind] for name in LEVELS for kind in moved]
            arrays = np.stack(arrays)
            arrays = arrays.reshape(*sizes_of(names), *arrays.shape[1:])
            return arrays[tuple(slice(None) if on else 0 for on in moved)]

        values = [
            stacked(arrays, 1 if i == 0 else 2)
            for i, arrays in enumerate(zip(*(self.in_dtypes(point.values) for point in points), strict=True))
        ]
        cotangents = [
            stacked([c.astype(dtype) for c in arrays], 3)
            for arrays, dtype in zip(
                zip(*(point.cotangents for point in points), strict=True), self.result_dtypes, strict=True
            )
        ]
        found = in_numpy(_flat(program(values, cotangents)))
        found = [a.reshape(len(points), *a.shape[len(mapped) :]) for a in found]
        return [[a[k] for a in found] for k in range(len(points))]

    def of_integers(self, transform: Callable = lambda program: program) -> Callable:
        """Return a compiled function of `(values, cotangents, integers)`, which returns results and gradients.

        `integers` replaces the arguments that are not floating.
        """

        def run(values, cotangents, integers):
            function = self._of(self.arguments.with_integers(integers))
            return transform(value_and_gradients(function))(values, cotangents)

        return jax.jit(run, **self._quickly)

    def with_one_array(self, values: Arrays, cotangents: Arrays, same: Sequence[int]) -> tuple[list[Any], Any]:
        values = [jnp.asarray(v) for v in self.in_dtypes(values)]

        def function(array):
            return self._plain(*(array if i in same else a for i, a in enumerate(values)))

        y, (gradient,) = value_and_gradients(function)([values[same[0]]], cotangents)
        return y, gradient

    def in_dtypes(self, values):
        with np.errstate(over="ignore"):
            return [v.astype(a.dtype) for v, a in zip(values, self.arguments.floats, strict=True)]


def _flat(results):
    values, gradients = results
    return [*values, *gradients]
