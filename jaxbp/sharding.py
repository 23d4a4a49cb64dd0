"""Ops on arrays that lie on a mesh of devices.

XLA partitions formulas by itself, but a kernel is opaque to it and would run on every device with all examples. So a
kernel says along which axes its arrays have their examples. Each device then runs it on its own examples, and results
without such an axis, the gradients of parameters, are summed over the devices.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.core.launch import has_explicit_axes, on_no_mesh


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of examples in the arguments of a kernel.

    Attributes:
      of: the place of an argument -> the axis, or one for each of the argument's leaves. An argument that is not named
        is the same for all examples.
      multiple_of: what the number of examples of a device has to be a multiple of.
    """

    of: Mapping[int, int | Sequence[int]]
    multiple_of: int = 1


Examples = Callable[..., Axes]
"""Of a kernel's arrays."""


def leading(*places: int, features: int = 1) -> Examples:
    """The leading axis of the arguments at these places, if the first of them has axes beside its `features`."""
    return lambda *arrays: Axes(dict.fromkeys(places, 0) if arrays[places[0]].ndim > features else {})


def mesh_of(arrays: Any) -> jax.sharding.AbstractMesh | None:
    """The mesh of several devices that the arrays lie on, or None; None, too, within `jax.shard_map`."""
    for a in jax.tree.leaves(arrays):
        mesh = jax.typeof(a).sharding.mesh
        if not mesh.empty and mesh.size > 1:
            return None if AxisType.Manual in mesh.axis_types else mesh
    return None


# ----------------------------------------------------------------------------------------------- explicit mesh axes


def on_explicit_axes(arrays: Any) -> bool:
    """Whether the arrays lie on a mesh that has explicit axes."""
    mesh = mesh_of(arrays)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def with_automatic_axes(function: Callable, native: Callable, arrays: tuple) -> Any:
    """`function(*arrays)`, sharded by the compiler, its results as JAX would shard those of `native`.

    With explicit axes each product has to say how its result is sharded. JAX says so in the gradients that it derives,
    so that rules written by hand need not.
    """
    specs = jax.tree.map(lambda a: a.sharding.spec if a.sharding else PartitionSpec(), jax.eval_shape(native, *arrays))
    with jax.sharding.use_abstract_mesh(mesh_of(arrays)):
        return jax.sharding.auto_axes(function, out_sharding=specs)(*arrays)


# ----------------------------------------------------------------------------------------------- kernels over devices


def over_devices(kernel: Callable, formula: Callable, examples: Examples | None) -> Callable:
    """`kernel`, on a mesh each device's for its own examples.

    Args:
      kernel: each of its results has an axis of examples, or is a sum over them.
      formula: the same function in jnp, for the shapes of results.
      examples: where its arguments have their examples.

    Returns:
      A function of the same arrays: `kernel` itself where they lie on one device, or the number of examples cannot be
      divided evenly.
    """

    @functools.wraps(kernel)
    def call(*arrays):
        axes = examples(*arrays) if examples is not None and mesh_of(arrays) is not None else Axes({})
        if not axes.of:
            return kernel(*arrays)
        leaves, structure = jax.tree.flatten(arrays)
        flat = lambda f: lambda *leaves: jax.tree.leaves(f(*structure.unflatten(leaves)))  # noqa: E731
        of_arguments = list(itertools.chain(*(_of_leaves(axes.of.get(i), a) for i, a in enumerate(arrays))))
        of_results = _that_grow(flat(formula), leaves, of_arguments)
        results = _partitioned(flat(kernel), of_arguments, of_results, axes.multiple_of)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(formula, *arrays)), results)

    return call


def _of_leaves(axis, argument):
    """The axis of examples of each leaf of an argument, None where it has none."""
    leaves = jax.tree.leaves(argument)
    return axis if isinstance(axis, Sequence) else [axis] * len(leaves)


def _that_grow(formula, leaves, axes):
    """The axis of each result that grows with the number of examples, None where none does."""

    def shapes(times):
        grown = []
        for a, axis in zip(leaves, axes, strict=True):
            sizes = [size * times if i == axis else size for i, size in enumerate(a.shape)]
            grown.append(jax.ShapeDtypeStruct(sizes, a.dtype))
        return [a.shape for a in jax.eval_shape(formula, *grown)]

    pairs = zip(shapes(1), shapes(2), strict=True)
    return [next((i for i, (m, n) in enumerate(zip(a, b, strict=True)) if m != n), None) for a, b in pairs]


def _partitioned(kernel, of_arguments, of_results, multiple_of):
    def partition(mesh, arguments, _):
        names = _mesh_axes(arguments, of_arguments, multiple_of)

        def shardings(axes):
            specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, names) for axis in axes]
            return [NamedSharding(mesh, spec) for spec in specs]

        def on_own_examples(*leaves):
            results = kernel(*leaves)
            return [_sum(a, names) if axis is None else a for a, axis in zip(results, of_results, strict=True)]

        on_one_device = functools.partial(_on_one_device, on_own_examples)
        return mesh, on_one_device, shardings(of_results), tuple(shardings(of_arguments))

    # Under jit of its own a function may have constants, which a partitioned one must not.
    call = custom_partitioning(lambda *leaves: jax.jit(kernel)(*leaves))
    call.def_partition(partition, sharding_rule=functools.partial(_rule, of_arguments, of_results))
    # JAX has no batching of partitioned functions.
    batched = custom_vmap(call)

    @batched.def_vmap
    def _(size, mapped, *leaves):
        return jax.vmap(kernel, [0 if m else None for m in mapped])(*leaves), [True] * len(of_results)

    return batched


def _on_one_device(function: Callable, *arrays: Any) -> list:
    """Return `function(*arrays)`, traced and lowered as what one device computes.

    Where `jax.set_mesh` has set a mesh of explicit axes, JAX would type the device's own arrays as lying on it.
    """
    if not has_explicit_axes():
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
    """The sum over devices, of half precisions in float32."""
    wide = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    return lax.psum(wide, names).astype(a.dtype) if names else a


def _mesh_axes(arguments, axes, multiple_of):
    """The mesh's axes over which the first argument that has examples has them divided; () if they are not, or
    cannot be."""
    a, axis = next((a, axis) for a, axis in zip(arguments, axes, strict=True) if axis is not None)
    spec = (*a.sharding.spec, *[None] * a.ndim)[axis] or ()
    names = spec if isinstance(spec, tuple) else (spec,)
    devices = math.prod(a.sharding.mesh.shape[name] for name in names)
    return () if a.shape[axis] % (devices * multiple_of) else names


def _rule(of_arguments, of_results, mesh, arguments, results):
    """In Shardy's notation: the axis of examples is one, and every other axis is whole."""
    numbers, whole = itertools.count(), []

    def names(array, axis):
        for i in range(len(array.shape)):
            if i != axis:
                whole.append(f"whole_{next(numbers)}")
            yield "examples" if i == axis else whole[-1]

    def side(arrays, axes):
        return ", ".join(" ".join(names(*pair)) for pair in zip(arrays, axes, strict=True))

    rule = f"{side(arguments, of_arguments)} -> {side(results, of_results)}"
    return rule, {"need_replication_factors": tuple(whole)}
