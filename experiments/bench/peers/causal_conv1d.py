"""causal-conv1d, the depthwise convolution of Mamba's authors."""

import functools
from importlib import metadata

from causal_conv1d import causal_conv1d_fn

from experiments.bench.peers.torch import depthwise_conv1d, ops, variants_of

VERSION = metadata.version("causal-conv1d")


def _causal(x, w, b):
    return causal_conv1d_fn(x, w[:, 0], b, activation=None)


FORWARDS = {"conv1d": functools.partial(depthwise_conv1d, _causal)}


def variants(task):
    return variants_of(task, ops(FORWARDS, {}), []) if task.op in FORWARDS else ()
