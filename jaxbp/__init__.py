"""jaxbp: pure functions paired with backward passes, which are Pallas kernels, formulas, or JAX's autodiff.

`__init__.pyi` lists the public names. Each module is imported at its first use.
"""

import sys

import lazy_loader

__version__ = "0.1.0"

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name in __all__:
        return _imported(name)
    # With both keywords, Python suggests similar names.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
