import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("wrong_backwards", Path(__file__).with_name("wrong_backwards.py"))
wrong_backwards = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wrong_backwards)
CORPUS = wrong_backwards.CORPUS
PAGE = (Path(__file__).parents[3] / "docs" / "wrong_backwards.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", CORPUS, ids=lambda wrong: f"{wrong.op} of {wrong.source}")
def test_a_published_mistake_is_caught_and_is_in_the_book(wrong):
    result = wrong.check()
    assert {row.implementation for row in result.failures} == {"xla"}
    said = wrong_backwards.said(result.failures[0]).replace("|", "&#124;")
    assert f"| `{wrong.op}` | {wrong.slip} | {wrong.link} | {said} |" in PAGE


def test_there_are_forty_from_public_trackers():
    assert len({wrong.source for wrong in CORPUS if "#" in wrong.source}) >= 40
    assert wrong_backwards.HEAD in PAGE
