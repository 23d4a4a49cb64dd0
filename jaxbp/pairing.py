"""Pairing a function with a hand-written backward.

A `Pair` is a forward, what it saves, and a backward in one or more implementations. Calling it with `implementation=`

    "autodiff"  runs the forward as it is, for JAX to differentiate,
    "xla"       joins the forward to the backward written as a formula in jnp, by `jax.custom_vjp`,
    "pallas"    joins it to the backward that is a kernel,
    None        takes the fastest of these that the platform supports.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxbp.implementations import Fastest, Op


def differentiable(kernel: Callable, formula: Callable) -> Callable:
    """`kernel` for values, `formula` for derivatives: kernels are opaque to JAX, the same function in jnp is not.

    Both take `(*arrays, **options)` and compute the same function. Every kernel call of the library is wrapped in
    this once, so gradients of gradients, Hessian-vector products and forward-over-reverse go through kernels.
    """

    @functools.cache
    def bind(options):
        formula_ = functools.partial(formula, **dict(options))
        # Without jit around it, JAX would trace and compile the kernel at every call.
        call = jax.custom_jvp(jax.jit(functools.partial(kernel, **dict(options)), inline=True))

        @call.defjvp
        def _(primals, tangents):
            return call(*primals), jax.jvp(formula_, primals, tangents)[1]

        return call

    @functools.wraps(kernel)
    def wrapped(*arrays, **options):
        return bind(tuple(sorted(options.items())))(*arrays)

    return wrapped


class Pair(Op):
    """A pure function and its hand-written backward.

    Args:
      forward: `forward(*arrays, **options) -> y`, in jnp. Options are static and hashable. An array may be None.
      backward: implementation -> `backward(dy, *saved, **options)`, which returns a gradient for each of the
        forward's arrays (a tuple, or the array itself if there is one; None for one without a gradient). "xla" is
        the formula in jnp; "pallas" a kernel of the same function. Or an `Op` that has these.
      save: `save(*arrays, **options) -> (y, saved)`, what the forward keeps for the backward, by implementation or
        one for all. By default it keeps its arguments. A kernel in it is to be `differentiable`.
      name, unsupported, fastest: as in `Op`.

    `pair.forward` is the forward, `pair.backward` an `Op` of `(dy, *saved)`.

    Example:
      >>> square = Pair(lambda x: x * x, {"xla": lambda dy, x: 2 * x * dy}, name="square")
      >>> jax.grad(square)(3.0)
      Array(6., dtype=float32, weak_type=True)
    """

    def __init__(
        self,
        forward: Callable,
        backward: Mapping[str, Callable] | Op,
        *,
        save: Callable | Mapping[str, Callable] | None = None,
        name: str | None = None,
        unsupported: Callable[..., str | None] | None = None,
        fastest: Fastest | Callable[..., Fastest] | None = None,
    ):
        name = name or forward.__name__
        if not isinstance(backward, Op):
            backward = Op(f"{name}_backward", _kernels_differentiable(backward))
        if save is None:
            save = lambda *arrays, **options: (forward(*arrays, **options), arrays)  # noqa: E731
        save = save if isinstance(save, Mapping) else {"pallas": save, "xla": save}

        self.forward = forward
        self.backward = backward
        with_backward = {
            implementation: functools.partial(_paired, forward, save[implementation], function)
            for implementation, function in backward.implementations.items()
            if implementation in save
        }
        super().__init__(
            name,
            with_backward | {"autodiff": forward},
            unsupported=unsupported or (lambda *arrays, **options: None),
            fastest=fastest or backward.fastest,
        )


def _kernels_differentiable(implementations: Mapping[str, Callable]) -> dict[str, Callable]:
    implementations = dict(implementations)
    if "pallas" in implementations and "xla" in implementations:
        implementations["pallas"] = differentiable(implementations["pallas"], implementations["xla"])
    return implementations


def _paired(forward: Callable, save: Callable, backward: Callable, *arrays: Any, **options: Any) -> Any:
    """`forward(*arrays)` with `backward` for its gradient."""
    return _custom_vjp(forward, save, backward, tuple(sorted(options.items())))(*arrays)


@functools.cache
def _custom_vjp(forward: Callable, save: Callable, backward: Callable, options: tuple) -> Callable:
    options = dict(options)
    call = jax.custom_vjp(functools.partial(forward, **options))

    def gradients(saved, dy):
        result = backward(dy, *saved, **options)
        return result if isinstance(result, tuple) else (result,)

    call.defvjp(functools.partial(save, **options), gradients)
    return call
