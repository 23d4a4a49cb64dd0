"""Geometry of the filters of a convolution and the windows of a pool."""

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim, min_dim
from jax.export import is_symbolic_dim

from jaxbp.common import checks

Size = int | tuple[int, int]
AxisPadding = int | tuple[int, int]
"""One int for both ends of an axis, or a pair (before, after)."""
Padding = int | str | Sequence[AxisPadding]
"""One int; one entry per axis; or "SAME", "SAME_LOWER", or "VALID"."""

_NAMED_PADDINGS = ("SAME", "SAME_LOWER", "VALID")
_Function = TypeVar("_Function", bound=Callable)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of a pool. `padding` has one pair (before, after) per axis, including the padding of `ceil_mode`."""

    input_size: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    dilation: tuple[int, int] = (1, 1)

    @property
    def output_size(self) -> tuple[int, int]:
        options = dict(stride=self.stride, padding=self.padding, dilation=self.dilation)
        return output_size(self.input_size, self.window, **options)

    @property
    def extent(self) -> tuple[int, int]:
        """The size of a window with the gaps of dilation."""
        return dilated(self.window, self.dilation)

    @property
    def positions(self) -> int:
        return math.prod(self.window)

    @property
    def nonoverlapping(self) -> bool:
        """Whether every position of the input is in exactly one window, without padding or gaps."""
        filled = all(size % f == 0 for size, f in zip(self.input_size, self.window, strict=True))
        return filled and self == Windows(self.input_size, self.window, self.window)

    @property
    def adjacent(self) -> bool:
        """Whether the first window begins at the input's first position, and each other window where the previous one
        ends."""
        return self == Windows(
            self.input_size, self.window, self.window, tuple((0, after) for _, after in self.padding)
        )

    def arguments(self) -> dict[str, Any]:
        return dict(
            window_dimensions=(1, 1, *self.window),
            window_strides=(1, 1, *self.stride),
            padding=((0, 0), (0, 0), *self.padding),
            window_dilation=(1, 1, *self.dilation),
        )


def output_size(input_size, window, *, stride, padding, dilation=None, **options) -> tuple[int, ...]:
    extent = window if dilation is None else dilated(window, dilation)
    return tuple(
        max_dim((size + sum(p) - reach) // s + 1, 0)
        for size, reach, p, s in zip(input_size, extent, padding, stride, strict=True)
    )


def dilated(window, dilation) -> tuple[int, ...]:
    return tuple(max_dim((f - 1) * d + 1, 0) for f, d in zip(window, dilation, strict=True))


def arange(n):
    return jnp.arange(n) if is_symbolic_dim(n) else np.arange(n)


def has_symbolic_sides(pads) -> bool:
    return any(map(is_symbolic_dim, itertools.chain(*pads)))


def window_padding(op, padding, input_size, window, stride) -> tuple[tuple[int, int], ...]:
    """Return `padding` as one pair (before, after) per axis. `window` is the dilated window's size."""
    if isinstance(padding, str) and padding.upper() in _NAMED_PADDINGS:
        pads = lax.padtype_to_pads(input_size, window, stride, padding.upper())
        return tuple(tuple(p if is_symbolic_dim(p) else int(p) for p in both) for both in pads)
    if isinstance(padding, str) and padding.upper() == "CAUSAL" and len(input_size) == 1:
        return ((window[0] - 1, 0),)
    pads = checks.sides(padding, len(input_size))
    if pads is None:
        names = (
            "'VALID', 'SAME', or 'SAME_LOWER'" if len(input_size) > 1 else "'VALID', 'SAME', 'SAME_LOWER', or 'CAUSAL'"
        )
        raise ValueError(
            f"{op}: padding is {padding!r}; wants {names}; or an int; or a sequence with one entry per axis "
            f"({len(input_size)} in total), each an int or a pair (before, after). Each int is at least 0"
        )
    return pads


def require_fit(op, name, extent, input_size, padding, hint: str = "") -> None:
    if not fits(extent, input_size, padding):
        by = lambda sizes: " x ".join(map(str, sizes))  # noqa: E731
        padded = by(size + sum(p) for size, p in zip(input_size, padding, strict=True))
        raise ValueError(
            f"{op}: the {name} is {by(extent)}; wants at most {padded}, the size of the padded input{hint}"
        )


def fits(extent, input_size, padding) -> bool:
    sides = zip(extent, input_size, padding, strict=True)
    return all(is_symbolic_dim(size) or is_symbolic_dim(reach) or size + sum(p) >= reach for reach, size, p in sides)


class PoolOptions(TypedDict, total=False):
    """The options of every pool, as in `jaxbp.max_pool2d`."""

    stride: Size | None
    padding: Padding
    dilation: Size
    ceil_mode: bool
    channel_axis: int


def pool_windows(
    op, shape, window, *, stride=None, padding=0, dilation=1, ceil_mode=False, channel_axis=1, **unknown
) -> tuple[Windows, tuple[tuple[int, int], ...]]:
    """Return a pool's windows, and its padding before `ceil_mode` increases it. The input's `shape` ends in height and
    width."""
    if unknown:
        known = ", ".join(PoolOptions.__annotations__)
        raise TypeError(f"{op}: has no argument {', '.join(unknown)}; wants only options among {known}")
    input_size = tuple(shape[-2:])
    window, dilation = checks.pair(op, "window", window), checks.pair(op, "dilation", dilation)
    stride = window if stride is None else checks.pair(op, "stride", stride)
    extent = dilated(window, dilation)
    padding = window_padding(op, padding, input_size, extent, stride)
    if not has_symbolic_sides(padding) and any(max(p) >= reach for p, reach in zip(padding, extent, strict=True)):
        raise ValueError(
            f"{op}: padding is {padding}; wants less than the size of the window with its dilation, {extent}"
        )
    would_fit = channel_axis == 1 and len(shape) == 4 and fits(extent, shape[1:3], padding)
    hint = f". x has shape {tuple(shape)}; if this is NHWC, pass channel_axis=-1" if would_fit else ""
    require_fit(op, "window", extent, input_size, padding, hint)
    whole = padding
    # A padding is symbolic only for "SAME", which leaves no partial window.
    if checks.boolean(op, "ceil_mode", ceil_mode) and not has_symbolic_sides(padding):
        whole = tuple(map(_whole_windows, input_size, extent, stride, padding))
    return Windows(input_size, window, stride, whole, dilation), padding


def unsupported(windows: Windows) -> str | None:
    return None if windows.dilation == (1, 1) else f"dilation={windows.dilation}"


def _whole_windows(size, reach, stride, padding):
    """Return one axis's padding, increased for `ceil_mode` so that a last, partial window fits, unless it would start
    after the input. `reach` is the dilated window's size."""
    before, after = padding
    count = min_dim(-(-(size + before + after - reach) // stride), (size + before - 1) // stride) + 1
    return before, max_dim(after, (count - 1) * stride + reach - size - before)


def with_pool_options(function: _Function) -> _Function:
    """Replace `**options` in the function's signature by the keyword arguments in `PoolOptions`."""
    signature = inspect.signature(function)
    defaults = inspect.signature(pool_windows).parameters
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name].default, annotation=kind)
        for name, kind in get_type_hints(PoolOptions).items()
    ]
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword_only = [p for p in own if p.kind is p.KEYWORD_ONLY]
    positional = own[: len(own) - len(keyword_only)]
    parameters = [*positional, *options, *keyword_only]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function
