"""Changes of shape."""

import math

from jax import Array
from jaxtyping import Shaped

from jaxbp.common import checks
from jaxbp.common.checks import AnyArray


def flatten(x: Shaped[AnyArray, "batch ..."]) -> Shaped[Array, "batch features"]:
    """Reshape `(batch, ...) -> (batch, features)`, in row-major order. JAX's autodiff computes the backward."""
    x = checks.array("flatten", "x", x)
    if x.ndim == 0:
        raise ValueError("flatten: x has shape (); wants (batch, ...)")
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
