import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import config
from autotune.rank.hooks.base import Context
from autotune.rank.hooks.config import merged_arguments
from autotune.script.script import command, with_flag
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
    config.install(made)
    found = parse("--batch-size", "--gradient_accumulation_steps", "--epochs", typed=["--batch-size", "2"])
    assert (found.batch_size, found.gradient_accumulation_steps, found.epochs) == (8, 4, -1)
    assert vars(parse("--epochs")) == {"epochs": -1}, "a parser without the flags gets nothing"


def test_what_flags_say_themselves_is_noted(context: Callable) -> None:
    made, _ = context(make_candidate(1, 8, 4), flags=(("train_micro_batch_size_per_gpu", "--batch-size"),))
    config.install(made)
    parse("--batch-size", "--gradient_accumulation_steps", "--epochs", typed=["--batch-size", "2", "--epochs", "3"])
    assert made.said == {"train_micro_batch_size_per_gpu": [2], "gradient_accumulation_steps": []}, "a default of -1"
    for value in ("6", 2, True, 0, None, "many"):
        made.note_said("train_micro_batch_size_per_gpu", value)
    assert made.said["train_micro_batch_size_per_gpu"] == [2, 6]


@pytest.mark.parametrize("flag", ["--local_rank", "--local-rank"])
def test_the_rank_is_given_as_the_deepspeed_launcher_does(context: Callable, flag: str) -> None:
    made, _ = context()
    config.install(made)
    assert parse(flag).local_rank == 3
    assert parse(flag, typed=[flag, "1"]).local_rank == 1, "what is typed stays"
    assert made.flags == {flag}


# -- how a flag is told yes or no ----------------------------------------------------------------------------------------

CHECKPOINTING = "--gradient_checkpointing"
YES_OR_NO: dict[str, tuple[dict[str, Any], list[str]]] = {  # what `add_argument` is told, and what a person may type
    "switch": ({"action": "store_true"}, [CHECKPOINTING]),
    "either": ({"action": argparse.BooleanOptionalAction, "default": True}, ["--no-gradient_checkpointing"]),
    "bool of a text": ({"type": bool, "default": False}, [CHECKPOINTING, "1"]),  # "False" is true
    "number": ({"type": int, "default": 0}, [f"{CHECKPOINTING}=1"]),
    "choice of numbers": ({"type": int, "choices": [0, 1], "default": 1}, [CHECKPOINTING, "0"]),
    "its own type": ({"type": lambda word: {"on": True, "off": False}[word], "default": False}, [CHECKPOINTING, "on"]),
    "Hugging Face's": (
        {"type": lambda word: {"true": True, "false": False}[word.lower()], "nargs": "?", "const": True},
        [CHECKPOINTING, "false"],
    ),
    "choice of words": ({"type": str, "choices": ["on", "off"], "default": "off"}, [CHECKPOINTING, "on"]),
    "choice of more words": ({"choices": ["auto", "Yes", "No"], "default": "auto"}, [f"{CHECKPOINTING}=Yes"]),
    "choice in any case": ({"type": str.lower, "choices": ["enable", "disable"]}, [CHECKPOINTING, "Enable"]),
    "word": ({"default": "true"}, [CHECKPOINTING, "false"]),
    "word of a few": ({"type": str, "choices": ["0", "1", "on", "off"], "default": "on"}, [CHECKPOINTING, "on"]),
    "inverse": ({"action": "store_false"}, [CHECKPOINTING]),
}


def yes_or_no_parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(CHECKPOINTING, **YES_OR_NO[kind][0])
    parser.add_argument("--oc", action="store_true")
    parser.add_argument("--lr", type=float)
    return parser


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("kind", list(YES_OR_NO))
def test_a_command_says_yes_or_no_as_its_parser_takes_it(
    context: Callable, kind: str, typed: bool, value: bool
) -> None:
    """What a command says is read by a parser that nothing hooks, as in a training without autotune."""
    given = [*(YES_OR_NO[kind][1] if typed else []), "--lr", "1"]
    made, _ = context(argv=("train.py", *given), flags=(("overlap_comm", "--oc"),))
    config.install(made)
    yes_or_no_parser(kind).parse_args(given)
    made.patches.close()
    script = replace(made.script, profile=ScriptProfile.from_json(in_a_profile(made)))
    candidate = make_candidate(1, 8, 4, activation_checkpointing=value).but(overlap_comm=value)
    words = command(script, candidate, "best.json")[1:]
    read = yes_or_no_parser(kind).parse_args(words)
    assert (meant(read.gradient_checkpointing), read.oc, read.lr) == (value, value, 1.0), words
    again = command(replace(script, argv=("train.py", *words)), candidate, "best.json")[1:]
    assert vars(yes_or_no_parser(kind).parse_args(again)) == vars(read), "said twice it is the same"
    made.candidate, made.job = candidate, replace(made.job, script=script)
    config.install(made)
    tried = yes_or_no_parser(kind).parse_args(merged_arguments(made))
    assert (tried.oc, tried.gradient_checkpointing) == (value, read.gradient_checkpointing), "trials, too"


def meant(value: bool | str) -> bool:
    """As a script takes it, which compares with a word of its parser's."""
    return value in ("on", "Yes", "enable", "true") if isinstance(value, str) else value


def in_a_profile(made: Context) -> dict[str, Any]:
    """What the study keeps of it."""
    return json.loads(json.dumps({"flags": sorted(made.flags), "spellings": made.spellings}))


def test_what_needs_no_other_words_is_not_kept(context: Callable) -> None:
    made, _ = context()
    config.install(made)
    parser = argparse.ArgumentParser()
    parser.add_argument(CHECKPOINTING, **YES_OR_NO["Hugging Face's"][0])
    parser.add_argument("--deepspeed", action="store_true")  # no knob's
    parser.parse_args([])
    assert made.spellings == {}, "a study of before is of the same script"


def test_a_value_in_place_of_a_switch_is_taken_out_with_it() -> None:
    spelt = {"--gc": ["--gc=0", "--gc=1"], "--ckpt": [None, "--ckpt"]}

    def told(flag: str, value: bool | int, *words: str) -> list[str]:
        return with_flag(list(words), flag, value, spelt.get(flag))

    assert told("--gc", True, "--gc", "0", "--lr", "1") == ["--gc=1", "--lr", "1"]
    assert told("--gc", False, "--lr", "--gc", "--x") == ["--lr", "--gc=0", "--x"]
    assert told("--gc", True, "x", "--gc=0", "--gc", "0") == ["x", "--gc=1"]
    assert told("--ckpt", False, "--ckpt", "data.json") == ["data.json"], "what follows a switch is not its value"
    assert told("--ckpt", True, "data.json") == ["data.json", "--ckpt"]
    assert told("--other", True) == ["--other", "True"], "a flag of which nothing is known"
    assert told("--gc", 3, "--gc", "0") == ["--gc", "3"], "no yes and no no"
