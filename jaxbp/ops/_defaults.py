"""Default implementations of ops where no kernel of jaxbp is faster than XLA."""

import functools

from jaxbp.common import checks
from jaxbp.pairing import DefaultImplementation, Pair

XLA_ON_GPU = DefaultImplementation(gpu="xla")
"""For formulas that XLA fuses with the operations around them, which a kernel would prevent."""
AUTODIFF_ON_CPU = DefaultImplementation(gpu="xla", elsewhere="autodiff")
"""For ops whose autodiff is faster on a CPU, because it keeps an exponential."""
AUTODIFF_ON_GPU = DefaultImplementation(gpu="autodiff", older_gpu="autodiff")
"""For ops whose autodiff is faster on a GPU, if one program has forward and backward."""
AUTODIFF_EVERYWHERE = DefaultImplementation(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")

fused_pair = functools.partial(Pair, unsupported=checks.unsupported, default=XLA_ON_GPU, jit=True)
