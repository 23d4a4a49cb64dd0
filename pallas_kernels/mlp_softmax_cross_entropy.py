"""Dense layers with ReLU between them, softmax and cross-entropy, in one kernel each way on Hopper's tensor cores.

A program takes 64 examples through all layers. Their activations stay in shared memory, where the tensor cores read
them; the weights stream by in slices of 32 of their inputs, packed one after the other in the order of their use.
Products are of float32 rounded to TF32, sums, softmax and loss are float32.

Rows are filled up to widths that the tensor cores take: a layer's outputs to the next multiple of 32 above their
number, so that there is a place for a one behind them, which turns the next layer's weights' gradient into its bias's
as well.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import OPERAND_BYTES, launch, load, operand, rounded_to_tf32, store

EXAMPLES = 64
"""Examples a program; the batch is a multiple of it."""

# Inputs of a layer in a slice of its weights: a row of it is as long as the tensor cores' rows in shared memory.
_SLICE = 32
_SHARED_BYTES = 216 * 1024
_MOST_SLOTS = 8
_MOST_COLUMNS = 256
_SUMS, _SUMS_TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
_AN_EXAMPLE, _A_COLUMN = _SUMS.reduce(1), _SUMS.reduce(0)


def widths(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The widths of rows: of the inputs, of the outputs of each layer but the last with a one behind, of the logits."""
    inputs, *hidden, classes = sizes
    return tuple(-(-n // _SLICE) * _SLICE for n in (inputs, *(n + 1 for n in hidden), classes))


def fits(sizes: tuple[int, ...]) -> bool:
    """Whether layers of these sizes, inputs first and classes last, go into registers and shared memory."""
    rows = widths(sizes)
    return max(rows) <= _MOST_COLUMNS and min(_slots(rows[:-1], rows[1:]), _slots(rows[1:], rows[:-1])) >= 2


def _slots(operands, columns):
    """Slices of the weights in flight, beside the operands."""
    free = _SHARED_BYTES - EXAMPLES * 4 * sum(operands)
    return min(_MOST_SLOTS, free // (OPERAND_BYTES * max(columns)))


def forward(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]
) -> tuple[Array, Array, tuple[Array, ...]]:
    """`h = max(0, w h + b)` for each layer but the last, its logits, and `loss = logsumexp(logits) - logits[label]`.

    Args:
      x: `(widths[0], N)`, an example a column as the convolutions have it.
      labels: `(N,)` int32; one that is no class makes its example's loss NaN.
      weights, biases: `(outputs, inputs)` and `(outputs,)` of each layer.

    Returns:
      loss `(N,)`, logits `(N, widths[-1])`, and each h `(N, widths[layer])`, where a one follows the layer's outputs.
    """
    sizes = (x.shape[0], *(b.shape[0] for b in biases))
    rows = widths(sizes)
    N, classes, layers = x.shape[1], sizes[-1], len(weights)
    slices = [_slices(w, rows[layer + 1], rows[layer]) for layer, w in enumerate(weights)]
    ones = [b if layer == layers - 1 else jnp.append(b, 1.0) for layer, b in enumerate(biases)]
    padded = [jnp.pad(b, (0, rows[layer + 1] - b.size)) for layer, b in enumerate(ones)]
    first_bias = sum(s.size for s in slices)
    # Whole tiles of eight rows.
    packed = jnp.concatenate([*slices, *padded, jnp.zeros(-sum(rows[1:]) % (8 * _SLICE), jnp.float32)])
    slots = _slots(rows[:-1], rows[1:])

    def body(x_ref, labels_ref, weights_ref, bias_ref, loss_ref, logits_ref, *refs, block):
        hidden_refs, (slots_ref, loaded, *operands) = refs[: layers - 1], refs[layers - 1 :]
        here = pl.ds(block * EXAMPLES, EXAMPLES)
        multiply = _multiplier(weights_ref, slots_ref, loaded, list(itertools.pairwise(rows)))
        labels = load(labels_ref.at[here], _AN_EXAMPLE, optimized=False)
        # Some slices at a time, so that their loads are under way together.
        for k in range(0, rows[0], 4 * _SLICE):
            columns = [pl.ds(k + n, _SLICE) for n in range(0, min(4 * _SLICE, rows[0] - k), _SLICE)]
            loads = [load(x_ref.at[c, here].transpose((1, 0)), _SUMS_TRANSPOSED, optimized=False) for c in columns]
            for c, values in zip(columns, loads, strict=True):
                operands[0][:, c] = rounded_to_tf32(plgpu.layout_cast(values, _SUMS))
        plgpu.commit_smem()
        at = first_bias
        for layer in range(layers):
            bias = load(bias_ref.at[pl.ds(at, rows[layer + 1])], _A_COLUMN, optimized=False)
            z = multiply(operands[layer])
            z += lax.broadcast_in_dim(bias, z.shape, [1])
            at += rows[layer + 1]
            if layer < layers - 1:
                h = rounded_to_tf32(jnp.maximum(z, 0.0))
                operands[layer + 1][...] = h
                plgpu.commit_smem()
                store(hidden_refs[layer].at[here], h)
        store(logits_ref.at[here], z)
        shifted, _, total, chosen = _softmax(z, labels, classes)
        loss = jnp.log(total) - jnp.sum(jnp.where(chosen, shifted, 0.0), axis=1)
        store(loss_ref.at[here], jnp.where((labels >= 0) & (labels < classes), loss, jnp.nan))

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    loss, logits, *hidden = launch(
        body,
        x,
        labels,
        packed.reshape(-1, _SLICE),
        packed,
        out=(struct((N,)), struct((N, rows[-1])), *(struct((N, n)) for n in rows[1:-1])),
        grid={"block": N // EXAMPLES},
        scratch=[
            operand((slots, max(rows[1:]), _SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=slots),
            *(operand((EXAMPLES, n), jnp.float32) for n in rows[:-1]),
        ],
        name="mlp_softmax_cross_entropy",
    )
    return loss, logits, tuple(hidden)


def backward(
    dy: Array, labels: Array, logits: Array, hidden: tuple[Array, ...], weights: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Gradients of `forward`'s losses, weighed by dy, in the logits, in each layer's sums before its ReLU, and in x.

    Args:
      dy: `(N,)`.
      labels, weights: the forward's.
      logits, hidden: the forward's results.

    Returns:
      Arrays of the shape of the logits and of each h, last first, zero behind a layer's outputs, and of x.
    """
    sizes = (weights[0].shape[1], *(w.shape[0] for w in weights))
    rows = widths(sizes)
    N, classes, layers = dy.size, sizes[-1], len(weights)
    packed = jnp.concatenate(
        [_slices(weights[layer].T, rows[layer], rows[layer + 1]) for layer in reversed(range(layers))]
    )
    slots = _slots(rows[1:], rows[:-1])

    def body(dy_ref, labels_ref, logits_ref, weights_ref, *refs, block):
        hidden_refs, refs = refs[: layers - 1], refs[layers - 1 :]
        gradient_refs, (slots_ref, loaded, *operands) = refs[: layers + 1], refs[layers + 1 :]
        here = pl.ds(block * EXAMPLES, EXAMPLES)
        products = [(rows[layer + 1], rows[layer]) for layer in reversed(range(layers))]
        multiply = _multiplier(weights_ref, slots_ref, loaded, products)
        z = load(logits_ref.at[here], _SUMS, optimized=False)
        dy = load(dy_ref.at[here], _AN_EXAMPLE, optimized=False)
        labels = load(labels_ref.at[here], _AN_EXAMPLE, optimized=False)
        dy = jnp.where((labels >= 0) & (labels < classes), dy, jnp.nan)
        _, exponentials, total, chosen = _softmax(z, labels, classes)
        gradient = _across(dy, z) * (exponentials / _across(total, z) - jnp.where(chosen, 1.0, 0.0))
        for layer in reversed(range(layers)):
            gradient = rounded_to_tf32(gradient)
            operands[layer][...] = gradient
            plgpu.commit_smem()
            store(gradient_refs[layers - 1 - layer].at[here], gradient)
            # Under way while the product is.
            h = load(hidden_refs[layer - 1].at[here], _SUMS, optimized=False) if layer else None
            gradient = multiply(operands[layer])
            if layer:
                gradient = jnp.where(h > 0, gradient, 0.0)
        for k in range(0, rows[0], _SLICE):
            columns = plgpu.layout_cast(gradient[:, k : k + _SLICE], _SUMS_TRANSPOSED)
            store(gradient_refs[-1].at[pl.ds(k, _SLICE), here].transpose((1, 0)), columns)

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return launch(
        body,
        dy,
        labels,
        logits,
        packed.reshape(-1, _SLICE),
        *hidden,
        out=(*(struct((N, n)) for n in reversed(rows[1:])), struct((rows[0], N))),
        grid={"block": N // EXAMPLES},
        scratch=[
            operand((slots, max(rows[:-1]), _SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=slots),
            *(operand((EXAMPLES, n), jnp.float32) for n in rows[1:]),
        ],
        name="mlp_softmax_cross_entropy_backward",
    )


def _slices(w, outputs, inputs):
    """Weights filled up with zeros, rounded, and cut into slices of their inputs, one after the other."""
    w = jnp.pad(w, ((0, outputs - w.shape[0]), (0, inputs - w.shape[1])))
    return lax.reduce_precision(w, 8, 10).reshape(outputs, -1, _SLICE).swapaxes(0, 1).ravel()


def _multiplier(weights_ref, slots_ref, loaded, products):
    """A function that multiplies an operand by the next of the packed weights, and keeps their slices coming.

    Args:
      weights_ref: all slices, one after the other, of which `slots_ref` holds as many as there are barriers `loaded`.
      products: (inputs, outputs) of each.
    """
    outputs_of = [outputs for inputs, outputs in products for _ in range(inputs // _SLICE)]
    slots, done = slots_ref.shape[0], []

    def fetch(step):
        rows = pl.ds(sum(outputs_of[:step]), outputs_of[step])
        slot = slots_ref.at[step % slots, pl.ds(0, outputs_of[step])]
        plgpu.copy_gmem_to_smem(weights_ref.at[rows], slot, loaded.at[step % slots])

    for step in range(min(slots, len(outputs_of))):
        fetch(step)

    def multiply(operand):
        inputs, outputs = products[len(done)]
        first = sum(inputs for inputs, _ in products[: len(done)]) // _SLICE
        done.append(outputs)

        def add_slices(sums):
            for k in range(inputs // _SLICE):
                step = first + k
                plgpu.barrier_wait(loaded.at[step % slots])
                weights = slots_ref.at[step % slots, pl.ds(0, outputs)]
                plgpu.wgmma(sums, operand.at[:, pl.ds(k * _SLICE, _SLICE)], weights.transpose((1, 0)))
                if 0 < step <= len(outputs_of) - slots:
                    # The product before is done, in every warp: its slice makes room.
                    plgpu.wgmma_wait(1)
                    plgpu.commit_smem()
                    fetch(step - 1 + slots)
            plgpu.wgmma_wait(0)
            return sums[...]

        return pl.run_scoped(add_slices, plgpu.ACC((EXAMPLES, outputs)))

    return multiply


def _across(column, like):
    return lax.broadcast_in_dim(column, like.shape, [0])


def _softmax(z, labels, classes):
    """z less its largest, -inf behind the classes; the exponentials of that; their sums; and where the label is."""
    at = plgpu.broadcasted_iota(jnp.int32, z.shape, 1, layout=_SUMS)
    z = jnp.where(at < classes, z, -jnp.inf)
    shifted = z - _across(jnp.max(z, axis=1), z)
    exponentials = jnp.exp(shifted)
    return shifted, exponentials, jnp.sum(exponentials, axis=1), at == _across(labels, z)
