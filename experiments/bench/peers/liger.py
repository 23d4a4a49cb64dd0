"""Liger-Kernel's norms and dense layer with cross-entropy."""

from importlib import metadata

from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction, layer_norm_backward
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

from experiments.bench.peers.torch import EPS, ops, variants_of

VERSION = metadata.version("liger-kernel")


def _layer_norm_backward(dy, x, scale, mean, inv_std):
    return layer_norm_backward(dy, x, scale, scale, mean, inv_std)  # Liger-Kernel reads only the dtype of the bias


def _linear_softmax_cross_entropy(x, w, labels, b=None, *, reduction="mean"):
    return LigerFusedLinearCrossEntropyFunction.apply(x, w, labels, b, None, -100, 0.0, 0.0, reduction or "none")[0]


FORWARDS = {
    "layer_norm": lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, EPS),
    "linear_softmax_cross_entropy": _linear_softmax_cross_entropy,
    "rms_norm": lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPS, 0.0, "gemma", False),
}
BACKWARDS = {"layer_norm_backward": _layer_norm_backward}


def variants(task):
    found = variants_of(task, ops(FORWARDS, BACKWARDS), [], best=2) if task.op in FORWARDS | BACKWARDS else ()
    # The dense layer with cross-entropy reads a tensor on the host, which a CUDA graph cannot capture.
    wanted = "eager" if task.op == "linear_softmax_cross_entropy" else "CUDA graph"
    return [variant for variant in found if task.choice != "best" or variant[0].startswith(wanted)]
