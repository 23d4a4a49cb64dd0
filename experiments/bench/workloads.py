"""Workloads that the bench times: ops of the catalogue, and training steps of networks and of an automaton."""

import dataclasses
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
from experiments.output.errors import UserError, refuse_unknown
from jaxbp.catalogue import CATALOGUE, AutomatonArgument, Case, Entry
from jaxbp.catalogue.entries import CHECKERBOARD
from jaxbp.nn import LeNet, LogicConvNetwork, LogicConvolution, LogicNetwork, Mixer
from jaxbp.ops.logic.gate_layer import Parametrization
from jaxbp.optimizers import FusedOptimizer, apply, fused_adamw
from jaxbp.precision import LossScale
from jaxbp.verify.arguments import is_float

PROGRAM_SECONDS, MOST_CALLS = 300e-6, 32
"""A program has enough calls to take at least this long on the device, ten times the time of its dispatch."""
CACHE_BYTES = 128 * 2**20
"""The arguments of all calls of a program exceed this size, which is more than twice the L2 cache of an H200."""


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """A workload: one op or training step to time.

    Attributes:
      op, place: the op and its case in the catalogue, or the name and size of a training step.
      title: the name in reports.
      options: the op's options.
      batches: the default batch sizes, on a GPU and elsewhere.
      function: (implementation, dtype) -> the function to time.
      draw: (seed, batch, dtype) -> arguments.
      chain: (function, calls, implementation) -> a program that takes sets of arguments and makes `calls` calls. A
        training step updates its parameters with `jaxbp.optimizers` in that implementation; "autodiff" is Optax.
      steps: the calls in a program, if each takes the previous results. There is then one set of arguments.
      arithmetic: batch -> the multiplications and additions per call that every implementation needs outside of
        products and convolutions, where they may take longer than reading and writing.
      error_batch: the largest batch at which results are compared with float64, on the CPU.
    """

    op: str
    place: str
    title: str
    options: Mapping[str, Any]
    batches: tuple[tuple[int, ...], tuple[int, ...]]
    function: Callable[[str | None, str], Callable]
    draw: Callable[[int, int, str], tuple]
    chain: Callable[..., Callable]
    steps: int | None = None
    arithmetic: Callable[[int], int] = lambda batch: 0
    error_batch: int = 128


def selected(cases: Sequence[str], batch_last: bool = False) -> list[Work]:
    """Return the workloads that the cases name, in the catalogue's order; with `batch_last`, only the ops among them.

    Args:
      cases: "all"; "ops", the catalogue without training steps; an op or a training step; or one of these at one size,
        such as "automaton:32x32". A forward also selects its backwards.
    """
    works = [lenet_work(), *(op_work(entry, place) for entry in CATALOGUE for place in entry.real)]
    works += [mixer_work(), logic_work("logic", 8000, (128,)), logic_work("logic-large", 64000, ())]
    works += [logic_conv_work(place) for place in LOGIC_CONV]
    works += [automaton_work(size) for size in AUTOMATON_BATCHES]
    named = [{"all", work.op, f"{work.op}:{work.place}"} | ({"ops"} if work.steps is None else set()) for work in works]
    unknown = [case for case in cases if not any(case in names for names in named)]
    ops = list(dict.fromkeys(work.op for work in works))
    unknown_ops = [case for case in unknown if case.partition(":")[0] not in ops]
    refuse_unknown("case", unknown_ops, ops, "all, ops, or some of ")
    for op, _, place in (case.partition(":") for case in unknown):
        places = ", ".join(work.place for work in works if work.op == op)
        raise UserError(f"unknown place {place} of {op}: wanted {f'one of {places}' if places else 'none'}")
    works = [
        work
        for work, names in zip(works, named, strict=True)
        if not names.isdisjoint(cases) or any(work.op.startswith(f"{case}_backward") for case in cases)
    ]
    if not batch_last:
        return works
    ops = [work for work in works if work.steps is None]
    if not ops:
        raise UserError(f"batch_last is for ops: wanted an op, but {', '.join(cases)} are steps of training")
    return [with_batch_last(work) for work in ops]


def quick(works: Sequence[Work], on_gpu: bool) -> dict[Work, int]:
    """Return the first workload of each family that has a batch size on this platform, with that size.

    The families are the modules of ops, which begin with a forward with its gradient, and the kinds of training steps.
    """
    module = {entry.name: entry.function.__module__ for entry in CATALOGUE}
    chosen: dict[str, tuple[Work, int]] = {}
    for work in works:
        if batches := work.batches[0 if on_gpu else 1]:
            family = module.get(work.op) or work.op.partition("-")[0]
            chosen.setdefault(family, (work, batches[len(batches) // 2]))
    return dict(chosen.values())


def op_work(entry: Entry, place: str) -> Work:
    """Return the workload of an op at one size of the catalogue: a backward, or a forward with its gradient."""
    case, backward = entry.real[place], "_backward" in entry.name

    def function(implementation, dtype):
        op = functools.partial(entry.function, **case.options, implementation=implementation)
        return op if backward else forward_and_backward(op)

    def draw(seed, batch, dtype):
        arrays = case.draw(seed, batch, dtype)
        if backward:
            return arrays
        results = jax.eval_shape(functools.partial(entry.function, **case.options, implementation="autodiff"), *arrays)
        floats = [a for a in jax.tree.leaves(results) if is_float(a)]
        keys = jax.random.split(jax.random.key(seed + 1000), len(floats))
        return arrays, [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, floats, strict=True)]

    title = f"{entry.name} {place}" if backward else f"{entry.name} fwd+bwd {place}"
    batches = (case.batch or 16384,), (min(case.batch or 256, 256),)
    arithmetic = functools.partial(_gate_operations, case, backward)
    return Work(
        entry.name, place, title, case.options, batches, function, draw, one_after_another, arithmetic=arithmetic
    )


def _gate_operations(case: Case, backward: bool, batch: int) -> int:
    """Return the operations of an automaton's gates, or 0 for other ops.

    A backward without its forward recomputes all gates except the last layer of the last tick.
    """
    *_, automaton, state = (None, *case.leaves)
    if not isinstance(automaton, AutomatonArgument):
        return 0
    _, height, width, channels = state.shape
    gates = automaton.gates_a_cell * case.options.get("steps", 1)
    return (GATE_OPERATIONS * gates - FORWARD_OPERATIONS * channels * backward) * batch * height * width


def forward_and_backward(op: Callable) -> Callable:
    """Return `(arrays, cotangents) -> (floating results, other results, gradients)`.

    The gradients are with respect to the floating arrays.
    """

    def function(arrays, cotangents):
        leaves, structure = jax.tree.flatten(arrays)

        def of_floats(*values):
            values = iter(values)
            given = [next(values) if is_float(a) else a for a in leaves]
            results = jax.tree.leaves(op(*jax.tree.unflatten(structure, given)))
            return [a for a in results if is_float(a)], [a for a in results if not is_float(a)]

        results, vjp, integers = jax.vjp(of_floats, *filter(is_float, leaves), has_aux=True)
        return results, integers, vjp(cotangents)

    return function


def with_batch_last(work: Work) -> Work:
    """Return the same workload on arrays whose last axis is the batch, instead of the first."""

    def structs(batch):
        arguments = jax.eval_shape(lambda: work.draw(0, batch, "float32"))
        return arguments, jax.eval_shape(work.function("autodiff", "float32"), *arguments)

    batched = jax.tree.map(lambda a, b: a.shape != b.shape, structs(2), structs(3))

    def moved(tree, batched, source, destination):
        return jax.tree.map(lambda a, move: jnp.moveaxis(a, source, destination) if move else a, tree, batched)

    def function(implementation, dtype):
        batch_first = work.function(implementation, dtype)
        return lambda *arguments: moved(batch_first(*moved(arguments, batched[0], -1, 0)), batched[1], 0, -1)

    def draw(seed, batch, dtype):
        return moved(work.draw(seed, batch, dtype), batched[0], 0, -1)

    return dataclasses.replace(work, title=f"{work.title}, batch last", function=function, draw=draw)


def one_after_another(function: Callable, calls: int, implementation: str | None = None) -> Callable:
    """Return a program that makes the calls, each with another set of arguments. The calls neither overlap nor merge.

    Barriers order the calls on a GPU. XLA's CPU compiler drops barriers early.
    """
    function = jax.jit(function)  # traced and lowered once

    def program(sets):
        results, token = [], jnp.zeros(())
        for arguments in sets[:calls]:
            arguments, token = lax.optimization_barrier((arguments, token))
            result, token = lax.optimization_barrier((function(*arguments), token))
            results.append(result)
        return results  # XLA does not compute what is not returned

    return program


def lenet_work() -> Work:

    def network(implementation, dtype):
        return LeNet(implementation=implementation, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))

    def losses(model, images, labels, _):
        return model.loss(images, labels)[0]

    return _training_step("lenet", "", {}, network, (1, 28, 28), ((128, 1024, 8192, 65536), (128,)), losses=losses)


def mixer_work() -> Work:

    def network(implementation, dtype):
        return Mixer(implementation=implementation, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))

    return _training_step("mixer", "", {}, network, (1, 28, 28), ((8192,), (128,)))


def logic_work(
    name: str, gates: int, cpu_batches: tuple[int, ...], parametrization: Parametrization = "softmax"
) -> Work:
    """Return a training step of a logic network with six layers, as published for MNIST, on random bits."""
    network = functools.partial(logic_network, gates, parametrization)
    # On a CPU, 16 functions per gate and example are slow in float64.
    options = dict(error_batch=max(1, 8000 * 128 // gates), draw_inputs=_draw_bits, optimiser=_ADAM)
    return _training_step(name, f"6x{gates}", {"gates": gates}, network, (784,), ((128, 1024), cpu_batches), **options)


def _draw_bits(key, shape):
    return jax.random.bernoulli(key, 0.5, shape)


_ADAM = functools.partial(fused_adamw, 0.01)


def logic_network(
    gates: int,
    parametrization: Parametrization = "softmax",
    implementation: str | None = None,
    dtype: str = "float32",
) -> LogicNetwork:
    return LogicNetwork(
        784,
        [gates] * 6,
        10,
        tau=math.sqrt(gates / 80),
        wiring=_unique_wires,
        initialization="normal",
        parametrization=parametrization,
        implementation=implementation,
        dtype=jnp.dtype(dtype),
        rngs=nnx.Rngs(0),
    )


class LogicConvSizes(NamedTuple):
    """A published convolutional logic network.

    Attributes:
      shape: the shape of the images of bits.
      convolutions: the convolutions with their or-pools.
      widths: the gates of each later layer.
      tau: the divisor of the class sums.
      cpu_batches: the default batch sizes without a GPU.
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
"""The networks of size M, for MNIST and for CIFAR-10 with three bits per color channel.

Source: F. Petersen et al., "Convolutional differentiable logic gate networks", NeurIPS 2024.
"""


def logic_conv_work(place: str, parametrization: Parametrization = "softmax") -> Work:
    """Return a training step of a convolutional logic network, `LOGIC_CONV[place]`.

    Its inputs are not bits. With bits, many positions of a window would be equal up to rounding, which would then
    decide which is the largest.
    """
    network, sizes = functools.partial(logic_conv_network, place, parametrization), LOGIC_CONV[place]
    batches, options = ((128,), sizes.cpu_batches), dict(error_batch=1, optimiser=_ADAM)
    return _training_step("logic-conv", place, {"place": place}, network, sizes.shape, batches, **options)


def logic_conv_network(
    place: str,
    parametrization: Parametrization = "softmax",
    implementation: str | None = None,
    dtype: str = "float32",
) -> LogicConvNetwork:
    sizes = LOGIC_CONV[place]
    return LogicConvNetwork(
        sizes.shape,
        sizes.convolutions,
        sizes.widths,
        10,
        tau=sizes.tau,
        wiring=_unique_wires,
        initialization="residual",  # of the layers as well as the convolutions
        parametrization=parametrization,
        implementation=implementation,
        dtype=jnp.dtype(dtype),
        rngs=nnx.Rngs(0),
    )


# For hundreds of thousands of gates, wires take seconds to make. Each implementation and each peer makes a network.
_unique_wires = functools.cache(jaxbp.Wires.unique)


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
    optimiser: Callable[..., FusedOptimizer] | None = None,
    error_batch: int = 128,
) -> Work:
    """Return the workload that computes the loss and gradients of `network(implementation=, dtype=)`.

    In a program, each call is a training step.

    Args:
      shape: the shape of one input.
      losses: `(model, inputs, labels, implementation) -> losses`, one per example.
      draw_inputs: `(key, shape) -> inputs`.
      optimiser: the argument of `training`.
    """

    @functools.cache
    def parts(implementation, dtype):
        with jax.ensure_compile_time_eval():
            return nnx.split(network(implementation=implementation, dtype=dtype), nnx.Param, ...)

    def function(implementation, dtype):
        graph, _, constants = parts(implementation, dtype)

        def loss(parameters, inputs, labels):
            return losses(nnx.merge(graph, parameters, constants), inputs, labels, implementation).mean()

        return loss_and_gradients(loss)

    def draw(seed, batch, dtype):
        input_key, label_key = jax.random.split(jax.random.key(seed))
        inputs = draw_inputs(input_key, (batch, *shape)).astype(dtype)
        return with_scale(parts(None, dtype)[1], dtype), inputs, jax.random.randint(label_key, (batch,), 0, 10)

    chain = functools.partial(training, optimiser=optimiser)
    title = f"{op.removesuffix('-large')} training step {place}".rstrip()
    return Work(op, place, title, options, batches, function, draw, chain, steps=10, error_batch=error_batch)


AUTOMATON_BATCHES = {8: ((), (1,)), 16: ((2,), ()), 32: ((4,), ())}
"""Side length of the grid -> batch sizes on a GPU and elsewhere."""
TICKS = 20
GATE_OPERATIONS = 24
"""Operations of a gate in its bilinear form c0 + c1 a + c2 b + c3 ab, forward and backward.

The forward takes three multiply-adds. The backward takes four multiply-adds or products for da and db, and five for the
gradients of the four coefficients. Each counts twice.
"""
FORWARD_OPERATIONS = 6
"""Operations of the forward of a gate."""


def automaton_work(size: int) -> Work:
    """Return the workload that computes the loss and gradients of `TICKS` ticks of `CHECKERBOARD`.

    Each call is a training step. Instead of the name of an implementation, `function` also takes
    `(logits, automaton, state, steps) -> state`.
    """
    with jax.ensure_compile_time_eval():
        automaton = CHECKERBOARD.made()
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

    chain = functools.partial(training, optimiser=functools.partial(fused_adamw, 0.05, 0.9, 0.99, clip=100.0))
    place, options = f"{size}x{size}", {"size": size}
    return Work(
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
    """Parameters and the scale of their loss."""

    parameters: Any
    scale: LossScale


def with_scale(parameters: Any, dtype: str) -> Any:
    """Return the state of a training step: the parameters, with a loss scale in float16."""
    return Scaled(parameters, LossScale.create()) if dtype == "float16" else parameters


def loss_and_gradients(loss: Callable) -> Callable:
    """Return `jax.value_and_grad(loss)` with respect to the parameters.

    For a `Scaled` state, the function also returns whether the gradients are finite, and the next scale.
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
    optimiser: Callable[..., FusedOptimizer] | None = None,
) -> Callable:
    """Return a program of training steps (forward, backward, update), by default with SGD.

    With a loss scale, it skips updates that are not finite.
    """
    # jaxbp's steps take the fastest update. For few or large arrays that is Optax's.
    if optimiser is None:
        update = optax.sgd(0.01)
    else:
        update = optimiser(implementation=None if implementation == "pallas" else implementation)

    def program(sets):
        ((state, images, labels),) = sets

        def step(carry, _):
            # Without the barrier, XLA would compute values that depend only on the images, such as their transpose,
            # once for all steps.
            x, y, (state, optimiser_state) = lax.optimization_barrier((images, labels, carry))
            loss, gradients, *scaled = function(state, x, y)
            if not scaled:
                return apply(update, gradients, optimiser_state, state), loss
            finite, scale = scaled
            parameters, next_state = apply(update, gradients, optimiser_state, state.parameters, finite)
            return (Scaled(parameters, scale), next_state), loss

        parameters = state.parameters if isinstance(state, Scaled) else state
        return lax.scan(step, (state, update.init(parameters)), length=calls)

    return program
