"""Runs the kernels of every op under NVIDIA's compute-sanitizer: a process for each op and tool, with a time limit.

    pip install nvidia-cuda-sanitizer-api                       # brings compute-sanitizer
    python -m experiments.sanitize --json sanitizer.json
    python -m experiments.sanitize relu conv2d --tools memcheck racecheck

A process computes the op's value and gradients with `implementation="pallas"` at its small case, in float32 and
bfloat16, so that a crash tells which op it was. Memory is allocated by CUDA's own allocator, else accesses beyond one
array would land in another, and programs are not made into CUDA graphs. Prints a line a process, and the findings.
Exits with 1 where a tool found something or a process failed. The JSON file is written after each; beside what all
result files have (`experiments/output/results.py`) it has `rows`: op, tool, outcome ("clean", "found", "failed" or
"timed out"), the count of findings, the exit code, seconds, and the last lines printed where it is not clean.
"""

import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.output.errors import UserError, exit_code
from experiments.output.files import write_atomically

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FINDINGS = re.compile(r"========= (?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
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
    """What to run, under which tools."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of ops, each by itself; by default all that have kernels of their own."""
    tools: tuple[Literal["memcheck", "racecheck", "initcheck", "synccheck"], ...] = TOOLS
    """Tools of compute-sanitizer."""
    limit: float = 300.0
    """Seconds for a process, which is ended then."""
    json: Path | None = None
    """File to keep the rows in."""
    child: bool = False
    """Run the kernels of the one op in this process: what compute-sanitizer is given to run."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if something was found, 2 for a mistake of the user."""
    args = sys.argv[1:] if args is None else list(args)
    config = tyro.cli(
        SanitizeConfig, args=args, prog="python -m experiments.sanitize", config=(tyro.conf.FlagCreatePairsOff,)
    )
    if config.child:
        return run_kernels(*config.ops)
    from experiments.output.results import provenance, to_json

    try:
        sanitizer, names = find_sanitizer(), _names(config.ops)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {**provenance(shlex.join(["python", "-m", "experiments.sanitize", *args])), "rows": []}
    for name in names:
        for tool in config.tools:
            row = sanitized(sanitizer, tool, name, config.limit)
            report["rows"].append(row)
            print(
                f"{name:40} {tool:10} {row['outcome']:10} {row['findings']:4} findings {row['seconds']:6.1f} s",
                flush=True,
            )
            if row["output"]:
                print(row["output"], flush=True)
            if config.json is not None:
                write_atomically(config.json, to_json(report))
    outcomes = [row["outcome"] for row in report["rows"]]
    print(", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)))
    return 0 if set(outcomes) == {"clean"} else 1


def find_sanitizer() -> str:
    """On PATH, or in NVIDIA's wheel."""
    if (path := shutil.which("compute-sanitizer")) is not None:
        return path
    nvidia = importlib.util.find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or () if nvidia else ():
        for path in Path(folder).glob("*/bin/compute-sanitizer"):
            return str(path)
    raise UserError("there is no compute-sanitizer: pip install nvidia-cuda-sanitizer-api")


def _names(names: Sequence[str]) -> list[str]:
    from jaxbp.catalogue import CATALOGUE

    known = [entry.name for entry in CATALOGUE]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"unknown op {', '.join(unknown)}: wanted some of {', '.join(known)}")
    return list(names) or known


def sanitized(sanitizer: str, tool: str, name: str, limit: float) -> dict[str, Any]:
    """One process under one tool, as a row."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", "--target-processes", "all"]
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
    found = [int(count) for count in FINDINGS.findall(text)]
    if code is None:
        outcome = "timed out"
    elif code == FOUND or any(found):
        outcome = "found"
    else:
        # Without its last line the op's own process has died, whatever code the sanitizer gives.
        outcome = "clean" if code == 0 and DONE in text else "failed"
    lines = [] if outcome == "clean" else text.splitlines()[-KEPT_LINES:]
    seconds = round(time.perf_counter() - start, 1)
    return dict(
        op=name, tool=tool, outcome=outcome, findings=sum(found), code=code, seconds=seconds, output="\n".join(lines)
    )


def run_kernels(name: str) -> int:
    """The op's value and gradients in each dtype, compiled, waited for."""
    import jax
    import jax.numpy as jnp

    from jaxbp.catalogue import CATALOGUE
    from jaxbp.verify.arguments import bind, take_apart

    (entry,) = (entry for entry in CATALOGUE if entry.name == name)
    for dtype in ("float32", "bfloat16"):
        # Drawn on the CPU: the generators are not what is looked into.
        with jax.default_device(jax.devices("cpu")[0]):
            drawn = entry.small.draw(0, dtype=jnp.dtype(dtype))
        arguments = take_apart(entry.function, jax.device_put(drawn, jax.devices()[0]))
        function = arguments.of_floats(bind(entry.function, "pallas", entry.small.options))

        @jax.jit
        def run(*values, function=function):
            results, vjp = jax.vjp(function, *values)
            return results, vjp([jnp.ones_like(y) for y in results])

        try:
            jax.block_until_ready(run(*arguments.floats))
            print(f"{name}, {dtype}: ran")
        except NotImplementedError as refused:
            print(f"{name}, {dtype}: {refused}")
    print(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
