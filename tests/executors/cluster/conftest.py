"""Hosts that are reached over ssh: one pair a worker, made when the first test wants them."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.executors.cluster.hosts import WHY_NOT, Hosts, made_hosts


@pytest.fixture(scope="session")
def _hosts_of_this_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with ExitStack() as kept:
        try:
            made = kept.enter_context(made_hosts(tmp_path_factory.mktemp("hosts")))
        except (OSError, AssertionError, subprocess.SubprocessError) as error:
            pytest.skip(f"this machine lets no sshd of ours run: {error}")
        yield made


@pytest.fixture
def hosts(_hosts_of_this_worker: Hosts, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Two, `node1` and `node2`, whom this process's `ssh` knows. A test leaves nothing running on them."""
    monkeypatch.setenv("PATH", _hosts_of_this_worker.path)
    return _hosts_of_this_worker
