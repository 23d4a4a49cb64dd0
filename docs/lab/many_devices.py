"""What data-parallel training costs beside the work itself: measured on several GPUs, and read off compiled programs.

    python docs/lab/many_devices.py measure --json docs/results/many-devices.json     # on several GPUs of one host
    python docs/lab/many_devices.py compile --json docs/results/collectives.json      # anywhere, with CUDA's compiler

`measure` times training steps with the same examples a device: on one GPU without a mesh, on a mesh of one, and on a
mesh of all, with XLA's defaults and with `OVERLAPPING`.
`compile` compiles the same steps for eight H200 that need not be there, and lists what they communicate.
"""

import argparse
import concurrent.futures
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.bench.works import Work, lenet_work, logic_work, mixer_work
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json
from jaxbp.verify.timing import device_seconds
from pallas_kernels.core.device import HOPPER

TESTS = Path(__file__).parents[2] / "tests"
OVERLAPPING = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**17,
}
"""XLA's options for a sum a layer, each of which runs while the backward of the layer before it does."""
EXAMPLES = {"lenet": (8192, 65536), "logic": (128, 1024), "logic-large": (128, 1024), "mixer": (8192,)}
"""Work -> examples a device."""
SECONDS = 0.03


def works(names: tuple[str, ...]) -> Mapping[str, Work]:
    every = {
        "lenet": lenet_work(),
        "logic": logic_work("logic", 8000, ()),
        "logic-large": logic_work("logic-large", 64000, ()),
        "mixer": mixer_work(),
    }
    return {name: every[name] for name in names}


def data_parallel(work: Work, examples: int, mesh: Mesh) -> tuple[Any, ...]:
    """The shapes of the arguments of a step, with so many examples a device: parameters replicated, data sharded."""

    def on_mesh(tree, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    with jax.default_device(jax.devices("cpu")[0]):
        state, *data = jax.eval_shape(lambda: work.draw(0, examples * mesh.size, "float32"))
    return on_mesh(state), *(on_mesh(a, "examples") for a in data)


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("examples",), axis_types=(AxisType.Auto,))


# ------------------------------------------------------------------------------------------------------------- measured


def measured(works: Mapping[str, Work]) -> Iterator[dict[str, Any]]:
    devices = jax.devices()
    report = {"devices": len(devices), "rows": []}
    for row in steps(works, devices):
        report["rows"].append(row)
        yield report


def steps(works: Mapping[str, Work], devices: Sequence[jax.Device]) -> Iterator[dict[str, Any]]:
    """The microseconds of each step, by where it runs. All are compiled first, side by side."""
    one, every = mesh_of(devices[:1]), mesh_of(devices)
    places = {
        "alone": (None, {}),
        "mesh_of_one": (one, {}),
        "mesh": (every, {}),
        "mesh_overlapping": (every, OVERLAPPING),
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {
            (work, examples): {
                place: pool.submit(program(work, examples, *where).compile) for place, where in places.items()
            }
            for work in works.values()
            for examples in EXAMPLES[work.op]
        }
        for (work, examples), compiled in programs.items():
            row = {"work": work.title, "examples": examples}
            for place, (mesh, _) in places.items():
                arguments = work.draw(0, examples * (mesh.size if mesh else 1), "float32")
                if mesh is not None:
                    shardings = jax.tree.map(lambda a: a.sharding, data_parallel(work, examples, mesh))
                    arguments = jax.device_put(arguments, shardings)
                seconds = device_seconds(compiled[place].result(), ((arguments,),), SECONDS).seconds
                row[place] = seconds / work.steps * 1e6
            print(row, file=sys.stderr, flush=True)
            yield row


def program(work: Work, examples: int, mesh: Mesh | None, options: Mapping[str, Any]) -> jax.stages.Lowered:
    """Ten steps, with so many examples a device."""
    function = jax.jit(work.chain(work.function(None, "float32"), work.steps), compiler_options=dict(options))
    if mesh is None:
        return function.lower((jax.eval_shape(lambda: work.draw(0, examples, "float32")),))
    return function.lower((data_parallel(work, examples, mesh),))


# ------------------------------------------------------------------------------------------------------------- compiled


def compiled(works: Mapping[str, Work]) -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(TESTS))
    from ahead_of_time import gpus

    # Where a GPU that is not there is the default, nothing can be computed.
    steps = {name: one_step(work.function(None, "float32")) for name, work in works.items()}
    rows = []
    with gpus(HOPPER, 8) as devices:
        for name, work in works.items():
            arguments = data_parallel(work, EXAMPLES[name][0], mesh_of(devices))
            lowered = jax.jit(steps[name]).trace(*arguments).lower(lowering_platforms=("cuda",))
            for overlapping in (False, True):
                # What needs a GPU is left out: to look for the fastest of several kernels.
                options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
                program = lowered.compile(compiler_options=options | (OVERLAPPING if overlapping else {})).as_text()
                rows.append({"work": work.title, "overlapping": overlapping} | communicated(program))
    yield {"devices": 8, "rows": rows}


def one_step(function: Callable) -> Callable:
    def step(state, *data):
        loss, gradients = function(state, *data)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, gradients), loss

    return step


COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>(?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?)\("
)
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1}


def communicated(program: str) -> dict[str, Any]:
    """The collectives of a compiled program: how many, their bytes, and how many kernels run during one.

    Returns:
      collectives: kind -> how many; bytes: of their arrays; kernels: of ours; kernels_meanwhile: of these, how many
      stand between the start of a collective and its end.
    """
    kinds, size, kernels, meanwhile, running = {}, 0, 0, 0, 0
    for line in program[program.index("\nENTRY") :].splitlines():
        if found := COLLECTIVE.search(line):
            kind = found["kind"].removesuffix("-start")
            kinds[kind] = kinds.get(kind, 0) + 1
            running += found["kind"].endswith("-start")
            # An asynchronous one names its arguments and its results.
            arrays = re.findall(r"(\w+)\[([\d,]*)\]", found["result"])
            arrays = arrays[: len(arrays) // 2] if found["kind"].endswith("-start") else arrays
            size += sum(SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n) for dtype, shape in arrays)
        running -= bool(re.search(r" [a-z-]+-done\(", line))
        if is_kernel(line):
            kernels += 1
            meanwhile += running > 0
    return {"collectives": kinds, "bytes": size, "kernels": kernels, "kernels_meanwhile": meanwhile}


def is_kernel(line: str) -> bool:
    """Whether a line of a compiled program is one of our kernels, by itself or within a fusion that slices for it."""
    return "mosaic_gpu" in line or "dynamic_slice_fusion" in line.partition(" = ")[0]


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["measure", "compile"])
    parser.add_argument("--works", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(args)
    if given.what == "compile":
        jax.config.update("jax_platforms", "cpu")  # a GPU that is here would be taken for those that are not
    head = provenance(shlex.join(["python", "docs/lab/many_devices.py", *args]))
    for report in {"measure": measured, "compile": compiled}[given.what](works(tuple(given.works))):
        if given.json:
            write_atomically(given.json, to_json(head | report))
    print(*report["rows"], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
