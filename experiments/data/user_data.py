"""Data from a user's own files: arrays in an NPZ file, a table in a CSV file, or a picture. See docs/own_data.md."""

import csv
import functools
import reprlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32
from PIL import Image

from experiments.data.datasets import Dataset, Features
from experiments.output.errors import UserError
from jaxbp.estimators.quantizer import quantiles

Parts = tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...] | None]
"""Inputs and labels, for training and perhaps for the test, and the names of a table's columns."""
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
TEST_SHARE = 0.2
MOST_SIDE = 64
"""The largest height and width of a picture."""


def read(
    path: Path, target: str | None = None, classes: int | None = None, suffixes: Sequence[str] = (".npz", ".csv")
) -> Dataset:
    """Read a data set whose inputs are images, or rows `(examples, features)` of a table.

    If the file has no test set, a fifth of the examples of each class become the test set.

    Args:
      path: a file whose name ends in one of the `suffixes`.
      target: the column of a CSV file with the labels.
      classes: the number of classes. None: one more than the largest label, and every class needs a training example.

    Raises:
      UserError: the file has other content than docs/own_data.md describes.
      FileNotFoundError: there is no such file.
    """
    if (suffix := path.suffix.lower()) not in suffixes:
        raise UserError(f"data is {path}; wants a file whose name ends in {' or '.join(suffixes)}")
    x, y, names = _cached(_read_csv if suffix == ".csv" else _read_npz, path, target)
    return _dataset(path, x, y, classes, names)


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
    """Replace the features of a table by bits, which say whether a feature is above a threshold.

    A feature has at most `levels` thresholds: the `quantiles` of its values in the training set.
    """
    weights = np.ones(len(dataset.train_images))
    thresholds = tuple(quantiles(feature, weights, levels) for feature in dataset.train_images.T)

    def bits(rows: np.ndarray) -> np.ndarray:
        columns = [feature[:, None] > limits for feature, limits in zip(rows.T, thresholds, strict=True)]
        return np.concatenate(columns, axis=1).astype(np.float32)

    return dataset._replace(
        train_images=bits(dataset.train_images),
        test_images=bits(dataset.test_images),
        features=Features(dataset.features.names, thresholds),
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


def _read_npz(path: Path, target: str | None) -> Parts:
    if target is not None:
        raise UserError(f"target is {target!r}, but {path} has no columns; wants no target, or a CSV file")
    arrays = _arrays(path)
    x, y = (
        [read(path, name, array) for name, array in arrays.items() if name.startswith(letter)]
        for letter, read in (("x", _inputs), ("y", _labels))
    )
    if len(shapes := {inputs.shape[1:] for inputs in x}) > 1:
        raise UserError(f"{path}: x_test has examples of shape {x[1].shape[1:]}; wants {x[0].shape[1:]}, as in x_train")
    (shape,) = shapes
    names = tuple(f"feature {i}" for i in range(shape[0])) if len(shape) == 1 else None
    return x, y, names


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
    if not np.isfinite(array).all():
        at = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise UserError(f"{path}: {name} is {array[at]} at {at}; wants finite numbers of float32")
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


def _read_csv(path: Path, target: str | None) -> Parts:
    if target is None:
        raise UserError(f"target is None; wants the column of {path} that holds the labels")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            header, rows, numbers = next(lines, []), [], []
            for row in filter(None, lines):
                rows.append(row)
                numbers.append(lines.line_num)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); wants a table in CSV and UTF-8") from error
    _check_header(path, header, target)
    if not rows:
        raise UserError(f"{path} has no rows after the names of its columns; wants one row per example")
    for row, number in zip(rows, numbers, strict=True):
        if len(row) != len(header):
            raise UserError(f"{path}: line {number} has {len(row)} cells; wants {len(header)}, one per column")
    columns = {
        name: _numbers(path, name, cells, numbers, whole=name == target)
        for name, cells in zip(header, zip(*rows, strict=True), strict=True)
    }
    labels = columns.pop(target).astype(np.int64)
    x = np.stack([*columns.values()], axis=1).astype(np.float32)
    return [x], [labels], tuple(columns)


def _check_header(path: Path, header: Sequence[str], target: str) -> None:
    if target not in header:
        wanted = f"a column of the first line, {reprlib.repr(header)}"
        raise UserError(f"target is {target!r}, which is no column of {path}; wants {wanted}")
    if len({*header}) < len(header) or len(header) < 2:
        raise UserError(f"{path} has the columns {reprlib.repr(header)}; wants the target and others, each once")


def _numbers(
    path: Path, column: str, cells: Sequence[str], lines: Sequence[int], whole: bool
) -> Float32[np.ndarray, " rows"]:
    wanted, most = "a finite number of float32", float(np.finfo(np.float32).max)
    if whole:
        wanted, most = "a whole number from 0, the number of a class", np.iinfo(np.int32).max
    values = np.empty(len(cells))
    for i, cell in enumerate(cells):
        try:
            values[i] = float(cell)
        except ValueError:
            values[i] = np.nan
        if not abs(values[i]) <= most or (whole and (values[i] < 0 or values[i] % 1)):
            raise UserError(f"{path}: line {lines[i]}, column {column!r} is {reprlib.repr(cell)}; wants {wanted}")
    return values


def _dataset(
    path: Path, x: Sequence[np.ndarray], y: Sequence[np.ndarray], classes: int | None, names: tuple[str, ...] | None
) -> Dataset:
    for part, inputs, labels in zip(("train", "test"), x, y, strict=False):
        if len(inputs) != len(labels):
            wanted = f"{len(inputs)}, one per example of x_{part}"
            raise UserError(f"{path}: y_{part} has {len(labels)} labels; wants {wanted}")
    classes = _checked_classes(path, y, classes)
    if len(x) == 1:
        is_test = _held_out(path, y[0])
        x, y = [x[0][~is_test], x[0][is_test]], [y[0][~is_test], y[0][is_test]]
    if names is not None and (x[0] == x[0][0]).all():
        raise UserError(f"{path} has equal features in all training examples; wants a feature that varies")
    y = [labels.astype(np.int32) for labels in y]
    return Dataset(x[0], y[0], x[1], y[1], path.name, None if names is None else Features(names), classes)


def _checked_classes(path: Path, y: Sequence[Int32[np.ndarray, " examples"]], classes: int | None) -> int:
    present = np.unique(y[0])
    if classes is None and (len(present) < 2 or present[0] != 0 or present[-1] != len(present) - 1):
        wanted = "at least two classes, numbered from 0 without a gap, or classes, their number"
        raise UserError(f"{path} has training examples of the classes {reprlib.repr(present.tolist())}; wants {wanted}")
    classes = classes or len(present)
    for labels in y:
        if wrong := [label for label in np.unique(labels).tolist() if not 0 <= label < classes]:
            raise UserError(f"{path} has the label {wrong[0]}; wants labels from 0 to {classes - 1}")
    return classes


def _held_out(path: Path, labels: Int32[np.ndarray, " examples"]) -> Bool[np.ndarray, " examples"]:
    order, is_test = np.random.default_rng(0).permutation(len(labels)), np.zeros(len(labels), bool)
    for label in np.unique(labels):
        examples = order[labels[order] == label]
        if len(examples) < 2:
            raise UserError(
                f"{path} has one example of class {label}; wants at least two, for training and for the test, or a "
                "test set"
            )
        is_test[examples[: max(1, round(TEST_SHARE * len(examples)))]] = True
    return is_test


def _read_picture(path: Path) -> Bool[np.ndarray, "height width visible"]:
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            pixels = picture.convert("RGBA") if max(picture.size) <= MOST_SIDE else None
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
