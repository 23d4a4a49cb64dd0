"""Which recipe trains automata that are still right when every gate is hard.

    python docs/lab/hardening.py ca-checkerboard --seeds 16 --json docs/results/hardening-ca-checkerboard.json

Every recipe trains the same automata, one a seed, by the experiment's own loss and data. After each 50 updates the hard
automaton runs on unseen starts, and training ends when all come out right, there and as many ticks later. The hardened
circuit then runs on 256 other starts, four times as long, and after damage. A seed is compiled once for all recipes:
what they differ in are numbers.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from experiments.configs.automaton import AUTOMATA, LifeConfig
from experiments.output import results
from experiments.output.files import write_atomically
from experiments.training.automaton import life, trials

UPDATES_A_PART = 50


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run's updates depend on.

    Attributes:
      title: for people.
      rate, cosine, decay, pass_through: learning rate, whether it falls to 0, AdamW's decay, the first logits.
      share: of the hard gates in the end, in a line from `first` to `last`, shares of the cycle.
      target: if above 0, the loss of an example below which the share grows by `pace` an update, and above which it
        shrinks four times as fast; `share`, `first` and `last` have no effect then.
      cycle: updates after which a run without success begins again.
      noise: standard deviation of the first logits.
    """

    title: str
    rate: float = 0.05
    cosine: bool = False
    decay: float = 0.0
    pass_through: float = 5.0
    share: float = 1.0
    first: float = 0.15
    last: float = 1.0
    target: float = 0.0
    pace: float = 0.002
    cycle: int = 0
    noise: float = 0.0

    def numbers(self, updates):
        """The fields as numbers, for a compiled program."""
        fields = {k: float(v) for k, v in vars(self).items() if k != "title"}
        return fields | {"cycle": float(self.cycle or updates)}


RECIPES = {
    "published": Recipe("published: decay 0.01, first logit 10", decay=1e-2, pass_through=10.0, share=0.0),
    "soft": Recipe("no decay, first logit 5", share=0.0),
    "line": Recipe("the same, a growing share of the gates is hard: 0 to 1"),
    "half": Recipe("growing share, 0 to 0.5", share=0.5),
    "cosine": Recipe("growing share, cosine schedule", cosine=True),
    "early": Recipe("growing share, all hard from 60% on, cosine schedule", cosine=True, last=0.6),
    "slow": Recipe("growing share, learning rate 0.02", rate=0.02),
    "feedback": Recipe("the share grows while the loss is below 2", target=2.0),
    "feedback-slow": Recipe("the share grows at half that pace while the loss is below 1", target=1.0, pace=0.001),
    "feedback-cosine": Recipe("the share grows while the loss is below 2, cosine schedule", target=2.0, cosine=True),
    "cycles-250": Recipe("growing share, begun again after every 250", cycle=250, noise=0.5),
    "cycles-500": Recipe("growing share, begun again after every 500", cycle=500, noise=0.5),
    "cycles-500-cosine": Recipe("the same, cosine schedule", cycle=500, noise=0.5, cosine=True),
    "cycles-feedback": Recipe("feedback, begun again after every 500", target=2.0, cycle=500, noise=0.5),
}


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiment", choices=AUTOMATA)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=4, help="seeds at once: their compilation needs processors")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no run is started")
    parser.add_argument("--implementation", choices=("pallas", "xla", "autodiff"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    end = time.monotonic() + options.seconds
    report = results.provenance(" ".join(["python", "docs/lab/hardening.py", *(args or sys.argv[1:])]))
    report |= {"experiment": options.experiment, "updates": options.updates, "seeds": options.seeds, "runs": []}
    report["recipes"] = {name: RECIPES[name].title for name in options.recipes}

    def of_seed(seed):
        study, runs = Study(options.experiment, seed, options.updates, options.implementation), []
        for name in options.recipes:
            if time.monotonic() > end:
                break
            runs.append({"recipe": name, "seed": seed} | study.run(RECIPES[name]))
            print(json.dumps(runs[-1]), flush=True)
        return runs

    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        for runs in pool.map(of_seed, range(options.seeds)):
            report["runs"] += runs
            if options.json:
                write_atomically(options.json, results.to_json(report))
    for name in options.recipes:
        runs = [run for run in report["runs"] if run["recipe"] == name]
        right = sum(run["right"] == 1 for run in runs)
        stands = sum(run.get("stands") == 1 for run in runs)
        print(f"{name:18} {right} of {len(runs)} exact, {stands} stand; updates {sorted(r['updates'] for r in runs)}")


class Study:
    """One seed of an experiment, compiled."""

    def __init__(self, experiment, seed, updates, implementation):
        base = AUTOMATA[experiment]

        class Studied(base):
            share_now = None

            def share_of_hard_gates(self, update):
                return self.share_now

        self.config = Studied(seed=seed, updates=updates, epochs=1, implementation=implementation)
        self.updates, self.key = updates, jax.random.key(seed)
        model = self.config.build(self.key)[0]
        self.graph, _, self.rest = nnx.split(model, nnx.Param, ...)
        self.part = jax.jit(self._part, donate_argnums=1)
        self.evaluate = jax.jit(self._evaluate)

    def run(self, recipe):
        """The updates until the hard automaton is right, and what it then does."""
        started, numbers, part_of_run = time.monotonic(), recipe.numbers(self.updates), 0
        state, losses, stopped = None, [], self.updates
        for done in range(0, self.updates, UPDATES_A_PART):
            if state is None or (recipe.cycle and done % recipe.cycle == 0):
                state, part_of_run = self._initial(recipe, jax.random.fold_in(self.key, done)), 0
            key = jax.random.fold_in(self.key, self.updates + done)
            state, loss = self.part(numbers, state, key, part_of_run)
            part_of_run += UPDATES_A_PART
            hard, right = self.evaluate(state[0])
            losses.append((round(float(loss), 2), round(float(hard), 2)))
            if right == 1:
                stopped = done + UPDATES_A_PART
                break
        circuit = nnx.merge(self.graph, state[0], self.rest).harden().seen(self.config.visible)
        figures = (life if isinstance(self.config, LifeConfig) else trials)(self.config, circuit)[0]
        figures |= {"gates": circuit.gates, "share": round(float(state[2]), 3), "losses": losses[-1]}
        return {"updates": stopped, "seconds": round(time.monotonic() - started, 2)} | figures

    def _initial(self, recipe, key):
        config = dataclasses.replace(self.config, pass_through=recipe.pass_through)
        parameters = nnx.state(config.build(key)[0], nnx.Param)
        leaves, structure = jax.tree.flatten(parameters)
        keys = jax.random.split(key, len(leaves))
        drawn = [x + recipe.noise * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        parameters = jax.tree.unflatten(structure, drawn)
        return parameters, self._optimiser(1.0, 0.0).init(parameters), jnp.zeros(())

    def _optimiser(self, rate, decay):
        return optax.chain(
            optax.clip(self.config.gradient_clip),
            optax.scale_by_adam(b1=0.9, b2=0.99),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(rate),
        )

    def _part(self, recipe, state, key, first):
        def loss(parameters, share, examples):
            config = copy.copy(self.config)
            object.__setattr__(config, "share_now", share)
            model = nnx.merge(self.graph, parameters, self.rest)
            return config._training_loss(model, examples, None)[0].mean()

        def update(state, step):
            parameters, optimiser, share = state
            number = step.astype(jnp.float32)
            line = (number / recipe["cycle"] - recipe["first"]) / (recipe["last"] - recipe["first"])
            share = jnp.where(recipe["target"] > 0, share, recipe["share"] * jnp.clip(line, 0, 1))
            fall = 0.5 * (1 + jnp.cos(jnp.pi * number / recipe["cycle"]))
            rate = recipe["rate"] * jnp.where(recipe["cosine"] > 0, fall, 1.0)
            seeds = jax.random.bits(jax.random.fold_in(key, step), (self.config.batch_size,), jnp.uint32)
            examples = jnp.stack([seeds, jnp.full_like(seeds, step.astype(jnp.uint32))], axis=1)
            value, gradients = jax.value_and_grad(loss)(parameters, share, examples)
            change, optimiser = self._optimiser(rate, recipe["decay"]).update(gradients, optimiser, parameters)
            grown = jnp.clip(share + recipe["pace"] * jnp.where(value < recipe["target"], 1.0, -4.0), 0, 1)
            share = jnp.where(recipe["target"] > 0, grown, share)
            return (optax.apply_updates(parameters, change), optimiser, share), value

        state, values = lax.scan(update, state, first + jnp.arange(UPDATES_A_PART))
        return state, values.mean()

    def _evaluate(self, parameters):
        model = nnx.merge(self.graph, parameters, self.rest)
        seeds = jnp.arange(self.config.test_examples, dtype=jnp.uint32)
        losses, right = self.config._evaluation_loss(model, jnp.stack([seeds, jnp.zeros_like(seeds)], axis=1), None)
        return losses.mean(), right.mean()


if __name__ == "__main__":
    sys.exit(main())
