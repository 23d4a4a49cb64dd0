"""Convert the plain-text formulas of docstrings to LaTeX.

    dx[n] = Σ_k dy[n, k] w[k]²   ->   \\mathit{dx}_{n} = \\sum_{k} \\mathit{dy}_{n, k}\\,w_{k}^{2}

Text that is not a formula, such as a function call, stays code.
"""

import re

FUNCTIONS = {"exp", "ln", "tanh", "sin", "cos", "max", "min", "mean", "var", "sign", "softmax", "softplus", "logsumexp"}
NAMES = """
    activation alpha arr axes base batch bias ddof delta epsilon frequencies gate head_dim indices inv_rms inv_std
    label labels logits loss lower mean negative_slope onehot op predictions probabilities rate scale softcap table
    targets up upper var z_loss
"""
VARIABLES = {*NAMES.split(), *(f"d{name}" for name in NAMES.split())}
"""Text with any other word of more than two letters is not a formula."""
WORDS = {"where", "else", "over", "of", "and", "with"}
SIGNS = {
    "Σ": r"\sum ",
    "σ": r"\sigma ",
    "Φ": r"\Phi ",
    "φ": r"\varphi ",
    "θ": r"\theta ",
    "π": r"\pi ",
    "∂": r"\partial ",
    "·": r"\cdot ",
    "*": r"\cdot ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "±": r"\pm ",
    "½": r"\tfrac{1}{2}",
} | {sign: sign for sign in "=+-/<>|,"}
SCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ˣ₀₁₂₃ᵢⱼₖ", "0123456789-x0123ijk", strict=True)) | {"ᵀ": r"\top "}
TOKEN = re.compile(
    rf"""(?P<power>\ *\*\*\ *) | (?P<space>\ +) | (?P<root>√|sqrt\b) | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[A-Za-z]\u0302?[A-Za-z0-9]*(?:_[A-Za-z]{{2,}})*) | (?P<index>_\{{[^}}]*\}}|_[A-Za-z0-9]+)
    | (?P<raised>[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ˣᵀ]+) | (?P<lowered>[₀₁₂₃ᵢⱼₖ]+) | (?P<letter>[ΣσΦφθ∂½])
    | (?P<sign><=|>=|[{re.escape("".join(sign for sign in SIGNS if len(sign) == 1))}])
    | (?P<open>[(\[]) | (?P<close>[)\]])""",
    re.VERBOSE,
)
IS_FORMULA = re.compile(r" = |[Σσφ∂√²ᵀ]|\b(?:ln|exp) |\w /")
BEGIN_FACTOR = {"name", "number", "open", "root", "letter"}
END_FACTOR = {"name", "number", "raised", "lowered", "index", "close"}


def latex(formula: str) -> str | None:
    """Return the LaTeX of a formula, or None for other text."""
    tokens = [(match.lastgroup, match[0]) for match in TOKEN.finditer(formula)]
    if not IS_FORMULA.search(formula) or "".join(text for _, text in tokens) != formula:
        return None
    parts, brackets, last, is_braced = [], [], "", False
    for kind, text in tokens:
        if kind == "space":
            parts.append(" ")
            continue
        kind = "word" if text in WORDS else kind
        if parts and parts[-1] == " " and last in END_FACTOR and kind in BEGIN_FACTOR:
            parts[-1] = r"\,"
        if kind == "open":
            brackets.append((")", "}" if is_braced else ")") if text == "(" else ("]", "}"))
            part = "_{" if text == "[" else "{" if is_braced else "("
        elif kind == "close":
            wanted, part = brackets.pop() if brackets else ("", "")
            if text != wanted:
                return None
        elif (part := _symbol(kind, text)) is None:
            return None
        elif is_braced:
            part = f"{{{part}}}"
        parts.append(part)
        last, is_braced = kind, kind in ("root", "power")
    return None if brackets or is_braced else " ".join("".join(parts).split())


def _symbol(kind: str, text: str) -> str | None:
    if kind == "name":
        return _name(text)
    if kind in ("raised", "lowered"):
        return f"{'^' if kind == 'raised' else '_'}{{{''.join(SCRIPTS[c] for c in text)}}}"
    if kind == "index":
        inside = text[1:].strip("{}")
        return f"_{{{inside}}}" if len(inside) == 1 or "," in inside else rf"_{{\text{{{inside}}}}}"
    return {"word": rf"\text{{ {text} }}", "root": r"\sqrt", "power": "^", "number": text}.get(kind) or SIGNS[text]


def _name(text: str) -> str | None:
    if "\u0302" in text:
        return rf"\hat{{{text.replace(chr(0x302), '')}}}"
    if text in FUNCTIONS:
        return rf"\operatorname{{{text}}}"
    if len(text) == 1:
        return text
    if match := re.fullmatch(r"(d?[A-Za-z])(\d)", text):
        return f"{_name(match[1])}_{{{match[2]}}}"
    return rf"\mathit{{{text}}}".replace("_", r"\_") if len(text) == 2 or text in VARIABLES else None
