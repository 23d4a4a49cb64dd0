import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from experiments.configs.base import build, described, matches

INVALID = [
    ("seed", -1),
    ("batch_size", 0),
    ("batch_size", 2.5),
    ("epochs", -3),
    ("learning_rate", -0.1),
    ("learning_rate", float("nan")),
    ("target_accuracy", 1.1),
    ("devices", 0),
    ("resume", True),
]


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_an_invalid_setting_is_refused_at_once(toy_config, field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}; wants "):
        toy_config(**{field: value})


def test_settings_left_open_come_from_the_recipe(toy_config):
    assert toy_config().epochs == 4
    assert dataclasses.replace(toy_config(), epochs=7).epochs == 7


CASES = [
    (int, [0, -1, 10**400], [True, 1.0, "1", None]),
    (float, [0.5, 1, float("nan")], [False, "0.5", None]),
    (bool, [True], [1, None]),
    (str | None, ["", None], [0, b""]),
    (Annotated[int, "unit"], [1], [1.0]),
    (Literal["a", 3], ["a", 3], ["b", ["a"], None]),
    (list[int], [[], [1, 2]], [[1, "2"], (1, 2), {}]),
    (dict[str, float], [{}, {"a": 1}], [{"a": "b"}, {1: 1.0}, []]),
    (list[dict[str, Any]], [[{"a": [None]}]], [[{1: 2}], [1]]),
    (Path, [Path("a")], ["a"]),
]


@pytest.mark.parametrize(("annotation", "right", "wrong"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_value_matches_its_annotation_or_not(annotation, right, wrong):
    assert all(matches(value, annotation) for value in right)
    assert not any(matches(value, annotation) for value in wrong)


class Point(NamedTuple):
    x: float
    name: str = ""


def test_fields_are_checked_before_they_are_used():
    assert build(Point, {"x": 1}) == Point(1)
    for fields, message in [
        ({"x": "1"}, "x is '1'; wants float"),
        ({"name": "a"}, "missing"),
        ({"x": 1, "y": 2}, "unexpected keyword argument 'y'"),
    ]:
        with pytest.raises(TypeError, match=message):
            build(Point, fields)


def test_an_annotation_is_described_without_modules():
    assert [described(each) for each in (Path | None, list[int])] == ["Path or None", "list[int]"]
