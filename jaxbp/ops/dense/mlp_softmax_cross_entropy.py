"""Dense layers with ReLU between them, softmax, and cross-entropy as one op."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, DIGITS, LABELS, Argument, Entry, case_of
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import are_valid, dy_of_valid, on_tensor_cores
from jaxbp.ops.dense import _products as products
from jaxbp.ops.dense.softmax_cross_entropy import logits_gradient, losses
from jaxbp.pairing import DefaultImplementation, Implementation, Op, Pair, differentiable, in_dtypes_of
from jaxbp.pairing.mesh import Axes, BatchAxes, batched, sharding_of_rows
from pallas_kernels.core.arrays import batch_first, batch_last
from pallas_kernels.core.launch import on_gpu
from pallas_kernels.core.layouts import LANES
from pallas_kernels.dense import mlp_softmax_cross_entropy_sm90 as kernels
from pallas_kernels.dense import mlp_weighed_gradients_sm90
from pallas_kernels.dense.mlp_network_sm90 import layer_sizes, row_widths

MAX_SINGLE_KERNEL_EXAMPLES = 1024
"""Largest batch for which one kernel computes the forward and the gradients. It was slower at 8192:
docs/lab/2026-11-21-dense.md."""


class Rows(NamedTuple):
    """Residuals of the forward in jnp. `hidden` has the output of each hidden layer, `(examples, features)`."""

    x: Array
    labels: Array
    logits: Array
    hidden: tuple[Array, ...]
    weights: tuple[Array, ...]


def rows(x, labels, weights, biases, *, precision=None):
    hidden = []
    for w, b in zip(weights, biases, strict=True):
        z = jnp.matmul(x, w.T, precision=precision, out_sharding=sharding_of_rows(x, w)) + b[None]
        x = jax.nn.relu(z)
        hidden.append(x)
    return losses(z, labels), z, tuple(hidden[:-1])


def row_gradients(dy, labels, logits, hidden, weights, *, precision=None, multiply=products.formula):
    """Return the gradients with respect to the logits, each hidden layer before ReLU (the last layer first), and x."""
    gradient = logits_gradient(dy, logits, labels)
    gradients = [gradient]
    for w, h in zip(reversed(weights), (*reversed(hidden), None), strict=True):
        gradient = multiply(gradient, w, precision=precision, dtype=gradient.dtype)
        if h is not None:
            gradient = jnp.where(h > 0, gradient, 0)
        gradients.append(gradient)
    return tuple(gradients)


def _layer_gradients(gradients, inputs, precision=None, multiply=products.formula):
    for dz, h in zip(gradients, inputs, strict=True):
        yield multiply(dz, h, transposed=(True, False), precision=precision, dtype=dz.dtype)
        yield jnp.sum(dz, axis=0)


def _results(loss, logits):
    return loss, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _forward(x, labels, *layers, precision):
    loss, logits, _ = rows(x, labels, layers[::2], layers[1::2], precision=precision)
    return _results(loss, jax.lax.stop_gradient(logits))


def _save(x, labels, *layers, precision):
    loss, logits, hidden = rows(x, labels, layers[::2], layers[1::2], precision=precision)
    return _results(loss, logits), (Rows(x, labels, logits, hidden, layers[::2]),)


def _gradients(dy, saved, *, precision, multiply=(products.formula, products.formula)):
    x, *arrays = saved
    *gradients, dx = row_gradients(dy, *arrays, precision=precision, multiply=multiply[0])
    return dx, None, *_layer_gradients(reversed(gradients), (x, *saved.hidden), precision, multiply[1])


class WideRows(NamedTuple):
    """Residuals of the forward kernel for large batches. Zeros pad the batch to a multiple of 128.

    Each row of an array in `hidden` has one example's outputs of a hidden layer, then 1, then zeros. With the
    gradient dz of the next layer, `dzᵀ hidden` is therefore dw, then a column with db, then zeros.
    """

    # With other padding, sums over examples could multiply infinity by 0.

    x_batch_last: Array
    labels: Array
    logits: Array
    hidden: tuple[Array, ...]
    weights: tuple[Array, ...]


class WideRowsAndGradients(NamedTuple):
    """Residuals of the forward kernel for small batches. `gradients` has the gradients of each example's loss with
    respect to the logits, the hidden layers, and x. The backward multiplies them by dy."""

    # For an invalid label, the gradients are 0, and `dy_of_valid` replaces dy by NaN or 0.

    x_batch_last: Array
    labels: Array
    hidden: tuple[Array, ...]
    gradients: tuple[Array, ...]
    weights: tuple[Array, ...]


def _wide_rows(x_batch_last, labels, weights, biases):
    inputs, *_ = sizes = layer_sizes(weights)
    loss, logits, hidden = rows(x_batch_last[:inputs].T, labels, weights, biases)
    hidden = [jnp.pad(h, ((0, 0), (0, 1)), constant_values=1) for h in hidden]
    _, *widths, classes = row_widths(sizes)
    return loss, _fill(logits, classes), tuple(map(_fill, hidden, widths))


def _wide_row_gradients(dy, labels, logits, hidden, weights):
    _, *outputs, classes = sizes = layer_sizes(weights)
    gradients = row_gradients(dy, labels, logits[:, :classes], _narrow(hidden, outputs), weights)
    inputs, *widths = row_widths(sizes)
    *gradients, dx = map(_fill, gradients, (*reversed(widths), inputs))
    return *gradients, dx.T


def _wide_rows_and_gradients(x_batch_last, labels, weights, biases):
    loss, logits, hidden = _wide_rows(x_batch_last, labels, weights, biases)
    dy = are_valid(labels, len(biases[-1])).astype(loss.dtype)
    return loss, logits, hidden, _wide_row_gradients(dy, labels, logits, hidden, weights)


def _weighed_gradients(dy, x_batch_last, hidden, gradients, *, sizes):
    *gradients, dx = gradients
    weighed = _narrow([g * dy[:, None] for g in reversed(gradients)], sizes[1:])
    return dx * dy[None], *_layer_gradients(weighed, _narrow((x_batch_last.T, *hidden), sizes[:-1]))


def _with_kernel(kernel: Callable, formula: Callable, batch_axes: BatchAxes) -> Callable:

    def call(*arrays, **options):
        return on_gpu(functools.partial(kernel, **options), functools.partial(formula, **options), *arrays)

    return differentiable(call, formula, batch_axes)


_PRODUCTS = [differentiable(products.kernel, products.formula, batched(*names)) for names in (("a",), ("a", "b"))]
"""Products with the weights of a layer, and sums over examples."""
_EXAMPLES = Axes({"x_batch_last": 1, "labels": 0}, multiple_of=LANES)
_WIDE_ROWS = _with_kernel(kernels.forward, _wide_rows, _EXAMPLES)
_WIDE_ROW_GRADIENTS = _with_kernel(
    kernels.backward,
    _wide_row_gradients,
    Axes(dict.fromkeys(("dy", "labels", "logits", "hidden"), 0), multiple_of=LANES),
)
_WIDE_ROWS_AND_GRADIENTS = _with_kernel(kernels.forward_and_gradients, _wide_rows_and_gradients, _EXAMPLES)
_WEIGHED_GRADIENTS = _with_kernel(
    mlp_weighed_gradients_sm90.weighed_gradients,
    _weighed_gradients,
    lambda dy, x_batch_last, hidden, gradients: Axes(
        {"dy": 0, "x_batch_last": 1, "hidden": 0, "gradients": (0,) * (len(gradients) - 1) + (1,)}, multiple_of=LANES
    ),
)


def _has_kernel(x, labels, *layers, precision):
    weights, biases = layers[::2], layers[1::2]
    if checks.unsupported_dtype(x) or not on_tensor_cores(x.dtype, precision) or 0 in (len(x), *layer_sizes(weights)):
        return False
    lanes = jax.eval_shape(_lanes, x, labels, weights)
    return kernels.forward.unsupported(*lanes, weights, biases) is None


def _save_kernel(x, labels, *layers, precision):
    weights, biases = layers[::2], layers[1::2]
    if not _has_kernel(x, labels, *layers, precision=precision):
        return _save(x, labels, *layers, precision=precision)
    x_batch_last, labels_last = _lanes(x, labels, weights)
    arrays = x_batch_last, labels_last, weights, biases
    is_small = x_batch_last.shape[1] <= MAX_SINGLE_KERNEL_EXAMPLES
    if is_small and kernels.forward_and_gradients.unsupported(*arrays) is None:
        loss, logits, hidden, (*gradients, dx_last) = _WIDE_ROWS_AND_GRADIENTS(*arrays)
        hidden, gradients = (_clear_padding(rows, len(x)) for rows in (hidden, gradients))
        saved = WideRowsAndGradients(x_batch_last, labels_last, hidden, (*gradients, dx_last), weights)
    else:
        loss, logits, hidden = _WIDE_ROWS(*arrays)
        logits, *hidden = _clear_padding((logits, *hidden), len(x))
        saved = WideRows(x_batch_last, labels_last, logits, tuple(hidden), weights)
    return _results(loss[: len(x)], logits[: len(x), : len(biases[-1])]), (saved,)


def _gradients_kernel(dy, saved, *, precision):
    if isinstance(saved, Rows):
        return _gradients(dy, saved, precision=precision, multiply=_PRODUCTS)
    inputs, *_, classes = sizes = layer_sizes(saved.weights)
    if isinstance(saved, WideRowsAndGradients):
        dy_last = dy_of_valid(batch_last(dy), saved.labels, classes)
        dx_last, *layers = _WEIGHED_GRADIENTS(dy_last, saved.x_batch_last, saved.hidden, saved.gradients, sizes=sizes)
    else:
        x_batch_last, *arrays = saved
        *gradients, dx_last = _WIDE_ROW_GRADIENTS(batch_last(dy), *arrays)
        layers = []
        for w, dz, h in zip(saved.weights, reversed(gradients), (x_batch_last.T, *saved.hidden), strict=True):
            outputs, columns = w.shape
            dw = jnp.matmul(dz.T, h, precision=precision)[:outputs]
            layers += [dw[:, :columns], dw[:, columns] if layers else jnp.sum(dz, axis=0)[:outputs]]
    return batch_first(dx_last[:inputs], len(dy)), None, *layers


def _lanes(x, labels, weights):
    return batch_last(_fill(x, row_widths(layer_sizes(weights))[0])), batch_last(labels)


def _clear_padding(arrays, count):
    return tuple(a if len(a) == count else a.at[count:].set(0) for a in arrays)


def _fill(a, width):
    return jnp.pad(a, ((0, 0), (0, width - a.shape[1])))


def _narrow(arrays, sizes):
    return [a[:, :n] for a, n in zip(arrays, sizes, strict=True)]


_MLP_SOFTMAX_CROSS_ENTROPY = Pair(
    _forward,
    # Not a `Pair`, because the formula does not accept the residuals of the kernels.
    Op("mlp_softmax_cross_entropy_backward", {"xla": _gradients, "pallas": _gradients_kernel}, jit=True),
    save={"xla": _save, "pallas": _save_kernel},
    has_aux=True,
    name="mlp_softmax_cross_entropy",
    unsupported=checks.unsupported_dtype,
    default=lambda *arrays, **options: DefaultImplementation("pallas" if _has_kernel(*arrays, **options) else "xla"),
    partitioned=True,
    jit=True,
)


def mlp_softmax_cross_entropy(
    x: Float[AnyArray, "*batch in_features"],
    labels: Int[AnyArray, "*batch"],
    *layers: Float[AnyArray, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch"]:
    """Dense layers with ReLU between them, softmax, and cross-entropy, one loss per example:
    `softmax_cross_entropy(linear(...relu(linear(relu(linear(x, w1, b1)), w2, b2))...), labels)`.

    Args:
      labels: integers in [0, classes).
      layers: w1, b1, w2, b2, ...: weights `(out_features, in_features)` and bias `(out_features,)` of each layer.
      precision: as in `jax.lax.dot`.
      implementation: "pallas" runs kernels on compute capability 9.0, in TF32, for layers of up to 256 features.
        Otherwise, a kernel computes each product of the backward.

    Returns:
      The losses, in the promoted dtype of x and the layers. A label that is not a class has the loss NaN, with
      gradients NaN, or 0 if dy is 0.
    """
    return _call("mlp_softmax_cross_entropy", x, labels, layers, precision, implementation)[0]


def mlp_softmax_cross_entropy_with_classes(
    x: Float[AnyArray, "*batch in_features"],
    labels: Int[AnyArray, "*batch"],
    *layers: Float[AnyArray, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch"], Int[Array, "*batch"]]:
    """Return the losses of `mlp_softmax_cross_entropy`, and for each example the first class with the largest logit,
    int32."""
    return _call("mlp_softmax_cross_entropy_with_classes", x, labels, layers, precision, implementation)


def mlp_softmax_cross_entropy_backward(
    dy: Float[AnyArray, "*batch"],
    x: Float[AnyArray, "*batch in_features"],
    labels: Int[AnyArray, "*batch"],
    *layers: Float[AnyArray, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Array, ...]:
    """Gradients (dx, dw1, db1, dw2, db2, ...) of `mlp_softmax_cross_entropy`.

    Let h be a layer's inputs and `z = h wᵀ + b`. At the last layer, `dz = dy (softmax(logits) - onehot(label))`. Every
    layer has `dw = dzᵀ h`, `db = Σ dz`, and `dh = dz w`. The preceding layer has `dz = dh` where `h > 0`, else 0.

    Source: as in `linear_backward`.
    """
    op, shape, arguments = "mlp_softmax_cross_entropy_backward", jnp.shape(x), (x, *layers)
    x, labels, layers, dy = _check(op, x, labels, layers, dy=dy)
    checks.shape(op, "dy", dy, *labels.shape)
    options = dict(precision=checks.precision(op, precision), implementation=implementation)
    dx, *dlayers = _MLP_SOFTMAX_CROSS_ENTROPY.vjp(dy.ravel(), _matrix(x), labels.ravel(), *layers, **options)
    return in_dtypes_of(arguments, (dx.reshape(shape), *dlayers))


def _call(op, x, labels, layers, precision, implementation):
    x, labels, layers = _check(op, x, labels, layers)
    options = dict(precision=checks.precision(op, precision), implementation=implementation)
    results = _MLP_SOFTMAX_CROSS_ENTROPY.named(op)(_matrix(x), labels.ravel(), *layers, **options)
    return tuple(a.reshape(labels.shape) for a in results)


def _matrix(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _check(op, x, labels, layers, **dy):
    if not layers or len(layers) % 2:
        wanted = "an even number of arrays, at least 2: w1, b1, w2, b2, ..."
        raise ValueError(f"{op}: layers has {len(layers)} arrays; wants {wanted}")
    names = [f"layers[{i}]" for i in range(len(layers))]
    x, *arrays = checks.floating(op, x=x, **dict(zip(names, layers, strict=True)), **dy)
    layers, dy = arrays[: len(names)], arrays[len(names) :]
    labels = checks.integers(op, "labels", labels, ", one class per example")
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape (); wants (..., in_features)")
    checks.shape(op, "labels", labels, *x.shape[:-1])
    features = x.shape[-1]
    for i in range(0, len(layers), 2):
        outputs = "out_features" if i + 2 < len(layers) else "classes"
        checks.shape(op, names[i], layers[i], outputs, features)
        features = layers[i].shape[0]
        checks.shape(op, names[i + 1], layers[i + 1], features)
    return x, labels.astype(jnp.int32), layers, *dy


_LAYERS = (6, 5), (6,), (4, 6), (4,)
# With larger activations, the softmax would give one class nearly all the probability.
_WEIGHTS = [Argument((outputs, inputs), scale=inputs**-0.5) for inputs, outputs in ((256, 120), (120, 84), (84, 10))]
_LENET_TAIL = (BATCH, 256), DIGITS, *(a for w in _WEIGHTS for a in (w, w.shape[:1]))

ENTRIES = (
    *(
        Entry(function, case_of((2, 3, 5), LABELS, *_LAYERS), {"fc1 to fc3": case_of(*_LENET_TAIL)})
        for function in (mlp_softmax_cross_entropy, mlp_softmax_cross_entropy_with_classes)
    ),
    Entry(
        mlp_softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), LABELS, *_LAYERS),
        {"fc1 to fc3": case_of((BATCH,), *_LENET_TAIL)},
    ),
)
