"""Run a random op, and judge its results and derivatives with `jaxbp.verify`."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxbp.verify import TOLERANCES, CheckRow, Tolerance
from jaxbp.verify.arguments import Arguments
from jaxbp.verify.judge import Judge
from jaxbp.verify.points import Point, generator, normal
from jaxbp.verify.programs import Programs
from jaxbp.verify.reference import Expected, Reference
from tests.qa.programs import SECOND_ORDER, Program

EPS = float(np.finfo(np.float32).eps)
FLOAT32 = Tolerance(rtol=32 * EPS, atol=EPS, step=None)
"""Strict enough to find formulas that lose digits."""
TF32 = TOLERANCES["float16"]
"""TF32 has as many digits as float16."""
HEADROOM = 4
"""A result above 1 / HEADROOM of the dtype's largest number may overflow, because terms may exceed their sum."""
PRODUCTS = ("linear", "matmul", "conv", "grouped_linear", "layer_norm_linear", "mlp_", "dot_product_attention")
"""Ops whose backwards multiply matrices in half precision, and round each product."""
COMPILER_OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
"""With these options, XLA keeps every rounding, and compiles faster."""


class Trial:
    """An op with random shapes and options, compiled once for several kinds of data."""

    def __init__(self, program: Program, arguments: Arguments):
        self.program = program
        numbers = Arguments(arguments.float_names, arguments.floats, jax.tree.structure(arguments.floats))

        def op(*values, implementation):
            return program.function(arguments, implementation)(*values)

        options = dict(compiler_options=COMPILER_OPTIONS)
        donated = dict(donate_argnums=0) if program.transformation == "donated" else {}
        in_reverse = program.transformation == "gradient_of_gradient"
        self._ours = Programs(op, numbers, {}, program.implementation, modes=(in_reverse,), **options, **donated)
        random = generator(0)
        self._directions = [[normal(random, a.shape, a.dtype) for a in numbers.floats]]
        reference, autodiff = Reference(op, numbers, {}, **options), Programs(op, numbers, {}, "autodiff", **options)
        tolerances = {**TOLERANCES, "float32": FLOAT32 if program.exact else TF32}
        of_products = "_backward" in program.entry.name and program.entry.name.startswith(PRODUCTS)
        self._judge = Judge(
            reference, autodiff, tolerances, program.kink_convention, rounded_once=0 if of_products else 1
        )
        self.results = reference.results

    def run(self, values: Sequence[np.ndarray], cotangents: Sequence[np.ndarray]) -> str | None:
        """Run the op with the arguments `values`, and describe the first wrong result or derivative, or return None."""
        program, reference = self.program, self._judge.reference
        wide = [[np.asarray(a, np.float64) for a in arrays] for arrays in (values, cotangents)]
        undefined = not program.differentiated_once
        point = Point(program.transformation, *wide, self._directions, maybe_undefined=undefined)
        for order in (2,) if program.transformation in SECOND_ORDER else (0, 1):
            exact = reference.derivative(order, point)
            ours = self._ours.results(order, point)
            largest = [np.abs(e) for e in exact]
            if program.transformation == "vmapped_in_one" and order:
                largest = self._largest_terms(point)
            if order == 2 and program.spreads_invalid_labels:
                is_valid = program.is_valid(exact[0].shape[:-1])[..., None]
                may_be_nan = [~is_valid, *[True] * (len(exact) - 1)]
                exact = [np.where(np.isnan(a) & m, a, e) for e, a, m in zip(exact, ours, may_be_nan, strict=True)]
            wanted = [_wanted(*arrays) for arrays in zip(exact, ours, largest, strict=True)]
            expected = Expected(order, "float64", wanted)
            for i, (name, a) in enumerate(zip(reference.names if order else reference.result_names, ours, strict=True)):
                found = self._judge.verdict(point, expected, i, a, self._ours)
                row = CheckRow(
                    program.entry.name, program.implementation, program.dtype, name, order, "float64", **found
                )
                if row.verdict == "failed":
                    return f"order {order}: {row.finding}"
        return None

    def _largest_terms(self, point: Point) -> list[np.ndarray]:
        """Return, for each gradient's elements, the largest gradient of one mapped example. JAX adds the examples'
        gradients with respect to an argument that is not mapped after their conversion to the argument's dtype."""
        terms = []
        for k in range(2):
            cotangents = [np.where(np.arange(2).reshape(-1, *[1] * (c.ndim - 1)) == k, c, 0) for c in point.cotangents]
            terms.append(self._judge.reference.derivative(1, dataclasses.replace(point, cotangents=cotangents)))
        return [np.abs(pair).max(axis=0) for pair in zip(*terms, strict=True)]


def _wanted(exact: np.ndarray, ours: jax.Array, largest: np.ndarray) -> np.ndarray:
    """Return autodiff's float64 result `exact`, but with elements of jaxbp's result `ours` that are always accepted.

    Every element is accepted where `exact` is NaN. Infinities and NaN are accepted where `largest`, the largest term of
    `exact`, is nearly too large for the dtype.
    """
    is_nearly_too_large = np.isfinite(exact) & (largest > float(jnp.finfo(ours.dtype).max) / HEADROOM)
    ours = np.asarray(ours, np.float64)
    return np.where(np.isnan(exact) | (is_nearly_too_large & ~np.isfinite(ours)), ours, exact)
