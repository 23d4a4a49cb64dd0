"""jaxbp: pure functions paired with hand-written backward passes, as Pallas kernels, as formulas, or as JAX's own.

Its names, and the modules that they come from, are listed in `__init__.pyi`. Each is imported when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
