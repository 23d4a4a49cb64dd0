"""Dense layers with ReLU between them, softmax, and cross-entropy, one kernel per direction on Hopper's tensor cores.

A CTA computes all layers for 64 examples. Activations stay in shared memory, and the weights stream through a ring.
`docs/kernels/dense.md` describes the data flow, and the kernels for small batches. Factors of products are rounded to
TF32; the rest is in float32.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load, rounded_to_tf32, store, value_a_column, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.mlp_network_sm90 import EXAMPLES, PIECE_COLUMNS, SLICE, Config, Network, float32_struct
from pallas_kernels.dense.mlp_rows_sm90 import (
    Softmax,
    mask_padding,
    put,
    read,
    read_columns,
    spread,
    store_columns,
    valid_labels,
)
from pallas_kernels.dense.mlp_stream_sm90 import Stream, pack, slice_weights

_MAX_COLUMNS = 256
"""Columns of the widest wgmma (PTX ISA)."""
_MAX_SINGLE_KERNEL_EXAMPLES = 1024
"""Largest batch for which one kernel computes the forward and the gradients. It was slower at 8192:
docs/lab/2026-11-21-dense.md."""


def _unsupported(network: Network, dtype: Any, N: int) -> str | None:
    if dtype != jnp.float32:
        return f"dtype {dtype}, only float32"
    if N == 0 or N % EXAMPLES:
        return f"a batch of {N}, only multiples of {EXAMPLES}"
    if max(network.widths) > _MAX_COLUMNS:
        return f"rows as wide as {max(network.widths)} when padded, at most {_MAX_COLUMNS}"
    return _unsupported_stages(min(network.forward_stages, network.backward_stages))


def _unsupported_stages(stages: int) -> str | None:
    return None if stages >= 2 else "layers whose activations leave no shared memory for two slices of the weights"


class _ForwardRefs(NamedTuple):
    """`operands` are x and each hidden layer's outputs in shared memory, one row per example. Only
    `forward_and_gradients` has `gradients` and `dx`."""

    x: Any
    labels: Any
    weights: Any
    biases: Any
    loss: Any
    logits: Any
    hidden: tuple
    gradients: tuple | None
    dx: Any
    stages: Any
    loaded: Any
    operands: tuple


def _forward(network: Network, *refs: Any, block: Any) -> None:
    refs, examples = _ForwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES)
    stream = Stream(network.forward_products, refs.weights, refs.stages, refs.loaded)
    _write_losses(stream, network, refs, examples, loads=4, bulk=False)


def _logits(stream: Stream, network: Network, refs: Any, examples: Any, *, bulk: bool) -> Array:
    start = sum(inputs * outputs for inputs, outputs in stream.products)
    for layer, ref in enumerate((*refs.hidden, None)):
        width = network.widths[layer + 1]
        bias = load(refs.biases.at[pl.ds(start, width)], value_a_column(), optimized=False)
        z = stream.multiply(layer, refs.operands[layer])
        z += lax.broadcast_in_dim(bias, z.shape, [1])
        start += width
        if ref is not None:
            h = mask_padding(jnp.maximum(z, 0.0), network.sizes[layer + 1], one=True)
            put(rounded_to_tf32(h), refs.operands[layer + 1], ref.at[examples], bulk=bulk)
    return z


def _write_losses(
    stream: Stream, network: Network, refs: Any, examples: Any, *, loads: int, bulk: bool
) -> tuple[Array, Softmax]:
    stream.start()
    labels = read(refs.labels, examples, value_a_row())
    read_columns(refs.x, examples, refs.operands[0], loads)
    z = _logits(stream, network, refs, examples, bulk=bulk)
    store(refs.logits.at[examples], z)
    softmax = Softmax.from_logits(z, labels, network.classes)
    loss = softmax.loss()
    store(refs.loss.at[examples], jnp.where(valid_labels(labels, network.classes), loss, jnp.nan))
    return labels, softmax


def _forward_unsupported(x, labels, weights, biases):
    return _unsupported(Network.from_weights(weights), x.dtype, x.shape[1])


def _forward_heuristic(x, labels, weights, biases):
    return Config(Network.from_weights(weights).forward_stages)


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Compute `h = max(0, w h' + b)` for each hidden layer, the logits `w h' + b`, and the loss `logsumexp(logits) -
    logits[label]`. h' is the previous layer's h, or x.

    Args:
      x: `(widths[0], N)`, one example per column, where widths is `Network.widths`.
      labels: `(N,)` int32. If a label is not the index of a class, its example's loss is NaN.
      weights, biases: `(outputs, inputs)` and `(outputs,)` of each layer.

    Returns:
      loss `(N,)`, logits `(N, widths[-1])`, and a tuple with h `(N, widths[i])` of each hidden layer i, counted from 1.
        A row of h has the layer's outputs, a 1, and zeros up to `widths[i]`.
    """
    network, N = Network.from_weights(weights), x.shape[1]
    packed = pack(slice_weights(weights, network.forward_products), biases, network)
    loss, logits, hidden, *_ = launch(
        functools.partial(_forward, network),
        x,
        labels,
        packed.reshape(-1, SLICE),
        packed,
        out=(
            float32_struct(N),
            float32_struct(N, network.widths[-1]),
            tuple(float32_struct(N, n) for n in network.widths[1:-1]),
            None,
            None,
        ),
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.forward_products, network.widths[:-1], config.stages),
        name="mlp_softmax_cross_entropy",
    )
    return loss, logits, hidden


class _BackwardRefs(NamedTuple):
    """`operands` are the gradients with respect to each layer's sums, before any ReLU, in shared memory."""

    dy: Any
    labels: Any
    logits: Any
    weights: Any
    hidden: tuple
    gradients: tuple
    dx: Any
    stages: Any
    loaded: Any
    operands: tuple


def _backward(network: Network, *refs: Any, block: Any) -> None:
    refs, examples = _BackwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES)
    products = network.backward_products if refs.dx is not None else network.backward_products[:-1]
    stream = Stream(products, refs.weights, refs.stages, refs.loaded)
    if products:
        stream.start()
    z = read(refs.logits, examples, plgpu.Layout.WGMMA)
    dy = read(refs.dy, examples, value_a_row())
    labels = read(refs.labels, examples, value_a_row())
    dy = jnp.where(valid_labels(labels, network.classes) | (dy == 0), dy, jnp.nan)
    gradient = spread(dy, z) * Softmax.from_logits(z, labels, network.classes).gradient()
    for i, layer in enumerate(reversed(range(network.layers))):
        gradient = mask_padding(gradient, network.sizes[layer + 1])
        put(rounded_to_tf32(gradient), refs.operands[layer], refs.gradients[i].at[examples], bulk=False)
        # These loads run during the product.
        h = read(refs.hidden[layer - 1], examples, plgpu.Layout.WGMMA) if layer else None
        if i < len(products):
            gradient = stream.multiply(i, refs.operands[layer])
        if layer:
            gradient = jnp.where(h > 0, gradient, 0.0)
    if refs.dx is not None:
        store_columns(gradient, refs.dx, examples)


def _backward_unsupported(dy, labels, logits, hidden, weights):
    return _unsupported(Network.from_weights(weights), logits.dtype, dy.shape[0])


def _backward_heuristic(dy, labels, logits, hidden, weights):
    return Config(Network.from_weights(weights).backward_stages)


@kernel(unsupported=_backward_unsupported, heuristic=_backward_heuristic, capability=(9, 0))
def backward(
    dy: Array, labels: Array, logits: Array, hidden: tuple[Array, ...], weights: tuple[Array, ...], *, config: Config
) -> tuple[Array, ...]:
    """Compute the gradients of `Σ dy * loss`. dy is `(N,)`, and the others are arguments and results of `forward`.

    Return the gradients `(N, widths[i])` with respect to the logits and to each hidden layer's sums before ReLU, last
    layer first, then dx `(widths[0], N)`. `widths` is `Network.widths`. Layer i's gradients are zero in the columns
    after its outputs.
    """
    network, N = Network.from_weights(weights), dy.size
    packed = jnp.concatenate(slice_weights([w.T for w in reversed(weights)], network.backward_products))
    gradients, dx = launch(
        functools.partial(_backward, network),
        dy,
        labels,
        logits,
        packed.reshape(-1, SLICE),
        hidden,
        out=(tuple(float32_struct(N, n) for n in reversed(network.widths[1:])), float32_struct(network.widths[0], N)),
        skippable=[1],
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.backward_products, network.widths[1:], config.stages),
        name="mlp_softmax_cross_entropy_backward",
    )
    return *gradients, dx


def _forward_and_gradients(network: Network, *refs: Any, block: Any) -> None:
    refs, examples, layers = _ForwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES), network.layers
    stream = Stream(network.all_products, refs.weights, refs.stages, refs.loaded)
    labels, softmax = _write_losses(stream, network, refs, examples, loads=8, bulk=True)
    valid = spread(valid_labels(labels, network.classes), softmax.exponentials)
    gradient = jnp.where(valid, softmax.gradient(), 0.0)
    for i, layer in enumerate(reversed(range(layers))):
        operand = refs.operands[layer + 1]
        # The gradient overwrites h, which is not read again.
        if layer < layers - 1:
            gradient = jnp.where(load(operand, plgpu.Layout.WGMMA, optimized=False) > 0, gradient, 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
        gradient = mask_padding(gradient, network.sizes[layer + 1])
        put(rounded_to_tf32(gradient), operand, refs.gradients[i].at[examples], bulk=True)
        if layer:
            gradient = stream.multiply(layers + i, operand)
    for i in range(len(network.pieces)):
        piece = stream.multiply(2 * layers - 1 + i, refs.operands[1])
        store_columns(piece, refs.dx, examples, i * PIECE_COLUMNS)
    plgpu.wait_smem_to_gmem(0)


def _forward_and_gradients_unsupported(x, labels, weights, biases):
    reason = _forward_unsupported(x, labels, weights, biases)
    return reason or _unsupported_stages(Network.from_weights(weights).all_stages)


def _forward_and_gradients_heuristic(x, labels, weights, biases):
    return Config(Network.from_weights(weights).all_stages) if x.shape[1] <= _MAX_SINGLE_KERNEL_EXAMPLES else None


@kernel(unsupported=_forward_and_gradients_unsupported, heuristic=_forward_and_gradients_heuristic, capability=(9, 0))
def forward_and_gradients(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...], tuple[Array, ...]]:
    """Return (loss, logits, hidden) of `forward`, and the gradients that `backward` returns for dy = 1. An example
    with an invalid label has gradients of 0."""
    network, N = Network.from_weights(weights), x.shape[1]
    first_weights = weights[0].T
    ends = itertools.accumulate(network.pieces)
    pieces = [first_weights[end - n : end] for n, end in zip(network.pieces, ends, strict=True)]
    matrices = [*weights, *(w.T for w in reversed(weights[1:])), *pieces]
    packed = pack(slice_weights(matrices, network.all_products), biases, network)
    loss, logits, hidden, gradients, dx = launch(
        functools.partial(_forward_and_gradients, network),
        x,
        labels,
        packed.reshape(-1, SLICE),
        packed,
        out=(
            *(float32_struct(N), float32_struct(N, network.widths[-1])),
            tuple(float32_struct(N, n) for n in network.widths[1:-1]),
            tuple(float32_struct(N, n) for n in reversed(network.widths[1:])),
            float32_struct(network.widths[0], N),
        ),
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.all_products, network.widths, config.stages),
        barriers=False,
        name="mlp_softmax_cross_entropy_forward_and_gradients",
    )
    return loss, logits, hidden, (*gradients, dx)
