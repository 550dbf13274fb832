import argparse
from collections.abc import Callable, Iterator

import pytest

from autotune.rank.hooks import arguments
from tests.conftest import make_candidate


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "3")
    return


def parse(*flags: str, typed: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in flags:
        parser.add_argument(flag, type=int, default=-1)
    return parser.parse_args(typed or [])


def test_flags_carry_the_candidate(context: Callable) -> None:
    made, _ = context(make_candidate(1, 8, 4), flags=(("train_micro_batch_size_per_gpu", "--batch-size"),))
    arguments.install(made)
    found = parse("--batch-size", "--gradient_accumulation_steps", "--epochs", typed=["--batch-size", "2"])
    assert (found.batch_size, found.gradient_accumulation_steps, found.epochs) == (8, 4, -1)
    assert vars(parse("--epochs")) == {"epochs": -1}, "a parser without the flags gets nothing"


def test_what_flags_say_themselves_is_noted(context: Callable) -> None:
    made, _ = context(make_candidate(1, 8, 4), flags=(("train_micro_batch_size_per_gpu", "--batch-size"),))
    arguments.install(made)
    parse("--batch-size", "--gradient_accumulation_steps", "--epochs", typed=["--batch-size", "2", "--epochs", "3"])
    assert made.said == {"train_micro_batch_size_per_gpu": [2], "gradient_accumulation_steps": []}, "a default of -1"
    for value in ("6", 2, True, 0, None, "many"):
        made.note_said("train_micro_batch_size_per_gpu", value)
    assert made.said["train_micro_batch_size_per_gpu"] == [2, 6]


def test_a_script_as_it_is_keeps_its_arguments(context: Callable) -> None:
    made, _ = context()
    arguments.install(made)
    assert parse("--gradient_accumulation_steps").gradient_accumulation_steps == -1


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_the_rank_is_given_as_the_deepspeed_launcher_does(context: Callable, flag: str) -> None:
    made, _ = context()
    arguments.install(made)
    assert parse(flag).local_rank == 3
    assert parse(flag, typed=[flag, "1"]).local_rank == 1, "what is typed stays"
    assert made.flags == {flag}


def test_flags_worth_knowing_are_noted(context: Callable) -> None:
    made, _ = context()
    arguments.install(made)
    parse("--per_device_train_batch_size", "--epochs")
    parse("--deepspeed")
    assert made.flags == {"--per_device_train_batch_size", "--deepspeed"}


def test_undone_it_is_argparse_again(context: Callable) -> None:
    made, _ = context(make_candidate(1, 8, 4))
    before = argparse.ArgumentParser.parse_known_args
    arguments.install(made)
    assert argparse.ArgumentParser.parse_known_args is not before
    made.patches.undo()
    assert argparse.ArgumentParser.parse_known_args is before
    assert parse("--gradient_accumulation_steps", "--local_rank").local_rank == -1
