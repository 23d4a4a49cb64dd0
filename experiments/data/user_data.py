"""Data from a user's own files: arrays in an NPZ file, a table in a CSV file, or a picture. See docs/own_data.md."""

import csv
import functools
import reprlib
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Bool, Float32, Int32
from PIL import Image

from experiments.data.datasets import Dataset, Features
from experiments.output.errors import UserError
from jaxbp.logic.tables import columns
from jaxbp.logic.tables.quantizer import Quantizer

Parts = tuple[list[np.ndarray], list[np.ndarray], Features | None]
"""Inputs and labels, for training and perhaps for the test, and the columns of a table."""
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
MISSING = frozenset(("", "NA", "null"))
"""Cells of a CSV file without a value. A cell such as NaN has none either."""
MOST_NUMBER = float(np.finfo(np.float32).max)
TEST_SHARE = 0.2
MOST_SIDE = 64
"""The largest height and width of a picture."""


def read(
    path: Path,
    target: str | None = None,
    classes: int | None = None,
    suffixes: Sequence[str] = (".npz", ".csv"),
    categorical: Sequence[str] = (),
) -> Dataset:
    """Read a data set whose inputs are images, or rows `(examples, features)` of a table.

    If the file has no test set, a fifth of the examples of each class become the test set. In tables, a missing value
    is NaN, and text becomes the index of its category.

    Args:
      path: a file whose name ends in one of the `suffixes`.
      target: the column of a CSV file with the labels.
      classes: the number of classes. None: one more than the largest label, and every class needs a training example.
      categorical: the columns of a CSV file whose numbers are read as text.

    Raises:
      UserError: the file has other content than docs/own_data.md describes.
      FileNotFoundError: there is no such file.
    """
    if (suffix := path.suffix.lower()) not in suffixes:
        raise UserError(f"data is {path}; wants a file whose name ends in {' or '.join(suffixes)}")
    reader = _read_csv if suffix == ".csv" else _read_npz
    x, y, features = _cached(reader, path, target, tuple(categorical))
    return _dataset(path, x, y, classes, features)


def read_picture(path: Path) -> Bool[np.ndarray, "height width visible"]:
    """Read a picture as one channel if it is black on white, and as three channels if it has colors.

    A pixel becomes one of the eight colors of `pages.PALETTES`. Transparent pixels become white, which is 0 in all
    channels.

    Raises:
      UserError: the file is no picture, is too large, or has only white pixels.
      FileNotFoundError: there is no such file.
    """
    return _cached(_read_picture, path)


def as_bits(dataset: Dataset, levels: int) -> Dataset:
    """Replace the features of a table by bits: whether a feature is above a threshold, equal to a category, or missing.

    The bits are the same as in `jaxbp.estimators`. A feature has at most `levels` thresholds: quantiles of its values
    in the training set.
    """
    rows, features = dataset.train_images, dataset.features
    quantizer = Quantizer.of_tables(dataset.name, rows, np.ones(len(rows)), levels, features.categories)
    return dataset._replace(
        train_images=quantizer(rows).astype(np.float32),
        test_images=quantizer(dataset.test_images).astype(np.float32),
        features=features._replace(quantizer=quantizer),
    )


def _cached(reader: Callable[..., Any], path: Path, *options: Any) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; wants an existing file")
    stat = path.stat()
    if not stat.st_size:
        raise UserError(f"{path} is empty; wants a file with data")
    return _read_once(reader, path, (stat.st_mtime_ns, stat.st_size), *options)


@functools.lru_cache(maxsize=1)
def _read_once(reader: Callable[..., Any], path: Path, version: tuple[int, int], *options: Any) -> Any:
    return reader(path, *options)


def _read_npz(path: Path, target: str | None, categorical: Sequence[str]) -> Parts:
    for setting, value in (("target", target), ("categorical_features", categorical)):
        if value:
            raise UserError(f"{setting} is {value!r}, but {path} has no named columns; wants a CSV file")
    arrays = _arrays(path)
    # Before `_inputs` converts the examples, which may take several times their memory.
    for x_name, y_name in zip(ARRAYS[::2], ARRAYS[1::2], strict=True):
        (examples, *_), (labels, *_) = ((*np.shape(arrays.get(name, ())), 0) for name in (x_name, y_name))
        if examples != labels:
            raise UserError(f"{path}: {y_name} has {labels} labels; wants {examples}, one per example of {x_name}")
    x, y = (
        [read(path, name, array) for name, array in arrays.items() if name.startswith(letter)]
        for letter, read in (("x", _inputs), ("y", _labels))
    )
    if len(shapes := {inputs.shape[1:] for inputs in x}) > 1:
        raise UserError(f"{path}: x_test has examples of shape {x[1].shape[1:]}; wants {x[0].shape[1:]}, as in x_train")
    (shape,) = shapes
    return x, y, Features([f"feature {i}" for i in range(shape[0])], {}) if len(shape) == 1 else None


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is not an NPZ file; wants a file that numpy.savez wrote")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ARRAYS if {*ARRAYS[2:]} & {*file.files} else ARRAYS[:2]
            found, arrays = file.files, {name: file[name] for name in names if name in file.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); wants a file that numpy.savez wrote, of numbers") from error
    if missing := [name for name in names if name not in arrays]:
        wanted = "x_train and y_train, and for a test set also x_test and y_test"
        raise UserError(f"{path} has no array {missing[0]}, but {reprlib.repr(found)}; wants {wanted}")
    return arrays


def _inputs(path: Path, name: str, array: np.ndarray) -> Float32[np.ndarray, "examples ..."]:
    if array.dtype.kind not in "biuf":
        raise UserError(f"{path}: {name} has dtype {array.dtype}; wants numbers")
    if array.ndim not in (2, 3, 4) or not array.size:
        wanted = "(images, height, width), (images, channels, height, width), or for a table (rows, features)"
        raise UserError(f"{path}: {name} has shape {array.shape}; wants {wanted}, without an empty axis")
    if array.ndim > 2:
        array = _scaled(path, name, _channels_first(path, name, array))
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    is_table = array.ndim == 2
    wrong = np.isinf(array) if is_table else ~np.isfinite(array)
    if wrong.any():
        at, or_nan = tuple(np.argwhere(wrong)[0].tolist()), ", or NaN for missing values" * is_table
        raise UserError(f"{path}: {name} is {array[at]} at {at}; wants finite numbers of float32{or_nan}")
    return array


def _channels_first(path: Path, name: str, images: np.ndarray) -> np.ndarray:
    if images.ndim == 3:
        return images[:, None]
    if images.shape[1] in (1, 3):
        return images
    if images.shape[3] in (1, 3):
        return np.moveaxis(images, 3, 1)
    raise UserError(f"{path}: {name} has shape {images.shape}; wants 1 or 3 channels, on the second or the last axis")


def _scaled(path: Path, name: str, images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        return images / np.float32(255)
    if images.dtype.kind in "iu":
        raise UserError(f"{path}: {name} has dtype {images.dtype}; wants pixels in uint8, or floats from 0 to 1")
    least, most = images.min(), images.max()
    if not np.isnan(least) and not (least >= 0 and most <= 1):
        raise UserError(f"{path}: {name} has pixels from {least} to {most}; wants 0 to 1, or uint8")
    return images


def _labels(path: Path, name: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise UserError(f"{path}: {name} has shape {labels.shape}; wants one label per example")
    if labels.dtype.kind not in "biu":
        raise UserError(f"{path}: {name} has dtype {labels.dtype}; wants integers, the numbers of the classes")
    return labels.astype(np.int64 if labels.dtype.kind == "b" else labels.dtype)


def _read_csv(path: Path, target: str | None, categorical: Sequence[str]) -> Parts:
    if target is None:
        raise UserError(f"target is None; wants the column of {path} that holds the labels")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, skipinitialspace=True, strict=True)  # refuses an open quote
            header, rows, numbers = next(lines, []), [], []
            for row in filter(None, lines):
                rows.append(row)
                numbers.append(lines.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); wants a table in CSV and UTF-8") from error
    _check_header(path, header, {"target": [target], "categorical_features": categorical})
    if not rows:
        raise UserError(f"{path} has no rows after the names of its columns; wants one row per example")
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(header):
            raise UserError(f"{path}: line {number} has {len(row)} cells; wants {len(header)}, one per column")
    cells = dict(zip(header, zip(*rows, strict=True), strict=True))
    table = {name: _column(path, name, cells[name], numbers, name in categorical) for name in header}
    labels, classes = _labels_of_rows(path, target, table.pop(target), cells[target], numbers)
    categories = _categories(path, table)
    x = columns.matrix([*table.values()], categories).astype(np.float32)
    return [x], [labels], Features([*table], categories, classes)


def _check_header(path: Path, header: Sequence[str], wanted: Mapping[str, Sequence[str]]) -> None:
    for setting, names in wanted.items():
        for name in names:
            if name not in header:
                among = f"a column of the first line, {reprlib.repr(header)}"
                raise UserError(f"{setting} is {name!r}, which is no column of {path}; wants {among}")
    if len({*header}) < len(header) or len(header) < 2:
        raise UserError(f"{path} has the columns {reprlib.repr(header)}; wants the target and others, each once")


def _column(path: Path, name: str, cells: Sequence[str], lines: Sequence[int], is_text: bool) -> np.ndarray:
    """Return a column of categories if its cells are text, else a column of numbers (see `columns`)."""
    values = [_value(cell) for cell in cells]
    kinds = {type(value) for value in values if value is not None}
    if is_text or kinds == {str}:
        present = zip(cells, values, strict=True)
        return columns.of_categories([None if value is None else cell for cell, value in present])
    for cell, line, value in zip(cells, lines, values, strict=True):
        if isinstance(value, str):
            _refuse(path, line, name, cell, "a number, because there are others, or the column in categorical_features")
        if value is not None and not abs(value) <= MOST_NUMBER:
            _refuse(path, line, name, cell, "a finite number of float32")
    return np.array(values, np.float64)


def _value(cell: str) -> float | str | None:
    try:
        value = float(cell)
    except ValueError:
        return None if cell in MISSING else cell
    return cell if "_" in cell else None if np.isnan(value) else value


def _refuse(path: Path, line: int, column: str, cell: str, wanted: str) -> NoReturn:
    raise UserError(f"{path}: line {line}, column {column!r} is {reprlib.repr(cell)}; wants {wanted}")


def _labels_of_rows(
    path: Path, target: str, column: np.ndarray, cells: Sequence[str], lines: Sequence[int]
) -> tuple[np.ndarray, list[str] | None]:
    """Return the index of each row's class, and the names of the classes if the labels are text."""
    for value, cell, line in zip(column, cells, lines, strict=True):
        if value is None or value != value:
            _refuse(path, line, target, cell, "a class")
        if column.dtype != object and not (0 <= value <= np.iinfo(np.int32).max and value % 1 == 0):
            _refuse(path, line, target, cell, "a whole number from 0, the number of a class, or text")
    classes = _categories(path, {target: column})
    return columns.matrix([column], classes)[:, 0].astype(np.int64), classes.get(0)


def _categories(path: Path, table: Mapping[str, np.ndarray]) -> dict[int, list[str]]:
    try:
        return columns.fit_categories(str(path), table, [*table.values()])
    except ValueError as error:
        raise UserError(str(error)) from None


def _dataset(
    path: Path, x: Sequence[np.ndarray], y: Sequence[np.ndarray], classes: int | None, features: Features | None
) -> Dataset:
    names = features.classes if features is not None else None
    classes = _checked_classes(path, y, classes, names)
    if len(x) == 1:
        is_test = _held_out(path, y[0], names)
        x, y = [x[0][~is_test], x[0][is_test]], [y[0][~is_test], y[0][is_test]]
    if features is not None and np.array_equal(x[0], np.broadcast_to(x[0][0], x[0].shape), equal_nan=True):
        raise UserError(f"{path} has equal features in all training examples; wants a feature that varies")
    y = [labels.astype(np.int32) for labels in y]
    return Dataset(x[0], y[0], x[1], y[1], path.name, features, classes)


def _checked_classes(
    path: Path, y: Sequence[Int32[np.ndarray, " examples"]], classes: int | None, names: Sequence[str] | None
) -> int:
    present = np.unique(y[0])
    if classes is None and (len(present) < 2 or present[0] != 0 or present[-1] != len(present) - 1):
        wanted = "at least two classes, numbered from 0 without a gap, or classes, their number"
        came = reprlib.repr(present.tolist() if names is None else names)
        raise UserError(f"{path} has training examples of the classes {came}; wants {wanted}")
    if names is not None and classes not in (None, len(names)):
        raise UserError(f"classes is {classes}; wants None or {len(names)}, the number of classes in {path}")
    classes = classes or len(present)
    for labels in y:
        if wrong := [label for label in np.unique(labels).tolist() if not 0 <= label < classes]:
            raise UserError(f"{path} has the label {wrong[0]}; wants labels from 0 to {classes - 1}")
    return classes


def _held_out(
    path: Path, labels: Int32[np.ndarray, " examples"], names: Sequence[str] | None
) -> Bool[np.ndarray, " examples"]:
    order, is_test = np.random.default_rng(0).permutation(len(labels)), np.zeros(len(labels), bool)
    for label in np.unique(labels):
        examples = order[labels[order] == label]
        if len(examples) < 2:
            name = label if names is None else repr(names[label])
            raise UserError(
                f"{path} has one example of class {name}; wants at least two, for training and for the test, or a "
                "test set"
            )
        is_test[examples[: max(1, round(TEST_SHARE * len(examples)))]] = True
    return is_test


def _with_8_bits(picture: Image.Image) -> Image.Image:
    """Return the picture with at most 8 bits per channel. Pillow's own conversion makes gray above 255 white."""
    if picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PNG"):
        return Image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels have the mode {picture.mode!r}")
    return picture


def _read_picture(path: Path) -> Bool[np.ndarray, "height width visible"]:
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            pixels = _with_8_bits(picture).convert("RGBA") if max(picture.size) <= MOST_SIDE else None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read ({error}); wants a picture, such as a PNG file") from error
    if pixels is None:
        wanted = f"at most {MOST_SIDE} x {MOST_SIDE}"
        raise UserError(f"{path} has {width} x {height} pixels; wants {wanted}")
    opaque = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
    light = np.asarray(opaque)[..., :3] >= 128
    is_gray = (light == light[..., :1]).all(axis=-1, keepdims=True)
    channels = light ^ is_gray  # white becomes 0 in all channels, black 1
    if not channels.any():
        raise UserError(f"{path} has only white pixels; wants a picture on white or transparent ground")
    return channels[..., :1] if is_gray.all() else channels
