import dataclasses
import errno
import importlib
import os
import types
from pathlib import Path

import pytest
import tyro

import experiments
from experiments.configs.base import alternatives
from experiments.output.errors import UserError
from experiments.output.files import is_leftover, refuse_unwritable, write, write_atomically, written


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    for data in (b"longer text", b"text"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, b"text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write(Path("/dev/full"), b"text")
    target.touch()
    link.symlink_to(target)
    write(link, b"text")
    assert link.is_symlink() and target.read_bytes() == b"text"


def test_content_that_cannot_be_made_becomes_a_warning(tmp_path, capsys):
    written(tmp_path / "file", lambda: 1 // 0)
    assert "file failed, and is left out (ZeroDivisionError in test_files.py, line " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def failing(descriptor):
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="the disk is full") as raised:
        write_atomically(path, b"new")
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_kill_leaves_is_known_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: None)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
    write_atomically(tmp_path / "file", b"text")
    (leftover,) = tmp_path.iterdir()
    assert is_leftover(leftover)
    assert not is_leftover(tmp_path / "file") and not is_leftover(tmp_path / ".hidden")


def test_an_unwritable_file_is_refused_without_a_trace(tmp_path, monkeypatch):
    refuse_unwritable(tmp_path / "new", None, Path(os.devnull))
    assert not list(tmp_path.iterdir())
    for path, reason in (
        (tmp_path, "is a folder; wants the name of a file"),
        (tmp_path / "no" / "new", "because there is no folder"),
        (tmp_path / ("x" * 250), r"cannot be written \(File name too long\)"),
    ):
        with pytest.raises(UserError, match=reason):
            refuse_unwritable(path)
    (old := tmp_path / "old").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != old)
    with pytest.raises(UserError, match=r"old cannot be written \(Permission denied\)"):
        refuse_unwritable(old)


def optional_paths():
    """Return the options of all commands whose type is a path or None, by dataclass and name."""
    (folder,), found = experiments.__path__, {}
    for path in Path(folder).rglob("*.py"):
        if "OptionalPath" in (text := path.read_text()) or "Path | None" in text:
            module = importlib.import_module(".".join(["experiments", *path.relative_to(folder).with_suffix("").parts]))
            for config in filter(dataclasses.is_dataclass, vars(module).values()):
                for field in dataclasses.fields(config):
                    if {Path, types.NoneType} <= {*alternatives(field.type)}:
                        found[config.__name__, field.name] = field.type
    return found


def test_every_optional_path_of_a_command_may_be_called_none():
    options = optional_paths()
    assert {("Options", "json"), ("BenchConfig", "json"), ("GPTConfig", "text"), ("CheckConfig", "json")} < set(options)
    for (config, name), hint in options.items():
        parsed = tyro.cli(dataclasses.make_dataclass(config, [(name, hint, None)]), args=[f"--{name}", "None"])
        assert getattr(parsed, name) == Path("None"), (config, name)
