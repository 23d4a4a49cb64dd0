"""The implementations that measurements found fastest for ops where no kernel of jaxbp is faster than XLA."""

import functools

from jaxbp.common import checks
from jaxbp.pairing import DefaultImplementation, Pair

XLA_ON_GPU = DefaultImplementation(gpu="xla")
"""The default for formulas that XLA fuses with the operations before and after them. A kernel would prevent the
fusion."""
AUTODIFF_ON_CPU = DefaultImplementation(gpu="xla", elsewhere="autodiff")
"""The default for ops whose gradient by autodiff is faster on a CPU. Autodiff keeps an exponential from the forward,
which the formula of the backward computes again."""
AUTODIFF_ON_GPU = DefaultImplementation(gpu="autodiff", older_gpu="autodiff")
"""The default for ops whose gradient by autodiff is faster on a GPU, if forward and backward are in one program."""
AUTODIFF_EVERYWHERE = DefaultImplementation(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""The default for ops whose gradient by autodiff is faster on both GPUs and CPUs."""

fused_pair = functools.partial(Pair, unsupported=checks.unsupported, default=XLA_ON_GPU, jit=True)
"""Make a `Pair` of formulas that XLA fuses with the operations before and after them. Under "pallas", its kernels
compute element-wise functions, or sums of element-wise functions."""
