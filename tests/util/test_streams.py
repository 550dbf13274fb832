"""Whoever reads what we say may go: the work goes on."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from autotune.util.streams import UnclosedStream, is_watched, lasting_streams
from tests.conftest import Terminal

# Says much more than a pipe holds, waits until nobody reads, says it again, and then does what counts.
WORKS = """
import sys, time
from pathlib import Path
from rich.console import Console
from autotune.util.streams import lasting_streams
with lasting_streams():
    print("begun", flush=True)
    sys.stdin.read()
    for _ in range(10_000):
        print("x" * 100)
    Console(force_terminal=True).print("[bold]seen by nobody")
    print("nor this", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("done")
"""


def test_a_pipe_whose_reader_has_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKS, str(tmp_path / "result")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline() == b"begun\n"
    process.stdout.close()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "result").read_text() == "done"


def test_a_terminal_that_hung_up(tmp_path: Path) -> None:
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WORKS, str(tmp_path / "result")],
        stdin=subprocess.PIPE,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    assert os.read(master, 5) == b"begun"
    os.close(master)
    assert process.stdin
    process.stdin.close()
    assert process.wait(timeout=120) == 0
    assert (tmp_path / "result").read_text() == "done"


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said() -> None:
    with pytest.raises(OSError, match="No space left"):
        UnclosedStream(Full()).write("x")


def test_the_streams_are_put_back_and_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    with lasting_streams():
        print("said")
        assert sys.stdout is not out
        assert sys.stderr is None
    assert sys.stdout is out
    assert out.getvalue() == "said\n"
    monkeypatch.setattr(sys, "stdout", None)  # `>&-`
    with lasting_streams():
        print("said to nobody")
    assert sys.stdout is None


def test_who_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert is_watched(Terminal())
    assert is_watched(cast(Any, UnclosedStream(Terminal())))
    assert not is_watched(io.StringIO())
    assert not is_watched(None)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not is_watched(Terminal()), "a notebook's cell moves no cursor"


def said(words: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **how.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "autotune", *words], stderr=subprocess.PIPE, env=env, timeout=120, **how
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("words", [["models"], ["models", "--json"], ["spaces", "show", "default"], ["--version"]])
def test_a_disk_that_is_full_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = said(words, stdout=full)
    assert done.returncode == 4
    assert done.stderr.startswith(b"autotune: the disk refuses to be written (No space left on device)")
    assert done.stderr.count(b"\n") == 1


def test_what_a_terminal_cannot_show_costs_no_line() -> None:
    ascii_alone = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = cast(Any, UnclosedStream(ascii_alone))
    print("12 samples/s, ±0.1 %", file=stream)
    stream.writelines(["naïve\n", "\udcff\n"])
    stream.flush()
    assert cast(io.BytesIO, ascii_alone.buffer).getvalue() == b"12 samples/s, ?0.1 %\nna?ve\n?\n"


def test_the_traceback_of_a_bug_shows_no_secret() -> None:
    code = """
from autotune.masking import learn
from autotune.util.streams import lasting_streams
learn("hunter2-of-mine")
with lasting_streams():
    raise RuntimeError("refused: hunter2-of-mine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: refused: ***"
    assert "hunter2" not in done.stderr
    assert done.stderr.count("Traceback") == 1
