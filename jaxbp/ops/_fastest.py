"""What `implementation=None` stands for where no kernel of ours is faster than XLA, from measurement."""

from jaxbp.pairing import Fastest

FUSED = Fastest(gpu="xla")
"""Formulas that XLA fuses into their neighbours, which a kernel would prevent."""
KEPT = Fastest(gpu="xla", elsewhere="autodiff")
"""On a CPU JAX's own gradient is faster: it keeps an exponential of the forward, which ours computes twice."""
KEPT_ON_GPU = Fastest(gpu="autodiff", older_gpu="autodiff")
"""On a GPU JAX's own gradient is faster, where forward and backward are in one program: both read what it keeps."""
KEPT_EVERYWHERE = Fastest(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""JAX's own gradient is faster on GPUs and CPUs."""
