"""Formulas, which docstrings have as plain text, as LaTeX.

    dx[n] = Σ_k dy[n, k] w[k]²   ->   \\mathit{dx}_{n} = \\sum_{k} \\mathit{dy}_{n, k}\\,w_{k}^{2}

What is not wholly a formula, say a call of a function, has no LaTeX and stays code.
"""

import re

FUNCTIONS = {"exp", "ln", "tanh", "sin", "cos", "max", "min", "mean", "var", "sign", "softmax", "softplus", "logsumexp"}
NAMES = """
    alpha arr axes batch bias ddof delta eps epsilon inv_rms inv_std label labels logits loss lower mean negative_slope
    onehot op predictions probabilities rate scale targets upper var
"""
VARIABLES = {*NAMES.split(), *(f"d{name}" for name in NAMES.split())}
"""Names of more than two letters that are variables. Any other word makes a text no formula."""
WORDS = {"where", "else", "over", "of", "and", "with"}
SIGNS = {
    "Σ": r"\sum ",
    "σ": r"\sigma ",
    "Φ": r"\Phi ",
    "φ": r"\varphi ",
    "π": r"\pi ",
    "∂": r"\partial ",
    "·": r"\cdot ",
    "*": r"\cdot ",
    "<=": r"\le ",
    ">=": r"\ge ",
    "±": r"\pm ",
    "½": r"\tfrac{1}{2}",
} | {sign: sign for sign in "=+-/<>|,"}
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ˣ", "0123456789-x", strict=True)) | {"ᵀ": r"\top "}
LOWERED = dict(zip("₀₁₂₃ᵢⱼₖ", "0123ijk", strict=True))
TOKEN = re.compile(
    rf"""(?P<space>\ +) | (?P<name>[A-Za-z]\u0302?[A-Za-z0-9]*(?:_[A-Za-z]{{2,}})*) | (?P<number>\d+(?:\.\d+)?)
    | (?P<raised>[{"".join(RAISED)}]+) | (?P<lowered>[{"".join(LOWERED)}]+) | (?P<index>_\{{[^}}]*\}}|_[A-Za-z0-9]+)
    | (?P<power>\*\*) | (?P<sign><=|>=|[{re.escape("".join(sign for sign in SIGNS if len(sign) == 1))}])
    | (?P<root>√) | (?P<open>[(\[]) | (?P<close>[)\]])""",
    re.VERBOSE,
)
IS_FORMULA = re.compile(r" = |[Σσφ∂√²ᵀ]|\b(?:ln|exp) |\w /")


def latex(formula: str) -> str | None:
    """The LaTeX of a formula in plain text, or None if it is something else."""
    if not IS_FORMULA.search(formula):
        return None
    tokens, position = [], 0
    while position < len(formula):
        if (match := TOKEN.match(formula, position)) is None:
            return None
        tokens.append((match.lastgroup, match[0]))
        position = match.end()
    try:
        result, rest = _expression(tokens)
    except ValueError:
        return None
    return None if rest else " ".join(result.split())


def _expression(tokens: list[tuple[str, str]], closing: str = "") -> tuple[str, list]:
    """Translates up to the closing bracket `closing`, or to the end."""
    parts: list[str] = []
    while tokens:
        (kind, text), tokens = tokens[0], tokens[1:]
        if kind == "close":
            if text != closing:
                raise ValueError(text)
            return "".join(parts), tokens
        if kind == "space":
            parts.append(_space(parts, tokens))
        elif kind == "open" and text == "[":
            inside, tokens = _expression(tokens, "]")
            parts.append(f"_{{{inside}}}")
        elif kind == "open":
            inside, tokens = _expression(tokens, ")")
            parts.append(f"({inside})")
        elif kind == "root" or (kind, text) == ("name", "sqrt") or kind == "power":
            inside, tokens = _operand(tokens)
            parts.append(f"^{{{inside}}}" if kind == "power" else rf"\sqrt{{{inside}}}")
        else:
            parts.append(_symbol(kind, text))
    if closing:
        raise ValueError(closing)
    return "".join(parts), tokens


def _operand(tokens: list[tuple[str, str]]) -> tuple[str, list]:
    """What a root or a power takes: what is in brackets, or the next number or name."""
    while tokens and tokens[0][0] == "space":
        tokens = tokens[1:]
    if not tokens:
        raise ValueError("nothing")
    (kind, text), tokens = tokens[0], tokens[1:]
    return _expression(tokens, ")") if text == "(" else (_symbol(kind, text), tokens)


def _space(parts: list[str], tokens: list[tuple[str, str]]) -> str:
    """Between two factors it is a product; beside signs and words LaTeX spaces by itself."""
    if (
        not parts
        or not tokens
        or tokens[0][0] in ("power", "close")
        or tokens[0][1] in WORDS
        or parts[-1].endswith(("^{", ","))
    ):
        return " "
    after_sign = parts[-1].strip() in {sign.strip() for sign in SIGNS.values()} or parts[-1].startswith(r"\text")
    before_sign = tokens[0][0] == "sign" and tokens[0][1] not in "ΣσΦφ∂½"
    return " " if after_sign or before_sign else r"\,"


def _symbol(kind: str, text: str) -> str:
    if kind == "name":
        return _name(text)
    if kind == "raised":
        return "^{" + "".join(RAISED[c] for c in text) + "}"
    if kind == "lowered":
        return "_{" + "".join(LOWERED[c] for c in text) + "}"
    if kind == "index":
        inside = text[1:].strip("{}")
        return f"_{{{inside}}}" if len(inside) == 1 or "," in inside else rf"_{{\text{{{inside}}}}}"
    if kind == "sign":
        return SIGNS[text]
    if kind == "number":
        return text
    raise ValueError(text)


def _name(text: str) -> str:
    if "\u0302" in text:
        return rf"\hat{{{text.replace(chr(0x302), '')}}}"
    if text in WORDS:
        return rf"\text{{ {text} }}"
    if text in FUNCTIONS:
        return rf"\operatorname{{{text}}}"
    if len(text) == 1:
        return text
    if match := re.fullmatch(r"(d?[A-Za-z])(\d)", text):
        return f"{_name(match[1])}_{{{match[2]}}}"
    if len(text) == 2 or text in VARIABLES:
        return rf"\mathit{{{text}}}".replace("_", r"\_")
    raise ValueError(text)
