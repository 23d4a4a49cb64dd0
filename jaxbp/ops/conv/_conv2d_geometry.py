"""Padding and filters with which the gradients of a convolution are convolutions, too.

The gradient with respect to x convolves dy, spaced out by the stride, with the rotated filters. The gradient with
respect to w correlates x with dy. Sizes are pairs, for rows and columns.
"""

import jax.numpy as jnp


def flip_and_swap(w, groups):
    """Rotate the filters by 180 degrees and exchange the input and output channels of each group."""
    out_channels, in_channels, *window = w.shape
    w = jnp.flip(w, (2, 3)).reshape(groups, out_channels // groups, in_channels, *window)
    return w.swapaxes(1, 2).reshape(groups * in_channels, out_channels // groups, *window)


def full_padding(output_size, filter_size, input_size, stride, padding, dilation):
    """Return the padding with which the filter visits every position of the input, after dy is spaced out by the
    stride."""
    low = [(f - 1) * d - p for f, d, (p, _) in zip(filter_size, dilation, padding, strict=True)]
    high = [
        size + (f - 1) * d - ((out - 1) * s + 1) - before
        for size, f, d, out, s, before in zip(input_size, filter_size, dilation, output_size, stride, low, strict=True)
    ]
    return list(zip(low, high, strict=True))


def reached_padding(output_size, input_size, filter_size, stride, padding, dilation):
    """Return the padding of x up to the last row and column that the filter reached. Negative padding crops x."""
    return [
        (p, (out - 1) * s + (f - 1) * d + 1 - size - p)
        for out, size, f, s, (p, _), d in zip(
            output_size, input_size, filter_size, stride, padding, dilation, strict=True
        )
    ]
