"""cuDNN's norms, through the PyTorch operators of NVIDIA's cuDNN frontend."""

from importlib import metadata

import torch
from cudnn.ops.norm import layer_norm, rms_norm  # importing these functions registers the operators

from experiments.bench.peers.torch import EPS, ops, variants_of

VERSION = metadata.version("nvidia-cudnn-frontend")


def _rows(a):
    return a.reshape(-1, a.shape[-1], 1, 1)


def _layer_norm_backward(dy, x, scale, mean, inv_std):
    statistics = (a.reshape(-1, 1, 1, 1) for a in (mean, inv_std))
    dx, *gradients = torch.ops.cudnn.layernorm_bwd(_rows(dy), _rows(x), _rows(scale.float()), *statistics)
    return dx.reshape(x.shape), *(a.reshape(scale.shape) for a in gradients)


def _rms_norm_backward(dy, x, scale, inv_rms):
    dx, dscale, _ = torch.ops.cudnn.rmsnorm_bwd(_rows(dy), _rows(x), _rows(scale), inv_rms.reshape(-1, 1, 1, 1))
    return dx.reshape(x.shape), dscale.reshape(scale.shape)


FORWARDS = {
    "layer_norm": lambda x, scale, bias: layer_norm(x, scale.shape, scale, bias, EPS),
    "rms_norm": lambda x, scale: rms_norm(x, scale, eps=EPS),
}
BACKWARDS = {"layer_norm_backward": _layer_norm_backward, "rms_norm_backward": _rms_norm_backward}


def variants(task):
    return variants_of(task, ops(FORWARDS, BACKWARDS), []) if task.op in FORWARDS | BACKWARDS else ()
