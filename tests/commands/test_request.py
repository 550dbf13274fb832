"""Each option is declared once, as a field of Request; the command line and the Python API follow from it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

import autotune
from autotune.cli.app import app
from autotune.commands.request import Panel, Request, parameters
from autotune.errors import UserError
from tests.cli_call import call

COMMANDS = ("run", "plan", "launch")
NO_OPTIONS = {"runs", "command"}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command_are_the_fields_for_it(command: str) -> None:
    group: Any = typer.main.get_command(app)
    shown = {one.name: one for one in group.commands[command].params}
    declared = {one.name: one for one in parameters(command)}
    assert shown.keys() == declared.keys()
    for name, one in shown.items():
        assert one.help == declared[name].help
        assert one.secondary_opts == [], "no --no-FLAG"


def test_every_field_is_an_option_of_some_command() -> None:
    declared = {one.name for command in COMMANDS for one in parameters(command)}
    assert {one.name for one in dataclasses.fields(Request)} - declared == NO_OPTIONS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_first_panel_has_ten_options(command: str) -> None:
    options = [one for one in parameters(command) if one.metavar is None]
    assert len([one for one in options if one.panel is Panel.FIRST]) == 10
    assert all(one.panel is Panel.FIRST for one in options[:10])


@pytest.mark.parametrize("words", [(), ("run",), ("spaces", "show")])
def test_h_is_short_for_help(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = call(monkeypatch, capsys, *words, "-h")
    assert short == call(monkeypatch, capsys, *words, "--help")
    assert short[0] == 0
    assert "Usage" in short[1]


IN_PYTHON = [
    (command, one.name) for command in ("run", "launch") for one in parameters(command) if one.option.in_python
]


@pytest.mark.parametrize(("command", "name"), IN_PYTHON)
def test_python_converts_or_refuses_a_value_of_each_option(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = partial(autotune.launch, "s", ["train.py"]) if command == "launch" else autotune.tune
    with pytest.raises(UserError, match=f"^{name}: expected"):
        ask(**{name: object()})


@pytest.mark.parametrize(
    ("flag", "request_"),
    [("--map", {"maps": ["a\0b"]}), ("--attn", {"attention": "\0"}), ("--export", {"exports": ["\0"]})],
)
def test_messages_name_the_flag_and_not_the_field(flag: str, request_: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{flag}: "):
        Request(**request_)
