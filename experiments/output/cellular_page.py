"""Write an HTML file that runs a hardened cellular automaton in the browser, also offline."""

import json
import string
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import Bool

from experiments.output.cellular_pictures import COLOURS, PALETTES
from experiments.output.files import write_atomically
from jaxbp import CellularCircuit
from jaxbp.logic.circuits.cellular_circuit import pack_grid


class _Template(string.Template):
    delimiter = "@@"


def write_page(
    path: Path,
    circuit: CellularCircuit,
    initial_state: Bool[np.ndarray, "height width channels"],
    target: Bool[np.ndarray, "height width visible"] | None = None,
    title: str = "A cellular automaton of logic gates",
    *,
    fire_rate: float = 1.0,
    visible: int | None = None,
) -> None:
    """Write an HTML page that runs the automaton. With a target, it counts the cells that equal the target.

    Args:
      fire_rate: the probability that a cell updates in a tick.
      visible: the number of leading channels to show. None: the target's, or 1.
    """
    height, width, channels = initial_state.shape
    visible = visible or (1 if target is None else target.shape[-1])
    if channels != circuit.channels:
        raise ValueError(
            f"write_page: initial_state has {channels} channels; wants {circuit.channels}, as many as the circuit has"
        )
    if target is not None and target.shape != (height, width, visible):
        wanted = f"{(height, width, visible)}: the grid of initial_state, and the visible channels"
        raise ValueError(f"write_page: target has shape {target.shape}; wants {wanted}")
    if visible > channels or visible not in PALETTES:
        wanted = f"1 to 3, and at most {channels}, the number of channels"
        raise ValueError(f"write_page: visible is {visible}; wants {wanted}")
    weights = 1 << np.arange(visible)
    values = {
        "title": escape(title),
        "light": " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items()),
        "height": height,
        "width": width,
        "channels": channels,
        "gates": circuit.gates,
        "periodic": json.dumps(circuit.periodic),
        "edges": "joined" if circuit.periodic else "zeros outside",
        "fire_rate": float(fire_rate),
        "fires": f"{fire_rate:.0%}",
        "patch": max(1, min(height, width) // 4),
        "largest": max(height, width),
        "lines": "\n".join(f"  {line}" for line in _lines(circuit)),
        "initial": words_of(initial_state),
        "target": "" if target is None else "".join(f"{value:x}" for value in (target @ weights).ravel()),
        "visible": visible,
        "colours": json.dumps([f"--{name}" for name in PALETTES[visible]]),
    }
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    write_atomically(Path(path), _Template(template).substitute(values).encode())


def words_of(state: Bool[np.ndarray, "height width channels"]) -> str:
    """Encode a state in hexadecimal, channel by channel and row by row, with eight digits per 32 cells of a row."""
    words = pack_grid(state[None])[:, 0].astype("<u8").view("<u4")[..., : -(-state.shape[1] // 32)]
    return "".join(f"{word:08x}" for word in words.ravel().tolist())


def _lines(circuit: CellularCircuit) -> list[str]:
    netlist, lines = circuit.netlist, []
    read = {*netlist.a.tolist(), *netlist.b.tolist(), *netlist.results.tolist()}
    for i in sorted(read & set(range(netlist.inputs))):
        place, channel = divmod(i, circuit.channels)
        at = f"i + {channel} * PLANE{(' - STRIDE', '', ' + STRIDE')[place // 3]}"
        word = (f"x[{at}] << 1 | x[{at} - 1] >>> 31", f"x[{at}]", f"x[{at}] >>> 1 | x[{at} + 1] << 31")[place % 3]
        lines.append(f"const x{i} = {word};")
    names = [f"x{i}" for i in range(netlist.inputs)] + [f"g{g}" for g in range(len(netlist))]
    lines += [f"const g{g} = {gate};" for g, gate in enumerate(netlist.expressions(names, "0", "-1"))]
    return lines + [f"y[i + {c} * PLANE] = {names[source]};" for c, source in enumerate(netlist.results.tolist())]
