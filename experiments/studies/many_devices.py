"""Measure the overhead of data-parallel training on several GPUs, or list the communication in compiled programs.

    python -m experiments.studies.many_devices measure --json docs/results/many-devices.json   # on several GPUs
    python -m experiments.studies.many_devices compile --json docs/results/collectives.json    # needs CUDA's compiler

docs/benchmarks/devices.md describes the measurements. `compile` compiles for eight H200 GPUs, even if absent.
"""

import concurrent.futures
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.ahead_of_time import gpus
from experiments.bench.measure import time_compiled
from experiments.bench.selection import selected
from experiments.bench.workloads import Workload
from experiments.output.errors import exit_code
from experiments.studies import parser_of, write_rows
from pallas_kernels.core.device import HOPPER

OVERLAPPING = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**17,
}
"""With these options, XLA sums a layer's gradients over the GPUs during the backward of earlier layers."""
EXAMPLES = {"lenet": (8192, 65536), "logic": (128, 1024), "logic-large": (128, 1024), "gpt:124M": (32,)}
"""The numbers of examples per device, by the case of the bench."""
DTYPES = {"gpt:124M": "bfloat16"}
"""Dtypes of the computation other than float32."""
COMPILED_FOR = 8
SECONDS = 0.03


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=["measure", "compile"])
    parser.add_argument("--workloads", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    given = parser.parse_args(args)
    if given.what == "compile":
        jax.config.update("jax_platforms", "cpu")  # not the machine's GPU
    devices = len(jax.devices()) if given.what == "measure" else COMPILED_FOR
    cases = {case: selected([case])[0] for case in given.workloads}
    rows = {"measure": measured, "compile": compiled}[given.what](cases)
    return write_rows("many_devices", args, {"devices": devices}, rows, given.json)


def data_parallel(workload: Workload, dtype: str, examples: int, mesh: Mesh | None) -> tuple[Any, ...]:
    """Return the shapes, dtypes, and shardings of a training step's arguments, with `examples` examples per device.

    The devices of the mesh divide the examples. Each device has the whole training state. If `mesh` is None, the
    arguments are for one device, and have no sharding.
    """
    if mesh is None:
        return jax.eval_shape(lambda: workload.draw(0, examples, dtype))

    def on_mesh(tree, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    with jax.default_device(jax.devices("cpu")[0]):
        state, *data = jax.eval_shape(lambda: workload.draw(0, examples * mesh.size, dtype))
    return on_mesh(state), *(on_mesh(a, "examples") for a in data)


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("examples",), axis_types=(AxisType.Auto,))


def measured(workloads: Mapping[str, Workload]) -> Iterator[dict[str, Any]]:
    one, every = mesh_of(jax.devices()[:1]), mesh_of(jax.devices())
    places = {
        "alone": (None, {}),
        "mesh_of_one": (one, {}),
        "mesh": (every, {}),
        "mesh_overlapping": (every, OVERLAPPING),
    }
    steps = [
        (workload, DTYPES.get(case, "float32"), examples)
        for case, workload in workloads.items()
        for examples in EXAMPLES[case]
    ]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for workload, dtype, examples in steps:
            row = {"work": workload.title, "examples": examples}
            of_step = [lowered(workload, dtype, examples, *where) for where in places.values()]
            # No program compiles while another is timed.
            programs = list(pool.map(lambda program: program.compile(), of_step))
            for (place, (mesh, _)), program in zip(places.items(), programs, strict=True):
                arguments = workload.draw(0, examples * (mesh.size if mesh else 1), dtype)
                if mesh is not None:
                    shardings = jax.tree.map(lambda a: a.sharding, data_parallel(workload, dtype, examples, mesh))
                    arguments = jax.device_put(arguments, shardings)
                row[place] = time_compiled(program, (arguments,), workload.steps, SECONDS)["microseconds"]
            yield row


def lowered(
    workload: Workload, dtype: str, examples: int, mesh: Mesh | None, options: Mapping[str, Any]
) -> jax.stages.Lowered:
    program = workload.chain(workload.function(None, dtype), workload.steps)
    return jax.jit(program, compiler_options=dict(options)).lower((data_parallel(workload, dtype, examples, mesh),))


def compiled(workloads: Mapping[str, Workload]) -> Iterator[dict[str, Any]]:
    def one_step(function):
        def step(state, *data):
            loss, gradients = function(state, *data)
            return jax.tree.map(lambda p, g: p - 0.01 * g, state, gradients), loss

        return step

    # Building the functions runs code. Inside `with`, no code can run, because the GPUs are absent.
    dtypes = {case: DTYPES.get(case, "float32") for case in workloads}
    functions = {case: one_step(workload.function(None, dtypes[case])) for case, workload in workloads.items()}
    with gpus(HOPPER, COMPILED_FOR) as devices:
        for case, workload in workloads.items():
            arguments = data_parallel(workload, dtypes[case], EXAMPLES[case][0], mesh_of(devices))
            step = jax.jit(functions[case]).trace(*arguments).lower(lowering_platforms=("cuda",))
            for overlapping in (False, True):
                # Autotuning needs a GPU.
                options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
                program = step.compile(compiler_options=options | (OVERLAPPING if overlapping else {})).as_text()
                yield {"work": workload.title, "overlapping": overlapping} | communicated(program)


KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
COLLECTIVE = re.compile(rf"= (?P<result>.*?) (?P<kind>{KINDS})(?P<start>-start)?\(")
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1}


def communicated(program: str) -> dict[str, Any]:
    """Return a dict that counts the collectives, per kind, and jaxbp's kernels in the text of a compiled program.

    Each iteration of a loop counts. `bytes` is the size of the collectives' results. `kernels_meanwhile` counts
    kernels that run during a collective.

    Raises:
      ValueError: a collective or a kernel is in a branch, or in a loop with an unknown number of iterations.
    """
    kinds, size, kernels, meanwhile, running = {}, 0, 0, 0, 0
    for line, _, times in executed(program):
        found, is_kernel = COLLECTIVE.search(line), _is_kernel(line)
        if times is None and (found or is_kernel):
            raise ValueError(f"{line.strip()[:80]} runs an unknown number of times; wants loops of known lengths")
        if found:
            kinds[found["kind"]] = kinds.get(found["kind"], 0) + times
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", found["result"])
            if found["start"]:  # the arguments, followed by the results
                running, arrays = running + 1, arrays[: len(arrays) // 2]
            bytes_ = (SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape in arrays)
            size += times * sum(bytes_)
        running -= bool(re.search(r" [a-z-]+-done\(", line))
        if is_kernel:
            kernels += times
            meanwhile += times * (running > 0)
    return {"collectives": kinds, "bytes": size, "kernels": kernels, "kernels_meanwhile": meanwhile}


def _is_kernel(line):
    # A kernel may be inside a fusion that slices its operands.
    return "mosaic_gpu" in line or "dynamic_slice_fusion" in line.partition(" = ")[0]


def executed(program: str) -> Iterator[tuple[str, int, int | None]]:
    """Yield each instruction in the text of a compiled program, with the number of loops around it, and how often the
    program runs it, or None if the text does not say."""
    computations, entry, name = {}, None, None
    for line in program.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = header[2]
            entry, computations[name] = name if header[1] else entry, []
        elif name is not None:
            computations[name].append(line)

    def of_computation(name, depth, times):
        for line in computations[name]:
            yield line, depth, times
            if " while(" in line:
                length = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                iterations = None if times is None or length is None else times * int(length[1])
                yield from of_computation(re.search(r"body=%?([\w.-]+)", line)[1], depth + 1, iterations)
            elif " call(" in line:
                yield from of_computation(re.search(r"to_apply=%?([\w.-]+)", line)[1], depth, times)
            elif " conditional(" in line:
                branches = re.search(r"(?:branch|true|false)_computations?=.*", line)[0]
                for branch in re.findall(r"%([\w.-]+)", branches):
                    if branch in computations:
                        yield from of_computation(branch, depth, None)

    yield from of_computation(entry, 0, 1)


if __name__ == "__main__":
    sys.exit(exit_code(main))
