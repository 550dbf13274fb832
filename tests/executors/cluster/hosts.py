"""Hosts for tests: real sshd's on this machine, each in a network namespace with an address of its own where this process may
make such, else at loopback addresses of their own. A host's link can be cut where it has a namespace."""

from __future__ import annotations

import getpass
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.executors.cluster.cluster import Cluster
from autotune.problem.outcome import OutcomeKind, Source
from autotune.workers.failure_classifier import classify_failure
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.memory_monitor import Meter
from tests.conftest import free_port

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
WHY_NOT = "" if SSHD and shutil.which("ssh") else "no sshd on this machine: `make cluster-tests` installs one"
HIDDEN = "hidden"  # a folder that each host of a namespace has for itself, and empty
_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {keys}
StrictModes no
PasswordAuthentication yes
KbdInteractiveAuthentication no
PubkeyAuthentication yes
UsePAM no
PermitRootLogin yes
PermitUserEnvironment yes
SetEnv AUTOTUNE_CACHE={cache}
X11Forwarding no
PrintMotd no
LogLevel VERBOSE
"""
_CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {key}
  IdentitiesOnly yes
  UserKnownHostsFile {known}
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


@dataclass
class SshHost:
    """One of them."""

    name: str
    address: str
    port: int
    folder: Path
    namespace: str = ""
    link: str = ""  # this machine's end of its cable
    process: subprocess.Popen[bytes] | None = None

    @property
    def cache(self) -> Path:
        """The folder in which its logins keep their cache."""
        return self.folder / "cache"

    def start(self, keys: Path) -> None:
        config = self.folder / "sshd_config"
        config.write_text(
            _CONFIG.format(address=self.address, port=self.port, folder=self.folder, cache=self.cache, keys=keys)
        )
        words = [str(SSHD), "-D", "-e", "-f", str(config)]
        if self.namespace:  # with a host name of its own
            hidden = self.folder.parent / HIDDEN
            named = f"hostname {self.name} && mount -t tmpfs none {hidden} && exec {' '.join(words)}"
            words = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", named]
        Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "sshd.log").open("ab") as log:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        until = time.monotonic() + 20
        while True:
            with suppress(OSError), socket.create_connection((self.address, self.port), 1):
                return
            assert time.monotonic() < until, (self.folder / "sshd.log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends sshd with every session of it."""
        if self.process is not None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def processes(self) -> list[psutil.Process]:
        """Everything that a login on it has started and that runs."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if _runs(process) and not process.name().startswith("sshd")]

    def cut(self) -> None:
        _call("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        _call("ip", "link", "set", self.link, "up")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@dataclass
class Hosts:
    """All of them, with what a client needs to reach them."""

    folder: Path
    hosts: list[SshHost] = field(default_factory=list)
    own_links: bool = False

    @property
    def path(self) -> str:
        """PATH with an `ssh` that knows them."""
        return os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])

    def __getitem__(self, at: int) -> SshHost:
        return self.hosts[at]

    def hostfile(self, slots: int = 1, *, path: Path | None = None) -> Path:
        path = path or self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path


@contextmanager
def made_hosts(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Hosts `node1`, `node2`, … for as long as the `with` lasts."""
    made = Hosts(folder)
    key = folder / "key"
    _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    (folder / "bin").mkdir()
    (folder / HIDDEN).mkdir()
    keys, known, config = folder / "authorized", folder / "known_hosts", folder / "config"
    shutil.copy(f"{key}.pub", keys)
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    wrapper.chmod(0o755)
    networks = Networks()
    try:
        made.own_links = networks.make(count)
        for number in range(1, count + 1):
            own = folder / f"node{number}"
            own.mkdir()
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / "host_key"))
            if made.own_links:
                host = SshHost(
                    f"node{number}",
                    networks.address(number),
                    22,
                    own,
                    networks.namespace(number),
                    networks.link(number),
                )
            else:
                host = SshHost(f"node{number}", f"127.0.0.{number + 1}", free_port(), own)
            made.hosts.append(host)
        lines, entries = [], []
        for host in made.hosts:
            where = host.address if host.port == 22 else f"[{host.address}]:{host.port}"
            lines.append(f"{where} {(host.folder / 'host_key.pub').read_text()}")
            about = {"name": host.name, "address": host.address, "port": host.port}
            entries.append(_CLIENT.format(**about, user=getpass.getuser(), key=key, known=known))
        known.write_text("".join(lines))
        config.write_text("".join([*entries, *self_made_troubles(made.hosts[0], folder, known)]))
        for host in made.hosts:
            host.start(keys)
        yield made
    finally:
        for host in made.hosts:
            host.stop()
        networks.close()


def self_made_troubles(host: SshHost, folder: Path, known: Path) -> Iterator[str]:
    """Names in the client's configuration under which the first host is one that people have trouble with."""
    stranger, greeter, keys = folder / "stranger", folder / "greeter", folder / "authorized"
    for key in (stranger, greeter):
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    forced = 'command="echo Welcome to the cluster; eval \\"$SSH_ORIGINAL_COMMAND\\"" '
    with keys.open("a") as file:
        file.write(forced + Path(f"{greeter}.pub").read_text())
    about = {
        "address": host.address,
        "port": host.port,
        "user": getpass.getuser(),
        "key": folder / "key",
        "known": known,
    }
    yield _CLIENT.format(**{**about, "name": "wants-password", "key": stranger})
    yield _CLIENT.format(**{**about, "name": "prints-banner", "key": greeter})
    yield _CLIENT.format(**{**about, "name": "unknown-key", "known": "/dev/null"})
    yield _CLIENT.format(**{**about, "name": "no-sshd", "port": 9})
    yield _CLIENT.format(**{**about, "name": "unreachable", "address": "192.0.2.1"})  # TEST-NET-1: RFC 5737


def _free_net() -> int:
    """The third number of 10.213.x.0/24 that nothing of this machine is in."""
    taken = {one.address for found in psutil.net_if_addrs().values() for one in found}
    return next(net for net in random.sample(range(1, 250), 249) if f"10.213.{net}.254" not in taken)


def only_tests(folder: Path) -> str:
    """A folder in which the package `tests` is found, whose ranks these tests start, and not the one that is sent to nodes."""
    alone = folder / "only-tests"
    alone.mkdir(exist_ok=True)
    with suppress(FileExistsError):
        (alone / "tests").symlink_to(Path(__file__).parents[2])
    return str(alone)


_MADE = itertools.count()  # a worker has networks of sshds and of Ray at once: each needs names of its own


class Networks:
    """A bridge on this machine, with a namespace at the other end of each cable."""

    def __init__(self) -> None:
        self._id = f"{os.getpid() % 0xFFFF:04x}{next(_MADE):x}"
        self._net = _free_net()
        self._bridge = f"atb{self._id}"
        self._count = 0

    def namespace(self, number: int) -> str:
        return f"at{self._id}n{number}"

    def link(self, number: int) -> str:
        return f"at{self._id}v{number}"

    def address(self, number: int) -> str:
        return f"10.213.{self._net}.{number}"

    def make(self, count: int) -> bool:
        """Whether this process may make them."""
        if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
            return False
        try:
            _call("ip", "link", "add", self._bridge, "type", "bridge")
            _call("ip", "addr", "add", f"10.213.{self._net}.254/24", "dev", self._bridge)
            _call("ip", "link", "set", self._bridge, "up")
            for number in range(1, count + 1):
                self._count = number
                space, link = self.namespace(number), self.link(number)
                _call("ip", "netns", "add", space)
                _call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
                _call("ip", "link", "set", link, "master", self._bridge, "up")
                _call("ip", "-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
                _call("ip", "-n", space, "link", "set", "eth0", "up")
                _call("ip", "-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError):
            self.close()
            return False
        return True

    def close(self) -> None:
        for number in range(1, self._count + 1):
            with suppress(OSError, subprocess.SubprocessError):
                _call("ip", "netns", "del", self.namespace(number))
        self._count = 0
        with suppress(OSError, subprocess.SubprocessError):
            _call("ip", "link", "del", self._bridge)


def group_of(cluster: Cluster) -> WorkerGroup:
    """A group of two ranks that train nothing, and are ready."""
    policy = GroupPolicy(3600.0, lambda phase: 3600.0, settle_seconds=0.2, may_exit=False)
    hardware: Any = cluster.nodes[0].hardware
    ready: set[int] = set()
    take = lambda rank, message: ready.add(rank) if message.get("phase") == "ready" else None  # noqa: E731
    group = WorkerGroup(cluster.launcher, hardware, Meter(), policy, on_message=take)
    assert group.start("tests.workers.fake_rank", 2, {}) is WatchEnd.ARRIVED
    assert group.watch(lambda: len(ready) == 2) is WatchEnd.ARRIVED
    return group


def is_lost(cluster: Cluster, group: WorkerGroup, name: str) -> None:
    assert group.watch(lambda: False, time.monotonic() + 120) is WatchEnd.FAILED
    verdict = classify_failure(group.evidence())
    assert (verdict.kind, verdict.source) == (OutcomeKind.INFRASTRUCTURE, Source.NODE)
    assert verdict.reason.startswith(f"node {name}: ")
    assert cluster.broken
