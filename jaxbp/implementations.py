"""The names of the implementations, and how an op picks one of them."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax import lax

from pallas_kernels.core.launch import vary_alike

IMPLEMENTATIONS = ("pallas", "xla", "autodiff")
"""What `implementation=` takes, next to `None` for the fastest that the platform supports."""

Implementation = Literal["pallas", "xla", "autodiff"] | None


@dataclasses.dataclass(frozen=True)
class Fastest:
    """What `implementation=None` means, from measurement: on GPUs with kernels, on other GPUs, and elsewhere."""

    gpu: str = "pallas"
    older_gpu: str = "xla"
    elsewhere: str = "xla"


class Op:
    """A pure function in up to three implementations, chosen by one argument.

    Args:
      name: its public name, for error messages and for scopes in compiled programs.
      implementations: name -> `function(*arrays, **options)`. Options are static and hashable.
      unsupported: `(*arrays, **options) -> str | None`, what of these arguments the kernel does not take.
      fastest: what `None` stands for; or a function of the arguments, `(*arrays, **options) -> Fastest`, where that
        depends on them.
    """

    def __init__(
        self,
        name: str,
        implementations: Mapping[str, Callable],
        *,
        unsupported: Callable[..., str | None] = lambda *arrays, **options: None,
        fastest: Fastest | Callable[..., Fastest] = Fastest(),
    ):
        if unknown := set(implementations) - set(IMPLEMENTATIONS):
            raise ValueError(f"{name}: implementations has {sorted(unknown)}; wants names among {IMPLEMENTATIONS}")
        self.name = name
        self.implementations = {key: jax.named_scope(name)(value) for key, value in implementations.items()}
        self.unsupported = unsupported
        self.fastest = fastest
        # One function object for the same options: JAX finds its traces again, in eager mode too.
        self._bind = functools.cache(self._bind)

    def __call__(self, *arrays: Any, implementation: Implementation = None, **options: Any) -> Any:
        """The function of `arrays`, by the implementation asked for.

        Raises:
          ValueError: an unknown implementation.
          NotImplementedError: an implementation this op lacks, or arguments its kernel does not take.
        """
        key = tuple(sorted(options.items()))
        arrays = vary_alike(arrays)
        if implementation is None:
            fastest = self.fastest(*arrays, **options) if callable(self.fastest) else self.fastest
            elsewhere = self._available(fastest.elsewhere)
            older_gpu = self._available(fastest.older_gpu)
            gpu = self._available(fastest.gpu)
            if gpu == "pallas" and (not kernels_run_here() or self.unsupported(*arrays, **options)):
                gpu = older_gpu
            if gpu == elsewhere:
                return self._bind(gpu, key)(*arrays)
            # Resolved when lowered, not here: a function lowered for the CPU on a GPU machine is still right.
            return lax.platform_dependent(*arrays, cuda=self._bind(gpu, key), default=self._bind(elsewhere, key))
        if implementation not in IMPLEMENTATIONS:
            wanted = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{self.name}: implementation is {implementation!r}; wants {wanted} or None")
        if implementation not in self.implementations:
            has = ", ".join(map(repr, self.implementations))
            raise NotImplementedError(f"{self.name}: has no implementation {implementation!r}; it has {has}")
        if implementation == "pallas" and (reason := self.unsupported(*arrays, **options)):
            raise NotImplementedError(
                f"{self.name}: implementation='pallas' does not take {reason}; 'xla', 'autodiff' and None do"
            )
        return self._bind(implementation, key)(*arrays)

    def named(self, name: str) -> "Op":
        """The same op under another name, for error messages."""
        other = copy.copy(self)
        other.name = name
        return other

    def _bind(self, implementation: str, options: tuple) -> Callable:
        return functools.partial(self.implementations[implementation], **dict(options))

    def _available(self, implementation: str) -> str:
        """`implementation`, or the next best where this op has none of that name."""
        return next(name for name in (implementation, "xla", "autodiff", "pallas") if name in self.implementations)


def kernels_run_here() -> bool:
    """Whether the default device is a GPU that the kernels are built for: compute capability 9.0 or higher."""
    device = jax.config.jax_default_device or jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "")
    try:
        return float(capability) >= 9.0
    except ValueError:  # no GPU, or not NVIDIA's
        return False
