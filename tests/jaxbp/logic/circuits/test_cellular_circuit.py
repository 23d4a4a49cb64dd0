import re
import shutil
import subprocess

import numpy as np
import pytest
from cells import Gates, checkerboard, checkerboard_target, life, life_gates, life_step, random_circuit
from verilog import needs_icarus, run_in_icarus

from experiments.training.compiled import compiled_automaton
from jaxbp import CellularCircuit, Netlist
from jaxbp.logic.circuits.sources import VERILOG_WORDS

SIZES = [(1, 1), (1, 2), (1, 67), (5, 1), (2, 2), (3, 63), (3, 64), (4, 65), (6, 130)]
boundaries = pytest.mark.parametrize("periodic", [False, True], ids=["zero", "periodic"])
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def random_state(*shape, seed=0):
    return np.random.default_rng(seed).random(shape) < 0.5


def reference(circuit, state, periodic):
    _, height, width, channels = state.shape
    border = ((0, 0), (1, 1), (1, 1), (0, 0))
    bordered = np.pad(state, border, mode="wrap") if periodic else np.pad(state, border)
    places = [bordered[:, r : r + height, c : c + width] for r in range(3) for c in range(3)]
    return circuit(np.concatenate(places, axis=-1).reshape(-1, 9 * channels)).reshape(state.shape)


@boundaries
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_tick_is_the_circuit_of_every_neighborhood(size, periodic):
    circuit = random_circuit(3, [40, 30])
    automaton, state = CellularCircuit(circuit, 3, periodic), random_state(2, *size, 3)
    for now in automaton.states(state, 5):
        assert np.array_equal(now, state)
        state = reference(circuit, state, periodic)


@boundaries
def test_the_game_of_life_for_300_ticks(periodic):
    board, automaton = random_state(2, 40, 70), life(periodic)
    for tick, now in enumerate(automaton.states(board[..., None], 300)):
        assert np.array_equal(now[..., 0], board), tick
        board = life_step(board, periodic)
    assert 0 < board.sum() < 2 * 40 * 70 / 4


def test_all_512_neighborhoods_of_life():
    boards = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(bool).reshape(512, 3, 3)
    assert np.array_equal(life(True).step(boards[..., None])[..., 0], life_step(boards, True))


def test_a_checkerboard_on_any_grid_heals():
    for height, width in ((5, 8), (9, 70)):
        target, automaton = checkerboard_target(height, width), checkerboard()
        state = automaton.run(random_state(1, height, width, 2), height + width)
        assert np.array_equal(state[0, ..., :1], target)
        state[:, 2:5, 2:6] = False
        assert not np.array_equal(automaton.step(state)[0, ..., :1], target)
        assert np.array_equal(automaton.run(state, width)[0, ..., :1], target)


def test_the_gates_are_the_simplified_circuits():
    circuit = random_circuit(2, [30, 30])
    assert CellularCircuit(circuit, 2).gates == len(Netlist.of(circuit).simplify()) < 62
    assert life(False).gates == len(life_gates()) == 28


def test_gates_that_no_visible_channel_depends_on_may_be_left_out():
    gates = Gates(45)
    outputs = [16, 22, gates("xor", 22, 2), gates("xor", gates("and", 23, 0), 24), 23]
    automaton = CellularCircuit(gates.netlist(*outputs), 5, True)
    seen, state = automaton.seen(1), random_state(1, 9, 70, 5)
    assert automaton.gates == 3 and seen.gates == 1 and automaton.seen(4).gates == 3
    states, expected = seen.states(state, 9), automaton.states(state, 9)
    assert np.array_equal(states[..., :3], expected[..., :3])
    assert np.array_equal(states[9, ..., 3:], state[..., 3:])
    assert not np.array_equal(expected[9, ..., 3:], state[..., 3:])


@boundaries
def test_what_is_seen_is_the_same(periodic):
    for seed in range(3):
        automaton, state = CellularCircuit(random_circuit(6, [9], seed), 6, periodic), random_state(2, 5, 7, 6)
        for visible in range(1, 7):
            seen = automaton.seen(visible)
            assert seen.gates <= automaton.gates
            states, expected = (each.states(state, 9)[..., :visible] for each in (seen, automaton))
            assert np.array_equal(states, expected)


def test_ones_behind_the_last_column_do_not_come_in():
    ones = CellularCircuit(Netlist.from_gates(9, [15], [0], [0], [9]), 1)
    west = CellularCircuit(Netlist.from_gates(9, [], [], [], [5]), 1)  # each cell copies its eastern neighbor
    full = ones.step(random_state(1, 2, 70, 1))
    assert full.all()
    assert west.step(full)[..., :69, :].all() and not west.step(full)[..., 69, :].any()


INVERT = CellularCircuit(Netlist.from_gates(9, [12], [4], [4], [9]), 1)


def test_cells_that_do_not_fire_keep_their_state():
    state, fires = random_state(2, 5, 66, 1), random_state(2, 5, 66, seed=1)
    assert np.array_equal(INVERT.step(state, fires), state ^ fires[..., None])


def test_cells_fire_with_the_probability_asked_for_and_again_with_the_same_seed():
    state = random_state(4, 50, 50, 1)
    states = INVERT.states(state, 2, fire_rate=0.6, seed=3)
    fired, again = states[1] ^ states[0], states[2] ^ states[1]
    assert abs(fired.mean() - 0.6) < 0.02 and abs((fired & again).mean() - 0.36) < 0.02
    assert np.array_equal(INVERT.run(state, 2, fire_rate=0.6, seed=3), states[2])
    assert not np.array_equal(INVERT.run(state, 2, fire_rate=0.6, seed=4), states[2])
    assert np.array_equal(INVERT.run(state, 7, fire_rate=0.0, seed=0), state)


@needs_cc
@boundaries
def test_compiled_c_gives_the_same_states(tmp_path, periodic):
    automaton = CellularCircuit(random_circuit(3, [40, 30]), 3, periodic)
    run = compiled_automaton(automaton, shutil.which("cc"), tmp_path)
    for height, width in SIZES:
        state = random_state(height, width, 3)
        states = automaton.states(state[None], 20)[:, 0]
        assert not np.array_equal(states[20], state) or state.size < 10
        for ticks in (0, 1, 2, 20):
            assert np.array_equal(run(state, ticks), states[ticks]), (height, width, ticks)


@needs_cc
def test_c_ignores_what_is_behind_a_row_and_what_is_in_the_memory(tmp_path):
    source, program = tmp_path / "main.c", tmp_path / "main"
    main = """
        int main(void) {
          uint64_t board[3] = {~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0}, memory[60];
          const size_t needed = automaton_memory(3, 5);
          if (needed >= 60) return 1;
          for (size_t i = 0; i < 60; i++) memory[i] = ~(uint64_t)0;
          automaton(0, 5, 1, board, NULL);
          automaton(3, 5, 0, board, memory);
          if (board[0] != 31 || board[1] != 31 || board[2] != 31) return 2;
          board[1] = ~(uint64_t)31;  /* with rows above and below, and all that is not in the grid */
          automaton(3, 5, 1, board, memory);
          if (board[0] || board[1] || board[2]) return 3;
          for (size_t i = needed; i < 60; i++) if (~memory[i]) return 4;
          return 0;
        }
    """
    source.write_text(life(True).to_c() + main)
    subprocess.run(["cc", "-std=c99", "-Wall", "-Werror", source, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0


@needs_cc
def test_two_automata_stand_beside_each_other_in_one_file(tmp_path):
    (tmp_path / "both.c").write_text(life(True).to_c("one") + checkerboard().to_c("other"))
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-c", "-o", "/dev/null"]
    subprocess.run(["cc", *flags, tmp_path / "both.c"], check=True)


def in_icarus(automaton, state, ticks, folder):
    height, width, _ = state.shape
    loaded = "".join("01"[int(bit)] for bit in state.ravel()[::-1])
    bench = f"""
        module test;
          reg clock = 0, load = 1, enable = 0;
          wire [{state.size - 1}:0] state;
          integer i;
          automaton grid(.clock(clock), .load(load), .enable(enable), .loaded({state.size}'b{loaded}), .state(state));
          initial for (i = 0; i < {ticks + 2}; i = i + 1) begin
            #1 clock = 1;
            #1 clock = 0;
            $display("%b", state);
            load = 0;
            enable = i > 0;
          end
        endmodule
    """
    lines = run_in_icarus(automaton.to_verilog(height, width) + bench, folder)
    return np.array([[bit == "1" for bit in line[::-1]] for line in lines]).reshape(-1, *state.shape)


@needs_icarus
@boundaries
@pytest.mark.parametrize("size", [(1, 1), (1, 66), (4, 1), (5, 7)], ids=str)
def test_a_grid_of_cells_in_icarus_gives_the_same_states(tmp_path, size, periodic):
    automaton, state = CellularCircuit(random_circuit(2, [20, 20]), 2, periodic), random_state(*size, 2)
    loaded, *states = in_icarus(automaton, state, 20, tmp_path)
    assert np.array_equal(loaded, state)
    assert np.array_equal(states, automaton.states(state[None], 20)[:, 0])


def test_verilog_declares_no_keyword():
    source = re.sub(r"//.*", "", life(True).to_verilog(3, 4))
    declared = re.findall(r"(?:begin :|(?<!end)module|genvar|\breg|\bwire|localparam)(?: \[[^]]*\])? (\w+)", source)
    assert {"automaton", "automaton_cell", "rows", "interior", "held"} <= set(declared)
    assert not VERILOG_WORDS & set(declared)


STATE = random_state(1, 4, 4, 1)
REFUSED = {
    "a circuit of other channels": (
        lambda: CellularCircuit(life_gates(), 2),
        "CellularCircuit: circuit has 9 inputs and 1 outputs; wants 18 inputs (nine per "
        "channel) and 2 outputs (one per channel)",
    ),
    "no channels": (
        lambda: CellularCircuit(life_gates(), 0),
        "CellularCircuit: channels is 0; wants an int of at least 1",
    ),
    "numbers": (
        lambda: INVERT.step(STATE.astype(float)),
        "CellularCircuit: state has shape (1, 4, 4, 1) and dtype float64; wants booleans of shape (batch, height, "
        "width, 1)",
    ),
    "a state of other channels": (
        lambda: INVERT.run(random_state(1, 4, 4, 2), 1),
        "CellularCircuit: state has shape (1, 4, 4, 2) and dtype bool; wants booleans of shape (batch, height, "
        "width, 1)",
    ),
    "cells that fire on another grid": (
        lambda: INVERT.step(STATE, np.ones((1, 4, 5), bool)),
        "CellularCircuit: fires has shape (1, 4, 5) and dtype bool; wants booleans of shape (1, 4, 4)",
    ),
    "no visible channel": (
        lambda: INVERT.seen(0),
        "CellularCircuit: visible is 0; wants an int from 1 to 1, the number of channels",
    ),
    "ticks below 0": (lambda: INVERT.run(STATE, -1), "CellularCircuit: ticks is -1; wants an int of at least 0"),
    "no seed": (
        lambda: INVERT.states(STATE, 1, fire_rate=0.5),
        "CellularCircuit: fire_rate is 0.5 and seed is None; wants a fire_rate in [0, 1], and a seed if "
        "fire_rate is below 1",
    ),
    "no cells": (
        lambda: INVERT.to_verilog(0, 3),
        "CellularCircuit: height is 0; wants an int of at least 1",
    ),
    **{
        f"a width of {width!r}": (
            lambda width=width: INVERT.to_verilog(3, width),
            f"CellularCircuit: width is {width!r}; wants an int of at least 1",
        )
        for width in (2.5, np.inf, np.nan, True, "3")
    },
    "a periodic that is no bool": (
        lambda: CellularCircuit(INVERT.netlist, 1, periodic="no"),
        "CellularCircuit: periodic is 'no'; wants True or False",
    ),
    "a keyword of C": (
        lambda: INVERT.to_c("auto"),
        "CellularCircuit: name is 'auto', which is reserved in C; wants another name",
    ),
    "a keyword of Verilog": (
        lambda: INVERT.to_verilog(2, 2, "cell"),
        "CellularCircuit: name is 'cell', which is reserved in Verilog; wants another name",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_an_automaton_is_refused(call, message):
    with pytest.raises(ValueError) as raised:
        call()
    assert str(raised.value) == message
