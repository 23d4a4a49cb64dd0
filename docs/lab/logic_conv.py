"""How accurate do convolutional logic networks become? Sizes and settings, over several seeds.

    python docs/lab/logic_conv.py --data-dir data --json docs/results/logic-conv-mnist.json
    python docs/lab/logic_conv.py --sizes l --seconds 60 --settings '{"shift": 1}' '{"shift": 2}' --json shifts.json
    python docs/lab/logic_conv.py --sizes m --seeds 1 --images 2048 --seconds 300 --json one-core.json

Runs have the epochs of their config; with --seconds an epoch of each size and settings is timed, and the runs have as
many as fit, the learning rate's schedule with them. All is one process: one run trains at a time, while later ones are
compiled and earlier ones are hardened, written as C and timed. The rows are written whenever there is a new figure.

The last of the commands is for a machine without a GPU, and for the speed of the C code alone: it trains briefly, on a
few images.
"""

import argparse
import dataclasses
import itertools
import json
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.configs import LogicConvConfig
from experiments.configs.logic_conv import SizeName
from experiments.data.datasets import Dataset
from experiments.output.files import write_atomically
from experiments.output.results import provenance, to_json
from experiments.training import loop
from experiments.training.compiled import FLAGS, compiled_classifier
from experiments.training.logic import hardened_predictions, relaxed_predictions, samples_per_second
from jaxbp import pack_bits
from jaxbp.nn import LogicConvNetwork

Variant = tuple[dict[str, Any], LogicConvConfig]
"""Settings as they were given, and the config that has them."""


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--sizes", nargs="+", default=get_args(SizeName), choices=get_args(SizeName))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs="+", help="of training, one for all sizes or one each")
    parser.add_argument("--settings", type=json.loads, nargs="+", default=[{}], help="of the config, as JSON objects")
    parser.add_argument("--c-seeds", type=int, default=1, help="how many seeds' circuits are compiled as C and timed")
    parser.add_argument("--threads", type=int, default=4, help="that compile and report beside the training")
    parser.add_argument("--images", type=int, help="train on the first so many alone; by default on all")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args(args)
    seconds = given.seconds or []
    if len(seconds) not in (0, 1, len(given.sizes)):
        parser.error(f"--seconds are {len(seconds)}; wants 1 or {len(given.sizes)}, one each size")
    seconds = dict(zip(given.sizes, itertools.cycle(seconds), strict=False))
    variants = [
        (settings, LogicConvConfig(dataset=given.dataset, data_dir=given.data_dir, size=size, **settings))
        for settings, size in itertools.product(given.settings, given.sizes)
    ]
    dataset = variants[0][1].load()
    images, labels = dataset.train_images[: given.images], dataset.train_labels[: given.images]
    dataset = dataset._replace(train_images=images, train_labels=labels)
    compiler = shutil.which("cc")
    report = provenance(shlex.join(["python", "docs/lab/logic_conv.py", *args]))
    report |= {"dataset": given.dataset, "training_images": len(images)}
    if compiler and given.c_seeds:
        report |= {"processor": processor(), "compiler": compiler_version(compiler)}
    with ThreadPoolExecutor(given.threads) as compiling, ThreadPoolExecutor(given.threads) as reporting:
        if seconds:
            variants = list(that_fit(seconds, variants, dataset, compiling))
        runs = [(s, dataclasses.replace(c, seed=seed)) for seed in range(given.seeds) for s, c in variants]
        rows, reports = report.setdefault("rows", []), []

        def write() -> None:
            write_atomically(given.json, to_json(report))

        for (settings, config), future in zip(runs, ahead(compiling, [c for _, c in runs], dataset), strict=True):
            row, model = trained(config, future.result())
            rows.append({"size": config.size, "seed": config.seed, "settings": settings} | row)
            print(rows[-1], flush=True)
            write()
            reports.append(
                reporting.submit(reported, config, model, dataset, compiler if config.seed < given.c_seeds else None)
            )
        for row, done in zip(rows, reports, strict=True):
            row |= done.result()
            print(row, flush=True)
            write()
    for line in means(rows):
        print(line)
    return 0


def that_fit(
    seconds: Mapping[str, float], variants: Sequence[Variant], dataset: Dataset, pool: ThreadPoolExecutor
) -> Iterator[Variant]:
    """The variants with as many epochs as fit into the seconds of their size."""
    single = [dataclasses.replace(config, epochs=1) for _, config in variants]
    for (settings, config), one_epoch in zip(variants, ahead(pool, single, dataset), strict=True):
        epochs = max(1, int(seconds[config.size] / seconds_of_an_epoch(one_epoch.result())))
        print(f"{config.size} {settings}: {epochs} epochs in {seconds[config.size]:g} s", flush=True)
        yield settings, dataclasses.replace(config, epochs=epochs)


def ahead(
    pool: ThreadPoolExecutor, configs: Sequence[LogicConvConfig], dataset: Dataset
) -> Iterator[Future[loop.Training]]:
    """The configs' training, prepared in the pool; of those that are done, none is kept here."""
    waiting = [pool.submit(loop.prepare, config, dataset) for config in configs]
    while waiting:
        yield waiting.pop(0)


def seconds_of_an_epoch(training: loop.Training) -> float:
    """With its evaluation; the first is not counted."""
    state = training.state
    for epoch in (1, 2):
        started = time.perf_counter()
        state, losses, *_ = training.train_epoch(state, epoch)
        jax.block_until_ready((losses, training.evaluate(state.params)))
        seconds = time.perf_counter() - started
    return seconds


def trained(config: LogicConvConfig, training: loop.Training) -> tuple[dict[str, Any], LogicConvNetwork]:
    """A run's row, and its model. The hardened accuracy is that after the last epoch."""
    started, epochs = time.perf_counter(), []
    for metrics, state, _ in loop.run(training, training.state):
        epochs.append(metrics)
        nnx.update(training.model, state.params)
    seconds = sum(metrics.seconds for metrics in epochs)
    steps = training.steps_per_epoch * training.epochs
    return {
        "kernels": config.kernels,
        "tau": config.tau,
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "epochs": training.epochs,
        "train_accuracy": epochs[-1].train_accuracy,
        "hardened": epochs[-1].test_accuracy,
        "best_of_any_epoch": max(metrics.test_accuracy for metrics in epochs),
        "seconds": time.perf_counter() - started,
        "train_seconds": seconds,
        "step_microseconds": 1e6 * seconds / steps,
        "compile_seconds": training.compile_seconds,
    }, training.model


def reported(config: LogicConvConfig, model: LogicConvNetwork, dataset: Dataset, compiler: str | None):
    """What is known of a model without its training."""
    circuit = model.harden()
    bits = np.asarray(config.bits(jnp.asarray(dataset.test_images))) > 0
    row = {
        "gates": circuit.gates,
        "placed_gates": circuit.placed_gates,
        "simplified_gates": len(circuit.netlist()),
        "relaxed": float(np.mean(relaxed_predictions(model, bits, config.batch_size) == dataset.test_labels)),
        "circuit": float(np.mean(hardened_predictions(circuit, bits, model.classes) == dataset.test_labels)),
    }
    if compiler:
        with tempfile.TemporaryDirectory() as folder:
            classify = compiled_classifier(circuit, model.classes, compiler, Path(folder))
            of_samples = classify(pack_bits(bits.reshape(len(bits), -1)))[: len(bits)]
            row["c_accuracy"] = float(np.mean(of_samples == dataset.test_labels))
            row["c_samples_per_second"] = samples_per_second(classify, bits)
    return row


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def compiler_version(compiler: str) -> str:
    """As the compiler names itself, with the options that count here."""
    named = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return f"{named}, {' '.join(flag for flag in FLAGS if flag.startswith('-O'))}"


def means(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """A line for each size and settings."""
    for name in dict.fromkeys(f"{row['size']} {row['settings']}" for row in rows):
        of = [row for row in rows if f"{row['size']} {row['settings']}" == name]
        hard, soft = ([row[kind] for row in of] for kind in ("hardened", "relaxed"))
        yield (
            f"{name}: hardened {np.mean(hard):.4f} ± {np.std(hard):.4f}, relaxed {np.mean(soft):.4f}, "
            f"{of[0]['placed_gates']:,} gates, {np.mean([row['seconds'] for row in of]):.0f} s, {len(of)} seeds"
        )


if __name__ == "__main__":
    sys.exit(main())
