"""Train the bench's language model with each implementation, from the same parameters and on the same text.

python -m experiments.studies.gpt_losses --json docs/results/gpt-losses.json      # on a GPU

The text is the standard library of Python, as bytes. Each step has other rows of it. The losses are compared with those
of the first implementation in float32.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from experiments.bench.gpt_workload import ADAMW, GPT_WORKLOADS, gpt_workload
from experiments.data import text
from experiments.output.errors import UserError, exit_code
from experiments.studies import parser_of, write_rows
from experiments.training.loop import make_optimizer
from jaxbp.pairing import IMPLEMENTATIONS
from jaxbp.training.optimizers import apply, fused_adamw


def main(args: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--place", choices=GPT_WORKLOADS, default="124M", help="the size of the model")
    parser.add_argument("--batch", type=int, default=8, help="rows of tokens in each step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=["autodiff", "xla", "pallas"])
    schedule = "the learning rate: constant, or as in experiments.train, with a rise and a fall"
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant", help=schedule)
    given = parser.parse_args(args)
    for name, value in {"batch": given.batch, "steps": given.steps}.items():
        if value < 1:
            parser.error(f"--{name} is {value}; wants at least 1")
    fields = {"place": given.place, "batch": given.batch, "schedule": given.schedule}
    rows = trained(given.place, given.batch, given.steps, given.dtype, given.implementations, given.schedule)
    return write_rows("gpt_losses", args, fields, rows, given.json)


def trained(
    place: str, batch: int, steps: int, dtype: str, implementations: Sequence[str], schedule: str = "constant"
) -> Iterator[dict[str, Any]]:
    """Yield the losses of the first implementation in float32, and then the losses of each implementation in `dtype`.

    The model is `GPT_WORKLOADS[place]`. `difference` is the largest relative difference from the losses in float32.
    """
    workload, first = gpt_workload(place), None
    state, *_ = workload.draw(0, batch, dtype)
    batches = _batches(workload.tokens, batch, steps)
    for implementation, dtype in [(implementations[0], "float32"), *((name, dtype) for name in implementations)]:
        function = workload.function(implementation, dtype)
        # The bench also passes None, with which jaxbp's optimizer uses Optax where Optax is faster.
        of_update = None if implementation == "pallas" else implementation
        options = dict(weight_decay=ADAMW["weight_decay"], implementation=of_update)
        cosine = schedule == "cosine"
        update = make_optimizer(ADAMW["lr"], steps, **options) if cosine else fused_adamw(ADAMW["lr"], **options)

        def step(carry, rows, function=function, update=update):
            parameters, optimizer_state = carry
            loss, gradients = function(parameters, *rows)
            return apply(update, gradients, optimizer_state, parameters), loss

        train = jax.jit(lambda state, batches: lax.scan(step, (state, update.init(state)), batches)[1])  # noqa: B023
        losses = np.asarray(train(state, batches), np.float64)
        first = losses if first is None else first
        difference = float(np.max(np.abs(losses / first - 1)))
        yield {"implementation": implementation, "dtype": dtype, "difference": difference, "losses": losses.tolist()}


def _batches(length: int, batch: int, steps: int) -> list[np.ndarray]:
    """Return the inputs and the targets of all steps, each of shape `(steps, batch, length)`."""
    data = text.load(None, length)
    if len(data.train_images) < steps * batch:
        raise UserError(f"{data.name} has {len(data.train_images):,} rows of {length} bytes; wants {steps * batch:,}")
    order = np.random.default_rng(0).permutation(len(data.train_images))[: steps * batch].reshape(steps, batch)
    return [part[order].astype(np.int32) for part in (data.train_images, data.train_labels)]


if __name__ == "__main__":
    sys.exit(exit_code(main))
