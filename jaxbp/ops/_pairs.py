"""How an op that needs no kernel of its own is paired: from its forward and the formula of its gradient.

Half precisions are computed in float32. Every op has a public backward of the forward's own arguments, `dy` first.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxbp.implementations import Fastest, Implementation, Op
from jaxbp.ops import _checks
from jaxbp.pairing import Pair, differentiable
from pallas_kernels.pointwise.elementwise import elementwise
from pallas_kernels.pointwise.reductions import sum_over

FUSED = Fastest(gpu="xla")
"""XLA fuses these formulas into their neighbours, which a kernel keeps it from."""
KEPT = Fastest(gpu="xla", elsewhere="autodiff")
"""On a CPU it is faster to keep an exponential from the forward, as JAX does, than to compute it again."""
KEPT_ON_GPU = Fastest(gpu="autodiff", older_gpu="autodiff")
"""On a GPU too, where both are in one program: from what the forward keeps, XLA makes its result and the gradient."""
KEPT_EVERYWHERE = Fastest(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""Both."""


class Formula(Pair):
    """A pair of formulas, with a public backward.

    Args:
      forward: `forward(*arrays, **options) -> y`, in jnp.
      gradient: `gradient(dy, *saved, **options)`, a gradient for each of the arrays (None for one without), in jnp.
      kernel: the same function, through kernels; without one, "pallas" leaves it to XLA.
      save: `save(*arrays, **options) -> (y, saved)`; by default the arrays are saved.
      linear: the forward is linear in its one array, so that nothing is saved. Its shape is the option `shape`.
      fastest: what `None` stands for in the public backward.
      fastest_pair: in forward and backward together; by default the same.

    `public_backward` is an `Op` of `(dy, *arrays)`; of a linear forward, of `(dy,)`.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        gradient: Callable,
        kernel: Callable | None = None,
        *,
        save: Callable | None = None,
        linear: bool = False,
        fastest: Fastest = FUSED,
        fastest_pair: Fastest | None = None,
    ):
        if linear:
            save = lambda x, **options: (forward(x, **options), ())  # noqa: E731
        in_jnp = {"xla": gradient, "pallas": differentiable(kernel, gradient) if kernel else gradient}
        super().__init__(
            forward,
            Op(f"{name}_backward", in_jnp, fastest=fastest),
            save=save,
            name=name,
            unsupported=unsupported,
            fastest=fastest_pair,
        )
        public = in_jnp if save is None or linear else {k: _from_arrays(save, rule) for k, rule in in_jnp.items()}
        autodiff = functools.partial(_transposed if linear else _differentiated, forward)
        self.public_backward = Op(
            f"{name}_backward", public | {"autodiff": autodiff}, unsupported=unsupported, fastest=fastest
        )


class Elementwise(Formula):
    """A pair of element-wise formulas, with NumPy's broadcasting: gradients are summed over what was broadcast.

    Args:
      forward: `forward(*arrays, **options)`, in jnp.
      gradient: `gradient(dy, *arrays, **options)`, a gradient for each array.
      in_kernels: the same formula in what kernels can compute, if that is another.
      fastest: as in `Formula`, and fastest_pair.
    """

    def __init__(
        self,
        name: str,
        forward: Callable,
        gradient: Callable,
        *,
        in_kernels: Callable | None = None,
        **fastest: Fastest | None,
    ):
        def in_dtype(*arrays, **options):
            return forward(*map(_checks.widen, arrays), **options).astype(arrays[0].dtype)

        def formula(dy, *arrays, **options):
            gradients = gradient(*map(_checks.widen, (dy, *arrays)), **options)
            return _like(_summed(dy.shape, gradients, arrays), arrays)

        def kernel(dy, *arrays, **options):
            in_kernel = functools.partial(in_kernels or gradient, **options)
            return _like(_gradient_kernels(in_kernel, dy, arrays), arrays)

        super().__init__(name, in_dtype, formula, kernel, **fastest)

    def of(self, implementation: Implementation, arrays: dict[str, Any], **options: Any) -> Array:
        """The op of named arrays, checked."""
        values = _checks.floating(self.name, **arrays)
        _checks.broadcast(self.name, **dict(zip(arrays, values, strict=True)))
        return self(*values, implementation=implementation, **options)

    def backward_of(self, implementation: Implementation, dy: Any, arrays: dict[str, Any], **options: Any) -> Any:
        """The public backward of named arrays, checked."""
        op = self.public_backward.name
        dy, *values = _checks.floating(op, dy=dy, **arrays)
        _checks.shape(op, "dy", dy, *_checks.broadcast(op, **dict(zip(arrays, values, strict=True))))
        return self.public_backward(dy, *values, implementation=implementation, **options)


def unsupported(*arrays, **options):
    arrays = jax.tree.leaves(arrays)
    if any(a.size >= 2**31 for a in arrays):
        return "2^31 or more elements"
    return _checks.unsupported_dtype(*arrays)


def _from_arrays(save, rule):
    return lambda dy, *arrays, **options: rule(dy, *save(*arrays, **options)[1], **options)


def _differentiated(forward, dy, *arrays, **options):
    """JAX's own gradients in the floating arrays; None for the others."""
    at = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]

    def of_floats(*values):
        given = dict(zip(at, values, strict=True))
        return forward(*(given.get(i, a) for i, a in enumerate(arrays)), **options)

    _, vjp = jax.vjp(of_floats, *(arrays[i] for i in at))
    gradients = vjp(dy)
    return gradients if len(gradients) > 1 else gradients[0]


def _transposed(forward, dy, **options):
    return _checks.transpose(functools.partial(forward, **options), options["shape"], dy)


def _like(gradients, arrays):
    """Gradients in their arrays' shapes and dtypes: a tuple, or the array itself if there is one."""
    results = tuple(g.reshape(a.shape).astype(a.dtype) for g, a in zip(gradients, arrays, strict=True))
    return results if len(results) > 1 else results[0]


def _broadcast_axes(shape, a):
    """The axes of `shape` along which `a` is broadcast."""
    own = (1,) * (len(shape) - a.ndim) + a.shape
    return tuple(axis for axis, size in enumerate(shape) if own[axis] != size or axis < len(shape) - a.ndim)


def _summed(shape, gradients, arrays):
    gradients = gradients if isinstance(gradients, tuple) else (gradients,)
    return [
        jnp.sum(jnp.broadcast_to(g, shape), axis=_broadcast_axes(shape, a)) if a.shape != shape else g
        for g, a in zip(gradients, arrays, strict=True)
    ]


def _gradient_kernels(gradient, dy, arrays):
    """Gradients that are not summed by one kernel, and each that is by one that adds up while it computes."""

    def only(wanted):
        def formula(*values):
            gradients = gradient(*values)
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            return tuple(gradients[i] for i in wanted)

        return formula

    results = [None] * len(arrays)
    if whole := [i for i, a in enumerate(arrays) if a.shape == dy.shape]:
        for i, g in zip(whole, elementwise(only(whole), dy, *arrays), strict=True):
            results[i] = g
    for i, a in enumerate(arrays):
        if results[i] is None:
            (results[i],) = sum_over(only([i]), dy, *arrays, axes=_broadcast_axes(dy.shape, a))
    return results
