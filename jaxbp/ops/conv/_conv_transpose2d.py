"""Transposed convolution: the forward is the gradient of `conv2d` with respect to its images, plus a bias.

    y[n, c, h, l] = b[c] + Σ_{k, u, v} x[n, k, i, j] w[k, c, u, v]

over the u and v for which x has a position (i, j) with `i s + u d - p = h` and `j s + v d - p = l`, with the stride s,
the dilation d, and the padding p of `conv2d`. So x has shape (batch, k, ...), w has (k, c, ...), and b has (c,).
`output_size` is the size of y without the `added` rows and columns, which no x reaches.
"""

import functools

from jax import lax

from jaxbp.ops.conv.conv2d import CONV2D, conv2d, conv2d_backward_bias, conv2d_backward_input, conv2d_backward_weights
from jaxbp.pairing import Pair, per_implementation, saving_arguments


def _forward(x, w, b, *, output_size, added, implementation="autodiff", **options):
    y = conv2d_backward_input(x, w, output_size, implementation=implementation, **options)
    y = lax.pad(y, y.dtype.type(0), [(0, 0, 0), (0, 0, 0), *((*both, 0) for both in added)])
    return y if b is None else y + b[None, :, None, None]


def _gradients(dy, x, w, b, *, output_size, added, implementation, **options):
    db = None if b is None else conv2d_backward_bias(dy, implementation=implementation)
    dy = lax.pad(dy, dy.dtype.type(0), [(0, 0, 0), (0, 0, 0), *((-before, -after, 0) for before, after in added)])
    dx = conv2d(dy, w, implementation=implementation, **options)
    dw = conv2d_backward_weights(x, dy, w.shape[2:], implementation=implementation, **options)
    return dx, dw, db


_EVERY = ("pallas", "xla", None)
CONV_TRANSPOSE2D = Pair(
    _forward,
    per_implementation(_gradients, _EVERY),
    save=per_implementation(functools.partial(saving_arguments, _forward), _EVERY),
    name="conv_transpose2d",
    unsupported=lambda *arrays, output_size, added, **options: CONV2D.unsupported(*arrays, **options),
    jit=True,
)
