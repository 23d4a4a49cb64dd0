"""What `implementation=None` stands for where no kernel beats what XLA makes of a formula, from measurement."""

from jaxbp.pairing import Fastest

FUSED = Fastest(gpu="xla")
"""XLA fuses these formulas into their neighbours, which a kernel keeps it from."""
KEPT = Fastest(gpu="xla", elsewhere="autodiff")
"""On a CPU it is faster to keep an exponential from the forward, as JAX does, than to compute it again."""
KEPT_ON_GPU = Fastest(gpu="autodiff", older_gpu="autodiff")
"""On a GPU too, where both are in one program: from what the forward keeps, XLA makes its result and the gradient."""
KEPT_EVERYWHERE = Fastest(gpu="autodiff", older_gpu="autodiff", elsewhere="autodiff")
"""Both."""
