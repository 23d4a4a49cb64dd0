"""LeNet, a language model, and networks of logic gates."""

from jaxbp.logic.networks.logic_automaton import LogicAutomaton as LogicAutomaton
from jaxbp.logic.networks.logic_conv import LogicConv2d as LogicConv2d
from jaxbp.logic.networks.logic_conv import LogicConvNetwork as LogicConvNetwork
from jaxbp.logic.networks.logic_conv import LogicConvolution as LogicConvolution
from jaxbp.logic.networks.logic_conv import image_thermometer as image_thermometer
from jaxbp.logic.networks.logic_network import LogicLayer as LogicLayer
from jaxbp.logic.networks.logic_network import LogicNetwork as LogicNetwork
from jaxbp.logic.networks.logic_network import thermometer as thermometer
from jaxbp.logic.networks.torch_models import from_difflogic as from_difflogic
from jaxbp.logic.networks.torch_models import from_torchlogix as from_torchlogix
from jaxbp.logic.networks.torch_models import to_difflogic as to_difflogic
from jaxbp.logic.networks.torch_models import to_torchlogix as to_torchlogix
from jaxbp.nn.gpt import GPT as GPT
from jaxbp.nn.gpt import GPT_SIZES as GPT_SIZES
from jaxbp.nn.gpt import GPTBlock as GPTBlock
from jaxbp.nn.gpt import KeyValueCache as KeyValueCache
from jaxbp.nn.lenet import LeNet as LeNet
from jaxbp.nn.lenet import MemoryRow as MemoryRow
from jaxbp.nn.lenet import lenet_memory_table as lenet_memory_table
from jaxbp.nn.lenet import lenet_saved_tensors as lenet_saved_tensors
