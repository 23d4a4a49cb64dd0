"""Train experiments with several seeds, and write one row per run to a result file.

    python -m experiments.studies.seeds "lenet --precision float32" "lenet --precision mixed_float16" --json out.json

Each quoted string is one setting: arguments of `python -m experiments.train`, without `--seed`.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import train
from experiments.configs import LogicConfig, TrainingConfig
from experiments.configs.automaton_base import AutomatonConfig
from experiments.configs.automaton_experiments import LifeConfig
from experiments.configs.logic import GateConfig
from experiments.data.datasets import Dataset
from experiments.output.errors import UserError, exit_code
from experiments.studies import parser_of, write_rows
from experiments.training import devices
from experiments.training.compiled import c_compiler, compiled_classifier
from experiments.training.loop import prepare
from experiments.training.reports.automaton import life, trials
from experiments.training.reports.logic import relaxed_predictions, samples_per_second
from jaxbp import pack_bits
from jaxbp.training import loop

PROGRAM = "experiments.studies.seeds"
STACK = re.compile(r"^ *@ +0x.*\n?", re.MULTILINE)
"""A line of an abort's C++ stack trace."""
KEPT_CHARACTERS = 2000
Task = tuple[str, int]
"""A setting and a seed."""


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("settings", nargs="+", help="per setting one quoted string of arguments of experiments.train")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per setting: 0, 1, ...")
    parser.add_argument("--processes", type=int, default=1, help="number of concurrent runs")
    parser.add_argument("--limit", type=float, default=86_400, help="seconds after which a run is killed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds after which a run ends its training")
    parser.add_argument("--only", type=int, metavar="SEED", help="only train one setting, and print its row")
    given = parser.parse_args(args)
    if given.only is not None:
        print(json.dumps(trained((given.settings[0], given.only), given.seconds)))
        return 0
    if given.json is None:
        parser.error("the following arguments are required: --json")
    for name in ("seeds", "processes"):
        if (count := getattr(given, name)) < 1:
            parser.error(f"{name} is {count}; wants at least 1")
    tasks = [(settings, seed) for seed in range(given.seeds) for settings in given.settings]
    for task in tasks:
        config_of(task)  # refuses invalid settings before any training
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # set before JAX starts: the runs share the GPUs
    compiler = c_compiler() if any("logic-conv" in settings for settings in given.settings) else {}
    with ThreadPoolExecutor(given.processes) as pool:
        runs = [pool.submit(trained_in_a_process, task, given.limit, given.seconds) for task in tasks]
        rows = (run.result() for run in as_completed(runs))
        return write_rows("seeds", args, compiler, rows, given.json)


def trained_in_a_process(task: Task, limit: float, seconds: float = math.inf) -> dict[str, Any]:
    """Return the row of a run. A run that dies, or takes more than `limit` seconds, loses only its row, which then has
    the reason."""
    settings, seed = task
    row = {"settings": settings, "seed": seed}
    command = [sys.executable, "-m", PROGRAM, settings, "--only", str(seed), "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"no answer in {limit:g} s"}
    if done.returncode == 0:
        return row | json.loads(done.stdout.splitlines()[-1])
    death = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    return row | {"failed": f"{death}: {STACK.sub('', done.stderr)[-KEPT_CHARACTERS:]}"}


def config_of(task: Task) -> TrainingConfig:
    settings, seed = task
    try:
        arguments = shlex.split(settings)
    except ValueError as error:
        raise UserError(f"settings is {settings!r} ({error}); wants arguments of experiments.train") from error
    return train.parse([*arguments, "--seed", str(seed)]).experiment


def trained(task: Task, seconds: float = math.inf) -> dict[str, Any]:
    config, end = config_of(task), time.monotonic() + seconds
    config, dataset = dataclasses.replace(config, devices=devices.number_of(config)), config.load()
    prepared, epochs = prepare(config, dataset), []
    for metrics, state, _ in loop.run(prepared, prepared.state):
        epochs.append(metrics)
        params = state.params
        if config.is_last(metrics.epoch, metrics.test_accuracy) or time.monotonic() > end:
            break
    nnx.update(prepared.model, jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), params))
    return {
        "epochs": len(epochs),
        "updates": metrics.step,
        "test_loss": metrics.test_loss,
        "test_accuracy": metrics.test_accuracy,
        "skipped_steps": sum(epoch.skipped_steps for epoch in epochs),
        "seconds": sum(epoch.seconds + epoch.evaluation_seconds for epoch in epochs),
        "compile_seconds": prepared.compile_seconds,
    } | circuit_figures(config, prepared.model, dataset)


def circuit_figures(config: TrainingConfig, model: nnx.Module, dataset: Dataset) -> dict[str, Any]:
    if isinstance(config, AutomatonConfig):
        circuit = model.harden().seen(config.visible)
        shares, _ = (life if isinstance(config, LifeConfig) else trials)(config, circuit)
        return shares | {"gates": circuit.gates}
    if not isinstance(config, GateConfig):
        return {}
    circuit, bits = model.harden(), np.asarray(config.bits(jnp.asarray(dataset.test_images))) > 0
    relaxed = np.mean(relaxed_predictions(model, bits, config.batch_size) == dataset.test_labels)
    figures = {"relaxed": float(relaxed)}
    if isinstance(config, LogicConfig):
        netlist = circuit.netlist()
        return figures | {"gates": len(netlist), "simplified_gates": len(netlist.simplify())}
    figures |= {"placed_gates": circuit.placed_gates, "simplified_gates": len(circuit.netlist())}
    if compiler := shutil.which("cc"):
        with tempfile.TemporaryDirectory() as folder:
            classify = compiled_classifier(circuit, model.classes, compiler, Path(folder))
            classes = classify(pack_bits(bits.reshape(len(bits), -1)))[: len(bits)]
            figures["c_accuracy"] = float(np.mean(classes == dataset.test_labels))
            figures["c_samples_per_second"] = samples_per_second(classify, bits)
    return figures


if __name__ == "__main__":
    sys.exit(exit_code(main))
