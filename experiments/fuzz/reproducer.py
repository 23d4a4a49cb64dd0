"""A failing case as lines of Python that show it by themselves."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.fuzz.cases import Program
from jaxbp.catalogue import FixedArgument
from jaxbp.verify.arguments import Arguments


def lines_of(program: Program, arguments: Arguments, cotangents: Sequence[np.ndarray]) -> str:
    """Prints what the implementation gives, then "autodiff" in the same dtype and in float64."""
    leaves, names, floats = iter(arguments.leaves), [], []
    lines = [
        "from math import inf, nan",
        "import jax, jax.numpy as jnp, jaxbp",
        f"from experiments.fuzz.transformations import {program.transformation}",
        "from jaxbp.verify.arguments import floats",
        "from jaxbp.verify.reference import float64",
        *['jax.config.update("jax_enable_x64", True)'] * (program.dtype == "float64"),
        *['jax.config.update("jax_default_matmul_precision", "highest")'] * program.exact,
    ]
    each, structure = jax.tree.flatten(program.case.arguments)
    for i, argument in enumerate(each):
        name = f"a{i}"
        names.append(name)
        if isinstance(argument, FixedArgument):
            lines.append(f"{name} = {argument.code}")
            _skip(leaves, argument)
        else:
            lines.append(f"{name} = {_array(next(leaves))}")
            floats += [name] * (argument.below is None)
    options = "".join(f", {name}={value!r}" for name, value in program.case.options.items())
    given = ", ".join(str(tree).replace("'", "") for tree in jax.tree.unflatten(structure, names))
    call = f"jaxbp.{program.entry.name}({given}{options}, implementation=implementation)"
    donated = ", donate_argnums=0" if program.transformation == "donated" else ""
    lines += [
        f"cotangents = [{', '.join(map(_array, cotangents))}]",
        "def run(implementation, values, cotangents):",
        f"    function = lambda {', '.join(floats)}: floats({call})",
        f"    transformed = lambda *numbers: {program.transformation}(function, *numbers)",
        f"    return jax.jit(transformed{donated})(values, cotangents)",
        "print(run('autodiff', values := [" + ", ".join(floats) + "], cotangents))",
        "with float64():",
        "    print(run('autodiff', *jax.tree.map(lambda a: a.astype('float64'), (values, cotangents))))",
        f"print(run({program.implementation!r}, values, cotangents))",
    ]
    return "\n".join(lines)


def _skip(leaves, argument):
    for _ in jax.tree.leaves(argument.draw(None, 0, "float32")):
        next(leaves)


def _array(a: Any) -> str:
    a = np.asarray(a)
    wide = a.astype(np.float64) if a.dtype.kind not in "iu" else a
    values = wide.tolist() if a.size else f"jnp.zeros({a.shape})"
    return f"jnp.array({values}, '{a.dtype.name}')"
