"""Sphinx configuration of the book. Build the site with `sphinx-build -W docs build/book` and the extra `docs`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import formula_sheet

import jaxbp

project = "jaxbp"
author = copyright = "the authors of jaxbp"
version = release = jaxbp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "mathml"]
exclude_patterns = []
html_theme = "furo"
html_title = f"jaxbp {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_math_renderer = "mathml"
myst_heading_anchors = 3
myst_enable_extensions = ["deflist", "dollarmath"]
default_role = "code"
add_module_names = False
toc_object_entries = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"


def setup(app):
    app.connect("builder-inited", lambda app: formula_sheet.write(Path(app.srcdir) / "formulas"))
