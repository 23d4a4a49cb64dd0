"""Runs the kernels of every op under NVIDIA's compute-sanitizer: a process for each op and tool, with a time limit.

    pip install nvidia-cuda-sanitizer-api                       # brings compute-sanitizer, newer than most toolkits
    python -m experiments.sanitize --json sanitizer.json
    python -m experiments.sanitize relu conv2d --tools memcheck racecheck

    python -m experiments.sanitize --processes 8 --limit 60 --attempts 3

A process computes the op's value and gradients with `implementation="pallas"` at its small case, in float32 and
bfloat16, so that a crash tells which op it was. Memory is allocated by CUDA's own allocator, else accesses beyond one
array would land in another, and programs are not made into CUDA graphs. Prints a line a process, and the findings.
What is known to be harmless, or not this project's, is in `EXPLAINED` with its reason. Exits with 1 where a tool found
something else, where a process failed, or took longer than its limit. The JSON file is written after each; beside what
all result files have (`experiments/output/results.py`) it has

    explained      name -> reason
    rows           an object an op and tool, of its last process: op, tool, outcome, code (the exit code), seconds,
                   attempts (how many processes there were), findings, and output, the last lines printed where that is
                   of use

A finding has its message, its kernel, its count, and the name of what explains it or null. The outcome is

    clean              the tool found nothing
    explained          it found nothing that is not explained
    found              it found something else
    crashed at exit    as clean or explained: all kernels ran and the tool gave its summary, then the process died
    failed             a kernel did not run, or there is no summary
    timed out          nothing was found until then

The last two say nothing of the kernels. Under the tools processes die at their end, or hang in XLA's compiler, now and
then, and do not when they are run again: `--attempts` says how often. Initcheck does not know of bulk copies of tensors
to device memory, up to version 2026.4 at least, and finds fault with whoever reads what they wrote.
"""

import collections
import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.output.errors import UserError, kept_in, refuse_unknown, run_command


@dataclasses.dataclass(frozen=True)
class Explained:
    """Findings that are none of this project's mistakes. Each pattern is looked for at the start of what it names."""

    name: str
    reason: str
    tool: str
    op: str = ""
    kernel: str = ""
    text: str = ""
    """Of the finding, its lines joined by spaces."""


EXPLAINED = (
    Explained(
        "equal writes of a warp",
        "the lanes of a warp write the same sum to the same place, by one instruction of a reduction of Mosaic GPU",
        tool="racecheck",
        kernel="layer_norm|rms_norm",
        text=r".* between Write access at (\S+\+0x[0-9a-f]+) in \S+ and Write access at \1 ",
    ),
    Explained(
        "products of the library",
        "a kernel of cuBLAS or CUTLASS, which come with XLA and compute the op's products of matrices",
        tool="initcheck",
        op="linear$|matmul$|layer_norm_linear$|mlp_",
        kernel="nvjet|cublas|(void )?cutlass|.*gemm",
    ),
    Explained(
        "bulk copies of tensors",
        "it reads what a kernel before it wrote by cp.async.bulk.tensor, ours or one of cuBLAS, which initcheck does "
        "not know of: the tool says of an array that a kernel copies so that nothing had written it",
        tool="initcheck",
        op="linear|matmul|layer_norm_linear|mlp_",
        kernel="mlp_softmax_cross_entropy_weighed_gradients|wrapped_|.*fusion",
    ),
)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) \w+(?! were)\b", re.MULTILINE)
UNPRINTED = re.compile(r"^=+ \w+ SUMMARY: (\d+) \w+ were not printed", re.MULTILINE)
BLOCK = re.compile(r"^=+ (?!COMPUTE-SANITIZER|\w+ SUMMARY|Target|Error: process)(\S.*(?:\n=+  +\S.*)*)", re.MULTILINE)
"""A finding: a line, and those that belong to it, which are indented."""
KERNEL = re.compile(r"\bat (?:0x[0-9a-f]+ in ([^(\n]+)|(\S.*?)\+0x)")
PRINTED = 100_000
"""Findings of a process that the tool prints."""
FOUND = 99
"""The exit code of compute-sanitizer where it found something."""
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
DONE = "all kernels ran"
KEPT_LINES = 40


@dataclasses.dataclass(frozen=True)
class SanitizeConfig:
    """Run the ops' kernels under the tools of NVIDIA's compute-sanitizer."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of ops, each by itself; by default all that have kernels of their own."""
    tools: tuple[Literal["memcheck", "racecheck", "initcheck", "synccheck"], ...] = TOOLS
    """Tools of compute-sanitizer."""
    limit: float = 300.0
    """Seconds for a process, which is ended then."""
    attempts: int = 2
    """Processes for an op and tool at most: another one where one fails, or is ended."""
    processes: int = 1
    """So many at a time."""
    json: Path | None = None
    """File to keep the rows in."""
    child: bool = False
    """Run the kernels of the one op in this process: what compute-sanitizer is given to run."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 1 for what nothing explains, else that of `errors.py`."""
    return run_command(run, SanitizeConfig, "experiments.sanitize", args)


def run(config: SanitizeConfig, command: str) -> int:
    """Run every op under every tool, and print and keep what is found."""
    if config.child:
        return run_kernels(*config.ops)
    from experiments.output.results import keep, provenance
    from jaxbp.catalogue import CATALOGUE

    for option in ("processes", "attempts"):
        if (number := getattr(config, option)) < 1:
            raise UserError(f"--{option} is {number}: wanted at least 1")
    sanitizer, names = find_sanitizer(), refuse_unknown("op", config.ops, (entry.name for entry in CATALOGUE))
    report: dict[str, Any] = {
        **provenance(command),
        "explained": {explained.name: explained.reason for explained in EXPLAINED},
        "rows": [],
    }
    report["versions"] |= {"compute-sanitizer": version_of(sanitizer)}
    with kept_in(config.json), ThreadPoolExecutor(config.processes) as pool:
        tasks = [(name, tool) for name in names for tool in config.tools]
        for row in pool.map(lambda task: attempted(sanitizer, task[1], task[0], config.limit, config.attempts), tasks):
            report["rows"].append(row)
            print(f"{row['op']:40} {row['tool']:10} {row['outcome']:15} {row['seconds']:6.1f} s", flush=True)
            for finding in row["findings"]:
                why = "unexplained" if finding["explained"] is None else f"explained: {finding['explained']}"
                print(f"    {finding['count']} x {finding['message']}, {finding['kernel']}: {why}", flush=True)
            if row["output"]:
                print(row["output"], flush=True)
            keep(report, config.json)
    outcomes = [row["outcome"] for row in report["rows"]]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)))
    return 0 if {"clean", "explained", "crashed at exit"}.issuperset(outcomes) else 1


def find_sanitizer() -> str:
    """In NVIDIA's wheel, or on PATH, where a toolkit's may be older."""
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        for path in Path(folder).glob("*/bin/compute-sanitizer"):
            return str(path)
    if (path := shutil.which("compute-sanitizer")) is not None:
        return path
    raise UserError("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")


def version_of(sanitizer: str) -> str | None:
    printed = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    return match[1] if (match := re.search(r"Version (\S+)", printed)) else None


def attempted(sanitizer: str, tool: str, name: str, limit: float, attempts: int) -> dict[str, Any]:
    """The row of the first process that says something of the kernels, else of the last."""
    for attempt in range(1, attempts + 1):
        row = sanitized(sanitizer, tool, name, limit) | {"attempts": attempt}
        if row["outcome"] not in ("failed", "timed out"):
            break
    return row


def sanitized(sanitizer: str, tool: str, name: str, limit: float) -> dict[str, Any]:
    """One process under one tool, as a row."""
    options = [
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND),
        "--print-limit",
        str(PRINTED),
        "--show-backtrace",
        "device",  # the host's is some fifty lines a finding
        "--target-processes",
        "application-only",  # and not the compilers that it runs
    ]
    command = [sanitizer, *options, sys.executable, "-m", "experiments.sanitize", name, "--child"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
    environment = os.environ | ENVIRONMENT | {"XLA_FLAGS": flags}
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        printed, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the process that the sanitizer started
        printed, code = process.communicate()[0], None
    text = printed.decode(errors="replace")
    findings = findings_in(text, tool, name)
    outcome = outcome_of(text, code, findings)
    return dict(
        op=name,
        tool=tool,
        outcome=outcome,
        code=code,
        seconds=round(time.perf_counter() - start, 1),
        findings=findings,
        output="" if outcome in ("clean", "explained") else "\n".join(text.splitlines()[-KEPT_LINES:]),
    )


def findings_in(text: str, tool: str, op: str) -> list[dict[str, Any]]:
    """What a tool has printed of an op, equal findings together."""
    counts: collections.Counter = collections.Counter()
    for block in BLOCK.findall(text):
        lines = [line.lstrip("= ") for line in block.splitlines()]
        message, flat = lines[0].partition(" at ")[0], " ".join(lines)
        kernel = match[1] or match[2] if (match := KERNEL.search("\n".join(lines))) else None
        explained = next(
            (
                each.name
                for each in EXPLAINED
                if each.tool == tool
                and re.match(each.op, op)
                and re.match(each.kernel, kernel or "")
                and re.match(each.text, flat)
            ),
            None,
        )
        counts[message, kernel, explained] += 1
    if unprinted := sum(map(int, UNPRINTED.findall(text))):
        counts["not printed", None, None] = unprinted
    return [
        dict(message=message, kernel=kernel, count=count, explained=explained)
        for (message, kernel, explained), count in counts.items()
    ]


def outcome_of(text: str, code: int | None, findings: Sequence[dict[str, Any]]) -> str:
    """In a word, from what was printed, the exit code (None: the limit was reached), and the findings."""
    summaries = [int(count) for count in SUMMARY.findall(text)]
    if any(finding["explained"] is None for finding in findings) or (any(summaries) and not findings):
        return "found"
    if code is None:
        return "timed out"
    if DONE not in text or not summaries:
        return "failed"
    if code not in (0, FOUND):
        return "crashed at exit"
    return "explained" if findings else "clean"


def run_kernels(name: str) -> int:
    """The op's value and gradients in each dtype, compiled, waited for."""
    import jax
    import jax.numpy as jnp

    from jaxbp.catalogue import CATALOGUE
    from jaxbp.verify.arguments import bind, take_apart
    from jaxbp.verify.derivatives import value_and_gradients

    (entry,) = (entry for entry in CATALOGUE if entry.name == name)
    for dtype in ("float32", "bfloat16"):
        # Drawn on the CPU: the generators are not what is looked into.
        with jax.default_device(jax.devices("cpu")[0]):
            drawn = entry.small.draw(0, dtype=jnp.dtype(dtype))
        arguments = take_apart(entry.function, jax.device_put(drawn, jax.devices()[0]))
        function, values = arguments.of_floats(bind(entry.function, "pallas", entry.small.options)), arguments.floats
        try:
            cotangents = [jnp.ones(y.shape, y.dtype) for y in jax.eval_shape(function, *values)]
            jax.block_until_ready(jax.jit(value_and_gradients(function))(values, cotangents))
            print(f"{name}, {dtype}: ran")
        except NotImplementedError as refused:
            print(f"{name}, {dtype}: {refused}")
    print(DONE, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
