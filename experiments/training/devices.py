"""The devices of a run. Each holds the dataset and computes a part of every batch.

Each device holds all parameters, unless `tensor_parallel` devices divide them.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from experiments.configs import TrainingConfig
from experiments.output.errors import UserError

EXAMPLES, FEATURES = "examples", "features"


def available() -> int:
    """Return the largest number of devices that a run can use.

    A run uses the same number of devices in every process. The process with the fewest devices limits this number.
    """
    return jax.process_count() * min(map(len, _of_each_process()))


def number_of(config: TrainingConfig) -> int:
    processes, batch, devices, parallel = jax.process_count(), config.batch_size, config.devices, config.tensor_parallel
    if parallel > 1 and processes > 1:
        raise UserError(f"tensor_parallel is {parallel}; wants 1 in several processes")
    if parallel > available():
        raise UserError(f"tensor_parallel is {parallel}; wants at most {available()}, the number of available devices")
    if batch % processes:
        raise UserError(f"batch_size is {batch}; wants a multiple of {processes}, the number of processes")
    if devices is None:
        return default(config)[0]
    if devices > available():
        raise UserError(f"devices is {devices}; wants at most {available()}, the number of available devices")
    if devices % processes:
        raise UserError(f"devices is {devices}; wants a multiple of {processes}, the number of processes")
    if devices % parallel:
        raise UserError(f"devices is {devices}; wants a multiple of {parallel}, the tensor_parallel")
    if batch % (devices // parallel):
        parts = "the number of devices" if parallel == 1 else "devices / tensor_parallel"
        raise UserError(f"batch_size is {batch}; wants a multiple of {devices // parallel}, {parts}")
    return devices


def default(config: TrainingConfig) -> tuple[int, str]:
    """Return the number of devices of a run whose config leaves it open, and the reason."""
    fewest, batch, least = jax.process_count() * config.tensor_parallel, config.batch_size, config.examples_per_device
    if jax.default_backend() != "gpu" or least is None:
        return fewest, f"more devices were not measured for {config.name} on {jax.default_backend()}"
    numbers = range(available() // fewest * fewest, fewest, -fewest)
    number = next((n for n in numbers if batch % n == 0 and batch >= n * least), fewest)
    return number, f"several GPUs were faster from {least:,} examples per GPU on, and batch_size is {batch:,}"


def mesh_of(config: TrainingConfig) -> Mesh:
    devices = number_of(config)
    first = [device for each in _of_each_process() for device in each[: devices // jax.process_count()]]
    shape = devices // config.tensor_parallel, config.tensor_parallel
    return jax.make_mesh(shape, (EXAMPLES, FEATURES), axis_types=(AxisType.Auto,) * 2, devices=first)


def _of_each_process() -> list[list[jax.Device]]:
    return [jax.local_devices(process_index=process) for process in range(jax.process_count())]


def whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def shares(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(EXAMPLES))


def shared(loss: Callable, mesh: Mesh) -> Callable:
    """Return `loss(params, inputs, targets)`, with the examples of a batch divided among the devices.

    Gradients are summed over the devices in the parameters' dtype. XLA's partitioner would use the computation's dtype.
    """
    batch = PartitionSpec(EXAMPLES)
    # With `check_vma=True`, kernels must declare the mesh axes along which their results vary. jaxbp's do not.
    return jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), batch, batch), out_specs=batch, check_vma=False)


def on_each(mesh: Mesh, tree: PyTree) -> PyTree:
    """Copy arrays to each device. Every process must pass equal arrays."""
    return placed(tree, jax.tree.map(lambda _: whole(mesh), tree))


def placed(tree: PyTree, shardings: PyTree) -> PyTree:
    def place(array, sharding):
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        array = np.asarray(array)
        return jax.make_array_from_process_local_data(sharding, array, array.shape)

    return jax.tree.map(place, tree, shardings)
