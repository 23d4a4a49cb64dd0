"""Ops on arrays that lie on a mesh of devices (docs/many_devices.md)."""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.core.arrays import on_no_mesh


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes along which devices divide a kernel's arguments.

    Attributes:
      of: maps the name of an argument of the kernel's formula to its batch axis, or to one axis per leaf of a pytree.
      multiple_of: must divide the number of examples per device.
      features: the devices divide nothing if the first argument in `of` has at most this number of axes.
      sums: whether results without such an axis are summed over the devices. Otherwise, all devices have the same.
      others: further axes, such as axes of heads, which other axes of the mesh may divide. Their sizes are multiples of
        the least size, for example if a group of heads shares a key.
    """

    of: Mapping[str, int | Sequence[int]]
    multiple_of: int = 1
    features: int = 0
    sums: bool = True
    others: Sequence["Axes"] = ()


BatchAxes = Axes | Callable[..., Axes]
"""Axes, or a function of the kernel's arrays that returns them."""


def batched(*names: str, features: int = 1) -> Axes:
    """Return `Axes` that name axis 0 of each of these arguments as its batch axis. If the first argument has at most
    `features` axes, the devices divide nothing."""
    return Axes(dict.fromkeys(names, 0), features=features)


def mesh_of(arrays: Any) -> jax.sharding.AbstractMesh | None:
    """Return the mesh on which the arrays lie, or None for one device and within `jax.shard_map`."""
    for a in jax.tree.leaves(arrays):
        mesh = jax.typeof(a).sharding.mesh
        if not mesh.empty and mesh.size > 1:
            return None if AxisType.Manual in mesh.axis_types else mesh
    return None


def on_explicit_axes(arrays: Any) -> bool:
    mesh = mesh_of(arrays)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def device_parts(size: Any, arrays: Any) -> int:
    """Return the number of equal parts in which to process an axis of this size. If the arrays' mesh divides the axis,
    each device has one or several whole parts. Without a mesh, the number is 1."""
    mesh = mesh_of(arrays)
    return 1 if mesh is None or is_symbolic_dim(size) else math.gcd(size, mesh.size)


def whole_along(a: jax.Array, axis: int) -> jax.Array:
    """Return `a`, gathered along this axis if the automatic axes of a mesh divide it."""
    mesh = mesh_of(a)
    if mesh is None or on_explicit_axes(a):
        return a
    spec = [None if i == axis else PartitionSpec.UNCONSTRAINED for i in range(a.ndim)]
    return lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(*spec)))


def sharding_of_rows(x: jax.Array, w: jax.Array) -> NamedSharding | None:
    """Return the sharding of `x @ w.T`, which JAX requires as `out_sharding` if an explicit axis of the mesh divides
    the features, else None."""
    of_x, of_w = (jax.typeof(a).sharding for a in (x, w))
    if not on_explicit_axes((x, w)) or None in (of_x.spec[1], of_w.spec[1]):
        return None
    return NamedSharding(of_x.mesh, PartitionSpec(of_x.spec[0], of_w.spec[0]))


def with_automatic_axes(function: Callable, autodiff: Callable, arrays: tuple) -> Any:
    """Return `function(*arrays)`, sharded as JAX shards `autodiff(*arrays)`, an equivalent function. Within `function`,
    XLA chooses the sharding, because a hand-written backward does not pass `out_sharding` to its products."""
    specs = jax.tree.map(
        lambda a: a.sharding.spec if a.sharding else PartitionSpec(), jax.eval_shape(autodiff, *arrays)
    )
    with jax.sharding.use_abstract_mesh(mesh_of(arrays)):
        return jax.sharding.auto_axes(function, out_sharding=specs)(*arrays)


def over_devices(kernel: Callable, formula: Callable, batch_axes: BatchAxes, arrays: tuple) -> Any:
    """Return `kernel(*arrays)`, which each device of a mesh computes for a part of the examples, or for all examples if
    they cannot be divided evenly. `formula`, the same function in jnp, gives the results' shapes."""
    axes = batch_axes(*arrays) if callable(batch_axes) else batch_axes
    arguments = inspect.signature(formula).bind(*arrays).arguments
    if unknown := axes.of.keys() - arguments.keys():
        raise ValueError(f"batch_axes: names {sorted(unknown)}; wants names among {list(arguments)}")
    if not axes.of or jnp.ndim(jax.tree.leaves(arguments[next(iter(axes.of))])[0]) <= axes.features:
        return kernel(*arrays)
    leaves, structure = jax.tree.flatten(arrays)
    flat = lambda f: lambda *leaves: jax.tree.leaves(f(*structure.unflatten(leaves)))  # noqa: E731
    sets = [axes, *axes.others]
    of_arguments = [_per_leaf(one.of, arguments) for one in sets]
    of_results = [_that_grow(flat(formula), leaves, of_leaves) for of_leaves in of_arguments]
    results = _partitioned(flat(kernel), sets, of_arguments, of_results)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(formula, *arrays)), results)


def _per_leaf(axes, arguments):
    """Return the axis of each leaf of the arguments, or None, given the axes by the names of the arguments."""

    def of_argument(name, argument):
        axis = axes.get(name)
        return axis if isinstance(axis, Sequence) else [axis] * len(jax.tree.leaves(argument))

    return list(itertools.chain(*(of_argument(*pair) for pair in arguments.items())))


def _that_grow(formula, leaves, axes):
    """For each result of `formula`, return the axis whose size changes with the size of the axes of `leaves`, or None.
    `axes` has one axis, or None, per array in `leaves`."""

    def shapes(times):
        grown = []
        for a, axis in zip(leaves, axes, strict=True):
            sizes = [size * times if i == axis else size for i, size in enumerate(a.shape)]
            grown.append(jax.ShapeDtypeStruct(sizes, a.dtype))
        return [a.shape for a in jax.eval_shape(formula, *grown)]

    pairs = zip(shapes(1), shapes(2), strict=True)
    return [next((i for i, (m, n) in enumerate(zip(a, b, strict=True)) if m != n), None) for a, b in pairs]


def _partitioned(kernel, sets, of_arguments, of_results):
    """Return a function that calls `kernel` on each device of a mesh. `of_arguments` and `of_results` have for each of
    `sets` the axis of each array, or None."""

    def partition(mesh, arguments, _):
        names = []
        for one, axes in zip(sets, of_arguments, strict=True):
            names.append(_mesh_axes(arguments, axes, one.multiple_of, {*itertools.chain(*names)}))

        def shardings(axes_of_sets):
            def sharding(*axes):
                spec = {axis: of_set for axis, of_set in zip(axes, names, strict=True) if axis is not None}
                return NamedSharding(mesh, PartitionSpec(*map(spec.get, range(max(spec, default=-1) + 1))))

            return [sharding(*axes) for axes in zip(*axes_of_sets, strict=True)]

        def on_own_examples(*leaves):
            results = []
            for a, *axes in zip(kernel(*leaves), *of_results, strict=True):
                of_sets = zip(axes, names, sets, strict=True)
                summed = (of_set for axis, of_set, one in of_sets if axis is None and one.sums)
                results.append(_sum(a, tuple(itertools.chain(*summed))))
            return results

        on_one_device = functools.partial(_on_one_device, on_own_examples)
        return mesh, on_one_device, shardings(of_results), tuple(shardings(of_arguments))

    # A partitioned function must not have constants. `jax.jit` hides them.
    call = custom_partitioning(lambda *leaves: jax.jit(kernel)(*leaves))
    call.def_partition(partition, sharding_rule=functools.partial(_rule, of_arguments, of_results))
    # JAX has no `vmap` of partitioned functions.
    mapped = custom_vmap(call)

    @mapped.def_vmap
    def _(size, mapped, *leaves):
        return jax.vmap(kernel, [0 if m else None for m in mapped])(*leaves), [True] * len(of_results[0])

    return mapped


def _on_one_device(function: Callable, *arrays: Any) -> list:
    """Call `function`, which computes one device's part. Trace and lower it without the mesh that `jax.set_mesh` may
    set."""
    if jax.sharding.get_abstract_mesh().empty:
        return function(*arrays)
    with on_no_mesh():
        jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
    avals = dict(arguments=tuple(jaxpr.in_avals), results=tuple(jaxpr.out_avals))
    return _one_device_p.bind(*arrays, function=jaxpr_as_fun(jaxpr), **avals)


_one_device_p = Primitive("one_device")
_one_device_p.multiple_results = True


@_one_device_p.def_abstract_eval
def _(*arrays, results, **_):
    return list(results)


def _lower_for_one_device(context, *arrays, function, arguments, results):
    context = context.replace(avals_in=arguments, avals_out=results)
    with on_no_mesh():
        return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


mlir.register_lowering(_one_device_p, _lower_for_one_device)


def _sum(a, names):
    wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    return lax.psum(wide, names).astype(a.dtype) if names else a


def _mesh_axes(arguments, axes, multiple_of, used):
    """Return the names of the mesh's axes that divide these axes of the arguments. `used` has the names of those that
    divide others."""
    divided = [(a, axis) for a, axis in zip(arguments, axes, strict=True) if axis is not None]
    if not divided:
        return ()
    a, axis = divided[0]
    spec = (*a.sharding.spec, *[None] * a.ndim)[axis] or ()
    names = spec if isinstance(spec, tuple) else (spec,)
    parts = math.prod(a.sharding.mesh.shape[name] for name in names) * multiple_of
    return () if used & {*names} or any(a.shape[axis] % parts for a, axis in divided) else names


def _rule(of_arguments, of_results, mesh, arguments, results):
    """Return the rule for XLA's partitioner Shardy, and its options. The axes of a set are sharded alike, and no other
    axis is sharded. The arguments are as in `_partitioned`."""
    least = []
    for of_set in of_arguments:
        found = (a.shape[axis] for a, axis in zip(arguments, of_set, strict=True) if axis is not None)
        least.append(max(min(found, default=1), 1))
    numbers, whole, sizes = itertools.count(), [], {}

    def replicated():
        whole.append(f"whole_{next(numbers)}")
        return whole[-1]

    def names(array, axes):
        for i, size in enumerate(array.shape):
            of_set = axes.index(i) if i in axes else None
            if of_set is None:
                yield replicated()
            elif size <= least[of_set]:
                yield f"set_{of_set}"
            else:
                yield f"(set_{of_set} {(name := replicated())})"
                sizes[name] = size // least[of_set]

    def side(arrays, of_sets):
        return ", ".join(" ".join(names(*pair)) for pair in zip(arrays, zip(*of_sets, strict=True), strict=True))

    rule = f"{side(arguments, of_arguments)} -> {side(results, of_results)}"
    return rule, {"need_replication_factors": tuple(whole), **sizes}
