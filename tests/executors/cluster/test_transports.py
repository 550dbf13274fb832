"""What starts an agent, and what is said where none is heard."""

import shlex
import sys
from pathlib import Path

import pytest

from autotune.executors.cluster import transports
from autotune.executors.cluster.cluster import greeting_complaint
from autotune.executors.cluster.rpc import NodeDown
from autotune.executors.cluster.transports import Ssh


def test_only_two_words_and_both_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my envs/$(reboot)/python")
    monkeypatch.setattr(transports, "PACKAGE", Path("/a b/autotune"))
    words = Ssh().command("worker-1")
    assert words[:2] == ["ssh", "-T"]
    assert words[-3:-1] == ["--", "worker-1"]
    assert shlex.split(words[-1]) == ["exec", "/opt/my envs/$(reboot)/python", "/a b/autotune", "agent"]
    assert "BatchMode=yes" in words


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            NodeDown(
                "n1: its agent, or the way to it, has ended with exit status 255 (Host key verification failed.)",
                code=255,
            ),
            "node n1: its agent, or the way to it, has ended with exit status 255 (Host key verification failed.); "
            "`ssh -o BatchMode=yes n1 true` must work",
        ),
        (
            NodeDown("n1: its shell prints text", "*** Welcome to n1 ***"),
            "node n1 prints '*** Welcome to n1 ***' into the stream, before its agent begins: keep shells that are not "
            "interactive silent there (~/.bashrc), and /etc/profile.d",
        ),
    ],
)
def test_a_node_without_an_agent(failure: NodeDown, said: str) -> None:
    assert greeting_complaint("n1", failure) == said
