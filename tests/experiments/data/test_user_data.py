import re

import numpy as np
import pytest
from PIL import Image

from experiments.data import user_data
from experiments.data.user_data import as_bits, read, read_picture
from experiments.output.errors import UserError

LABELS = np.arange(20) % 2
IMAGES = np.random.default_rng(0).random((20, 5, 4))


def saved(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return path


def test_a_fifth_of_each_class_is_held_out_if_there_is_no_test_set(tmp_path):
    dataset = read(saved(tmp_path, x_train=IMAGES, y_train=LABELS, unknown=np.array({})))
    assert (dataset.name, dataset.classes, dataset.features) == ("data.npz", 2, None)
    assert np.bincount(dataset.train_labels).tolist() == [8, 8] and np.bincount(dataset.test_labels).tolist() == [2, 2]
    assert {array.dtype.name for array in dataset[:4]} == {"float32", "int32"}
    together = np.concatenate([dataset.train_images, dataset.test_images])[:, 0]
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    order = [np.flatnonzero((IMAGES.astype(np.float32) == image).all(axis=(1, 2))).item() for image in together]
    assert sorted(order) == list(range(20)) and np.array_equal(labels, LABELS[order])


def test_channels_come_first_or_last_and_bytes_are_scaled(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 5, 4), np.uint8)
    arrays = dict(y_train=LABELS[:, None], x_test=images[:3], y_test=LABELS[:3])
    first = read(saved(tmp_path, x_train=images, **arrays))
    assert np.array_equal(first.train_images, images / np.float32(255)) and len(first.test_images) == 3
    last = read(saved(tmp_path, x_train=np.moveaxis(images, 1, 3), **arrays))
    assert np.array_equal(last.train_images, first.train_images)
    bits = read(saved(tmp_path, x_train=images[:, 0] > 99, y_train=LABELS > 0))
    assert np.unique(bits.train_images).tolist() == [0, 1] and bits.classes == 2


def test_a_class_without_examples_needs_the_number_of_classes(tmp_path):
    path = saved(tmp_path, x_train=IMAGES, y_train=2 * LABELS)
    assert read(path, classes=3).classes == 3
    with pytest.raises(UserError, match=r"has the label 2; wants labels from 0 to 1"):
        read(path, classes=2)
    with pytest.raises(UserError, match=r"classes \[0, 2\]; wants at least two classes, numbered from 0 without a gap"):
        read(path)


RIGHT = dict(x_train=IMAGES, y_train=LABELS)
WRONG_ARRAYS = {
    "no labels": (dict(x_train=IMAGES), "has no array y_train, but ['x_train']; wants x_train and y_train"),
    "half a test set": (RIGHT | dict(x_test=IMAGES), "has no array y_test"),
    "objects": (RIGHT | dict(x_train=np.array([{}])), "cannot be read (Object arrays cannot be loaded"),
    "text": (RIGHT | dict(x_train=np.full((20, 2), "a")), "x_train has dtype <U1; wants numbers"),
    "a vector": (RIGHT | dict(x_train=np.ones(20)), "x_train has shape (20,); wants (images, height, width), "),
    "no examples": (dict(x_train=IMAGES[:0], y_train=LABELS[:0]), "x_train has shape (0, 5, 4)"),
    "two channels": (RIGHT | dict(x_train=np.ones((20, 2, 5, 4))), "wants 1 or 3 channels"),
    "large pixels": (RIGHT | dict(x_train=IMAGES * 255), "x_train has pixels from "),
    "integers": (RIGHT | dict(x_train=np.ones((20, 5, 4), int)), "x_train has dtype int64; wants pixels in uint8"),
    "NaN": (RIGHT | dict(x_train=np.where(IMAGES > 0.5, np.nan, 0.5)), "x_train is nan at (0, 0, 0, 0)"),
    "a huge number": (
        RIGHT | dict(x_train=np.full((20, 2), 1e39)),
        "x_train is inf at (0, 0); wants finite numbers of float32, or NaN for missing values",
    ),
    "missing values alone": (RIGHT | dict(x_train=np.full((20, 2), np.nan)), "equal features in all training"),
    "float labels": (RIGHT | dict(y_train=LABELS / 1), "y_train has dtype float64; wants integers"),
    "one-hot labels": (RIGHT | dict(y_train=np.eye(2)[LABELS]), "y_train has shape (20, 2); wants one label per"),
    "a missing label": (RIGHT | dict(y_train=LABELS[1:]), "y_train has 19 labels; wants 20"),
    "a missing label is found before images are converted": (
        dict(x_train=IMAGES.astype(np.int16), y_train=LABELS[1:]),
        "y_train has 19 labels; wants 20",
    ),
    "a negative label": (RIGHT | dict(y_train=LABELS - 1), "classes [-1, 0]; wants at least two classes"),
    "one class": (RIGHT | dict(y_train=0 * LABELS), "classes [0]; wants at least two classes"),
    "one example of a class": (RIGHT | dict(y_train=LABELS + (np.arange(20) == 1)), "one example of class 2"),
    "another test shape": (RIGHT | dict(x_test=IMAGES[:, 1:], y_test=LABELS), "x_test has examples of shape (1, 4, 4)"),
    "a test label": (RIGHT | dict(x_test=IMAGES, y_test=LABELS + 1), "has the label 2; wants labels from 0 to 1"),
    "a constant table": (RIGHT | dict(x_train=np.ones((20, 2))), "equal features in all training examples"),
}


@pytest.mark.parametrize(("arrays", "message"), WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_arrays_are_refused(tmp_path, arrays, message):
    path = saved(tmp_path, **arrays)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}.*{re.escape(message)}") as raised:
        read(path)
    assert "; wants " in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"x_train,y_train\n", b"PK\5\6" + bytes(18)], ids=["text", "empty archive"])
def test_another_file_is_not_an_npz_file(tmp_path, content):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} .*; wants "):
        read(path)


def test_a_damaged_npz_file_is_refused(tmp_path):
    content = bytearray(saved(tmp_path, **RIGHT).read_bytes())
    content[300] ^= 1
    path = tmp_path / "damaged.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))} cannot be read \(.*CRC.*\); wants "):
        read(path)


def written(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


ROWS = "".join(f"{i},{i % 2},{-i / 4}\n" for i in range(10))


def test_a_table_has_one_feature_per_other_column(tmp_path):
    dataset = read(written(tmp_path, f'\ufeff"a, b",class,c\n{ROWS}\n'), "class")
    assert dataset.features.names == ["a, b", "c"] and dataset.train_images.shape == (8, 2)
    assert np.array_equal(dataset.train_images[:, 1], -dataset.train_images[:, 0] / 4)
    assert np.array_equal(dataset.train_labels, dataset.train_images[:, 0] % 2)


MIXED = """size,color,zip,class
1.5, red,01,yes
,blue,02,no
nan,,01,no
NA,red,02,yes
-2,blue,03,yes
3, null,01,no
"""


def test_text_becomes_categories_and_empty_cells_become_missing_values(tmp_path):
    dataset = read(written(tmp_path, MIXED), "class", categorical=["zip"])
    features = dataset.features
    assert features.categories == {1: ["blue", "red"], 2: ["01", "02", "03"]} and features.classes == ["no", "yes"]
    rows = np.concatenate([dataset.train_images, dataset.test_images])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    nan = np.nan
    wanted = [(1.5, 1, 0, 1), (nan, 0, 1, 0), (nan, nan, 0, 0), (nan, 1, 1, 1), (-2, 0, 2, 1), (3, nan, 0, 0)]
    order = lambda rows: sorted(map(str, np.float32(rows).tolist()))  # noqa: E731
    assert order(np.column_stack([rows, labels])) == order(wanted)
    with pytest.raises(UserError, match="classes is 3; wants None or 2, the number of classes in"):
        read(tmp_path / "table.csv", "class", 3)


def test_the_bits_of_a_table_are_thresholds_categories_and_missing_values(tmp_path):
    table = "".join(f"{i % 3 or ''},{'ab'[i % 2]},{i % 2}\n" for i in range(30))
    dataset = as_bits(read(written(tmp_path, f"x,y,class\n{table}"), "class"), 5)
    quantizer, names, categories = (getattr(dataset.features, field) for field in ("quantizer", "names", "categories"))
    wanted = ["x above 1.5", "x missing", "y equal to 'a'", "y equal to 'b'"]
    assert quantizer.describe(names, categories) == wanted
    assert dataset.train_images.shape == (24, 4) and dataset.train_images.dtype == np.float32
    assert np.array_equal(dataset.test_images[:, 3], dataset.test_labels)


def test_missing_values_of_an_npz_table_are_nan(tmp_path):
    x = np.where(LABELS > 0, np.nan, np.arange(20))[:, None]
    dataset = read(saved(tmp_path, x_train=x, y_train=LABELS))
    assert np.array_equal(np.isnan(dataset.train_images[:, 0]), dataset.train_labels)


WRONG_TABLES = {
    "empty": ("", "is empty; wants a file with data"),
    "no rows": ("a,class\n", "has no rows after the names of its columns"),
    "another target": ("a,b\n1,0\n", "target is 'class', which is no column of"),
    "two columns of a name": ("a,a,class\n1,2,0\n", "has the columns ['a', 'a', 'class']; wants"),
    "only the target": ("class\n1\n", "has the columns ['class']; wants"),
    "mixed": ("a,class\n1,0\n\nx,1\n", "line 4, column 'a' is 'x'; wants a number, because there are others, or"),
    "underscores": ("a,class\n1,0\n1_0,1\n", "line 3, column 'a' is '1_0'; wants a number"),
    "infinity": ("a,class\n1,0\n-inf,1\n", "line 3, column 'a' is '-inf'; wants a finite number of float32"),
    "many categories": (
        "a,class\n" + "".join(f"n{i},{i % 2}\n" for i in range(256)),
        "the column 'a' has 256 categories; wants at most 255, or numbers",
    ),
    "a missing class": ("a,class\n1,yes\n2,\n", "line 3, column 'class' is ''; wants a class"),
    "a missing number of a class": ("a,class\n1,1\n2,NaN\n", "line 3, column 'class' is 'NaN'; wants a class"),
    "one class of text": ("a,class\n1,cat\n2,cat\n", "training examples of the classes ['cat']; wants at least two"),
    "a rare class of text": ("a,class\n1,cat\n2,dog\n2,dog\n", "has one example of class 'cat'; wants at least two"),
    "a huge number": ("a,class\n1e39,0\n", "line 2, column 'a' is '1e39'; wants a finite number of float32"),
    "text among labels": ("a,class\n1,1\n2,cat\n", "line 3, column 'class' is 'cat'; wants a number"),
    "fractions as labels": ("a,class\n1,0.5\n", "line 2, column 'class' is '0.5'; wants a whole number from 0"),
    "huge labels": ("a,class\n1,1e30\n", "line 2, column 'class' is '1e30'; wants a whole number from 0"),
    "a short row": ("a,class\n1,0\n1\n", "line 3 has 1 cells; wants 2, one per column"),
    "a quote that stays open": ('class,a\n0,"x\n1,y\n0,z\n1,y\n', "cannot be read (unexpected end of data)"),
    "Latin-1": ("größe,class\n1,0\n".encode("latin-1"), "cannot be read ('utf-8' codec"),
}


@pytest.mark.parametrize(("text", "message"), WRONG_TABLES.values(), ids=WRONG_TABLES)
def test_wrong_tables_are_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        read(path, "class")
    said = str(raised.value)
    assert str(path) in said and "; wants " in said and "\n" not in said


def test_a_file_is_asked_for_by_its_kind(tmp_path):
    table, arrays = written(tmp_path, f"a,class,c\n{ROWS}"), saved(tmp_path, **RIGHT)
    cases = {
        "target is None; wants the column": (table, None),
        "target is 'class', but .* has no named columns; wants a CSV file": (arrays, "class"),
        "categorical_features is 'b', which is no column of": (table, "class", None, [".csv"], ["b"]),
        "wants a file whose name ends in .npz or .csv": (tmp_path / "data.txt", None),
    }
    for message, arguments in cases.items():
        with pytest.raises(UserError, match=message):
            read(*arguments)
    with pytest.raises(FileNotFoundError, match=r"missing\.npz is not a file; wants an existing file"):
        read(tmp_path / "missing.npz")


def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    calls, original = [], user_data._read_npz
    monkeypatch.setattr(user_data, "_read_npz", lambda *args: calls.append(args) or original(*args))
    path = saved(tmp_path, **RIGHT)
    assert read(path).classes == read(path, classes=3).classes - 1 and len(calls) == 1
    saved(tmp_path, x_train=IMAGES[:12], y_train=LABELS[:12])
    assert len(read(path).train_images) == 10 and len(calls) == 2


def painted(tmp_path, pixels, mode):
    path = tmp_path / "picture.png"
    Image.fromarray(np.array(pixels, np.uint8), mode).save(path)
    return path


def test_a_picture_in_black_and_white_is_one_channel(tmp_path):
    assert read_picture(painted(tmp_path, [[0, 255], [100, 200]], "L"))[..., 0].tolist() == [[1, 0], [1, 0]]
    transparent = read_picture(painted(tmp_path, [[[0, 0, 0, 0], [0, 0, 0, 255]]], "RGBA"))
    assert transparent.tolist() == [[[0], [1]]]


def test_gray_of_16_bits_has_the_thresholds_of_8_bits(tmp_path):
    path = tmp_path / "gray.png"
    Image.fromarray(np.array([[300, 30000], [40000, 65535]], np.uint16)).save(path)
    assert read_picture(path)[..., 0].tolist() == [[1, 1], [0, 0]]
    floats = tmp_path / "floats.tiff"
    Image.fromarray(np.zeros((2, 2), np.float32)).save(floats)
    with pytest.raises(UserError, match=r"cannot be read .its pixels have the mode 'F'"):
        read_picture(floats)


def test_the_channels_of_a_colored_picture_are_red_green_and_blue(tmp_path):
    colors = [[255, 0, 0], [20, 200, 40], [0, 0, 255], [250, 240, 0], [255, 255, 255], [0, 0, 0]]
    wanted = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert read_picture(painted(tmp_path, [colors], "RGB"))[0].tolist() == wanted


def test_other_pictures_are_refused(tmp_path):
    cases = {
        "has 65 x 2 pixels; wants at most 64 x 64": painted(tmp_path, np.zeros((2, 65)), "L"),
        "has only white pixels; wants": None,
        "cannot be read": written(tmp_path, "no picture"),
    }
    for message, path in cases.items():
        with pytest.raises(UserError, match=message):
            read_picture(path or painted(tmp_path, np.full((2, 2), 255), "L"))
