"""A terminal or a pager that stops reading ends no training."""

import os
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from autotune.executors.cluster import rpc as wires
from autotune.executors.cluster.rpc import CommandAgent
from autotune.executors.cluster.transports import agent_words
from tests.executors.cluster.hosts import Hosts


@pytest.fixture(autouse=True)
def pager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard error is a pipe that nobody reads."""
    reads, writes = os.pipe()
    monkeypatch.setattr(wires, "_STANDARD_ERROR", writes)
    monkeypatch.setattr(wires, "LEAVE_SECONDS", 1.0)
    yield
    os.close(reads)
    os.close(writes)


LOUD = """
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    if call["type"] == "write":
        for _ in range(16):
            sys.stderr.write("a line of a training\\n" * 50_000)
    if call["type"] != "receive":
        print(json.dumps({"type": "answer", "number": call["number"], "value": {}}), flush=True)
"""


def is_heard(agent: CommandAgent) -> None:
    with closing(agent):
        agent.greet(60)
        agent.start_echo()
        assert agent.call("write", 60) == {}
        assert not agent.failure


def test_a_node_is_heard_though_nobody_reads_what_its_ranks_write(tmp_path: Path) -> None:
    is_heard(CommandAgent("n1", [agent_words()[0], "-c", LOUD], tmp_path / "log"))
    assert (tmp_path / "log").read_bytes().endswith(b"a line of a training\n"), "its end is kept"


@pytest.mark.slow
def test_so_is_one_that_is_reached_over_ssh(hosts: Hosts, tmp_path: Path) -> None:
    """Its ranks' words and its agent's share a channel there: where the first are not taken the second do not come."""
    there = shlex.join([agent_words()[0], "-c", LOUD])
    is_heard(CommandAgent("node1", ["ssh", "-T", "node1", there], tmp_path / "log"))
