"""Measure how fast the C code of logic runs' circuits classifies, for vector registers of 128, 256, and 512 bits."""

import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tyro

from experiments.configs import LogicConfig, LogicConvConfig, effective
from experiments.output.errors import UserError, run_command
from experiments.output.files import OptionalPath, refuse_unwritable
from experiments.output.results import keep, provenance
from experiments.training.compiled import c_compiler, compiled_classifier
from experiments.training.run_directory import load, read_metrics
from jaxbp.logic.circuits.bits import WORD_BITS

MACHINES = {128: "x86-64", 256: "x86-64-v3", 512: "x86-64-v4"}
"""The value of the compiler's option -march for each size of vector registers, in bits."""
WORDS, ROUNDS = 4096, 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorRegistersConfig:
    """Measures how many samples per second the C code of a logic run's circuit classifies on one core."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of the runs."""
    json: OptionalPath = None
    """JSON file for the results."""


def main(args: Sequence[str] | None = None) -> int:
    module = "experiments.studies.vector_registers"
    return run_command(_main, VectorRegistersConfig, module, args, description=VectorRegistersConfig.__doc__)


def _main(config: VectorRegistersConfig, command: str) -> int:
    refuse_unwritable(config.json)
    if not config.run_dirs:
        raise UserError("run_dirs is empty; wants the directory of a run")
    if (compiler := shutil.which("gcc")) is None:
        raise UserError("gcc is not on PATH; wants gcc 12 or newer for x86-64")
    runs = [(run_dir, *load(run_dir)) for run_dir in config.run_dirs]
    for run_dir, trained, _ in runs:
        if not isinstance(trained, LogicConfig | LogicConvConfig):
            raise UserError(f"{run_dir} is a run of {trained.name}; wants a run of logic or logic-conv")
    rows = []
    for run_dir, trained, model in runs:
        netlist = model.harden().netlist().simplify()
        x = np.random.default_rng(0).integers(0, 2**32, (netlist.inputs, WORDS), np.uint32)
        run = {
            "settings": effective(trained),
            "test_accuracy": read_metrics(run_dir)[-1].test_accuracy,
            "gate_count": len(netlist),
        }
        print(f"{run_dir}: {len(netlist):,} gates when simplified", flush=True)
        for bits, machine in MACHINES.items():
            flags = (f"-march={machine}", f"-mprefer-vector-width={bits}")
            with tempfile.TemporaryDirectory() as folder:
                classify = compiled_classifier(netlist, trained.classes, compiler, Path(folder), flags)
                measured = {"vector_bits": bits, "flags": " ".join(flags), "samples_per_second": speed(classify, x)}
            print(f"{bits} bits: {measured['samples_per_second']:,.0f} samples/s", flush=True)
            rows.append(run | measured)
    if config.json is not None:
        keep(provenance(command) | c_compiler() | {"samples": WORD_BITS * WORDS, "rows": rows}, config.json)
    return 0


def speed(classify: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> float:
    """Return the samples per second of processor time, the median over rounds, so that other processes matter less."""
    times = []
    for _ in range(1 + ROUNDS):  # The first round is a warm-up.
        start = time.process_time()
        classify(x)
        times.append(time.process_time() - start)
    return WORD_BITS * x.shape[1] / float(np.median(times[1:]))


if __name__ == "__main__":
    sys.exit(main())
