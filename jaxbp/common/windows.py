"""Geometry of windows that move over images: the filters of a convolution and the windows of a pool."""

from typing import Any

from jax import lax

from jaxbp.common import checks

Size = int | tuple[int, int]
"""One int for rows and columns, or a pair."""
Padding = int | tuple[int, int] | str
"""One int, a pair for rows and columns, "SAME", or "VALID"."""


def output_size(input_size, window, *, stride, padding, dilation=(1, 1), **options) -> tuple[int, int]:
    """Return the number of windows along the rows and along the columns. `options`, the other options of a convolution,
    are ignored."""
    return tuple(
        (size + sum(p) - (f - 1) * d - 1) // s + 1
        for size, f, p, s, d in zip(input_size, window, padding, stride, dilation, strict=True)
    )


def window_padding(op, padding, input_size, window, stride) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return `padding` as (before, after) for rows and for columns.

    Raises:
      ValueError: padding is not valid.
    """
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(f"{op}: padding is {padding!r}; wants an int, a pair of ints, 'SAME' or 'VALID'")
        return tuple(tuple(map(int, p)) for p in lax.padtype_to_pads(input_size, window, stride, padding.upper()))
    rows, columns = checks.pair(op, "padding", padding, at_least=0)
    return (rows, rows), (columns, columns)


def pool_options(op, input_size, window, stride, padding) -> dict[str, Any]:
    """Return the options of a pool, with window and stride as pairs, and the padding as (before, after) per axis.

    Raises:
      ValueError: the options are not valid or do not fit the input.
    """
    window = checks.pair(op, "window", window)
    stride = window if stride is None else checks.pair(op, "stride", stride)
    padding = window_padding(op, padding, input_size, window, stride)
    for size, reach, (before, behind) in zip(input_size, window, padding, strict=True):
        if max(before, behind) >= reach:
            raise ValueError(f"{op}: padding is {padding}; wants less than the window, {window}")
        if size + before + behind < reach:
            raise ValueError(
                f"{op}: the window, {window[0]} x {window[1]}, is larger than the input, "
                f"{input_size[0]} x {input_size[1]} with padding {padding}"
            )
    return dict(window=window, stride=stride, padding=padding, input_size=tuple(input_size))


def is_nonoverlapping(*, window, stride, padding, input_size) -> bool:
    """Return whether every position of the input is in exactly one window and every window lies inside the input."""
    filled = all(size % f == 0 for size, f in zip(input_size, window, strict=True))
    return filled and stride == window and padding == ((0, 0), (0, 0))
