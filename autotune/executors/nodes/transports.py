"""Transports: a command that starts an agent on a node and connects its standard input and output.

All further data goes over the stream, so host names, folders and variables never become shell text. ssh passes to a
login shell only the words that start an agent, each quoted. With `--sync` it passes one constant line of Python instead
(`boot.py`).
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.executors.nodes.boot import BOOT
from autotune.executors.nodes.wire import NotGreeted

PACKAGE = Path(__file__).parents[2]
CONNECT_SECONDS = 10
_SSH_FAILED = 255  # ssh's own exit status: ssh(1)


class Transport(Protocol):
    """Way to reach nodes."""

    def command(self, node: str) -> list[str]:
        """Return the command that starts a node's agent."""

    def complaint(self, node: str, failure: NotGreeted) -> str:
        """Return why an agent did not start and what to do, in one line."""


def agent_words(python: str = sys.executable, package: Path = PACKAGE, *, sync: bool = False) -> list[str]:
    """Return the command that starts an agent on its machine.

    With `sync`, the package first arrives over the stream.
    """
    return [python, "-c", BOOT] if sync else [python, str(package), "agent"]


@dataclass(frozen=True)
class Ssh:
    """OpenSSH with the user's configuration: keys, agents, jump hosts and names from ~/.ssh/config."""

    python: str = sys.executable
    package: Path = PACKAGE
    sync: bool = False

    def command(self, node: str) -> list[str]:
        options = {
            "BatchMode": "yes",  # no prompts
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",  # keep server banners out of the log
            "ForwardX11": "no",
            "ControlMaster": "no",  # use the user's master connection, but do not create one
            "ClearAllForwardings": "yes",
            "EscapeChar": "none",
            "RequestTTY": "no",
        }
        given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return [
            "ssh",
            "-T",
            *given,
            "--",
            node,
            f"exec {shlex.join(agent_words(self.python, self.package, sync=self.sync))}",
        ]

    def complaint(self, node: str, failure: NotGreeted) -> str:
        log = failure.log.splitlines()
        last = log[-1].strip() if log else ""
        for pattern, what in _SSH_SAYS:
            if failure.code == _SSH_FAILED and re.search(pattern, failure.log):
                return f"node {node}: {what.format(node=node)} ({last})"
        return agents_complaint(node, failure, self.python, self.package)


# OpenSSH's messages (sshconnect.c, sshconnect2.c, ssh.c); the first match is used.
_SSH_SAYS = (
    (
        r"[Hh]ost key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED|No \S+ host key is known",
        "its host key is not known, or has changed: `ssh {node}` once by hand shows it",
    ),
    (
        r"Permission denied",
        "it asks for a password or a key that ssh has not: give it your key (`ssh-copy-id {node}`), or load it into ssh-agent",
    ),
    (r"Could not resolve hostname", "no such host: correct the hostfile, or name it in ~/.ssh/config"),
    (
        r"Connection refused|timed out|No route to host|Network is unreachable|Connection (closed|reset)",
        "ssh cannot reach it: is it up, and does sshd run there? `ssh {node}` tells",
    ),
    (r"", "ssh cannot reach it; `ssh {node}` tells"),
)


def agents_complaint(node: str, failure: NotGreeted, python: str, package: Path) -> str:
    """Return why an agent did not start on a node that was reached, in one line."""
    log = failure.log.splitlines()
    if failure.said:
        words = " ".join(failure.said.split())[:80]
        return (
            f"node {node} prints {words!r} into the stream, before its agent begins: keep shells that are not interactive "
            "silent there (~/.bashrc), and /etc/profile.d"
        )
    if f"can't open file '{package}" in failure.log or f"can't find '__main__' module in '{package}" in failure.log:
        return (
            f"node {node}: autotune is not at {package} there; install it at the same place on every node, or "
            "give --sync, which sends it"
        )
    if re.search(rf"{re.escape(python)}.*(No such file|not found|cannot execute)", failure.log):
        return (
            f"node {node}: no {python} there; install the environment that you train in at the same place on every node"
        )
    if missing := re.search(r"No module named '?([\w.]+)", failure.log):
        return (
            f"node {node}: {python} has no package {missing[1]} there: install the environment that you train in, with what "
            "autotune needs, at the same place on every node"
        )
    last = f" ({log[-1].strip()[:200]})" if log else ""
    return f"node {node}: no agent was heard: {failure.why}{last}"
