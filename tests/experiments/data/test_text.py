import os
import stat

import numpy as np
import pytest

from experiments.data import text
from experiments.data.text import START
from experiments.output.errors import UserError


def test_every_byte_is_predicted_once_from_the_byte_before_it_or_from_the_start():
    inputs, targets = text.pack([b"abcd", b"ef", b"g"], 7)
    assert targets.tolist() == [list(b"abcdefg")]
    assert inputs.tolist() == [[START, *b"abc", START, *b"e", START]]
    assert text.segment_ids(inputs).tolist() == [[1, 1, 1, 1, 2, 2, 3]]


def test_a_long_document_is_cut_into_rows_and_the_incomplete_last_row_is_left_out():
    inputs, targets = text.pack([b"abcdefgh"], 3)
    assert text.joined(targets) == b"abcdef"
    assert inputs.tolist() == [[START, *b"ab"], [*b"cde"]]
    assert text.segment_ids(inputs).tolist() == [[1, 1, 1], [0, 0, 0]]
    assert [part.shape for part in text.pack([], 3)] == [(0, 3)] * 2


def test_a_document_stays_in_its_part_when_others_are_added():
    documents = {f"{i}.py": f"text {i}".encode() for i in range(200)}
    train, validation = text.divide(documents)
    assert sorted(train + validation) == sorted(documents.values())
    assert 10 < len(validation) < 30
    more_train, more_validation = text.divide(documents | {f"new{i}": b"new" for i in range(50)})
    assert set(train) <= set(more_train) and set(validation) <= set(more_validation)


def test_both_parts_get_text_also_of_few_documents():
    for names in ("ab", "cd", "xyz"):
        assert all(text.divide(dict.fromkeys(names, b"text")))
    assert text.divide({"only.txt": bytes(range(100))}) == ([bytes(range(90))], [bytes(range(90, 100))])


def test_the_standard_library_is_there_without_tests_and_installed_packages():
    dataset = text.load(None, 256)
    for part in (dataset.train_labels, dataset.test_labels):
        assert part.size > 500_000 and part.dtype == np.uint8
        assert b"import " in text.joined(part) and b"@pytest" not in text.joined(part)
    assert dataset.name.startswith("the standard library of Python 3.")


@pytest.fixture
def folder(tmp_path):
    for name, content in {"b.txt": b"bb", "a/c.py": b"ccc", ".git/x": b"hidden", ".y": b"hidden", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_folder_is_read_in_sorted_order_without_hidden_and_empty_files(folder, capsys):
    assert list(text.read(folder).items()) == [("a/c.py", b"ccc"), ("b.txt", b"bb")]
    assert list(text.read_folder(folder, ".py")) == ["a/c.py"]
    assert list(text.read_folder(folder, left_out=frozenset({"a"}))) == ["b.txt"]
    assert capsys.readouterr().err == ""


def test_files_that_are_no_text_are_left_out_with_a_warning(folder, capsys):
    (folder / "a.bin").write_bytes(b"\0\1")
    os.mkfifo(folder / "pipe")
    assert stat.S_ISFIFO((folder / "pipe").stat().st_mode)
    assert list(text.read(folder)) == ["a/c.py", "b.txt"]
    assert "2 files of" in (said := capsys.readouterr().err) and "a.bin" in said and said.count("\n") == 1


def own(tmp_path, content):
    path = tmp_path / "own.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: tmp, "has no readable text file; wants a folder with text"),
        (lambda tmp: own(tmp, b""), "is empty; wants a file with text"),
        (lambda tmp: own(tmp, b"ab\0"), "has a zero byte at 2; wants a text file"),
        (lambda tmp: own(tmp, b"a" * 64), "own.txt has 6 bytes for validation; wants at least 32"),
        (lambda tmp: own(tmp, b"a" * 30), "own.txt has 27 bytes for training; wants at least 32"),
    ],
    ids=["empty folder", "empty file", "zero byte", "too little for validation", "too little for training"],
)
def test_text_that_cannot_be_used_is_refused(make, message, tmp_path):
    with pytest.raises(UserError, match=message):
        text.load(make(tmp_path), 32)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; wants a text file"):
        text.load(tmp_path / "nowhere", 32)
