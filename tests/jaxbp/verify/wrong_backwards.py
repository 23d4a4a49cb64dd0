"""Wrong backwards from other projects and common texts, each rewritten as a small pair. To write their page:

PYTHONPATH=. python tests/jaxbp/verify/wrong_backwards.py > docs/wrong_backwards.md
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp import Pair
from jaxbp.verify import EXTRA_DATA, CheckResult, CheckRow, check
from jaxbp.verify.points import USER_DATA


@dataclasses.dataclass(frozen=True)
class WrongBackward:
    """A forward with a wrong backward. The issue `source` reported the mistake `slip`. `settings` are arguments of
    `check`."""

    op: str
    source: str
    slip: str
    forward: Callable
    backward: Callable
    shapes: tuple[tuple[int, ...], ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    positive: bool = False

    def check(self) -> CheckResult:
        random = np.random.default_rng(0)
        data = [random.standard_normal(shape).astype(np.float32) for shape in self.shapes]
        data = [1 / (1 + np.exp(-a)) for a in data] if self.positive else data
        pair = Pair(self.forward, {"xla": self.backward}, name=self.op)
        added = [name for name in EXTRA_DATA if name != "dtypes"]
        settings = dict(order=1, added=added, implementations=["xla", "autodiff"])
        return check(pair, *data, **settings, **self.settings)

    @property
    def link(self) -> str:
        if "#" not in self.source:
            return self.source
        repository, number = self.source.split("#")
        return f"[{self.source}](https://github.com/{repository}/issues/{number})"


def said(row: CheckRow) -> str:
    data = "" if row.data == USER_DATA else f", {row.data}"
    return "; ".join(filter(None, (f"`{row.argument}`{data}", row.reason)))


def layer_norm(x, scale, bias):
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * scale + bias


def normalized(x):
    centered = x - x.mean(axis=-1, keepdims=True)
    inv_std = jax.lax.rsqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5)
    return centered * inv_std, inv_std


def layer_norm_backward(mean, dy, x, scale, bias):
    """The gradients are correct if `mean` is the mean over the features."""
    xhat, inv_std = normalized(x)
    t = dy * scale
    return inv_std * (t - mean(t) - xhat * mean(t * xhat)), (dy * xhat).sum(axis=0), dy.sum(axis=0)


def of_features(a):
    return a.mean(axis=-1, keepdims=True)


def layer_norm_of_all_rows(dy, x, scale, bias):
    return layer_norm_backward(lambda a: jnp.full_like(a, a.sum() / a.shape[-1]), dy, x, scale, bias)


def layer_norm_swapped(dy, x, scale, bias):
    dx, dscale, dbias = layer_norm_backward(of_features, dy, x, scale, bias)
    return dx, dbias, dscale


def layer_norm_diagonal(dy, x, scale, bias):
    xhat, inv_std = normalized(x)
    dx = dy * scale * inv_std * (1 - 1 / x.shape[-1] - xhat**2 / x.shape[-1])
    return dx, (dy * xhat).sum(axis=0), dy.sum(axis=0)


def layer_norm_other_scale(dy, x, scale, bias):
    """Recompute x̂ from y, but read scale and bias at the row's index."""
    y = layer_norm(x, scale, bias)
    rows = jnp.arange(x.shape[0]) % scale.size
    xhat = (y - bias[rows][:, None]) / scale[rows][:, None]
    dx, _, dbias = layer_norm_backward(of_features, dy, x, scale, bias)
    return dx, (dy * xhat).sum(axis=0), dbias


def layer_norm_without_scale(dy, x, scale, bias):
    dx, _, _ = layer_norm_backward(of_features, dy, x, jnp.ones_like(scale), bias)
    return dx, *layer_norm_backward(of_features, dy, x, scale, bias)[1:]


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * scale


def rms_norm_without_scale(dy, x, scale):
    inv = jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    xhat = x * inv
    return inv * (dy - xhat * of_features(dy * xhat)), (dy * xhat).sum(axis=0)


def prenorm(x, residual):
    z = x + residual
    return z * jax.lax.rsqrt((z * z).mean(axis=-1, keepdims=True) + 1e-5), z


def through_norm(dy, z):
    inv = jax.lax.rsqrt((z * z).mean(axis=-1, keepdims=True) + 1e-5)
    return inv * (dy - z * inv * of_features(dy * z * inv))


def prenorm_added_before(dy, x, residual):
    dz = through_norm(dy[0] + dy[1], x + residual)
    return dz, dz


def prenorm_no_residual(dy, x, residual):
    return through_norm(dy[0], x + residual) + dy[1], jnp.zeros_like(residual)


def group_norm(x):
    flat = x.reshape(*x.shape[:2], -1)
    return normalized(flat)[0].reshape(x.shape)


def group_norm_of_last_axis(dy, x):
    flat = x.reshape(*x.shape[:2], -1)
    xhat, inv_std = normalized(flat)
    t, hidden = dy.reshape(flat.shape), dy.shape[-1]
    mean = lambda a: a[..., :hidden].sum(axis=-1, keepdims=True) / hidden  # noqa: E731
    return (inv_std * (t - mean(t) - xhat * mean(t * xhat))).reshape(x.shape)


def attention(scores, v):
    """Compute causal linear attention on two devices. The first device has the first and last rows of y."""
    y = jnp.tril(scores) @ v
    return jnp.concatenate([y[:1], y[3:], y[1:3]])


def attention_of_dy_in_order(dy, scores, v):
    return jnp.tril(dy @ v.T), jnp.tril(scores).T @ dy


def mean_of_rows(x):
    return x.mean(axis=-1)


def trace_by_stride(dy, x):
    return jnp.zeros(x.size, x.dtype).at[:: x.shape[1] + 1].set(dy).reshape(x.shape)


def decayed(x, a):
    """Compute `y_i = Σ_{j <= i} exp(a_i - a_j) x_j`."""
    return jnp.tril(jnp.exp(a[:, None] - a)) @ x


def decayed_not_zeroed(dy, x, a):
    w = jnp.exp(a[:, None] - a)
    dw = jnp.outer(dy, x) * jnp.tril(w)
    dw = dw.at[:2, 2:].set((jnp.outer(dy, x) * w)[:2, 2:])
    return jnp.tril(w).T @ dy, dw.sum(axis=1) - dw.sum(axis=0)


def gaussian(d, conic):
    return jnp.exp(-0.5 * (conic[0] * d[0] ** 2 + conic[2] * d[1] ** 2) - conic[1] * d[0] * d[1])


def gaussian_half(dy, d, conic):
    g = dy * gaussian(d, conic)
    dd = -jnp.stack([conic[0] * d[0] + conic[1] * d[1], conic[2] * d[1] + conic[1] * d[0]]) * g
    return dd, -0.5 * jnp.stack([d[0] ** 2, d[0] * d[1], d[1] ** 2]) * g


def softplus_of_3(x):
    return jnp.where(3 * x > 1, x, jnp.log1p(jnp.exp(jnp.minimum(3 * x, 1))) / 3)


def softplus_compares_the_result(dy, x):
    y = softplus_of_3(x)
    return jnp.where(3 * y > 1, dy, dy * jax.nn.sigmoid(3 * x))


def hard_sigmoid(x):
    return jnp.clip(x / 6 + 0.5, 0, 1)


def hard_swish(x):
    return jnp.where(x <= -3, 0, jnp.where(x < 3, x * (x + 3) / 6, x))


def max_of_windows(x):
    return jnp.max(jnp.stack([x[:-2], x[1:-1], x[2:]]), axis=0)


def one_gradient_each(dy, x):
    first = jnp.argmax(jnp.stack([x[:-2], x[1:-1], x[2:]]), axis=0) + jnp.arange(x.size - 2)
    return jnp.zeros_like(x).at[first].set(dy)


def max_of_rows(x):
    return x.max(axis=-1)


def to_all_that_are_close(within):
    return lambda dy, x: dy[:, None] * (jnp.abs(x - x.max(axis=-1, keepdims=True)) <= within)


def soft_cross_entropy(x, p):
    return -(p * jax.nn.log_softmax(x)).sum(axis=-1)


def soft_cross_entropy_of_sum_1(dy, x, p):
    return dy[:, None] * (jax.nn.softmax(x) - p), -dy[:, None] * jax.nn.log_softmax(x)


LABELS = np.arange(4) % 3


def cross_entropy(x):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), LABELS[:, None], axis=-1)[:, 0]


def cross_entropy_of_first_dy(dy, x):
    return dy[0] * (jax.nn.softmax(x) - jax.nn.one_hot(LABELS, x.shape[-1], dtype=x.dtype))


def binary_cross_entropy(p, y):
    return -y * jnp.log(p) - (1 - y) * jnp.log1p(-p)


def binary_cross_entropy_in_logits(dy, p, y):
    return dy * (p - y), dy * (jnp.log1p(-p) - jnp.log(p))


def reciprocal_clamped(dy, x):
    return -dy / jnp.maximum(x * jnp.abs(x), 1e-6)


def scaled(x, scale):
    return x * scale[:, None] if scale.ndim == 1 else x * scale


def swiglu(a, b):
    return jax.nn.silu(a) * b


def swiglu_rows_to_row_0(dy, a, b):
    s = jax.nn.sigmoid(a)
    da, db = dy * b * s * (1 + a * (1 - s)), dy * a * s
    return jnp.zeros_like(a).at[0].set(da[-1]), jnp.zeros_like(b).at[0].set(db[-1])


# (channels, rows, columns) that each of two kernels reads.
WIRES = np.array([[[0, 1, 0], [0, 2, 1], [1, 0, 2]], [[1, 0, 1], [0, 2, 0], [1, 1, 2]]])


def read(x):
    return x[tuple(np.moveaxis(WIRES, -1, 0))]


def put(dy, wires):
    return jnp.zeros((2, 3, 3), dy.dtype).at[tuple(np.moveaxis(wires, -1, 0))].add(dy)


def read_alike(dy, x):
    return put(dy, WIRES[[0, 0]])


def read_elsewhere(dy, x):
    return put(dy, WIRES[..., [0, 2, 1]])


def softmax_attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def softmax_attention_backward(dy, q, k, v, visible):
    p = jax.nn.softmax(jnp.where(visible, q @ k.T, -jnp.inf))
    dp = dy @ v.T
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ dy


def causal(rows):
    return np.tril(np.ones((rows, rows), bool))


def causal_attention(q, k, v):
    return jax.nn.softmax(jnp.where(causal(len(q)), q @ k.T, -jnp.inf)) @ v


def dilated(x, w):
    wide = jnp.pad(x, 2)
    return sum(w[i] * wide[2 * i : 2 * i + x.size] for i in range(3))


def dilated_overwritten(dy, x, w):
    """Store the three contributions to an element instead of adding them."""
    at = np.arange(x.size)
    dx = jnp.zeros(x.size + 4, x.dtype)
    for i in range(3):
        dx = dx.at[at + 2 * i].set(w[i] * dy)
    wide = jnp.pad(x, 2)
    return dx[2:-2], jnp.stack([(dy * wide[2 * i : 2 * i + x.size]).sum() for i in range(3)])


def sum_over_filters(x, w):
    return w @ x


def gradient_at_the_filters_channel(dy, x, w):
    return jnp.zeros_like(x).at[: dy.shape[0]].set(w[:, 0, None] * dy), dy @ x.T


def batch_norm(x):
    centered = x - x.mean(axis=0)
    return centered * jax.lax.rsqrt((centered**2).mean(axis=0) + 1e-5)


def batch_norm_dy_once(dy, x):
    """Compute `N dy - Σ dy - x̂ Σ dy x̂`, but with dy instead of N dy."""
    centered = x - x.mean(axis=0)
    inv_std = jax.lax.rsqrt((centered**2).mean(axis=0) + 1e-5)
    xhat = centered * inv_std
    return inv_std / x.shape[0] * (dy - dy.sum(axis=0) - xhat * (dy * xhat).sum(axis=0))


def scattered_columns(x, y):
    return x.at[:, :2].set(y).sum(axis=1)


def scattered_columns_zero(dy, x, y):
    return jnp.zeros_like(x), jnp.broadcast_to(dy[:, None], y.shape)


def i0(x):
    """Compute I₀ by its integral over half a period. Before JAX 0.11, `jax.scipy.special.i0` has the slope 1 at 0."""
    cosines = np.cos((np.arange(64) + 0.5) * (np.pi / 64))
    return jnp.mean(jnp.exp(x[..., None] * jnp.asarray(cosines, x.dtype)), axis=-1)


def drift(x):
    return jnp.sin(x) * x.sum(axis=-1, keepdims=True)


def drift_row_sum(dy, x):
    """Give each element of a row the sum of the row's diagonal terms."""
    own = dy * (jnp.cos(x) * x.sum(axis=-1, keepdims=True) + jnp.sin(x))
    return jnp.broadcast_to(own.sum(axis=-1, keepdims=True), x.shape)


X, FEATURES = (4, 3), (3,)
NORM = (X, FEATURES, FEATURES)

CORPUS = (
    WrongBackward(
        "attention",
        "triton-lang/triton#5660",
        "the backward has a causal mask, but the forward has none",
        softmax_attention,
        lambda dy, q, k, v: softmax_attention_backward(dy, q, k, v, causal(len(q))),
        (X, X, X),
    ),
    WrongBackward(
        "attention",
        "triton-lang/triton#7216",
        "the forward has a causal mask, but the backward has none",
        causal_attention,
        lambda dy, q, k, v: softmax_attention_backward(dy, q, k, v, True),
        (X, X, X),
    ),
    WrongBackward(
        "dilated_convolution",
        "jmschrei/cherimoya#25",
        "contributions to one element overwrite each other",
        dilated,
        dilated_overwritten,
        ((7,), FEATURES),
    ),
    WrongBackward(
        "convolution",
        "NervanaSystems/neon#111",
        "the gradient is written at the filter's index instead of the channel's",
        sum_over_filters,
        gradient_at_the_filters_channel,
        (X, (2, 4)),
    ),
    WrongBackward(
        "batch_norm",
        "ROCm/MIOpen#104",
        "dy is not multiplied by the number of rows",
        batch_norm,
        batch_norm_dy_once,
        (X,),
    ),
    WrongBackward(
        "slice_scatter",
        "pytorch/pytorch#180164",
        "a compiler folds a mask into a constant, so dx is zero",
        scattered_columns,
        scattered_columns_zero,
        (X, (4, 2)),
    ),
    WrongBackward(
        "drift",
        "AndreiChertkov/fpcross#2",
        "each element gets the sum of its row's diagonal terms",
        drift,
        drift_row_sum,
        (X,),
    ),
    WrongBackward(
        "i0",
        "jax-ml/jax#11479",
        "the gradient at 0 is 1, the slope of abs(x)",
        i0,
        lambda dy, x: jnp.where(x == 0, dy, dy * jax.scipy.special.i1(x)),
        (X,),
    ),
    WrongBackward(
        "swiglu",
        "ByteDance-Seed/Triton-distributed#185",
        "every row's gradient is written to row 0",
        swiglu,
        swiglu_rows_to_row_0,
        (X, X),
    ),
    WrongBackward(
        "group_norm",
        "linkedin/Liger-Kernel#1375",
        "for a 4-D input, the sums cover only the last axis",
        group_norm,
        group_norm_of_last_axis,
        ((2, 2, 3, 4),),
    ),
    WrongBackward(
        "prenorm",
        "Dao-AILab/quack#53",
        "dy of the residual is added before the norm's backward, not after",
        prenorm,
        prenorm_added_before,
        (X, X),
    ),
    WrongBackward(
        "prenorm", "Dao-AILab/quack#52", "the residual gets no gradient", prenorm, prenorm_no_residual, (X, X)
    ),
    WrongBackward(
        "decayed_sum",
        "state-spaces/mamba#537",
        "a block above the diagonal is not zeroed",
        decayed,
        decayed_not_zeroed,
        ((4,), (4,)),
    ),
    WrongBackward(
        "logic_conv",
        "ligerlac/torchlogix#6",
        "all filters use the wires of the first filter",
        read,
        read_alike,
        ((2, 3, 3),),
    ),
    WrongBackward(
        "logic_conv",
        "ligerlac/torchlogix#26",
        "a compiler unpacks the indices of the wires in the wrong order",
        read,
        read_elsewhere,
        ((2, 3, 3),),
    ),
    WrongBackward(
        "attention",
        "NVIDIA/TransformerEngine#3516",
        "dy is in device order, but is read in sequence order",
        attention,
        attention_of_dy_in_order,
        ((4, 4), X),
    ),
    WrongBackward(
        "layer_norm",
        "flagos-ai/FlagGems#59",
        "the sums cover all rows of a block instead of one row",
        layer_norm,
        layer_norm_of_all_rows,
        NORM,
    ),
    WrongBackward(
        "layer_norm",
        "deepspeedai/DeepSpeed#692",
        "scale and bias are read at the row's index",
        layer_norm,
        layer_norm_other_scale,
        NORM,
    ),
    WrongBackward(
        "layer_norm",
        "Oneflow-Inc/oneflow#6149",
        "the gradients of scale and bias are swapped",
        layer_norm,
        layer_norm_swapped,
        NORM,
    ),
    WrongBackward(
        "layer_norm",
        "denizyuret/Knet.jl#288",
        "dx is computed from dy without the scale",
        layer_norm,
        layer_norm_without_scale,
        NORM,
    ),
    WrongBackward(
        "rms_norm",
        "karpathy/llm.c#763",
        "dy is not multiplied by the weights",
        rms_norm,
        rms_norm_without_scale,
        (X, FEATURES),
    ),
    WrongBackward(
        "layer_norm", "common texts", "dx uses only the diagonal of the Jacobian", layer_norm, layer_norm_diagonal, NORM
    ),
    WrongBackward(
        "trace",
        "pytorch/pytorch#171704",
        "a fixed stride leaves the diagonal of a tall matrix",
        jnp.trace,
        trace_by_stride,
        ((4, 2),),
    ),
    WrongBackward(
        "prod", "pytorch/pytorch#995", "dy is left out", jnp.prod, lambda dy, x: jnp.prod(x) / x, (FEATURES,)
    ),
    WrongBackward(
        "mean",
        "kakaobrain/trident#66",
        "the gradient is divided by the number of rows, not of columns",
        mean_of_rows,
        lambda dy, x: jnp.broadcast_to(dy[:, None] / x.shape[0], x.shape),
        (X,),
    ),
    WrongBackward(
        "add",
        "deeplearning4j/nd4j#2424",
        "a broadcast gradient is not summed",
        lambda x, y: x + y,
        lambda dy, x, y: (dy, dy[:1]),
        (X, (1, 3)),
    ),
    WrongBackward(
        "fmod",
        "Oneflow-Inc/oneflow#8769",
        "the gradient of a broadcast argument is not summed, so it has the result's shape",
        jnp.fmod,
        lambda dy, x, y: (dy, -dy * jnp.trunc(x / y)),
        ((3,), X),
    ),
    WrongBackward(
        "gaussian",
        "graphdeco-inria/gaussian-splatting#551",
        "the factor of a mixed term is -1/2 instead of -1",
        gaussian,
        gaussian_half,
        ((2,), FEATURES),
    ),
    WrongBackward(
        "softplus",
        "pytorch/pytorch#61568",
        "the threshold is compared with the result",
        softplus_of_3,
        softplus_compares_the_result,
        ((8, 8),),
    ),
    WrongBackward(
        "softplus",
        "tenstorrent/tt-metal#56397",
        "exp(x) / (1 + exp(x)) overflows for large x",
        jax.nn.softplus,
        lambda dy, x: dy * jnp.exp(x) * (1 / (1 + jnp.exp(x))),
        (X,),
    ),
    WrongBackward(
        "softplus",
        "jax-ml/jax#2107",
        "the gradient at 0 is 0, the slope of abs(x)",
        jax.nn.softplus,
        lambda dy, x: jnp.where(x == 0, 0, dy * jax.nn.sigmoid(x)),
        (X,),
    ),
    WrongBackward(
        "hard_sigmoid",
        "FluxML/NNlib.jl#706",
        "the gradient is dy instead of 0 where the op saturates",
        hard_sigmoid,
        lambda dy, x: jnp.where(jnp.abs(x) < 3, dy / 6, dy),
        (X,),
        {"kink_convention": False},
    ),
    WrongBackward(
        "hard_swish",
        "tenstorrent/tt-metal#55291",
        "the gradient at -3 and 3 comes from the other branch",
        hard_swish,
        lambda dy, x: jnp.where(x < -3, 0, jnp.where(x <= 3, dy * (x / 3 + 0.5), dy)),
        (X,),
    ),
    WrongBackward(
        "clip",
        "tenstorrent/tt-metal#48201",
        "both comparisons are reversed",
        lambda x: jnp.clip(x, -1, 1),
        lambda dy, x: jnp.where((x <= -1) & (x >= 1), dy, 0),
        (X,),
        {"kink_convention": False},
    ),
    WrongBackward(
        "ldexp",
        "jax-ml/jax#37992",
        "the gradient at 0 is dy instead of 2 dy",
        lambda x: 2 * x,
        lambda dy, x: jnp.where(x == 0, dy, 2 * dy),
        (X,),
    ),
    WrongBackward(
        "max_pool",
        "FluxML/Flux.jl#1197",
        "the maximum of several windows gets the gradient of only one window",
        max_of_windows,
        one_gradient_each,
        ((8,),),
        {"kink_convention": False},
    ),
    WrongBackward(
        "max",
        "mni-ml/framework#22",
        "every element within 0.01 of the maximum gets all of dy",
        max_of_rows,
        to_all_that_are_close(0.01),
        (X,),
        {"kink_convention": False},
    ),
    WrongBackward(
        "max",
        "Theano/Theano#5248",
        "every element equal to the maximum gets all of dy",
        max_of_rows,
        to_all_that_are_close(0),
        (X,),
        {"kink_convention": False},
    ),
    WrongBackward(
        "log_softmax",
        "mlpack/mlpack#2360",
        "dy is added instead of multiplied",
        jax.nn.log_softmax,
        lambda dy, x: jax.nn.softmax(x) + dy,
        (X,),
    ),
    WrongBackward(
        "soft_cross_entropy",
        "NVIDIA-NeMo/Automodel#2428",
        "the targets are assumed to sum to 1",
        soft_cross_entropy,
        soft_cross_entropy_of_sum_1,
        (X, X),
    ),
    WrongBackward(
        "cross_entropy",
        "linkedin/Liger-Kernel#680",
        "the first element of dy is used for all rows",
        cross_entropy,
        cross_entropy_of_first_dy,
        (X,),
    ),
    WrongBackward(
        "binary_cross_entropy",
        "common texts",
        "the gradient is with respect to the logits instead of the probabilities",
        binary_cross_entropy,
        binary_cross_entropy_in_logits,
        (X, X),
        positive=True,
    ),
    WrongBackward(
        "reciprocal",
        "common texts",
        "the denominator is clamped from below even if it is negative",
        lambda x: 1 / x,
        reciprocal_clamped,
        (X,),
    ),
)

HEAD = """# Wrong backwards

`jaxbp.verify.check` finds all of these wrong backwards, which come from the code of other projects.
`tests/jaxbp/verify/wrong_backwards.py` rewrites each as a small pair, and generates this page.

Most of these backwards passed the tests of their projects, which used a dy of ones, square matrices, positive numbers,
or a single row. The check therefore also uses [added data](numerics.md#added-data).

| op | mistake | reported in | argument and added data of the first failure, and the reported cause |
|---|---|---|---|
"""


def line(wrong: WrongBackward) -> str:
    return f"| `{wrong.op}` | {wrong.slip} | {wrong.link} | {said(wrong.check().failures[0]).replace('|', '&#124;')} |"


if __name__ == "__main__":
    print(HEAD + "\n".join(map(line, CORPUS)))
