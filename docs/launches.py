"""Find the kernels that `implementation="pallas"` launches, by lowering the ops of the catalogue for CUDA.

    python docs/launches.py [NAME ...]

writes the kernels of all ops, or only of the named ops, to docs/launches.json, from which `python docs/tables.py` makes
a table. All ops take several minutes. No GPU is needed.
"""

import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from figures.cells import markdown

from jaxbp.catalogue import CATALOGUE, Entry
from jaxbp.common.checks import KERNEL_DTYPES
from jaxbp.verify.arguments import floats, is_float
from pallas_kernels.core.device import HOPPER, targeting

BATCH = 16384
FILE = Path(__file__).parent / "launches.json"
Launches = list[str] | str
"""Names of kernels, or the error if `implementation="pallas"` raises `NotImplementedError`."""
_NAME = re.compile(r"\\00(?!stable_)(\w+)_mosaic_gpu\\00")
"""The name of a kernel's function in a lowered program."""


def dtypes(entry: Entry) -> Sequence[str]:
    return entry.kernel_dtypes or KERNEL_DTYPES


def recorded() -> dict[str, dict[str, dict[str, Launches]]]:
    """Return the kernels by op, dtype, and name of the case in the catalogue."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def launches(entry: Entry, place: str, dtype: str) -> Launches:
    """Return the kernels of the op and its gradients on Hopper, at JAX's default precision."""
    case = entry.real[place]
    op = functools.partial(entry.function, **case.options, implementation="pallas")

    def with_gradients(*arrays):
        y, gradients = vjp(op, arrays)
        return y, gradients(y)

    function = op if "_backward" in entry.name else with_gradients
    try:
        with targeting(HOPPER), jax.default_matmul_precision("default"):
            traced = jax.jit(function).trace(*case.structs(case.batch or BATCH, dtype))
            lowered = traced.lower(lowering_platforms=("cuda",))
    except NotImplementedError as error:
        return str(error)
    calls = [line for line in lowered.as_text().splitlines() if "@mosaic_gpu" in line]
    return sorted({_NAME.search(line)[1] for line in calls})


def vjp(op: Callable, arrays: Sequence[Any]) -> tuple[Any, Callable]:
    """Return the results of `op`, and the function from their cotangents to the gradients of the floating arrays."""
    leaves, structure = jax.tree.flatten(arrays)

    def of_floats(*values):
        values = iter(values)
        return floats(op(*jax.tree.unflatten(structure, [next(values) if is_float(a) else a for a in leaves])))

    return jax.vjp(of_floats, *floats(leaves))


def table() -> str:
    found = recorded()
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in found:
        forward, cells = name.removesuffix("_backward"), _cells(found, name)
        if name == forward or forward not in found or cells != _cells(found, forward):
            lines.setdefault(cells, []).append(f"`{name}`")
    head = ("ops", *KERNEL_DTYPES)
    rows = [
        (", ".join(names), first, *("the same" if cell == first else cell for cell in others))
        for (first, *others), names in lines.items()
    ]
    return markdown(head, rows, numbers=False)


def _cells(found: dict, name: str) -> tuple[str, ...]:
    forward = name.removesuffix("_backward")
    of_dtypes = (found[name].get(dtype, {"": "the kernels do not take this dtype"}) for dtype in KERNEL_DTYPES)
    return tuple(re.sub(rf"`{forward}(_backward)?`", r"`NAME\1`", _cell(of)) for of in of_dtypes)


def _cell(of_places: dict[str, Launches]) -> str:
    kernels = sorted({name for names in of_places.values() if isinstance(names, list) for name in names})
    raises = any(isinstance(names, str) for names in of_places.values())
    return ", ".join([*(f"`{name}`" for name in kernels), *["raises"] * raises]) or "none"


def main(names: Sequence[str]) -> None:
    entries = {entry.name: entry for entry in CATALOGUE}
    found = recorded() if FILE.exists() else {}
    for name in names or entries:
        entry = entries[name]
        found[name] = {dtype: {place: launches(entry, place, dtype) for place in entry.real} for dtype in dtypes(entry)}
        print(name, flush=True)
    ordered = {name: found[name] for name in entries}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
