"""Find the largest batch and the longest rows of tokens with which a training step of the bench's language model fits.

    python -m experiments.studies.gpt_memory --ahead-of-time --json docs/results/gpt-memory.json

JAX's steps do not run: XLA states the memory of each compiled step. With --ahead-of-time, the GPU is an H200 that may
be absent. JAX then only needs its plugin for CUDA, and the environment variables JAX_PLATFORMS=cpu and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1. PyTorch runs two steps of each size on the GPU.
"""

import contextlib
import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from experiments.ahead_of_time import gpus
from experiments.bench.gpt_workload import FLAX, GPT_WORKLOADS, SIZES, gpt_workload
from experiments.bench.peers import Task
from experiments.bench.workloads import Workload, implementation
from experiments.output.errors import UserError, exit_code
from experiments.studies import parser_of, write_rows
from jaxbp.pairing import IMPLEMENTATIONS
from pallas_kernels.core.device import HOPPER

TORCH = "PyTorch"
WITHOUT_TRIALS = {"xla_gpu_autotune_level": 0}
"""XLA would run products of each size to choose algorithms, and would not find the memory for the largest sizes."""
H200_BYTES, CUDNN_VERSION = int(0.75 * 139.8 * 2**30), 91002
"""The bytes of an H200's memory that JAX uses by default, and a version of cuDNN that has its attention."""


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--place", choices=GPT_WORKLOADS, default="124M", help="the size of the model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    names = [*IMPLEMENTATIONS, "None", FLAX, TORCH]
    parser.add_argument("--implementations", nargs="+", choices=names, default=["None", FLAX])
    parser.add_argument("--gib", type=float, help="the memory of the device; by default, what JAX may use")
    help_of_step = "try only multiples of STEP rows, and for one long row, of as many tokens as STEP rows have"
    parser.add_argument("--step", type=int, help=help_of_step)
    parser.add_argument("--ahead-of-time", action="store_true", help="compile for an H200, which may be absent")
    given = parser.parse_args(args)
    if given.step is not None and given.step < 1:
        parser.error(f"--step is {given.step}; wants at least 1")
    if TORCH in given.implementations:
        if given.ahead_of_time:
            parser.error(f"--ahead-of-time does not compile {TORCH}'s step; wants --implementations without {TORCH}")
        # Set before JAX starts: PyTorch uses the same GPU.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    limit = H200_BYTES
    if given.gib is not None:
        limit = given.gib * 2**30
    elif not given.ahead_of_time:
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        raise UserError("this device does not state its memory; wants --gib")
    if not 0 < limit < math.inf:
        parser.error(f"--gib is {given.gib:g}; wants a finite number above 0")
    fields = {"place": given.place, "dtype": given.dtype, "limit_bytes": int(limit)}
    fields |= {"compiled_for": HOPPER.kind} if given.ahead_of_time else {}
    with h200() if given.ahead_of_time else contextlib.nullcontext():
        return write_rows("gpt_memory", args, fields, rows(given, limit), given.json)


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Return a context in which programs are compiled for an H200, also those with cuDNN's attention."""
    # JAX would ask the absent GPU, and cuDNN, which is not loaded.
    answers = dict(check_cudnn_version=lambda: CUDNN_VERSION, check_compute_capability=lambda _: True)
    with gpus(HOPPER), mock.patch.multiple(fused_attention_stablehlo, **answers):
        yield


def rows(given: Any, limit: float) -> Iterator[dict[str, Any]]:
    """Yield the largest batch of rows with the workload's length, and the largest length of one row."""
    length, fields = GPT_WORKLOADS[given.place]
    batch = max(fields["batches"][0] or (2,))
    for name in given.implementations:
        start = batch
        for what, unit, rows_apart in (("batch", 1, max(batch // 8, 1)), ("length", length, 1)):
            step, sizes = unit * (given.step or rows_apart), {"batch": 1, "length": length}

            def peak(size: int, name: str = name, sizes: dict = sizes, what: str = what) -> float:
                return peak_bytes(given.place, name, given.dtype, **sizes | {what: size})

            size, memory = largest(peak, max(start * unit // step, 1) * step, step, limit)
            yield {"implementation": name, **sizes, what: size, "largest": what, "peak_bytes": memory}
            start = size // 2  # a row needs about as much memory as a batch of as many tokens


def largest(peak: Callable[[int], float], start: int, step: int, limit: float) -> tuple[int, float]:
    """Return the largest multiple of `step` whose peak is at most `limit`, and this peak, or (0, 0) if there is none.

    The peak must grow with the size. The size is first doubled, beginning with `start`, a multiple of `step`. Then a
    line between two sizes predicts the largest one.
    """
    fits, fails, size = (0, 0), None, start
    while fails is None or fails[0] - fits[0] > step:
        memory = peak(size)
        fits, fails = ((size, memory), fails) if memory <= limit else (fits, (size, memory))
        if fails is None:
            size *= 2
        else:
            share = 0.5 if fails[1] == math.inf else (limit - fits[1]) / (fails[1] - fits[1])
            predicted = fits[0] + (fails[0] - fits[0]) * share
            size = min(max(int(predicted) // step * step, fits[0] + step), fails[0] - step)
    return fits


def peak_bytes(place: str, name: str, dtype: str, batch: int, length: int) -> float:
    """Return the memory of one step, without the arguments of an XLA program, or infinity if it does not fit."""
    longer = {"max_length": length} if "max_length" in SIZES[place] else {}
    workload = gpt_workload(place, **longer)
    if name == TORCH:
        return torch_peak_bytes(workload, dtype, batch, length)
    state, *tokens = jax.eval_shape(lambda: workload.draw(0, batch, dtype))
    tokens = [jax.ShapeDtypeStruct((batch, length), jnp.int32) for _ in tokens]
    program = workload.chain(workload.named(name, dtype), 1, "autodiff" if name == FLAX else implementation(name))
    try:
        step = jax.jit(program).lower(((state, *tokens),)).compile(compiler_options=WITHOUT_TRIALS)
        memory = step.memory_analysis()
    except jax.errors.JaxRuntimeError:  # out of memory
        return math.inf
    return memory.output_size_in_bytes + memory.temp_size_in_bytes


def torch_peak_bytes(workload: Workload, dtype: str, batch: int, length: int) -> float:
    """Run two compiled steps of the bench's PyTorch model, and return the most bytes that its tensors had at once."""
    import torch

    from experiments.bench.peers.torch import COMPILED_GRAPH, adamw, gpt, training

    state, *_ = workload.draw(0, 1, dtype)
    arguments = state, *[jnp.zeros((batch, length), jnp.int32)] * 2
    task = Task(workload.op, workload.options, [arguments], arguments, 1, dtype, "default", True, 0.0, "best")
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    try:
        step, *_ = training(gpt, adamw)(task, COMPILED_GRAPH)
        for i in range(2):
            step(i)
        return torch.cuda.max_memory_allocated()
    except torch.cuda.OutOfMemoryError:
        return math.inf
    finally:
        step = None
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(exit_code(main))
