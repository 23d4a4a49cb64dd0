import jax
import numpy as np
import pytest
from helpers import put

import jaxbp

# For conv2d: two images of three channels, four filters.
X, W, DY = (np.zeros(shape, np.float32) for shape in ((2, 3, 5, 6), (4, 3, 3, 2), (2, 4, 3, 5)))
POOL_DY, INDICES = np.zeros((2, 3, 2, 3), np.float32), np.zeros((2, 3, 2, 3), np.uint8)


def zeros(*shape, dtype="float32"):
    return put(np.zeros(shape, dtype))


def conv2d(x=X, w=W, b=None, **options):
    return lambda: jaxbp.conv2d(x, w, b, **options)


def max_pool2d(x=X, window=2, **options):
    return lambda: jaxbp.max_pool2d(x, window, **options)


def max_pool2d_backward(dy=POOL_DY, indices=INDICES, input_size=(5, 6), window=2):
    return lambda: jaxbp.max_pool2d_backward(dy, indices, input_size, window)


def linear(x=(2, 5), w=(3, 5), b=(3,)):
    return lambda: jaxbp.linear(zeros(*x), zeros(*w), zeros(*b))


def layer_norm_linear(x=(2, 5), scale=(5,), bias=(5,), w=(3, 5), b=(3,), **options):
    return lambda: jaxbp.layer_norm_linear(*(zeros(*shape) for shape in (x, scale, bias, w, b)), **options)


def cross_entropy(logits, labels):
    return lambda: jaxbp.softmax_cross_entropy(logits, labels)


SHAPES = {
    "images without a batch": (
        conv2d(X[0]),
        "conv2d: x has shape (3, 5, 6); wants (batch, in_channels, height, width)",
    ),
    "one filter": (
        conv2d(w=W[0]),
        "conv2d: w has shape (3, 3, 2); wants (out_channels, in_channels/groups, filter_height, filter_width)",
    ),
    "mismatched channels": (
        conv2d(w=zeros(4, 2, 3, 2)),
        "conv2d: x has 3 channels, w has shape (4, 2, 3, 2) and groups is 1; wants in_channels = groups * w.shape[1], "
        "and out_channels a multiple of groups",
    ),
    "groups that do not divide the filters": (
        conv2d(w=zeros(4, 1, 3, 2), groups=3),
        "conv2d: x has 3 channels, w has shape (4, 1, 3, 2) and groups is 3; wants in_channels = groups * w.shape[1], "
        "and out_channels a multiple of groups",
    ),
    "images NHWC": (
        conv2d(zeros(2, 5, 6, 3)),
        "conv2d: x has 5 channels, w has shape (4, 3, 3, 2) and groups is 1; wants in_channels = groups * w.shape[1], "
        "and out_channels a multiple of groups. If x is NHWC, pass dimension_numbers, say ('NHWC', 'HWIO', 'NHWC')",
    ),
    "images NHWC and filters HWIO": (
        conv2d(zeros(2, 5, 6, 3), zeros(3, 2, 3, 4)),
        "conv2d: x has 5 channels, w has shape (3, 2, 3, 4) and groups is 1; wants in_channels = groups * w.shape[1], "
        "and out_channels a multiple of groups. If x is NHWC, pass dimension_numbers, say ('NHWC', 'HWIO', 'NHWC')",
    ),
    "images NHWC to pool": (
        max_pool2d(zeros(2, 5, 6, 1)),
        "max_pool2d: the window is 2 x 2; wants at most 6 x 1, the size of the padded input. x has shape (2, 5, 6, 1); "
        "if this is NHWC, pass channel_axis=-1",
    ),
    "a vector NHWC": (
        conv2d(X[0], dimension_numbers=("NHWC", "HWIO", "NHWC"), w=zeros(3, 2, 5, 4)),
        "conv2d: x has shape (3, 5, 6); wants (batch, height, width, in_channels)",
    ),
    "dy of conv1d_backward": (
        lambda: jaxbp.conv1d_backward(zeros(2, 4, 5), zeros(2, 3, 5), zeros(4, 3, 2)),
        "conv1d_backward: dy has shape (2, 4, 5); wants (2, 4, 4)",
    ),
    "bias shape": (conv2d(b=zeros(3)), "conv2d: b has shape (3,); wants (4,)"),
    "filter larger than the input": (
        conv2d(w=zeros(4, 3, 6, 2)),
        "conv2d: the filter with its dilation is 6 x 2; wants at most 5 x 6, the size of the padded input",
    ),
    "dilated filter larger than the input": (
        conv2d(dilation=4, padding=(1, 0)),
        "conv2d: the filter with its dilation is 9 x 5; wants at most 7 x 6, the size of the padded input",
    ),
    "dy of conv2d_backward_input": (
        lambda: jaxbp.conv2d_backward_input(DY[:, :, :, 1:], W, (5, 6)),
        "conv2d_backward_input: dy has shape (2, 4, 3, 4); wants (batch, 4, 3, 5)",
    ),
    "dy of conv2d_backward_weights": (
        lambda: jaxbp.conv2d_backward_weights(DY[:1], X, (3, 2)),
        "conv2d_backward_weights: dy has shape (1, 4, 3, 5); wants (2, out_channels, 3, 5)",
    ),
    "dy of conv2d_backward_bias": (
        lambda: jaxbp.conv2d_backward_bias(DY[0]),
        "conv2d_backward_bias: dy has shape (4, 3, 5); wants (batch, out_channels, out_height, out_width)",
    ),
    "dy of relu_backward": (
        lambda: jaxbp.relu_backward(zeros(3), zeros(4)),
        "relu_backward: dy has shape (3,); wants (4,)",
    ),
    "one image to pool": (
        max_pool2d(X[0]),
        "max_pool2d: x has shape (3, 5, 6); wants (batch, channels, height, width)",
    ),
    "one image to pool with indices": (
        lambda: jaxbp.max_pool2d_with_indices(X[0], 2),
        "max_pool2d_with_indices: x has shape (3, 5, 6); wants (batch, channels, height, width)",
    ),
    "window larger than the input": (
        max_pool2d(window=(9, 2), padding=(1, 0)),
        "max_pool2d: the window is 9 x 2; wants at most 7 x 6, the size of the padded input",
    ),
    "padding of a whole window": (
        max_pool2d(padding=2),
        "max_pool2d: padding is ((2, 2), (2, 2)); wants less than the size of the window with its dilation, (2, 2)",
    ),
    "dy of max_pool2d_backward": (
        max_pool2d_backward(dy=POOL_DY[:, :, :1]),
        "max_pool2d_backward: dy has shape (2, 3, 1, 3); wants (batch, channels, 2, 3)",
    ),
    "indices": (
        max_pool2d_backward(indices=INDICES[:1]),
        "max_pool2d_backward: indices has shape (1, 3, 2, 3); wants (2, 3, 2, 3)",
    ),
    "dy of conv2d_relu_max_pool2d_backward": (
        lambda: jaxbp.conv2d_relu_max_pool2d_backward(DY[:, :, :1, :1], INDICES[:, :1, :1, :1], X, W, window=2),
        "conv2d_relu_max_pool2d_backward: dy has shape (2, 4, 1, 1); wants (2, 4, 1, 2)",
    ),
    "indices of conv2d_relu_max_pool2d_backward": (
        lambda: jaxbp.conv2d_relu_max_pool2d_backward(DY[:, :, :1, :2], INDICES[:1], X, W, window=2),
        "conv2d_relu_max_pool2d_backward: indices has shape (1, 3, 2, 3); wants (2, 4, 1, 2)",
    ),
    "in_features": (linear(x=(2, 4)), "linear: x has shape (2, 4); wants (..., 5), the in_features of w (3, 5)"),
    "weights of Flax": (
        linear(w=(5, 3)),
        "linear: x has shape (2, 5); wants (..., 3), the in_features of w (5, 3). If w is (in_features, out_features), "
        "pass w.T",
    ),
    "scalar to linear": (linear(x=()), "linear: x has shape (); wants (..., 5), the in_features of w (3, 5)"),
    "a vector of weights": (linear(w=(5,)), "linear: w has shape (5,); wants (out_features, in_features)"),
    "bias of linear": (linear(b=(5,)), "linear: b has shape (5,); wants (3,)"),
    "dy of linear_backward": (
        lambda: jaxbp.linear_backward(zeros(2, 5), zeros(2, 5), zeros(3, 5)),
        "linear_backward: dy has shape (2, 5); wants (2, 3)",
    ),
    "no element to normalize": (
        lambda: jaxbp.rms_norm(zeros(2, 0), zeros(0)),
        "rms_norm: x has shape (2, 0); wants (..., hidden), at least one element per row",
    ),
    "scalar to normalize": (
        lambda: jaxbp.layer_norm(zeros(), zeros(1), zeros(1)),
        "layer_norm: x has shape (); wants (..., hidden), at least one element per row",
    ),
    "scale": (layer_norm_linear(scale=(4,)), "layer_norm_linear: scale has shape (4,); wants (5,)"),
    "bias of the norm": (layer_norm_linear(bias=(1, 5)), "layer_norm_linear: bias has shape (1, 5); wants (5,)"),
    "weights behind the norm": (layer_norm_linear(w=(5, 3)), "layer_norm_linear: w has shape (5, 3); wants (out, 5)"),
    "bias behind the norm": (layer_norm_linear(b=(5,)), "layer_norm_linear: b has shape (5,); wants (3,)"),
    "dy of layer_norm_backward": (
        lambda: jaxbp.layer_norm_backward(zeros(5), zeros(2, 5), zeros(5)),
        "layer_norm_backward: dy has shape (5,); wants (2, 5)",
    ),
    "dy of rms_norm_backward": (
        lambda: jaxbp.rms_norm_backward(zeros(5), zeros(2, 5), zeros(5)),
        "rms_norm_backward: dy has shape (5,); wants (2, 5)",
    ),
    "dy of layer_norm_linear_backward": (
        lambda: jaxbp.layer_norm_linear_backward(zeros(2, 5), zeros(2, 5), zeros(5), zeros(5), zeros(3, 5)),
        "layer_norm_linear_backward: dy has shape (2, 5); wants (2, 3)",
    ),
    "classes": (
        cross_entropy(zeros(2, 3), zeros(2, 1, dtype="int32")),
        "softmax_cross_entropy: integer labels have shape (2, 1); wants (2,), one class per example of logits (2, 3)",
    ),
    "weights of classes": (
        cross_entropy(zeros(2, 3), zeros(2)),
        "softmax_cross_entropy: logits has shape (2, 3) and labels has shape (2,); wants shapes that broadcast. "
        "Classes are integers, say labels.astype(jnp.int32)",
    ),
    "no class": (
        cross_entropy(zeros(2, 0), zeros(2, dtype="int32")),
        "softmax_cross_entropy: logits has shape (2, 0); wants (..., classes), at least one class",
    ),
    "dy of softmax_cross_entropy_backward": (
        lambda: jaxbp.softmax_cross_entropy_backward(zeros(3), zeros(2, 3), zeros(2, dtype="int32")),
        "softmax_cross_entropy_backward: dy has shape (3,); wants (2,)",
    ),
    "shapes that do not broadcast": (
        lambda: jaxbp.add(zeros(2, 3), zeros(2)),
        "add: x1 has shape (2, 3) and x2 has shape (2,); wants shapes that broadcast",
    ),
    "slopes larger than x": (
        lambda: jaxbp.prelu(zeros(3), zeros(2, 3)),
        "prelu: alpha has shape (2, 3); wants a shape that broadcasts to (3,), the shape of x",
    ),
    "a column of targets": (
        lambda: jaxbp.mean_squared_error(zeros(3), zeros(3, 1)),
        "mean_squared_error: targets has shape (3, 1); wants (3,), the shape of predictions",
    ),
    "inner sizes": (
        lambda: jaxbp.matmul(zeros(2, 3), zeros(2, 3)),
        "matmul: a has shape (2, 3) and b has shape (2, 3); wants a.shape[-1] == b.shape[-2]",
    ),
    "batches": (
        lambda: jaxbp.matmul(zeros(2, 1, 3), zeros(3, 3, 1)),
        "matmul: a has shape (2, 1, 3) and b has shape (3, 3, 1); wants batch axes (all but the last two) "
        "that broadcast",
    ),
    "a number to dot": (
        lambda: jaxbp.dot(zeros(), zeros(2)),
        "dot: a has shape (); wants at least one axis; for a factor of shape (), use jaxbp.multiply",
    ),
    "a maximum of nothing": (
        lambda: jaxbp.max(zeros(2, 0), 1),
        "max: a has shape (2, 0); wants at least one element along axis (1,)",
    ),
    "scale of batch_norm": (
        lambda: jaxbp.batch_norm(zeros(2, 3), zeros(2), zeros(2)),
        "batch_norm: scale has shape (2,); wants (3,)",
    ),
    "a vector to batch_norm": (
        lambda: jaxbp.batch_norm(zeros(3), zeros(3), zeros(3)),
        "batch_norm: x has shape (3,); wants (batch, channels, ...)",
    ),
    "a mask of another shape": (
        lambda: jaxbp.softmax(zeros(2, 3), where=zeros(2, dtype="bool")),
        "softmax: where has shape (2,); wants a shape that broadcasts to (2, 3)",
    ),
    "a mask of examples of another shape": (
        lambda: jaxbp.softmax_cross_entropy(zeros(2, 3), zeros(2, dtype="int32"), where=zeros(3, dtype="bool")),
        "softmax_cross_entropy: where has shape (3,); wants a shape that broadcasts to (2,)",
    ),
    "weights of positive labels": (
        lambda: jaxbp.sigmoid_binary_cross_entropy(zeros(2, 3), zeros(2, 3), pos_weight=zeros(2)),
        "sigmoid_binary_cross_entropy: logits has shape (2, 3) and pos_weight has shape (2,); wants shapes that "
        "broadcast",
    ),
    "scale of a row of two axes": (
        lambda: jaxbp.layer_norm(zeros(2, 3, 4), zeros(4), axis=(1, 2)),
        "layer_norm: scale has shape (4,); wants (3, 4)",
    ),
    "running averages": (
        lambda: jaxbp.batch_norm(zeros(2, 3), running=(zeros(3), zeros(2))),
        "batch_norm: running[1] has shape (2,); wants (3,)",
    ),
    "groups that do not divide the channels": (
        lambda: jaxbp.group_norm(zeros(2, 6), num_groups=4),
        "group_norm: num_groups is 4; wants a divisor of the number of channels, 6",
    ),
    "a vector to group_norm": (
        lambda: jaxbp.group_norm(zeros(3)),
        "group_norm: x has shape (3,); wants (batch, channels, ...)",
    ),
    "scalar to flatten": (lambda: jaxbp.flatten(zeros()), "flatten: x has shape (); wants (batch, ...)"),
}

DTYPES = {
    "complex image": (
        conv2d(zeros(*X.shape, dtype="complex64")),
        "conv2d: x has dtype complex64; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "complex image to pool": (
        max_pool2d(zeros(*X.shape, dtype="complex64")),
        "max_pool2d: x has dtype complex64; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "boolean image to average": (
        lambda: jaxbp.avg_pool2d(zeros(*X.shape, dtype="bool"), 2),
        "avg_pool2d: x has dtype bool; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "integers to sigmoid": (
        lambda: jaxbp.sigmoid(zeros(3, dtype="int32")),
        "sigmoid: x has dtype int32; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "an integer to silu": (
        lambda: jax.jit(jaxbp.silu)(2),
        "silu: x has dtype int32; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "a difference of booleans": (
        lambda: jaxbp.subtract(zeros(3, dtype="bool"), True),
        "subtract: x1 has dtype bool; wants a floating dtype, say x1.astype(jnp.float32)",
    ),
    "booleans to softmax": (
        lambda: jaxbp.softmax(zeros(3, dtype="bool")),
        "softmax: x has dtype bool; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "integers to dropout": (
        lambda: jaxbp.dropout(zeros(3, dtype="int32"), zeros(2, dtype="uint32"), 0.5),
        "dropout: x has dtype int32; wants a floating dtype, say x.astype(jnp.float32)",
    ),
    "integer predictions": (
        lambda: jaxbp.huber(zeros(3, dtype="int32"), zeros(3)),
        "huber: predictions has dtype int32; wants a floating dtype, say predictions.astype(jnp.float32)",
    ),
    "integer logits": (
        cross_entropy(zeros(2, 3, dtype="int32"), zeros(2, 3)),
        "softmax_cross_entropy: logits has dtype int32; wants a floating dtype, say logits.astype(jnp.float32)",
    ),
    "float indices": (
        max_pool2d_backward(indices=POOL_DY),
        "max_pool2d_backward: indices has dtype float32; wants an array of integers",
    ),
    "a key of another kind": (
        lambda: jaxbp.dropout(zeros(3), zeros(2, dtype="int32"), 0.5),
        "dropout: key has dtype int32 and shape (2,); wants one key, say jax.random.key(0)",
    ),
    "a mask of floats": (
        lambda: jaxbp.sum(zeros(3), where=zeros(3)),
        "sum: where has dtype float32; wants bool, for example `where != 0`",
    ),
    "a mask of integers": (
        lambda: jaxbp.softmax(zeros(3), where=zeros(3, dtype="int32")),
        "softmax: where has dtype int32; wants bool, for example `where != 0`",
    ),
    "an unknown option of a pool": (
        max_pool2d(strides=2),
        "max_pool2d: has no argument strides; wants only options among stride, padding, dilation, ceil_mode, "
        "channel_axis",
    ),
    "a list": (conv2d([[1.0]]), "conv2d: x is a list; wants an array"),
    "a list of labels": (cross_entropy(zeros(2, 3), [0, 1]), "softmax_cross_entropy: labels is a list; wants an array"),
    "a list of indices": (
        max_pool2d_backward(indices=[0]),
        "max_pool2d_backward: indices is a list; wants an array of integers",
    ),
    "a string": (lambda: jaxbp.relu("1"), "relu: x is a str; wants an array"),
    "a complex number": (lambda: jaxbp.add(zeros(3), 1j), "add: x2 is a complex; wants an array"),
    "no images": (conv2d(None), "conv2d: x is a NoneType; wants an array"),
    "no filters": (conv2d(w=None), "conv2d: w is a NoneType; wants an array"),
}

AN_INT = "an int of at least {}, or a pair of such ints"
A_PADDING = (
    "'VALID', 'SAME', or 'SAME_LOWER'; or an int; or a sequence with one entry per axis (2 in total), each an int or a "
    "pair (before, after). Each int is at least 0"
)
OPTIONS = {
    **{
        f"stride={stride!r}": (conv2d(stride=stride), f"conv2d: stride is {stride!r}; wants {AN_INT.format(1)}")
        for stride in (True, 1.0, 0, (1, 0), (1, True), (1, 1, 1), None)
    },
    **{
        f"padding={padding!r}": (conv2d(padding=padding), f"conv2d: padding is {padding!r}; wants {A_PADDING}")
        for padding in (-1, 0.5, (0, -1), (1, 2, 3), ((0, 1), (-1, 0)), "CAUSAL")
    },
    **{
        f"groups={groups!r}": (conv2d(groups=groups), f"conv2d: groups is {groups!r}; wants an int of at least 1")
        for groups in (0, 1.0, True)
    },
    "unknown padding": (
        conv2d(padding="FULL"),
        f"conv2d: padding is 'FULL'; wants {A_PADDING}",
    ),
    "unknown padding of a pool": (
        max_pool2d(padding="reflect"),
        f"max_pool2d: padding is 'reflect'; wants {A_PADDING}",
    ),
    **{
        f"epsilon={epsilon!r}": (
            layer_norm_linear(epsilon=epsilon),
            f"layer_norm_linear: epsilon is {epsilon!r}; wants a finite number of at least 0",
        )
        for epsilon in (-1e-5, float("inf"), float("nan"), "1e-5", True)
    },
    "dilation": (conv2d(dilation=0), f"conv2d: dilation is 0; wants {AN_INT.format(1)}"),
    "dimension_numbers": (
        conv2d(dimension_numbers="NHWC"),
        "conv2d: dimension_numbers is 'NHWC'; wants None or three layouts, say ('NHWC', 'HWIO', 'NHWC')",
    ),
    "padding of sequences": (
        lambda: jaxbp.conv1d(zeros(2, 3, 5), zeros(4, 3, 2), padding=(1, 0)),
        "conv1d: padding is (1, 0); wants 'VALID', 'SAME', 'SAME_LOWER', or 'CAUSAL'; or an int; or a sequence with "
        "one entry per axis (1 in total), each an int or a pair (before, after). Each int is at least 0",
    ),
    "stride of sequences": (
        lambda: jaxbp.conv1d(zeros(2, 3, 5), zeros(4, 3, 2), stride=(1, 1)),
        "conv1d: stride is (1, 1); wants an int of at least 1",
    ),
    "dilation of a pool": (max_pool2d(dilation=0), f"max_pool2d: dilation is 0; wants {AN_INT.format(1)}"),
    "ceil_mode": (max_pool2d(ceil_mode=1), "max_pool2d: ceil_mode is 1; wants True or False"),
    "count_include_pad": (
        lambda: jaxbp.avg_pool2d(X, 2, count_include_pad=None),
        "avg_pool2d: count_include_pad is None; wants True or False",
    ),
    **{
        f"channel_axis={axis!r}": (
            max_pool2d(channel_axis=axis),
            f"max_pool2d: channel_axis is {axis!r}; wants an int from 1 to 3 or from -3 to -1",
        )
        for axis in (0, -4, 4, True, None)
    },
    "window": (max_pool2d(window=0), f"max_pool2d: window is 0; wants {AN_INT.format(1)}"),
    "stride of a pool": (max_pool2d(stride=True), f"max_pool2d: stride is True; wants {AN_INT.format(1)}"),
    "size of the input": (
        lambda: jaxbp.conv2d_backward_input(DY, W, (5, 6.0)),
        f"conv2d_backward_input: input_size is (5, 6.0); wants {AN_INT.format(1)}",
    ),
    "axis": (lambda: jaxbp.sum(zeros(2, 3), 2), "sum: axis is 2; wants None, or one or more different ints in [-2, 2)"),
    "an axis twice": (
        lambda: jaxbp.softmax(zeros(2, 3), (1, -1)),
        "softmax: axis is (1, -1); wants None, or one or more different ints in [-2, 2)",
    ),
    "axes": (
        lambda: jaxbp.transpose(zeros(2, 3), (0,)),
        "transpose: axes is (0,); wants None or each of the 2 axes once",
    ),
    "ddof": (lambda: jaxbp.var(zeros(3), ddof=0.5), "var: ddof is 0.5; wants an int"),
    "bounds": (lambda: jaxbp.clip(zeros(3), 1, 0), "clip: max is 0; wants a number in [1.0, inf]"),
    "a bound in a list": (lambda: jaxbp.clip(zeros(3), [0]), "clip: min is [0]; wants a number in [-inf, inf]"),
    "a traced label_smoothing": (
        lambda: jax.jit(lambda s: jaxbp.softmax_cross_entropy(zeros(2, 3), zeros(2, 3), label_smoothing=s))(0.1),
        "softmax_cross_entropy: label_smoothing is a traced array; wants a Python number",
    ),
    "several values of epsilon": (
        lambda: jaxbp.group_norm(zeros(2, 3), num_groups=3, epsilon=zeros(3)),
        "group_norm: epsilon has shape (3,); wants a Python number",
    ),
    "infinite frequencies": (
        lambda: jaxbp.rotary_embedding(zeros(2), zeros(dtype="int32"), frequencies=[float("inf")]),
        "rotary_embedding: frequencies is [inf]; wants finite numbers",
    ),
    "rate": (
        lambda: jaxbp.dropout(zeros(3), zeros(2, dtype="uint32"), 1.5),
        "dropout: rate is 1.5; wants a number in [0.0, 1.0]",
    ),
    "PyTorch's spelling of gelu": (
        lambda: jaxbp.gelu(zeros(3), approximate="none"),
        "gelu: approximate is 'none'; wants True or False",
    ),
    "label_smoothing": (
        lambda: jaxbp.softmax_cross_entropy(zeros(2, 3), zeros(2, 3), label_smoothing=1.5),
        "softmax_cross_entropy: label_smoothing is 1.5; wants a number in [0.0, 1.0]",
    ),
    "z_loss": (
        lambda: jaxbp.softmax_cross_entropy(zeros(2, 3), zeros(2, 3), z_loss=-1),
        "softmax_cross_entropy: z_loss is -1; wants a number in [0.0, inf]",
    ),
    "initial": (
        lambda: jaxbp.max(zeros(3), initial="0"),
        "max: initial is '0'; wants a number in [-inf, inf]",
    ),
    "several slopes": (
        lambda: jaxbp.leaky_relu(zeros(3), zeros(3)),
        "leaky_relu: negative_slope has shape (3,); wants a Python number or an array of shape ()",
    ),
    "axes to drop together": (
        lambda: jaxbp.dropout(zeros(3), zeros(2, dtype="uint32"), 0.5, (1,)),
        "dropout: broadcast_dims is 1; wants an int in [-1, 1)",
    ),
    "a first axis to normalize": (
        lambda: jaxbp.rms_norm(zeros(2, 3), axis=0),
        "rms_norm: axis is 0; wants the last axis, or several adjacent axes up to the last one",
    ),
    "channel_axis": (
        lambda: jaxbp.batch_norm(zeros(2, 3), channel_axis=2),
        "batch_norm: channel_axis is 2; wants an int in [-2, 2)",
    ),
    "the batch as channel_axis": (
        lambda: jaxbp.group_norm(zeros(2, 3), channel_axis=0),
        "group_norm: channel_axis is 0; wants an axis other than axis 0, the batch axis",
    ),
    "no running averages": (
        lambda: jaxbp.batch_norm(zeros(2, 3), use_running_average=True),
        "batch_norm: running is None; wants (mean, var), because use_running_average is True",
    ),
    "momentum": (
        lambda: jaxbp.batch_norm(zeros(2, 3), momentum=2),
        "batch_norm: momentum is 2; wants a number in [0.0, 1.0]",
    ),
    "reverse": (
        lambda: jaxbp.checkpointed_scan(lambda s, x: (s, x), 1.0, zeros(3), reverse=1),
        "checkpointed_scan: reverse is 1; wants True or False",
    ),
    "delta": (lambda: jaxbp.huber(zeros(3), zeros(3), -1), "huber: delta is -1; wants a number in [0.0, inf]"),
    "implementation": (
        conv2d(implementation="cuda"),
        "conv2d: implementation is 'cuda'; wants 'pallas', 'xla', 'autodiff', or None",
    ),
    "implementation that cannot be hashed": (
        conv2d(implementation=["xla"]),
        "conv2d: implementation is ['xla']; wants 'pallas', 'xla', 'autodiff', or None",
    ),
}


def _check(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


@pytest.mark.parametrize(("call", "message"), SHAPES.values(), ids=SHAPES)
def test_shapes_that_do_not_fit_are_a_value_error(call, message):
    _check(call, ValueError, message)


@pytest.mark.parametrize(("call", "message"), DTYPES.values(), ids=DTYPES)
def test_what_is_no_array_of_the_right_dtype_is_a_type_error(call, message):
    _check(call, TypeError, message)


@pytest.mark.parametrize(("call", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_mean_nothing_are_a_value_error(call, message):
    _check(call, ValueError, message)
