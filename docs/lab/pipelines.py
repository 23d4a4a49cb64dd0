"""Three pipelines compared: `Ring` of pallas_kernels, and `emit_pipeline` of JAX with and without a fetching warpgroup.

    python docs/lab/pipelines.py --json docs/results/pipelines.json     # on a GPU: check, sweep, time
    python docs/lab/pipelines.py --lower                                # anywhere: lower all for CUDA

Each streams bfloat16 rows through shared memory, to copy them or to normalise them as LayerNorm does. Programs are
persistent and take every so many-th group of rows, and the arithmetic is the same function. What differs is the
interface: `Ring` computes in place, so that a stage holds a group once; JAX's pipelines have buffers for inputs and
others for outputs. `emit_pipeline_warp_specialized` has a second warpgroup that does nothing but fetch.

Every config of a small sweep is checked against float64 and timed; a row of the results is the fastest of them. The
copy's rate, of which the results state their share, is that of the fastest copy, XLA's or one of these. Each pipeline
runs in a process of its own, so that one that fails or hangs leaves the others' results.
"""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxbp
from jaxbp.verify.timing import compile_program, device_seconds
from pallas_kernels.core import device
from pallas_kernels.core.launch import launch
from pallas_kernels.core.layouts import load
from pallas_kernels.core.pipeline import Ring

SHAPES = ((65536, 1024), (262144, 256))
EPS = 1e-5
TOLERANCE = 1e-2
"""Largest relative norm of an error against float64, of results in bfloat16."""
GROUP_BYTES = 8 * 1024
"""Of a bulk copy, which makes a group of rows."""
PIECE = 128
"""Columns side by side in a bulk copy, whose boxes have at most 256."""
BLOCK_ROWS = 4
"""Rows computed at once, one a warp."""
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((4, 1, 128), (4,))), warp_dims=(-4,), lane_dims=(-2,), vector_dim=-1)
FETCHER_REGISTERS = 40
"""Of a lane of the warpgroup that only fetches."""
CHAINED = 4
"""Calls in one program, so that the device and not the host is timed."""
ROUND_SECONDS = 0.02
PROCESS_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a group, stages of the pipeline, programs at a time on a multiprocessor."""

    rows: int
    stages: int
    programs: int


# ------------------------------------------------------------------------------------- what is done to a group of rows


def copy_group(source: Any, target: Any) -> None:
    for row in range(0, source.shape[0], BLOCK_ROWS):
        rows = pl.ds(row, BLOCK_ROWS)
        target[rows] = load(source.at[rows], LAYOUT, optimized=False)


def normalise_group(source: Any, target: Any, scale: jax.Array, bias: jax.Array) -> None:
    def mean(a):
        sums = jnp.sum(jnp.sum(a, axis=1), axis=1) * (1 / math.prod(a.shape[1:]))
        return plgpu.layout_cast(lax.broadcast_in_dim(sums, a.shape, (0,)), LAYOUT)

    for row in range(0, source.shape[0], BLOCK_ROWS):
        rows = pl.ds(row, BLOCK_ROWS)
        x = load(source.at[rows], LAYOUT, optimized=False).astype(jnp.float32)
        x = x - mean(x)
        x = x * lax.rsqrt(mean(jnp.square(x)) + EPS)
        target[rows] = (x * scale + bias).astype(target.dtype)


def along_columns(ref: Any) -> jax.Array:
    """A value a column, in registers, for each row of a block."""
    a = load(ref, LAYOUT.reduce((0,)), optimized=False).astype(jnp.float32)
    return plgpu.layout_cast(lax.broadcast_in_dim(a, (BLOCK_ROWS, *a.shape), (1, 2)), LAYOUT)


TASKS = {"copy": copy_group, "layer_norm": normalise_group}


# -------------------------------------------------------------------------------------------------- the three pipelines


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's body by each pipeline, as a method. A body's references are x, the parameters, y, and its scratch."""

    task: str
    config: Config
    groups: int
    programs: int

    def ring(self, x_ref, *refs, program):
        *parameter_refs, y_ref, stages, loaded = refs
        parameters, last = [along_columns(ref) for ref in parameter_refs], self.config.stages - 1

        def rows_of(step):
            return pl.ds((program + step * self.programs) * self.config.rows, self.config.rows)

        def copy(step, stage, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[rows_of(step)], stages.at[stage], barrier)

        pipeline = Ring(self.config.stages, copy, loaded, self.steps(program))
        pipeline.prefetch(last)

        def turn(step, _):
            stage = stages.at[pipeline.stage(step)]
            pipeline.wait(step)
            if parameters:  # in place, a copy has nothing to compute
                TASKS[self.task](stage, stage, *parameters)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, y_ref.at[rows_of(step)])
            # The bulk copy of the step before has read the stage that is filled next.
            pipeline.fetch(step + last, prepare=lambda: plgpu.wait_smem_to_gmem(1, wait_read_only=True))

        lax.fori_loop(0, pipeline.steps, turn, None)
        plgpu.wait_smem_to_gmem(0)

    def emit_pipeline(self, x_ref, *refs, program):
        *parameter_refs, y_ref = refs
        parameters = [along_columns(ref) for ref in parameter_refs]

        def body(_, source, target):
            TASKS[self.task](source, target, *parameters)

        plgpu.emit_pipeline(body, **self.options(x_ref, program))(x_ref, y_ref)

    def emit_pipeline_warp_specialized(self, x_ref, *refs, program, warpgroup):
        *parameter_refs, y_ref = refs

        def body(_, source, target, parameters):
            TASKS[self.task](source, target, *parameters)
            return parameters

        plgpu.emit_pipeline_warp_specialized(
            body,
            **self.options(x_ref, program),
            memory_registers=FETCHER_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=1,
            # Only the computing warpgroup loads the parameters.
            compute_context=lambda pipeline: pipeline(tuple(along_columns(ref) for ref in parameter_refs)),
        )(x_ref, y_ref)

    def steps(self, program):
        return (self.groups - program + self.programs - 1) // self.programs

    def options(self, x_ref, program):
        """Of JAX's pipelines."""
        block = (self.config.rows, *x_ref.shape[1:])
        spec = plgpu.BlockSpec(block, lambda step: (program + step * self.programs, 0, 0))
        stages = dict(max_concurrent_steps=self.config.stages)
        return dict(grid=(self.steps(program),), in_specs=[spec], out_specs=[spec], **stages)


PIPELINES = ("ring", "emit_pipeline", "emit_pipeline_warp_specialized")
BUFFERS = {"ring": 1, "emit_pipeline": 2, "emit_pipeline_warp_specialized": 2}
"""Of a stage: one for input and output, or one for each."""


def sweep(pipeline: str, hidden: int) -> list[Config]:
    """Configs whose programs fit into a multiprocessor's shared memory side by side."""
    rows = max(BLOCK_ROWS, GROUP_BYTES // (hidden * 2))

    def fits(config):
        # Beside its stages a program needs 2 KiB for sums across warps, barriers, and 1 KiB for the driver.
        program = BUFFERS[pipeline] * config.stages * rows * hidden * 2 + 4 * 1024
        return config.programs * program <= device.target().shared_bytes + 1024

    configs = (Config(rows, *sizes) for sizes in itertools.product((2, 4, 8), (1, 2, 3)))
    return [config for config in configs if fits(config)]


def run(pipeline: str, task: str, config: Config, x: jax.Array, *parameters: jax.Array) -> jax.Array:
    """y of `(rows, hidden)` x; `parameters` are scale and bias, which a copy has none of."""
    shape, groups = x.shape, x.shape[0] // config.rows
    programs = min(groups, device.target().multiprocessors * config.programs)
    x, *parameters = (a.reshape(*a.shape[:-1], -1, PIECE) for a in (x, *parameters))
    scratch = []
    if pipeline == "ring":
        stages = plgpu.SMEM((config.stages, config.rows, *x.shape[1:]), x.dtype)
        scratch = [stages, plgpu.Barrier(num_barriers=config.stages)]
    y = launch(
        getattr(Kernel(task, config, groups, programs), pipeline),
        x,
        *parameters,
        out=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid={"program": programs},
        warpgroups=2 if pipeline == "emit_pipeline_warp_specialized" else None,
        scratch=scratch,
        name=f"{task}_{pipeline}",
    )
    return y.reshape(shape)


def parameters_of(task: str, hidden: int) -> tuple[tuple[int, ...], ...]:
    """Their shapes."""
    return ((hidden,), (hidden,)) if task == "layer_norm" else ()


# ------------------------------------------------------------------------------------------------- checking and timing


def chained(function):
    """Some calls one after another, none of which the compiler may join to the next."""

    def chain(x, *parameters):
        for _ in range(CHAINED):
            x = lax.optimization_barrier(function(x, *parameters))
        return x

    return chain


def microseconds(program, arguments) -> float:
    return device_seconds(program, arguments, ROUND_SECONDS)[0] / CHAINED * 1e6


@jax.jit
def relative_error(y: jax.Array, expected: jax.Array) -> jax.Array:
    error = jnp.linalg.norm(y.astype(jnp.float32) - expected) / jnp.linalg.norm(expected)
    return jnp.where(jnp.isnan(error), math.inf, error)


def draw(task: str, rows: int, hidden: int) -> tuple[list[jax.Array], jax.Array]:
    """The arguments, and the result, computed in float64."""
    random = np.random.default_rng(0)
    shapes = (rows, hidden), *parameters_of(task, hidden)
    arguments = [jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16) for shape in shapes]
    x, *parameters = (np.asarray(a).astype(np.float64) for a in arguments)
    if parameters:
        x -= x.mean(-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(-1, keepdims=True) + EPS)
        x = x * parameters[0] + parameters[1]
    return arguments, jnp.asarray(x, jnp.float32)


def fastest(pipeline: str, task: str, rows: int, hidden: int) -> dict[str, Any]:
    """Of a row of the results; `failed` says why there is no time."""
    arguments, expected = draw(task, rows, hidden)
    best, failures = {}, []

    def compiled(config):
        function = functools.partial(run, pipeline, task, config)
        return [compile_program(f, arguments)[0] for f in (function, chained(function))]

    with ThreadPoolExecutor() as pool:  # nothing is timed while something is compiled
        programs = {config: pool.submit(compiled, config) for config in sweep(pipeline, hidden)}
    for config, submitted in programs.items():
        try:
            once, often = submitted.result()
            error = float(relative_error(once(*arguments), expected))
            if error > TOLERANCE:
                raise ValueError(f"relative error {error:.1e}")
            found = dict(microseconds=microseconds(often, arguments), relative_error=error)
        except Exception as failure:
            failures.append(f"{config}: {type(failure).__name__}: {failure}"[:400])
            print("  failed:", failures[-1], file=sys.stderr, flush=True)
            continue
        print(
            f"  {pipeline} {task} {rows}x{hidden} {config}: {found['microseconds']:.1f} us", file=sys.stderr, flush=True
        )
        if not best or found["microseconds"] < best["microseconds"]:
            best = found | dataclasses.asdict(config) | {"group_rows": config.rows}
    best.pop("rows", None)
    best = best or {"failed": "none ran"}
    return best | {"configs": len(sweep(pipeline, hidden)), "failures": failures}


def rows_of(pipeline: str) -> dict[tuple[str, int, int], dict[str, Any]]:
    """(task, rows, hidden) -> the row of it, without its figures. XLA is asked for a copy alone."""
    works = [(task, *shape) for shape, task in itertools.product(SHAPES, TASKS if pipeline != "xla" else ("copy",))]
    return {
        (task, rows, hidden): dict(work=f"{task} {rows}x{hidden}", implementation=pipeline, rows=rows, hidden=hidden)
        for task, rows, hidden in works
    }


def measure(pipeline: str) -> None:
    """Prints a line of JSON for every task and shape, behind one for the machine."""
    found = device.gpu()
    versions = {"python": platform.python_version(), "jaxbp": jaxbp.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    machine = {"device": found.kind, "versions": versions}
    print(json.dumps(machine), flush=True)
    for (task, rows, hidden), row in rows_of(pipeline).items():
        if pipeline != "xla":
            row |= fastest(pipeline, task, rows, hidden)
        else:
            arguments, _ = draw(task, rows, hidden)
            row |= {"microseconds": microseconds(compile_program(chained(lambda x: -x), arguments)[0], arguments)}
        print(json.dumps(row), flush=True)


# ------------------------------------------------------------------------------------------------------------- commands


def lower() -> None:
    """Lowers every pipeline for CUDA, with its first and its last config."""
    for pipeline, task, (rows, hidden) in itertools.product(PIPELINES, TASKS, SHAPES):
        shapes = (rows, hidden), *parameters_of(task, hidden)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        configs = sweep(pipeline, hidden)
        for config in (configs[0], configs[-1]):
            function = jax.jit(functools.partial(run, pipeline, task, config))
            program = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
            if "mosaic_gpu" not in program:
                raise ValueError(f"{pipeline} {task}: no kernel in the program")
            print(f"{pipeline} {task} {rows}x{hidden} {config}: lowers")


def measured_apart(pipeline: str) -> list[dict[str, Any]]:
    """The lines of `measure` in a process of its own."""
    command = [sys.executable, __file__, "--pipeline", pipeline]
    try:
        finished = subprocess.run(command, stdout=subprocess.PIPE, timeout=PROCESS_SECONDS, check=False)
        output, ending = finished.stdout, f"ended with {finished.returncode}" if finished.returncode else None
    except subprocess.TimeoutExpired as stopped:
        output, ending = stopped.stdout or b"", f"ran past {PROCESS_SECONDS} s"
    lines = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    if ending:
        print(f"{pipeline}: {ending}", file=sys.stderr)
        printed = [line.get("work") for line in lines]
        lines += [row | {"failed": ending} for row in rows_of(pipeline).values() if row["work"] not in printed]
    return lines


def with_share_of_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `percent_of_copy`: the fastest copy's time of their shape over theirs."""
    copies = {}
    for row in rows:
        if row["work"].startswith("copy") and "microseconds" in row:
            shape = row["rows"], row["hidden"]
            copies[shape] = min(row["microseconds"], copies.get(shape, math.inf))

    def share(row):
        copy = copies.get((row["rows"], row["hidden"]))
        return {"percent_of_copy": 100 * copy / row["microseconds"]} if copy and "microseconds" in row else {}

    return [row | share(row) for row in rows]


def report(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        name = f"{row['work']:<23}{row['implementation']:<31}"
        if "microseconds" not in row:
            print(name, row["failed"])
            continue
        tile = f"stages {row['stages']}, programs {row['programs']}" if "stages" in row else ""
        terabytes = 2 * 2 * row["rows"] * row["hidden"] / row["microseconds"] / 1e6
        print(f"{name}{row['microseconds']:8.1f} us {terabytes:5.2f} TB/s {row['percent_of_copy']:4.0f}% {tile}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--commit", help="the commit that is measured; by default git is asked")
    parser.add_argument("--lower", action="store_true", help="only lower all for CUDA, on any machine")
    parser.add_argument("--pipeline", choices=("xla", *PIPELINES), help="measure one, and print JSON lines")
    arguments = parser.parse_args()
    if arguments.lower:
        return lower()
    if arguments.pipeline:
        return measure(arguments.pipeline)
    lines = [line for pipeline in ("xla", *PIPELINES) for line in measured_apart(pipeline)]
    machine = next((line for line in lines if "device" in line), {})
    works = [row["work"] for row in rows_of(PIPELINES[0]).values()]
    rows = sorted((line for line in lines if "work" in line), key=lambda row: works.index(row["work"]))
    rows = with_share_of_copy(rows)
    report(rows)
    if arguments.json:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        results = {
            "date": datetime.date.today().isoformat(),
            "commit": arguments.commit or git.stdout.strip() or None,
            "command": "python docs/lab/pipelines.py --json docs/results/pipelines.json",
            **machine,
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
