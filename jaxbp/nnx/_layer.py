"""The part that all layers share: the argument `implementation`, and calls that the layer of Flax computes."""

import inspect
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxbp.pairing import IMPLEMENTATIONS, Implementation


class Layer:
    """A layer of Flax whose calls run an op of jaxbp. A subclass also inherits from the layer of Flax.

    The constructor, the parameters, and their initial values are those of Flax. The subclass defines `__call__`, which
    calls the op, or the layer of Flax where `_needs_flax` returns True.

    Args:
      args, options: the arguments of the layer of Flax.
      implementation: the implementation of the op, as in `jaxbp.linear`. It is a static attribute.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: the implementation is "pallas" or "xla", and an option exists only in Flax.
    """

    implementation: Implementation

    def __init__(self, *args: Any, implementation: Implementation = None, **options: Any):
        name = type(self).__name__
        if implementation not in (*IMPLEMENTATIONS, None):
            wanted = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"{name}: implementation is {implementation!r}; wants {wanted} or None")
        super().__init__(*args, **options)
        self.implementation = implementation
        self._needs_flax()

    def __init_subclass__(cls, **keywords: Any):
        """Give the class the signature of Flax's constructor, with `implementation` as the last keyword."""
        super().__init_subclass__(**keywords)
        twin = next(
            (base for base in cls.__mro__ if issubclass(base, nnx.Module) and not issubclass(base, Layer)), None
        )
        if twin:
            of_flax, ours = inspect.signature(twin.__init__), inspect.signature(Layer.__init__)
            _, *parameters = of_flax.parameters.values()
            cls.__signature__ = of_flax.replace(parameters=[*parameters, ours.parameters["implementation"]])

    def _only_in_flax(self) -> dict[str, bool]:
        """Return for each option of the constructor that the op lacks whether it is in use."""
        return {}

    def _needs_flax(self, *arrays: Any, **arguments: bool) -> bool:
        """Return whether the layer of Flax computes a call, because the op lacks an option or the dtype.

        Args:
          arrays: the arrays that the op would get, or None for arrays that are missing.
          arguments: for each argument of the call that the op lacks, whether it is given.

        Raises:
          NotImplementedError: the implementation is "pallas" or "xla", which Flax does not have.
        """
        lacking = [name for name, is_used in (self._only_in_flax() | arguments).items() if is_used]
        dtypes = {jnp.result_type(a) for a in arrays if a is not None}
        if dtypes and not _is_supported(dtypes):
            lacking.append(f"dtype {', '.join(sorted(map(str, dtypes)))}")
        if lacking and self.implementation in ("pallas", "xla"):
            raise NotImplementedError(
                f"{type(self).__name__}: implementation={self.implementation!r} does not take {', '.join(lacking)}; "
                "'autodiff' and None do"
            )
        return bool(lacking)


def _is_supported(dtypes: set) -> bool:
    """Return whether these dtypes are one floating dtype of at least 16 bits, which all ops support."""
    return len(dtypes) == 1 and all(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2 for dtype in dtypes)
