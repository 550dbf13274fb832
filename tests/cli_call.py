"""Calls the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autotune.cli import app
from benchmarks.search.replay import replayed


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `autotune words…`."""
    monkeypatch.setattr(sys, "argv", ["autotune", *words])
    code = 0
    try:
        app.main()
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], table: Path, *words: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `autotune run words…` that searches a recorded table."""
    with replayed(table):
        return call(monkeypatch, capsys, "run", *words)
