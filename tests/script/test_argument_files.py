"""What a command's words and files say of a knob."""

from __future__ import annotations

import pytest

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.job import ArgumentFile, Script
from autotune.script.argument_files import knob_values


def script_of(words: str, *files: tuple[int, dict[str, object]], flag: str = "--bs") -> Script:
    argv = tuple(words.split())
    held = tuple(ArgumentFile(at, argv[at], "", data) for at, data in files)
    return Script(argv, ".", ((MICRO_BATCH, flag),), files=held)


@pytest.mark.parametrize(
    ("words", "flag", "expected"),
    [
        ("train.py --bs 4 --lr 1", "--bs", ["4"]),
        ("train.py --bs=8 --lr 1", "--bs", ["8"]),
        ("train.py --lr 1 --bs", "--bs", []),
        ("train.py ++batch=a=b", "batch", ["a=b"]),
        ("train.py --batch 4", "--bs", []),
    ],
)
def test_words_by_the_flag_that_the_user_declared(words: str, flag: str, expected: list[str]) -> None:
    script = script_of(words, flag=flag)
    assert knob_values(script, MICRO_BATCH) == expected
    assert knob_values(script, ACCUMULATION) == [], "no flag is known for it"


def test_files_by_the_name_that_was_declared_or_by_usual_ones() -> None:
    files = (
        (1, {"data": {"rows": 2}, "lr": 1}),
        (2, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}),
    )
    assert knob_values(script_of("train.py a.yaml b.yaml", *files, flag="data.rows"), MICRO_BATCH) == [2]
    assert knob_values(script_of("train.py a.yaml b.yaml --bs 4", *files), MICRO_BATCH) == ["4"], "a flag is no file's"
    usual = script_of("train.py a.yaml b.yaml data.rows=5", *files, flag="data.rows")
    assert knob_values(usual, MICRO_BATCH) == ["5", 2]
    assert knob_values(usual, ACCUMULATION) == [3]
