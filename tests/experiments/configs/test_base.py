import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pytest

from experiments.configs import from_dict, register, to_dict
from experiments.configs.base import build, described, matches
from experiments.output.errors import UserError

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
    (int, [0, -1, 2**63 - 1], [True, 1.0, "1", None, 10**400]),
    (float, [0.5, 1], [False, "0.5", None, 10**400, float("inf"), float("nan")]),
    (bool, [True], [1, None]),
    (str | None, ["", None], [0, b""]),
    (Annotated[int, "unit"], [1], [1.0]),
    (Literal["a", 3], ["a", 3], ["b", ["a"], None]),
    (list[int], [[], [1, 2]], [[1, "2"], (1, 2), {}]),
    (dict[str, float], [{}, {"a": 1}], [{"a": "b"}, {1: 1.0}, []]),
    (list[dict[str, Any]], [[{"a": [None]}]], [[{1: 2}], [1]]),
    (Path, [Path("a")], ["a"]),
    (tuple[int, ...], [(), (1, 2)], [[1], (1, "2"), 1]),
    (tuple[int, str], [(1, "a")], [(1,), ("a", 1)]),
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


def test_settings_come_back_from_json(toy_config):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(toy_config):
        file: Annotated[Path | None, "note"] = None
        name_or_file: str | Path = "name"
        files: tuple[Path, ...] = ()
        pairs: "tuple[tuple[int, str], ...] | None" = None

    config = Config(file=Path("a b"), files=(Path("c"), Path("d")), pairs=((1, "x"), (2, "y")), run_dir=Path("run"))
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(UserError, match=r"files is \('a',\); wants a value of type tuple\[.*Path, ...\]"):
        Config(files=("a",))


def test_a_config_without_a_default_batch_size_is_refused(toy_config):
    class Config(toy_config):
        def defaults(self):
            return {"epochs": 1, "learning_rate": 0.1}

    with pytest.raises(UserError, match=r"batch_size is None; wants a value, or a default from Config\.defaults"):
        Config()


def renamed(toy_config, name, **fields):
    made = dataclasses.make_dataclass("Mine", fields.items(), bases=(toy_config,), frozen=True, kw_only=True)
    made.name = name
    return made


def test_a_class_that_no_command_can_offer_is_not_registered(toy_config):
    class Plain(toy_config):
        name = "plain"

    cases = {
        "config is 3; wants a subclass of TrainingConfig": 3,
        "Plain is no frozen dataclass; wants @dataclasses.dataclass": Plain,
        "Mine has the name 'my run'; wants letters, digits, and hyphens": renamed(toy_config, "my run"),
        "Mine has the name 'lenet', which is the name of LeNetConfig": renamed(toy_config, "lenet"),
        "Mine has the setting json, which is an option of every command": renamed(toy_config, "mine", json=int),
        "Mine has the setting x of type dict.* wants int": renamed(toy_config, "mine", x=dict[str, int]),
    }
    for message, config in cases.items():
        with pytest.raises(UserError, match=f"register: {message}"):
            register(config, reserved=["json"])
