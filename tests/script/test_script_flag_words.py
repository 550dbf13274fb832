"""Flags in a script's words, as its own parser spells them."""

from __future__ import annotations

import pytest

from autotune.problem.job import Script, ScriptProfile
from autotune.script.script import with_setting

SWITCH = [None, "--ckpt"]  # argparse's `store_true`
PAIR = ["--no-ckpt", "--ckpt"]  # its `BooleanOptionalAction`
VALUED = ["--ckpt=no", "--ckpt=yes"]


@pytest.mark.parametrize(
    ("spelling", "typed", "value", "expected"),
    [
        (SWITCH, "--lr 1 --ckpt --bs 2", True, "--lr 1 --ckpt --bs 2"),
        (SWITCH, "--lr 1 --bs 2", True, "--lr 1 --bs 2 --ckpt"),
        (PAIR, "--ckpt --bs 2", False, "--no-ckpt --bs 2"),
        (VALUED, "--ckpt yes more", False, "--ckpt=no more"),
        (VALUED, "--bs 2", False, "--bs 2 --ckpt=no"),
    ],
)
def test_a_setting_is_said_as_the_parser_takes_it(
    spelling: list[str | None], typed: str, value: bool, expected: str
) -> None:
    script = Script(("train.py",), ".", profile=ScriptProfile(spellings={"--ckpt": spelling}))
    assert with_setting(script, typed.split(), "--ckpt", value) == expected.split()


def test_other_flags_and_other_values_are_set_as_usual() -> None:
    script = Script(("train.py",), ".", profile=ScriptProfile(spellings={"--ckpt": PAIR}))
    assert with_setting(script, ["--bs", "2"], "--bs", 4) == ["--bs", "4"]
    assert with_setting(script, ["--ckpt", "2"], "--ckpt", 4) == ["--ckpt", "4"]
    assert with_setting(Script(("train.py",), "."), ["--bs", "2"], "--ckpt", True) == ["--bs", "2", "--ckpt", "True"]
