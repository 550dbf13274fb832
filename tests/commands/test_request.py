"""Each option is declared once, as a field of Request; the command line and the Python API follow from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.cli.app import parser
from autotune.commands.request import parameters, python_errors
from autotune.errors import NotProtected, UserError
from tests.cli_call import call

COMMANDS = ("run", "plan", "launch")


def every_command(group: Any = None, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command that is no group, with its words."""
    for name, one in (group or parser()).commands.items():
        if hasattr(one, "commands"):
            yield from every_command(one, (*above, name))
        else:
            yield (*above, name), one


def test_help_ends_with_three_examples_that_parse(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsers = dict(every_command())
    for words, command in parsers.items():
        if command.hidden:
            continue
        shown = call(monkeypatch, capsys, *words, "--help")[1]
        assert re.search(r"<(str|int|bool|path|list)", shown) is None
        lines = [line.split() for line in shown.partition("Examples")[2].splitlines() if line.strip()]
        assert len(lines) == 3, words
        for line in lines:
            typed = line[1 : line.index(">") if ">" in line else None]
            deep = 2 if typed[0] == "spaces" else 1
            parsers[tuple(typed[:deep])].make_context("autotune", typed[deep:])  # raises for an unknown option


@pytest.mark.parametrize("words", [(), ("spaces",)])
def test_without_arguments_help_is_printed_and_no_error(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, capsys, *words) == call(monkeypatch, capsys, *words, "--help")
    assert call(monkeypatch, capsys, *words)[0] == 0


@pytest.mark.parametrize("words", [(), ("run",), ("spaces", "show")])
def test_h_is_short_for_help(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = call(monkeypatch, capsys, *words, "-h")
    assert short == call(monkeypatch, capsys, *words, "--help")
    assert short[0] == 0
    assert "Usage" in short[1]


IN_PYTHON = [(command, one.name) for command in COMMANDS for one in parameters(command) if one.option.in_python]


@pytest.mark.parametrize(("command", "name"), IN_PYTHON)
def test_python_converts_or_refuses_a_value_of_each_option(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = {"run": autotune.tune, "plan": autotune.plan, "launch": partial(autotune.launch, "s", ["train.py"])}
    ask: Any = calls[command]
    with pytest.raises(UserError, match=f"^{name}: expected"):
        ask(**{name: object()})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--map", "x" * 65_537), "--map: expected at most 65536 characters, found 65537"),
        (("--gpus", "four"), "--gpus: expected a whole number, found four"),
        (("--seed", "-1"), "--seed: expected at least 0, found -1"),
        (("--max-trials", "0"), "--max-trials: expected at least 1, found 0"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_flag(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(monkeypatch, capsys, "run", *words)
    assert (code, err) == (2, f"autotune: {said}\n")


def test_an_error_of_the_python_api_keeps_its_kind() -> None:
    with pytest.raises(NotProtected, match="pass unprotected"), python_errors():
        raise NotProtected
