"""Time the kernels of docs/tutorial_faster.md, and compare each time with the roofline.

    python -m experiments.studies.tutorial_steps --json docs/results/tutorial-steps.json      # on a GPU

The page's code defines the kernels.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.roofline import Cost, measured_rates, roofline_seconds
from experiments.output.errors import UserError, exit_code
from experiments.output.results import ROOT
from experiments.studies import parser_of, write_rows
from jaxbp.verify.timing import device_seconds
from pallas_kernels.core.simulator import simulating

PAGE = ROOT / "docs" / "tutorial_faster.md"


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=65536, help="number of rows of x, a multiple of 4")
    parser.add_argument("--features", type=int, default=1024, help="elements per row, a multiple of 128 up to 1024")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--seconds", type=float, default=0.03, help="the least seconds per timing round")
    given = parser.parse_args(args)
    if jax.default_backend() != "gpu" and simulating() is None:
        raise UserError(f"tutorial_steps: the device is a {jax.default_backend().upper()}; wants a GPU")
    rows = measured(steps(), draw(given.rows, given.features, given.dtype), given.seconds)
    sizes = {"shape": [given.rows, given.features], "dtype": given.dtype}
    return write_rows("tutorial_steps", args, sizes, rows, given.json)


def steps() -> Mapping[str, Callable]:
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": PAGE.stem}
    for block in code:
        exec(compile(block, PAGE.name, "exec"), namespace)
    return namespace["STEPS"]


def draw(rows: int, features: int, dtype: str) -> tuple[jax.Array, ...]:
    dy, x, scale = (
        jax.random.normal(jax.random.key(seed), shape, dtype)
        for seed, shape in enumerate(((rows, features), (rows, features), (features,)))
    )
    return dy, x, scale, jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=1))


def measured(
    kernels: Mapping[str, Callable], arrays: Sequence[jax.Array], seconds: float
) -> Iterator[dict[str, float | str]]:
    read = sum(a.nbytes for a in arrays)
    rates = measured_rates(str(arrays[0].dtype), seconds)
    for step, kernel in kernels.items():
        program = jax.jit(kernel)
        written = sum(a.size * a.dtype.itemsize for a in jax.eval_shape(program, *arrays))
        cost = Cost(argument_bytes=read, result_bytes=written, operations=0, read_bytes=read, written_bytes=written)
        least = roofline_seconds(cost, read + written, "default", rates)
        taken = device_seconds(program, tuple(arrays), seconds).seconds
        yield {
            "step": step,
            "microseconds": taken * 1e6,
            "roofline_microseconds": least * 1e6,
            "roofline_share": least / taken,
        }


if __name__ == "__main__":
    sys.exit(exit_code(main))
