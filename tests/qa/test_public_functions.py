import pytest

from jaxbp.verify import check
from tests.qa.public_functions import public_functions

PORTS = [f for f in public_functions() if f.name.startswith(("llama", "port", "jax.nn.dot"))]
FURTHER_PACKAGES = ("distrax", "lineax", "jaxopt")
OTHERS = [f for f in public_functions() if f not in PORTS and not f.name.startswith(FURTHER_PACKAGES)]


def test_there_are_140_functions():
    assert len(PORTS + OTHERS) >= 140
    assert {f.name.split(".")[0] for f in public_functions()} >= {"jax", "optax", "port", "llama"}


@pytest.mark.parametrize("function", PORTS, ids=lambda f: f.name)
def test_a_port_that_computes_in_float32_passes(function):
    result = check(function.function, *function.draw(0), order=1, added=(), **function.settings).raise_if_failed()
    assert result.notes[1:] == ("computes in float32; the reference runs the same program in float64",)


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.name)
def test_a_function_passes(function):
    settings = dict(added=()) | function.settings
    check(function.function, *function.draw(0), order=1, **settings).raise_if_failed()
