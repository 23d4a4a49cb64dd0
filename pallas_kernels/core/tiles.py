"""A kernel with a plan: a function that returns the config for given arguments, or why they are unsupported.

    def _plan(x, *, window): ...                      # returns Config(rows=2), or "a window of 100"

    @kernel(plan=_plan)
    def pool(x, *, window, config): ...

    pool.plan(x, window=2)                            # Config(rows=2)
    pool.unsupported(x, window=100)                   # "a window of 100", or None for supported arguments
    pool(x, window=2)                                 # runs with the planned config
    pool(x, window=2, config=Config(rows=4))

Arguments may be arrays, or any objects with a shape and a dtype. A config is a named tuple.
"""

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.core import device


class Kernel:
    """A function that launches a kernel. It requires compute capability `capability`, or if None, at least 9.0."""

    def __init__(self, function: Callable, plan: Callable[..., Any | str], capability: tuple[int, int] | None):
        functools.update_wrapper(self, function)
        del self.__wrapped__  # its signature requires `config`, which callers may omit
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self.capability = capability
        self._function, self._plan = function, plan

    def plan(self, *arrays: Any, **options: Any) -> Any | str:
        capability = device.target().capability
        if capability < (9, 0) or (self.capability is not None and capability != self.capability):
            requirement = "at least 9.0" if self.capability is None else f"only {_version(self.capability)}"
            return f"compute capability {_version(capability)}, {requirement}"
        return self._plan(*arrays, **options)

    def unsupported(self, *arrays: Any, **options: Any) -> str | None:
        plan = self.plan(*arrays, **options)
        return plan if isinstance(plan, str) else None

    def __call__(self, *arrays: Any, config: Any | None = None, **options: Any) -> Any:
        plan = self.plan(*arrays, **options)
        if isinstance(plan, str):
            raise NotImplementedError(f"{self.name}: does not take {plan}")
        return self._function(*arrays, config=config or plan, **options)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


def kernel(*, plan: Callable[..., Any | str], capability: tuple[int, int] | None = None) -> Callable[..., Kernel]:
    return lambda function: Kernel(function, plan, capability)


def check_divides(kernel: str, size_name: str, size: int, length: int) -> None:
    if length % size:
        raise ValueError(f"{kernel}: {size_name} is {size}; wants a divisor of {length}, the size of its axis")


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
