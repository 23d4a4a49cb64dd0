"""torchlogix's logic networks, with jaxbp's wires and parameters."""

import functools
from importlib import metadata

import numpy as np
import torch
from torch.nn import functional as F
from torchlogix.layers import GroupSum, LogicConv2d, LogicDense, OrPooling2d

from experiments.bench.measure import Accuracy, Compiler
from experiments.bench.peers.torch import (
    COMPILED_GRAPH,
    COMPILED_LAYERS,
    COMPILED_STEP,
    tensor,
    training,
    variants_of,
)
from experiments.bench.peers.tree_layout import from_levels, pairs_of_leaves, to_levels
from experiments.bench.training_workloads import (
    LOGIC_CONV,
    logic_conv_network,
    logic_conv_workload,
    logic_network,
    logic_workload,
)
from jaxbp import LearnedWires

VERSION = metadata.version("torchlogix")
PARAMETRIZATIONS = {"raw": "softmax", "light": "input_wise", "warp": "walsh"}
WARP = "warp takes the sigmoid of a sum at relaxed inputs; jaxbp's walsh interpolates between rows of the truth table"
LEARNED = "torchlogix omits the softmax's derivative in the gradients of its learned connections"


def variants(task):
    if not task.op.startswith("logic"):
        return
    # The layers of a convolutional network may not all be compiled, so that its variant in eager mode may be faster.
    modes, best = ([COMPILED_LAYERS], 2) if task.op == "logic-conv" else ([COMPILED_STEP, COMPILED_GRAPH], 1)
    adam = functools.partial(torch.optim.Adam, lr=0.01, fused=True, capturable=torch.cuda.is_available())
    for name in PARAMETRIZATIONS:
        build = training(functools.partial(_network, name), adam)
        for mode, precision, run in variants_of(task, build, modes, best):
            yield f"{name}, {mode}", precision, functools.partial(_compared, name, task, run)


def _network(name, task, arguments):
    _, bits, labels = arguments
    build = logic_conv_network if task.op == "logic-conv" else logic_network
    network = build(**task.options, parametrization=PARAMETRIZATIONS[name])
    bits, labels = tensor(bits), tensor(labels)
    options = dict(device=bits.device, parametrization=name)
    layers, head = [], network
    if task.op == "logic-conv":
        head, size = network.head, network.shape[1]
        for convolution in network.convolutions:
            layers.append(_convolution(convolution, size, options))
            size = (size + 2 * convolution.padding - convolution.wires.get_value().window[0] + 1) // convolution.pool
        layers.append(torch.nn.Flatten())
    for layer in head.layers:
        layers.append(_dense(layer, options))
    model = torch.nn.Sequential(*layers, GroupSum(network.classes, head.tau, device=bits.device))
    return model, list(model.parameters()), lambda model: F.cross_entropy(model(bits), labels)


def _dense(ours, options):
    wires = ours.wires.get_value()
    if isinstance(wires, LearnedWires):
        kind = dict(connections="learnable", connections_kwargs=dict(num_candidates=wires.choices))
        layer = LogicDense(wires.inputs, wires.gates, **options, **kind)
        candidates = np.repeat(wires.candidates, 2 * wires.gates // wires.groups, axis=0)
        by_gate = (
            tensor(a).reshape(wires.gates, 2, -1).permute(2, 1, 0).contiguous()
            for a in (candidates, ours.wire_logits[...])
        )
        layer.connections.indices, layer.connections.weights.data = by_gate
    else:
        layer = LogicDense(wires.inputs, wires.gates, **options)
        layer.connections.indices = torch.stack([tensor(wires.a), tensor(wires.b)])
    layer.weight.data = tensor(ours.logits[...]).clone()
    return layer


def _convolution(ours, size, options):
    wires, logits = ours.wires.get_value(), np.asarray(ours.logits[...])
    layer = LogicConv2d(
        size,
        wires.channels,
        wires.kernels,
        wires.depth,
        wires.window[0],
        padding=ours.padding,
        **options,
    )
    pairs = torch.as_tensor(pairs_of_leaves(np.asarray(wires.leaves)), device=layer.device).long()
    layer.connections.indices = layer.connections._get_indices_from_kernel_tensor(pairs)
    for weights, of_level in zip(layer.tree_weights, to_levels(logits), strict=True):
        weights.data = torch.tensor(of_level, device=layer.device)
    return torch.nn.Sequential(layer, OrPooling2d(ours.pool, ours.pool))


def _joined(results, place):
    loss, *gradients = results
    joined = [loss]
    for convolution in LOGIC_CONV[place].convolutions:
        joined.append(from_levels(gradients[: convolution.depth]))
        del gradients[: convolution.depth]
    return joined + gradients


def _compared(name, task, run):
    measured = run()
    if task.op == "logic-conv":
        measured["results"] = _joined(measured["results"], task.options["place"])
    if task.options.get("candidates"):
        return measured | {"results": None, "error_reason": LEARNED}
    if name == "light":
        return measured | {"reference": _reference(name, task)}
    return measured | {"results": None, "error_reason": WARP} if name == "warp" else measured


def _reference(name, task):
    if task.op == "logic-conv":
        workload = logic_conv_workload(**task.options, parametrization=PARAMETRIZATIONS[name])
    else:
        workload = logic_workload(task.op, task.options["gates"], (), PARAMETRIZATIONS[name])
    with Compiler() as compiler:
        return Accuracy(workload, len(task.small[-1]), task.dtype, compiler).reference
