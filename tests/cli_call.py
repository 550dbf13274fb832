"""Calls the command line in this process."""

from __future__ import annotations

import sys

import pytest

from autotune.cli import app


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
