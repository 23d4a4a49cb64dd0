"""Write a failing call of an op as Python code."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.fuzz.program import Program
from experiments.fuzz.references import REFERENCES
from experiments.fuzz.transformations import SECOND_ORDER
from jaxbp.catalogue import FixedArgument
from jaxbp.verify.arguments import Arguments


def lines_of(program: Program, arguments: Arguments, cotangents: Sequence[np.ndarray]) -> str:
    """Return code that prints an op's results and gradients, or second derivatives.

    They are computed by autodiff in float64, by autodiff in the op's dtype, and by the program's implementation.
    """
    leaves, names, floats = iter(arguments.leaves), [], []
    lines = [
        "from math import inf, nan",
        "import jax, jax.numpy as jnp, jaxbp",
        "from experiments.fuzz.references import REFERENCES",
        "from experiments.fuzz.transformations import TRANSFORMATIONS",
        "from jaxbp.verify.arguments import floats",
        "from jaxbp.verify.points import generator, normal",
        "from jaxbp.verify.derivatives import derivative, float64, value_and_gradients",
        *['jax.config.update("jax_enable_x64", True)'] * (program.dtype == "float64"),
        *['jax.config.update("jax_default_matmul_precision", "highest")'] * program.exact,
    ]
    each, structure = jax.tree.flatten(program.case.arguments)
    for i, argument in enumerate(each):
        name = f"a{i}"
        names.append(name)
        if isinstance(argument, FixedArgument):
            lines.append(f"{name} = {argument.code}")
            for _ in jax.tree.leaves(argument.draw(None, 0, "float32")):
                next(leaves)
        else:
            lines.append(f"{name} = {_array(next(leaves))}")
            floats += [name] * (argument.below is None)
    options = "".join(f", {name}={value!r}" for name, value in program.case.options.items())
    given = ", ".join(str(tree).replace("'", "") for tree in jax.tree.unflatten(structure, names))
    call = f"jaxbp.{program.entry.name}({given}{options}, implementation=implementation)"
    if program.entry.name in REFERENCES:
        call = f"REFERENCES[{program.entry.name!r}]({given}{options}) if implementation == 'autodiff' else {call}"
    donated = ", donate_argnums=0" if program.transformation == "donated" else ""
    run, along = f"jax.jit(value_and_gradients(function){donated})", ""
    if program.transformation in SECOND_ORDER:
        reverse = program.transformation == "gradient_of_gradient"
        run, along = f"jax.jit(derivative(function, 2, reverse={reverse}))", ", directions"
    lines += [
        f"values = [{', '.join(floats)}]",
        f"cotangents = [{', '.join(map(_array, cotangents))}]",
        "random = generator(0)",
        "directions = [[jnp.array(normal(random, a.shape, a.dtype), a.dtype) for a in values]]",
        "def run(implementation, values, cotangents, directions):",
        f"    function = lambda {', '.join(floats)}: floats({call})",
        f"    function = TRANSFORMATIONS[{program.transformation!r}](function)",
        f"    return {run}(values, cotangents{along})",
        "arrays = values, cotangents, directions",
        "with float64():",
        "    print(run('autodiff', *jax.tree.map(lambda a: jnp.array(a, 'float64'), arrays)))",
        "print(run('autodiff', *jax.tree.map(jnp.array, arrays)))",
        f"print(run({program.implementation!r}, *arrays))",
    ]
    return "\n".join(lines)


def _array(a: Any) -> str:
    a = np.asarray(a)
    wide = a.astype(np.float64) if a.dtype.kind not in "iu" else a
    values = wide.tolist() if a.size else f"jnp.zeros({a.shape})"
    return f"jnp.array({values}, '{a.dtype.name}')"
