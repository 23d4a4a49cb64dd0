"""The table of all ops, with small cases for checks and realistic cases for timing."""

from jaxbp.catalogue.entries import CATALOGUE as CATALOGUE
from jaxbp.common.cases import BATCH as BATCH
from jaxbp.common.cases import Argument as Argument
from jaxbp.common.cases import Case as Case
from jaxbp.common.cases import Entry as Entry
from jaxbp.common.cases import FixedArgument as FixedArgument
from jaxbp.logic.wires.automaton_wires import AutomatonArgument as AutomatonArgument
from jaxbp.logic.wires.learned_wires import LearnedWiresArgument as LearnedWiresArgument
from jaxbp.logic.wires.tree_wires import TreeWiresArgument as TreeWiresArgument
from jaxbp.logic.wires.wires import WiresArgument as WiresArgument
