"""Measure the cost of the gradients of frozen parameters.

    python -m experiments.studies.frozen_parameters --json docs/results/frozen-parameters.json      # on a GPU

A dense layer of the model is `linear(h, w, b) + linear(linear(h, down), up)`. The matrices `down` and `up` are an
adapter (LoRA, arXiv:2106.09685). A row's `wanted` says whether a program computes the gradients of the "adapters" or of
"all" parameters.
"""

import argparse
import concurrent.futures
import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxbp
from experiments.output.errors import exit_code
from experiments.output.results import keep, provenance
from jaxbp.verify.timing import device_seconds

IMPLEMENTATIONS = ("pallas", "xla", "autodiff")
WANTED: dict[str, int | tuple[int, ...]] = {"adapters": 0, "all": (0, 1)}
EXPANSION = 4
SETTLING = 1.2
"""The longest time that a program runs before it is timed, in seconds."""
QUICK = ["--rows", "16", "--features", "128", "--blocks", "2", "--rank", "4", "--seconds", "0.001"]


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--seconds", type=float, default=0.3, help="the least seconds per timing round")
    parser.add_argument("--quick", action="store_true", help=f"the same as {' '.join(QUICK)}")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args([*QUICK, *args] if "--quick" in args else args)
    sizes = {key: getattr(given, key) for key in ("blocks", "rank", "dtype")}
    report = provenance(shlex.join(["python", "-m", "experiments.studies.frozen_parameters", *args]))
    report |= sizes | {"shape": [given.rows, given.features], "rows": []}
    settling = 0.0 if given.quick else SETTLING
    for row in measured(draw(given.rows, given.features, **sizes), given.implementations, given.seconds, settling):
        print(row, flush=True)
        report["rows"].append(row)
        keep(report, given.json)
    return 0


def draw(rows: int, features: int, blocks: int, rank: int, dtype: str) -> tuple[Any, ...]:
    normal = _Normal(dtype)
    shapes = (features * EXPANSION, features), (features, features * EXPANSION)
    adapters, frozen = [], []
    for _ in range(blocks):
        adapters.append([(normal(rank, n), normal(m, rank)) for m, n in shapes])
        frozen.append(((1 + normal(features), normal(features)), [(normal(m, n), normal(m)) for m, n in shapes]))
    return adapters, frozen, normal(rows, features), normal(rows, features)


class _Normal:
    def __init__(self, dtype: str):
        self.dtype, self.seed = dtype, 0

    def __call__(self, *shape: int) -> Array:
        self.seed += 1
        return jax.random.normal(jax.random.key(self.seed), shape, self.dtype) * shape[-1] ** -0.5


def loss(adapters: Any, frozen: Any, x: Array, dy: Array, *, implementation: jaxbp.pairing.Implementation) -> Array:
    linear = functools.partial(jaxbp.linear, implementation=implementation)

    def adapted(h, parameters, adapter):
        (w, b), (down, up) = parameters, adapter
        return linear(h, w, b) + linear(linear(h, down), up)

    for block_adapters, (norm, parameters) in zip(adapters, frozen, strict=True):
        h = jaxbp.layer_norm(x, *norm, implementation=implementation)
        h = adapted(h, parameters[0], block_adapters[0])
        h = jaxbp.gelu(h, implementation=implementation)
        x = x + adapted(h, parameters[1], block_adapters[1])
    return jnp.sum(x.astype(jnp.float32) * dy.astype(jnp.float32))


def gradients(implementation: jaxbp.pairing.Implementation, wanted: str) -> Callable:
    return jax.grad(functools.partial(loss, implementation=implementation), WANTED[wanted])


def measured(
    arguments: tuple[Any, ...], implementations: Sequence[str], seconds: float, settling: float
) -> Iterator[dict[str, Any]]:
    programs = [(implementation, wanted) for implementation in implementations for wanted in WANTED]
    lowered = [jax.jit(gradients(*program)).lower(*arguments) for program in programs]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(jax.stages.Lowered.compile, lowered))
    for (implementation, wanted), program in zip(programs, compiled, strict=True):
        memory = program.memory_analysis()
        yield {
            "implementation": implementation,
            "wanted": wanted,
            "microseconds": device_seconds(program, arguments, seconds, settling=settling).seconds * 1e6,
            "result_bytes": memory.output_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }


if __name__ == "__main__":
    sys.exit(exit_code(main))
