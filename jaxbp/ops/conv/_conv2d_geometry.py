"""Filters and paddings for the gradients of a convolution."""

import jax.numpy as jnp

from jaxbp.common.windows import dilated


def flip_and_swap(w, groups):
    out_channels, in_channels, *window = w.shape
    w = jnp.flip(w, (2, 3)).reshape(groups, out_channels // groups, in_channels, *window)
    return w.swapaxes(1, 2).reshape(groups * in_channels, out_channels // groups, *window)


def full_padding(output_size, filter_size, input_size, stride, padding, dilation):
    """Return the padding of dy for the gradient dx, the convolution of dy with the rotated filters.

    Before the padding, dy is spaced out by the stride.
    """
    low = [(f - 1) * d - p for f, d, (p, _) in zip(filter_size, dilation, padding, strict=True)]
    high = [
        size + (f - 1) * d - spread - before
        for size, f, d, spread, before in zip(
            input_size, filter_size, dilation, dilated(output_size, stride), low, strict=True
        )
    ]
    return list(zip(low, high, strict=True))


def reached_padding(output_size, input_size, filter_size, stride, padding, dilation):
    """Return the padding of x per axis, negative to crop, so that x ends at the last element that filters read."""
    return [
        (p, spread + (f - 1) * d - size - p)
        for spread, size, f, (p, _), d in zip(
            dilated(output_size, stride), input_size, filter_size, padding, dilation, strict=True
        )
    ]
