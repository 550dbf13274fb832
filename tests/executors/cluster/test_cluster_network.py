"""Nodes that have IPv6 alone meet, and those that have both meet as before."""

import datetime
import socket
from types import SimpleNamespace

import psutil
import pytest

from autotune.executors.cluster.agent import addresses
from autotune.executors.cluster.cluster import rendezvous_network
from autotune.rank.base import Rendezvous
from tests.executors.cluster.test_cluster_compare import ADMIN, at

LO6 = ("lo", "::1", 128)


def six(interface: str, address: str, bits: int = 64) -> tuple[str, str, int]:
    return interface, address, bits


def only_six(*found: tuple[str, str, int], reached: str = "", hostname: str = "") -> dict[str, object]:
    """As a survey says it; the loopback has IPv4 everywhere."""
    return at(LO6, *found, reached=reached, hostname=hostname)  # type: ignore[arg-type]


def test_nodes_of_ipv6_alone_meet() -> None:
    nodes = [
        only_six(six("ib0", "fd00:1::1"), six("eno1", "2001:db8::1"), reached="2001:db8::1"),
        only_six(six("eth0", "2001:db8::2"), six("ib0", "fd00:1::2")),
    ]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("2001:db8::1", ("eno1", "eth0"))
    given = rendezvous_network(["a", "b"], nodes, "ib0")
    assert (given.host, given.interfaces) == ("fd00:1::1", ("ib0", "ib0"))


def test_addresses_of_ipv6_with_a_router_in_between() -> None:
    nodes = [only_six(six("eth0", "2001:db8:1::5")), only_six(six("eth0", "2001:db8:2::5"))]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("2001:db8:1::5", ("", ""))


def test_whoever_has_ipv4_meets_there_though_ssh_came_by_ipv6() -> None:
    nodes = [
        only_six(six("eno1", "2001:db8::1"), ("eno1", "10.0.0.1", ADMIN), reached="2001:db8::1"),  # type: ignore[arg-type]
        only_six(six("eth0", "2001:db8::2"), ("eth0", "10.0.0.2", ADMIN)),  # type: ignore[arg-type]
    ]
    found = rendezvous_network(["a", "b"], nodes)
    assert (found.host, found.interfaces) == ("10.0.0.1", ("eno1", "eth0"))
    assert rendezvous_network(["a", "b"], [nodes[0], only_six(six("eth0", "2001:db8::2"))]).host == "2001:db8::1"


def test_an_interface_of_which_nodes_have_unlike_addresses() -> None:
    four, both = at(("ib0", "10.0.0.1", ADMIN)), at(("ib0", "10.0.0.2", ADMIN), six("ib0", "fd00::2"))  # type: ignore
    alone = only_six(six("ib0", "fd00::3"))
    assert rendezvous_network(["a", "b"], [four, both], "ib0").host == "10.0.0.1"
    assert rendezvous_network(["a", "b"], [both, alone], "ib0").host == "fd00::2"
    between = [four, at(("ib0", "10.0.1.1", ADMIN))]
    assert rendezvous_network(["a", "b"], between, "ib0").interfaces == ("ib0", "ib0"), "with a router in between"


def test_what_a_machine_says_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, text: str, mask: str | None) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text, netmask=mask)

    known = {
        "eth0": [
            address(socket.AF_INET6, "2001:db8::1", "ffff:ffff:ffff:ffff::"),
            address(socket.AF_INET6, "fe80::1%eth0", "ffff:ffff:ffff:ffff::"),
            address(socket.AF_INET, "10.0.0.1", "255.255.240.0"),
            address(psutil.AF_LINK, "aa:bb:cc:dd:ee:ff", None),
        ],
        "wg0": [address(socket.AF_INET6, "fd00::1", None)],
        "eth1": [address(socket.AF_INET, "10.9.0.1", "255.255.255.0")],
    }
    up = {name: SimpleNamespace(isup=name != "eth1") for name in known}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    assert addresses() == [("eth0", "10.0.0.1", 20), ("eth0", "2001:db8::1", 64), ("wg0", "fd00::1", 128)]


def test_ranks_meet_at_such_an_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    import torch

    first = Rendezvous(0, 2, host="::1", token="t")
    port = first.open()
    minute = datetime.timedelta(seconds=60)
    opened = first.store(torch, minute)
    opened.set("said", "hello")
    assert Rendezvous(1, 2, host="::1", port=port, token="t").store(torch, minute).get("said") == b"hello"
