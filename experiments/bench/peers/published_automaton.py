"""Logic cellular automata, reimplemented from the article: 16 functions per gate, and autodiff.

Source: P. Miotti et al., "Differentiable logic cellular automata", 2025.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.bench.measure import floats, time_compiled
from experiments.bench.training_workloads import automaton_workload
from jaxbp import Automaton
from jaxbp.logic.gates import relaxed_gates

VERSION = jax.__version__


def variants(task):
    if task.op != "automaton":
        return
    for name, options in (("", {}), (", deterministic", {"xla_gpu_deterministic_ops": True})):
        yield f"16 gates{name}", None, functools.partial(_measured, task, options)


def _measured(task, options):
    workload = automaton_workload(**task.options)
    function = workload.function(_published, task.dtype)
    program = jax.jit(workload.chain(function, task.calls), compiler_options=options)
    compiled = program.lower(task.sets).compile()
    timed = time_compiled(compiled, task.sets, task.calls, task.seconds, bursts=task.bursts)
    call = jax.jit(function, compiler_options=options).lower(*task.sets[0]).compile()
    memory = {"temporary_bytes": call.memory_analysis().temp_size_in_bytes}
    return timed | memory | {"results": floats(call(*task.small))}


def _published(logits, automaton, state, steps):
    return lax.scan(lambda s, _: (tick(logits, automaton, s), None), state, None, steps)[0]


def tick(logits: tuple, automaton: Automaton, state: Array, fires: Array | None = None) -> Array:
    """Compute `jaxbp.automaton_step`, for the cells where `fires` is True. None means all cells."""
    height, width = state.shape[1:3]
    edge = [(0, 0), (1, 1), (1, 1), (0, 0)]
    padded = jnp.pad(state, edge, mode="wrap" if automaton.periodic else "constant")
    patches = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    of_cells = jax.vmap(jax.vmap(jax.vmap(functools.partial(_cell, logits, automaton))))
    new = of_cells(jnp.stack(patches, axis=-2))
    return new if fires is None else jnp.where(fires[..., None], new, state)


def _cell(logits, automaton, patch):
    # `patch`: `(9, channels)`
    def perceived(of_kernel):
        x = patch.T
        for layer, wires in zip(of_kernel, automaton.perception, strict=True):
            x = _layer(layer, wires, x)
        return x

    seen = jax.vmap(perceived)(logits[0])  # (kernels, channels, bits)
    x = jnp.concatenate([patch[4], seen.transpose(1, 2, 0).ravel()])
    for layer, wires in zip(logits[1], automaton.update, strict=True):
        x = _layer(layer, wires, x)
    return x


def _layer(logits, wires, x):
    functions = jnp.stack(relaxed_gates(x[..., wires.a], x[..., wires.b]), axis=-1)
    return jnp.sum(functions * jax.nn.softmax(logits, axis=-1), axis=-1)
