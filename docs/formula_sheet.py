"""Build the formula sheet from the docstrings of the ops, one page per family of ops."""

import inspect
import itertools
import re
import shutil
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import typeset

from jaxbp.catalogue import CATALOGUE, Entry

HEADINGS = ("Args:", "Returns:", "Raises:", "Example:", "Source")


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    families: dict[str, list[Entry]] = {}
    for entry in CATALOGUE:
        families.setdefault(entry.function.__module__, []).append(entry)
    return {module.rpartition(".")[2]: _page(sys.modules[module], entries) for module, entries in families.items()}


def _page(module: typing.Any, entries: list[Entry]) -> str:
    first, *text = inspect.getdoc(module).split("\n\n")
    sentence = " ".join(first.split())
    title = re.split(r":|\. |, (?:each|which)\b", sentence)[0].rstrip(".")
    text = text if sentence.rstrip(".") == title else [sentence, *text]
    source = module.__name__.replace(".", "/") + ".py"
    parts = [f"# {title}", *map(with_math, text), f"From the docstrings in `{source}`."]
    return "\n\n".join([*parts, *(part for entry in entries for part in _entry(entry))]) + "\n"


def _entry(entry: Entry) -> Iterator[str]:
    yield f"## {entry.name}"
    signature = inspect.signature(entry.function)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    arguments = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    yield f"```{{py:function}} {entry.name}{arguments}\n:module: {entry.function.__module__}\n```"
    paragraphs = inspect.getdoc(entry.function).split("\n\n")
    yield from map(with_math, itertools.takewhile(lambda text: not text.startswith(HEADINGS), paragraphs))
    yield "\n".join(_shapes(entry.function))
    if entry.kernel_dtypes:
        yield f"Kernels take {', '.join(entry.kernel_dtypes)}."
    yield from (text for text in paragraphs if text.startswith("Source"))


def with_math(paragraph: str) -> str:
    if paragraph.startswith("    "):
        parts = [part.strip() for part in re.split(r"\n|(?<=,)\s{2,}", paragraph)]
        formulas = [(typeset.latex(part.rstrip(",.")), part) for part in parts]
        if not all(formula for formula, _ in formulas):
            return paragraph
        return "\n\n".join(f"$$\n{formula}{part[len(part.rstrip(',.')) :]}\n$$" for formula, part in formulas)

    def inline(match):
        formula = typeset.latex(" ".join(match[1].split()))
        return match[0] if formula is None else f"${formula}$"

    return re.sub(r"`([^`]+)`", inline, paragraph)


def _shapes(function: Callable) -> Iterator[str]:
    for name, annotation in typing.get_type_hints(function).items():
        if shapes := " or ".join(_alternatives(annotation)):
            yield f"- {'returns' if name == 'return' else f'`{name}`'}: {shapes}"


def _alternatives(annotation: typing.Any) -> list[str]:
    if hasattr(annotation, "dim_str"):
        return [f"`({', '.join(annotation.dim_str.split())})`"]
    parts = [alternatives for part in typing.get_args(annotation) if (alternatives := _alternatives(part))]
    if parts and typing.get_origin(annotation) is tuple:
        return [", ".join(map(" or ".join, parts))]
    return list(dict.fromkeys(itertools.chain.from_iterable(parts)))


if __name__ == "__main__":
    print("\n".join(pages().values()))
