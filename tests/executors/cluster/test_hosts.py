"""What the tests of several machines stand on: networks of their own."""

import subprocess
from contextlib import closing

import pytest

from tests.executors.cluster.hosts import Networks


def test_a_worker_may_have_several_networks() -> None:
    """Those of sshds and of Ray's: each closed alone."""
    first, second = Networks(), Networks()
    with closing(first):
        if not first.make(1):
            pytest.skip("this process may make no networks")
        with closing(second):
            assert second.make(2)
        for told in ("addr", "link"):
            said = subprocess.run(["ip", "-n", first.namespace(1), told], capture_output=True, text=True, check=True)
            assert "eth0" in said.stdout
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert second.namespace(1) not in spaces
