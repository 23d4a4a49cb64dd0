"""A kernel and its two questions: what it supports, and which tiles suit its arguments.

    @dataclasses.dataclass(frozen=True)
    class Config:
        rows: int

    def _supports(x, *, window): return "windows that overlap" if ... else None
    def _heuristic(x, *, window): return Config(rows=...)

    @kernel(supports=_supports, heuristic=_heuristic)
    def pool(x, *, window, config): ...

    pool.supports(x, window=2)      # None, or what of these arguments it does not take
    pool.heuristic(x, window=2)     # Config(rows=2), or None where another kernel or the library is faster
    pool(x, window=2)               # runs with the heuristic's tiles
    pool(x, window=2, config=Config(rows=4))

Arguments may be arrays or anything with their shape and dtype.
"""

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.core import device


class Kernel:
    """A function of arrays and static options that launches a kernel, and what it says of its arguments.

    Attributes:
      name: file and function, `conv2d.correlate`.
      capability: the compute capability that it is written for, or None for all from 9.0 on.
    """

    def __init__(
        self,
        function: Callable,
        supports: Callable[..., str | None] | None,
        heuristic: Callable[..., Any | None],
        capability: tuple[int, int] | None,
    ):
        functools.update_wrapper(self, function)
        del self.__wrapped__  # its signature asks for a config, which a call may leave open
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.capability = capability
        self._function, self._supports, self._heuristic = function, supports, heuristic

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

    def __call__(self, *arrays: Any, config: Any | None = None, **options: Any) -> Any:
        if reason := self.supports(*arrays, **options):
            raise NotImplementedError(f"{self.name}: does not take {reason}")
        config = config or self.heuristic(*arrays, **options)
        if config is None:
            raise NotImplementedError(f"{self.name}: does not pay for these arguments; wants a config=")
        return self._function(*arrays, config=config, **options)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


def kernel(
    *,
    heuristic: Callable[..., Any | None],
    supports: Callable[..., str | None] | None = None,
    capability: tuple[int, int] | None = None,
) -> Callable[[Callable], Kernel]:
    """Makes a `Kernel` of `function(*arrays, config, **options)`.

    Args:
      heuristic: `(*arrays, **options)` -> a frozen dataclass, its tiles, or None where it does not pay.
      supports: `(*arrays, **options)` -> what of these it does not take, or None; by default it takes all.
      capability: as `Kernel` has it.
    """
    return lambda function: Kernel(function, supports, heuristic, capability)


def check_divides(kernel: str, size_name: str, size: int, length: int) -> None:
    """Requires a tile's size to divide what it cuts up."""
    if length % size:
        raise ValueError(f"{kernel}: {size_name} is {size}; wants a divisor of {length}")


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
