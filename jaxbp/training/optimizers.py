"""An Optax optimizer that updates many parameters in one launch (docs/api.md)."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jaxtyping import Bool, PyTree

from jaxbp.common.checks import Number
from jaxbp.pairing import DefaultImplementation, Implementation, Op, differentiable
from jaxbp.pairing.mesh import mesh_of
from jaxbp.training.precision import where_finite
from pallas_kernels.core.launch import CHANGES_IN_PLACE, on_gpu
from pallas_kernels.pointwise.updates import updates

if TYPE_CHECKING:
    import optax


_NAME = "fused_adamw"
_MOMENTS = ("mu", "nu")
"""Fields of Optax's Adam state with one array per parameter."""
_MAX_ELEMENTS = 2**19
"""Maximum average elements per array. The kernel was faster than XLA with 128,000, but not with 1,024,000:
docs/lab/2026-11-23-lenet.md."""


class FusedOptimizer(NamedTuple):
    """An Optax transformation with an `apply`.

    Attributes:
      init, update: as in Optax.
      apply: `apply(grads, state, params, finite=None) -> (params, state)` runs `update` and `optax.apply_updates`. If
        the flag `finite` is given and false, nothing changes.
    """

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[PyTree, Any]]
    apply: Callable[..., tuple[PyTree, Any]]


def apply(
    optimizer: "FusedOptimizer | optax.GradientTransformation",
    grads: PyTree,
    state: Any,
    params: PyTree,
    finite: Bool[Array, ""] | None = None,
) -> tuple[PyTree, Any]:
    """Return `(params, state)` after one step of the optimizer. If `finite` is false, return both unchanged."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.apply(grads, state, params, finite)
    import optax

    changes, new_state = optimizer.update(grads, state, params)
    new = optax.apply_updates(params, changes), new_state
    return new if finite is None else where_finite(finite, new, (params, state))


def fused_adamw(
    learning_rate: "optax.ScalarOrSchedule",
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    weight_decay: Number = 1e-4,
    mask: PyTree[bool] | Callable[[PyTree], PyTree[bool]] | None = None,
    clip: Number | None = None,
    implementation: Implementation = None,
) -> FusedOptimizer:
    """`optax.adamw`, after an optional `optax.clip`, with an `apply` that updates up to 64 arrays per launch::

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g²
        p = p - rate * (m / (1 - b1ᵗ) / (sqrt(v / (1 - b2ᵗ)) + eps) + weight_decay * p)

    p are the parameters, g their gradients, clipped to ±clip, m and v the moments, rate the learning rate, and t the
    number of the step, counted from 1. With `weight_decay=0` and no mask, this is `optax.adam`, with Adam's state.

    Each number may be an array of shape (), as `optax.inject_hyperparams` passes it. For a mask,
    `optax.inject_hyperparams` needs `static_args="mask"`. `optax.inject_hyperparams` returns a transformation without
    `apply`, so Optax computes its updates.

    Args:
      mask: as in `optax.adamw`. With a mask, parameters with and without weight decay need separate launches.
      implementation: "pallas" is the kernel, "xla" and "autodiff" are Optax, and None is the kernel where it is faster,
        else Optax. The kernel supports float32, bfloat16, and float16, and computes in float32. Before JAX 0.11.0, None
        is Optax.

    Raises:
      TypeError, ValueError: an argument is invalid, or `apply` gets trees that do not match.
      NotImplementedError: with implementation "pallas", `apply` gets other dtypes, gradients with which Optax would
        change the dtype of the state, or arrays on a mesh of several devices.

    Sources: D. P. Kingma and J. Ba, "Adam: a method for stochastic optimization", ICLR 2015; I. Loshchilov and F.
    Hutter, "Decoupled weight decay regularization", ICLR 2019.
    """
    _require("learning_rate", learning_rate, lambda _: True, "a number or a schedule")
    _require("b1", b1, lambda b: 0 <= b < 1, "a number from 0 to below 1")
    _require("b2", b2, lambda b: 0 <= b < 1, "a number from 0 to below 1")
    _require("eps", eps, lambda e: e >= 0, "a number of at least 0")
    _require("weight_decay", weight_decay, lambda w: w >= 0, "a number of at least 0")
    _require("clip", clip, lambda c: c > 0, "a number above 0, or None")
    values = dict(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, clip=clip)
    # Arrays may be traced, so the compiled function takes them.
    arrays = {name: jnp.asarray(value) for name, value in values.items() if isinstance(value, Array | np.ndarray)}
    adamw = _AdamW({name: value for name, value in values.items() if name not in arrays}, mask)
    chain, plain = adamw.chain(arrays), adamw.plain
    run = Op(
        _NAME,
        {"pallas": differentiable(_alone(adamw.kernel, plain), plain), "xla": plain, "autodiff": plain},
        unsupported=adamw.unsupported,
        default=_default,
        jit=True,
    )

    def fused_apply(grads, state, params, finite=None):
        grads, state, params = jax.tree.map(jnp.asarray, (grads, state, params))
        _check_trees(chain, grads, state, params)
        return run(grads, state, params, finite, arrays, implementation=implementation)

    return FusedOptimizer(chain.init, chain.update, fused_apply)


@dataclasses.dataclass(frozen=True, eq=False)
class _AdamW:
    numbers: Mapping[str, Any]
    mask: Any

    def chain(self, arrays: Mapping[str, Array]) -> "optax.GradientTransformation":
        import optax

        value = {**self.numbers, **arrays}
        moments = [value[name] for name in ("learning_rate", "b1", "b2", "eps")]
        if self.mask is None and "weight_decay" in self.numbers and not value["weight_decay"]:
            adam = optax.adam(*moments)
        else:
            adam = optax.adamw(*moments, weight_decay=value["weight_decay"], mask=self.mask)
        return adam if value["clip"] is None else optax.chain(optax.clip(value["clip"]), adam)

    def plain(self, grads, state, params, finite, arrays):
        return apply(self.chain(arrays), grads, state, params, finite)

    def kernel(self, grads, state, params, finite, arrays):
        step = self.step(state, finite, arrays)
        scalars = jnp.stack([jnp.asarray(n, jnp.float32) for n in step.values()])
        new = [[None] * len(jax.tree.leaves(params)) for _ in ("params", *_MOMENTS)]
        for decays, places, lists in _lists(grads, state, params, self.decaying(params)):
            of_blocks = functools.partial(self.formula, tuple(step), decays)
            for results, blocks in zip(new, updates(of_blocks, scalars, *lists), strict=True):
                for i, result in zip(places, blocks, strict=True):
                    results[i] = result
        new_params, *new_moments = (jax.tree.unflatten(jax.tree.structure(params), results) for results in new)
        return new_params, _next_state(state, dict(zip(_MOMENTS, new_moments, strict=True)), finite)

    def decaying(self, params):
        if "weight_decay" in self.numbers and not self.numbers["weight_decay"]:
            return [False] * len(jax.tree.leaves(params))
        if self.mask is None:
            return [True] * len(jax.tree.leaves(params))
        mask = self.mask(params) if callable(self.mask) else self.mask
        return jax.tree.leaves(jax.tree.map(lambda m, tree: jax.tree.map(lambda _: bool(m), tree), mask, params))

    def step(self, state, finite, arrays):
        nodes, value = _nodes(state), {**self.numbers, **arrays}
        count = _following(nodes[0].count)
        step = {"first": 1 - value["b1"] ** count, "second": 1 - value["b2"] ** count, **arrays}
        if callable(value["learning_rate"]):
            step["learning_rate"] = value["learning_rate"](nodes[-1].count)
        return step if finite is None else step | {"finite": finite}

    def formula(self, names, decays, values, p, m, v, g):
        old, value = (p, m, v), {**self.numbers, **dict(zip(names, values, strict=True))}
        clip = value["clip"]
        g = g if clip is None else jnp.minimum(jnp.maximum(g, -clip), clip)
        m = (1 - value["b1"]) * g + value["b1"] * m
        v = (1 - value["b2"]) * (g * g) + value["b2"] * v
        v_hat = v / value["second"]
        # Older versions of Mosaic GPU have no square root, only its reciprocal.
        root = jnp.where((v_hat > 0) & (v_hat < jnp.inf), v_hat * lax.rsqrt(v_hat), v_hat)
        u = (m / value["first"]) / (root + value["eps"])
        u = u + value["weight_decay"] * p if decays else u
        new = p - value["learning_rate"] * u, m, v
        finite = value.get("finite")
        return new if finite is None else tuple(jnp.where(finite != 0, a, b) for a, b in zip(new, old, strict=True))

    def unsupported(self, grads, state, params, finite, arrays):
        if mesh_of((grads, state, params)) is not None:
            return "arrays on a mesh of several devices"
        reasons = (updates.unsupported(None, None, *lists) for *_, lists in _lists(grads, state, params))
        if reason := next(filter(None, reasons), None):
            return reason
        new = jax.eval_shape(self.plain, grads, state, params, finite, arrays)
        pairs = zip(jax.tree.leaves((params, state)), jax.tree.leaves(new), strict=True)
        changing = next(((a.dtype, b.dtype) for a, b in pairs if a.dtype != b.dtype), None)
        return changing and f"a state of {changing[0]} that becomes {changing[1]}, by gradients of another dtype"


def _default(grads, state, params, finite, arrays):
    groups = [lists for *_, lists in _lists(grads, state, params)]
    faster = bool(groups) and all(_kernel_is_faster(*lists) for lists in groups)
    return DefaultImplementation(gpu="pallas" if faster else "xla")


def _kernel_is_faster(changed, constant):
    launches = 2  # the first launch computes the scalars
    arrays, elements = sum(a.size > 0 for a in changed[0]), sum(a.size for a in changed[0])
    # Unless results are in place, XLA copies each array in a separate launch. For large arrays, XLA is faster, because
    # it can fuse the update with the gradient.
    pays = CHANGES_IN_PLACE and launches < arrays and elements <= arrays * _MAX_ELEMENTS
    return pays and updates.unsupported(None, None, changed, constant) is None


def _lists(grads, state, params, decaying=None):
    """For each group of parameters with equal dtypes and equal flags `decaying`, for weight decay, yield the flag, the
    parameters' indices, and the lists `([parameters, *moments], [gradients])`."""
    moments = (getattr(_nodes(state)[0], field) for field in _MOMENTS)
    lists = [jax.tree.leaves(tree) for tree in (params, *moments, grads)]
    decaying = decaying or [False] * len(lists[0])
    groups: dict[tuple, list[int]] = {}
    for i, arrays in enumerate(zip(*lists, strict=True)):
        groups.setdefault((decaying[i], *(a.dtype for a in arrays)), []).append(i)
    for (decays, *_), places in groups.items():
        *changed, gradients = ([arrays[i] for i in places] for arrays in lists)
        yield decays, places, (changed, [gradients])


def _alone(kernel: Callable, plain: Callable) -> Callable:
    """Return a function that calls `kernel` on a GPU, else `plain`. Under `vmap`, it always calls `plain`, because the
    arrays may not be aligned for a kernel."""
    call = custom_vmap(functools.partial(on_gpu, kernel, plain))

    @call.def_vmap
    def _(size, mapped, *arrays):
        results = jax.vmap(plain, jax.tree.map(lambda m: 0 if m else None, mapped), axis_size=size)(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _is_node(tree: Any) -> bool:
    return "count" in getattr(tree, "_fields", ())


def _nodes(state: Any) -> list[Any]:
    return list(filter(_is_node, jax.tree.leaves(state, is_leaf=_is_node)))


def _next_state(state: Any, moments: dict[str, PyTree], finite: Any) -> Any:
    def following(node):
        if not _is_node(node):
            return node
        count = _following(node.count)
        count = count if finite is None else jnp.where(finite, count, node.count)
        return node._replace(count=count, **{field: moments[field] for field in node._fields if field in moments})

    return jax.tree.map(following, state, is_leaf=_is_node)


def _following(count: Array) -> Array:
    import optax

    return optax.safe_increment(count)


def _check_trees(chain, grads, state, params):
    if jax.tree.structure(grads) != jax.tree.structure(params):
        structures = f"{jax.tree.structure(grads)} and {jax.tree.structure(params)}"
        raise ValueError(f"{_NAME}: grads and params have the structures {structures}; wants the same structure")
    for (path, g), p in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(params), strict=True):
        if g.shape != p.shape:
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"{_NAME}: grads{at} and params{at} have the shapes {g.shape} and {p.shape}; wants the same shape"
            )
    wanted = jax.eval_shape(chain.init, params)
    same = jax.tree.structure(state) == jax.tree.structure(wanted)
    if not same or [a.shape for a in jax.tree.leaves(state)] != [a.shape for a in jax.tree.leaves(wanted)]:
        raise ValueError(
            f"{_NAME}: state has the structure {jax.tree.structure(state)}; wants the structure and shapes of "
            "init(params)"
        )


def _require(name, value, is_valid, wanted):
    if (value is None and wanted.endswith("None")) or (callable(value) and wanted.endswith("schedule")):
        return
    if isinstance(value, Array | np.ndarray):
        if value.shape != ():
            raise ValueError(f"{_NAME}: {name} has shape {value.shape}; wants {wanted}")
        return  # known only when the step runs
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{_NAME}: {name} is {value!r}; wants {wanted}")
    if not is_valid(value):
        raise ValueError(f"{_NAME}: {name} is {value!r}; wants {wanted}")
