"""torchlogix's networks of logic gates, as the bench's peer: the same wires, parameters and inputs as ours.

Each of its parametrisations is timed. `raw` has 16 logits a gate, as our `softmax`; `light` and `warp` have four
parameters, as our `input_wise` and `walsh`. The formulas of `raw` and `light` are ours, so their results are compared
with our network's in float64. `warp` computes another function: see `WARP`.
"""

import functools
from importlib import metadata

import jax
import torch
from flax import nnx
from torch.nn import functional as F
from torchlogix.layers import GroupSum, LogicDense

from experiments.bench.measure import Accuracy, Compiler
from experiments.bench.peers.torch import COMPILED_STEP, tensor, training, variants_of
from experiments.bench.works import logic_network, logic_work

VERSION = metadata.version("torchlogix")
PARAMETRIZATIONS = {"raw": "softmax", "light": "input_wise", "warp": "walsh"}
"""torchlogix's name -> our parametrisation with as many parameters a gate."""
WARP = "warp takes the sigmoid of a sum at relaxed inputs, our walsh interpolates between the rows of the truth table"


def variants(task):
    """Each parametrisation: eager, in a CUDA graph, and compiled; none where the library has no counterpart."""
    if not task.op.startswith("logic"):
        return
    adam = functools.partial(torch.optim.Adam, lr=0.01, fused=True, capturable=torch.cuda.is_available())
    for name in PARAMETRIZATIONS:
        build = training(functools.partial(_network, name), adam)
        for mode, precision, run in variants_of(task, build, [COMPILED_STEP]):
            yield f"{name}, {mode}", precision, functools.partial(_compared, name, task, run)


def _network(name, task, arguments):
    _, bits, labels = arguments
    network, layers = logic_network(**task.options, parametrization=PARAMETRIZATIONS[name]), []
    bits, labels = tensor(bits), tensor(labels)
    for layer, parameters in zip(network.layers, jax.tree.leaves(nnx.state(network, nnx.Param)), strict=True):
        wires = layer.wires.get_value()
        layers.append(LogicDense(wires.inputs, wires.gates, device=bits.device, parametrization=name))
        layers[-1].connections.indices = torch.stack([tensor(wires.a), tensor(wires.b)])
        layers[-1].weight.data = tensor(parameters).clone()
    model = torch.nn.Sequential(*layers, GroupSum(network.classes, network.tau, device=bits.device))
    return model, list(model.parameters()), lambda model: F.cross_entropy(model(bits), labels)


def _compared(name, task, run):
    measured = run()
    if name == "light":
        return measured | {"reference": _reference(name, task)}
    return measured | {"results": None, "error_reason": WARP} if name == "warp" else measured


def _reference(name, task):
    """The results in float64 of our network with the same parameters."""
    work = logic_work(task.op, task.options["gates"], (), PARAMETRIZATIONS[name])
    with Compiler() as compiler:
        return Accuracy(work, len(task.small[-1]), task.dtype, compiler).reference
