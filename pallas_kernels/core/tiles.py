"""Tile sizes that a sweep on a GPU found, kept as data in `tiles.json`.

    @tunable(ks=(1, 2, 4), parts=(256, 512))
    def kernel(x, w, *, window, ks=None, parts=None): ...

A call that leaves these open gets what is recorded for the default device's kind and the arguments' shapes; where
nothing is, the kernel's own rule decides, which is right on any device. `python -m experiments.tune` writes the file.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

FILE = Path(__file__).with_name("tiles.json")
"""Device kind -> kernel -> shapes -> tile."""

KERNELS: dict[str, Callable] = {}
"""Every tunable kernel, by its name. Its `sizes` are what a sweep tries."""


def tunable(**sizes: Sequence[int]) -> Callable[[Callable], Callable]:
    """Makes a kernel, a function of arrays and static options, look up those of its options that `sizes` names."""

    def decorate(kernel: Callable) -> Callable:
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"

        @functools.wraps(kernel)
        def tuned(*arrays, **options):
            if not sizes.keys() & options.keys():
                options |= recorded(name, key(*arrays, **options), tuple(sizes))
            return kernel(*arrays, **options)

        tuned.sizes = sizes
        KERNELS[name] = tuned
        return tuned

    return decorate


def key(*arrays: Any, **options: Any) -> str:
    """The arguments' shapes, dtypes and options, for people to read: `float32 1x28x28x128 6x1x5x5, window=2x2`."""
    words, dtype = [], None
    for array in arrays:
        words += [f"{array.dtype}"] * (array.dtype != dtype) + ["x".join(map(str, array.shape))]
        dtype = array.dtype
    sizes = {name: "x".join(map(str, v)) if isinstance(v, tuple) else v for name, v in sorted(options.items())}
    return ", ".join([" ".join(words), *(f"{name}={size}" for name, size in sizes.items())])


def recorded(kernel: str, shapes: str, names: Sequence[str]) -> dict[str, int]:
    """The tile of a kernel at these shapes on the default device; empty where none is recorded.

    Raises:
      ValueError: the file is no JSON, or the tile is not a positive int for each of `names`.
    """
    tile = tiles(FILE).get(device_kind(), {}).get(kernel, {}).get(shapes, {})
    if tile and (tile.keys() != set(names) or any(type(size) is not int or size < 1 for size in tile.values())):
        raise ValueError(f"{FILE}: {kernel} has the tile {tile} at {shapes}; wants a positive int for each of {names}")
    return dict(tile)


@functools.cache
def tiles(file: Path) -> Mapping[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not the JSON that experiments.tune writes: {error}") from error


def device_kind() -> str:
    """Of the device that a function is traced for: "NVIDIA H200", say, or "cpu"."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    return getattr(device, "device_kind", str(device))


def check_divides(kernel: str, size_name: str, size: int, length: int) -> None:
    """Requires a tile's size to divide what it cuts up."""
    if length % size:
        raise ValueError(f"{kernel}: {size_name} is {size}; wants a divisor of {length}")
