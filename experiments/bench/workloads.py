"""The workloads that the bench times."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

import jaxbp
from jaxbp.catalogue import BATCH, CATALOGUE, Argument, AutomatonArgument, Case, Entry
from jaxbp.logic.gates import COEFFICIENTS
from jaxbp.verify.arguments import is_float

GATE_OPERATIONS = 24
"""The operations of a gate `c0 + c1 a + c2 b + c3 ab` in its forward and backward, two per multiply-add or product."""
FORWARD_OPERATIONS = 6
TILE = 128
"""The numbers of queries and keys of a tile of scores in jaxbp's kernels for heads of 128 features."""


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """An op or a training step to time.

    Attributes:
      op, place: the name and the size of an op or training step.
      options: the keyword arguments of an op, or the arguments that make a training step's network.
      batches: the default batch sizes on a GPU and on other platforms.
      function: (implementation, dtype) -> the function to time. `implementation` is a name, None, or a function, as
        in `baselines`.
      draw: (seed, batch, dtype) -> the arguments of the function to time.
      chain: (function, calls, implementation) -> a program that calls `function` `calls` times. The program takes a
        tuple with one set of arguments per call of an op, or with one set for all training steps. For a training step,
        `implementation` only selects the optimizer ("autodiff": Optax). The network's implementation is already in
        `function`.
      steps: the number of training steps per program. None for an op.
      arithmetic: batch -> the `Cost.arithmetic` of a call.
      share: the share of the matrix products' operations that is needed, below 1 if masks exclude scores.
      share_of_tiles: for attention, the share of the tiles of `TILE` queries and keys that have a valid pair.
      error_batch: the largest batch size for the comparison with float64 on the CPU, or None without a comparison.
      baselines: functions in plain JAX, by a name that starts with "autodiff".
      tokens: the number of tokens per example of a language model, else None.
      forward: whether an op is timed without its gradients.
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
    share: float = 1.0
    share_of_tiles: float | None = None
    error_batch: int | None = 128
    baselines: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    tokens: int | None = None
    forward: bool = False

    def named(self, name: str, dtype: str) -> Callable:
        return self.function(self.baselines.get(name, implementation(name)), dtype)


def implementation(name: str) -> str | None:
    return None if name == "None" else name


def op_workload(entry: Entry, place: str, forward: bool = False) -> Workload:
    """Return the workload of an op at the size `place`, a key of `entry.real`.

    The workload also computes gradients, unless the op is a backward or `forward` is True.
    """
    case, backward = entry.real[place], "_backward" in entry.name
    forward = forward and not backward

    def function(implementation, dtype):
        op = functools.partial(entry.function, **case.options, implementation=implementation)
        if callable(implementation):
            op = functools.partial(implementation, **case.options)
        return op if backward else forward_only(op) if forward else forward_and_backward(op)

    def draw(seed, batch, dtype):
        arrays = case.draw(seed, batch, dtype)
        if backward:
            return arrays
        if forward:
            return arrays, []
        results = jax.eval_shape(functools.partial(entry.function, **case.options, implementation="autodiff"), *arrays)
        floats = [a for a in jax.tree.leaves(results) if is_float(a)]
        keys = jax.random.split(jax.random.key(seed + 1000), len(floats))
        return arrays, [jax.random.normal(key, a.shape, a.dtype) for key, a in zip(keys, floats, strict=True)]

    title = f"{entry.name} {place}" if backward else f"{entry.name} {'fwd' if forward else 'fwd+bwd'} {place}"
    batches = (case.batch or 16384,), (min(case.batch or 256, 256),)
    arithmetic = functools.partial(_gate_operations, case, forward, backward)
    is_attention = "attention" in entry.name
    share, share_of_tiles = _shares(case) if is_attention else (1.0, None)
    return Workload(
        entry.name,
        place,
        title,
        case.options,
        batches,
        function,
        draw,
        one_after_another,
        arithmetic=arithmetic,
        share=share,
        share_of_tiles=share_of_tiles,
        baselines=BASELINES.get(entry.name, {}),
        # In float64, the scores of one example of attention take gigabytes.
        error_batch=1 if is_attention else 128,
        forward=forward,
    )


def _shares(case):
    """Return the shares of attention's scores, and of its tiles of scores, that masks do not exclude."""
    length, window = case.leaves[0].shape[1], case.options.get("local_window_size")
    before, after = window if isinstance(window, tuple) else (window, window)
    after = 0 if case.options.get("is_causal") else after
    has_documents = any(isinstance(a, DocumentIds) for a in case.leaves)
    ids = document_ids(case.batch, length) if has_documents else np.zeros((1, length))
    start, end = (np.stack([np.searchsorted(row, row, side) for row in ids]) for side in ("left", "right"))
    position, tiles = np.arange(length), np.arange(0, length, TILE)
    first = np.maximum(start, position - (length if before is None else before))
    last = np.minimum(end - 1, position + (length if after is None else after))
    first_tile = np.minimum.reduceat(first, tiles, 1) // TILE
    last_tile = np.maximum.reduceat(last, tiles, 1) // TILE
    return float((last - first + 1).mean() / length), float((last_tile - first_tile + 1).mean() / len(tiles))


@functools.cache
def document_ids(batch: int, length: int, mean: int = 1024) -> np.ndarray:
    """Return the ids of packed documents, `(batch, length)`. The documents have random lengths from 1 to
    `2 * mean - 1`. The last documents are cut off."""
    ends = np.random.default_rng(0).integers(1, 2 * mean, (batch, length)).cumsum(1)
    return np.stack([np.searchsorted(row, np.arange(length), "right") for row in ends])


def document_offsets(batch: int, length: int) -> np.ndarray:
    """Return where each document of `document_ids` starts if all examples are joined, and then the last end."""
    starts = np.flatnonzero(np.diff(document_ids(batch, length), prepend=-1))
    return np.append(starts, batch * length).astype(np.int32)


class DocumentIds(Argument):
    """`document_ids`, equal for all keys of `draw`."""

    def draw(self, key: Array, batch: int, dtype: str) -> Array:
        return jnp.asarray(document_ids(batch, *self.shape[1:]), self.dtype)


def document_attention(q: Array, k: Array, v: Array, ids: Array, **options: Any) -> Array:
    return jaxbp.dot_product_attention(q, k, v, segment_ids=ids, **options)


def _with_documents(case):
    return dataclasses.replace(case, arguments=(*case.arguments, DocumentIds((BATCH, 8192), below=1)))


_ATTENTION = next(entry.real for entry in CATALOGUE if entry.name == "dot_product_attention")
_DOCUMENTS = {place: _with_documents(_ATTENTION[place]) for place in ("8192x16x128", "8192x16x128 causal")}
DOCUMENT_ATTENTION = Entry(document_attention, _DOCUMENTS["8192x16x128"], _DOCUMENTS)


def gate_layer(logits: Array, wires: jaxbp.Wires, x: Array) -> Array:
    """Compute `jaxbp.gate_layer` with four coefficients per gate: the fastest known form under autodiff.

    A gate computes `c0 + c1 a + c2 b + c3 ab` of its inputs a and b. Inputs are transposed to `(inputs, batch)`, so
    that a gather reads one contiguous row per input.
    """
    table = jnp.asarray(COEFFICIENTS, logits.dtype)
    c = jnp.matmul(jax.nn.softmax(logits), table, precision=lax.Precision.HIGHEST).T[..., None]
    rows = x.T
    a, b = rows[wires.a], rows[wires.b]
    return (c[0] + c[1] * a + c[2] * b + c[3] * a * b).T.astype(x.dtype)


def gate_layer_backward(dy: Array, logits: Array, wires: jaxbp.Wires, x: Array) -> tuple[Array, Array]:
    return jax.vjp(lambda logits, x: gate_layer(logits, wires, x), logits, x)[1](dy)


FOUR_COEFFICIENTS = "autodiff, 4 coefficients"
BASELINES = {
    "gate_layer": {FOUR_COEFFICIENTS: gate_layer},
    "gate_layer_backward": {FOUR_COEFFICIENTS: gate_layer_backward},
}


def frozen_parameters_workload(wanted: str, features: int = 2048, blocks: int = 4, rank: int = 16) -> Workload:
    """Return the gradients of a model's "adapters", or of "all" its parameters.

    A dense layer of the model is `linear(h, w, b) + linear(linear(h, down), up)`. The matrices `down` and `up` are an
    adapter (LoRA, arXiv:2106.09685).
    """

    def function(implementation, dtype):
        linear = functools.partial(jaxbp.linear, implementation=implementation)

        def adapted(h, parameters, adapter):
            (w, b), (down, up) = parameters, adapter
            return linear(h, w, b) + linear(linear(h, down), up)

        def loss(adapters, frozen, x, dy):
            for (wide, narrow), (norm, expand, contract) in zip(adapters, frozen, strict=True):
                h = adapted(jaxbp.layer_norm(x, *norm, implementation=implementation), expand, wide)
                x = x + adapted(jaxbp.gelu(h, implementation=implementation), contract, narrow)
            return jnp.sum(x.astype(jnp.float32) * dy.astype(jnp.float32))

        return jax.grad(loss, {"adapters": 0, "all": (0, 1)}[wanted])

    def draw(seed, batch, dtype):
        seeds = itertools.count(1000 * seed)

        def normal(*shape):
            return jax.random.normal(jax.random.key(next(seeds)), shape, dtype) * shape[-1] ** -0.5

        shapes = (4 * features, features), (features, 4 * features)
        adapters = [[(normal(rank, n), normal(m, rank)) for m, n in shapes] for _ in range(blocks)]
        frozen = [
            ((1 + normal(features), normal(features)), *((normal(m, n), normal(m)) for m, n in shapes))
            for _ in range(blocks)
        ]
        return adapters, frozen, normal(batch, features), normal(batch, features)

    op, batches = "frozen_parameters", ((16384,), ())
    options = {"features": features, "blocks": blocks, "rank": rank}
    return Workload(op, wanted, f"{op} {wanted}", options, batches, function, draw, one_after_another, error_batch=16)


def mixture_of_experts_workload(experts: int, features: int, hidden: int, experts_per_token: int) -> Workload:
    """Return `jaxbp.nnx.MixtureOfExperts` with its losses, and the gradients of its parameters and inputs. The batch
    are tokens."""
    sizes = features, hidden, experts, experts_per_token

    def function(implementation, dtype):
        @functools.partial(nnx.eval_shape)
        def layer():
            options = dict(param_dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))
            return jaxbp.nnx.MixtureOfExperts(*sizes, **options)

        graph, parameters = nnx.split(layer)
        names = [path[0] for path, _ in nnx.to_flat_state(parameters)]

        def op(arrays, x):
            state = nnx.State({name: nnx.Param(arrays[name]) for name in names})
            y, routing = nnx.merge(graph, state)(x)
            return y, routing.load_balancing_loss, routing.z_loss

        return forward_and_backward(op)

    def draw(seed, batch, dtype):
        shapes = {
            "router": (features, experts),
            "gate_up": (experts, features, 2 * hidden),
            "down": (experts, hidden, features),
        }
        keys = jax.random.split(jax.random.key(seed), len(shapes) + 2)
        arrays = {
            name: jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5
            for (name, shape), key in zip(shapes.items(), keys, strict=False)
        }
        x, dy = (jax.random.normal(key, (batch, features), dtype) for key in keys[-2:])
        return (arrays, x), [dy, jnp.float32(0.01), jnp.float32(0.001)]

    op, place, batches = "mixture_of_experts", f"{experts}x{features}x{hidden}", ((8192,), ())
    options = {"experts_per_token": experts_per_token}
    title = f"{op} fwd+bwd {place}"
    # In float64, the weights and gradients of Mixtral's experts take 23 GB.
    error_batch = 16 if experts * features * hidden < 2**28 else None
    return Workload(op, place, title, options, batches, function, draw, one_after_another, error_batch=error_batch)


def _gate_operations(case: Case, forward: bool, backward: bool, batch: int) -> int:
    *_, automaton, state = (None, *case.leaves)
    if not isinstance(automaton, AutomatonArgument):
        return 0
    _, height, width, channels = state.shape
    gates = automaton.gates_a_cell * case.options.get("steps", 1)
    # A backward recomputes all gates except the last layer of the last tick.
    of_gate = FORWARD_OPERATIONS if forward else GATE_OPERATIONS
    return (of_gate * gates - FORWARD_OPERATIONS * channels * backward) * batch * height * width


def forward_only(op: Callable) -> Callable:
    """Return a function `(arrays, cotangents) -> results`, which ignores the cotangents."""
    return lambda arrays, _: op(*arrays)


def forward_and_backward(op: Callable) -> Callable:
    """Return a function `(arrays, cotangents) -> (floating results, other results, gradients)`.

    A barrier gives the cotangents to the backward after the results, because in training the loss lies between them.
    Without it, XLA merges both into one kernel for some ops. Residuals do not pass the barrier, because XLA would then
    store masks and zeros that it recomputes in training.
    """

    def function(arrays, cotangents):
        leaves, structure = jax.tree.flatten(arrays)

        def of_floats(*values):
            values = iter(values)
            given = [next(values) if is_float(a) else a for a in leaves]
            results = jax.tree.leaves(op(*jax.tree.unflatten(structure, given)))
            return [a for a in results if is_float(a)], [a for a in results if not is_float(a)]

        results, vjp, integers = jax.vjp(of_floats, *filter(is_float, leaves), has_aux=True)
        results, cotangents = lax.optimization_barrier((results, cotangents))
        return results, integers, vjp(cotangents)

    return function


def one_after_another(function: Callable, calls: int, implementation: str | None = None) -> Callable:
    """Return a program of sets of arguments that calls the function once per set, for the first `calls` sets, and
    returns all results.

    `implementation` is not used. Barriers keep XLA from overlapping or merging calls on a GPU. XLA's CPU compiler drops
    the barriers.
    """
    function = jax.jit(function)

    def program(sets):
        results, token = [], jnp.zeros(())
        for arguments in sets[:calls]:
            arguments, token = lax.optimization_barrier((arguments, token))
            result, token = lax.optimization_barrier((function(*arguments), token))
            results.append(result)
        return results  # XLA would not compute unused results

    return program
