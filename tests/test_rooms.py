"""Who may import whom: experiments -> jaxbp -> pallas_kernels -> jax, and no arrow back."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("pallas_kernels", "jaxbp", "experiments")


def files(room):
    return sorted((ROOT / room).rglob("*.py"))


def imports(source):
    """Every module that a file imports, and every name that it takes from one, with its module's."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room they lead to"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importing(forbidden, *rooms):
    """The files of some rooms that import one of the forbidden modules or something in it."""
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
    assert [name for name in imported if f"{name}.".startswith(("jaxbp.ops.", "jaxbp.nn."))] == []


def test_flax_stays_in_the_layers_and_the_experiments():
    assert all(path.startswith("jaxbp/nn/") for path in importing(["flax"], "jaxbp"))


PRIVATE = ["pallas_kernels/core/launch.py", "pallas_kernels/core/simulator.py"]
"""The files that may know what JAX keeps private."""


def test_only_launch_and_the_simulator_import_what_jax_keeps_private():
    assert importing(["jax._src"], *ROOMS) == PRIVATE


def test_only_launch_and_the_simulator_name_what_jax_keeps_private():
    names = [str(path.relative_to(ROOT)) for room in ROOMS for path in files(room) if "jax._src" in path.read_text()]
    assert names == PRIVATE


def test_nothing_imports_the_deprecated_triton_backend():
    assert importing(["jax.experimental.pallas.triton", "triton", "jax_triton"], *ROOMS, "tests") == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import jaxbp.ops.conv2d", "jaxbp"),
        ("from jaxbp import ops", "jaxbp"),
        ("def f():\n    import flax.nnx as nnx", "flax"),
        ("from jax.experimental.pallas import triton", "jax.experimental.pallas.triton"),
        ("from jax import _src", "jax._src"),
    ],
)
def test_an_import_is_seen_in_whichever_way_it_is_written(source, module):
    assert any(f"{found}.".startswith(f"{module}.") for found in imports(source))
