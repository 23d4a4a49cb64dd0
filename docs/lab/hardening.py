"""Which recipe trains automata that are still right when every gate is hard.

    python docs/lab/hardening.py ca-checkerboard --seeds 16 --json docs/results/hardening-ca-checkerboard.json

Every recipe trains the same automata, one a seed, by the experiment's own loss and data. Every so many
updates (`--every`) the hard automaton runs on unseen starts, and training ends when all come out right, there and as
many ticks later. The hardened circuit then runs on 256 other starts, four times as long, and after damage. A seed is
compiled once for all recipes: what they differ in are numbers. `--default` runs the experiment's own recipe instead, as
`experiments.train` does.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import json
import sys
import threading
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
from experiments.training import loop
from experiments.training.automaton import life, trials


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run's updates depend on.

    Attributes:
      title: for people.
      rate, cosine, decay, pass_through: learning rate, whether it falls to 0, AdamW's decay, the first logits.
      first_gates: the experiments' setting.
      rounded_first: the experiments' setting `rounded_share`, as it is at first.
      share, rounded, certainty: the experiments' settings `hard_share`, `rounded_share` and `certainty`, as they are in
        the end. They grow in a line from `first` to `last`, which are shares of the updates.
      target: if above 0, the loss of an example below which these grow instead, by `pace` of their end an update, and
        above which they shrink twice as fast.
    """

    title: str
    rate: float = 0.05
    cosine: bool = False
    decay: float = 0.0
    pass_through: float = 5.0
    first_gates: str = "a"
    share: float = 0.0
    rounded_first: float = 0.0
    rounded: float = 0.0
    certainty: float = 0.0
    first: float = 0.15
    last: float = 1.0
    target: float = 0.0
    pace: float = 0.002

    def numbers(self):
        """The fields that are numbers, for a compiled program."""
        return {k: float(v) for k, v in vars(self).items() if not isinstance(v, str)}


TENTH = dict(rounded_first=0.1, rounded=0.1)
DECAY = dict(decay=0.02, rate=0.1, pass_through=6.0)
SURE_DECAY = {**DECAY, "pass_through": 10.0}
DRAWN = {**SURE_DECAY, "first_gates": "drawn"}
SEPARATING = {**SURE_DECAY, "first_gates": "separating"}
RECIPES = {
    "published": Recipe("published: decay 0.01, first logit 10", decay=1e-2, pass_through=10.0),
    "soft": Recipe("no decay, first logit 5"),
    "share": Recipe("the same, a growing share of the gates is hard: 0 to 1", share=1.0),
    "share-half": Recipe("share of hard gates from 0 to 0.5", share=0.5),
    "share-cosine": Recipe("share of hard gates from 0 to 1, cosine schedule", share=1.0, cosine=True),
    "share-slow": Recipe("share of hard gates from 0 to 1, learning rate 0.02", share=1.0, rate=0.02),
    "share-feedback": Recipe("share of hard gates grows while the loss is below 2", share=1.0, target=2.0),
    "certain-low": Recipe("certainty from 0 to 0.001", certainty=1e-3),
    "certain": Recipe("certainty from 0 to 0.01", certainty=1e-2),
    "certain-share": Recipe("certainty to 0.01, share of hard gates to 0.5", certainty=1e-2, share=0.5),
    "rounded": Recipe("share of rounded values from 0 to 1", rounded=1.0),
    "rounded-tenth": Recipe("a tenth of the values rounded, always", **TENTH),
    "rounded-all": Recipe("all values rounded, always", rounded_first=1.0, rounded=1.0),
    "rounded-certain": Recipe("rounded share to 1, certainty to 0.01", rounded=1.0, certainty=1e-2),
    "rounded-certain-cosine": Recipe("the same, cosine schedule", rounded=1.0, certainty=1e-2, cosine=True),
    "rounded-share": Recipe("rounded share to 1, share of hard gates to 1", rounded=1.0, share=1.0),
    "all-feedback": Recipe(
        "rounded share, certainty 0.01 and share of hard gates grow while the loss is below 4",
        share=1.0,
        rounded=1.0,
        certainty=1e-2,
        target=4.0,
    ),
    "certain-feedback": Recipe(
        "rounded share and certainty 0.01 grow while the loss is below 4", rounded=1.0, certainty=1e-2, target=4.0
    ),
    "share-7": Recipe("share of hard gates from 0 to 1, first logit 7", share=1.0, pass_through=7.0),
    "share-10": Recipe("share of hard gates from 0 to 1, first logit 10", share=1.0, pass_through=10.0),
    "share-7-decay": Recipe(
        "first logit 7, decay 0.02, share of hard gates from 0 to 1", share=1.0, pass_through=7.0, decay=0.02
    ),
    "decay": Recipe("a tenth rounded, decay 0.02, learning rate 0.1, first logit 6", **DECAY, **TENTH),
    "decay-10": Recipe("the same, first logit 10", **SURE_DECAY, **TENTH),
    "decay-10-share": Recipe(
        "the same, share of hard gates from 0 to 0.5, cosine schedule", share=0.5, cosine=True, **SURE_DECAY, **TENTH
    ),
    "decay-10-third": Recipe("the same, share to 0.3, constant rate", share=0.3, **SURE_DECAY, **TENTH),
    "drawn": Recipe("decay-10, gates pass on a or b at first, drawn", **DRAWN, **TENTH),
    "separating": Recipe("decay-10, of 200 draws of a or b the one that tells most cells apart", **SEPARATING, **TENTH),
    "drawn-share": Recipe("drawn, share of hard gates from 0 to 0.5, constant rate", share=0.5, **DRAWN, **TENTH),
    "separating-share": Recipe(
        "separating, share of hard gates from 0 to 0.5, constant rate", share=0.5, **SEPARATING, **TENTH
    ),
}


def main(args=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("experiment", choices=AUTOMATA)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--default", action="store_true", help="the experiment's default recipe, and no other")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(16)))
    parser.add_argument(
        "--best", type=int, help="so many of the recipes, those best on --seeds, run on --more-seeds too"
    )
    parser.add_argument("--more-seeds", nargs="+", type=int, default=[])
    parser.add_argument("--updates", type=int, help="at most; 2,000, or with --default the experiment's")
    parser.add_argument("--every", type=int, default=50, help="updates between evaluations")
    parser.add_argument("--threads", type=int, default=4, help="seeds at once: their compilation needs processors")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no run is started")
    parser.add_argument("--implementation", choices=("pallas", "xla", "autodiff"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    if options.default:
        options.recipes = ["default"]
    end, lock = time.monotonic() + options.seconds, threading.Lock()
    report = results.provenance(" ".join(["python", "docs/lab/hardening.py", *(args or sys.argv[1:])]))
    updates = options.updates or (AUTOMATA[options.experiment]().updates if options.default else 2000)
    report |= {"experiment": options.experiment, "updates": updates, "runs": []}
    titles = {name: recipe.title for name, recipe in RECIPES.items()} | {"default": "the default"}
    report["recipes"] = {name: titles[name] for name in options.recipes}

    def runs_of(seeds, names):
        def of_seed(seed):
            of_all = options.experiment, seed, updates, options.implementation
            study = Default(*of_all) if options.default else Study(*of_all, options.every)
            for name in names:
                if time.monotonic() > end:
                    break
                add({"recipe": name, "seed": seed} | study.run(RECIPES.get(name)))

        with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            list(pool.map(of_seed, seeds))

    def add(run):
        print(json.dumps(run), flush=True)
        with lock:
            report["runs"] = sorted([*report["runs"], run], key=lambda run: run["seed"])
            if options.json:
                write_atomically(options.json, results.to_json(report))

    def exact(name):
        return sum(run["right"] == 1 for run in report["runs"] if run["recipe"] == name)

    runs_of(options.seeds, options.recipes)
    best = sorted(options.recipes, key=exact, reverse=True)[: options.best]
    runs_of(options.more_seeds, best)
    for name in options.recipes:
        runs = [run for run in report["runs"] if run["recipe"] == name]
        stands = sum(run.get("stands") == 1 for run in runs)
        updates = sorted(run["updates"] for run in runs)
        print(f"{name:24} {exact(name)} of {len(runs)} exact, {stands} stand; updates {updates}")


def evaluated(config, model):
    """What the hardened circuit does, and its gates."""
    circuit = model.harden().seen(config.visible)
    return (life if isinstance(config, LifeConfig) else trials)(config, circuit)[0] | {"gates": circuit.gates}


class Default:
    """One seed of an experiment, by its own recipe and the training loop."""

    def __init__(self, experiment, seed, updates, implementation):
        self.config = AUTOMATA[experiment](seed=seed, updates=updates, implementation=implementation, devices=1)

    def run(self, _):
        """As a study's."""
        started, prepared = time.monotonic(), loop.prepare(self.config, self.config.load())
        for metrics, state, _ in loop.run(prepared, prepared.state):  # noqa: B007
            if self.config.is_last(metrics.epoch, metrics.test_accuracy):
                break
        nnx.update(prepared.model, state.params)
        figures = {"attempts": 1 + self.config.attempt(metrics.epoch)} | evaluated(self.config, prepared.model)
        figures |= {"relaxed_loss": round(metrics.train_loss, 2), "hard_loss": round(metrics.test_loss, 2)}
        seconds = {"seconds": round(time.monotonic() - started, 2), "compile_seconds": prepared.compile_seconds}
        return {"updates": metrics.step} | seconds | figures


class Study:
    """One seed of an experiment, compiled."""

    def __init__(self, experiment, seed, updates, implementation, every):
        base = AUTOMATA[experiment]

        class Studied(base):
            def as_of(self, update, field):
                return self.values[field]

            def rounded_as_of(self, update):
                return self.values["rounded_share"]

        settings = dict(hard_share=1.0, rounded_share=1.0, certainty=1.0)  # all are compiled, with values from a recipe
        settings |= dict(first_gates="a", shrink=1, restart_after=0)
        self.config = Studied(seed=seed, updates=updates, epochs=1, implementation=implementation, **settings)
        self.updates, self.every, self.key = updates, every, jax.random.key(seed)
        model = self.config.build(self.key)[0]
        self.graph, _, self.rest = nnx.split(model, nnx.Param, ...)
        self.part = jax.jit(self._part, donate_argnums=1)
        self.evaluate = jax.jit(self._evaluate)

    def run(self, recipe):
        """The updates until the hard automaton is right, and what it then does."""
        started, numbers, updates = time.monotonic(), recipe.numbers(), 0
        config = dataclasses.replace(self.config, pass_through=recipe.pass_through, first_gates=recipe.first_gates)
        parameters = nnx.state(config.build(self.key)[0], nnx.Param)
        state = parameters, self._optimiser(1.0, 0.0).init(parameters), jnp.zeros(())
        while updates < self.updates:
            state, loss = self.part(numbers, state, self.key, updates)
            updates += self.every
            hard, right = self.evaluate(state[0])
            if right == 1:
                break
        figures = evaluated(self.config, nnx.merge(self.graph, state[0], self.rest))
        figures |= {"grown": round(float(state[2]), 3)}
        figures |= {"relaxed_loss": round(float(loss), 2), "hard_loss": round(float(hard), 2)}
        return {"updates": updates, "seconds": round(time.monotonic() - started, 2)} | figures

    def _optimiser(self, rate, decay):
        return optax.chain(
            optax.clip(self.config.gradient_clip),
            optax.scale_by_adam(b1=0.9, b2=0.99),
            optax.add_decayed_weights(decay),
            optax.scale_by_learning_rate(rate),
        )

    def _part(self, recipe, state, key, first):
        def loss(parameters, grown, examples):
            config = copy.copy(self.config)
            values = {
                field: grown * recipe[name] for field, name in (("hard_share", "share"), ("certainty", "certainty"))
            }
            values["rounded_share"] = recipe["rounded_first"] + grown * (recipe["rounded"] - recipe["rounded_first"])
            object.__setattr__(config, "values", values)
            model = nnx.merge(self.graph, parameters, self.rest)
            penalised = config._training_loss(model, examples, None)[0].mean()
            return penalised, penalised - config.penalty(model.logits, None)

        def update(state, step):
            parameters, optimiser, grown = state
            done = step.astype(jnp.float32) / self.updates
            line = jnp.clip((done - recipe["first"]) / (recipe["last"] - recipe["first"]), 0, 1)
            grown = jnp.where(recipe["target"] > 0, grown, line)
            rate = recipe["rate"] * jnp.where(recipe["cosine"] > 0, 0.5 * (1 + jnp.cos(jnp.pi * done)), 1.0)
            seeds = jax.random.bits(jax.random.fold_in(key, step), (self.config.batch_size,), jnp.uint32)
            examples = jnp.stack([seeds, jnp.full_like(seeds, step.astype(jnp.uint32))], axis=1)
            (_, value), gradients = jax.value_and_grad(loss, has_aux=True)(parameters, grown, examples)
            change, optimiser = self._optimiser(rate, recipe["decay"]).update(gradients, optimiser, parameters)
            moved = jnp.clip(grown + recipe["pace"] * jnp.where(value < recipe["target"], 1.0, -2.0), 0, 1)
            grown = jnp.where(recipe["target"] > 0, moved, grown)
            return (optax.apply_updates(parameters, change), optimiser, grown), value

        state, values = lax.scan(update, state, first + jnp.arange(self.every))
        return state, values.mean()

    def _evaluate(self, parameters):
        model = nnx.merge(self.graph, parameters, self.rest)
        seeds = jnp.arange(max(self.config.test_examples, self.config.trials // 2), dtype=jnp.uint32)
        losses, right = self.config._evaluation_loss(model, jnp.stack([seeds, jnp.zeros_like(seeds)], axis=1), None)
        return losses.mean(), right.mean()


if __name__ == "__main__":
    sys.exit(main())
