"""Sweeps the tile sizes of the kernels at the shapes of LeNet's blocks, and keeps the fastest.

    python -m experiments.tune                                       # prints what it measures
    python -m experiments.tune --batch 128 1024 --write              # and records the winners
    python -m experiments.tune conv2d_relu_max_pool2d.forward

A tile is timed as `experiments.bench` times: device time, a median of rounds, each call with arrays of its own. It has
to give the result of the kernel's own rule, and is recorded if it beats that by more than 3%. What a sweep tries is
listed where the kernel is: see `pallas_kernels.core.tiles.kernel`.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import pallas_kernels.conv.conv2d_relu_max_pool2d  # noqa: F401  registers its kernels
from experiments.bench import measure
from experiments.bench.works import CACHE_BYTES, MOST_CALLS, one_after_another
from experiments.output.errors import UserError, exit_code, refuse_unknown
from experiments.output.files import write_atomically
from pallas_kernels.core import device, tiles

GAIN = 1.03
"""How much faster than the kernel's own rule a tile has to be: less is noise."""
TOLERANCE = 1e-4
"""The largest relative norm by which a tile's results may differ: sums are added up in another order."""
BLOCKS = {"block1": (1, 28, 6), "block2": (6, 12, 16)}
"""LeNet's convolutions with ReLU and pool: channels in, height and width, channels out."""
FILTER, WINDOW = (5, 5), (2, 2)


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """Time the kernels with other tile sizes, and record the fastest."""

    kernels: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of kernels; all if none is given."""
    batch: tuple[int, ...] = (128, 1024, 8192, 65536)
    """Batch sizes."""
    seconds: float = 0.03
    """Least time of a round."""
    write: bool = False
    """Record the winners."""
    file: Path = tiles.FILE
    """File to record them in."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 2 for a mistake of the user."""
    config = tyro.cli(TuneConfig, args=args, prog="python -m experiments.tune", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        tune(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def tune(config: TuneConfig) -> None:
    """Sweeps, prints and records.

    Raises:
      UserError: (a ValueError) for unknown kernels, and where no kernels run.
    """
    swept = [name for name, kernel in tiles.KERNELS.items() if kernel.sweep]
    refuse_unknown("kernel", config.kernels, swept)
    if not device.kernels_run():
        raise UserError("tiles are for the GPU that they are timed on: wanted one of compute capability 9.0 or higher")
    for name, block, batch in itertools.product(config.kernels or swept, BLOCKS, config.batch):
        kernel = tiles.KERNELS[name]
        shapes, options = arguments(kernel, *BLOCKS[block], batch)
        print(f"{name} {block}, batch {batch}", flush=True)
        tile = sweep(kernel, shapes, options, config.seconds)
        if config.write:
            record(config.file, name, tiles.key(*shapes, **options), tile)


def arguments(
    kernel: tiles.Kernel, channels: int, size: int, out_channels: int, batch: int
) -> tuple[list, dict[str, Any]]:
    """A kernel's arrays, as shapes, and options in a block, by the names of its parameters."""
    (F, G), (R, S) = FILTER, WINDOW
    P, Q = (size - F + 1) // R, (size - G + 1) // S
    shapes = {
        "x": (channels, size, size, batch),
        "w": (out_channels, channels, F, G),
        "b": (out_channels,),
        "dy": (out_channels, P, Q, batch),
        "place": (out_channels, P, Q, batch),
    }
    options = {"window": WINDOW, "input_size": (size, size)}
    names = inspect.signature(kernel.function).parameters
    structs = [jax.ShapeDtypeStruct(shapes[n], "uint8" if n == "place" else "float32") for n in names if n in shapes]
    return structs, {name: value for name, value in options.items() if name in names}


def sweep(kernel: tiles.Kernel, shapes: Sequence[Any], options: Mapping[str, Any], seconds: float) -> dict[str, int]:
    """Times the candidates of a kernel. Returns the fastest, or nothing where its own rule is as fast."""
    bytes_a_call = sum(math.prod(a.shape) * a.dtype.itemsize for a in shapes)
    calls = min(MOST_CALLS, math.ceil(CACHE_BYTES / bytes_a_call))
    sets = jax.block_until_ready(tuple(jax.jit(draw, static_argnums=1)(seed, tuple(shapes)) for seed in range(calls)))
    programs, reference, times = set(), [], {}
    rule = kernel.heuristic(*shapes, **options)
    for tile in ({}, *candidates(kernel)):
        name = ", ".join(f"{size}={value}" for size, value in tile.items()) or "the rule"
        function = functools.partial(kernel, **options, config=dataclasses.replace(rule, **tile))
        try:
            lowered = jax.jit(function).lower(*sets[0])
            if (text := lowered.as_text()) in programs:
                continue  # a kernel may cut a size down to what there is
            programs.add(text)
            results = [np.asarray(a, np.float64) for a in jax.tree.leaves(lowered.compile()(*sets[0]))]
            reference = reference or results
            if (error := measure.relative_error(results, reference)) > TOLERANCE:
                raise ArithmeticError(f"its results differ from the rule's by {error:.1e}")
            timed = measure.time_chain(one_after_another(function, calls), sets, calls, seconds)
        except Exception as error:  # a tile may not fit in many ways; the rule has to
            if not tile:
                raise
            print(f"  {name}: {type(error).__name__}: {error}".splitlines()[0][:200], flush=True)
            continue
        times[timed["microseconds"]] = tile
        print(f"  {name}: {timed['microseconds']:.1f} µs", flush=True)
    fastest = min(times)
    return times[fastest] if next(iter(times)) > GAIN * fastest else {}


def candidates(kernel: tiles.Kernel) -> Iterator[dict[str, int]]:
    """Every combination of a kernel's sizes."""
    for values in itertools.product(*kernel.sweep.values()):
        yield dict(zip(kernel.sweep, values, strict=True))


def draw(seed: int, shapes: Sequence[Any]) -> list[jax.Array]:
    """Random arrays; integers are places of a window, or one more, where ReLU was off."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, a.shape, a.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating)
        else jax.random.randint(key, a.shape, 0, math.prod(WINDOW) + 1).astype(a.dtype)
        for key, a in zip(keys, shapes, strict=True)
    ]


def record(file: Path, kernel: str, shapes: str, tile: dict[str, int]) -> None:
    """Writes a tile into the file, or takes out the one that was there if the kernel's own rule is to decide."""
    recorded = json.loads(file.read_text())
    of_kernel = recorded.setdefault(device.kind(), {}).setdefault(kernel, {})
    of_kernel.pop(shapes, None)
    if tile:
        of_kernel[shapes] = tile
    write_atomically(file, (json.dumps(recorded, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(exit_code(main))
