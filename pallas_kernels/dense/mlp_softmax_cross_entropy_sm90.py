"""Dense layers with ReLU between them, softmax, and cross-entropy, one kernel per direction on Hopper's tensor cores.

A CTA takes 64 examples through all layers. Their activations stay in shared memory, where the tensor cores read them.
The weights stream through a ring of stages in shared memory, in slices of 32 of a layer's inputs. The slices are packed
in the order of their use. The sums of each product are in registers, where bias, ReLU, and softmax are computed. The
forward writes the losses, the logits, and each layer's outputs; the backward writes the gradients with respect to these
and to x. Products are in float32 rounded to TF32; sums, softmax, and loss are in float32.

Rows are padded to widths that the tensor cores support. A layer's outputs are padded to the next multiple of 32 above
their number, which leaves room for a one after them. With this one, the next layer's weight gradient contains its bias
gradient as well.

In small batches, launches and latencies dominate the time. One kernel then computes the forward and the gradients of
each example's loss separately. A second kernel multiplies these by dy and computes the layers' gradients.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import (
    LANES,
    OPERAND_BYTES,
    largest_divisor,
    load,
    operand,
    quotient,
    remainder,
    rounded_to_tf32,
    store,
    value_a_column,
    value_a_row,
)
from pallas_kernels.core.mosaic import plgpu
from pallas_kernels.core.pipeline import Ring
from pallas_kernels.core.tiles import kernel

EXAMPLES = 64
"""Examples per CTA: the 64 rows of a wgmma (PTX ISA). The batch is a multiple of it."""

_ITEM_BYTES = 4
"""Bytes of a float32."""
_SLICE = OPERAND_BYTES // _ITEM_BYTES
"""Inputs of a layer in a slice of its weights: the number of float32 values that fills an operand's row."""
_MAX_COLUMNS = 256
"""Most columns of a wgmma (PTX ISA)."""
_PIECE_COLUMNS = 128
"""Columns of the gradient with respect to x that are computed at once where the layers' outputs stay in shared memory
as well. Chosen by hand; not tuned."""
_MAX_STAGES = 8
"""Most slices in the ring. Chosen by hand: latency bounds the kernels, and more slices gain nothing
(docs/lab/2026-11-21-dense.md)."""
_RESERVED_BYTES = 11 * 1024
"""Bytes of shared memory that the ring and the operands leave free: Mosaic takes 2 KiB for sums across warps, barriers
need less than 1. The rest is chosen so that LeNet's layers keep the numbers of stages with which
docs/lab/2026-11-21-dense.md was measured."""
_MAX_SINGLE_KERNEL_EXAMPLES = 1024
"""Largest batch for which one kernel computes rows and gradients. Measured at 1024, where it pays, and at 8192, where
it does not: docs/lab/2026-11-21-dense.md."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How weights are streamed.

    Attributes:
      stages: slices in flight; one in `weighed_gradients`, where each CTA has a single step.
    """

    stages: int


# ------------------------------------------------------------------------------------------------------------- layers


def widths(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row widths of the inputs, of each hidden layer's outputs followed by a one, and of the logits."""
    inputs, *hidden, classes = sizes
    return tuple(-(-n // _SLICE) * _SLICE for n in (inputs, *(n + 1 for n in hidden), classes))


@dataclasses.dataclass(frozen=True)
class _Network:
    """The layers, and (inputs, outputs) of the products that take rows through them.

    Attributes:
      sizes: numbers of inputs and of each layer's outputs.
    """

    sizes: tuple[int, ...]

    @classmethod
    def from_weights(cls, weights: Sequence[Any]) -> "_Network":
        return cls((weights[0].shape[1], *(w.shape[0] for w in weights)))

    @property
    def layers(self) -> int:
        return len(self.sizes) - 1

    @property
    def classes(self) -> int:
        return self.sizes[-1]

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        return widths(self.sizes)

    @property
    def forward_products(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.widths))

    @property
    def backward_products(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(reversed(self.widths)))

    @property
    def pieces(self) -> list[int]:
        """Widths of the pieces in which the gradient with respect to x is computed."""
        return [min(_PIECE_COLUMNS, self.widths[0] - n) for n in range(0, self.widths[0], _PIECE_COLUMNS)]

    @property
    def all_products(self) -> list[tuple[int, int]]:
        return [*self.forward_products, *self.backward_products[:-1], *((self.widths[1], n) for n in self.pieces)]

    def stages(self, products: list[tuple[int, int]], operands: tuple[int, ...]) -> int:
        """Return the number of slices of the weights of `products` that fit shared memory together with these
        operands."""
        available_bytes = device.target().shared_bytes - _RESERVED_BYTES - EXAMPLES * _ITEM_BYTES * sum(operands)
        return min(_MAX_STAGES, available_bytes // (OPERAND_BYTES * max(outputs for _, outputs in products)))

    @property
    def forward_stages(self) -> int:
        return self.stages(self.forward_products, self.widths[:-1])

    @property
    def backward_stages(self) -> int:
        return self.stages(self.backward_products, self.widths[1:])

    @property
    def all_stages(self) -> int:
        return self.stages(self.all_products, self.widths)

    def scratch(self, products: list[tuple[int, int]], operands: tuple[int, ...], stages: int) -> list[Any]:
        """Return the ring's stages, their barriers, and the operands."""
        return [
            operand((stages, max(outputs for _, outputs in products), _SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=stages),
            tuple(operand((EXAMPLES, n), jnp.float32) for n in operands),
        ]


def _unsupported(network: _Network, dtype: Any, N: int) -> str | None:
    """Return why `forward` and `backward`, which are used together, are unsupported, or None."""
    if dtype != jnp.float32:
        return f"dtype {dtype}, only float32"
    if N == 0 or N % EXAMPLES:
        return f"a batch of {N}, only multiples of {EXAMPLES}"
    if max(network.widths) > _MAX_COLUMNS:
        return f"rows as wide as {max(network.widths)} when padded, at most {_MAX_COLUMNS}"
    return _unsupported_stages(min(network.forward_stages, network.backward_stages))


def _unsupported_stages(stages: int) -> str | None:
    return None if stages >= 2 else "layers whose activations leave no shared memory for two slices of the weights"


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# ---------------------------------------------------------------------------------------------------- packed weights


def _slices(matrices: Sequence[Array], products: list[tuple[int, int]]) -> list[Array]:
    """Return matrices padded with zeros, rounded to TF32, and divided into consecutive slices of their inputs."""
    padded_matrices = (
        jnp.pad(w, ((0, outputs - w.shape[0]), (0, inputs - w.shape[1])))
        for w, (inputs, outputs) in zip(matrices, products, strict=True)
    )
    return [
        lax.reduce_precision(w, 8, 10).reshape(w.shape[0], -1, _SLICE).swapaxes(0, 1).ravel()  # TF32
        for w in padded_matrices
    ]


def _pack(slices: list[Array], biases: Sequence[Array], network: _Network) -> Array:
    """Return the slices, then the biases padded to the widths of rows; a one follows each bias but the last."""
    vectors = [b if layer == len(biases) - 1 else jnp.append(b, 1.0) for layer, b in enumerate(biases)]
    rows = [jnp.pad(b, (0, width - b.size)) for b, width in zip(vectors, network.widths[1:], strict=True)]
    # Bulk copies read tiles of eight rows of `_SLICE` elements.
    padding = -sum(network.widths[1:]) % (8 * _SLICE)
    return jnp.concatenate([*slices, *rows, jnp.zeros(padding, jnp.float32)])


@dataclasses.dataclass(frozen=True)
class _Stream:
    """Products of operands and packed weights, whose slices come through a ring in the order of their use.

    Attributes:
      products: (inputs, outputs) of each product, in this order.
      weights: all slices, one after the other, with one row per output.
      stages, loaded: stages and barriers of the ring, which no other stream uses.
    """

    products: list[tuple[int, int]]
    weights: Any
    stages: Any
    loaded: Any

    @functools.cached_property
    def steps(self) -> list[range]:
        """Indices of each product's slices."""
        ends = list(itertools.accumulate(inputs // _SLICE for inputs, _ in self.products))
        return [range(start, end) for start, end in itertools.pairwise([0, *ends])]

    @property
    def end(self) -> int:
        return self.steps[-1].stop

    def ring(self, fetched: range) -> Ring:
        """Return the ring, which fetches only the slices with these indices."""
        return Ring(self.stages.shape[0], functools.partial(self.copy, fetched), self.loaded)

    def copy(self, fetched: range, step: Any, stage: Any, barrier: Any) -> None:
        row = 0
        for steps, (_, outputs) in zip(self.steps, self.products, strict=True):
            start, stop = max(steps.start, fetched.start), min(steps.stop, fetched.stop)
            rows = pl.ds(row + (step - steps.start) * outputs, outputs)
            copy = functools.partial(self.copy_rows, rows, self.stages.at[stage, pl.ds(0, outputs)], barrier)
            if start < stop:
                pl.when((start <= step) & (step < stop))(copy)
            row += len(steps) * outputs

    def copy_rows(self, rows: Any, stage: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(self.weights.at[rows], stage, barrier)

    def start(self) -> None:
        self.ring(range(self.end)).prefetch(min(self.stages.shape[0], self.end))

    def multiply(self, product: int, operand: Any) -> Array:
        """Return the operand times the weights of a product. Products must be requested in their order."""
        steps, (_, outputs) = self.steps[product], self.products[product]
        # While one product runs, the previous product's stage is filled. The first product has none before it.
        ahead = self.stages.shape[0] - 1
        fetched = range(max(steps.start, 1) + ahead, min(steps.stop + ahead, self.end))
        ring = self.ring(fetched)

        def add_slice(k, sums):
            step = steps.start + k
            ring.wait(step)
            weights = self.stages.at[ring.stage(step), pl.ds(0, outputs)]
            plgpu.wgmma(sums, operand.at[:, pl.ds(k * _SLICE, _SLICE)], weights.transpose((1, 0)))
            if fetched:
                # Every warp has finished the previous product, so the stage of its slice may be filled.
                plgpu.wgmma_wait(1)
                plgpu.commit_smem()
                ring.fetch(step + ahead)

        def add_slices(sums):
            lax.fori_loop(0, len(steps), lambda k, _: add_slice(k, sums), None)
            plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(add_slices, plgpu.ACC((EXAMPLES, outputs)))


# ------------------------------------------------------------------------------------------------ steps of the kernels


def _read(ref: Any, examples: Any, layout: Any) -> Array:
    return load(ref.at[examples], layout, optimized=False)


def _turned() -> Any:
    """Return the layout of a slice that moves from columns of examples in device memory to rows of an operand.

    A warp has 8 examples by 4 inputs at once, one element per thread. The 8 are adjacent in device memory, a sector.
    The 4 are 16 bytes of a row of the operand, and the 8 rows are in different banks.
    """
    tiling = plgpu.Tiling(((EXAMPLES, _SLICE), (16, _SLICE), (8, 4), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)


def _read_columns(x: Any, examples: Any, operand: Any, loads: int) -> None:
    """Read examples from columns into rows of the operand, with the loads of `loads` slices under way at once."""
    count = operand.shape[1] // _SLICE
    loads = largest_divisor(count, loads)

    def read(group, _):
        columns = [pl.ds((group * loads + i) * _SLICE, _SLICE) for i in range(loads)]
        slices = [load(x.at[c, examples].transpose((1, 0)), _turned(), optimized=False) for c in columns]
        for c, values in zip(columns, slices, strict=True):
            store(operand.at[:, c], rounded_to_tf32(values))

    lax.fori_loop(0, count // loads, read, None)
    plgpu.commit_smem()


def _put(rows: Array, operand: Any, ref: Any, *, bulk: bool) -> None:
    """Store rows to the operand and to `ref`. With `bulk`, a copy from the operand to `ref` still runs on return."""
    operand[...] = rows
    plgpu.commit_smem()
    if bulk:
        plgpu.copy_smem_to_gmem(operand, ref)
    else:
        store(ref, rows)


def _store_columns(rows: Array, columns: Any, examples: Any, first: int = 0) -> None:
    for k in range(0, rows.shape[1], _SLICE):
        values = plgpu.layout_cast(rows[:, k : k + _SLICE], plgpu.Layout.WGMMA_TRANSPOSED)
        store(columns.at[pl.ds(first + k, _SLICE), examples].transpose((1, 0)), values)


def _logits(stream: _Stream, network: _Network, refs: Any, examples: Any, *, bulk: bool) -> Array:
    """Compute the layers' products, biases, and ReLUs, from one operand to the next."""
    start = sum(inputs * outputs for inputs, outputs in stream.products)
    for layer, ref in enumerate((*refs.hidden, None)):
        width = network.widths[layer + 1]
        bias = load(refs.biases.at[pl.ds(start, width)], value_a_column(), optimized=False)
        z = stream.multiply(layer, refs.operands[layer])
        z += lax.broadcast_in_dim(bias, z.shape, [1])
        start += width
        if ref is not None:
            _put(rounded_to_tf32(jnp.maximum(z, 0.0)), refs.operands[layer + 1], ref.at[examples], bulk=bulk)
    return z


class _Softmax(NamedTuple):
    """The logits minus their maximum, -inf after the last class; exponentials and their sums; and the label's mask."""

    shifted_logits: Array
    exponentials: Array
    total: Array
    label_mask: Array

    def loss(self) -> Array:
        return jnp.log(self.total) - jnp.sum(jnp.where(self.label_mask, self.shifted_logits, 0.0), axis=1)

    def gradient(self) -> Array:
        return self.exponentials / _spread(self.total, self.exponentials) - jnp.where(self.label_mask, 1.0, 0.0)


def _softmax(z: Array, labels: Array, classes: int) -> _Softmax:
    column = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=plgpu.Layout.WGMMA)
    z = jnp.where(column < classes, z, -jnp.inf)
    shifted_logits = z - _spread(jnp.max(z, axis=1), z)
    exponentials = jnp.exp(shifted_logits)
    return _Softmax(shifted_logits, exponentials, jnp.sum(exponentials, axis=1), column == _spread(labels, z))


def _valid(labels: Array, classes: int) -> Array:
    return (labels >= 0) & (labels < classes)


def _spread(values: Array, block: Array) -> Array:
    return lax.broadcast_in_dim(values, block.shape, [0])


# --------------------------------------------------------------------------------------------------------- the forward


class _ForwardRefs(NamedTuple):
    """References of `forward`, which has no gradients, and of `forward_and_gradients`."""

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


def _forward(network: _Network, *refs: Any, block: Any) -> None:
    refs, examples = _ForwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES)
    stream = _Stream(network.forward_products, refs.weights, refs.stages, refs.loaded)
    _write_losses(stream, network, refs, examples, loads=4, bulk=False)


def _write_losses(
    stream: _Stream, network: _Network, refs: Any, examples: Any, *, loads: int, bulk: bool
) -> tuple[Array, _Softmax]:
    """Compute the forward, up to the logits and the losses. Return the labels and the softmax."""
    stream.start()
    labels = _read(refs.labels, examples, value_a_row())
    _read_columns(refs.x, examples, refs.operands[0], loads)
    z = _logits(stream, network, refs, examples, bulk=bulk)
    store(refs.logits.at[examples], z)
    softmax = _softmax(z, labels, network.classes)
    loss = softmax.loss()
    store(refs.loss.at[examples], jnp.where(_valid(labels, network.classes), loss, jnp.nan))
    return labels, softmax


def _forward_unsupported(x, labels, weights, biases):
    return _unsupported(_Network.from_weights(weights), x.dtype, x.shape[1])


def _forward_heuristic(x, labels, weights, biases):
    return Config(_Network.from_weights(weights).forward_stages)


@kernel(unsupported=_forward_unsupported, heuristic=_forward_heuristic, capability=(9, 0))
def forward(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...]]:
    """Compute `h = max(0, w h + b)` for each layer but the last, the logits, and
    `loss = logsumexp(logits) - logits[label]`.

    Args:
      x: `(widths[0], N)`, one example per column, as the convolutions return it.
      labels: `(N,)` int32; a label that is no class makes its example's loss NaN.
      weights, biases: `(outputs, inputs)` and `(outputs,)` of each layer.

    Returns:
      loss `(N,)`, logits `(N, widths[-1])`, and each h `(N, widths[layer])`, where a one follows the layer's outputs.
    """
    network, N = _Network.from_weights(weights), x.shape[1]
    packed = _pack(_slices(weights, network.forward_products), biases, network)
    loss, logits, hidden, *_ = launch(
        functools.partial(_forward, network),
        x,
        labels,
        packed.reshape(-1, _SLICE),
        packed,
        out=(
            _struct(N),
            _struct(N, network.widths[-1]),
            tuple(_struct(N, n) for n in network.widths[1:-1]),
            None,
            None,
        ),
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.forward_products, network.widths[:-1], config.stages),
        name="mlp_softmax_cross_entropy",
    )
    return loss, logits, hidden


# -------------------------------------------------------------------------------------------------------- the backward


class _BackwardRefs(NamedTuple):
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


def _backward(network: _Network, *refs: Any, block: Any) -> None:
    refs, examples = _BackwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES)
    stream = _Stream(network.backward_products, refs.weights, refs.stages, refs.loaded)
    stream.start()
    z = _read(refs.logits, examples, plgpu.Layout.WGMMA)
    dy = _read(refs.dy, examples, value_a_row())
    labels = _read(refs.labels, examples, value_a_row())
    dy = jnp.where(_valid(labels, network.classes) | (dy == 0), dy, jnp.nan)
    gradient = _spread(dy, z) * _softmax(z, labels, network.classes).gradient()
    for i, layer in enumerate(reversed(range(network.layers))):
        _put(rounded_to_tf32(gradient), refs.operands[layer], refs.gradients[i].at[examples], bulk=False)
        # These loads are under way during the product.
        h = _read(refs.hidden[layer - 1], examples, plgpu.Layout.WGMMA) if layer else None
        gradient = stream.multiply(i, refs.operands[layer])
        if layer:
            gradient = jnp.where(h > 0, gradient, 0.0)
    _store_columns(gradient, refs.dx, examples)


def _backward_unsupported(dy, labels, logits, hidden, weights):
    return _unsupported(_Network.from_weights(weights), logits.dtype, dy.shape[0])


def _backward_heuristic(dy, labels, logits, hidden, weights):
    return Config(_Network.from_weights(weights).backward_stages)


@kernel(unsupported=_backward_unsupported, heuristic=_backward_heuristic, capability=(9, 0))
def backward(
    dy: Array, labels: Array, logits: Array, hidden: tuple[Array, ...], weights: tuple[Array, ...], *, config: Config
) -> tuple[Array, ...]:
    """Compute the gradients of dy times the losses with respect to the logits, each layer's sums before ReLU, and x.

    Args:
      dy: `(N,)`.
      labels, weights: arguments of the forward.
      logits, hidden: results of the forward.

    Returns:
      Gradients of the shape of the logits and of each h, last first, zero after a layer's outputs, and of the shape of
      x.
    """
    network, N = _Network.from_weights(weights), dy.size
    packed = jnp.concatenate(_slices([w.T for w in reversed(weights)], network.backward_products))
    gradients, dx = launch(
        functools.partial(_backward, network),
        dy,
        labels,
        logits,
        packed.reshape(-1, _SLICE),
        hidden,
        out=(tuple(_struct(N, n) for n in reversed(network.widths[1:])), _struct(network.widths[0], N)),
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.backward_products, network.widths[1:], config.stages),
        name="mlp_softmax_cross_entropy_backward",
    )
    return *gradients, dx


# ---------------------------------------------------------------------------------- forward and gradients in one kernel


def _forward_and_gradients(network: _Network, *refs: Any, block: Any) -> None:
    refs, examples, layers = _ForwardRefs(*refs), pl.ds(block * EXAMPLES, EXAMPLES), network.layers
    stream = _Stream(network.all_products, refs.weights, refs.stages, refs.loaded)
    labels, softmax = _write_losses(stream, network, refs, examples, loads=8, bulk=True)
    valid = _spread(_valid(labels, network.classes), softmax.exponentials)
    gradient = jnp.where(valid, softmax.gradient(), 0.0)
    for i, layer in enumerate(reversed(range(layers))):
        operand = refs.operands[layer + 1]
        # The gradient overwrites h, which is not read again.
        if layer < layers - 1:
            gradient = jnp.where(load(operand, plgpu.Layout.WGMMA, optimized=False) > 0, gradient, 0.0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
        _put(rounded_to_tf32(gradient), operand, refs.gradients[i].at[examples], bulk=True)
        if layer:
            gradient = stream.multiply(layers + i, operand)
    for i in range(len(network.pieces)):
        piece = stream.multiply(2 * layers - 1 + i, refs.operands[1])
        _store_columns(piece, refs.dx, examples, i * _PIECE_COLUMNS)
    plgpu.wait_smem_to_gmem(0)


def _forward_and_gradients_unsupported(x, labels, weights, biases):
    reason = _forward_unsupported(x, labels, weights, biases)
    return reason or _unsupported_stages(_Network.from_weights(weights).all_stages)


def _forward_and_gradients_heuristic(x, labels, weights, biases):
    return Config(_Network.from_weights(weights).all_stages) if x.shape[1] <= _MAX_SINGLE_KERNEL_EXAMPLES else None


@kernel(unsupported=_forward_and_gradients_unsupported, heuristic=_forward_and_gradients_heuristic, capability=(9, 0))
def forward_and_gradients(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...], *, config: Config
) -> tuple[Array, Array, tuple[Array, ...], tuple[Array, ...]]:
    """Compute `forward`, and the results of `backward` for dy = 1.

    Args:
      x, labels, weights, biases: arguments of `forward`.

    Returns:
      loss, logits, and each h, as `forward` returns them, and the gradients of each example's loss, as `backward`
      returns them. The gradients are 0 for an example whose label is no class.
    """
    network, N = _Network.from_weights(weights), x.shape[1]
    first_weights = weights[0].T
    ends = itertools.accumulate(network.pieces)
    pieces = [first_weights[end - n : end] for n, end in zip(network.pieces, ends, strict=True)]
    matrices = [*weights, *(w.T for w in reversed(weights[1:])), *pieces]
    packed = _pack(_slices(matrices, network.all_products), biases, network)
    loss, logits, hidden, gradients, dx = launch(
        functools.partial(_forward_and_gradients, network),
        x,
        labels,
        packed.reshape(-1, _SLICE),
        packed,
        out=(
            *(_struct(N), _struct(N, network.widths[-1])),
            tuple(_struct(N, n) for n in network.widths[1:-1]),
            tuple(_struct(N, n) for n in reversed(network.widths[1:])),
            _struct(network.widths[0], N),
        ),
        grid={"block": N // EXAMPLES},
        scratch=network.scratch(network.all_products, network.widths, config.stages),
        barriers=False,
        name="mlp_softmax_cross_entropy_forward_and_gradients",
    )
    return loss, logits, hidden, (*gradients, dx)


# --------------------------------------------------------------------------------------- the gradients of the layers


class _WeighedGradientsRefs(NamedTuple):
    dy: Any
    x: Any
    dx: Any
    hidden: tuple
    gradients: tuple
    weighed_dx: Any
    sums: tuple
    left: Any
    right: Any
    tile_stored: Any


@dataclasses.dataclass(frozen=True)
class _WeighedGradients:
    """The tiles of all layers' dw, `EXAMPLES x _SLICE` each, layer by layer, followed by the tiles of dx."""

    network: _Network

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of tiles of each layer. The first layer has one more column, for x's ones."""
        widths = itertools.pairwise(self.network.widths)
        return [(-(-n // EXAMPLES), m // _SLICE + (layer == 0)) for layer, (m, n) in enumerate(widths)]

    @property
    def first_tiles(self) -> list[int]:
        """Index of the first tile of each layer, and of dx."""
        return [0, *itertools.accumulate(rows * columns for rows, columns in self.grids)]

    @property
    def tiles(self) -> int:
        return self.first_tiles[-1] + self.network.widths[0] // _SLICE

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Shape of each layer's dw, in whole tiles."""
        return [(rows * EXAMPLES, columns * _SLICE) for rows, columns in self.grids]

    def body(self, *refs, part, tile, warpgroup):
        refs, first_tiles = _WeighedGradientsRefs(*refs), self.first_tiles
        lanes = pl.ds(warpgroup * EXAMPLES, EXAMPLES)
        examples = pl.ds(part * LANES + warpgroup * EXAMPLES, EXAMPLES)
        for layer in range(self.network.layers):
            make = functools.partial(self.make_tile, refs, layer, part, tile, warpgroup, lanes, examples)
            pl.when((first_tiles[layer] <= tile) & (tile < first_tiles[layer + 1]))(make)
        pl.when(tile >= first_tiles[-1])(functools.partial(self.weigh_dx, refs, part, tile, warpgroup))

    def make_tile(self, refs, layer, part, tile, warpgroup, lanes, examples):
        """Compute a tile of a layer's dw for `LANES` examples. Each warpgroup brings half of these, and computes half
        the tile."""
        index, half, (_, columns) = tile - self.first_tiles[layer], _SLICE // 2, self.grids[layer]
        row, column = quotient(index, columns) * EXAMPLES, remainder(index, columns) * _SLICE
        self.bring(refs, layer, row, column, lanes, examples)
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.tile_stored)
        plgpu.barrier_wait(refs.tile_stored)

        def multiply(sums):
            plgpu.wgmma(sums, refs.left, refs.right.at[pl.ds(warpgroup * half, half)].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return sums[...]

        columns = pl.ds(column + warpgroup * half, half)
        sums = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, half)))
        store(refs.sums[layer].at[part, pl.ds(row, EXAMPLES), columns], sums)

    def bring(self, refs, layer, row, column, lanes, examples):
        """Bring a tile's gradients times dy, and its inputs, to shared memory, transposed and rounded."""
        widths, gradients = self.network.widths, refs.gradients[-1 - layer]
        weight = _read(refs.dy, examples, value_a_row())
        # A layer's last tile may have half its rows. The other half repeats rows, and its sums are not used.
        starts = [jnp.minimum(row + n, widths[layer + 1] - _SLICE) for n in (0, _SLICE)]
        tiles = [load(gradients.at[examples, pl.ds(n, _SLICE)], plgpu.Layout.WGMMA, optimized=False) for n in starts]
        if layer:
            inputs = load(
                refs.hidden[layer - 1].at[examples, pl.ds(column, _SLICE)], plgpu.Layout.WGMMA, optimized=False
            )
            inputs = plgpu.layout_cast(inputs, plgpu.Layout.WGMMA_TRANSPOSED)
        else:
            columns = pl.ds(jnp.minimum(column, widths[0] - _SLICE), _SLICE)
            inputs = load(
                refs.x.at[columns, examples].transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED, optimized=False
            )
            inputs = rounded_to_tf32(jnp.where(column < widths[0], inputs, 1.0))
        for n, left in zip((0, _SLICE), tiles, strict=True):
            left = plgpu.layout_cast(rounded_to_tf32(left * _spread(weight, left)), plgpu.Layout.WGMMA_TRANSPOSED)
            store(refs.left.at[pl.ds(n, _SLICE), lanes].transpose((1, 0)), left)
        store(refs.right.at[:, lanes].transpose((1, 0)), inputs)

    def weigh_dx(self, refs, part, tile, warpgroup):
        half = _SLICE // 2
        row, lanes = (tile - self.first_tiles[-1]) * _SLICE + warpgroup * half, pl.ds(part * LANES, LANES)
        weight, values = refs.dy[lanes], [refs.dx[row + n, lanes] for n in range(half)]
        for n, value in enumerate(values):
            refs.weighed_dx[row + n, lanes] = value * weight


def _weighed_gradients_unsupported(dy, x, hidden, gradients, *, sizes):
    return None if dy.size and dy.size % LANES == 0 else f"a batch of {dy.size}, only multiples of {LANES}"


def _weighed_gradients_heuristic(dy, x, hidden, gradients, *, sizes):
    return Config(stages=1)


@kernel(unsupported=_weighed_gradients_unsupported, heuristic=_weighed_gradients_heuristic, capability=(9, 0))
def weighed_gradients(
    dy: Array,
    x: Array,
    hidden: tuple[Array, ...],
    gradients: tuple[Array, ...],
    *,
    sizes: tuple[int, ...],
    config: Config,
) -> tuple[Array, ...]:
    """Compute `dx = dy g`, `dw[o, i] = Σ dy g[n, o] h[n, i]`, and `db[o] = Σ dy g[n, o]`, summed over the examples n.

    Here g is the gradient of each example's loss, h a layer's input, and o and i are a layer's outputs and inputs. A
    CTA computes 64 x 32 elements of a layer's dw, for 128 examples. Columns of ones after x's columns yield the first
    db. Further CTAs multiply dx by dy.

    Args:
      dy: `(N,)`, N a multiple of 128.
      x, hidden, gradients: argument and results of `forward_and_gradients`.
      sizes: sizes of the layers, inputs first.

    Returns:
      dx of x's shape, and (dw, db) of each layer, one after the other.
    """
    parts = dy.size // LANES
    *gradients, dx = gradients
    network = _Network(sizes)
    division = _WeighedGradients(network)
    dx, sums = launch(
        division.body,
        dy,
        x,
        dx,
        hidden,
        gradients,
        out=(_struct(*dx.shape), tuple(_struct(parts, *shape) for shape in division.shapes)),
        grid={"part": parts, "tile": division.tiles},
        warpgroups=2,
        scratch=[
            operand((EXAMPLES, LANES), jnp.float32),
            operand((_SLICE, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        barriers=False,
        name="mlp_softmax_cross_entropy_weighed_gradients",
    )
    layers = []
    for layer, (products, (inputs, outputs)) in enumerate(zip(sums, itertools.pairwise(sizes), strict=True)):
        bias = inputs if layer else network.widths[0]
        layers += [jnp.sum(products[:, :outputs, columns], axis=0) for columns in (slice(inputs), bias)]
    return dx, *layers
