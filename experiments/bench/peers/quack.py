"""QuACK's norms, and its dense layer with cross-entropy."""

from importlib import metadata

from quack.linear_cross_entropy import chunked_linear_cross_entropy
from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm, rmsnorm_bwd
from torch.autograd import Function

from experiments.bench.peers.torch import EPS, ops, variants_of

VERSION = metadata.version("quack-kernels")


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx, x, scale, bias):
        y, inv_std, mean = layernorm_fwd(x, scale.float(), bias.float(), EPS, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, scale, inv_std, mean)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, scale, inv_std, mean = ctx.saved_tensors
        return layernorm_bwd(x, scale, dy, inv_std, mean)


def _layer_norm_backward(dy, x, scale, mean, inv_std):
    return layernorm_bwd(x, scale, dy, inv_std, mean)


def _rms_norm_backward(dy, x, scale, inv_rms):
    return rmsnorm_bwd(x, scale, dy, inv_rms)[:2]


def _linear_softmax_cross_entropy(x, w, labels, *, reduction="mean"):
    return chunked_linear_cross_entropy(x, w, labels, reduction=reduction)


FORWARDS = {
    "layer_norm": _LayerNorm.apply,
    "linear_softmax_cross_entropy": _linear_softmax_cross_entropy,
    "rms_norm": lambda x, scale: rmsnorm(x, scale, eps=EPS),
}
BACKWARDS = {"layer_norm_backward": _layer_norm_backward, "rms_norm_backward": _rms_norm_backward}


def variants(task):
    return variants_of(task, ops(FORWARDS, BACKWARDS), []) if task.op in FORWARDS | BACKWARDS else ()
