"""Lowered kernels kept from one process to the next, in the folder where JAX keeps compiled programs.

JAX finds a kept program by what it is lowered to. So a process lowers a program before it knows that it need not
compile it, and most of that time is Python's, for the kernels. Here a kernel is found by all that its lowering reads
instead: its body with what is bound to it, the arrays' shapes and dtypes, this library's source, the versions of JAX
and of CUDA's compiler, JAX's settings, the mesh, and the GPU. A kernel that calls functions from elsewhere, as a
formula of the user's, is lowered each time: nothing here says whether these have changed.

Needs the package `flatbuffers`, which `jax.export` writes with; without it nothing is kept.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import pickle
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from pallas_kernels.core import device

FOLDER = "jaxbp-kernels"
"""Within JAX's. To delete it is safe."""
_SOURCES = [Path(__file__).parents[2] / package for package in ("pallas_kernels", "jaxbp")]
_OWN_ROOTS = {folder.name for folder in _SOURCES}
_VERSIONED = ("jax", "jaxlib", "numpy", "ml_dtypes")
_KNOWN_ROOTS = {*_OWN_ROOTS, *_VERSIONED, *sys.stdlib_module_names}
"""Top-level packages whose functions and classes the key stands for, by source or by version."""
_COMPILERS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
"""Distributions of which some may be installed. Mosaic GPU lowers some conversions by ptxas' version."""

Lower = Callable[[Callable[..., Any], Sequence[Any]], export.Exported]

_of_this_process: dict[tuple[Path, str], export.Exported] = {}
"""Where a program launches a kernel twice, both calls are of one object: so it is lowered to the same text as in the
next process, which reads the kernel once."""


def folder(module_context: Any) -> Path | None:
    """Where kernels of the program that is being lowered are kept, or None."""
    kept_in = jax.config.jax_compilation_cache_dir
    keeps = (
        kept_in
        and "://" not in str(kept_in)
        and jax.config.jax_enable_compilation_cache
        and tuple(module_context.platforms) == ("cuda",)
        and not module_context.lowering_parameters.for_export
        and importlib.util.find_spec("flatbuffers") is not None
    )
    return Path(kept_in, FOLDER) if keeps else None


def kept_or_lowered(lower: Lower, function: Callable[..., Any], avals: Sequence[Any], kept_in: Path) -> export.Exported:
    """`lower(function, avals)`, from the folder if it is there; else it is written there."""
    key = _key(function, avals)
    if key is None:
        return lower(function, avals)
    if (kept_in, key) not in _of_this_process:
        _of_this_process[kept_in, key] = _read(kept_in / key) or _written(kept_in / key, lower(function, avals))
    return _of_this_process[kept_in, key]


def _read(path: Path) -> export.Exported | None:
    try:
        return export.deserialize(bytearray(path.read_bytes()))
    except OSError:
        return None
    except Exception as error:  # any, of a file that holds no kernel
        warnings.warn(f"jaxbp: {path} cannot be read, and is written again: {error!r}", stacklevel=2)
        return None


def _written(path: Path, lowered: export.Exported) -> export.Exported:
    """Writes all of it or nothing, also where other processes write the same."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(lowered.serialize())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"jaxbp: kernels are not kept in {path.parent}: {error}", stacklevel=2)
    return lowered


# ------------------------------------------------------------------------------------------------------------- the key


def _key(function: Callable[..., Any], avals: Sequence[Any]) -> str | None:
    """What the lowering of a function for these arrays depends on, as a file's name; None if that cannot be told."""
    arrays = [(a.shape, a.dtype.name) for a in avals]
    context = device.target(), device.kind(), repr(jax.sharding.get_abstract_mesh()), _settings(), _versions()
    written = io.BytesIO()
    try:
        _Pickler(written).dump((function, arrays, context))
    except Exception:  # any, of whatever a body has bound to it
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()


class _Pickler(pickle.Pickler):
    """Writes functions and classes of this library as they are now, with the functions, classes and constants that they
    use, also where a notebook or a test has replaced one. Refuses what `_KNOWN_ROOTS` do not have. What it has written
    is compared, and never read."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self._begun = set()

    def reducer_override(self, value: Any) -> Any:
        root = (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]
        if root not in _KNOWN_ROOTS:
            raise pickle.PicklingError(f"{value} of {root}")
        if root not in _OWN_ROOTS or not isinstance(value, (type, types.FunctionType)):
            return NotImplemented
        content = [value.__module__, value.__qualname__]
        if value not in self._begun:  # a function may call itself
            self._begun.add(value)
            content += _of_class(value) if isinstance(value, type) else _of_function(value)
        return list, (content,)


def _of_function(function: types.FunctionType) -> list[Any]:
    names, code = _of_code(function.__code__)
    used = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    return [code, around, function.__defaults__, function.__kwdefaults__, _what_may_change(used)]


def _of_code(code: types.CodeType) -> tuple[set[str], list[Any]]:
    """The names that it uses, also in functions within it; and all of it."""
    names, constants = {*code.co_names}, []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            of_names, constant = _of_code(constant)
            names |= of_names
        constants.append(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
    return names, [code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants]


def _of_class(kind: type) -> list[Any]:
    own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    for name in ("_make", "_replace", "_asdict"):  # of a NamedTuple, which have no place to be found at
        own.pop(name, None)
    return [kind.__bases__, _what_may_change(own)]


def _what_may_change(values: dict[str, Any]) -> dict[str, Any]:
    """The functions, classes and constants among them."""
    values = {name: _unwrapped(value) for name, value in values.items()}
    kinds = (type, types.FunctionType, bool, int, float, str, bytes, tuple, type(None))
    return {name: value for name, value in values.items() if isinstance(value, kinds)}


def _unwrapped(value: Any) -> Any:
    """The function of a method, a property, or a function that is jitted or remembers its results."""
    for attribute in ("__wrapped__", "__func__", "fget", "func"):
        value = getattr(value, attribute, value) if not isinstance(value, type) else value
    return value


def _settings() -> list[tuple[str, str]]:
    """JAX's, as they are in this context."""
    return [(name, repr(getattr(jax.config, name, value))) for name, value in sorted(jax.config.values.items())]


@functools.cache
def _versions() -> tuple[Any, ...]:
    """Of this library's source, and of what lowers and what that asks."""
    source = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in folder.rglob("*") if path.suffix in (".py", ".json")):
        source.update(f"{path.relative_to(_SOURCES[0].parent)}\0".encode() + path.read_bytes() + b"\0")
    environment = sorted(item for item in os.environ.items() if item[0].startswith(("MOSAIC_", "CUDA_", "XLA_")))
    installed = [(name, _version(name)) for name in (*_VERSIONED, *_COMPILERS)]
    return source.hexdigest(), sys.version, installed, environment, shutil.which("ptxas")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
