"""The geometry of windows that move over images, a convolution's filters and a pool's windows alike."""

from typing import Any

from jax import lax

from jaxbp.ops import _checks

Size = int | tuple[int, int]
"""Of rows and columns, or one for both."""
Padding = int | tuple[int, int] | str
"""An int, one for rows and one for columns, "SAME" or "VALID"."""


def output_size(input_size, window, *, stride, padding, dilation=(1, 1), **options) -> tuple[int, int]:
    """How many windows there are, in rows and columns. Of a convolution's options, the others do not matter."""
    return tuple(
        (size + sum(p) - (f - 1) * d - 1) // s + 1
        for size, f, p, s, d in zip(input_size, window, padding, stride, dilation, strict=True)
    )


def window_padding(op, padding, input_size, window, stride) -> tuple[tuple[int, int], tuple[int, int]]:
    """`padding` as (before, behind) for rows and for columns.

    Raises:
      ValueError: it is none.
    """
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(f"{op}: padding is {padding!r}; wants an int, a pair of ints, 'SAME' or 'VALID'")
        return tuple(tuple(map(int, p)) for p in lax.padtype_to_pads(input_size, window, stride, padding.upper()))
    rows, columns = _checks.pair(op, "padding", padding, at_least=0)
    return (rows, rows), (columns, columns)


def pool_options(op, input_size, window, stride, padding) -> dict[str, Any]:
    """A pool's options in one form: pairs, and the padding as zeros before and behind, per axis.

    Raises:
      ValueError: options that do not fit.
    """
    window = _checks.pair(op, "window", window)
    stride = window if stride is None else _checks.pair(op, "stride", stride)
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


def side_by_side(*, window, stride, padding, input_size) -> bool:
    """Whether every position of the input is in exactly one window, and all of every window in the input."""
    filled = all(size % f == 0 for size, f in zip(input_size, window, strict=True))
    return filled and stride == window and padding == ((0, 0), (0, 0))
