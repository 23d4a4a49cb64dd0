"""Measured defaults of `implementation=None` for ops where no kernel of jaxbp is faster than XLA."""

import functools

from jaxbp.common import checks
from jaxbp.pairing import Fastest, Pair

FUSED = Fastest(gpu="xla")
"""For formulas that XLA fuses into their neighbors. A kernel would prevent the fusion."""
KEPT = Fastest(gpu="xla", elsewhere="autodiff")
"""For ops whose autodiff gradient is faster on a CPU. It keeps an exponential that the formula would compute twice."""
KEPT_ON_GPU = Fastest(gpu="autodiff", older_gpu="autodiff")
"""For ops whose autodiff gradient is faster on a GPU if one program has forward and backward."""
KEPT_EVERYWHERE = Fastest(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""For ops whose autodiff gradient is faster on GPUs and CPUs."""

fused_pair = functools.partial(Pair, unsupported=checks.unsupported, fastest=FUSED, jit=True)
"""A `Pair` of formulas that XLA fuses into their neighbors. Its kernels are element-wise or sum element-wise terms."""
