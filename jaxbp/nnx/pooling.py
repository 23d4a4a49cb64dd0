from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax import Array

from jaxbp.common import checks
from jaxbp.nnx._layer import falls_back
from jaxbp.ops.conv.avg_pool2d import avg_pool2d
from jaxbp.ops.conv.max_pool2d import max_pool2d
from jaxbp.pairing import Implementation

PoolPadding = str | Sequence[tuple[int, int]]


def max_pool(
    inputs: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: PoolPadding = "VALID",
    *,
    implementation: Implementation = None,
) -> Array:
    """`flax.nnx.max_pool`, computed by `jaxbp.max_pool2d`.

    Args:
      inputs: images `(..., height, width, features)` or sequences `(..., width, features)`.
      strides: one stride per spatial axis. None means 1, unlike in `jaxbp.max_pool2d`.
      padding: "SAME", "VALID", or one pair (before, after) per spatial axis, filled with -inf.

    Raises:
      TypeError, ValueError: an argument is invalid.
      NotImplementedError: the implementation is "pallas" or "xla", and there are more than two spatial axes.
    """
    return _pool(max_pool2d, nnx.max_pool, inputs, window_shape, strides, padding, implementation)


def avg_pool(
    inputs: Any,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: PoolPadding = "VALID",
    count_include_pad: bool = True,
    *,
    implementation: Implementation = None,
) -> Array:
    """`flax.nnx.avg_pool`, computed by `jaxbp.avg_pool2d`.

    Args:
      count_include_pad: whether a mean includes the zeros of the padding.
      Other arguments and errors: as in `max_pool`, but the padding is filled with 0 instead of -inf.
    """
    options = dict(count_include_pad=count_include_pad)
    return _pool(avg_pool2d, nnx.avg_pool, inputs, window_shape, strides, padding, implementation, **options)


def _pool(op, twin, inputs, window_shape, strides, padding, implementation, **options) -> Array:
    name = twin.__name__
    for argument, sizes in (("window_shape", window_shape), ("strides", strides or ())):
        if not isinstance(sizes, Sequence):
            raise TypeError(f"{name}: {argument} is {sizes!r}; wants a tuple with one int per spatial axis")
    if not isinstance(padding, Sequence):
        raise TypeError(f"{name}: padding is {padding!r}; wants 'SAME', 'VALID', or one pair of ints per spatial axis")
    x, window = checks.array(name, "inputs", inputs), tuple(window_shape)
    axes = len(window)
    if falls_back(name, implementation, **{f"{axes} spatial axes": axes not in (1, 2)}):
        return twin(inputs, window, strides, padding, **options)
    strides = (1,) * axes if strides is None else tuple(strides)
    if x.ndim <= axes or len(strides) != axes:
        wants = f"at least {axes + 1} axes, and one stride per axis of the window"
        raise ValueError(f"{name}: inputs has shape {x.shape}, strides is {strides}; wants {wants}")
    batch, size = x.shape[: -axes - 1], x.shape[-axes - 1 :]
    row = (1,) * (2 - axes)  # a sequence is an image with one row
    y = op(
        x.reshape(-1, *row, *size),
        (*row, *window),
        stride=(*row, *strides),
        padding=padding if isinstance(padding, str) else (*((0, 0) for _ in row), *padding),
        channel_axis=-1,
        implementation=implementation,
        **options,
    )
    return y.reshape(*batch, *y.shape[3 - axes :])
