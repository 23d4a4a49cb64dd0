"""The report on a trained automaton."""

import json

import jax.numpy as jnp
import numpy as np

from experiments.configs.automaton_base import AutomatonConfig, PatternConfig
from experiments.configs.automaton_experiments import LifeConfig
from experiments.data import patterns
from experiments.data.datasets import Dataset
from experiments.output.files import write_atomically, written
from experiments.output.pages import write_page
from experiments.training.compiled import compiled_automaton, measured, ticks_per_second
from experiments.training.pictures import with_square_destroyed, write_pictures
from experiments.training.reports.logic import hints
from jaxbp import CellularCircuit
from jaxbp.nn import LogicAutomaton

FILES = (
    *("automaton.json", "automaton.html", "automaton.png", "automaton.gif", "automaton_large.gif"),
    *("automaton_healing.gif", "automaton.c", "automaton.v"),
)
UNSEEN = np.uint32(2**31)
TIMED_GRID = (256, 256)
LIFE_GRID, LIFE_TICKS = (128, 128), 300
LARGER = 4


def report(config: AutomatonConfig, model: LogicAutomaton, dataset: Dataset) -> str:
    full = model.harden()
    circuit = full.seen(config.visible)
    figures, lines = life(config, circuit) if isinstance(config, LifeConfig) else trials(config, circuit)
    figures |= {"gates": full.gates, "gates_seen": circuit.gates}
    lines.append(f"a cell has {full.gates:,} gates, simplified, and {circuit.gates:,} for only the visible channels")
    lines += hints(circuit.gates)
    timed = starts(config, UNSEEN, 1, TIMED_GRID)[0]
    speed = measured(lambda *compiler: ticks_per_second(compiled_automaton(circuit, *compiler), timed))
    if speed is not None:
        figures["ticks_per_second"] = speed
        height, width = TIMED_GRID
        lines.append(f"as compiled C, on one core: {speed:,.0f} ticks/s of {height} x {width} cells")
    write_atomically(config.run_dir / "automaton.json", (json.dumps(figures, indent=1) + "\n").encode())
    write_files(config, circuit)
    return "\n".join([*lines, f"{config.run_dir / 'automaton.html'} shows it; pictures and code are next to it"])


def starts(config: AutomatonConfig, first_seed: int, number: int, grid: tuple[int, int] | None = None) -> np.ndarray:
    return np.asarray(config.starts(jnp.arange(number, dtype=jnp.uint32) + first_seed, grid))


def trials(config: PatternConfig, circuit: CellularCircuit) -> tuple[dict[str, float], list[str]]:
    """Run the hardened automaton from unseen start states. Return shares of these runs, and lines to print.

    A share counts the runs in which the visible channels equal the pattern in every cell:

        right   at tick `steps`
        stands  at every tick from `steps + 1` to `4 * steps`
        blinks  only at every second tick from `steps + 2` to `4 * steps`
        heals   `steps` ticks after a square of the state at tick `steps` was destroyed
    """
    steps, options = config.steps, dict(fire_rate=config.fire_rate, seed=config.seed)
    states = circuit.states(starts(config, UNSEEN, config.trials), 4 * steps, **options)
    healed = circuit.run(np.stack([with_square_destroyed(state) for state in states[steps]]), steps, **options)

    def right(states):
        return np.all(states[..., : config.visible] == config.pattern(), axis=(-3, -2, -1))

    later = right(states[steps + 1 :])
    stands, every_second = later.all(axis=0), later[1::2].all(axis=0)
    shares = {"right": right(states[steps]), "stands": stands, "blinks": every_second & ~stands, "heals": right(healed)}
    shares = {name: float(np.mean(share)) for name, share in shares.items()}
    number = f"{config.trials} unseen starts" if config.trials > 1 else "its one start"
    line = (
        f"from {number}, every cell right: at tick {steps} {shares['right']:.1%}, at ticks {steps + 1} to {4 * steps} "
        f"{shares['stands']:.1%} (only at every second tick {shares['blinks']:.1%}), "
        f"{steps} ticks after a square was destroyed {shares['heals']:.1%}"
    )
    return shares, [line]


def life(config: LifeConfig, circuit: CellularCircuit) -> tuple[dict[str, float], list[str]]:
    """Compare the hardened automaton with the Game of Life. Return a dict, and lines to print.

    right  the share of the 512 states of 3 x 3 cells after which the center cell is correct
    ticks  the number of correct ticks from a random board
    """
    boards = starts(config, 0, 512)
    right = circuit.run(boards, 1)[:, 1, 1] == np.asarray(config.targets(boards))[:, 1, 1]
    board = starts(config, UNSEEN, 1, LIFE_GRID)
    states = circuit.states(board, LIFE_TICKS)[..., 0]
    wrong = np.flatnonzero((states[1:] != np.asarray(patterns.life_step(states[:-1]))).any(axis=(1, 2, 3)))
    ticks = int(wrong[0]) if wrong.size else LIFE_TICKS
    height, width = LIFE_GRID
    figures = {"right": float(np.mean(right)), "ticks": ticks}
    return figures, [
        f"{right.sum()} of the 512 neighborhoods are right, and {ticks} of {LIFE_TICKS} ticks of a random board of "
        f"{height} x {width} cells"
    ]


def write_files(config: AutomatonConfig, circuit: CellularCircuit) -> None:
    grid = config.shown_grid or config.grid
    larger = (LARGER * grid[0], LARGER * grid[1])
    start, large_start = (starts(config, UNSEEN, 1, size)[0] for size in (grid, larger))
    ticks = LARGER * config.steps if isinstance(config, PatternConfig) else LIFE_TICKS // 4
    options = dict(visible=config.visible, fire_rate=config.fire_rate)
    written(config.run_dir / "automaton.c", lambda: circuit.to_c().encode())
    written(config.run_dir / "automaton.v", lambda: circuit.to_verilog(*grid).encode())
    target = config.pattern() if isinstance(config, PatternConfig) else None
    shown = options | dict(trained_ticks=config.steps, target=target)
    write_pictures(config.run_dir, circuit, start, large_start, ticks, seed=config.seed, **shown)
    write_page(config.run_dir / "automaton.html", circuit, start, target, config.name, **options)
