"""Permitted imports and calls: experiments -> jaxbp -> pallas_kernels -> jax, only in this direction."""

import ast
import inspect
import itertools
import operator
import re
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxbp
from pallas_kernels.core import launch as launching

ROOT = Path(__file__).parents[1]
ROOMS = ("pallas_kernels", "jaxbp", "experiments")


def files(room):
    return sorted((ROOT / room).rglob("*.py"))


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the package that they import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle(graph):
    """Return modules that import each other in a cycle, with the first module also last, or []."""
    finished, trail = set(), []

    def visit(module):
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in finished:
            return []
        trail.append(module)
        found = next(filter(None, map(visit, sorted(graph[module]))), [])
        trail.pop()
        finished.add(module)
        return found

    return next(filter(None, map(visit, sorted(graph))), [])


def import_graph(sources):
    """Map each module to the modules that it imports, even within functions."""
    return {
        module: {
            target
            for name in imports(source)
            if (target := name if name in sources else name.rpartition(".")[0]) in sources and target != module
        }
        for module, source in sources.items()
    }


def importing(forbidden, *rooms):
    return [
        str(path.relative_to(ROOT))
        for room in rooms
        for path in files(room)
        if any(f"{module}.".startswith(f"{name}.") for module in imports(path.read_text()) for name in forbidden)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_files(room):
    assert files(room)


def test_kernels_import_nothing_from_above_and_no_flax():
    assert importing(["jaxbp", "experiments", "flax"], "pallas_kernels") == []


def test_the_library_imports_nothing_of_the_experiments():
    assert importing(["experiments"], "jaxbp") == []


def test_checking_and_comparing_know_of_no_op():
    imported = [name for path in files("jaxbp/verify") for name in imports(path.read_text())]
    assert imported
    assert [name for name in imported if f"{name}.".startswith(("jaxbp.ops.", "jaxbp.nn.", "jaxbp.nnx."))] == []


def test_flax_stays_in_the_layers_and_the_experiments():
    layers = "jaxbp/nn/", "jaxbp/nnx/", "jaxbp/linen.py"
    allowed = (*layers, "jaxbp/logic/networks/", "jaxbp/training/loop.py", "jaxbp/estimators/")
    assert all(path.startswith(allowed) for path in importing(["flax"], "jaxbp"))


PRIVATE = [f"pallas_kernels/core/{name}.py" for name in ("launch", "simulator", "source_lines")]
PRIVATE.append("experiments/studies/gpt_memory.py")


def test_only_four_files_import_what_jax_keeps_private():
    assert importing(["jax._src"], *ROOMS) == PRIVATE


def test_only_four_files_name_what_jax_keeps_private():
    names = [str(path.relative_to(ROOT)) for room in ROOMS for path in files(room) if "jax._src" in path.read_text()]
    assert names == PRIVATE


def test_nothing_imports_the_deprecated_triton_backend():
    assert importing(["jax.experimental.pallas.triton", "triton", "jax_triton"], *ROOMS, "tests") == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import jaxbp.ops.conv.conv2d", "jaxbp"),
        ("from jaxbp import ops", "jaxbp"),
        ("def f():\n    import flax.nnx as nnx", "flax"),
        ("from jax.experimental.pallas import triton", "jax.experimental.pallas.triton"),
        ("from jax import _src", "jax._src"),
    ],
)
def test_an_import_is_seen_in_whichever_way_it_is_written(source, module):
    assert any(f"{found}.".startswith(f"{module}.") for found in imports(source))


def test_no_modules_import_each_other_in_a_circle():
    sources = {module_of(path): path.read_text() for room in ROOMS for path in files(room)}
    graph = import_graph(sources)
    assert sum(map(len, graph.values())) > len(graph)
    assert circle(graph) == []


def folder_graph(graph):
    of = lambda module: module.rpartition(".")[0]  # noqa: E731
    folders = {of(module): set() for module in graph if "." in module}
    for module, targets in graph.items():
        for target in targets:
            source, other = of(module), of(target)
            if (
                source
                and other
                and not f"{source}.".startswith(f"{other}.")
                and not f"{other}.".startswith(f"{source}.")
            ):
                folders[source].add(other)
    return folders


def test_no_folders_import_each_other():
    sources = {module_of(path): path.read_text() for room in ROOMS for path in files(room) if path.stem != "__init__"}
    folders = folder_graph(import_graph(sources))
    assert {"jaxbp.ops.conv", "jaxbp.logic.circuits", "jaxbp.common"} <= set(folders)
    assert [(a, b) for a in sorted(folders) for b in sorted(folders[a]) if a < b and a in folders[b]] == []


def test_folders_that_import_each_other_are_found():
    graph = {"a.b.x": {"a.c.y"}, "a.c.y": set(), "a.c.z": {"a.b.w", "a.c.y"}, "a.b.w": set(), "a.v": {"a.b.x"}}
    assert folder_graph(graph) == {"a.b": {"a.c"}, "a.c": {"a.b"}, "a": set()}


def test_a_circle_is_found():
    sources = {
        "a": "from a import b",
        "a.b": "def f():\n    import a.c.d",
        "a.c.d": "from e import x",
        "e": "from a.b import f",
        "g": "import a",
    }
    assert circle(import_graph(sources)) == ["a.b", "a.c.d", "e", "a.b"]
    assert circle(import_graph(sources | {"e": "import jax"})) == []


def test_the_documentation_lists_the_files_that_a_gradient_passes(on_hopper, monkeypatch):
    table = re.findall(r"^\| \d \| `(\S+)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    stacks, bind = [], launching._bind

    def seen(*args):
        stacks.append([Path(frame.filename) for frame in traceback.extract_stack()])
        return bind(*args)

    monkeypatch.setattr(launching, "_bind", seen)
    loss = lambda x: jaxbp.max_pool2d(x, 3, stride=2, implementation="pallas").sum()  # noqa: E731
    jax.jit(jax.grad(loss)).trace(jnp.zeros((128, 3, 9, 11)))
    (stack,) = stacks
    rooms = [str(path.relative_to(ROOT)) for path in stack if any(path.is_relative_to(ROOT / room) for room in ROOMS)]
    backward = [path for path, _ in itertools.groupby(rooms)]
    assert table == [str(Path(inspect.getsourcefile(jaxbp.max_pool2d)).relative_to(ROOT)), *backward]
    assert len(set(table)) == 6


LABELS, WIRES = jnp.zeros(8, int), jaxbp.Wires.random(16, 24, seed=0)
SQUARE_BACKWARDS = dict.fromkeys(("xla", "pallas"), lambda dy, x: 2 * x * dy)
GRADIENTS = {
    "square": (3, jaxbp.Pair(lambda x: x * x, SQUARE_BACKWARDS), 3),
    "linear_softmax_cross_entropy": (21, lambda x, w: jaxbp.linear_softmax_cross_entropy(x, w, LABELS), (8, 5), (4, 5)),
    "gate_layer": (31, lambda logits, x: jaxbp.gate_layer(logits, WIRES, x), (24, 16), (4, 16)),
    "conv2d": (62, jaxbp.conv2d, (2, 1, 8, 8), (4, 1, 3, 3), 4),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_seldom_moves_between_files(name):
    most, function, *shapes = GRADIENTS[name]
    called = []

    def trace():
        loss = lambda *arrays: function(*arrays).sum()  # noqa: E731
        jax.make_jaxpr(jax.grad(loss, range(len(shapes))))(*map(jnp.ones, shapes))

    def record(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(ROOT / room) for room in ROOMS):
            called.append(path)

    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("default"):
        trace()  # fills the caches
        sys.setprofile(record)
        try:
            trace()
        finally:
            sys.setprofile(None)
    assert 0 < sum(map(operator.ne, called, called[1:])) <= most


TESTED_ELSEWHERE = {
    # A part of a kernel, op, pair, or check is tested through it.
    "pallas_kernels/attention/rows_of_keys_sm90",
    "pallas_kernels/core/mosaic",
    "pallas_kernels/dense/mlp_weighed_gradients_sm90",
    "pallas_kernels/dense/products_sm90",
    "pallas_kernels/logic/tree",
    "pallas_kernels/norm/row_block",
    "jaxbp/ops/attention/_formulas",
    *(f"jaxbp/logic/ops/{name}" for name in ("_automaton_formula", "_automaton_kernels", "_layers", "_rows")),
    *("jaxbp/pairing/gradients", "jaxbp/pairing/op"),
    *(f"jaxbp/verify/{name}" for name in ("comparison", "derivatives", "judge", "points")),
    *(f"jaxbp/verify/{name}" for name in ("programs", "report", "study")),
    # tests/test_architectures.py compiles for absent GPUs.
    "experiments/ahead_of_time",
}
OF_MORE_THAN_A_MODULE = {
    *(f"jaxbp/catalogue/test_{name}" for name in ("options", "promotion", "unwanted_gradients")),
    *(f"jaxbp/ops/test_{name}" for name in ("any_shape", "bad_input", "formulas", "twins")),
    "jaxbp/ops/conv/test_twins",
    *(f"jaxbp/verify/test_{name}" for name in ("findings", "no_false_alarm", "wrong_backwards")),
    *(f"jaxbp/verify/test_planted_mistakes{name}" for name in ("", "_by_data")),
    "experiments/training/test_damage",
    *("jaxbp/pairing/test_pair_in_forward_mode", "jaxbp/pairing/test_pair_under_vmap"),
}


def test_tests_mirror_the_rooms():
    def test_of(module):
        return str(module.parent / f"test_{module.name.strip('_')}")

    modules = [path.relative_to(ROOT).with_suffix("") for room in ROOMS for path in files(room)]
    wanted = {test_of(module) for module in modules if module.name != "__init__"}
    elsewhere = {test_of(Path(name)) for name in TESTED_ELSEWHERE}
    found = [path for room in ROOMS for path in (ROOT / "tests" / room).rglob("test_*.py")]
    tests = {str(path.relative_to(ROOT / "tests").with_suffix("")) for path in found}
    assert sorted(wanted - tests - elsewhere) == []
    assert sorted(tests - wanted - OF_MORE_THAN_A_MODULE) == []
    assert sorted(elsewhere & tests) == [], "these modules have test files and need no exception"
