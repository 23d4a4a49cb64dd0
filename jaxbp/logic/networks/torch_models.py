"""Conversion between `LogicNetwork` and the models of difflogic and torchlogix.

The functions read and write modules and tensors by their attributes, so this file does not import PyTorch.

Sources: F. Petersen's difflogic 0.1.0 (`LogicLayer`, `GroupSum`), and torchlogix 0.2.2 (`LogicDense`, `GroupSum`). Both
number the 16 functions as `jaxbp.gate_layer` does.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxbp.common import checks
from jaxbp.logic.gates import PARAMETERS, Parametrization
from jaxbp.logic.networks.logic_network import LogicNetwork
from jaxbp.logic.wires.wires import Wires
from jaxbp.pairing import Implementation

_TORCHLOGIX: Mapping[str, tuple[Parametrization, tuple[int, ...], tuple[int, ...]]] = {
    "RawLUTParametrization": ("softmax", tuple(range(16)), (1,) * 16),
    "LightLUTParametrization": ("input_wise", (0, 1, 2, 3), (1, 1, 1, 1)),
    # In torchlogix, a true input is -1, the basis is (1, B, A, A * B), and the truth table is sigmoid(-basis @ weight).
    "WarpLUTParametrization": ("walsh", (0, 2, 1, 3), (-1, 1, 1, -1)),
}
"""For each parametrization of torchlogix: the parametrization of `jaxbp.gate_layer`, an order, and signs. Gates with
the parameters `signs * weight[:, order] / temperature` have the same truth table. Order and signs are their own
inverses."""


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer of a PyTorch model. Tensors are `weight (gates, parameters)`, and `a` and `b`, one integer per gate."""

    weight: Any
    a: Any
    b: Any
    inputs: int
    parametrization: Parametrization
    order: Sequence[int]
    signs: Sequence[int]
    temperature: float = 1.0

    def to_ours(self) -> np.ndarray:
        return _array(self.weight)[:, self.order] * np.array(self.signs) / self.temperature

    def to_theirs(self, parameters: np.ndarray) -> np.ndarray:
        return parameters[:, self.order] * np.array(self.signs) * self.temperature


def from_difflogic(
    model: Iterable[Any], *, implementation: Implementation = None, dtype: DTypeLike = jnp.float32
) -> LogicNetwork:
    """Return a `LogicNetwork` with the gates, wires, class sums, and tau of a difflogic model.

    The network computes the same class scores as the model in training mode, and the hardened network computes the
    same scores as the model in evaluation mode. Training options, such as `grad_factor`, are not part of the network.

    Args:
      model: a `torch.nn.Sequential`, possibly nested, or a list, of `Flatten`, `LogicLayer`, and one `GroupSum` at the
        end. The network reads rows of `in_dim` numbers.
      implementation, dtype: as in `jaxbp.nn.LogicLayer`. With float64, the logits are float64, too.

    Raises:
      NotImplementedError: the model has another module.
      TypeError: the model is not a sequence of modules.
      ValueError: the model has no layer, its last module is not a `GroupSum`, or a shape or a wire is wrong.
    """
    return _network("from_difflogic", model, _difflogic_layer, implementation, dtype)


def from_torchlogix(
    model: Iterable[Any], *, implementation: Implementation = None, dtype: DTypeLike = jnp.float32
) -> LogicNetwork:
    """Return a `LogicNetwork` with the gates, wires, class sums, and tau of a torchlogix model.

    The model's parametrization "raw" becomes "softmax", "light" becomes "input_wise", and "warp" becomes "walsh". For
    "raw" and "light", the network computes the same class scores as the model in training mode with
    `forward_sampling="soft"`. For "warp", this holds only if the inputs of each layer are 0 or 1. Between 0 and 1,
    torchlogix interpolates before the sigmoid, and `jaxbp.gate_layer` after it. For all three, the hardened network
    computes the same scores as the model in evaluation mode.

    Args:
      model: as in `from_difflogic`, with `LogicDense` instead of `LogicLayer`. A binarization is not part of the
        network: leave it out, and use `jaxbp.nn.thermometer`.
      implementation, dtype: as in `from_difflogic`.

    Raises:
      NotImplementedError: the model has another module, such as a convolution; gates of 1, 4, or 6 inputs; learned
        connections; different parametrizations; or a `GroupSum` with a beta.
      TypeError, ValueError: as in `from_difflogic`.
    """
    return _network("from_torchlogix", model, _torchlogix_layer, implementation, dtype)


def to_difflogic(network: LogicNetwork, model: Iterable[Any]) -> None:
    """Write the logits, hardened wires, and tau of a `LogicNetwork` into a difflogic model with layers of equal shapes.

    Args:
      network: a network with `parametrization="softmax"`.
      model: as in `from_difflogic`.

    Raises:
      NotImplementedError, TypeError: as in `from_difflogic`.
      ValueError: as in `from_difflogic`, or a shape or the parametrization of the model differs from the network. The
        model is then unchanged.
    """
    modules, _ = _write("to_difflogic", network, model, _difflogic_layer)
    for layer, module in zip(network.layers, modules, strict=True):
        wires = layer.hard_wires()
        module.indices = tuple(
            old.new_tensor(np.asarray(new, np.int64))
            for old, new in zip(module.indices, (wires.a, wires.b), strict=True)
        )
        if hasattr(module, "given_x_indices_of_y"):  # on a GPU, the gates that read each input
            reads = np.stack([wires.a, wires.b], axis=1).ravel()
            starts = np.cumsum([0, *np.bincount(reads, minlength=wires.inputs)])
            module.given_x_indices_of_y_start = module.given_x_indices_of_y_start.new_tensor(starts)
            gates = np.argsort(reads, kind="stable") // 2
            module.given_x_indices_of_y = module.given_x_indices_of_y.new_tensor(gates)


def to_torchlogix(network: LogicNetwork, model: Iterable[Any]) -> None:
    """Write the logits, hardened wires, and tau of a `LogicNetwork` into a torchlogix model of equal shapes.

    Args:
      network: a network whose parametrization corresponds to the model's (see `from_torchlogix`).
      model: as in `from_torchlogix`.

    Raises:
      NotImplementedError, TypeError: as in `from_torchlogix`.
      ValueError: as in `to_difflogic`.
    """
    _, layers = _write("to_torchlogix", network, model, _torchlogix_layer)
    for layer, theirs in zip(network.layers, layers, strict=True):
        wires = layer.hard_wires()
        _copy(theirs.a, np.asarray(wires.a, np.int64))
        _copy(theirs.b, np.asarray(wires.b, np.int64))


def _network(op, model, read, implementation, dtype) -> LogicNetwork:
    _, layers, total = _read(op, model, read)
    wires = [Wires.from_pairs(_array(layer.a), _array(layer.b), layer.inputs) for layer in layers]
    network = LogicNetwork(
        layers[0].inputs,
        [w.gates for w in wires],
        total.k,
        tau=float(total.tau),
        wiring=lambda inputs, gates, i: wires[i],
        parametrization=layers[0].parametrization,
        implementation=implementation,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    for layer, theirs in zip(network.layers, layers, strict=True):
        layer.logits = nnx.Param(jnp.asarray(theirs.to_ours(), jnp.promote_types(dtype, jnp.float32)))
    return network


def _write(op, network, model, read):
    modules, layers, total = _read(op, model, read)
    ours = [(layer.wires.get_value().inputs, layer.logits.shape, layer.parametrization) for layer in network.layers]
    theirs = [(layer.inputs, tuple(layer.weight.shape), layer.parametrization) for layer in layers]
    for name, came, wanted in (
        ("layers with (inputs, shape of parameters, parametrization)", theirs, ours),
        ("a number of classes k", total.k, network.classes),
    ):
        if came != wanted:
            raise ValueError(f"{op}: model has {name} {came}; wants {wanted}, as in the network")
    for layer, target in zip(network.layers, layers, strict=True):
        _copy(target.weight, target.to_theirs(np.asarray(layer.logits[...])))
    total.tau = float(network.tau)
    return modules, layers


def _read(op: str, model: Any, read: Callable[[str, str, Any], _Layer]) -> tuple[list[Any], list[_Layer], Any]:
    """Return the PyTorch modules of gates, what `read` returns for each, and the `GroupSum` module."""
    modules = [module for module in _modules(op, model) if not _is(module, "Flatten")]
    if not modules or not _is(modules[-1], "GroupSum"):
        came = f"ends with {type(modules[-1]).__name__}" if modules else "is empty"
        raise ValueError(f"{op}: model {came}; wants layers of gates, then a GroupSum")
    *modules, total = modules
    layers = [read(op, f"layer {i}", module) for i, module in enumerate(modules)]
    if not layers:
        raise ValueError(f"{op}: model has no layers of gates; wants at least one")
    if len(found := {layer.parametrization for layer in layers}) > 1:
        raise NotImplementedError(f"{op}: model mixes the parametrizations {', '.join(sorted(found))}; wants one")
    if getattr(total, "beta", 0.0) != 0.0:
        raise NotImplementedError(f"{op}: beta of GroupSum is {total.beta}; wants 0")
    _check_shapes(op, layers, total)
    return modules, layers, total


def _check_shapes(op: str, layers: Sequence[_Layer], total: Any) -> None:
    inputs = layers[0].inputs
    for i, layer in enumerate(layers):
        if layer.inputs != inputs:
            raise ValueError(f"{op}: layer {i} reads {layer.inputs} inputs; wants {inputs}, the width of layer {i - 1}")
        inputs, wanted = len(layer.a), (len(layer.a), PARAMETERS[layer.parametrization])
        if (came := tuple(layer.weight.shape)) != wanted:
            raise ValueError(f"{op}: the weight of layer {i} has shape {came}; wants {wanted}")
    if not checks.is_int(total.k) or total.k < 1 or inputs % total.k:
        raise ValueError(f"{op}: k of GroupSum is {total.k}; wants a divisor of {inputs}, the width of the last layer")


def _difflogic_layer(op: str, name: str, module: Any) -> _Layer:
    if not _is(module, "LogicLayer"):
        raise _unsupported(op, name, module, "LogicLayer")
    a, b = module.indices
    return _Layer(module.weights, a, b, module.in_dim, *_TORCHLOGIX["RawLUTParametrization"])


def _torchlogix_layer(op: str, name: str, module: Any) -> _Layer:
    if not _is(module, "LogicDense"):
        raise _unsupported(op, name, module, "LogicDense")
    if module.lut_rank != 2:
        raise NotImplementedError(f"{op}: {name} has gates of {module.lut_rank} inputs; wants gates of 2 inputs")
    if not _is(module.connections, "FixedDenseConnections"):
        raise _unsupported(op, f"connections of {name}", module.connections, "FixedDenseConnections")
    kind = type(module.parametrization).__name__
    if kind not in _TORCHLOGIX:
        raise _unsupported(op, f"parametrization of {name}", module.parametrization, " or ".join(_TORCHLOGIX))
    a, b = module.connections.indices
    temperature = float(module.parametrization.temperature)
    if not temperature > 0:
        raise ValueError(f"{op}: temperature of {name} is {temperature}; wants a number above 0")
    return _Layer(module.weight, a, b, module.in_dim, *_TORCHLOGIX[kind], temperature)


def _modules(op: str, model: Any) -> Iterator[Any]:
    if not isinstance(model, Iterable) or isinstance(model, str):
        raise TypeError(f"{op}: model is a {type(model).__name__}; wants a torch.nn.Sequential, or a list of modules")
    for module in model:
        if isinstance(module, Iterable):
            yield from _modules(op, module)
        else:
            yield module


def _is(module: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _unsupported(op: str, name: str, module: Any, wanted: str) -> NotImplementedError:
    return NotImplementedError(f"{op}: {name} is a {type(module).__name__}; wants a {wanted}")


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy()


def _copy(tensor: Any, values: np.ndarray) -> None:
    tensor.detach().copy_(tensor.new_tensor(values))
