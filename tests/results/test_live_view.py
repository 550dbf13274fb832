"""The live view in a pseudo-terminal: every printed line stays in the scrollback."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

PROGRAM = """
import signal, sys, threading, time
from autotune.results.tables import console
from autotune.commands.run import stop_on_signals
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.results.console import LiveObserver, make_observer
from autotune.search.leaderboard import Leaderboard
from autotune.search.trials import Record
from tests.conftest import make_candidate, make_job

observer = make_observer(console(), quiet=False)
assert isinstance(observer, LiveObserver)
outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 8.0, 8.0, 300 << 20), seconds=1.0)
records = []
with stop_on_signals() as stopped, observer:
    for number in range(3):
        observer.doing(f"building op {number} (it took 54.1 s the last time)")
        time.sleep(0.15)
        observer.print_line(f"MARK built {number} END")
        observer.doing("")
        time.sleep(0.15)
    observer.begin_study(lambda: Leaderboard(records, detect("cpu", 2), make_job()))
    observer.start(60.0, 1.0)
    for number in range(30):
        if stopped.is_set():
            break
        observer.trial_started(number, make_candidate(), "search", "")
        time.sleep(0.02)
        records.append(Record(number, make_candidate(), outcome, "search"))
        observer.trial_finished(number, make_candidate(), "search", outcome)
        observer.print_line(f"MARK line {number} {'long ' * 30}END")
    print("MARK printed by other code END")
    if sys.argv[1] == "ctrl-c":
        assert stopped.wait(30)
    observer.print_line("MARK last END")
print("MARK summary END")
"""


class Screen:
    """Terminal of some columns and rows, with all lines that left it at the top: cursor moves, erasing, wrapping."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.gone: list[str] = []  # scrollback
        self.lines = [""]
        self.x = self.y = 0

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\x1b\][^\x07]*\x07|[^\x1b]", text):
            if token.startswith("\x1b["):
                self._command(token[-1], token[2:-1])
            elif token == "\r":
                self.x = 0
            elif token == "\n":
                self._down()
            elif token.isprintable():
                self._put(token)

    def _put(self, letter: str) -> None:
        if self.x >= self.columns:
            self.x = 0
            self._down()
        line = self.lines[self.y].ljust(self.x)
        self.lines[self.y] = line[: self.x] + letter + line[self.x + 1 :]
        self.x += 1

    def _down(self) -> None:
        self.y += 1
        if self.y == len(self.lines):
            self.lines.append("")
        while len(self.lines) > self.rows:
            self.gone.append(self.lines.pop(0))
            self.y -= 1

    def _command(self, name: str, number: str) -> None:
        if name == "A":
            self.y = max(0, self.y - int(number or 1))
        elif name == "K":
            self.lines[self.y] = "" if number == "2" else self.lines[self.y][: self.x]
        elif name == "J":
            assert number not in ("2", "3"), "the screen is never cleared"
            del self.lines[self.y + 1 :]
        else:
            assert name in "mhl", f"a sequence that this terminal does not know: {name}"

    def resize(self, columns: int, rows: int) -> None:
        """Change the size. What is beyond the right edge stays, as terminals keep it for a later size."""
        self.columns, self.rows = columns, rows
        while len(self.lines) > rows:
            self.gone.append(self.lines.pop(0))
            self.y = max(0, self.y - 1)

    def text(self) -> str:
        return "".join(line.ljust(self.columns) if line else "\n" for line in [*self.gone, *self.lines])


@pytest.mark.few(1)
@pytest.mark.parametrize("happens", ["nothing", "ctrl-c", "resize"])
def test_every_printed_line_is_in_the_scrollback(happens: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    master, slave = pty.openpty()
    screen = Screen(80, 24)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    started = subprocess.Popen(
        [sys.executable, str(program), happens],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": os.getcwd(), "COLUMNS": "", "LINES": ""},
        start_new_session=True,
    )
    os.close(slave)
    seen, done = "", False
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            piece = os.read(master, 4096).decode(errors="replace")
        except OSError:  # the program has ended
            break
        screen.feed(piece)
        seen += piece
        if not done and "MARK line 5" in seen:
            done = True
            if happens == "ctrl-c":
                screen.feed("^C")  # a terminal's echo
                os.killpg(started.pid, signal.SIGINT)
            elif happens == "resize":
                fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 16, 60, 0, 0))
                screen.resize(60, 16)
                os.killpg(started.pid, signal.SIGWINCH)
    os.close(master)
    assert started.wait(60) == 0, seen[-2000:]

    printed = re.findall(r"MARK (.*?) *END", re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|[\r\n]", "", seen))
    assert len(printed) >= 3 + 5 + 3
    kept = re.sub(r"\s+", "", screen.text())
    lost = [line for line in printed if "MARK" + re.sub(r"\s+", "", line) + "END" not in kept]
    assert not lost, screen.text()
    assert "MARKsummaryEND" in kept
    trials = re.findall(r"trial +(\d+)  z0", seen)
    assert all(f"trial{number}z0" in kept for number in trials)
    if happens != "resize":  # a narrower terminal wraps what it had
        assert "╭" not in kept, "no border of the view is left"
    assert "building op" not in "\n".join([*screen.gone, *screen.lines][-5:]), "the view is gone at the end"
