"""Lowered kernels kept from one process to the next, in the folder where JAX keeps compiled programs.

JAX finds a kept program by what it is lowered to. So a process lowers a program before it knows that it need not
compile it, and most of that time is Python's, for the kernels. Here a kernel is found by all that its lowering reads
instead: its body with what is bound to it, the arrays' shapes and dtypes, this library's source, the versions of JAX
and of CUDA's compiler, JAX's settings, and the GPU. A kernel that calls functions from elsewhere, as a formula of the
user's, is lowered each time: nothing here says whether these have changed.

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
import sysconfig
import time
import types
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from pallas_kernels.core import device
from pallas_kernels.core.compilation import lowers_for_cuda_alone

FOLDER = "jaxbp-kernels"
"""Within JAX's. To delete it is safe."""
_SOURCES = [Path(__file__).parents[2] / package for package in ("pallas_kernels", "jaxbp")]
_OWN_ROOTS = {folder.name for folder in _SOURCES}
_VERSIONED = ("jax", "jaxlib", "numpy", "ml_dtypes")
_KNOWN_ROOTS = {*_OWN_ROOTS, *_VERSIONED, *sys.stdlib_module_names}
"""Top-level packages whose functions and classes the key stands for, by source or by version."""
_COMPILERS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
"""Distributions of which some may be installed. Mosaic GPU lowers some conversions by ptxas' version."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_SETTINGS_OF_PLACES = (
    *("jax_compilation_cache", "jax_cuda_visible", "jax_dump", "jax_explain", "jax_log", "jax_persistent_cache"),
    *("jax_raise_persistent", "jax_traceback", "jax_tracer_error"),
)
"""How JAX's settings begin on which no kernel depends, and which differ between processes."""
_ENVIRONMENT = ("MOSAIC_", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT")
"""How the environment's variables begin that say how Mosaic GPU lowers, and where CUDA is."""
_OF_SLOTS = types.MemberDescriptorType, types.GetSetDescriptorType
"""What a class has for its `__slots__` and its instances' `__dict__`."""
_IMPORTED_AT = time.time()

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
        and lowers_for_cuda_alone(module_context)
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
        written = path.read_bytes()
    except OSError:
        return None
    checksum, content = written[:_CHECKSUM_BYTES], written[_CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() == checksum:
        return export.deserialize(bytearray(content))
    warnings.warn(f"jaxbp: {path} is damaged, and is written again", stacklevel=2)
    return None


def _written(path: Path, lowered: export.Exported) -> export.Exported:
    """Writes all of it or nothing, also where other processes and threads write the same."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        content = bytes(lowered.serialize())
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(hashlib.sha256(content).digest() + content)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except Exception as error:  # any: a program is not to fail for what is not kept
        warnings.warn(f"jaxbp: kernels are not kept in {path.parent}: {error!r}", stacklevel=2)
    return lowered


# ------------------------------------------------------------------------------------------------------------- the key


def _key(function: Callable[..., Any], avals: Sequence[Any]) -> str | None:
    """What the lowering of a function for these arrays depends on, as a file's name; None if that cannot be told."""
    arrays = [(a.shape, a.dtype.name) for a in avals]
    written = io.BytesIO()
    try:
        _Pickler(written).dump((function, arrays, device.target(), device.capability(), _settings(), _versions()))
    except Exception:  # any, of whatever a body has bound to it
        return None
    return hashlib.sha256(written.getvalue()).hexdigest()


class _Pickler(pickle.Pickler):
    """Writes functions and classes of this library as they are now, with what they use of their modules: a notebook or
    a test may have replaced it. Refuses what `_KNOWN_ROOTS` do not have. What it has written is compared, and never
    read."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5)
        self._begun = set()

    def reducer_override(self, value: Any) -> Any:
        root, inner = _root(value), _unwrapped(value)
        if root not in _KNOWN_ROOTS or not _is_genuine(root):
            raise pickle.PicklingError(f"{value} of {root}")
        if isinstance(value, types.ModuleType):
            return str, (value.__name__,)
        is_own = root in _OWN_ROOTS
        has_content = isinstance(inner, type) or (is_own and isinstance(inner, types.FunctionType))
        if not has_content or root == "builtins":
            return NotImplemented
        content = [inner.__module__, inner.__qualname__]
        if is_own and inner not in self._begun:  # a function may call itself
            self._begun.add(inner)
            content += _of_class(inner) if isinstance(inner, type) else _of_function(inner)
        return list, (content,)


def _root(value: Any) -> str:
    """The top-level package of a module, of a function's code, of a class, or of an object's class."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    if isinstance(value, types.FunctionType):  # whose `__module__` may be that of what it wraps
        return value.__globals__["__name__"].partition(".")[0]
    return (getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]


@functools.cache
def _is_genuine(root: str) -> bool:
    """Whether it is not a user's file that only has the name of one of Python's modules."""
    file = getattr(sys.modules.get(root), "__file__", None)
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return root not in sys.stdlib_module_names or file is None or any(map(Path(file).is_relative_to, folders))


def _unwrapped(value: Any) -> Any:
    """The function of a method, of a property, and of one that is jitted or remembers its results."""
    if isinstance(value, (staticmethod, classmethod, property, functools.cached_property)):
        return getattr(value, "fget", None) or getattr(value, "func", None) or value.__func__
    remembers = not isinstance(value, (type, types.FunctionType)) and hasattr(value, "__wrapped__")
    return value.__wrapped__ if remembers else value


def _of_function(function: types.FunctionType) -> list[Any]:
    names, code = _of_code(function.__code__)
    used = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in used.values() if isinstance(value, types.ModuleType)]:
        if _root(module) in _OWN_ROOTS:
            used |= {f"{module.__name__}.{name}": vars(module)[name] for name in names if name in vars(module)}
    # JAX's own objects are its version's, or contexts, whose values the key has.
    used = {name: value for name, value in used.items() if isinstance(value, type) or not _is_of_jax(value)}
    around = [cell.cell_contents for cell in function.__closure__ or ()]
    bound = around, function.__defaults__, function.__kwdefaults__, vars(function)
    return [code, bound, sorted(used), [used[name] for name in sorted(used)]]


def _is_of_jax(value: Any) -> bool:
    return _root(value) not in _OWN_ROOTS and type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _of_code(code: types.CodeType) -> tuple[set[str], list[Any]]:
    """The names that it uses, also in functions within it; and all of it."""
    names, constants = {*code.co_names}, []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            of_names, constant = _of_code(constant)
            names |= of_names
        constants.append(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)
    variables = code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount, code.co_flags
    return names, [code.co_code, code.co_names, variables, constants]


def _of_class(kind: type) -> list[Any]:
    """Its bases and what it has of its own, but for what Python makes from its fields."""
    own = {}
    for name, value in vars(kind).items():
        function = _unwrapped(value)
        if isinstance(function, types.FunctionType):
            # A dataclass's are compiled from a text, and a NamedTuple's defined elsewhere.
            made = function.__code__.co_filename.startswith("<") or _root(function) == "collections"
        else:
            made = name.startswith("__") or isinstance(value, _OF_SLOTS)
        if not made:
            own[name] = function
    return [kind.__bases__, sorted(own), [own[name] for name in sorted(own)]]


def _settings() -> list[tuple[str, str]]:
    """JAX's, as they are in this context."""
    values = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    return [(name, repr(values[name])) for name in sorted(values) if not name.startswith(_SETTINGS_OF_PLACES)]


@functools.cache
def _versions() -> tuple[Any, ...]:
    """Of this library's source, and of what lowers and what that asks.

    Raises:
      RuntimeError: the source has changed since it was imported.
    """
    source = hashlib.sha256()
    paths = [path for folder in _SOURCES for path in folder.rglob("*") if path.suffix in (".py", ".json")]
    for path in sorted(filter(Path.is_file, paths)):
        if path.stat().st_mtime > _IMPORTED_AT:
            raise RuntimeError(f"{path} has changed")
        source.update(f"{path.relative_to(_SOURCES[0].parent)}\0".encode() + path.read_bytes() + b"\0")
    environment = sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT))
    installed = [(name, _version(name)) for name in (*_VERSIONED, *_COMPILERS)]
    ptxas = shutil.which("ptxas")
    return source.hexdigest(), sys.version, installed, environment, ptxas and (ptxas, os.stat(ptxas).st_mtime)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
