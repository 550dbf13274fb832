import json
from pathlib import Path

import optuna
import pytest

from autotune.search.trials import MOST_BYTES, attributes, set_attribute


def study() -> optuna.Study:
    return optuna.create_study()


def longest(study: optuna.Study) -> int:
    return max(len(json.dumps(value)) for value in study.user_attrs.values())


@pytest.mark.parametrize(
    "value",
    [
        {"id2label": {str(n): f"label {n}" for n in range(21_843)}},  # of a model for ImageNet-21k
        '"' * 200_000,  # its JSON has a backslash before each
        "ä" * 50_000,  # six bytes each in JSON
        list(range(30_000)),
    ],
)
def test_a_long_value_is_kept_in_pieces_that_any_database_takes(value: object) -> None:
    one = study()
    set_attribute(one, "fingerprint", value)
    set_attribute(one, "short", {"a": 1})
    assert attributes(one)["fingerprint"] == value
    assert attributes(one)["short"] == {"a": 1} == one.user_attrs["short"], "as any reader finds it"
    assert longest(one) <= MOST_BYTES


def test_who_is_killed_between_two_pieces_leaves_the_old_value(monkeypatch: pytest.MonkeyPatch) -> None:
    one, old, new = study(), ["old"] * 20_000, ["new"] * 30_000
    set_attribute(one, "key", old)
    stored, write = [], one.set_user_attr

    def killed(name: str, value: object) -> None:
        if len(stored) == 2:
            raise KeyboardInterrupt
        stored.append(name)
        write(name, value)

    monkeypatch.setattr(one, "set_user_attr", killed)
    with pytest.raises(KeyboardInterrupt):
        set_attribute(one, "key", new)
    assert attributes(one)["key"] == old
    monkeypatch.undo()
    set_attribute(one, "key", new)
    assert attributes(one)["key"] == new
    set_attribute(one, "key", "short again")
    assert attributes(one)["key"] == "short again"


def test_a_real_database_takes_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    value = "x" * 100_000
    set_attribute(optuna.create_study(study_name="s", storage=url), "space", value)
    assert attributes(optuna.load_study(study_name="s", storage=url))["space"] == value
