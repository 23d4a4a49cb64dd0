"""Pair a function with a hand-written backward, and choose among its implementations (docs/api.md)."""

from jaxbp.pairing.pair import IMPLEMENTATIONS as IMPLEMENTATIONS
from jaxbp.pairing.pair import DefaultImplementation as DefaultImplementation
from jaxbp.pairing.pair import Implementation as Implementation
from jaxbp.pairing.pair import Op as Op
from jaxbp.pairing.pair import Pair as Pair
from jaxbp.pairing.pair import differentiable as differentiable
from jaxbp.pairing.pair import given_arguments as given_arguments
from jaxbp.pairing.pair import name_of as name_of
from jaxbp.pairing.pair import per_implementation as per_implementation
from jaxbp.pairing.pair import saving_arguments as saving_arguments
from jaxbp.pairing.pair import transpose as transpose
