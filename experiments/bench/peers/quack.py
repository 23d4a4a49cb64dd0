"""QuACK's RMSNorm, written in CuTe, as a peer of the bench. QuACK's LayerNorm has no backward."""

from importlib import metadata

from quack.rmsnorm import rmsnorm, rmsnorm_bwd

from experiments.bench.peers.torch import EPS, ops, variants_of

VERSION = metadata.version("quack-kernels")


def _rms_norm_backward(dy, x, scale, inv_rms):
    return rmsnorm_bwd(x, scale, dy, inv_rms)[:2]


FORWARDS = {"rms_norm": lambda x, scale: rmsnorm(x, scale, eps=EPS)}
BACKWARDS = {"rms_norm_backward": _rms_norm_backward}


def variants(task):
    return variants_of(task, ops(FORWARDS, BACKWARDS), []) if task.op in FORWARDS | BACKWARDS else ()
