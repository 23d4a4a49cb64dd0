"""An extension of Sphinx: formulas as MathML, which browsers draw without a script and without asking for one."""

from docutils.nodes import Element, SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))


def _visit_inline(translator: HTML5Translator, node: Element) -> None:
    translator.body.append(mathml(node.astext(), block=False))
    raise SkipNode


def _visit_block(translator: HTML5Translator, node: Element) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), block=True)}</div>')
    raise SkipNode


def mathml(tex: str, block: bool) -> str:
    """The formula for a browser; with what does not parse a warning, which fails the build."""
    try:
        return tex2mathml(tex.strip(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("no MathML for %s: %s", tex, error)
        return f"<code>{tex}</code>"
