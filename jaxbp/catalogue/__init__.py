"""The one table of ops."""

from jaxbp.catalogue.entries import CATALOGUE
from jaxbp.catalogue.schema import (
    BATCH,
    Argument,
    AutomatonArgument,
    Case,
    Entry,
    FixedArgument,
    TreeWiresArgument,
    WiresArgument,
)

__all__ = [
    "BATCH",
    "CATALOGUE",
    "Argument",
    "AutomatonArgument",
    "Case",
    "Entry",
    "FixedArgument",
    "TreeWiresArgument",
    "WiresArgument",
]
