"""Check autodiff's gradients of public functions of JAX and of packages based on JAX."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro

from experiments.output.errors import UserError, run_command
from experiments.public_functions import PublicFunction, public_functions
from jaxbp.verify import CheckResult, check

CLEARED_EVERY = 20


@dataclasses.dataclass(frozen=True)
class CheckPublicConfig:
    """Check autodiff's gradients of public functions. The exit code is 1 if a gradient is wrong."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Check only functions whose names begin with these words."""
    seeds: int = 3
    """Number of random draws of each function's arguments."""
    order: int = 1
    """Highest order of derivatives to check."""


def main(args: Sequence[str] | None = None) -> int:
    return run_command(run, CheckPublicConfig, "experiments.check_public", args)


def run(config: CheckPublicConfig, command: str) -> int:
    functions = [f for f in public_functions() if not config.names or f.name.startswith(config.names)]
    if not functions:
        raise UserError(
            f"no name of a public function begins with {' or '.join(config.names)}; wants the beginning of at least one"
        )
    failed, checks = 0, 0
    for i, function in enumerate(functions, start=1):
        start = time.perf_counter()
        results = [check_function(function, seed, config.order) for seed in range(config.seeds)]
        checks, wrong = checks + len(results), [row for result in results for row in result.failures]
        failed += bool(wrong)
        print(f"{'failed' if wrong else 'ok':7} {function.name}, {time.perf_counter() - start:.1f} s", flush=True)
        for row in wrong:
            print(f"        {row}", flush=True)
        if i % CLEARED_EVERY == 0:
            jax.clear_caches()
    print(f"{failed} of {len(functions)} functions failed, in {checks} checks")
    return 1 if failed else 0


def check_function(function: PublicFunction, seed: int, order: int = 1, **settings) -> CheckResult:
    return check(function.function, *function.draw(seed), order=order, seed=seed, **{**function.settings, **settings})


if __name__ == "__main__":
    sys.exit(main())
