"""Columns of numbers and of categories, as rows of numbers.

A column of numbers is a float64 array, in which a missing value is NaN. A column of categories is an array of objects,
in which a missing value is None.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

MAX_CATEGORIES = 255


def is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def of_frame(op: str, X: Any, categorical: Collection[int] | None = None) -> list[np.ndarray]:
    """Return the columns of a pandas or polars frame. By default, the columns that contain neither numbers nor booleans
    are categories."""
    if hasattr(X, "collect"):
        raise TypeError(f"{op}: X is a {type(X).__name__}; wants the frame that X.collect() returns")
    if not len(X.columns):
        raise ValueError(f"{op}: X has no columns; wants at least one")
    columns = []
    for j, name in enumerate(X.columns):
        column = X.iloc[:, j] if hasattr(X, "iloc") else X[:, j]
        has_categories = not _is_numeric(column) if categorical is None else j in categorical
        columns.append(of_categories(_values(column)) if has_categories else _numbers(op, name, column))
    return columns


def of_categories(values: Sequence[Any]) -> np.ndarray:
    return np.fromiter(values, object, len(values))


def fit_categories(op: str, names: Iterable[Any], columns: Sequence[np.ndarray]) -> dict[int, list]:
    """Return the sorted categories of each column of categories, by the column's index.

    A column of categories has dtype object. In it, None is a missing value, and not a category.

    Args:
      op: the first words of an error message.
      names: the names of all columns, for the error message.

    Raises:
      ValueError: a column has more than `MAX_CATEGORIES` categories.
    """
    categories = {}
    for j, (name, column) in enumerate(zip(names, columns, strict=True)):
        if column.dtype == object:
            for value in column:
                if not isinstance(value, Hashable):
                    kind = type(value).__name__
                    raise TypeError(f"{op}: the column {name!r} contains a {kind}; wants numbers, booleans, or text")
            found = sorted({value for value in column if value is not None}, key=_order)
            if len(found) > MAX_CATEGORIES:
                raise ValueError(
                    f"{op}: the column {name!r} has {len(found)} categories; wants at most {MAX_CATEGORIES}, or numbers"
                )
            categories[j] = found
    return categories


def matrix(columns: Sequence[np.ndarray], categories: Mapping[int, Sequence]) -> Float[np.ndarray, "rows columns"]:
    """Return the columns as float64, with the index of each category. A missing value is NaN, an unknown category -1.

    `columns` are columns of categories where `categories` has an entry.
    """
    return np.stack(
        [_codes(column, categories[j]) if j in categories else column for j, column in enumerate(columns)], axis=1
    )


def describe(names: Iterable[Any], categories: Mapping[int, Sequence]) -> list[str]:
    """Return what each number of a row means, such as "row[2] is port (0 for 'north', 1 for 'south')."."""
    codes = {j: f" ({coded(values)})" for j, values in categories.items()}
    return [f"row[{j}] is {name}{codes.get(j, '')}." for j, name in enumerate(names)]


def coded(categories: Iterable[Any]) -> str:
    return ", ".join(f"{i} for {category!r}" for i, category in enumerate(categories))


def _is_numeric(column: Any) -> bool:
    kind = getattr(column.dtype, "kind", None)  # of NumPy and pandas
    if kind is None:  # of polars
        return column.dtype.is_numeric() or column.dtype.is_temporal() or str(column.dtype) == "Boolean"
    if kind == "O" and str(column.dtype) == "object":
        return all(value is None or isinstance(value, float | int) for value in _values(column))
    return kind != "O"


def _values(column: Any) -> list[Any]:
    """Return the values of a column, with None for missing values."""
    missing = column.isna() if hasattr(column, "isna") else column.is_null()
    return [None if gone else value for value, gone in zip(column.to_list(), missing.to_list(), strict=True)]


def _order(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value


def _codes(column: np.ndarray, categories: Sequence) -> np.ndarray:
    code = {None: np.nan} | {value: i for i, value in enumerate(categories)}
    return np.array([code.get(value, -1) for value in column], np.float64)


def _numbers(op: str, name: Any, column: Any) -> np.ndarray:
    is_pandas = hasattr(column, "iloc")
    try:
        if column.dtype.kind in "cmM" if is_pandas else column.dtype.is_temporal():
            raise TypeError
        return column.to_numpy(dtype=np.float64, na_value=np.nan) if is_pandas else column.cast(float).to_numpy()
    except Exception as error:  # polars' errors are neither TypeError nor ValueError
        wanted = "numbers, booleans, or categories"
        raise TypeError(f"{op}: the column {name!r} has dtype {column.dtype}; wants {wanted}") from error
