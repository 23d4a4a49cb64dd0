"""Measure the phases of the first `jit` of each op's kernels, with the gradients, and of training steps.

    python -m experiments.studies.compile_times --json docs/results/compile-times.json   # needs CUDA's compiler

The programs are compiled for an H200, even if absent. Times are CPU seconds of all threads and of child processes, so
that other jobs of the machine hardly change them:

    tracing    JAX traces the program, but not the bodies of the kernels
    lowering   JAX traces the bodies, and Pallas translates them to Mosaic GPU's dialects, in Python
    mosaic     Mosaic GPU and LLVM compile the kernels: the time of a compilation without the time of a second one,
               which finds the kernels in Mosaic GPU's cache
    xla        the second compilation
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jaxbp
from experiments.ahead_of_time import gpus
from experiments.bench.roofline import has_launch
from experiments.bench.selection import selected
from experiments.bench.workloads import Workload
from experiments.output.errors import exit_code
from experiments.studies import parser_of, write_rows
from jaxbp.catalogue import CATALOGUE
from pallas_kernels.core.device import HOPPER

OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Autotuning needs a GPU."""
OTHER = {"xla_dump_max_hlo_modules": 1}
"""With this option, which changes nothing without a dump, JAX does not find the executable of the first compilation."""
STEPS = {
    "lenet": (128, 1024, 8192, 65536),
    "logic:6x8000": (128,),
    "logic-conv:mnist-m": (128,),
    "automaton:32x32": (4,),
}
"""Batch sizes of training steps, by the case of the bench."""


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", help="cases of the bench. Default: STEPS, and one size of each op")
    given = parser.parse_args(args)
    jax.config.update("jax_platforms", "cpu")  # not the machine's GPU
    return write_rows("compile_times", args, {"compiled_for": HOPPER.kind}, measured(given.cases), given.json)


def measured(cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    workloads = {f"{workload.op}:{workload.place}".removesuffix(":"): workload for workload in selected(["all"])}
    # A backward, and an op with more results, have the kernels of another op.
    entries = [entry for entry in CATALOGUE if not re.search("_backward|_with_", entry.name)]
    first = [f"{entry.name}:{next(iter(entry.real))}" for entry in entries]
    works = [
        (workloads[case], batch)
        for case in cases or [*STEPS, *first]
        for batch in STEPS.get(case, workloads[case].batches[0][:1])
    ]
    # Building the functions runs code. Inside `with`, no code can run, because the GPU is absent.
    functions = [workload.function("pallas", "float32") for workload, _ in works]
    with gpus(HOPPER) as (gpu,):
        # The first compilation also loads Mosaic GPU.
        phases(
            jax.jit(lambda x: jaxbp.relu_backward(x, x, implementation="pallas")),
            on(gpu, (jax.ShapeDtypeStruct((256, 128), "float32"),)),
        )
        for (workload, batch), function in zip(works, functions, strict=True):
            row = phases(function, on(gpu, shapes_of(workload, batch)))
            if row is not None:
                yield {"work": workload.title, "batch": batch} | row


def shapes_of(workload: Workload, batch: int) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.eval_shape(lambda: workload.draw(0, batch, "float32"))


def on(gpu: jax.Device, structs: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(gpu)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), structs)


def phases(function: Callable, structs: Any) -> dict[str, Any] | None:
    """Return the CPU seconds of each phase, or None if no kernel of jaxbp runs."""
    try:
        tracing, traced = cpu_seconds(lambda: jax.jit(function).trace(*structs))
    except NotImplementedError:  # an op without a kernel
        return None
    if not has_launch(traced.jaxpr.jaxpr):
        return None
    lowering, lowered = cpu_seconds(lambda: traced.lower(lowering_platforms=("cuda",)))
    first, compiled = cpu_seconds(lambda: lowered.compile(compiler_options=OPTIONS))
    second, _ = cpu_seconds(lambda: lowered.compile(compiler_options=OPTIONS | OTHER))
    kernels = compiled.as_text().count('custom_call_target="mosaic_gpu')
    return {"kernels": kernels, "tracing": tracing, "lowering": lowering, "mosaic": first - second, "xla": second}


def cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    start = sum(os.times()[:4])
    result = run()
    return sum(os.times()[:4]) - start, result


if __name__ == "__main__":
    sys.exit(exit_code(main))
