"""Flags in a script's words, as its own parser spells them."""

from __future__ import annotations

import pytest

from autotune.script.script import with_flag

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
    assert with_flag(typed.split(), "--ckpt", value, spelling) == expected.split()


def test_other_flags_and_other_values_are_set_as_usual() -> None:
    assert with_flag(["--ckpt", "2"], "--ckpt", 4, PAIR) == ["--ckpt", "4"]
    assert with_flag(["--bs", "2"], "--ckpt", True) == ["--bs", "2", "--ckpt", "True"]
