"""The library of ops, a file a family, and the table that lists them."""

from jaxbp.ops.catalogue import CATALOGUE, Argument, Case, Entry

__all__ = ["CATALOGUE", "Argument", "Case", "Entry"]
