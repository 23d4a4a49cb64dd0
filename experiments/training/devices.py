"""The devices of a run: each holds the parameters and the data, and computes its share of every batch.

They form a mesh with one axis, over which the examples of a batch are divided. A run on one device is one on a mesh of
one.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from experiments.configs import TrainingConfig
from experiments.output.errors import UserError

EXAMPLES = "examples"


def number_of(config: TrainingConfig) -> int:
    """How many devices a run takes: as many of each process as of every other.

    Left open, the largest number that divides the batch.

    Raises:
      UserError: (a ValueError) for more devices than there are, or a batch that they cannot divide evenly.
    """
    processes, batch, devices = jax.process_count(), config.batch_size, config.devices
    there_are = processes * min(map(len, _of_each_process()))
    if batch % processes:
        raise UserError(f"batch_size = {batch}: wanted a multiple of processes = {processes}")
    if devices is None:
        return next(n for n in range(there_are, 0, -processes) if batch % n == 0)
    if devices > there_are:
        raise UserError(f"devices = {devices}: wanted at most {there_are}, as many as there are")
    if devices % processes:
        raise UserError(f"devices = {devices}: wanted a multiple of processes = {processes}")
    if batch % devices:
        raise UserError(f"batch_size = {batch}: wanted a multiple of devices = {devices}")
    return devices


def mesh_of(config: TrainingConfig) -> Mesh:
    """The mesh that a run lies on. Raises as `number_of` does."""
    devices = number_of(config)
    first = [device for each in _of_each_process() for device in each[: devices // jax.process_count()]]
    return jax.make_mesh((devices,), (EXAMPLES,), axis_types=(AxisType.Auto,), devices=first)


def _of_each_process() -> list[list[jax.Device]]:
    return [jax.local_devices(process_index=process) for process in range(jax.process_count())]


def whole(mesh: Mesh) -> NamedSharding:
    """All of an array on each device."""
    return NamedSharding(mesh, PartitionSpec())


def shares(mesh: Mesh) -> NamedSharding:
    """Each device's share of the examples."""
    return NamedSharding(mesh, PartitionSpec(EXAMPLES))


def shared(loss: Callable, mesh: Mesh) -> Callable:
    """`loss(params, inputs, targets)` of a batch that is divided: each device computes those of its own examples.

    Its gradient in the parameters is the sum of the devices', each of the parameters' own dtype. Left to the compiler,
    the sum would be one of what the model computes in.
    """
    batch = PartitionSpec(EXAMPLES)
    # Kernels do not say over which axes their results vary, which `check_vma` asks for.
    return jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), batch, batch), out_specs=batch, check_vma=False)


def on_each(mesh: Mesh, tree: PyTree) -> PyTree:
    """The arrays, which every process has, on each device. One that lies there stays where it is."""
    sharding = whole(mesh)

    def placed(array):
        if isinstance(array, jax.Array) and array.sharding == sharding:
            return array
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))

    return jax.tree.map(placed, tree)
