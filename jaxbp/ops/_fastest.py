"""What `implementation=None` stands for where no kernel of ours is faster than XLA, from measurement."""

import functools

from jaxbp.ops import _checks
from jaxbp.pairing import Fastest, Pair

FUSED = Fastest(gpu="xla")
"""Formulas that XLA fuses into their neighbours, which a kernel would prevent."""
KEPT = Fastest(gpu="xla", elsewhere="autodiff")
"""On a CPU JAX's own gradient is faster: it keeps an exponential of the forward, which ours computes twice."""
KEPT_ON_GPU = Fastest(gpu="autodiff", older_gpu="autodiff")
"""On a GPU JAX's own gradient is faster, where forward and backward are in one program: both read what it keeps."""
KEPT_EVERYWHERE = Fastest(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""JAX's own gradient is faster on GPUs and CPUs."""

fused_pair = functools.partial(Pair, unsupported=_checks.unsupported, fastest=FUSED, jit=True)
"""A `Pair` of formulas that XLA fuses into their neighbours. Its kernels are element-wise, or sum such terms."""
