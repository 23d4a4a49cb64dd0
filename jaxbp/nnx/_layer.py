import inspect
import warnings
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxbp.pairing import IMPLEMENTATIONS, Implementation


class Layer:
    """A layer of Flax that calls an op of jaxbp. A subclass also inherits from the layer of Flax, which computes the
    call if `_needs_flax` returns True."""

    implementation: Implementation
    __signature__: ClassVar[inspect.Signature]
    flax_only: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Arguments and their default values. Only Flax supports other values of these arguments."""

    def __init__(self, *args: Any, implementation: Implementation = None, **options: Any):
        check_implementation(type(self).__name__, implementation)
        super().__init__(*args, **options)
        self.implementation = implementation
        self._needs_flax()

    def __init_subclass__(cls, **keywords: Any):
        """In a subclass's signature, replace `**options` by the arguments of Flax and the keywords of jaxbp."""
        super().__init_subclass__(**keywords)
        if twins := [base for base in cls.__mro__ if issubclass(base, nnx.Module) and not issubclass(base, Layer)]:
            parameters = _parameters(cls)
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                constructors = [base for base in cls.__mro__ if issubclass(base, Layer) and "__init__" in vars(base)]
                added = [p for base in constructors for p in _parameters(base) if p.kind is p.KEYWORD_ONLY]
                parameters = sorted([*_parameters(twins[0]), *added], key=lambda parameter: parameter.kind)
            cls.__signature__ = inspect.Signature(parameters)

    def _only_in_flax(self) -> dict[str, bool]:
        return {name: getattr(self, name) is not default for name, default in self.flax_only}

    def _promoted(self, x: Any, *names: str) -> tuple[Any, ...]:
        """Return x and the parameters, each of which may be None, in the dtype of the computation."""
        parameters = (getattr(self, name) for name in names)
        arrays = (x, *(None if parameter is None else parameter[...] for parameter in parameters))
        return self.promote_dtype(arrays, dtype=self.dtype)

    def _needs_flax(self, *arrays: Any, **arguments: bool) -> bool:
        dtypes = {jnp.result_type(a) for a in arrays if a is not None}
        are_supported = (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2 for dtype in dtypes)
        is_unsupported = len(dtypes) > 1 or not all(are_supported)
        unsupported = {f"dtype {', '.join(sorted(map(str, dtypes)))}": is_unsupported}
        lacking = self._only_in_flax() | arguments | unsupported
        return falls_back(type(self).__name__, self.implementation, **lacking)


def _parameters(kind: type) -> list[inspect.Parameter]:
    return list(inspect.signature(kind.__init__).parameters.values())[1:]


def check_implementation(name: str, implementation: Any) -> None:
    if implementation not in (*IMPLEMENTATIONS, None):
        wanted = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{name}: implementation is {implementation!r}; wants {wanted}, or None")


def falls_back(
    name: str, implementation: Implementation, module: str = "nnx", library: str = "Flax", /, **lacking: bool
) -> bool:
    """Return whether `library`, such as Flax, computes a call instead of jaxbp. `lacking` maps each option that jaxbp
    does not support to whether the call uses it.

    Raises:
      NotImplementedError: `library` would compute the call, but the implementation is "pallas" or "xla".
    """
    used = [option for option, is_used in lacking.items() if is_used]
    if used and implementation in ("pallas", "xla"):
        what = f"{name}: implementation={implementation!r} does not take {', '.join(used)}"
        raise NotImplementedError(f"{what}; wants 'autodiff' or None")
    if used and implementation is None:
        why = f"because jaxbp does not take {', '.join(used)}"
        warnings.warn(f"jaxbp.{module}.{name}: {library} computes this layer, {why}", stacklevel=4)
    return bool(used)
