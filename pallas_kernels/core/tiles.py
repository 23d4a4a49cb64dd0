"""A kernel and its two questions: what it supports, and which tiles suit its arguments.

    @dataclasses.dataclass(frozen=True)
    class Config:
        rows: int

    def _supports(x, *, window): return "windows that overlap" if ... else None
    def _heuristic(x, *, window): return Config(rows=...)

    @kernel(supports=_supports, heuristic=_heuristic, sweep={"rows": (1, 2, 4)})
    def pool(x, *, window, config): ...

    pool.supports(x, window=2)      # None, or what of these arguments it does not take
    pool.heuristic(x, window=2)     # Config(rows=2), or None where another kernel or the library is faster
    pool(x, window=2)               # runs with the tiles recorded for this device and shapes, else the heuristic's
    pool(x, window=2, config=Config(rows=4))

Arguments may be arrays or anything with their shape and dtype. Recorded tiles are the data in `tiles.json`, which
`python -m experiments.tune` writes from a sweep on a GPU.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.core import device

FILE = Path(__file__).with_name("tiles.json")
"""Device kind -> kernel -> shapes -> tile."""

KERNELS: dict[str, "Kernel"] = {}
"""Every kernel, by its name."""


class Kernel:
    """A function of arrays and static options that launches a kernel, and what it says of its arguments.

    Attributes:
      name: file and function, `conv2d.correlate`.
      capability: the compute capability that it is written for, or None for all from 9.0 on.
      function: the function as it was written.
      sweep: field of its config -> values that a sweep tries.
    """

    def __init__(
        self,
        function: Callable,
        supports: Callable[..., str | None] | None,
        heuristic: Callable[..., Any | None],
        capability: tuple[int, int] | None,
        sweep: Mapping[str, Sequence[int]],
    ):
        functools.update_wrapper(self, function)
        del self.__wrapped__  # its signature asks for a config, which a call may leave open
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.capability, self.sweep = capability, dict(sweep)
        self.function, self._supports, self._heuristic = function, supports, heuristic

    def supports(self, *arrays: Any, **options: Any) -> str | None:
        """What of the device or the arguments the kernel does not take, or None."""
        capability = device.target().capability
        if capability < (9, 0) or (self.capability is not None and capability != self.capability):
            requirement = "at least 9.0" if self.capability is None else f"only {_version(self.capability)}"
            return f"compute capability {_version(capability)}, {requirement}"
        return self._supports(*arrays, **options) if self._supports else None

    def heuristic(self, *arrays: Any, **options: Any) -> Any | None:
        """The config for arguments that it supports; None where the kernel does not pay."""
        return self._heuristic(*arrays, **options)

    def pays(self, *arrays: Any, **options: Any) -> bool:
        """Whether the kernel takes these arguments and its heuristic has a config for them."""
        return self.supports(*arrays, **options) is None and self.heuristic(*arrays, **options) is not None

    def config(self, *arrays: Any, **options: Any) -> Any | None:
        """The heuristic's config, with the fields that are recorded for this device and these shapes."""
        config = self.heuristic(*arrays, **options)
        return config and dataclasses.replace(
            config, **recorded_tile(self.name, key(*arrays, **options), tuple(self.sweep))
        )

    def __call__(self, *arrays: Any, config: Any | None = None, **options: Any) -> Any:
        if reason := self.supports(*arrays, **options):
            raise NotImplementedError(f"{self.name}: does not take {reason}")
        config = config or self.config(*arrays, **options)
        if config is None:
            raise NotImplementedError(f"{self.name}: has no config for {key(*arrays, **options)}; wants one as config=")
        return self.function(*arrays, config=config, **options)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


def kernel(
    *,
    heuristic: Callable[..., Any | None],
    supports: Callable[..., str | None] | None = None,
    capability: tuple[int, int] | None = None,
    sweep: Mapping[str, Sequence[int]] = {},
) -> Callable[[Callable], Kernel]:
    """Makes a `Kernel` of `function(*arrays, config, **options)`, and lists it in `KERNELS`.

    Args:
      heuristic: `(*arrays, **options)` -> a frozen dataclass, its tiles, or None where it does not pay.
      supports: `(*arrays, **options)` -> what of these it does not take, or None; by default it takes all.
      capability, sweep: as `Kernel` has them.
    """

    def decorate(function: Callable) -> Kernel:
        result = Kernel(function, supports, heuristic, capability, sweep)
        KERNELS[result.name] = result
        return result

    return decorate


def key(*arrays: Any, **options: Any) -> str:
    """The arguments' shapes, dtypes and options, for people to read: `float32 1x28x28x128 6x1x5x5, window=2x2`."""
    words, dtype = [], None
    for array in arrays:
        if not hasattr(array, "shape"):
            continue
        words += [f"{array.dtype}"] * (array.dtype != dtype) + ["x".join(map(str, array.shape))]
        dtype = array.dtype
    sizes = {name: "x".join(map(str, v)) if isinstance(v, tuple) else v for name, v in sorted(options.items())}
    return ", ".join([" ".join(words), *(f"{name}={size}" for name, size in sizes.items())])


def recorded_tile(kernel: str, shapes: str, names: Sequence[str]) -> dict[str, int]:
    """The tile of a kernel at these shapes on the default device; empty where none is recorded.

    Raises:
      ValueError: the file is no JSON, or the tile is not a positive int for each of `names`.
    """
    tile = tiles(FILE).get(device.kind(), {}).get(kernel, {}).get(shapes, {}) if names else {}
    if tile and (tile.keys() != set(names) or any(type(size) is not int or size < 1 for size in tile.values())):
        raise ValueError(f"{FILE}: {kernel} has the tile {tile} at {shapes}; wants a positive int for each of {names}")
    return dict(tile)


@functools.cache
def tiles(file: Path) -> Mapping[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not the JSON that experiments.tune writes: {error}") from error


def check_divides(kernel: str, size_name: str, size: int, length: int) -> None:
    """Requires a tile's size to divide what it cuts up."""
    if length % size:
        raise ValueError(f"{kernel}: {size_name} is {size}; wants a divisor of {length}")


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
