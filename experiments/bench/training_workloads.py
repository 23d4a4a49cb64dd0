"""Training steps as workloads."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import jaxbp
from experiments.bench.workloads import FOUR_COEFFICIENTS, GATE_OPERATIONS, Workload, gate_layer
from jaxbp.catalogue import Case
from jaxbp.logic.ops.automaton_rollout import CHECKERBOARD
from jaxbp.logic.ops.gate_layer import Parametrization
from jaxbp.nn import LeNet, LogicConvNetwork, LogicConvolution, LogicNetwork
from jaxbp.training.optimizers import FusedOptimizer, apply, fused_adamw
from jaxbp.training.precision import LossScale


def options_of(implementation: str | None = None, dtype: str = "float32") -> dict[str, Any]:
    return dict(implementation=implementation, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def lenet_workload() -> Workload:

    def network(**options):
        return LeNet(**options_of(**options))

    def losses(model, images, labels, _):
        return model.loss(images, labels)[0]

    return _training_step("lenet", "", {}, network, (1, 28, 28), ((128, 1024, 8192, 65536), (128,)), losses=losses)


def logic_workload(
    name: str,
    gates: int,
    cpu_batches: tuple[int, ...],
    parametrization: Parametrization = "softmax",
    candidates: int | None = None,
) -> Workload:
    """Return a training step of the published logic network for MNIST: six layers of `gates` gates each.

    With `candidates`, each input of a gate chooses among this number of candidates.
    """
    network = functools.partial(logic_network, gates, parametrization, candidates)
    baselines = {FOUR_COEFFICIENTS: _scores} if parametrization == "softmax" and candidates is None else {}
    # The float64 reference computes 16 functions per gate and example on the CPU, which is slow.
    options = dict(error_batch=max(1, 8000 * 128 // gates), optimizer=_ADAM, baselines=baselines)
    options["draw_inputs"] = lambda key, shape: jax.random.bernoulli(key, 0.5, shape)
    sizes = {"gates": gates} | ({} if candidates is None else {"candidates": candidates})
    return _training_step(name, f"6x{gates}", sizes, network, (784,), ((128, 1024), cpu_batches), **options)


def _scores(network, x):
    for layer in network.layers:
        x = gate_layer(layer.logits[...], layer.wires.get_value(), x)
    return x.reshape(len(x), network.classes, -1).sum(-1) / network.tau


_ADAM = functools.partial(fused_adamw, 0.01)


def logic_network(
    gates: int, parametrization: Parametrization = "softmax", candidates: int | None = None, **options: str | None
) -> LogicNetwork:
    return LogicNetwork(
        784,
        [gates] * 6,
        10,
        tau=math.sqrt(gates / 80),
        wiring=_unique_wires if candidates is None else functools.partial(_learned_wires, candidates=candidates),
        initialization="normal",
        parametrization=parametrization,
        **options_of(**options),
    )


class LogicConvSizes(NamedTuple):
    """A published convolutional logic network for images of `shape`, `(channels, height, width)`.

    The layers after the convolutions have `widths` gates. `tau` divides the scores. `cpu_batches` are the batch sizes
    on a CPU.
    """

    shape: tuple[int, int, int]
    convolutions: Sequence[LogicConvolution]
    widths: Sequence[int]
    tau: float
    cpu_batches: tuple[int, ...] = ()


_MNIST_CONVOLUTIONS = [
    LogicConvolution(64, 5, pool=2),
    LogicConvolution(3 * 64, 3, padding=1, pool=2),
    LogicConvolution(9 * 64, 3, padding=1, pool=2),
]
_CIFAR_CONVOLUTIONS = [LogicConvolution(n * 256, 3, padding=1, pool=2) for n in (1, 4, 16, 32)]
_WIDTHS = 1280, 640, 320
LOGIC_CONV = {
    "mnist-m": LogicConvSizes(
        (1, 28, 28), _MNIST_CONVOLUTIONS, tuple(64 * width for width in _WIDTHS), 28.0, cpu_batches=(16,)
    ),
    "cifar-m": LogicConvSizes((9, 32, 32), _CIFAR_CONVOLUTIONS, tuple(256 * width for width in _WIDTHS), 40.0),
}
"""The published networks of size M. Images of CIFAR-10 have three bits per color channel.

Source: as in `jaxbp.logic_conv2d`.
"""


def logic_conv_workload(place: str, parametrization: Parametrization = "softmax") -> Workload:
    """Return a training step of a published network, `LOGIC_CONV[place]`, on random numbers instead of bits.

    With bits, values in a pooling window would be nearly equal, so rounding would decide which value gets the gradient.
    """
    network, sizes = functools.partial(logic_conv_network, place, parametrization), LOGIC_CONV[place]
    batches, options = ((128,), sizes.cpu_batches), dict(error_batch=1, optimizer=_ADAM)
    return _training_step("logic-conv", place, {"place": place}, network, sizes.shape, batches, **options)


def logic_conv_network(
    place: str, parametrization: Parametrization = "softmax", **options: str | None
) -> LogicConvNetwork:
    sizes = LOGIC_CONV[place]
    return LogicConvNetwork(
        sizes.shape,
        sizes.convolutions,
        sizes.widths,
        10,
        tau=sizes.tau,
        wiring=_unique_wires,
        initialization="residual",
        parametrization=parametrization,
        **options_of(**options),
    )


_unique_wires, _learned_wires = map(functools.cache, (jaxbp.Wires.unique, jaxbp.LearnedWires.random))


def _cross_entropy(model, inputs, labels, implementation):
    scores = model(inputs).astype(jnp.promote_types(inputs.dtype, jnp.float32))
    return jaxbp.softmax_cross_entropy(scores, labels, implementation=implementation)


def _training_step(
    op: str,
    place: str,
    options: Mapping[str, Any],
    network: Callable[..., nnx.Module],
    shape: tuple[int, ...],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    losses: Callable = _cross_entropy,
    draw_inputs: Callable[[jax.Array, tuple[int, ...]], jax.Array] = jax.random.uniform,
    optimizer: Callable[..., FusedOptimizer] | None = None,
    error_batch: int = 128,
    baselines: Mapping[str, Callable] | None = None,
) -> Workload:
    """Return a training step of the model `network(implementation=..., dtype=...)`.

    Args:
      op, place, options, batches, error_batch: as in `Workload`.
      losses: `(model, inputs, labels, implementation) -> losses`, with one loss per example.
      baselines: functions `(model, inputs) -> scores`.
    """

    @functools.cache
    def parts(implementation, dtype):
        with jax.ensure_compile_time_eval():
            return nnx.split(network(implementation=implementation, dtype=dtype), nnx.Param, ...)

    def function(implementation, dtype):
        is_baseline = callable(implementation)
        graph, _, constants = parts(None if is_baseline else implementation, dtype)

        def loss(parameters, inputs, labels):
            model = nnx.merge(graph, parameters, constants)
            if is_baseline:
                return _cross_entropy(functools.partial(implementation, model), inputs, labels, "autodiff").mean()
            return losses(model, inputs, labels, implementation).mean()

        return loss_and_gradients(loss)

    def draw(seed, batch, dtype):
        input_key, label_key = jax.random.split(jax.random.key(seed))
        inputs = draw_inputs(input_key, (batch, *shape)).astype(dtype)
        return with_scale(parts(None, dtype)[1], dtype), inputs, jax.random.randint(label_key, (batch,), 0, 10)

    chain = functools.partial(training, optimizer=optimizer)
    title = f"{op.removesuffix('-large')} training step {place}".rstrip()
    steps = dict(steps=10, error_batch=error_batch, baselines=baselines or {})
    return Workload(op, place, title, options, batches, function, draw, chain, **steps)


AUTOMATON_BATCHES = {8: ((), (1,)), 16: ((2,), ()), 32: ((4,), ())}
"""Default batch sizes on a GPU and on other platforms, by the grid's side length."""
TICKS = 20


def automaton_workload(size: int) -> Workload:
    """Return a training step of a cellular automaton on a grid of `size` times `size` cells.

    The workload's `function` also takes a function `(logits, automaton, state, steps) -> state` as implementation.
    """
    with jax.ensure_compile_time_eval():
        automaton = CHECKERBOARD.wires
    operations = GATE_OPERATIONS * CHECKERBOARD.gates_a_cell

    def function(implementation, dtype):
        rollout = implementation
        if not callable(implementation):
            rollout = functools.partial(jaxbp.automaton_rollout, implementation=implementation)

        def loss(logits, state, targets):
            last = rollout(logits, automaton, state, TICKS)[..., 0]
            return jnp.sum(jnp.square(last.astype(jnp.promote_types(last.dtype, jnp.float32)) - targets))

        return jax.value_and_grad(loss)

    def draw(seed, batch, dtype):
        (logits,) = Case((CHECKERBOARD.logits(),)).draw(seed)
        state_key = jax.random.key(seed + 1000)
        state = jax.random.bernoulli(state_key, 0.5, (batch, size, size, automaton.channels)).astype(dtype)
        rows, columns = jnp.indices((size, size)) // 2
        return logits, state, ((rows + columns) % 2).astype(jnp.float32)

    chain = functools.partial(training, optimizer=functools.partial(fused_adamw, 0.05, 0.9, 0.99, clip=100.0))
    place, options = f"{size}x{size}", {"size": size}
    return Workload(
        "automaton",
        place,
        f"automaton training step {place}",
        options,
        AUTOMATON_BATCHES[size],
        function,
        draw,
        chain,
        steps=10,
        arithmetic=lambda batch: operations * batch * size * size * TICKS,
    )


class Scaled(NamedTuple):
    parameters: Any
    scale: LossScale


def with_scale(parameters: Any, dtype: str) -> Any:
    return Scaled(parameters, LossScale.create()) if dtype == "float16" else parameters


def loss_and_gradients(loss: Callable) -> Callable:
    """Return a function `(state, *arguments)` that computes `loss(parameters, ...)` and the parameters' gradients.

    `state` is the parameters, or a `Scaled` with the parameters and a loss scale. With `Scaled`, the function also
    returns whether the gradients are finite, and the next loss scale.
    """

    def function(state, *arguments):
        if isinstance(state, Scaled):
            return state.scale.value_and_grad(loss)(state.parameters, *arguments)
        return jax.value_and_grad(loss)(state, *arguments)

    return function


def training(
    function: Callable,
    calls: int,
    implementation: str | None = "autodiff",
    optimizer: Callable[..., FusedOptimizer] | None = None,
) -> Callable:
    """Return a program of `calls` training steps in a scan. `function` is a result of `loss_and_gradients`.

    `optimizer(implementation=...)` makes the optimizer.
    """
    if optimizer is None:
        update = optax.sgd(0.01)
    else:
        # With implementation=None, jaxbp's optimizer uses Optax where Optax is faster.
        update = optimizer(implementation=None if implementation == "pallas" else implementation)

    def program(sets):
        ((state, images, labels),) = sets

        def step(carry, _):
            # Without the barrier, XLA moves values that depend only on the images out of the scan.
            x, y, (state, optimizer_state) = lax.optimization_barrier((images, labels, carry))
            loss, gradients, *scaled = function(state, x, y)
            if not scaled:
                return apply(update, gradients, optimizer_state, state), loss
            finite, scale = scaled
            parameters, next_state = apply(update, gradients, optimizer_state, state.parameters, finite)
            return (Scaled(parameters, scale), next_state), loss

        parameters = state.parameters if isinstance(state, Scaled) else state
        return lax.scan(step, (state, update.init(parameters)), length=calls)

    return program
