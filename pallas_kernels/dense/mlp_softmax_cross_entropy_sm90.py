"""Dense layers with ReLU between them, softmax, and cross-entropy, one kernel per direction on Hopper's tensor cores.

A CTA computes all layers for 64 examples. Activations stay in shared memory, and the weights stream through a ring.
`docs/kernels/dense.md` describes the data flow, and the kernels for small batches. Factors of products are rounded to
TF32; the rest is in float32.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import largest_divisor, load, rounded_to_tf32, store, value_a_column, value_a_row
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.tiles import kernel
from pallas_kernels.dense.mlp_network_sm90 import (
    EXAMPLES,
    SLICE,
    Config,
    Products,
    count_stages,
    float32_struct,
    layer_sizes,
    pack,
    read,
    row_widths,
    shared_memory,
    spread,
    stream,
)

_MAX_COLUMNS = 256
"""Columns of the widest wgmma (PTX ISA)."""
_PIECE_COLUMNS = 128
"""Maximum columns of dx that `forward_and_gradients` computes at once. More would need larger stages. Not tuned."""


def _forward_products(widths: tuple[int, ...]) -> tuple[Products, tuple[int, ...]]:
    """Return the products of `forward`, and the widths of the rows in shared memory: x and the hidden layers' outputs.
    `_backward_products` and `_all_products` return the same for the other kernels."""
    return list(itertools.pairwise(widths)), widths[:-1]


def _backward_products(widths: tuple[int, ...]) -> tuple[Products, tuple[int, ...]]:
    return list(itertools.pairwise(reversed(widths))), widths[1:]


def _all_products(widths: tuple[int, ...]) -> tuple[Products, tuple[int, ...]]:
    (forward, _), (backward, _) = _forward_products(widths), _backward_products(widths)
    columns = _piece_columns(widths[0])
    return [*forward, *backward[:-1], (widths[0] // columns * widths[1], columns)], widths


def _piece_columns(width: int) -> int:
    return SLICE * largest_divisor(width // SLICE, _PIECE_COLUMNS // SLICE)


def _plan(products: Callable, dtype: Any, N: int, weights: tuple[Any, ...]) -> Config | str:
    widths = row_widths(layer_sizes(weights))
    if dtype != jnp.float32:
        return f"dtype {dtype}, only float32"
    if N == 0 or N % EXAMPLES:
        return f"a batch of {N}, only multiples of {EXAMPLES}"
    if max(widths) > _MAX_COLUMNS:
        return f"rows as wide as {max(widths)} when padded, at most {_MAX_COLUMNS}"
    *_, stages = counts = [count_stages(*of(widths)) for of in (_forward_products, _backward_products, products)]
    if min(counts) < 2:
        return "layers whose activations leave no shared memory for two slices of the weights"
    return Config(stages)


def _plan_forward(products: Callable) -> Callable[..., Config | str]:
    return lambda x, labels, weights, biases: _plan(products, x.dtype, x.shape[1], weights)


@kernel(plan=_plan_forward(_forward_products), capability=(9, 0))
def forward(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Compute `h = max(0, w h' + b)` for each hidden layer, the logits `w h' + b`, and the loss `logsumexp(logits) -
    logits[label]`. h' is the previous layer's h, or x.

    Args:
      x: `(widths[0], N)`, one example per column, where widths is `row_widths` of the layers' sizes.
      labels: `(N,)` int32. If a label is not the index of a class, its example's loss is NaN.
      weights, biases: `(outputs, inputs)` and `(outputs,)` of each layer.

    Returns:
      loss `(N,)`, logits `(N, widths[-1])`, and a tuple with h `(N, widths[i])` of each hidden layer i, counted from 1.
        A row of h has the layer's outputs, a 1, and zeros up to `widths[i]`.
    """
    return _forward(x, labels, weights, biases, config, with_gradients=False)[:3]


@kernel(plan=_plan_forward(_all_products), capability=(9, 0))
def forward_and_gradients(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...], tuple[Array, ...]]:
    """Return (loss, logits, hidden) of `forward`, and the gradients that `backward` returns for dy = 1. An example
    with an invalid label has gradients of 0."""
    loss, logits, hidden, gradients, dx = _forward(x, labels, weights, biases, config, with_gradients=True)
    return loss, logits, hidden, (*gradients, dx)


def _forward(x, labels, weights, biases, config, *, with_gradients):
    sizes, layers, N = layer_sizes(weights), len(weights), x.shape[1]
    widths = row_widths(sizes)
    products, row_operands = (_all_products if with_gradients else _forward_products)(widths)
    matrices, piece_columns = list(weights), _piece_columns(widths[0])
    if with_gradients:
        w = jnp.pad(weights[0].T, [(0, width - n) for width, n in zip(widths[:2], sizes[:2], strict=True)])
        pieces = w.reshape(-1, piece_columns, widths[1]).swapaxes(0, 1).reshape(piece_columns, -1)
        matrices += [*(w.T for w in reversed(weights[1:])), pieces]
    packed = pack(matrices, products, biases, widths[1:])

    def body(x, labels, weights, biases, loss, logits, hidden, gradients, dx, stages, loaded, operands, *, block):
        # `operands` are x and each hidden layer's outputs in shared memory, one row per example.
        examples = pl.ds(block * EXAMPLES, EXAMPLES)
        start, multiply = stream(products, weights, stages, loaded)
        start()
        labels = read(labels, examples, value_a_row())
        _read_columns(x, examples, operands[0], loads=8 if with_gradients else 4)
        first_bias = sum(inputs * outputs for inputs, outputs in products)
        for layer, ref in enumerate((*hidden, None)):
            width = widths[layer + 1]
            bias = load(biases.at[pl.ds(first_bias, width)], value_a_column(), optimized=False)
            z = multiply(operands[layer])
            z += lax.broadcast_in_dim(bias, z.shape, [1])
            first_bias += width
            if ref is not None:
                h = jnp.maximum(z, 0.0)
                _put(h, sizes[layer + 1], operands[layer + 1], ref.at[examples], bulk=with_gradients, one=True)
        store(logits.at[examples], z)
        softmax_loss, softmax_gradient = _softmax(z, labels, sizes[-1])
        rows_loss = softmax_loss()
        store(loss.at[examples], jnp.where(_are_valid(labels, sizes[-1]), rows_loss, jnp.nan))
        if not with_gradients:
            return
        valid = spread(_are_valid(labels, sizes[-1]), z)
        gradient = jnp.where(valid, softmax_gradient(), 0.0)
        for i, layer in enumerate(reversed(range(layers))):
            operand = operands[layer + 1]
            # The gradient overwrites h, which is not read again.
            if layer < layers - 1:
                gradient = jnp.where(load(operand, plgpu.Layout.WGMMA, optimized=False) > 0, gradient, 0.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()
            _put(gradient, sizes[layer + 1], operand, gradients[i].at[examples], bulk=True)
            if layer:
                gradient = multiply(operand)
        multiply(operands[1], lambda i, rows: _store_columns(rows, dx, examples, i * piece_columns))
        plgpu.wait_smem_to_gmem(0)

    return launch(
        body,
        x,
        labels,
        packed.reshape(-1, SLICE),
        packed,
        out=(
            *(float32_struct(N), float32_struct(N, widths[-1])),
            tuple(float32_struct(N, n) for n in widths[1:-1]),
            tuple(float32_struct(N, n) for n in reversed(widths[1:])) if with_gradients else None,
            float32_struct(widths[0], N) if with_gradients else None,
        ),
        grid={"block": N // EXAMPLES},
        scratch=shared_memory(products, row_operands, config.stages),
        barriers=not with_gradients,
        name="mlp_softmax_cross_entropy" + ("_forward_and_gradients" if with_gradients else ""),
    )


@kernel(
    plan=lambda dy, labels, logits, hidden, weights: _plan(_backward_products, logits.dtype, dy.shape[0], weights),
    capability=(9, 0),
)
def backward(
    dy: Array, labels: Array, logits: Array, hidden: tuple[Array, ...], weights: tuple[Array, ...], *, config: Config
) -> tuple[Array, ...]:
    """Compute the gradients of `Σ dy * loss`. dy is `(N,)`, and the others are arguments and results of `forward`.

    Return the gradients `(N, widths[i])` with respect to the logits and to each hidden layer's sums before ReLU, last
    layer first, then dx `(widths[0], N)`, with the widths of `forward`. Layer i's gradients are zero in the columns
    after its outputs.
    """
    sizes, N = layer_sizes(weights), dy.size
    widths = row_widths(sizes)
    all_products, row_operands = _backward_products(widths)
    packed = pack([w.T for w in reversed(weights)], all_products)

    def body(dy, labels, logits, weights, hidden, gradients, dx, stages, loaded, operands, *, block):
        # `operands` are the gradients with respect to each layer's sums, before any ReLU, in shared memory.
        examples = pl.ds(block * EXAMPLES, EXAMPLES)
        products = all_products if dx is not None else all_products[:-1]
        if products:
            start, multiply = stream(products, weights, stages, loaded)
            start()
        z = read(logits, examples, plgpu.Layout.WGMMA)
        dy = read(dy, examples, value_a_row())
        labels = read(labels, examples, value_a_row())
        dy = jnp.where(_are_valid(labels, sizes[-1]) | (dy == 0), dy, jnp.nan)
        gradient = spread(dy, z) * _softmax(z, labels, sizes[-1])[1]()
        for i, layer in enumerate(reversed(range(len(operands)))):
            _put(gradient, sizes[layer + 1], operands[layer], gradients[i].at[examples], bulk=False)
            # These loads run during the product.
            h = read(hidden[layer - 1], examples, plgpu.Layout.WGMMA) if layer else None
            if i < len(products):
                gradient = multiply(operands[layer])
            if layer:
                gradient = jnp.where(h > 0, gradient, 0.0)
        if dx is not None:
            _store_columns(gradient, dx, examples)

    gradients, dx = launch(
        body,
        dy,
        labels,
        logits,
        packed.reshape(-1, SLICE),
        hidden,
        out=(tuple(float32_struct(N, n) for n in reversed(widths[1:])), float32_struct(widths[0], N)),
        skippable=[1],
        grid={"block": N // EXAMPLES},
        scratch=shared_memory(all_products, row_operands, config.stages),
        name="mlp_softmax_cross_entropy_backward",
    )
    return *gradients, dx


def _read_columns(x: Any, examples: Any, operand: Any, loads: int) -> None:
    """Copy columns of x to rows of `operand` in shared memory, at most `loads` slices of 32 inputs at once."""
    # A warp copies 4 inputs of 8 examples at a time. It reads one sector per input, and writes without bank conflicts.
    tiling = plgpu.Tiling(((EXAMPLES, SLICE), (16, SLICE), (8, 4), (1,)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
    count = operand.shape[1] // SLICE
    loads = largest_divisor(count, loads)

    def read_group(group, _):
        columns = [pl.ds((group * loads + i) * SLICE, SLICE) for i in range(loads)]
        slices = [load(x.at[c, examples].transpose((1, 0)), layout, optimized=False) for c in columns]
        for c, values in zip(columns, slices, strict=True):
            store(operand.at[:, c], rounded_to_tf32(values, layout))

    lax.fori_loop(0, count // loads, read_group, None)
    plgpu.commit_smem()


def _put(rows: Array, outputs: int, operand: Any, ref: Any, *, bulk: bool, one: bool = False) -> None:
    """Store `rows`, rounded to TF32, to `operand` in shared memory, and to `ref` in device memory. Columns from
    `outputs` on become 0, because padding that has become NaN would reach the next layer. With `one`, column `outputs`
    becomes 1, for the next layer's db. With `bulk`, the TMA copy to `ref` may still run on return."""
    width = rows.shape[1]
    # Only the last columns have padding. Masks of all columns would compile slowly.
    for first, stop in ((0, width - SLICE), (width - SLICE, width)):
        if first == stop:
            continue
        part, columns = rounded_to_tf32(rows[:, first:stop], plgpu.Layout.WGMMA), pl.ds(first, stop - first)
        if stop == width:
            part = _mask_padding(part, outputs - first, one=one)
        operand[:, columns] = part
        if not bulk:
            store(ref.at[:, columns], part)
    plgpu.commit_smem()
    if bulk:
        plgpu.copy_smem_to_gmem(operand, ref)


def _store_columns(rows: Array, columns: Any, examples: Any, first: int = 0) -> None:
    for k in range(0, rows.shape[1], SLICE):
        values = plgpu.layout_cast(rows[:, k : k + SLICE], plgpu.Layout.WGMMA_TRANSPOSED)
        store(columns.at[pl.ds(first + k, SLICE), examples].transpose((1, 0)), values)


def _mask_padding(rows: Array, count: int, *, one: bool) -> Array:
    column = plgpu.broadcasted_iota(jnp.int32, rows.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(column < count, rows, jnp.where(column == count, 1.0, 0.0) if one else 0.0)


def _softmax(z: Array, labels: Array, classes: int) -> tuple[Callable[[], Array], Callable[[], Array]]:
    """Return two functions that compute the loss of each row of logits, and its gradient with respect to the row."""
    column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
    z = jnp.where(column < classes, z, -jnp.inf)
    shifted_logits = z - spread(jnp.max(z, axis=1), z)
    exponentials = jnp.exp(shifted_logits)
    total, is_label = jnp.sum(exponentials, axis=1), column == spread(labels, z)

    def loss():
        return jnp.log(total) - jnp.sum(jnp.where(is_label, shifted_logits, 0.0), axis=1)

    def gradient():
        return exponentials / spread(total, exponentials) - jnp.where(is_label, 1.0, 0.0)

    return loss, gradient


def _are_valid(labels: Array, classes: int) -> Array:
    return (labels >= 0) & (labels < classes)
