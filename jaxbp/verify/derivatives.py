import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Function = Callable[..., list[Array]]
Arrays = Sequence[np.ndarray]
MOST_QUICKLY_COMPILED = 2**12


def quickly_compiled(arrays: Sequence[Any]) -> dict[str, Any]:
    """Return options of `jit` that save more time than they cost if a program runs a few times on small arrays.

    They change only LLVM's optimizations, on a CPU.
    """
    if jax.default_backend() != "cpu" or sum(a.size for a in arrays) > MOST_QUICKLY_COMPILED:
        return {}
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return {"compiler_options": options}


def value_and_gradients(function: Function, primal: bool = False) -> Callable:
    """Return a function that computes results and gradients. With `primal`, `function` computes the results without
    differentiation."""

    def run(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        gradients = vjp([jnp.asarray(c, a.dtype) for c, a in zip(cotangents, y, strict=True)])
        return function(*values) if primal else y, gradients

    return run


def along(function: Callable, direction: Arrays, reverse: bool) -> Callable:
    """Return the derivative of `function(values)` along a direction of `values`, in forward mode unless `reverse`."""
    if not reverse:
        return lambda values: jax.jvp(lambda *values: function(values), tuple(values), tuple(direction))[1]
    return jax.grad(lambda values: sum(jnp.vdot(d, g) for d, g in zip(direction, function(values), strict=True)))


def derivative(function: Function, order: int, reverse: bool = False) -> Callable:
    """Return a function of `(values, cotangents, directions)` that computes a derivative of `Σ c (y + y²/2)`.

    Here y are the results of `function` at `values`, and c are the `cotangents`. The gradient with respect to `values`
    is differentiated along the first `order - 1` of `directions`, in forward mode unless `reverse`. The square makes
    `dy = c (1 + y)` depend on y, so that the backward is also differentiated with respect to dy.
    """

    def gradient(values, cotangents):
        y, vjp = jax.vjp(function, *values)
        return vjp([jnp.asarray(c, a.dtype) * (1 + a) for c, a in zip(cotangents, y, strict=True)])

    def run(values, cotangents, directions):
        function = lambda values: gradient(values, cotangents)  # noqa: E731
        for direction in directions[: order - 1]:
            function = along(function, tuple(direction), reverse)
        return function(tuple(values))

    return run


class Derivatives:
    """The results, gradients, and higher derivatives of a function, as compiled programs.

    `modes` lists the modes to try, in order, to differentiate gradients: forward (False) or reverse (True). `transform`
    changes each function before `jit`. `primal` is as in `value_and_gradients`. `of_higher` has options of `jit` for
    orders above 1.
    """

    def __init__(
        self,
        function: Function,
        modes: Sequence[bool] = (False, True),
        transform: Callable[[Callable], Callable] = lambda program: program,
        primal: bool = False,
        of_higher: Mapping[str, Any] = {},
        **options: Any,
    ):
        self._function, self._modes, self._transform = function, modes, transform
        self.value_and_gradients = jax.jit(transform(value_and_gradients(function, primal)), **options)
        self._higher, self._options = {}, {**options, **of_higher}

    def __call__(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """Return the results y (order 0), the gradients of `Σ c y` for cotangents c (order 1), or the result of
        `with_square` (higher orders, which alone use `directions`)."""
        if order < 2:
            return self.value_and_gradients(values, cotangents)[order]
        return self.with_square(order, values, cotangents, directions)

    def with_square(self, order: int, values: Arrays, cotangents: Arrays, directions: Sequence[Arrays]) -> Any:
        """Return `derivative(function, order)(values, cotangents, directions)`, in the first mode that JAX supports."""
        if order == 1:
            y, _ = self.value_and_gradients(values, cotangents)
            cotangents = [np.asarray(c) * (1 + np.asarray(a)) for c, a in zip(cotangents, y, strict=True)]
            return self.value_and_gradients(values, cotangents)[1]
        if order in self._higher:
            return self._higher[order](values, cotangents, directions)

        def run(reverse):
            program = jax.jit(self._transform(derivative(self._function, order, reverse)), **self._options)
            found, self._higher[order] = program(values, cotangents, directions), program
            return found

        return in_a_mode(run, self._modes)

    def plain(self, order: int, square: bool = False) -> Callable:
        """Return the function that `jit` compiles for this order.

        Up to order 1, it is `value_and_gradients`. With `square`, or above order 1, it computes `with_square`. Above
        order 1, call `with_square` first, to select the mode.
        """
        if order > 1:
            return self._higher[order].__wrapped__
        return self._transform(derivative(self._function, 1)) if square else self.value_and_gradients.__wrapped__


def in_a_mode(run: Callable[[Any], Any], modes: Sequence[Any]) -> Any:
    """Return `run(mode)` for the first of `modes` of differentiation that JAX supports."""
    *others, last = modes
    for mode in others:
        try:
            return run(mode)
        except TypeError as error:
            if "forward-mode" not in str(error) and "forward mode" not in str(error):
                raise
    return run(last)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]), np.errstate(all="ignore"):
        yield


def in_float64(run: Callable, *arguments: Any) -> Any:
    """Return the results of `run(*arguments)` in 64-bit mode on the CPU, as NumPy arrays."""
    with float64():
        return in_numpy(run(*arguments))


def scale_of(a: np.ndarray) -> float:
    return float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) or 1.0


def evenly(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spread indices below `count`."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def is_symmetric(a: np.ndarray) -> bool:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or not a.size or not np.ptp(a):
        return False
    return np.allclose(a, np.swapaxes(a, -1, -2), rtol=0, atol=1e-5 * scale_of(a))


def flat(arrays: Arrays) -> np.ndarray:
    return np.concatenate([np.ravel(a) for a in arrays])


def in_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
