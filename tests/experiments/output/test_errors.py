import dataclasses
import io
import sys
from pathlib import Path

import pytest

from experiments.output.errors import (
    BrokenRun,
    Stopped,
    UserError,
    exit_code,
    kept_in,
    warn,
    with_home,
)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("seed is -1;\n wants more"), 2, "error: seed is -1; wants more\n"),
        (FileNotFoundError("no data"), 2, "error: no data\n"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 2, "error: a.json: No such file or directory\n"),
        (PermissionError(13, "Permission denied", "runs"), 1, "error: runs: Permission denied\n"),
        (BrokenRun("damaged"), 1, "error: damaged\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (FloatingPointError("nan"), 1, "error: nan\n"),
        (Stopped("stopped after epoch 5"), 130, "stopped after epoch 5\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
    ],
)
def test_a_command_ends_in_one_line_and_an_exit_code(error, code, said, capsys):
    def command():
        raise error

    assert exit_code(command) == code
    assert capsys.readouterr().err == said


def test_a_command_that_ends_well_has_its_own_code(capsys):
    assert [exit_code(lambda code=code: code) for code in (0, 1)] == [0, 1]
    assert capsys.readouterr().err == ""


def test_what_stdout_cannot_encode_is_printed_as_an_escape(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert exit_code(lambda: print("curves in \udcff") or 0) == 0
    stdout.flush()
    assert stdout.buffer.getvalue() == b"curves in \\udcff\n"


def test_what_is_under_development_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


def test_a_stop_names_the_file_if_there_is_one(tmp_path):
    (tmp_path / "there").touch()
    with pytest.raises(Stopped, match=r"there has the results so far$"), kept_in(tmp_path / "there"):
        raise KeyboardInterrupt
    for path in (tmp_path / "not there", None):
        with pytest.raises(Stopped, match=r"^stopped$"), kept_in(path):
            raise KeyboardInterrupt


def test_a_warning_is_one_line_of_printable_characters_and_not_too_long(capsys):
    for message, said in (
        ("two\nlines", "two lines"),
        ("a  folder", "a  folder"),
        ("\x1b[31ma\tb", "\\x1b[31ma\\tb"),
    ):
        warn(message)
        assert capsys.readouterr().err == f"warning: {said}\n"
    warn("x" * 10**5)
    assert len(capsys.readouterr().err) < 2100


def test_a_tilde_is_the_home_folder_in_nested_settings_too(monkeypatch):
    @dataclasses.dataclass
    class Settings:
        path: Path
        inner: object = None

    monkeypatch.setenv("HOME", "/home")
    given = Settings(Path("~/a"), Settings(Path("b/~")))
    assert with_home(given) == Settings(Path("/home/a"), Settings(Path("b/~")))
    with pytest.raises(UserError, match=r"[^.]; wants a path without ~"):
        with_home(Settings(Path("~no_such_user/a")))
