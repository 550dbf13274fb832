"""The marker `few(n)`: which parameter sets of a test are fast."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests.conftest import mark_rest_slow


class Item:
    """A collected test with one parameter."""

    def __init__(self, at: int, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = f"tests/a.py::test_a[{at}]", {mark.name: mark.mark for mark in marks}
        self.callspec = types.SimpleNamespace(indices={"value": at})

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def fast(items: list[Item]) -> list[str]:
    mark_rest_slow(items)  # type: ignore[arg-type]
    return sorted(item.nodeid for item in items if "slow" not in item.marks)


@pytest.mark.parametrize(("n", "kept"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 4]), (9, range(6))])
def test_parameter_sets_spread_evenly_stay_fast_in_any_order(n: int, kept: list[int]) -> None:
    expected = [f"tests/a.py::test_a[{at}]" for at in kept]
    assert fast([Item(at, pytest.mark.few(n)) for at in (3, 0, 5, 1, 4, 2)]) == expected
