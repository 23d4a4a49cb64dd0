import datetime

import numpy as np
import pandas as pd
import polars as pl
import pytest

from jaxbp.logic.tables import columns

TABLE = {
    "size": [1.5, None, 3.0],
    "count": [1, 2, 3],
    "is_open": [True, False, True],
    "color": ["red", None, "blue"],
}
WANTED = [[1.5, 1, 1, 1], [np.nan, 2, 0, np.nan], [3, 3, 1, 0]]
FRAMES = {
    "pandas": pd.DataFrame(TABLE),
    "nullable": pd.DataFrame(TABLE).convert_dtypes(),
    "categorical": pd.DataFrame(TABLE).astype({"color": "category"}),
    "polars": pl.DataFrame(TABLE),
    "polars categorical": pl.DataFrame(TABLE, schema_overrides={"color": pl.Categorical}),
}


def fitted(frame):
    """Return the categories and the rows of a frame."""
    found = columns.of_frame("op", frame)
    categories = columns.fit_categories("op", frame.columns, found)
    return categories, columns.matrix(found, categories)


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_become_numbers(kind):
    categories, rows = fitted(FRAMES[kind])
    assert categories == {3: ["blue", "red"]}
    np.testing.assert_array_equal(rows, WANTED)


def test_numbers_may_be_categories_in_pandas():
    categories, rows = fitted(pd.DataFrame({"a": pd.Categorical([30, 10, None])}))
    assert categories == {0: [10, 30]}
    np.testing.assert_array_equal(rows, [[1], [0], [np.nan]])


def test_an_unknown_category_is_no_category():
    frame = pl.DataFrame({"a": ["new", "old", None]})
    rows = columns.matrix(columns.of_frame("op", frame, {0}), {0: ["old"]})
    np.testing.assert_array_equal(rows, [[-1], [0], [np.nan]])


def test_the_numbers_of_a_row_are_described():
    assert columns.describe(["a", "b"], {1: ["x", "y"]}) == [
        "row[0] is a.",
        "row[1] is b (0 for 'x', 1 for 'y').",
    ]


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_columns_without_a_meaning_as_numbers_are_refused(frame):
    dates = frame({"day": [datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)]})
    with pytest.raises(TypeError, match=r"op: the column 'day' has dtype .*; wants numbers, booleans, or categories"):
        columns.of_frame("op", dates)
    lists = frame({"path": [[1], [2]]})
    with pytest.raises(TypeError, match="op: the column 'path' contains a list; wants numbers, booleans, or text"):
        fitted(lists)
    with pytest.raises(TypeError, match=r"op: the column 'size' has dtype .*; wants numbers, booleans, or categories"):
        columns.of_frame("op", frame({"size": ["small"]}), categorical=())
    names = frame({"name": [f"name {i}" for i in range(300)]})
    with pytest.raises(ValueError, match="op: the column 'name' has 300 categories; wants at most 255"):
        fitted(names)
    with pytest.raises(ValueError, match="op: X has no columns; wants at least one"):
        columns.of_frame("op", frame({}))


def test_complex_numbers_are_refused():
    with pytest.raises(
        TypeError, match="op: the column 'z' has dtype complex128; wants numbers, booleans, or categories"
    ):
        columns.of_frame("op", pd.DataFrame({"z": [1j, 2.0]}))


def test_a_lazy_frame_is_refused():
    with pytest.raises(TypeError, match=r"op: X is a LazyFrame; wants the frame that X.collect\(\) returns"):
        columns.of_frame("op", pl.LazyFrame({"a": [1]}))
