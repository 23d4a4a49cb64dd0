"""Ops that XLA fuses well: their default implementations, and backwards written once for XLA and for kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxbp.common import checks, numerics
from jaxbp.pairing import CastOnce, DefaultImplementation, Pair
from pallas_kernels.pointwise.elementwise import elementwise
from pallas_kernels.pointwise.reductions import sum_over

XLA_ON_GPU = DefaultImplementation(gpu="xla")
"""For formulas that XLA fuses with the operations around them, which a kernel would prevent."""
AUTODIFF_ON_CPU = DefaultImplementation(gpu="xla", elsewhere="autodiff")
"""For ops whose autodiff is faster on a CPU, because it keeps an exponential."""
AUTODIFF_ON_GPU = DefaultImplementation(gpu="autodiff", older_gpu="autodiff")
"""For ops whose autodiff is faster on a GPU, if one program has forward and backward."""
AUTODIFF_EVERYWHERE = DefaultImplementation(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")


def in_float32(default: DefaultImplementation) -> Callable[..., DefaultImplementation]:
    """Return a function of an op's arguments that returns `default`, but the formula if they are in half precision.

    `default` was measured in float32. In half precision, autodiff may round gradients more often than the formula.
    """

    def choose(*arrays, **options):
        dtype = jax.tree.leaves(arrays)[0].dtype
        return default if dtype == numerics.wide(dtype) else XLA_ON_GPU

    return choose


def kernel_in_half(*arrays: Any, **options: Any) -> DefaultImplementation:
    """Return the kernel as the default on a GPU in half precision, else the formula. The kernel is for ops whose
    formula takes longer than its reads and writes in half precision."""
    dtype = jax.tree.leaves(arrays)[0].dtype
    return XLA_ON_GPU if dtype == numerics.wide(dtype) else DefaultImplementation()


fused_pair = functools.partial(Pair, unsupported=checks.unsupported, default=XLA_ON_GPU, jit=True)


def xla_and_pallas(backward: Callable) -> dict[str, Callable]:
    """Return the implementations "xla" and "pallas" of `backward(elementwise, sum_over, dy, *saved, **options)`. The
    first two arguments are the kernels of these names, or the functions of `numerics`."""
    return {
        "xla": CastOnce(functools.partial(backward, numerics.elementwise, numerics.sum_over)),
        "pallas": functools.partial(backward, elementwise, sum_over),
    }
