import numpy as np

from jaxbp.verify.derivatives import scale_of

PERCENT = 0.1


def cause(a: np.ndarray, e: np.ndarray, wrong: np.ndarray) -> str:
    """Return how the elements of `a` in the mask `wrong` differ from the expected `e`, or "" if unknown."""
    finite = np.isfinite(a) & np.isfinite(e)
    if not finite[wrong].all():
        return "not finite" if not np.isfinite(a[wrong]).all() else ""
    close = lambda x, y: bool(np.allclose(x, y, rtol=0.02, atol=0.02 * scale_of(e)))  # noqa: E731
    a, e = np.where(finite, a, 0.0), np.where(finite, e, 0.0)
    some = "" if wrong[e != 0].all() else ", in some elements"
    if not a[wrong].any():
        return f"zero{some.replace(',', '')}"
    if (wrong.sum() > 1 or wrong.size == 1) and (factor := _factor(a[wrong], e[wrong])):
        return factor + some
    if a.ndim > 1 and a.shape[-1] == a.shape[-2] and close(np.swapaxes(a, -1, -2), e):
        return "transposed"
    for axis in range(a.ndim):
        if a.shape[axis] > 1 and not close(a, e):
            if close(np.flip(a, axis), e):
                return "flipped"
            if close(np.roll(a, 1, axis), e):
                return "shifted by one"
    if a.ndim > 1 and not close(a, e) and close(np.flip(a, (-1, -2)), e):
        return "flipped"
    if a.size > 2 and not close(a, e) and close(np.sort(a, axis=None), np.sort(e, axis=None)):
        return "the right values in the wrong order"
    off = (a - e)[wrong]
    if wrong.all() and a.size > 1 and np.allclose(off, off.mean(), rtol=0.02):
        return "off by a constant"
    return "" if wrong.all() else f"wrong in {int(wrong.sum())} of {wrong.size} elements"


def _factor(a, e):
    size = float(e @ e)
    factor = float(a @ e) / size if size else 0.0
    off = abs(factor - 1)
    if not factor or np.abs(a - factor * e).max() > 0.05 * min(1.0, off) * np.abs(e).max():
        return ""
    if abs(factor + 1) < 0.02:
        return "the sign is wrong"
    if off < PERCENT:
        return f"{100 * off:.2g}% too {'large' if factor > 1 else 'small'}"
    return f"{factor:.3g} times what it should be"
