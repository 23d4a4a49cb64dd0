"""Rotary embedding."""

import fractions
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from jaxbp.common import checks
from jaxbp.common.cases import BATCH, Argument, case_of, pair_entries
from jaxbp.common.checks import AnyArray
from jaxbp.common.numerics import upcast, wide
from jaxbp.ops._defaults import XLA_ON_GPU
from jaxbp.pairing import Axes, Implementation, Pair
from pallas_kernels.pointwise.elementwise import elementwise

AnyHeads = Float[AnyArray, "*batch head_dim"]
Heads = Float[Array, "*batch head_dim"]
AnyPositions = Int[AnyArray, "*positions"]


_PI = fractions.Fraction(31415926535897932384626433832795028841971, 10**40)


def _angles(positions, dtype, frequencies):
    """Return `positions * frequencies`, reduced to [-π, π] before it is rounded to `dtype`.

    A turn is an angle of 2π. Each frequency is rounded to 64 binary digits of a turn per position. Its product with an
    integer position, modulo one turn, is exact in integers of 64 bits, which are two words of 32 bits.
    """
    turns = [round(fractions.Fraction(f) / (2 * _PI) * 2**64) % 2**64 for f in frequencies]
    shape = (1,) * positions.ndim + (len(turns),)
    high, low = (np.array([word >> shift & _WORD for word in turns], np.uint32).reshape(shape) for shift in (32, 0))
    if positions.dtype.itemsize < 4:  # the least integer has no absolute value
        positions = positions.astype(jnp.int32)
    size = jnp.abs(positions)[..., None]
    p = size.astype(jnp.uint32)
    whole = p * high + _upper_word(p, low)
    if size.dtype.itemsize > 4:
        whole += (size >> 32).astype(jnp.uint32) * low
    whole = lax.bitcast_convert_type(whole, jnp.int32).astype(dtype)
    angles = (whole * 2.0**-32 + (p * low).astype(dtype) * 2.0**-64) * (2 * math.pi)
    return jnp.where((positions < 0)[..., None], -angles, angles)


_WORD, _HALF_WORD = 2**32 - 1, np.uint32(2**16 - 1)


def _upper_word(a, b):
    """Return the upper 32 bits of the product of two uint32 arrays."""
    bits = np.uint32(16)
    a_high, a_low, b_high, b_low = a >> bits, a & _HALF_WORD, b >> bits, b & _HALF_WORD
    left, right = a_high * b_low, a_low * b_high
    carry = ((a_low * b_low >> bits) + (left & _HALF_WORD) + (right & _HALF_WORD)) >> bits
    return a_high * b_high + (left >> bits) + (right >> bits) + carry


def _apply_to_pairs(function, x, interleaved):
    half = x.shape[-1] // 2
    axis, sizes = (-1, (half, 2)) if interleaved else (-2, (2, half))
    x1, x2 = jnp.moveaxis(x.reshape(*x.shape[:-1], *sizes), axis, 0)
    return jnp.stack(function(x1, x2), axis).reshape(x.shape)


def _rotate(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


def _rotated(x, angles, interleaved):
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return _apply_to_pairs(lambda x1, x2: _rotate(x1, x2, cos, sin), upcast(x), interleaved).astype(x.dtype)


def _forward(x, positions, *, frequencies, interleaved):
    return _rotated(x, _angles(positions, wide(x.dtype), frequencies), interleaved)


def _gradient(dy, positions, *, frequencies, interleaved):
    return _rotated(dy, -_angles(positions, wide(dy.dtype), frequencies), interleaved), None


def _gradient_kernel(dy, positions, *, frequencies, interleaved):
    angles = -_angles(positions, wide(dy.dtype), frequencies)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return _apply_to_pairs(lambda dy1, dy2: elementwise(_rotate, dy1, dy2, cos, sin), dy, interleaved), None


def _axes(dy, positions):
    def of(axis):
        return {"dy": axis} | ({"positions": axis} if positions.shape[axis] == dy.shape[axis] else {})

    leading = range(dy.ndim - 1)
    return Axes(of(0), others=[Axes(of(axis)) for axis in leading[1:]]) if leading else Axes({})


_ROTARY_EMBEDDING = Pair(
    _forward,
    {"xla": _gradient, "pallas": _gradient_kernel},
    residuals=lambda x, positions, **options: (positions,),
    name="rotary_embedding",
    unsupported=checks.unsupported,
    batch_axes=_axes,
    default=XLA_ON_GPU,
    sharded_like=lambda x, positions: x,
    jit=True,
)


def rotary_embedding(
    x: AnyHeads,
    positions: AnyPositions,
    *,
    base: float = 10_000.0,
    frequencies: Sequence[float] | AnyArray | None = None,
    interleaved: bool = False,
    implementation: Implementation = None,
) -> Heads:
    """Rotary embedding (RoPE), `y1 = x1 cos θ - x2 sin θ, y2 = x2 cos θ + x1 sin θ` for each pair of features (x1, x2).

    Pair i at position p has `θ = p frequencies_i`, by default with `frequencies_i = base ** (-2 i / head_dim)`.

    Args:
      x: queries or keys, with an even number of features per head.
      positions: integers that broadcast to the leading axes of x, with the same number of axes, for example
        `(1, length, 1)` for x of shape `(batch, length, heads, head_dim)`.
      frequencies: one number per pair, in radians per position, instead of `base`.
      interleaved: if False, pair i is features i and i + head_dim / 2, as in Llama. If True, pair i is features 2 i and
        2 i + 1, as in GPT-J.

    Returns:
      y, in x's dtype. Angles are as accurate for large positions as for small ones.

    Source: J. Su et al., "RoFormer", arXiv:2104.09864.
    """
    x, positions, options = _check("rotary_embedding", "x", x, positions, base, frequencies, interleaved)
    return _ROTARY_EMBEDDING(x, positions, **options, implementation=implementation)


def rotary_embedding_backward(
    dy: AnyHeads,
    positions: AnyPositions,
    *,
    base: float = 10_000.0,
    frequencies: Sequence[float] | AnyArray | None = None,
    interleaved: bool = False,
    implementation: Implementation = None,
) -> Heads:
    """Gradient of `rotary_embedding`: the rotation of dy by the opposite angles,
    `dx1 = dy1 cos θ + dy2 sin θ, dx2 = dy2 cos θ - dy1 sin θ`."""
    op = "rotary_embedding_backward"
    dy, positions, options = _check(op, "dy", dy, positions, base, frequencies, interleaved)
    # `vjp` of a linear op gets dy in place of x.
    return _ROTARY_EMBEDDING.vjp(dy, dy, positions, **options, implementation=implementation)


def _check(op, name, x, positions, base, frequencies, interleaved):
    (x,) = checks.floating(op, **{name: x})
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"{op}: {name} has shape {x.shape}; wants (..., head_dim), with an even head_dim")
    positions = checks.integers(op, "positions", positions, "; to scale positions, pass scaled frequencies")
    lead = x.shape[:-1]
    fits = positions.ndim == len(lead) and all(n in (1, m) for n, m in zip(positions.shape, lead, strict=True))
    if not fits:
        wanted = f"{len(lead)} axes that broadcast to {lead}, the leading axes of {name}"
        raise ValueError(f"{op}: positions has shape {positions.shape}; wants {wanted}")
    options = dict(
        frequencies=_frequencies(op, x.shape[-1], base, frequencies),
        interleaved=checks.boolean(op, "interleaved", interleaved),
    )
    return x, positions, options


def _frequencies(op, head_dim, base, frequencies):
    if frequencies is None:
        base = checks.number(op, "base", base, low=1.0)
        return tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2))
    if not isinstance(frequencies, Sequence | np.ndarray | Array) or len(frequencies) != head_dim // 2:
        raise ValueError(
            f"{op}: frequencies is {frequencies!r}; wants {head_dim // 2} numbers, one per pair of features"
        )
    numbers = tuple(checks.number(op, "frequencies", frequency) for frequency in frequencies)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{op}: frequencies is {frequencies!r}; wants finite numbers")
    return numbers


ENTRIES = pair_entries(
    rotary_embedding,
    case_of((2, 3, 2, 4), (2, 3, 2, 4), Argument((2, 3, 1), below=50)),
    {"heads": case_of((BATCH, 16, 4, 64), (BATCH, 16, 4, 64), Argument((1, 16, 1), below=2048))},
    takes=slice(1, None),
    like="relu",
)
