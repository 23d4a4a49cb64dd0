"""Train the bench's language model with each implementation, from the same parameters and on the same tokens.

python -m experiments.studies.gpt_losses --json docs/results/gpt-losses.json      # on a GPU
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.bench.gpt_workload import GPT_WORKLOADS, gpt_workload
from experiments.output.errors import exit_code
from experiments.studies import write_rows
from jaxbp.pairing import IMPLEMENTATIONS


def main(args: Sequence[str] | None = None) -> int:
    args = sys.argv[1:] if args is None else list(args)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--place", choices=GPT_WORKLOADS, default="124M", help="the size of the model")
    parser.add_argument("--batch", type=int, default=8, help="rows of tokens, the same in all steps")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["autodiff", "xla", "pallas"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(args)
    fields = {"place": given.place, "batch": given.batch, "dtype": given.dtype}
    rows = trained(given.place, given.batch, given.steps, given.dtype, given.implementations)
    return write_rows("gpt_losses", args, fields, rows, given.json)


def trained(place: str, batch: int, steps: int, dtype: str, implementations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each implementation's losses for the model `GPT_WORKLOADS[place]`, and their largest relative difference
    from the losses of the first implementation."""
    workload, first = gpt_workload(place), None
    arguments = workload.draw(0, batch, dtype)
    for implementation in implementations:
        program = workload.chain(workload.function(implementation, dtype), steps, implementation)
        losses = np.asarray(jax.jit(program)((arguments,))[1], np.float64)
        first = losses if first is None else first
        difference = float(np.max(np.abs(losses / first - 1)))
        yield {"implementation": implementation, "difference": difference, "losses": losses.tolist()}


if __name__ == "__main__":
    sys.exit(exit_code(main))
