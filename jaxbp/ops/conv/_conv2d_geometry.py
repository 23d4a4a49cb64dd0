"""Filters and paddings for the gradients of a convolution."""

import jax.numpy as jnp


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
        size + (f - 1) * d - ((out - 1) * s + 1) - before
        for size, f, d, out, s, before in zip(input_size, filter_size, dilation, output_size, stride, low, strict=True)
    ]
    return list(zip(low, high, strict=True))


def reached_padding(output_size, input_size, filter_size, stride, padding, dilation):
    """Return the padding of x per axis, negative to crop, so that x ends at the last element that filters read."""
    return [
        (p, (out - 1) * s + (f - 1) * d + 1 - size - p)
        for out, size, f, s, (p, _), d in zip(
            output_size, input_size, filter_size, stride, padding, dilation, strict=True
        )
    ]
