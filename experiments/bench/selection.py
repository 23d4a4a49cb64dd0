"""Choose the workloads to time."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments.bench.gpt_workload import GPT_WORKLOADS, gpt_workload
from experiments.bench.training_workloads import (
    AUTOMATON_BATCHES,
    LOGIC_CONV,
    automaton_workload,
    lenet_workload,
    logic_conv_workload,
    logic_workload,
)
from experiments.bench.workloads import (
    DOCUMENT_ATTENTION,
    Workload,
    frozen_parameters_workload,
    mixture_of_experts_workload,
    op_workload,
)
from experiments.output.errors import UserError, refuse_unknown
from jaxbp.catalogue import CATALOGUE


def selected(cases: Sequence[str], batch_last: bool = False, forward: bool = False) -> list[Workload]:
    """Return the workloads that `cases` names. With `batch_last`, omit training steps, and move batch axes last. With
    `forward`, omit training steps and backwards, and compute no gradients."""
    entries = *CATALOGUE, DOCUMENT_ATTENTION
    workloads = [lenet_workload(), *(op_workload(entry, place, forward) for entry in entries for place in entry.real)]
    workloads += [frozen_parameters_workload(wanted) for wanted in ("adapters", "all")]
    workloads += [mixture_of_experts_workload(8, 4096, 14336, 2), mixture_of_experts_workload(128, 2048, 768, 8)]
    workloads += [gpt_workload(place) for place in GPT_WORKLOADS]
    workloads += [logic_workload("logic", 8000, (128,)), logic_workload("logic-large", 64000, ())]
    workloads += [logic_workload("logic-learned", 8000, (128,), candidates=8)]
    workloads += [logic_conv_workload(place) for place in LOGIC_CONV]
    workloads += [automaton_workload(size) for size in AUTOMATON_BATCHES]
    named = [
        {"all", workload.op, f"{workload.op}:{workload.place}"} | ({"ops"} if workload.steps is None else set())
        for workload in workloads
    ]
    unknown = [case for case in cases if not any(case in names for names in named)]
    ops = list(dict.fromkeys(workload.op for workload in workloads))
    unknown_ops = [case for case in unknown if case.partition(":")[0] not in ops]
    refuse_unknown("case", unknown_ops, ops, "all, ops, or names among ")
    for op, _, place in (case.partition(":") for case in unknown):
        places = ", ".join(workload.place for workload in workloads if workload.op == op)
        raise UserError(f"unknown place {place} of {op}; wants {f'one of {places}' if places else 'no place'}")
    workloads = [
        workload
        for workload, names in zip(workloads, named, strict=True)
        if not names.isdisjoint(cases) or any(workload.op.startswith(f"{case}_backward") for case in cases)
    ]
    if not (batch_last or forward):
        return workloads
    ops = [workload for workload in workloads if workload.steps is None and forward <= workload.forward]
    if not ops:
        option, others = ("--forward", "training steps or backwards") if forward else ("--batch-last", "training steps")
        raise UserError(f"{option} is given for {', '.join(cases)}, which have only {others}; wants at least one op")
    return [with_batch_last(workload) for workload in ops] if batch_last else ops


def quick(workloads: Sequence[Workload], on_gpu: bool) -> dict[Workload, int]:
    """Select one workload per module of ops, and one per kind of training step: the first. Return a dict from these
    workloads to the middle one of their batch sizes. Ops come first, because they compile faster."""
    module = {entry.name: entry.function.__module__ for entry in CATALOGUE}
    module |= {"automaton": module["automaton_step"], "document_attention": module["dot_product_attention"]}
    chosen: dict[str, tuple[Workload, int]] = {}
    for workload in workloads:
        if batches := workload.batches[0 if on_gpu else 1]:
            family = module.get(workload.op) or workload.op.partition("-")[0]
            chosen.setdefault(family, (workload, batches[len(batches) // 2]))
    return dict(sorted(chosen.values(), key=lambda each: each[0].steps is not None))


def with_batch_last(workload: Workload) -> Workload:

    def structs(batch):
        arguments = jax.eval_shape(lambda: workload.draw(0, batch, "float32"))
        return arguments, jax.eval_shape(workload.function("autodiff", "float32"), *arguments)

    batched = jax.tree.map(lambda a, b: a.shape != b.shape, structs(2), structs(3))

    def moved(tree, batched, source, destination):
        return jax.tree.map(lambda a, move: jnp.moveaxis(a, source, destination) if move else a, tree, batched)

    def function(implementation, dtype):
        batch_first = workload.function(implementation, dtype)
        return lambda *arguments: moved(batch_first(*moved(arguments, batched[0], -1, 0)), batched[1], 0, -1)

    def draw(seed, batch, dtype):
        return moved(workload.draw(seed, batch, dtype), batched[0], 0, -1)

    return dataclasses.replace(workload, title=f"{workload.title}, batch last", function=function, draw=draw)
