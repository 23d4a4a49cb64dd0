"""Pair a function with a hand-written backward, and choose among its implementations (docs/api.md).

A call passes through these layers, and a gradient through them again, in this order:

    op    `Op` chooses the implementation, also by platform (`None`), and reports what is unsupported
    mesh  on a mesh with explicit axes, XLA chooses the sharding within the op
    pair  `reverse_mode_only` lets forward mode raise an error that names the op
    pair  `Pair`, a `jax.custom_vjp`: the forward returns the result and the residuals, named for `jax.checkpoint`
    pair  `mapped_axis_first` moves the axis of `jax.vmap` to the front of the results
    pair  the backward computes the gradients, whose shapes and dtypes are checked against the arguments
    op    `differentiable` gives a kernel the derivatives of its formula, by a `jax.custom_jvp`
    mesh  `over_devices` runs a kernel on each device of a mesh with a part of the examples
"""

from jaxbp.pairing.gradients import CastOnce as CastOnce
from jaxbp.pairing.gradients import by_autodiff as by_autodiff
from jaxbp.pairing.gradients import in_dtypes_of as in_dtypes_of
from jaxbp.pairing.gradients import summed_like as summed_like
from jaxbp.pairing.mesh import Axes as Axes
from jaxbp.pairing.mesh import BatchAxes as BatchAxes
from jaxbp.pairing.mesh import batched as batched
from jaxbp.pairing.op import IMPLEMENTATIONS as IMPLEMENTATIONS
from jaxbp.pairing.op import DefaultImplementation as DefaultImplementation
from jaxbp.pairing.op import Implementation as Implementation
from jaxbp.pairing.op import Op as Op
from jaxbp.pairing.op import differentiable as differentiable
from jaxbp.pairing.op import formula_and_kernel as formula_and_kernel
from jaxbp.pairing.op import name_of as name_of
from jaxbp.pairing.op import per_implementation as per_implementation
from jaxbp.pairing.pair import Pair as Pair
from jaxbp.pairing.pair import cast_once as cast_once
from jaxbp.pairing.pair import given_arguments as given_arguments
from jaxbp.pairing.pair import saving_arguments as saving_arguments
from jaxbp.pairing.pair import transpose as transpose
