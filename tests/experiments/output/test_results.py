import json
import shutil
import subprocess

import jax
import pytest

from experiments.output import results
from experiments.output.results import commit, provenance, to_json


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "file").write_text("text")
    author = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false"]
    for args in (["init", "-q"], ["add", "file"], [*author, "commit", "-qm", "message"]):
        subprocess.run(["git", "-C", str(tmp_path), *args], check=True)
    return tmp_path


def test_every_result_says_where_it_is_from():
    fields = provenance("python -m something")
    assert list(fields) == ["schema", "command", "date", "commit", "device", "platform", "versions"]
    assert (fields["schema"], fields["command"]) == (1, "python -m something")
    assert (fields["device"], fields["platform"]) == (jax.devices()[0].device_kind, jax.devices()[0].platform)
    assert fields["versions"]["jax"] == jax.__version__
    assert fields["date"].endswith("+00:00")


def test_the_commit_has_a_plus_if_tracked_files_differ(checkout):
    head = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert len(commit(checkout)) >= 4 and head.startswith(commit(checkout))
    (checkout / "untracked").touch()
    assert not commit(checkout).endswith("+")
    (checkout / "file").write_text("other text")
    assert commit(checkout).endswith("+") and head.startswith(commit(checkout)[:-1])


def test_without_a_checkout_the_commit_is_that_of_the_environment(checkout, monkeypatch):
    inside = checkout / "site-packages"
    inside.mkdir()
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    assert commit(inside) is None
    monkeypatch.setenv(results.COMMIT_VARIABLE, "0123abc")
    assert commit(inside) == "0123abc"


def test_json_refuses_numbers_that_are_not_finite():
    assert json.loads(to_json({"rows": [1.5, None]})) == {"rows": [1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        to_json({"rows": [float("nan")]})
