"""Figures that cannot be are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.gallery.warm_start import checked
from tests.gallery.studies import changed

Change = Callable[[dict[str, Any]], object]


def faster(times: float) -> Change:
    """All speeds of the first candidate alike: nothing but the card speaks against it."""

    def change(entry: dict[str, Any]) -> None:
        one = entry["candidates"][0]
        one["step_seconds"] /= times
        one["samples_per_second"] *= times
        one["tokens_per_second"] *= times

    return change


def with_job(**changes: Any) -> Change:
    def change(entry: dict[str, Any]) -> None:
        faster(2e4)(entry)
        entry["job"].update(changes)

    return change


CASES: list[tuple[str, Change, str]] = [
    (
        "peak",
        faster(5e4),
        r"candidates\[0\].tokens_per_second: .* TFLOP/s a device, and a rtx4090 computes at most 165",
    ),
    (
        "unknown card",
        lambda e: (faster(5e5)(e), e["machine"].update(gpu=None)),
        "and the fastest card known computes at most",
    ),
    ("unknown shape", with_job(shape={}, architecture=None, model=None), "TFLOP/s a device"),
    (
        "memory",
        lambda e: e["candidates"][0].update(peak_gib=80.0),
        r"candidates\[0\].peak_gib: 80 GiB are more than the card's",
    ),
    (
        "capacity",
        lambda e: e["machine"].update(capacity_gib=99.0),
        "machine.capacity_gib: 99 GiB are more than the card's",
    ),
    ("card's memory", lambda e: e["machine"].update(memory_gib=80.0, capacity_gib=80.0), "a rtx4090 has"),
    (
        "step",
        lambda e: e["candidates"][0].update(step_seconds=0.5),
        r"candidates\[0\].samples_per_second: .* is not the 8 samples",
    ),
    (
        "tokens",
        lambda e: e["candidates"][0].update(tokens_per_second=9.0),
        r"candidates\[0\].tokens_per_second: .* tokens a sample",
    ),
    ("no winner", lambda e: (e.pop("winner"), e.pop("verified")), "winner: there is none"),
    ("another model", lambda e: e["job"].update(parameters=70_000_000_000), "job.shape: multiplies by"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_figures_that_cannot_be_are_refused_in_one_line(change: Change, said: str, tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    file.write_text(changed(change))
    with pytest.raises(UserError, match=said) as caught:
        checked(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_what_can_be_passes_up_to_the_peak(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    file.write_text(changed(faster(10)))
    assert len(checked(file).candidates) == 3
    file.write_text(changed(lambda entry: entry["machine"].update(name="H100 (80 GB) @ x")))
    checked(file)
