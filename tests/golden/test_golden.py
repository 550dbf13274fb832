"""Behaviour is as `expected/` has it; `python -m tests.golden.make GROUP` writes that again."""

from pathlib import Path

import pytest

from tests.golden.pins import EXPECTED, GROUPS, SLOW, expected

PARAMETERS = [pytest.param(group, marks=[pytest.mark.slow] * (group in SLOW)) for group in GROUPS]


@pytest.mark.parametrize("group", PARAMETERS)
def test_behaviour_is_unchanged(group: str, tmp_path: Path) -> None:
    found, pinned = GROUPS[group](tmp_path), expected(group)
    assert sorted(found) == sorted(pinned)
    for name, text in found.items():
        assert text == pinned[name], f"{group}/{name} changed; if intended: python -m tests.golden.make {group}"


def test_each_expected_folder_belongs_to_a_group() -> None:
    assert {path.name for path in EXPECTED.iterdir()} == set(GROUPS)
