"""Check whether values have annotated types."""

import reprlib
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Built = TypeVar("Built")


def build(kind: Callable[..., Built], fields: Mapping[str, Any]) -> Built:
    """Return `kind(**fields)`. Raise TypeError if a field is missing, unknown, or not of its annotated type."""
    for name, annotation in get_type_hints(kind).items():
        if name in fields and not matches(fields[name], annotation):
            raise TypeError(f"{name} is {reprlib.repr(fields[name])}; wants {described(annotation)}")
    return kind(**fields)


def matches(value: Any, annotation: Any) -> bool:
    """Return whether a value has the annotated type: a class, `Any`, a `Literal`, a union, a list, or a dict.

    An integer is also a `float`. A boolean is no number.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return matches(value, args[0])
    if origin is Literal:
        return value in args
    if origin in (Union, types.UnionType):
        return any(matches(value, each) for each in args)
    if origin is list:
        return isinstance(value, list) and all(matches(item, args[0]) for item in value)
    if origin is dict:
        key, content = args
        return isinstance(value, dict) and all(matches(k, key) and matches(v, content) for k, v in value.items())
    if annotation in (int, float) and isinstance(value, bool):
        return False
    return annotation is Any or isinstance(value, (int, float) if annotation is float else annotation)


def described(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(described, get_args(annotation)))
    if annotation is types.NoneType:
        return "None"
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
