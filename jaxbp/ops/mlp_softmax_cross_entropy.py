"""A multi-layer perceptron and its loss as one op: dense layers with ReLU between them, softmax and cross-entropy."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import PrecisionLike
from jaxtyping import Float, Int

from jaxbp.ops import _checks
from jaxbp.ops._numerics import on_tensor_cores
from jaxbp.ops.softmax_cross_entropy import logits_gradient, loss_and_probabilities
from jaxbp.pairing import Implementation, Op, Pair, differentiable
from pallas_kernels.core.launch import batch_first, batch_last, on_gpu
from pallas_kernels.dense import mlp_softmax_cross_entropy_sm90 as kernels


def rows(x, labels, *layers, precision):
    """Of every example: its loss, its logits, and what each hidden layer puts out."""
    hidden = []
    for w, b in zip(layers[::2], layers[1::2], strict=True):
        z = jnp.matmul(x, w.T, precision=precision) + b
        x = jax.nn.relu(z)
        hidden.append(x)
    return loss_and_probabilities(z, labels)[0], z, *hidden[:-1]


def row_gradients(dy, labels, logits, *hidden_and_weights, precision):
    """Of every example: the gradient in its logits, in each hidden layer's sums, last first, and in its inputs."""
    hidden, weights = _halves(hidden_and_weights)
    gradient = logits_gradient(dy, loss_and_probabilities(logits, labels)[1], labels)
    gradients = [gradient]
    for w, h in zip(reversed(weights), (*reversed(hidden), None), strict=True):
        gradient = jnp.matmul(gradient, w, precision=precision)
        if h is not None:
            gradient = jnp.where(h > 0, gradient, 0)
        gradients.append(gradient)
    return tuple(gradients)


def _halves(hidden_and_weights):
    hidden = len(hidden_and_weights) // 2
    return hidden_and_weights[:hidden], hidden_and_weights[hidden:]


def _layer_gradients(gradients, inputs, precision):
    """`dw = dzᵀ h` and `db = Σ dz` of each layer, by what the rows are."""
    for dz, h in zip(gradients, inputs, strict=True):
        yield jnp.matmul(dz.T, h, precision=precision)
        yield jnp.sum(dz, axis=0)


def _save(x, labels, *layers, precision):
    loss, logits, *hidden = rows(x, labels, *layers, precision=precision)
    return _results(loss, logits), (x, labels, logits, *hidden, *layers[::2])


def _results(loss, logits):
    return loss, jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _gradients(dy, x, labels, logits, *hidden_and_weights, precision):
    dz_last_first = row_gradients(dy, labels, logits, *hidden_and_weights, precision=precision)
    *gradients, dx = dz_last_first
    inputs = (x, *_halves(hidden_and_weights)[0])
    return dx, None, *_layer_gradients(reversed(gradients), inputs, precision)


def _forward(x, labels, *layers, precision):
    loss, logits, *_ = rows(x, labels, *layers, precision=precision)
    return _results(loss, jax.lax.stop_gradient(logits))


# --------------------------------------------------------------------------------------------------- with the kernels
# Their rows are wider: behind each hidden layer's outputs stands a one, then zeros up to what the tensor cores take. By
# the one a layer's product with the gradients has its bias's gradient in it. The inputs have the batch last.


def _wide_rows(x_last, labels, *layers):
    x = x_last[: layers[0].shape[1]].T
    loss, logits, *hidden = rows(x, labels, *layers, precision=None)
    hidden = [jnp.pad(h, ((0, 0), (0, 1)), constant_values=1) for h in hidden]
    _, *widths = kernels.widths(_sizes(layers[::2]))
    return loss, *map(_fill, (logits, *hidden), (widths[-1], *widths))


def _wide_row_gradients(dy, labels, logits, *hidden_and_weights):
    hidden, weights = _halves(hidden_and_weights)
    inputs, *widths = kernels.widths(_sizes(weights))
    *outputs, classes = (len(w) for w in weights)
    narrow = [h[:, :n] for h, n in zip(hidden, outputs, strict=True)]
    gradients = row_gradients(dy, labels, logits[:, :classes], *narrow, *weights, precision=None)
    *gradients, dx = map(_fill, gradients, (*reversed(widths), inputs))
    return *gradients, dx.T


def _wide_rows_kernel(x_last, labels, *layers):
    def kernel(x_last, labels, *layers):
        loss, logits, hidden = kernels.forward(x_last, labels, layers[::2], layers[1::2])
        return loss, logits, *hidden

    return on_gpu(kernel, _wide_rows, x_last, labels, *layers)


def _wide_row_gradients_kernel(dy, labels, logits, *hidden_and_weights):
    def kernel(dy, labels, logits, *hidden_and_weights):
        return kernels.backward(dy, labels, logits, *_halves(hidden_and_weights))

    return on_gpu(kernel, _wide_row_gradients, dy, labels, logits, *hidden_and_weights)


# In small batches one kernel makes rows and the gradients of each loss by itself, another weighs them and sums them up.


def _wide_rows_and_gradients(x_last, labels, *layers):
    loss, logits, *hidden = _wide_rows(x_last, labels, *layers)
    gradients = _wide_row_gradients(jnp.ones_like(loss), labels, logits, *hidden, *layers[::2])
    return loss, logits, *hidden, *gradients


def _wide_rows_and_gradients_kernel(x_last, labels, *layers):
    def kernel(x_last, labels, *layers):
        loss, logits, hidden, gradients = kernels.forward_and_gradients(x_last, labels, layers[::2], layers[1::2])
        return loss, logits, *hidden, *gradients

    return on_gpu(kernel, _wide_rows_and_gradients, x_last, labels, *layers)


def _weighed_gradients(dy, x_last, *hidden_and_gradients, sizes):
    hidden, gradients = hidden_and_gradients[: len(sizes) - 2], hidden_and_gradients[len(sizes) - 2 :]
    *gradients, dx = (g * w for g, w in zip(gradients, (*[dy[:, None]] * (len(sizes) - 1), dy), strict=True))
    narrow = lambda arrays, sizes: [a[:, :n] for a, n in zip(arrays, sizes, strict=True)]  # noqa: E731
    gradients, inputs = narrow(reversed(gradients), sizes[1:]), narrow((x_last.T, *hidden), sizes[:-1])
    return dx, *_layer_gradients(gradients, inputs, None)


def _weighed_gradients_kernel(dy, x_last, *hidden_and_gradients, sizes):
    def kernel(dy, x_last, *hidden_and_gradients):
        hidden, gradients = hidden_and_gradients[: len(sizes) - 2], hidden_and_gradients[len(sizes) - 2 :]
        return kernels.weighed_gradients(dy, x_last, hidden, gradients, sizes)

    formula = functools.partial(_weighed_gradients, sizes=sizes)
    return on_gpu(kernel, formula, dy, x_last, *hidden_and_gradients)


_wide_rows_kernel = differentiable(_wide_rows_kernel, _wide_rows)
_wide_row_gradients_kernel = differentiable(_wide_row_gradients_kernel, _wide_row_gradients)
_wide_rows_and_gradients_kernel = differentiable(_wide_rows_and_gradients_kernel, _wide_rows_and_gradients)
_weighed_gradients_kernel = differentiable(_weighed_gradients_kernel, _weighed_gradients)


def _save_kernel(x, labels, *layers, precision):
    if not _kernels_take(x, layers[::2], precision):
        return _save(x, labels, *layers, precision=precision)
    batch = len(x)
    x_last, labels = batch_last(_fill(x, kernels.widths(_sizes(layers[::2]))[0])), batch_last(labels)
    together = kernels.together(len(labels), _sizes(layers[::2]))
    forward = _wide_rows_and_gradients_kernel if together else _wide_rows_kernel
    loss, logits, *rest = forward(x_last, labels, *layers)
    results = _results(loss[:batch], logits[:batch, : len(layers[-1])])
    return results, (x_last, *((None, None) if together else (labels, logits)), *rest, *layers[::2])


def _gradients_kernel(dy, x, labels, logits, *hidden_and_weights, precision):
    if labels is None:
        layers = len(hidden_and_weights) // 3
        weights = hidden_and_weights[-layers:]
        rest, sizes = hidden_and_weights[:-layers], _sizes(weights)
        dx_last, *dlayers = _weighed_gradients_kernel(batch_last(dy), x, *rest, sizes=sizes)
        return batch_first(dx_last[: sizes[0]], len(dy)), None, *dlayers
    hidden, weights = _halves(hidden_and_weights)
    if not _kernels_take(x, weights, precision):
        return _gradients(dy, x, labels, logits, *hidden_and_weights, precision=precision)
    *gradients, dx_last = _wide_row_gradients_kernel(batch_last(dy), labels, logits, *hidden_and_weights)
    layers = []
    for w, dz, h in zip(weights, reversed(gradients), (x.T, *hidden), strict=True):
        outputs, inputs = w.shape
        products = jnp.matmul(dz.T, h, precision=precision)[:outputs]
        db = products[:, inputs] if layers else jnp.sum(dz, axis=0)[:outputs]
        layers += [products[:, :inputs], db]
    return batch_first(dx_last[: weights[0].shape[1]], len(dy)), None, *layers


def _kernels_take(x, weights, precision):
    in_tf32 = x.dtype == jnp.float32 and on_tensor_cores(x.dtype, precision)
    return in_tf32 and len(x) > 0 and kernels.fits(_sizes(weights))


def _sizes(weights):
    return (weights[0].shape[1], *(len(w) for w in weights))


def _fill(a, width):
    return jnp.pad(a, ((0, 0), (0, width - a.shape[1])))


def _unsupported(*arrays, precision):
    return _checks.unsupported_dtype(*arrays)


def _pair_backward(function):
    return lambda gradients, *saved, **options: function(gradients[0], *saved, **options)


_MLP_SOFTMAX_CROSS_ENTROPY = Pair(
    _forward,
    Op(
        "mlp_softmax_cross_entropy_backward",
        {"xla": _pair_backward(_gradients), "pallas": _pair_backward(_gradients_kernel)},
    ),
    save={"xla": _save, "pallas": _save_kernel},
    name="mlp_softmax_cross_entropy",
    unsupported=_unsupported,
)


def _backward(save, gradients):
    def backward(dy, x, labels, *layers, precision):
        _, saved = save(x, labels, *layers, precision=precision)
        dx, _, *dlayers = gradients(dy, *saved, precision=precision)
        return dx, *dlayers

    return backward


def _backward_autodiff(dy, x, labels, *layers, precision):
    loss = lambda x, *layers: _forward(x, labels, *layers, precision=precision)[0]  # noqa: E731
    return jax.vjp(loss, x, *layers)[1](dy)


_BACKWARD = Op(
    "mlp_softmax_cross_entropy_backward",
    {
        "autodiff": _backward_autodiff,
        "xla": _backward(_save, _gradients),
        "pallas": _backward(_save_kernel, _gradients_kernel),
    },
    unsupported=_unsupported,
)


def mlp_softmax_cross_entropy(
    x: Float[Array, "*batch in_features"],
    labels: Int[Array, "*batch"],
    *layers: Float[Array, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> Float[Array, "*batch"]:
    """`softmax_cross_entropy(linear(...relu(linear(relu(linear(x, w1, b1)), w2, b2))...), labels)`.

    Args:
      x: inputs, with any leading axes.
      labels: a class an example, in [0, classes).
      layers: weights `(out_features, in_features)` and bias `(out_features,)` of each dense layer in turn; the last
        layer's outputs are the logits.
      precision: of the matrix products, as in `jax.lax.dot`.
      implementation: "pallas" (one kernel each way, for float32 in TF32 and layers of up to 256 features; for others
        the library's products), "xla", "autodiff", or None for the fastest here.

    Returns:
      The losses, in x's dtype. An integer that is no class makes its example's loss and gradients NaN.

    Raises:
      TypeError, ValueError: dtypes or shapes that do not fit, or layers that do not come in pairs.
    """
    return _call("mlp_softmax_cross_entropy", x, labels, layers, precision, implementation)[0]


def mlp_softmax_cross_entropy_with_classes(
    x: Float[Array, "*batch in_features"],
    labels: Int[Array, "*batch"],
    *layers: Float[Array, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch"], Int[Array, "*batch"]]:
    """`mlp_softmax_cross_entropy`, and the class that has the largest logit.

    Args:
      As in `mlp_softmax_cross_entropy`.

    Returns:
      (loss, classes): the classes int32; of equal logits the first.

    Raises:
      As in `mlp_softmax_cross_entropy`.
    """
    return _call("mlp_softmax_cross_entropy_with_classes", x, labels, layers, precision, implementation)


def mlp_softmax_cross_entropy_backward(
    dy: Float[Array, "*batch"],
    x: Float[Array, "*batch in_features"],
    labels: Int[Array, "*batch"],
    *layers: Float[Array, "..."],
    precision: PrecisionLike = None,
    implementation: Implementation = None,
) -> tuple[Array, ...]:
    """Gradients of `mlp_softmax_cross_entropy` in x and the layers.

    With `h` a layer's inputs and `dz` the gradient in its sums, `dz = dy (softmax(logits) - onehot(label))` at the
    last, they are `dw = dzᵀ h`, `db = Σ dz`, `dh = dz w`, and at the layer before `dz = dh` where `h > 0`, else 0.

    Args:
      dy: gradient of the whole in each loss.
      x, labels, layers: the forward's inputs.

    Returns:
      (dx, dw1, db1, dw2, db2, ...), each in the shape and dtype of what it is the gradient of.

    Raises:
      As in `mlp_softmax_cross_entropy`.

    Source: D. Rumelhart, G. Hinton and R. Williams, "Learning representations by back-propagating errors", 1986.
    """
    op = "mlp_softmax_cross_entropy_backward"
    dy, _ = _checks.floating(op, dy=dy, x=x)
    x, labels, layers = _check(op, x, labels, layers)
    _checks.shape(op, "dy", dy, *x.shape[:-1])
    count = math.prod(x.shape[:-1])
    dx, *dlayers = _BACKWARD(
        dy.reshape(count),
        x.reshape(count, x.shape[-1]),
        labels.reshape(count),
        *layers,
        precision=precision,
        implementation=implementation,
    )
    return dx.reshape(x.shape), *dlayers


def _call(op, x, labels, layers, precision, implementation):
    x, labels, layers = _check(op, x, labels, layers)
    count = math.prod(x.shape[:-1])
    results = _MLP_SOFTMAX_CROSS_ENTROPY.named(op)(
        x.reshape(count, x.shape[-1]),
        labels.reshape(count),
        *layers,
        precision=precision,
        implementation=implementation,
    )
    return tuple(a.reshape(labels.shape) for a in results)


def _check(op, x, labels, layers):
    if not layers or len(layers) % 2:
        raise ValueError(f"{op}: layers are {len(layers)} arrays; wants w and b of each layer, at least of one")
    names = [f"layers[{i}]" for i in range(len(layers))]
    x, *layers = _checks.floating(op, x=x, **dict(zip(names, layers, strict=True)))
    labels = _checks.array(op, "labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{op}: labels has dtype {labels.dtype}; wants integers, a class an example")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has shape {x.shape}; wants (..., in_features), at least one feature")
    _checks.shape(op, "labels", labels, *x.shape[:-1])
    features = x.shape[-1]
    for i in range(0, len(layers), 2):
        _checks.shape(op, names[i], layers[i], "out_features", features)
        features = layers[i].shape[0]
        _checks.shape(op, names[i + 1], layers[i + 1], features)
    return x, labels.astype(jnp.int32), layers
