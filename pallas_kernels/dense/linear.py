"""Gradients of a dense layer in exact float32, by the kernels of `conv.conv2d`. o is an output, i an input, and n an
example."""

from jax import Array

from pallas_kernels.conv.conv2d import correlate, correlate_batch, sum_batch


def input_gradient(dy: Array, w: Array) -> Array:
    """Compute `dx[i, n] = sum over o of w[o, i] * dy[o, n]` in dy's dtype."""
    return correlate(dy[:, None, None, :], w.T[:, :, None, None])[:, 0, 0, :]


def weight_gradient(dy: Array, x: Array) -> Array:
    """Compute `dw[o, i] = sum over n of dy[o, n] * x[i, n]` in float32."""
    return correlate_batch(dy[:, None, None, :], x[:, None, None, :])[:, :, 0, 0]


def bias_gradient(dy: Array) -> Array:
    """Compute `db[o] = sum over n of dy[o, n]` in float32."""
    return sum_batch(dy[:, None, :])
