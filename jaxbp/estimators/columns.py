"""Data frames as matrices of numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

MAX_CATEGORIES = 255


def is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def fit_categories(op: str, X: Any) -> dict[int, list]:
    """Return the categories of each column of a pandas or polars frame that does not contain numbers or booleans."""
    categories = {}
    for j, name in enumerate(X.columns):
        if not _is_numeric(_column(X, j)):
            found = sorted({value for value, gone in _with_missing(_column(X, j)) if not gone}, key=_order)
            if len(found) > MAX_CATEGORIES:
                raise ValueError(
                    f"{op}: the column {name!r} has {len(found)} categories; wants at most {MAX_CATEGORIES}, or numbers"
                )
            categories[j] = found
    return categories


def matrix(op: str, X: Any, categories: Mapping[int, Sequence]) -> Float[np.ndarray, "rows columns"]:
    """Return a frame as float64, with the index of each category. A missing value is NaN, an unknown category -1."""
    columns = [
        _codes(_column(X, j), categories[j]) if j in categories else _numbers(op, name, _column(X, j))
        for j, name in enumerate(X.columns)
    ]
    return np.stack(columns, axis=1) if columns else np.empty((len(X), 0))


def _column(X: Any, j: int) -> Any:
    return X.iloc[:, j] if hasattr(X, "iloc") else X[:, j]


def _is_numeric(column: Any) -> bool:
    kind = getattr(column.dtype, "kind", None)  # of NumPy and pandas
    if kind is None:  # of polars
        return column.dtype.is_numeric() or column.dtype.is_temporal() or str(column.dtype) == "Boolean"
    if kind == "O" and str(column.dtype) == "object":
        return all(gone or isinstance(value, float | int) for value, gone in _with_missing(column))
    return kind != "O"


def _with_missing(column: Any) -> list[tuple[Any, bool]]:
    missing = column.isna() if hasattr(column, "isna") else column.is_null()
    return list(zip(column.to_list(), missing.to_list(), strict=True))


def _order(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


def _codes(column: Any, categories: Sequence) -> np.ndarray:
    code = {value: i for i, value in enumerate(categories)}
    return np.array([np.nan if gone else code.get(value, -1) for value, gone in _with_missing(column)], np.float64)


def _numbers(op: str, name: Any, column: Any) -> np.ndarray:
    convert: Callable[[], np.ndarray]
    if hasattr(column, "iloc"):
        convert = lambda: column.to_numpy(dtype=np.float64, na_value=np.nan)  # noqa: E731
        temporal = column.dtype.kind in "mM"
    else:
        convert = lambda: column.cast(float).to_numpy()  # noqa: E731
        temporal = column.dtype.is_temporal()
    if temporal:
        raise TypeError(f"{op}: the column {name!r} has dtype {column.dtype}; wants numbers, booleans, or categories")
    return convert()
