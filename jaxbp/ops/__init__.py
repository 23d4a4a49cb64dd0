"""The library of ops, a file a family. `jaxbp.catalogue` lists them all."""

from typing import Any

__all__ = ["CATALOGUE", "Argument", "Case", "Entry"]


def __getattr__(name: str) -> Any:
    # The catalogue imports every op, so it is loaded when it is asked for.
    if name in __all__:
        import jaxbp.catalogue

        return getattr(jaxbp.catalogue, name)
    raise AttributeError(f"module 'jaxbp.ops' has no attribute {name!r}")
