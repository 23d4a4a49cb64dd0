"""An extension of Sphinx: formulas as MathML, which browsers draw without a script and without asking for one."""

from docutils.nodes import Element, SkipNode, math_block
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_visit, None), (_visit, None))


def _visit(translator: HTML5Translator, node: Element) -> None:
    """Writes the formula; for one that does not parse, code and a warning, which fails the build."""
    tex, is_block = node.astext(), isinstance(node, math_block)
    try:
        formula = tex2mathml(tex.strip(), as_block=is_block)
    except MathError as error:
        logging.getLogger(__name__).warning("no MathML for %s: %s", tex, error)
        formula = f"<code>{tex}</code>"
    translator.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise SkipNode
