"""A terminal or a pager that stops reading ends no training, and what it did not read is said."""

import array
import fcntl
import os
import re
import shlex
import termios
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.executors.cluster import rpc as wires
from autotune.executors.cluster.rpc import OutputForwarder, StreamAgent
from autotune.executors.cluster.transports import agent_words
from tests.conftest import wait_until
from tests.executors.cluster.hosts import Hosts

LINE = b"step 123456 loss 0.12\n"


@pytest.fixture
def pager() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe that nobody reads."""
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)  # ends a write that waits
    for thread in threading.enumerate():
        if thread.name == "echo":
            thread.join(60)
    os.close(writes)


def unread(reads: int) -> int:
    """Bytes that lie in a pipe."""
    found = array.array("i", [0])
    fcntl.ioctl(reads, termios.FIONREAD, found)
    return found[0]


def read_all(reads: int, into: bytearray) -> threading.Thread:
    def read() -> None:
        while not into.endswith(b"the end\n"):
            into.extend(os.read(reads, 65536))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def test_what_is_read_is_all_there(pager: tuple[int, int], tmp_path: Path) -> None:
    echo, found = OutputForwarder(pager[1], tmp_path / "log"), bytearray()
    thread = read_all(pager[0], found)
    for _ in range(100):
        echo.give(LINE * 100)
    echo.give(b"the end\n")
    echo.close()
    thread.join(60)
    assert found == LINE * 10_000 + b"the end\n"


def test_nobody_waits_for_a_reader_and_the_oldest_is_left_out(pager: tuple[int, int], tmp_path: Path) -> None:
    echo, found = OutputForwarder(pager[1], tmp_path / "log", pieces=24), bytearray()
    echo.give(LINE * 5000)
    wait_until(lambda: unread(pager[0]) == 2**16, "the pipe to be full")
    given = len(LINE) * 5000
    for number in range(200):
        piece = f"{number}\n".encode() + LINE * 500
        echo.give(piece)
        given += len(piece)
    echo.give(b"the end\n")
    thread = read_all(pager[0], found)
    echo.close()
    thread.join(60)
    text = bytes(found)
    notes = re.findall(
        rb"\n\[autotune: (\d+\.\d\d?) MiB were not read in time and are left out here: (\S+) has the end of all\]\n",
        text,
    )
    assert [where.decode() for _, where in notes] == [str(tmp_path / "log")]
    read = len(text) - sum(len(line) for line in text.splitlines(keepends=True) if b"[autotune" in line) - 1
    assert float(notes[0][0]) == pytest.approx((given + 8 - read) / 2**20, abs=0.06)
    assert text.startswith(LINE * 5000 + b"\n[autotune"), "what was being written, whole"
    assert text.endswith(b"199\n" + LINE * 500 + b"the end\n"), "and the newest"


def test_an_end_that_nobody_reads_is_not_waited_for(pager: tuple[int, int], tmp_path: Path) -> None:
    echo = OutputForwarder(pager[1], tmp_path / "log")
    echo.give(LINE * 10_000)
    echo.close()


def test_a_reader_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    echo = OutputForwarder(writes, tmp_path / "log")
    echo.give(LINE)
    echo.give(LINE)
    echo.close()
    os.close(writes)
    OutputForwarder(writes, tmp_path / "log").close()


LOUD = """
import json, sys
print('{"type": "agent", "version": ""}', flush=True)
while '"write"' not in (line := sys.stdin.readline()):
    pass
for _ in range(16):
    sys.stderr.write("a line of a training\\n" * 50_000)
print(json.dumps({"type": "answer", "number": json.loads(line)["number"], "value": "written"}), flush=True)
sys.stdin.read()
"""


def is_heard(agent: StreamAgent) -> None:
    with closing(agent):
        agent.greet(60)
        agent.start_echo()
        assert agent.call("write", 60) == "written"
        assert not agent.failure


def test_a_node_is_heard_though_nobody_reads_what_its_ranks_write(
    pager: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wires, "_STANDARD_ERROR", pager[1])
    is_heard(StreamAgent("n1", [agent_words()[0], "-c", LOUD], tmp_path / "log"))
    assert (tmp_path / "log").read_bytes().endswith(b"a line of a training\n"), "its end is kept"


@pytest.mark.slow
def test_so_is_one_that_is_reached_over_ssh(
    hosts: Hosts, pager: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks' words and its agent's share a channel there: where the first are not taken the second do not come."""
    monkeypatch.setattr(wires, "_STANDARD_ERROR", pager[1])
    there = shlex.join([agent_words()[0], "-c", LOUD])
    is_heard(StreamAgent("node1", ["ssh", "-T", "node1", there], tmp_path / "log"))
