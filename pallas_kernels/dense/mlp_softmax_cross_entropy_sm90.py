"""Dense layers with ReLU between them, softmax and cross-entropy, in one kernel each way on Hopper's tensor cores.

A program takes 64 examples through all layers. Their activations stay in shared memory, where the tensor cores read
them; the weights stream by in slices of 32 of their inputs, packed one after the other in the order of their use.
Products are of float32 rounded to TF32, sums, softmax and loss are float32.

Rows are filled up to widths that the tensor cores take: a layer's outputs to the next multiple of 32 above their
number, so that there is a place for a one behind them, which turns the next layer's weights' gradient into its bias's
as well.

In small batches, where launches and latencies are what takes time, one kernel goes forward and on to the gradients of
each example's loss by itself, and a second weighs these and makes the layers' gradients.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import LANES, OPERAND_BYTES, load, operand, rounded_to_tf32, store

EXAMPLES = 64
"""Examples a program; the batch is a multiple of it."""

# Inputs of a layer in a slice of its weights: a row of it is as long as the tensor cores' rows in shared memory.
_SLICE = 32
_SHARED_BYTES = 216 * 1024
_MOST_SLOTS = 8
_MOST_COLUMNS = 256
# Of the gradient in x, made at once where the layers' outputs stay in shared memory beside it.
_PIECE = 128
# Measured at 1024, where it pays, and at 8192, where it does not.
_MOST_TOGETHER = 1024
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


def together(N: int, sizes: tuple[int, ...]) -> bool:
    """Whether `forward_and_gradients` takes layers of these sizes, and is faster than `forward` and `backward`."""
    rows = widths(sizes)
    return N <= _MOST_TOGETHER and _slots(rows, _columns_together(rows)) >= 2


def _columns_together(rows):
    return *rows[1:], min(rows[0], _PIECE)


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
    packed, first_bias = _pack(_slices_up(weights, rows), biases, rows)
    slots = _slots(rows[:-1], rows[1:])

    def body(x_ref, labels_ref, weights_ref, bias_ref, loss_ref, logits_ref, *refs, block):
        hidden_refs, (slots_ref, loaded, *operands) = refs[: layers - 1], refs[layers - 1 :]
        here = pl.ds(block * EXAMPLES, EXAMPLES)
        multiply = _multiplier(weights_ref, slots_ref, loaded, list(itertools.pairwise(rows)))
        labels = load(labels_ref.at[here], _AN_EXAMPLE, optimized=False)
        _bring(x_ref, here, operands[0], 4)
        z = _up(multiply, operands, rows, hidden_refs, here, bias_ref, first_bias, bulk=False)
        store(logits_ref.at[here], z)
        store(loss_ref.at[here], _loss(_softmax(z, labels, classes), labels, classes))

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
    packed = jnp.concatenate(_slices_down(weights, rows, rows[:1]))
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
        gradient = _across(dy, z) * _logits_gradient(_softmax(z, labels, classes))
        for layer in reversed(range(layers)):
            _put(rounded_to_tf32(gradient), operands[layer], gradient_refs[layers - 1 - layer].at[here], bulk=False)
            # Under way while the product is.
            h = load(hidden_refs[layer - 1].at[here], _SUMS, optimized=False) if layer else None
            gradient = multiply(operands[layer])
            if layer:
                gradient = jnp.where(h > 0, gradient, 0.0)
        _store_columns(gradient, gradient_refs[-1], here)

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


def forward_and_gradients(
    x: Array, labels: Array, weights: tuple[Array, ...], biases: tuple[Array, ...]
) -> tuple[Array, Array, tuple[Array, ...], tuple[Array, ...]]:
    """`forward`, and what `backward` makes of its results with dy = 1, for sizes that go `together`.

    Args:
      x, labels, weights, biases: as `forward` takes them.

    Returns:
      loss, logits, the h, and the gradients of each loss by itself: those of `forward`, and those of `backward`.
    """
    sizes = (x.shape[0], *(b.shape[0] for b in biases))
    rows = widths(sizes)
    N, classes, layers = x.shape[1], sizes[-1], len(weights)
    pieces = [min(_PIECE, rows[0] - n) for n in range(0, rows[0], _PIECE)]
    packed, first_bias = _pack([*_slices_up(weights, rows), *_slices_down(weights, rows, pieces)], biases, rows)
    products = [*itertools.pairwise(rows), *itertools.pairwise(rows[:0:-1]), *((rows[1], n) for n in pieces)]
    columns = _columns_together(rows)
    slots = _slots(rows, columns)

    def body(x_ref, labels_ref, weights_ref, bias_ref, loss_ref, logits_ref, *refs, block):
        hidden_refs, refs = refs[: layers - 1], refs[layers - 1 :]
        gradient_refs, (slots_ref, loaded, *operands) = refs[: layers + 1], refs[layers + 1 :]
        here = pl.ds(block * EXAMPLES, EXAMPLES)
        multiply = _multiplier(weights_ref, slots_ref, loaded, products)
        labels = load(labels_ref.at[here], _AN_EXAMPLE, optimized=False)
        _bring(x_ref, here, operands[0], 8)
        z = _up(multiply, operands, rows, hidden_refs, here, bias_ref, first_bias, bulk=True)
        store(logits_ref.at[here], z)
        softmax = _softmax(z, labels, classes)
        store(loss_ref.at[here], _loss(softmax, labels, classes))
        valid = _across((labels >= 0) & (labels < classes), z)
        gradient = jnp.where(valid, _logits_gradient(softmax), jnp.nan)
        for layer in reversed(range(layers)):
            # The gradient takes the place of h, which nobody reads any more.
            if layer < layers - 1:
                gradient = jnp.where(load(operands[layer + 1], _SUMS, optimized=False) > 0, gradient, 0.0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()
            _put(rounded_to_tf32(gradient), operands[layer + 1], gradient_refs[layers - 1 - layer].at[here], bulk=True)
            if layer:
                gradient = multiply(operands[layer + 1])
        for i in range(len(pieces)):
            _store_columns(multiply(operands[1]), gradient_refs[-1], here, i * _PIECE)
        plgpu.wait_smem_to_gmem(0)

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    rows_of = lambda widths: [struct((N, n)) for n in widths]  # noqa: E731
    loss, logits, *results = launch(
        body,
        x,
        labels,
        packed.reshape(-1, _SLICE),
        packed,
        out=(struct((N,)), *rows_of((rows[-1], *rows[1:-1], *reversed(rows[1:]))), struct((rows[0], N))),
        grid={"block": N // EXAMPLES},
        scratch=[
            operand((slots, max(columns), _SLICE), jnp.float32),
            plgpu.Barrier(num_barriers=slots),
            *(operand((EXAMPLES, n), jnp.float32) for n in rows),
        ],
        barriers=False,
        name="mlp_softmax_cross_entropy_forward_and_gradients",
    )
    return loss, logits, tuple(results[: layers - 1]), tuple(results[layers - 1 :])


def weighed_gradients(
    dy: Array, x: Array, hidden: tuple[Array, ...], gradients: tuple[Array, ...], sizes: tuple[int, ...]
) -> tuple[Array, ...]:
    """Of gradients g of each loss by itself: `dx = dy g`, `dw[o, i] = Σ dy g[n, o] h[n, i]`, `db[o] = Σ dy g[n, o]`.

    A program makes 64 x 32 of a layer's dw, for 128 examples, which both its warpgroups bring, turned, weighed and
    rounded, to shared memory. Columns of ones behind x's make the first db. Further programs weigh dx.

    Args:
      dy: `(N,)`, N a multiple of 128.
      x, hidden, gradients: what `forward_and_gradients` took and made.
      sizes: of the layers, inputs first.

    Returns:
      dx like x, and (dw, db) of each layer, one after the other.
    """
    rows = widths(sizes)
    N, layers = dy.size, len(sizes) - 1
    *gradients, dx = gradients
    down = [-(-n // EXAMPLES) for n in rows[1:]]
    across = [n // _SLICE + (layer == 0) for layer, n in enumerate(rows[:-1])]
    first = [0, *itertools.accumulate(d * a for d, a in zip(down, across, strict=True))]
    half = _SLICE // 2

    def body(dy_ref, x_ref, dx_ref, *refs, part, tile, warpgroup):
        input_refs, refs = refs[: layers - 1], refs[layers - 1 :]
        gradient_refs, (weighed_ref, *refs) = refs[:layers][::-1], refs[layers:]
        sums_refs, (left_ref, right_ref, ready) = refs[:layers], refs[layers:]
        mine = pl.ds(warpgroup * EXAMPLES, EXAMPLES)
        here = pl.ds(part * LANES + warpgroup * EXAMPLES, EXAMPLES)

        def make(layer):
            at = tile - first[layer]
            row, column = at // across[layer] * EXAMPLES, at % across[layer] * _SLICE
            weight = load(dy_ref.at[here], _AN_EXAMPLE, optimized=False)
            # Where a layer's last tile has half its rows, the other half is not wanted.
            starts = [jnp.minimum(row + n, rows[layer + 1] - _SLICE) for n in (0, _SLICE)]
            lefts = [load(gradient_refs[layer].at[here, pl.ds(n, _SLICE)], _SUMS, optimized=False) for n in starts]
            if layer:
                right = load(input_refs[layer - 1].at[here, pl.ds(column, _SLICE)], _SUMS, optimized=False)
                right = plgpu.layout_cast(right, _SUMS_TRANSPOSED)
            else:
                columns = pl.ds(jnp.minimum(column, rows[0] - _SLICE), _SLICE)
                right = load(x_ref.at[columns, here].transpose((1, 0)), _SUMS_TRANSPOSED, optimized=False)
                right = rounded_to_tf32(jnp.where(column < rows[0], right, 1.0))
            for n, left in zip((0, _SLICE), lefts, strict=True):
                left = plgpu.layout_cast(rounded_to_tf32(left * _across(weight, left)), _SUMS_TRANSPOSED)
                store(left_ref.at[pl.ds(n, _SLICE), mine].transpose((1, 0)), left)
            store(right_ref.at[:, mine].transpose((1, 0)), right)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

            def multiply(sums):
                plgpu.wgmma(sums, left_ref, right_ref.at[pl.ds(warpgroup * half, half)].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return sums[...]

            columns = pl.ds(column + warpgroup * half, half)
            sums = pl.run_scoped(multiply, plgpu.ACC((EXAMPLES, half)))
            store(sums_refs[layer].at[part, pl.ds(row, EXAMPLES), columns], sums)

        for layer in range(layers):
            pl.when((first[layer] <= tile) & (tile < first[layer + 1]))(functools.partial(make, layer))

        @pl.when(tile >= first[-1])
        def _():
            row, lanes = (tile - first[-1]) * _SLICE + warpgroup * half, pl.ds(part * LANES, LANES)
            weight, values = dy_ref[lanes], [dx_ref[row + n, lanes] for n in range(half)]
            for n, value in enumerate(values):
                weighed_ref[row + n, lanes] = value * weight

    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    parts = N // LANES
    tiles = zip(down, across, strict=True)
    dx, *sums = launch(
        body,
        dy,
        x,
        dx,
        *hidden,
        *gradients,
        out=(struct(dx.shape), *(struct((parts, d * EXAMPLES, a * _SLICE)) for d, a in tiles)),
        grid={"part": parts, "tile": first[-1] + rows[0] // _SLICE},
        warpgroups=2,
        scratch=[
            operand((EXAMPLES, LANES), jnp.float32),
            operand((_SLICE, LANES), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        barriers=False,
        name="mlp_softmax_cross_entropy_weighed_gradients",
    )
    layers_gradients = []
    for layer, (parts_, (inputs, outputs)) in enumerate(zip(sums, itertools.pairwise(sizes), strict=True)):
        bias = inputs if layer else rows[0]
        layers_gradients += [jnp.sum(parts_[:, :outputs, c], axis=0) for c in (slice(inputs), bias)]
    return dx, *layers_gradients


def _bring(x_ref, here, operand, together):
    """Examples in columns become rows of the operand, the loads of some slices under way together."""
    starts = range(0, operand.shape[1], _SLICE)
    for i in range(0, len(starts), together):
        columns = [pl.ds(k, _SLICE) for k in starts[i : i + together]]
        loads = [load(x_ref.at[c, here].transpose((1, 0)), _SUMS_TRANSPOSED, optimized=False) for c in columns]
        for c, values in zip(columns, loads, strict=True):
            operand[:, c] = rounded_to_tf32(plgpu.layout_cast(values, _SUMS))
    plgpu.commit_smem()


def _put(rows, operand, ref, *, bulk):
    """Rows to the operand and to `ref`: from the registers, or from there by a copy under way when this returns."""
    operand[...] = rows
    plgpu.commit_smem()
    if bulk:
        plgpu.copy_smem_to_gmem(operand, ref)
    else:
        store(ref, rows)


def _store_columns(rows, columns_ref, here, first=0):
    for k in range(0, rows.shape[1], _SLICE):
        columns = plgpu.layout_cast(rows[:, k : k + _SLICE], _SUMS_TRANSPOSED)
        store(columns_ref.at[pl.ds(first + k, _SLICE), here].transpose((1, 0)), columns)


def _up(multiply, operands, rows, hidden_refs, here, bias_ref, first_bias, *, bulk):
    """The layers' products, biases and ReLUs, the operands one after the other; returns the logits."""
    at = first_bias
    for layer, ref in enumerate((*hidden_refs, None)):
        bias = load(bias_ref.at[pl.ds(at, rows[layer + 1])], _A_COLUMN, optimized=False)
        z = multiply(operands[layer])
        z += lax.broadcast_in_dim(bias, z.shape, [1])
        at += rows[layer + 1]
        if ref is not None:
            _put(rounded_to_tf32(jnp.maximum(z, 0.0)), operands[layer + 1], ref.at[here], bulk=bulk)
    return z


def _pack(slices, biases, rows):
    """Slices, and biases as long as rows behind them, from the place that is returned as well."""
    ones = [b if layer == len(biases) - 1 else jnp.append(b, 1.0) for layer, b in enumerate(biases)]
    padded = [jnp.pad(b, (0, rows[layer + 1] - b.size)) for layer, b in enumerate(ones)]
    # Whole tiles of eight rows.
    packed = jnp.concatenate([*slices, *padded, jnp.zeros(-sum(rows[1:]) % (8 * _SLICE), jnp.float32)])
    return packed, sum(s.size for s in slices)


def _slices_up(weights, rows):
    return [_slices(w, rows[layer + 1], rows[layer]) for layer, w in enumerate(weights)]


def _slices_down(weights, rows, pieces):
    """Transposed weights, last layer's first, the first layer's in pieces of its inputs."""
    last_first = [_slices(weights[n].T, rows[n], rows[n + 1]) for n in range(len(weights) - 1, 0, -1)]
    ends = list(itertools.accumulate(pieces))
    first = weights[0].T
    return last_first + [_slices(first[a:b], b - a, rows[1]) for a, b in itertools.pairwise([0, *ends])]


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


def _loss(softmax, labels, classes):
    shifted, _, total, chosen = softmax
    loss = jnp.log(total) - jnp.sum(jnp.where(chosen, shifted, 0.0), axis=1)
    return jnp.where((labels >= 0) & (labels < classes), loss, jnp.nan)


def _logits_gradient(softmax):
    _, exponentials, total, chosen = softmax
    return exponentials / _across(total, exponentials) - jnp.where(chosen, 1.0, 0.0)
