"""The book as a site: `sphinx-build -W docs build/book`, with the extra `docs` installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import formula_sheet

import jaxbp

project = "jaxbp"
author = "the authors of jaxbp"
version = release = jaxbp.__version__
extensions = ["myst_parser"]
exclude_patterns = []
html_theme = "furo"
html_title = f"jaxbp {version}"
html_copy_source = False
myst_heading_anchors = 3


def setup(app):
    app.connect("builder-inited", lambda app: formula_sheet.write(Path(app.srcdir) / "formulas"))
