"""torchlogix's networks of logic gates, as the bench's peer: the same wires and the same logits."""

import functools
from importlib import metadata

import jax
import torch
from torch.nn import functional as F
from torchlogix.layers import GroupSum, LogicDense

from experiments.bench import cli as bench
from experiments.bench.peers.torch import COMPILED_STEP, tensor, training, variants_of

VERSION = metadata.version("torchlogix")


def variants(task):
    """The ways in which it does the task: eager, in a CUDA graph, and compiled; none where it has no counterpart."""
    if not task.op.startswith("logic"):
        return ()
    adam = functools.partial(torch.optim.Adam, lr=0.01, fused=True, capturable=torch.cuda.is_available())
    return variants_of(task, training(_network, adam), [COMPILED_STEP])


def _network(task, arguments):
    state, bits, labels = arguments
    bits, labels, network, layers = tensor(bits), tensor(labels), bench.logic_network(**task.options), []
    for layer, logits in zip(network.layers, jax.tree.leaves(state), strict=True):
        wires = layer.wires.get_value()
        layers.append(LogicDense(wires.inputs, wires.gates, device=bits.device))
        layers[-1].connections.indices = torch.stack([tensor(wires.a), tensor(wires.b)])
        layers[-1].weight.data = tensor(logits).clone()
    model = torch.nn.Sequential(*layers, GroupSum(network.classes, network.tau, device=bits.device))
    return model, list(model.parameters()), lambda model: F.cross_entropy(model(bits), labels)
