"""Sphinx extension that renders formulas as MathML, which browsers draw without a script or a request."""

import re

from docutils.nodes import Element, SkipNode, math_block
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

ACCENT_WITH_INDEX = re.compile(r"(\\(?:hat|bar|tilde|dot|vec)\{[^{}]*\})_")
WORD = re.compile(r"\\(?:operatorname|text)\{[^{}]*\}")


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_visit, None), (_visit, None))


def _visit(translator: HTML5Translator, node: Element) -> None:
    """Write a formula as MathML. If it does not parse, write code and warn, which fails the build."""
    tex, is_block = node.astext(), isinstance(node, math_block)
    try:
        formula = tex2mathml(_for_docutils(tex.strip()), as_block=is_block)
    except MathError as error:
        logging.getLogger(__name__).warning("no MathML for %s: %s", tex, error)
        formula = f"<code>{tex}</code>"
    translator.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise SkipNode


def _for_docutils(tex: str) -> str:
    """Avoid two faults of docutils: subscripts below accented letters, and the printed backslash of `\\_`."""
    tex = ACCENT_WITH_INDEX.sub(r"\1{}_", tex)
    return WORD.sub(lambda word: word[0].replace(r"\_", "_"), tex)
