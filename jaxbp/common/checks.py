import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.lax import PrecisionLike
from jaxtyping import Bool, Float, Key, UInt32

from jaxbp.common.numerics import weakly_typed

AnyArray = Array | np.ndarray
AnyFloats = Float[AnyArray, "*shape"]
Floats = Float[Array, "*shape"]
AnyMask = Bool[AnyArray, "*mask"]
"""True for included elements."""
Number = float | Float[AnyArray, ""]
AnyKey = Key[Array, ""] | UInt32[AnyArray, "2"]
KERNEL_DTYPES = ("float32", "bfloat16", "float16")


def floating(op: str, optional: Sequence[str] = ("b",), /, **arguments: Any) -> tuple[Array, ...]:
    """Return the arguments, arrays or numbers, as arrays of one floating dtype, promoted as in `jax.numpy`. Arguments
    named in `optional` may be None."""
    return _promoted(op, optional, arguments, integers_stay=False)


def numeric(op: str, **arguments: Any) -> tuple[Array, ...]:
    """Return the arguments as `floating` does, but with an integer or boolean dtype if none of them is floating."""
    return _promoted(op, (), arguments, integers_stay=True)


def _promoted(op: str, optional: Sequence[str], arguments: dict[str, Any], integers_stay: bool) -> tuple[Array, ...]:
    arrays = {name: None if a is None and name in optional else array(op, name, a) for name, a in arguments.items()}
    given = {name: a for name, a in arrays.items() if a is not None}
    for name, a in given.items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            if not is_discrete(a):
                raise _not_floating(op, name, a)
        elif a.dtype.itemsize < 2:  # JAX does not promote floats of 8 bits or less
            wanted = f"a floating dtype of at least 16 bits, say {name}.astype(jnp.bfloat16)"
            raise TypeError(f"{op}: {name} has dtype {a.dtype}; wants {wanted}")
    dtypes = {a.dtype for a in given.values()}
    dtype = jnp.result_type(*given.values()) if len(dtypes) > 1 else next(iter(dtypes))
    if not integers_stay and not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype("float64" if dtype.itemsize == 8 else "float32")
    if dtypes != {dtype}:
        # As in JAX, floating arrays determine the dtype of integers, and integers determine the dtype of booleans, even
        # if they are weakly typed.
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        of_kinds = ([a for a in given.values() if jnp.issubdtype(a.dtype, kind)] for kind in kinds)
        decisive = next(filter(None, of_kinds))
        weak = all(jax.typeof(a).weak_type for a in decisive)
        arrays |= {name: weakly_typed(a, dtype) if weak else a.astype(dtype) for name, a in given.items()}
    return tuple(arrays.values())


def only_floating(op: str, **arguments: Any) -> tuple[Array, ...]:
    """Return the arguments as `floating` does, but refuse integers and booleans."""
    for name, a in arguments.items():
        require_floating(op, name, a)
    return floating(op, **arguments)


def require_floating(op: str, name: str, a: Any) -> None:
    if is_discrete(array(op, name, a)):
        raise _not_floating(op, name, a)


def refuse_booleans(op: str, name: str, a: Any) -> None:
    if array(op, name, a).dtype == bool:
        raise _not_floating(op, name, a)


def _not_floating(op: str, name: str, a: Any) -> TypeError:
    got = f"has dtype {a.dtype}" if hasattr(a, "dtype") else f"is {a!r}"
    return TypeError(f"{op}: {name} {got}; wants a floating dtype, say {name}.astype(jnp.float32)")


def is_discrete(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.integer) or a.dtype == bool


_MAY_BE_EMPTY = ("batch", "rows", "features", "in_features", "out_features")


def function(op: str, name: str, value: Any, example: str = "jaxbp.relu") -> None:
    if not callable(value):
        raise TypeError(f"{op}: {name} is {value!r}; wants a function, say {example}")


def shape(op: str, name: str, a: Array, *wanted: int | str) -> None:
    """Require that `a` has the shape `wanted`, where a string in `_MAY_BE_EMPTY` is any size, and any other string any
    size except 0."""
    fits = len(a.shape) == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(a.shape, wanted, strict=True)
    )
    nonempty = [(size, want) for size, want in zip(a.shape, wanted, strict=False) if want not in _MAY_BE_EMPTY]
    empty = [want for size, want in nonempty if isinstance(want, str) and size == 0]
    if not fits or empty:
        pattern = ", ".join(map(str, wanted)) + ("," if len(wanted) == 1 else "")
        at_least = f" with {' and '.join(empty)} of at least 1" if fits else ""
        raise ValueError(f"{op}: {name} has shape {a.shape}; wants ({pattern}){at_least}")


def scale_and_bias(
    op: str, x: Array, size: tuple[int, ...], scale: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    for name, a in (("scale", scale), ("bias", bias)):
        if a is not None:
            shape(op, name, a, *size)
    scale = jnp.ones(size, x.dtype) if scale is None else scale
    return scale, jnp.zeros(size, x.dtype) if bias is None else bias


def pair(op: str, name: str, value: Any, at_least: int = 1) -> tuple[int, int]:
    both = (value, value) if is_int(value) else value
    ints = isinstance(both, tuple | list) and len(both) == 2 and all(is_int(v) for v in both)
    if not ints or min(both) < at_least:
        raise ValueError(f"{op}: {name} is {value!r}; wants an int of at least {at_least}, or a pair of such ints")
    return int(both[0]), int(both[1])


def per_axis(op: str, name: str, value: Any, axes: int) -> tuple[int, ...]:
    if axes == 2:
        return pair(op, name, value)
    return (count(op, name, value[0] if isinstance(value, tuple | list) and len(value) == 1 else value),)


def sides(value: Any, axes: int) -> tuple[tuple[int, int], ...] | None:
    """Return a padding as one pair (before, after) per axis, or None if it is no padding."""
    each = [value] * axes if is_int(value) else value
    pairs = [(p, p) if is_int(p) else p for p in each] if isinstance(each, tuple | list) else []
    fits = len(pairs) == axes and all(
        isinstance(both, tuple | list) and len(both) == 2 and all(is_int(p) and p >= 0 for p in both) for both in pairs
    )
    return tuple((int(before), int(after)) for before, after in pairs) if fits else None


def precision(op: str, value: PrecisionLike) -> PrecisionLike:
    both = value if isinstance(value, tuple) and len(value) == 2 else () if value is None else (value,)
    for one in both:
        named = isinstance(one, str) and (one in _PRECISIONS or one in lax.DotAlgorithmPreset.__members__)
        if not named and not isinstance(one, lax.Precision | lax.DotAlgorithm | lax.DotAlgorithmPreset):
            wanted = "None, 'default', 'high', 'highest', another precision of jax.lax.dot, or a pair of these values"
            raise ValueError(f"{op}: precision is {value!r}; wants {wanted}")
    return value


_PRECISIONS = ("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32", "highest", "float32")


def count(op: str, name: str, value: Any, at_least: int = 1) -> int:
    if not is_int(value) or value < at_least:
        raise ValueError(f"{op}: {name} is {value!r}; wants an int of at least {at_least}")
    return int(value)  # a NumPy integer may overflow


def boolean(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{op}: {name} is {value!r}; wants True or False")
    return bool(value)


def is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_int(value) or isinstance(value, float | np.floating)


def unsupported(*arrays: Any, **options: Any) -> str | None:
    if reason := unsupported_dtype(*arrays):
        return reason
    return "2^31 or more elements" if any(a.size >= 2**31 for a in jax.tree.leaves(arrays)) else None


def unsupported_dtype(*arrays: Any, **options: Any) -> str | None:
    for a in jax.tree.leaves(arrays):
        if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.name not in KERNEL_DTYPES:
            return f"dtype {a.dtype}, only {', '.join(KERNEL_DTYPES)}"
    return None


def array(op: str, name: str, a: Any) -> Array:
    if not isinstance(a, int | float) and not (hasattr(a, "shape") and hasattr(a, "dtype")):
        raise TypeError(f"{op}: {name} is a {type(a).__name__}; wants an array")
    if isinstance(a, Array) and not isinstance(a, jax.core.Tracer):
        return a
    return jnp.asarray(a)  # a tracer of `jax.grad` may hold a Python number


def integers(op: str, name: str, a: Any, hint: str = "") -> Array:
    a = array(op, name, a)
    if not jnp.issubdtype(a.dtype, jnp.integer):
        hint = hint or f", say {name}.astype(jnp.int32)"
        raise TypeError(f"{op}: {name} has dtype {a.dtype}; wants integers{hint}")
    return a


def mask(op: str, where: Any, *shapes: tuple[int, ...]) -> Array | None:
    """Return `where` as an array, or None. It must broadcast to the first of the `shapes` with as many axes as `where`,
    or to `shapes[0]` if there is none."""
    if where is None:
        return None
    where = array(op, "where", where)
    if where.dtype != bool:
        raise TypeError(f"{op}: where has dtype {where.dtype}; wants bool, for example `where != 0`")
    wanted = next((shape for shape in shapes if len(shape) == where.ndim), shapes[0])
    sizes = zip(where.shape[::-1], wanted[::-1], strict=False)
    if where.ndim > len(wanted) or any(size not in (1, want) for size, want in sizes):
        raise ValueError(f"{op}: where has shape {where.shape}; wants a shape that broadcasts to {wanted}")
    return where


def broadcast(op: str, **arrays: Array) -> tuple[int, ...]:
    given = {a.shape for a in arrays.values()}
    if len(given) == 1:
        return given.pop()
    try:
        return jnp.broadcast_shapes(*given)
    except ValueError:
        shapes = " and ".join(f"{name} has shape {a.shape}" for name, a in arrays.items())
        raise ValueError(f"{op}: {shapes}; wants shapes that broadcast") from None


def axes(op: str, axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    wanted = tuple(range(ndim)) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    fits = all(is_int(a) and -ndim <= a < ndim for a in wanted)
    if not fits or len({a % ndim for a in wanted}) < len(wanted):
        raise ValueError(f"{op}: axis is {axis!r}; wants None, or one or more different ints in [{-ndim}, {ndim})")
    return tuple(sorted(int(a) % ndim for a in wanted))


def one_axis(op: str, name: str, axis: Any, ndim: int) -> int:
    if not is_int(axis) or not -ndim <= axis < ndim:
        raise ValueError(f"{op}: {name} is {axis!r}; wants an int in [{-ndim}, {ndim})")
    return int(axis) % ndim


def number_or_array(op: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float | Array:
    """Return `value`, a number in [low, high] or an array of shape (), whose range is not checked."""
    if not isinstance(value, Array | np.ndarray):
        return number(op, name, value, low, high)
    if value.shape != ():
        raise ValueError(f"{op}: {name} has shape {value.shape}; wants a Python number or an array of shape ()")
    is_integer = jnp.issubdtype(value.dtype, jnp.integer)
    if not (is_integer or jnp.issubdtype(value.dtype, jnp.floating)):
        raise ValueError(f"{op}: {name} has dtype {value.dtype}; wants a floating or integer dtype")
    return jnp.asarray(value, jnp.float32 if is_integer else None)


def softcap(op: str, value: Any) -> float | None:
    value = None if value is None else number(op, "softcap", value)
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{op}: softcap is {value}; wants a finite number above 0, or None")
    return value


def number(op: str, name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return `value`, a number in [low, high] or a concrete array of shape (), as a Python number."""
    if isinstance(value, Array | np.ndarray):
        traced = isinstance(value, jax.core.Tracer)
        if traced or value.shape:
            got = "is a traced array" if traced else f"has shape {value.shape}"
            raise ValueError(f"{op}: {name} {got}; wants a Python number")
        value = value.item()
    if not is_number(value) or not low <= value <= high:
        raise ValueError(f"{op}: {name} is {value!r}; wants a number in [{low}, {high}]")
    return float(value)
