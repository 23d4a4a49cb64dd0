from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray
from jaxbp.common.windows import Padding, Size
from jaxbp.logic.circuits.convolutional_circuit import ConvolutionalCircuit, image_shape
from jaxbp.logic.gates import Arity
from jaxbp.logic.networks.logic_network import GateOptions, Gates, LogicNetwork, Wiring, thermometer
from jaxbp.logic.ops.logic_conv2d import logic_conv2d, logic_conv2d_or_pool2d
from jaxbp.logic.wires.tree_wires import TreeWires
from jaxbp.logic.wires.wires import Wires
from jaxbp.ops.pointwise.shapes import flatten


def image_thermometer(
    x: Shaped[AnyArray, "batch channels height width"], thresholds: ArrayLike
) -> Shaped[Array, "batch channels*thresholds height width"]:
    """Return one channel of bits `x > t` for each channel of x and each threshold t, as in `thermometer`."""
    return jnp.moveaxis(thermometer(jnp.moveaxis(x, 1, -1), thresholds), -1, 1)


class LogicConv2d(Gates):
    """`jaxbp.logic_conv2d` with its parameters, `logits (kernels, gates, parameters)`, and its fixed wires.

    Args:
      pool: height and width of the or-pool's windows; None for no pool.
      stride, padding, implementation: as in `jaxbp.logic_conv2d`.
      options: as in `LogicLayer`.

    Raises:
      TypeError: the wires are not `TreeWires`.
    """

    def __init__(
        self,
        wires: TreeWires,
        *,
        pool: Size | None = None,
        stride: Size = 1,
        padding: Padding = 0,
        **options: Unpack[GateOptions],
    ):
        if not isinstance(wires, TreeWires):
            raise TypeError(f"LogicConv2d: wires is a {type(wires).__name__}; wants a jaxbp.TreeWires")
        super().__init__(wires, (wires.kernels, wires.gates), **options)
        self.pool, self.stride, self.padding = pool, stride, padding

    @property
    def options(self) -> dict[str, Size | Padding]:
        options = dict(stride=self.stride, padding=self.padding)
        return options if self.pool is None else options | dict(pool=self.pool)

    def __call__(
        self, x: Float[AnyArray, "batch channels height width"], *, hard: bool = False
    ) -> Float[Array, "batch kernels out_height out_width"]:
        """Return the kernels' outputs. With `hard`, each gate computes its most probable function."""
        op = logic_conv2d if self.pool is None else logic_conv2d_or_pool2d
        return self._apply(op, x, hard=hard, **self.options)


class LogicConvolution(NamedTuple):
    """Options of one `LogicConv2d` in a `LogicConvNetwork`. The kernels are trees of depth `depth`."""

    kernels: int
    window: Size
    stride: Size = 1
    padding: Padding = 0
    pool: Size | None = None
    depth: int = 3


def check_convolutions(op: str, convolutions: Any) -> None:
    if not isinstance(convolutions, Sequence) or not all(isinstance(c, LogicConvolution) for c in convolutions):
        raise TypeError(f"{op}: convolutions is {convolutions!r}; wants a list of jaxbp.nn.LogicConvolution")
    if not convolutions:
        wanted = "at least one convolution. Without convolutions, use LogicNetwork or LogicClassifier"
        raise ValueError(f"{op}: convolutions is empty; wants {wanted}")


def halving_convolutions(height: int, width: int, kernels: int, most_kernels: int) -> list[LogicConvolution]:
    """Return convolutions with or-pools that halve images until their height and width are below 4.

    The first convolution has `kernels` kernels. Each of the others has four times as many as the one before it, up to
    `most_kernels`.
    """
    convolutions = []
    while not convolutions or max(height, width) >= 4:
        pool = tuple(2 if side >= 4 else 1 for side in (height, width))
        convolutions.append(LogicConvolution(kernels, 3, padding=1, pool=pool))
        height, width = height // pool[0], width // pool[1]
        kernels = min(4 * kernels, most_kernels)
    return convolutions


class LogicConvNetwork(nnx.Module):
    """Convolutions of gates with or-pools, followed by a `LogicNetwork` that reads all values of the last convolution.

    Args:
      shape: channels, height and width of the images of bits.
      widths, classes, tau, arity, wiring, seed: as in `LogicNetwork`. The seed also determines the convolutions' wires.
        The gates of the convolutions have two inputs.
      channels_per_kernel: as in `jaxbp.TreeWires.random`.
      options: as in `LogicLayer`.

    Raises:
      TypeError: `convolutions` is not a list of `LogicConvolution`.
      ValueError: the shape is not three positive integers; there are no convolutions; or `LogicNetwork` raises it.

    Source: as in `jaxbp.logic_conv2d`.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        convolutions: Sequence[LogicConvolution],
        widths: Sequence[int],
        classes: int,
        *,
        tau: float = 1.0,
        channels_per_kernel: int = 2,
        arity: Arity = 2,
        wiring: Wiring = Wires.unique,
        seed: int = 0,
        **options: Unpack[GateOptions],
    ):
        self.shape = image_shape("LogicConvNetwork", shape)
        check_convolutions("LogicConvNetwork", convolutions)
        checks.count("LogicConvNetwork", "seed", seed, at_least=0)
        layers, channels = [], shape[0]
        for i, (kernels, window, stride, padding, pool, depth) in enumerate(convolutions):
            reads = dict(depth=depth, channels_per_kernel=channels_per_kernel, seed=seed + i)
            wires = TreeWires.random(channels, kernels, window, **reads)
            layers.append(LogicConv2d(wires, stride=stride, padding=padding, pool=pool, **options))
            channels = kernels
        self.convolutions = nnx.List(layers)
        values = jax.eval_shape(self._convolved, jnp.zeros((1, *shape))).size
        of_head = dict(tau=tau, arity=arity, wiring=wiring, seed=seed + len(layers))
        self.head = LogicNetwork(values, widths, classes, **of_head, **options)

    @property
    def classes(self) -> int:
        return self.head.classes

    def __call__(
        self, x: Float[AnyArray, "batch channels height width"], *, hard: bool = False
    ) -> Float[Array, "batch classes"]:
        """Return the class scores. With `hard`, x must be 0 or 1, and each gate computes its most probable function."""
        checks.shape("LogicConvNetwork", "x", x, "batch", *self.shape)
        return self.head(flatten(self._convolved(x, hard=hard)), hard=hard)

    def harden(self) -> ConvolutionalCircuit:
        """Return a circuit of each gate's most probable function. Its outputs are bits, not scores."""
        convolutions = [(layer.harden(), layer.wires.get_value(), layer.options) for layer in self.convolutions]
        return ConvolutionalCircuit.of(self.shape, convolutions, self.head.harden().layers)

    def _convolved(self, x, hard=False):
        for convolution in self.convolutions:
            x = convolution(x, hard=hard)
        return x
