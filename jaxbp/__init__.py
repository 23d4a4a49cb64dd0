"""jaxbp: pure functions paired with hand-written backward passes, as Pallas kernels, as formulas, or as JAX's own.

Its names, and the modules that they come from, are listed in `__init__.pyi`. Each is imported when it is first used.
"""

import sys

import lazy_loader

__version__ = "0.1.0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name in __all__:
        return _imported(name)
    # With both keywords Python asks "Did you mean: ...?"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
