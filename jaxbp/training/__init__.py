"""Optimizer updates, mixed precision, and rematerialization."""

from jaxbp.training import optimizers as optimizers
from jaxbp.training import precision as precision
