import ctypes
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.output.errors import warn_of_failure
from jaxbp import CellularCircuit, Circuit, ConvolutionalCircuit, Netlist
from jaxbp.logic.circuits.bits import WORD_BITS, pack_grid, unpack_grid
from jaxbp.training.loop import LEAST_SECONDS

FLAGS = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-O3", "-shared", "-fPIC")
TIMED_SECONDS, MOST_TICKS = 1.0, 2**20
AnyCircuit = Circuit | ConvolutionalCircuit | Netlist


def compiled(circuit: AnyCircuit, compiler: str, folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    function = load(circuit.to_c("circuit"), compiler, folder).circuit
    return lambda x: _called(function, x, np.empty((circuit.outputs, x.shape[1]), np.uint32))


def compiled_classifier(
    circuit: AnyCircuit, classes: int, compiler: str, folder: Path, flags: Sequence[str] = ()
) -> Callable[[np.ndarray], np.ndarray]:
    """Return compiled C code that maps samples, packed 32 per word as `(inputs, words)`, to classes."""
    function = load(circuit.to_c("circuit", classes), compiler, folder, flags).circuit_classify_words
    return lambda x: _called(function, x, np.empty(WORD_BITS * x.shape[1], np.intc))


def _called(function: Callable, x: np.ndarray, result: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x, np.uint32)
    function(ctypes.c_size_t(x.shape[1]), *(ctypes.c_void_p(a.ctypes.data) for a in (x, result)))
    return result


def compiled_automaton(
    automaton: CellularCircuit, compiler: str, folder: Path
) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return compiled C code that maps a grid `(h, w, c)` and a number of ticks to a grid."""
    library = load(automaton.to_c("automaton"), compiler, folder)
    library.automaton_memory.restype = ctypes.c_size_t

    def run(state, ticks):
        words = np.ascontiguousarray(pack_grid(state[None])[:, 0])
        size = [ctypes.c_size_t(n) for n in state.shape[:2]]
        memory = np.empty(library.automaton_memory(*size), np.uint64)
        library.automaton(*size, ctypes.c_size_t(ticks), *(ctypes.c_void_p(a.ctypes.data) for a in (words, memory)))
        return unpack_grid(words[:, None], state.shape[1])[0]

    return run


def measured(measure: Callable[[str, Path], float]) -> float | None:
    """Return `measure(compiler, folder)`. Return None without a C compiler, or with a warning if it fails."""
    if (compiler := shutil.which("cc")) is None:
        return None
    try:
        with tempfile.TemporaryDirectory() as folder:
            return measure(compiler, Path(folder))
    except (OSError, MemoryError, subprocess.SubprocessError) as error:
        warn_of_failure("the speed of the compiled C code", error)
        return None


def c_compiler() -> dict[str, str]:
    cpus, compiler = Path("/proc/cpuinfo"), shutil.which("cc")
    found = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    named = {"processor": found[1]} if found else {}
    if compiler:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        named["compiler"] = f"{version.splitlines()[0]}, {next(flag for flag in FLAGS if flag.startswith('-O'))}"
    return named


def ticks_per_second(run: Callable[[np.ndarray, int], np.ndarray], state: np.ndarray) -> float:
    ticks = 1
    while True:
        start = time.perf_counter()
        run(state, ticks)
        seconds = max(time.perf_counter() - start, LEAST_SECONDS)
        if seconds >= TIMED_SECONDS or ticks >= MOST_TICKS:
            return ticks / seconds
        ticks *= 2


def load(source: str, compiler: str, folder: Path, flags: Sequence[str] = ()) -> ctypes.CDLL:
    file, library = folder / "source.c", folder / "library.so"
    file.write_text(source)
    done = subprocess.run([compiler, *FLAGS, *flags, str(file), "-o", str(library)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{compiler} ended with {done.returncode}: {done.stderr or done.stdout}")
    return ctypes.CDLL(str(library))
