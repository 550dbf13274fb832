"""What starts an agent, and what is said where none is heard."""

import shlex
from pathlib import Path

import pytest

from autotune.executors.cluster.rpc import NoGreeting
from autotune.executors.cluster.transports import PACKAGE, Ssh


def said(log: str, code: int | None = 255, came: str = "") -> str:
    text = Ssh("/usr/bin/python3", PACKAGE).complaint(
        "worker-1", NoGreeting("worker-1", "the way to it ended with exit status 127", came, log, code)
    )
    assert "\n" not in text
    assert text.startswith("node worker-1")
    return text


def test_only_two_words_and_both_are_quoted() -> None:
    words = Ssh("/opt/my envs/$(reboot)/python", Path("/a b/autotune")).command("worker-1")
    assert words[:2] == ["ssh", "-T"]
    assert words[-3:-1] == ["--", "worker-1"]
    assert shlex.split(words[-1]) == ["exec", "/opt/my envs/$(reboot)/python", "/a b/autotune", "agent"]
    assert "BatchMode=yes" in words


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        # OpenSSH 9.2
        ("Host key verification failed.", "its host key is not known, or has changed: `ssh worker-1` once by hand"),
        ("root@worker-1: Permission denied (publickey,password).", "it asks for a password or a key"),
        ("ssh: Could not resolve hostname worker-1: Name or service not known", "no such host"),
        ("ssh: connect to host worker-1 port 22: Connection refused", "is it up, and does sshd run there"),
        ("Bad configuration option: foo", "ssh cannot reach it; `ssh worker-1` tells (Bad configuration option: foo)"),
    ],
)
def test_what_ssh_says(log: str, expected: str) -> None:
    assert expected in said(log)


def test_a_node_without_our_python_or_package() -> None:
    assert "no /usr/bin/python3 there" in said("bash: line 1: /usr/bin/python3: No such file or directory", 127)
    missing = f"/usr/bin/python3: can't open file '{PACKAGE}': [Errno 2] No such file or directory"
    assert f"autotune is not at {PACKAGE} there" in said(missing, 2)
    assert "no agent was heard: the way to it ended with exit status 127 (Segmentation fault)" in said(
        "Segmentation fault", 139
    )


def test_a_banner_in_the_stream() -> None:
    text = said("", None, "*** Welcome to worker-1 ***\nhave a nice day")
    assert "prints '*** Welcome to worker-1 *** have a nice day' into the stream" in text
    assert "~/.bashrc" in text
