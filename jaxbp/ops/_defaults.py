"""The implementations that measurements found fastest for ops where no kernel of jaxbp is faster than XLA."""

import functools

from jaxbp.common import checks
from jaxbp.pairing import DefaultImplementation, Pair

XLA_ON_GPU = DefaultImplementation(gpu="xla")
"""For formulas that XLA fuses into their neighbors. A kernel would prevent the fusion."""
AUTODIFF_ON_CPU = DefaultImplementation(gpu="xla", elsewhere="autodiff")
"""For ops whose autodiff gradient is faster on a CPU. Autodiff keeps an exponential that the formula computes again."""
AUTODIFF_ON_GPU = DefaultImplementation(gpu="autodiff", older_gpu="autodiff")
"""For ops whose autodiff gradient is faster on a GPU if forward and backward are in one program."""
AUTODIFF_EVERYWHERE = DefaultImplementation(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""For ops whose autodiff gradient is faster on GPUs and CPUs."""

fused_pair = functools.partial(Pair, unsupported=checks.unsupported, default=XLA_ON_GPU, jit=True)
"""A `Pair` of formulas that XLA fuses with neighboring operations. Its kernels compute element-wise functions or sums
of them."""
