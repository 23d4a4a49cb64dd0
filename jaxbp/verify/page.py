"""An HTML page that compares implementations."""

import io
from collections.abc import Sequence
from html import escape

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 140
COLOURS = {"autodiff": "#8a8f98", "xla": "#3b82f6", "pallas": "#f0883e"}

_STYLE = """
:root { color-scheme: light dark; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --soft: #9ea7b3; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; background: Canvas;
  color: CanvasText; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p, summary { color: var(--soft); } p { margin: 0.25rem 0; }
.verdict { color: CanvasText; font-size: 1.1rem; border-left: 4px solid #3b82f6; padding-left: 0.75rem; }
figure { margin: 0.5rem 0; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; }
.figures figure { flex: 1 1 20rem; min-width: 0; max-width: 29rem; } svg { width: 100%; height: auto; display: block; }
pre { overflow-x: auto; font-size: 0.8rem; line-height: 1.2; }
"""


def page(title: str, verdict: Sequence[str], notes: Sequence[str], *parts: str) -> str:
    lines = "".join(f'<p class="verdict">{escape(line)}</p>\n' for line in verdict)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{lines}<p>{escape("; ".join(notes))}</p>
{"".join(parts)}
</body>
</html>
"""


def section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}</section>\n"


def printed(*parts: RenderableType) -> str:
    console = Console(file=io.StringIO(), record=True, width=WIDTH)
    show(console, *parts)
    return console.export_html(theme=MONOKAI, inline_styles=True, code_format="<pre>{code}</pre>\n")


def show(console: Console, *parts: RenderableType) -> None:
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


def colour(implementation: str | None) -> str:
    return COLOURS.get(implementation, "#a371f7")
