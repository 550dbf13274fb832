"""Installed commands: which Python theirs is."""

import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.script.parse_command import check_module, program_file, shebang


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"#! /opt/env/bin/python3.11 -u\nimport sys\n", "/opt/env/bin/python3.11 -u"),
        # pip's, where the path has blanks or is too long
        (b"#!/bin/sh\n'''exec' \"/my env/bin/python3\" \"$0\" \"$@\"\n' '''\n", "/my env/bin/python3"),
        (b"#!/bin/sh\n'''exec' /long/bin/python3 \"$0\" \"$@\"\n' '''\n", "/long/bin/python3"),
        (b"#!/opt/\xff/python3\n", "/opt/\ufffd/python3"),
        (b"#!/bin/sh\n\0", ""),
    ],
)
def test_what_starts_a_program(tmp_path: Path, start: bytes, expected: str) -> None:
    (tmp_path / "program").write_bytes(start)
    assert shebang(str(tmp_path / "program")) == expected


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an environment's programs, in which ranks run."""
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(path: Path, interpreter: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n")
    path.chmod(0o755)
    return path


def test_a_program_of_the_ranks_environment(installed: Path) -> None:
    mine = program(installed / "mine", str(installed / "python"))
    assert program_file("mine") == mine
    anybodys = program(installed / "anybodys", "/usr/bin/env python3")
    assert program_file("anybodys") == anybodys
    gone = program(installed / "gone", "/gone/bin/python3")
    assert program_file("gone") == gone, "an interpreter that is not there says of no environment"


def test_a_program_of_another_environment(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other" / "bin"
    other.mkdir(parents=True)
    (other / "python").symlink_to(sys.executable)
    program(other / "theirs", str(other / "python"))
    monkeypatch.setenv("PATH", str(other))
    with pytest.raises(UserError) as caught:
        program_file("theirs")
    assert f"is of {tmp_path / 'other'}, and ranks run in {tmp_path / 'env'}: install it there" in str(caught.value)


def test_modules_that_are_not_there_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no module axolotl here, nor in .*: `pip install axolotl` there"):
        check_module("axolotl.cli.train")
    with pytest.raises(UserError, match=r"no module nowhere here, nor in [^`]*$"):
        check_module("nowhere.train")
    check_module("json.tool")
    (tmp_path / "nowhere").mkdir()
    check_module("nowhere.train")
    (tmp_path / "single.py").touch()
    check_module("single")
