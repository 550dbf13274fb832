"""How an agent is started on a node, so that its standard input and output are at hand here: a command, and no more.

What the agent is told goes over the stream. So nothing of hosts, folders or variables is ever part of a shell's text; ssh gives a
login shell the words that start an agent, each quoted, and with `--sync` one constant line of Python instead (`boot.py`).
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
    """One way to reach nodes."""

    def command(self, node: str) -> list[str]:
        """What starts the agent of a node."""

    def complaint(self, node: str, failure: NotGreeted) -> str:
        """Why an agent was not heard, and what to do, in one line."""


def agent_words(python: str = sys.executable, package: Path = PACKAGE, *, sync: bool = False) -> list[str]:
    """What starts an agent on the machine where it is run; with `sync` once the package has come over the stream."""
    return [python, "-c", BOOT] if sync else [python, str(package), "agent"]


@dataclass(frozen=True)
class Ssh:
    """OpenSSH as the user has set it up: keys, agents, jumps and names are those of ~/.ssh/config."""

    python: str = sys.executable
    package: Path = PACKAGE
    sync: bool = False

    def command(self, node: str) -> list[str]:
        options = {
            "BatchMode": "yes",  # nobody is asked for anything
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
            "LogLevel": "ERROR",  # no server's banner in the log
            "ForwardX11": "no",
            "ControlMaster": "no",  # uses the user's, becomes nobody's
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


# OpenSSH's own words (sshconnect.c, sshconnect2.c, ssh.c); the first that is found counts.
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
    """The same where the node was reached."""
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
