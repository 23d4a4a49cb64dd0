"""Programs that run an implementation as users do."""

import copy
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
from jaxbp.verify.derivatives import Derivatives, Function, quickly_compiled, value_and_gradients
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
    """An implementation and its derivatives, or instead `function` and its derivatives."""

    def __init__(
        self,
        op: Callable,
        arguments: Arguments,
        options: Mapping[str, Any],
        implementation: Implementation,
        function: Function | None = None,
        **compiling: Any,
    ):
        self.implementation, self.arguments = implementation, arguments
        self._of = lambda arguments: function or arguments.of_floats(bind(op, implementation, options))
        self._plain = self._of(arguments)
        self.function, self._latest = jax.jit(self._plain), (None, None)
        self._quickly = quickly_compiled(arguments.floats)
        self._derivatives = Derivatives(self.function, of_higher=self._quickly, **compiling)
        self.in_dtype = functools.cache(self._in_dtype)

    def _in_dtype(self, dtype: str) -> "Programs":
        leaves = [np.asarray(a).astype(dtype) if is_float(a) else a for a in self.arguments.leaves]
        other = copy.copy(self)
        other.arguments = dataclasses.replace(self.arguments, leaves=tuple(leaves))
        other._derivatives, other._latest = Derivatives(self.function, **self._quickly), (None, None)
        vars(other).pop("result_dtypes", None)
        return other

    @functools.cached_property
    def result_dtypes(self) -> list[np.dtype]:
        return [y.dtype for y in jax.eval_shape(self.function, *self.arguments.floats)]

    def takes_arguments(self) -> bool:
        try:
            _ = self.result_dtypes
        except (NotImplementedError, TypeError, ValueError):
            return False
        return True

    def in_dtypes(self, point: Point) -> tuple[list, list, list]:
        """Return a point's values, cotangents, and directions, in the dtypes of the arguments and of the results."""

        def converted(arrays, dtypes):
            return [a.astype(dtype) for a, dtype in zip(arrays, dtypes, strict=True)]

        dtypes = self.arguments.dtypes
        with np.errstate(over="ignore"):
            values, cotangents = converted(point.values, dtypes), converted(point.cotangents, self.result_dtypes)
            return values, cotangents, [converted(direction, dtypes) for direction in point.directions]

    def gradient_shapes(self, point: Point) -> list[jax.ShapeDtypeStruct]:
        return jax.eval_shape(value_and_gradients(self.function), *self.in_dtypes(point)[:2])[1]

    def at(self, point: Point, *orders: int) -> list[list[np.ndarray]]:
        """Return, for each order, the results (order 0) or a derivative, divided by the point's factor of dy."""
        if orders[0] > 1:
            return [list(map(np.asarray, self.results(order, point))) for order in orders]
        if self._latest[0] is not point:
            scaled = dataclasses.replace(point, cotangents=[c * point.dy_factor for c in point.cotangents])
            y, gradients = ([np.asarray(a) for a in arrays] for arrays in self.results(None, scaled))
            self._latest = point, (y, [g / g.dtype.type(point.dy_factor) for g in gradients])
        return [self._latest[1][order] for order in orders]

    def results(self, order: int | None, point: Point) -> Any:
        """Return the results or a derivative as `Derivatives` does, or both results and gradients if order is None."""
        arrays = self.in_dtypes(point)
        return (
            self._derivatives.value_and_gradients(*arrays[:2]) if order is None else self._derivatives(order, *arrays)
        )

    def outside_jit(self, point: Point) -> list[Any]:
        values, cotangents, _ = self.in_dtypes(point)
        return _flat(value_and_gradients(self._plain)([jnp.asarray(a) for a in values], cotangents))

    def with_one_array(self, point: Point, same: Sequence[int]) -> list[Any]:
        """Return the results, and the gradient of the one array that is passed for all arguments in `same`."""
        values, cotangents, _ = self.in_dtypes(point)
        values = [jnp.asarray(a) for a in values]

        def function(array):
            return self._plain(*(array if i in same else a for i, a in enumerate(values)))

        return _flat(value_and_gradients(function)([values[same[0]]], cotangents))

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
            first, rest, dy = (0 if moved else None for moved in LEVELS[name][1:])
            run = jax.vmap(run, ([first] + others * [rest], dy))
        if "shard_map" in names:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("checked",))
            spec = jax.sharding.PartitionSpec(*["checked"] * bool(mapped))
            run = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)

        def on_grid(arrays, kind):
            """Stack `arrays`, which has one array per point. The result has one axis per level of `vmap` in `names`
            that maps arguments of this `kind`, an index into `LEVELS[level]`."""
            grid = np.stack(arrays).reshape(*sizes_of(names), *arrays[0].shape)
            return grid[tuple(slice(None) if name in names and LEVELS[name][kind] else 0 for name in LEVELS)]

        values, cotangents, _ = (
            list(zip(*arrays, strict=True)) for arrays in zip(*map(self.in_dtypes, points), strict=True)
        )
        values = [on_grid(arrays, 1 if i == 0 else 2) for i, arrays in enumerate(values)]
        found = _flat(jax.jit(run, **self._quickly)(values, [on_grid(arrays, 3) for arrays in cotangents]))
        found = [np.asarray(a).reshape(len(points), *a.shape[len(mapped) :]) for a in found]
        return [[a[k] for a in found] for k in range(len(points))]

    def of_integers(self, transform: Callable = lambda program: program) -> Callable:
        """Return a compiled function of `(values, cotangents, integers)`, which returns results and gradients.

        `integers` replaces the arguments that are not floating. `transform` changes the function of `(values,
        cotangents)` before it is compiled.
        """

        def run(values, cotangents, integers):
            function = self._of(self.arguments.with_integers(integers))
            return _flat(transform(value_and_gradients(function))(values, cotangents))

        return jax.jit(run, **self._quickly)


def _flat(results):
    values, gradients = results
    return [*values, *gradients]
