"""Liger-Kernel's norms, written in Triton, as a peer of the bench."""

from importlib import metadata

from liger_kernel.ops.layer_norm import LigerLayerNormFunction, layer_norm_backward
from liger_kernel.ops.rms_norm import LigerRMSNormFunction

from experiments.bench.peers.torch import EPS, ops, variants_of

VERSION = metadata.version("liger-kernel")


def _layer_norm_backward(dy, x, scale, mean, inv_std):
    return layer_norm_backward(dy, x, scale, scale, mean, inv_std)  # Liger-Kernel reads only the dtype of the bias


FORWARDS = {
    "layer_norm": lambda x, scale, bias: LigerLayerNormFunction.apply(x, scale, bias, EPS),
    "rms_norm": lambda x, scale: LigerRMSNormFunction.apply(x, scale, EPS, 0.0, "gemma", False),
}
BACKWARDS = {"layer_norm_backward": _layer_norm_backward}


def variants(task):
    return variants_of(task, ops(FORWARDS, BACKWARDS), []) if task.op in FORWARDS | BACKWARDS else ()
