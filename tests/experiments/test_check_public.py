import dataclasses

import jax.numpy as jnp
import pytest

from experiments import check_public
from experiments.public_functions import PublicFunction, public_functions
from jaxbp import Pair

PORTS = [f for f in public_functions() if f.name.startswith(("llama", "port", "jax.nn.dot"))]
FURTHER_PACKAGES = ("distrax", "lineax", "jaxopt")
OTHERS = [f for f in public_functions() if f not in PORTS and not f.name.startswith(FURTHER_PACKAGES)]


def test_there_are_140_functions():
    assert len(PORTS + OTHERS) >= 140
    assert {f.name.split(".")[0] for f in public_functions()} >= {"jax", "optax", "port", "llama"}


@pytest.mark.parametrize("function", PORTS, ids=lambda f: f.name)
def test_a_port_that_computes_in_float32_passes(function):
    result = check_public.check_function(function, seed=0, added=()).raise_if_failed()
    assert result.notes[1:] == ("computes in float32; the reference runs the same program in float64",)


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.name)
def test_a_function_passes(function):
    check_public.check_function(function, seed=0, added=()).raise_if_failed()


def test_the_command_prints_each_function_and_its_failures(monkeypatch, capsys):
    right = PublicFunction("jax.numpy.sin", jnp.sin, (((2,), "normal"),), dict(added=()))
    wrong = dataclasses.replace(right, name="jax.wrong", function=Pair(jnp.sin, {"xla": lambda dy, x: dy}, name="op"))
    monkeypatch.setattr(check_public, "public_functions", lambda: [right, wrong])
    assert check_public.main(["jax", "--seeds", "1"]) == 1
    printed = capsys.readouterr().out
    assert "ok      jax.numpy.sin" in printed and "failed  jax.wrong" in printed and "op, xla, float32" in printed
    assert "1 of 2 functions failed, in 2 checks" in printed
    assert check_public.main(["no.such"]) == 2
