"""The log: what a call prints and does is in the logger `autotune`, with secrets masked."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.masking import forget, learn
from autotune.util.streams import LOG, logging_to
from tests.cli_call import call

PLAN = ("plan", "--model", "tiny-llama", "--gpu", "h100", "--gpus", "1")


def test_a_file_has_every_record_with_its_time_and_without_secrets(tmp_path: Path) -> None:
    learn("hunter2222")
    try:
        for word in ("first", "second"):
            with logging_to(tmp_path / "x.log"):
                LOG.debug("%s has hunter2222", word)
        LOG.error("after the call")
    finally:
        forget()
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert [line.split(maxsplit=3)[2:] for line in lines] == [["DEBUG", "first has ***"], ["DEBUG", "second has ***"]]
    assert LOG.level == logging.NOTSET


def test_errors_are_in_the_log_file_and_a_wrong_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("budget: 1h\n")
    words = ("run", "job.yaml", "--device", "cpu", "--model", "tiny-llamax", "--log-file", "x.log")
    assert call(monkeypatch, capsys, *words)[0] == 2
    assert "unknown model 'tiny-llamax'" in (tmp_path / "x.log").read_text()
    code, _, err = call(monkeypatch, capsys, "run", "--model", "tiny-llama", "--log-file", str(tmp_path))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "cannot be written (Is a directory)" in err
    with pytest.raises(UserError, match="--log-file"), logging_to(tmp_path / "no" / "x.log"):
        pass


def test_a_full_disk_under_the_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(Path("/dev/full")):
        LOG.info("first")
        LOG.info("second")
    assert capsys.readouterr().err == "autotune: --log-file is incomplete: [Errno 28] No space left on device\n"
