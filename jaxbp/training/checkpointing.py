"""Backpropagation through many steps with bounded memory.

In scans, the policy "logarithmic" divides the steps into segments of about log2(steps) steps. Binomial checkpointing
selects the segments before which a state is kept. The backward of a segment recomputes and keeps the states before all
its steps.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxbp.common import barriers, checks
from jaxbp.pairing import differentiable
from jaxbp.pairing.pair import mapped_axis_first

Memory = Literal["all", "states", "logarithmic"] | int


def check_memory(op: str, memory: Any) -> None:
    is_count = isinstance(memory, int) and not isinstance(memory, bool) and memory >= 1
    if not is_count and memory not in ("all", "states", "logarithmic"):
        raise ValueError(
            f"{op}: memory is {memory!r}; wants 'all', 'states', 'logarithmic', or an int of at least 1, the number of "
            "steps between kept states"
        )


def advance(
    step: Callable,
    state: Any,
    steps: int,
    memory: Memory,
    *,
    unroll: int = 1,
    keep: Callable[[Any], Any] = lambda state: state,
) -> tuple[Any, Any]:
    """Compute `state = step(state, t)` for t from 0 to `steps - 1`. Return the last state, and the kept states for
    `reverse_scan`.

    `keep(state)` is the part of a state that is kept. The policy `memory`, which must not be "all", selects the steps
    before which it is kept.
    """
    length = _segment_length(steps, memory)
    segments, rest = divmod(steps, length)
    backend = functools.partial(_through, step, unroll=unroll)
    if memory == "logarithmic" and segments:
        schedule = _schedule(segments)
        kept = jax.tree.map(lambda a: jnp.zeros((schedule.slots + 1, *a.shape), a.dtype), keep(state))

        def segment(carry, slot_and_start):
            state, kept = carry
            slot, start = slot_and_start
            return (backend(state, start, length), _put(kept, slot, keep(state))), None

        starts = np.arange(segments, dtype=np.int32) * length
        (state, kept), _ = lax.scan(segment, (state, kept), (schedule.first_slots, starts))
    else:
        state, kept = lax.scan(
            lambda state, start: (backend(state, start, length), keep(state)),
            state,
            np.arange(segments, dtype=np.int32) * length,
            unroll=_unrolled(unroll // length, segments),
        )
    return backend(state, segments * length, rest), (kept, keep(state) if rest else None)


def reverse_scan(
    step: Callable, step_backward: Callable, kept: Any, carry: Any, steps: int, memory: Memory, *, unroll: int = 1
) -> Any:
    """Compute `carry = step_backward(carry, state, t)` for t from `steps - 1` to 0. Return the last carry.

    `kept` is the second result of `advance`. The state before step t is in `kept`, or `step` recomputes it from there.
    """
    length = _segment_length(steps, memory)
    segments, rest = divmod(steps, length)
    kept, last = kept
    back = functools.partial(_back, step, step_backward, unroll=unroll)
    if rest:
        carry = back(carry, last, segments * length, rest)
    if memory != "logarithmic" or not segments:
        return lax.scan(
            lambda carry, state_and_start: (back(carry, *state_and_start, length), None),
            carry,
            (kept, np.arange(segments, dtype=np.int32) * length),
            reverse=True,
            unroll=_unrolled(unroll // length, segments),
        )[0]
    schedule = _schedule(segments)
    slots = jnp.asarray(schedule.slots_on_the_way)

    def segment(carry_and_kept, visit):
        carry, kept = carry_and_kept
        index, slot, start, first = visit

        def recompute(i, state_and_kept):
            state, kept = state_and_kept
            kept = _put(kept, slots[first + i], state)
            return _through(step, state, (start + i) * length, length, unroll=unroll), kept

        state = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, slot, keepdims=False), kept)
        state, kept = lax.fori_loop(0, index - start, recompute, (state, kept))
        return (back(carry, state, index * length, length), kept), None

    return lax.scan(segment, (carry, kept), schedule.visits)[0][0]


def _segment_length(steps: int, memory: Memory) -> int:
    if memory == "logarithmic":
        return max(1, steps.bit_length())
    return 1 if memory == "states" else memory


def _unrolled(wanted: int, length: int) -> int:
    return max(1, min(wanted, length))


def _through(step, state, start, length, *, unroll):
    if length == 1:
        return step(state, start)
    steps = start + np.arange(length, dtype=np.int32)
    return lax.scan(lambda s, t: (step(s, t), None), state, steps, unroll=_unrolled(unroll, length))[0]


def _back(step, step_backward, carry, state, start, length, *, unroll):
    if length == 1:
        return step_backward(carry, state, start)
    steps = start + np.arange(length, dtype=np.int32)
    last, before = lax.scan(lambda s, t: (step(s, t), s), state, steps[:-1], unroll=_unrolled(unroll, length - 1))
    carry = step_backward(carry, last, steps[-1])
    return lax.scan(
        lambda c, at: (step_backward(c, *at), None),
        carry,
        (before, steps[:-1]),
        reverse=True,
        unroll=_unrolled(unroll, length - 1),
    )[0]


def _put(kept, slot, state):
    return jax.tree.map(lambda all_, a: lax.dynamic_update_index_in_dim(all_, a, slot, 0), kept, state)


class _Schedule(NamedTuple):
    """A plan for the backward of n segments (runs of steps), with memory for few states (slots).

    The backward visits the segments from last to first. Each visit recomputes the state before its segment from the
    state in a slot.

    Attributes:
      slots: the number of slots, without an extra slot for states that are not kept.
      first_slots: for each segment, the slot to which the forward writes the state before it.
      visits: four arrays `(n,)`, with one entry per visit: the segment; the slot; the segment that begins with this
        slot's state; and the visit's first index in `slots_on_the_way`.
      slots_on_the_way: for each segment that a visit recomputes, the slot for the state before it.
    """

    slots: int
    first_slots: np.ndarray
    visits: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    slots_on_the_way: np.ndarray


@functools.lru_cache(64)
def _schedule(n: int) -> _Schedule:
    slots = max(1, n.bit_length())
    visits = _binomial(n, slots)
    spare = slots
    _, _, _, stores = visits[0]
    first_slots = np.array([0, *(stores.get(i, spare) for i in range(1, n))], np.int32)
    # The forward keeps the states that the first visit would keep. This visit starts from the last of them.
    visits[0] = (n - 1, *max(((slot, i) for i, slot in stores.items()), key=lambda s: s[1], default=(0, 0)), {})
    on_the_way, first = [], []
    for segment, _, start, stores in visits:
        first.append(len(on_the_way))
        on_the_way += [spare if i == start else stores.get(i, spare) for i in range(start, segment)]
        # The state before the visit's segment is in a slot, or no later visit needs it.
    columns = [np.array(column, np.int32) for column in list(zip(*visits, strict=True))[:3]]
    return _Schedule(slots, first_slots, (*columns, np.array(first, np.int32)), np.array([*on_the_way, 0], np.int32))


def _binomial(n: int, slots: int) -> list[tuple[int, int, int, dict[int, int]]]:
    """Plan the backward of n segments (runs of steps), with `slots` slots, each for one state.

    Return `(segment, slot, start, stores)` per segment, last first. The slot has the state before segment `start`, from
    which segments `start` to `segment - 1` are recomputed. `stores` maps some segments to slots for the states
    before them.
    """
    repeats = next(r for r in range(n + 1) if math.comb(slots - 1 + r, r) >= n)
    visits = []

    def visit(low, high, depth, repeats, fetched, stores):
        # Slot `depth` has the state before segment `low`.
        while high - low > 1 and depth + 1 < slots:
            # The remaining slots and `repeats` recomputations suffice for this many segments.
            right = min(math.comb(slots - depth - 2 + repeats, repeats), high - low - 1)
            middle = high - right
            visit(middle, high, depth + 1, repeats, fetched, stores | {middle: depth + 1})
            high, repeats, fetched, stores = middle, repeats - 1, (depth, low), {}
        for segment in range(high - 1, low - 1, -1):
            visits.append((segment, *fetched, stores))
            fetched, stores = (depth, low), {}

    visit(0, n, 0, repeats, (0, 0), {})
    return visits


def checkpointed(layers: Sequence[Callable[[Any], Any]], memory: Memory | None = None) -> Callable[[Any], Any]:
    """Return the function that applies the layers in order, with a gradient that needs less memory.

    Each layer is a pure function of a pytree and may close over parameters. The policy `memory` decides which inputs of
    layers are kept for the gradient. For n layers with inputs of c bytes, a gradient needs the intermediate results of
    one layer, and::

        memory         bytes                                     each layer is recomputed
        "all"          every intermediate result of every layer  never
        "states"       n c                                       once
        an int k       (n / k + k) c                             twice
        "logarithmic"  about log2(n) c                           up to log2(n) times
        None           2 √n c, because k = √n                    twice

    Raises:
      ValueError: there are no layers, or the policy is unknown.
      TypeError: `layers` is not a list of functions.

    Source: T. Chen et al., "Training deep nets with sublinear memory cost", 2016; for "logarithmic", A. Griewank,
    "Achieving logarithmic growth of temporal and spatial complexity in reverse automatic differentiation", 1992.
    """
    op = "checkpointed"
    if not isinstance(layers, Iterable):
        raise TypeError(f"{op}: layers is {layers!r}; wants a list of functions of one argument")
    if not (layers := tuple(layers)):
        raise ValueError(f"{op}: layers is empty; wants at least one layer")
    for i, layer in enumerate(layers):
        if not callable(layer):
            raise TypeError(f"{op}: layers[{i}] is a {type(layer).__name__}; wants a function of one argument")
    memory = max(1, round(math.sqrt(len(layers)))) if memory is None else memory
    check_memory(op, memory)
    if memory != "all":
        layers = [barriers.checkpoint(layer) for layer in layers]
    if memory == "logarithmic":
        return _bisected(layers)
    if isinstance(memory, int):
        segments = (layers[i : i + memory] for i in range(0, len(layers), memory))
        layers = [barriers.checkpoint(_one_after_another(segment)) for segment in segments]
    return _one_after_another(layers)


def _bisected(layers):
    if len(layers) == 1:
        return layers[0]
    half = len(layers) // 2
    return _one_after_another([barriers.checkpoint(_bisected(layers[:half])), _bisected(layers[half:])])


def _one_after_another(layers):
    return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x)


def checkpointed_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    memory: Memory = "logarithmic",
) -> tuple[Any, Any]:
    """Return `jax.lax.scan(f, init, xs, length, reverse)`, with gradients that need less memory. Arrays that f closes
    over have gradients, too.

    The policy `memory` decides before which steps the carry is kept for the gradient. For T steps with a carry of c
    bytes, a gradient needs the intermediate results of one step, and::

        memory         carries kept                       bytes                           each step is recomputed
        "all"          as in JAX                          every result of every step      never
        "states"       before every step                  T c                             once
        an int k       before every k-th step             (T / k + k) c, least for k = √T twice
        "logarithmic"  before about log2(T) of the steps  about 2 log2(T) c               about log2(T) / 2 times

    Raises:
      TypeError: f is not a function.
      ValueError: the policy is unknown; xs has an array without axes; or xs and length do not determine one number of
        steps.

    Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM TOMS 2000.
    """
    op = "checkpointed_scan"
    checks.function(op, "f", f)
    check_memory(op, memory)
    if any(np.ndim(a) == 0 for a in jax.tree.leaves(xs)):
        raise ValueError(f"{op}: xs has an array of shape (); wants arrays whose first axis counts the steps")
    sizes = {np.shape(a)[0] for a in jax.tree.leaves(xs)} | ({length} - {None})
    if len(sizes) != 1:
        raise ValueError(f"{op}: xs and length have {sorted(sizes)} steps; wants one number of steps")
    steps = checks.count(op, "length", sizes.pop(), 0)
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    if memory == "all" or steps == 0:
        return lax.scan(f, init, xs, steps, reverse)
    f, constants = jax.closure_convert(f, init, _at(xs, 0))
    return _checkpointed(f, steps, checks.boolean(op, "reverse", reverse), memory)(constants, init, xs)


def _checkpointed(f, steps, reverse, memory):
    def scan(constants, init, xs):
        return lax.scan(lambda c, x: f(c, x, *constants), init, xs, steps, reverse)

    def row(t):
        return steps - 1 - t if reverse else t

    def save(constants, init, xs):
        ys = jax.eval_shape(lambda: scan(constants, init, xs))[1]
        state = init, jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), ys)

        def step(state, t):
            carry, y = f(state[0], _at(xs, row(t)), *constants)
            return carry, _put(state[1], row(t), y)

        results, kept = advance(step, state, steps, memory, keep=lambda state: state[0])
        return mapped_axis_first(results, (kept, constants, init, xs))

    def by_policy(dcarry, dys, kept, constants, init, xs):
        def step(carry, t):
            return f(carry, _at(xs, row(t)), *constants)[0]

        def step_backward(gradients, carry, t):
            dcarry, dxs, dconstants = gradients
            pullback = _vjp(lambda c, x, constants: f(c, x, *constants), carry, _at(xs, row(t)), constants)
            dcarry, dx, dconstant = pullback((dcarry, _at(dys, row(t))))
            return dcarry, _put(dxs, row(t), dx), jax.tree.map(jnp.add, dconstants, dconstant)

        zeros = jax.tree.map(jnp.zeros_like, (_floating(xs), constants))
        return reverse_scan(step, step_backward, kept, (dcarry, *zeros), steps, memory)

    def by_autodiff(dcarry, dys, kept, constants, init, xs):
        dconstants, dinit, dxs = _vjp(scan, constants, init, xs)((dcarry, dys))
        return dinit, dxs, dconstants

    gradients = differentiable(by_policy, by_autodiff)

    def backward(saved, cotangents):
        dcarry, dxs, dconstants = gradients(*_floating(cotangents), *saved)
        return dconstants, dcarry, dxs

    call = jax.custom_vjp(lambda *arguments: mapped_axis_first(scan(*arguments))[0])
    call.defvjp(save, backward)
    return call


def _vjp(function: Callable, *arguments: Any) -> Callable[[Any], tuple]:
    """Return the pullback of `jax.vjp`, with None for cotangents of dtype float0, which `lax.scan` cannot carry."""
    results, pullback = jax.vjp(function, *arguments)

    def floating_pullback(cotangents):
        with_zeros = lambda a, d: np.zeros(a.shape, jax.dtypes.float0) if d is None else d  # noqa: E731
        return _floating(pullback(jax.tree.map(with_zeros, results, cotangents)))

    return floating_pullback


def _floating(tree: Any) -> Any:
    return jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jnp.inexact) else None, tree)


def _at(tree: Any, t: Any) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, t, keepdims=False), tree)
