"""Layouts of images and filters. XLA folds the transposes into the convolution.

A layout is the permutation that transposes to NCHW or OIHW. NHWC images have the layout (0, 3, 1, 2).
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from jaxbp.common import checks

DimensionNumbers = lax.ConvDimensionNumbers | Sequence[str] | None
"""The layouts of x, w, and y, as in `jax.lax.conv_general_dilated`."""
Layout = tuple[int, ...]


def dimension_numbers(op: str, value: DimensionNumbers, spatial_axes: int = 2) -> lax.ConvDimensionNumbers:
    shape = (1,) * (2 + spatial_axes)
    try:
        return lax.conv_dimension_numbers(shape, shape, value if value is None or _is_named(value) else tuple(value))
    except (TypeError, ValueError):
        example = ("NHWC", "HWIO", "NHWC") if spatial_axes == 2 else ("NWC", "WIO", "NWC")
        raise ValueError(f"{op}: dimension_numbers is {value!r}; wants None or three layouts, say {example}") from None


def _is_named(value: Any) -> bool:
    return isinstance(value, lax.ConvDimensionNumbers)


def of_images(op: str, *, channel_axis: int = 1, **options: Any) -> Layout:
    if not checks.is_int(channel_axis) or channel_axis not in (1, 2, 3, -1, -2, -3):
        raise ValueError(f"{op}: channel_axis is {channel_axis!r}; wants an int from 1 to 3 or from -3 to -1")
    channels = int(channel_axis) % 4
    return (0, channels, *(axis for axis in (1, 2, 3) if axis != channels))


def is_channels_last(layout: Layout) -> bool:
    return layout[1] == len(layout) - 1


def arrange(op: str, name: str, a: Array, layout: Layout, *wanted: int | str) -> Array:
    check_shape(op, name, a, layout, *wanted)
    return arranged(a, layout)


def check_shape(op: str, name: str, a: Array, layout: Layout, *wanted: int | str) -> tuple[int, ...]:
    checks.shape(op, name, a, *(wanted[layout.index(axis)] for axis in range(len(layout))))
    return operator.itemgetter(*layout)(a.shape)


def arranged(a: Array, layout: Layout) -> Array:
    return a if _is_default(layout) else a.transpose(layout)


def restore(a: Array, layout: Layout) -> Array:
    return a if _is_default(layout) else a.transpose(tuple(map(int, np.argsort(layout))))


def _is_default(layout: Layout) -> bool:
    return tuple(layout) == tuple(range(len(layout)))
