"""The table of all ops, with small cases for checks and realistic cases for timing."""

from jaxbp.catalogue.entries import CATALOGUE as CATALOGUE
from jaxbp.catalogue.schema import BATCH as BATCH
from jaxbp.catalogue.schema import Argument as Argument
from jaxbp.catalogue.schema import AutomatonArgument as AutomatonArgument
from jaxbp.catalogue.schema import Case as Case
from jaxbp.catalogue.schema import Entry as Entry
from jaxbp.catalogue.schema import FixedArgument as FixedArgument
from jaxbp.catalogue.schema import TreeWiresArgument as TreeWiresArgument
from jaxbp.catalogue.schema import WiresArgument as WiresArgument
