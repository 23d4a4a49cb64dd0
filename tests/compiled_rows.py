"""The C code of an estimator, compiled."""

import ctypes
import shutil

import numpy as np

from experiments.training.compiled import load


def results_in_c(source, rows, folder, result=ctypes.c_int):
    """Return the results of `predict_rows`, and of `predict` for each of the first rows."""
    rows, results = np.ascontiguousarray(rows, np.float32), np.empty(len(rows), result)
    library = load(source, shutil.which("cc"), folder)
    library.predict.restype = result
    pointers = (ctypes.c_void_p(array.ctypes.data) for array in (rows, results))
    library.predict_rows(ctypes.c_size_t(len(rows)), *pointers)
    one_by_one = [library.predict(ctypes.c_void_p(row.ctypes.data)) for row in rows[:20]]
    np.testing.assert_array_equal(one_by_one, results[:20])
    return results
