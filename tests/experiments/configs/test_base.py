import dataclasses

import pytest

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
