"""Whether an implementation's numbers are right: next to float64, and to autodiff in its own dtype.

Autodiff's error is one draw: where its terms cancel exactly by luck it is 0. What fails next to it is therefore held
against autodiff with each result moved by up to a rounding as well: see `roundings.py`.

A gradient in what is used more than once is a sum, each term of it rounded to the argument's dtype, as are JAX's own.
With other terms it overflows at another size: where autodiff does with cotangents a little larger, ours may.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.fuzz.cases import Program
from experiments.fuzz.roundings import with_other_roundings
from experiments.fuzz.transformations import TRANSFORMATIONS
from jaxbp.verify.arguments import Arguments
from jaxbp.verify.reference import EPS, float64

TENSOR_CORES = 2.0**-10
"""The rounding of TF32, in which products of float32 are computed unless full precision is asked for."""
AS_EXACT = 64
"""As many roundings count as one where float64 is held against float64, which is no more exact."""
OF_AUTODIFF, OF_ROUNDED_ARGUMENTS, OF_ROUNDING = 3, 16, 32
"""How many times autodiff's error, the change by arguments that are off by a rounding, and a rounding, are allowed in
sum."""

ROUNDINGS = 4
"""Other ones of autodiff, of which the largest error counts once: they are up to twice what a rounding is."""
LOUDER = 4
"""Ours may overflow where autodiff does with cotangents so many times larger: its terms are then nearly too large."""

COMPILER_OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
"""Every rounding as it is written. Nearly all of the time is compilation: without LLVM's optimisations it is less."""


class Trial:
    """A program, compiled for the implementation that is tried, for "autodiff", and for "autodiff" in float64."""

    def __init__(self, program: Program, arguments: Arguments):
        self.program = program
        self.transformation = TRANSFORMATIONS[program.transformation]
        donated = (0,) if program.transformation == "donated" else ()
        compiled = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
        self.ours = compiled(self._of(arguments, program.implementation), donate_argnums=donated)
        native = self._of(arguments, "autodiff")
        self.native, self.exact, self.rounded = map(compiled, (native, native, with_other_roundings(native)))
        self.results = jax.eval_shape(program.function(arguments, "autodiff"), *arguments.floats)

    def _of(self, arguments, implementation):
        function = self.program.function(arguments, implementation)
        return lambda values, cotangents: self.transformation(function, values, cotangents)

    def run(self, values: Sequence[np.ndarray], cotangents: Sequence[np.ndarray]) -> str | None:
        """What is wrong for these numbers, if something is.

        Raises:
          NotImplementedError: the implementation does not take the program.
        """
        eps = float(jnp.finfo(self.program.dtype).eps)
        rounding = eps if self.program.exact else TENSOR_CORES
        if self.program.dtype == "float64":
            rounding *= AS_EXACT
        with float64():
            wide = [[np.asarray(a, np.float64) for a in arrays] for arrays in (values, cotangents)]
            exact = _named(self.exact(*wide))
            moved = _named(self.exact(*[[_off_by_a_rounding(a, rounding) for a in arrays] for arrays in wide]))
        ours = _named(self.ours(_arrays(values), _arrays(cotangents)))
        unknown = AS_EXACT * EPS * max((float(np.abs(c).max(initial=0.0)) for c in cotangents), default=0.0)
        judged = functools.partial(self._judged, ours, exact=exact, moved=moved, rounding=rounding, unknown=unknown)
        # Only what is not as near as rounded arguments allow needs autodiff, whose compilation takes time.
        if judged(exact) is None:
            return None
        native = _named(self.native(_arrays(values), _arrays(cotangents)))
        if judged(native) is None:
            return None
        seeds = map(jnp.float32, range(ROUNDINGS))
        others = [_named(self.rounded(seed, _arrays(values), _arrays(cotangents))) for seed in seeds]
        loud = _named(self.native(_arrays(values), _arrays([LOUDER * c for c in cotangents])))
        return judged(native, others=others, loud=loud)

    def _judged(self, ours, native, exact, moved, rounding, unknown, others=(), loud=None):
        """The first result in which something is wrong, and what."""
        for name, wanted in exact.items():
            if ours[name].shape != wanted.shape:
                return f"{name} has shape {ours[name].shape}; wants {wanted.shape}"
            if not self.program.differentiated_once:
                wanted = np.where(np.isfinite(wanted), wanted, np.nan)
            limits = jnp.finfo(self.program.dtype)
            near_overflow = ~np.isfinite((loud or native)[name])
            also = [other[name] for other in others]
            arrays = ours[name], native[name], wanted, moved[name]
            if message := differs(*arrays, rounding, limits, unknown, also, near_overflow):
                return f"{name} {message}"
        return None


def differs(
    ours, native, exact, moved, rounding: float, limits, unknown: float = 0.0, others=(), near_overflow=np.False_
) -> str | None:
    """What is wrong with `ours`, if something is.

    Where both float64 and autodiff in the dtype are finite, so must be ours, and near. Where both are the same
    infinity, so must be ours. Where autodiff has a NaN or has overflown, nothing is asked: a formula may do better.
    If it has somewhere, ours may have elsewhere: what overflows first depends on the order of products. `unknown` is
    what float64 may itself be off, in each element: y (1 - y) is 0 where y is nearly 1. `others` are
    autodiff's with other roundings. Where it is `near_overflow`, ours may have overflown.
    """
    in_range = np.isfinite(exact) & (np.abs(exact) <= float(limits.max))
    finite = in_range & np.logical_and.reduce([np.isfinite(a) for a in (native, *others)])
    if not (finite == in_range).all():
        finite &= np.isfinite(ours)
    finite &= np.isfinite(ours) | ~near_overflow
    if (wrong := finite & ~np.isfinite(ours)).any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        return f"at {at} is {ours[at]}; wants {exact[at]:.9g}"
    infinite = np.isinf(exact) & (native == exact)
    if (wrong := infinite & (ours != exact)).any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        return f"at {at} is {ours[at]}; wants {exact[at]}"
    norm = lambda a: float(np.linalg.norm(np.where(finite & np.isfinite(moved), a, 0.0)))  # noqa: E731
    with np.errstate(invalid="ignore", over="ignore"):
        error, of_native, of_arguments = norm(ours - exact), norm(native - exact), norm(moved - exact)
        allowed = OF_AUTODIFF * of_native + OF_ROUNDED_ARGUMENTS * of_arguments + OF_ROUNDING * rounding * norm(exact)
        allowed += max((norm(other - exact) for other in others), default=0.0)
    if np.isnan(error) or error > allowed + (float(limits.tiny) + unknown) * ours.size:
        far = np.where(finite, np.abs(ours - exact), 0.0)
        at = tuple(map(int, np.unravel_index(far.argmax(), far.shape)))
        return (
            f"is {error:.2e} from float64 in norm; wants at most {allowed:.2e}, and autodiff is {of_native:.2e} "
            f"from it. At {at} it is {ours[at]:.9g}; wants {exact[at]:.9g}, and autodiff gives {native[at]:.9g}"
        )
    return None


def _off_by_a_rounding(a, rounding):
    """Equal numbers stay equal, and zeros zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(np.isfinite(a), a * (1 + rounding * np.sin(1e6 * np.where(np.isfinite(a), a, 0.0) + 1)), a)


def _arrays(arrays):
    return [jnp.array(a) for a in arrays]  # copies: they may be donated


def _named(pair):
    results, gradients = pair
    named = {f"value {i}": a for i, a in enumerate(results)} | {f"gradient {i}": a for i, a in enumerate(gradients)}
    return {name: np.asarray(a, np.float64) for name, a in named.items()}


def cotangents_of(random: np.random.Generator, results: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    return [random.standard_normal(y.shape).astype(y.dtype) for y in results]
