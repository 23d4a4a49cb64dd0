"""The book as a site: `sphinx-build -W docs build/book`, with the extra `docs` installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import formula_sheet

import jaxbp

project = "jaxbp"
author = "the authors of jaxbp"
version = release = jaxbp.__version__
# mathml is ours, beside this file.
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "mathml"]
exclude_patterns = []
html_theme = "furo"
html_title = f"jaxbp {version}"
html_copy_source = False
html_math_renderer = "mathml"
myst_heading_anchors = 3
myst_enable_extensions = ["deflist", "dollarmath"]
# Single backquotes in docstrings are code.
default_role = "code"
add_module_names = False
toc_object_entries = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"


def setup(app):
    app.connect("builder-inited", lambda app: formula_sheet.write(Path(app.srcdir) / "formulas"))
