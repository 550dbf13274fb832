"""Choose the addresses by which the nodes of a job reach each other."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError

_Address = ipaddress.IPv4Interface | ipaddress.IPv6Interface
# Interface variables of the libraries. Variables that the user has set are kept.
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of the ranks: the first node's address, and each node's interface to that network."""

    host: str
    interfaces: tuple[str, ...]


def meeting(names: Sequence[str], surveys: Sequence[Mapping[str, Any]], interface: str | None = None) -> Meeting:
    """Choose a network that contains all nodes.

    The network by which ssh reached the first node is preferred, then the first node's first one. IPv6 is used only
    without a common IPv4 network, because some libraries and scripts cannot read IPv6 addresses.

    Args:
        names: the nodes' names.
        surveys: the nodes' surveys, see `survey.survey`.
        interface: required interface, with the same name on every node.

    Raises:
        UserError: a node lacks that interface, or no network contains all nodes.
    """
    found = [_addresses(one) for one in surveys]
    if interface is not None:
        for name, addresses in zip(names, found, strict=True):
            if all(interface != device for device, _ in addresses):
                known = ", ".join(sorted({device for device, _ in addresses})) or "none"
                raise UserError(
                    f"--interface {interface}: node {name} has no such interface that is up; it has {known}"
                )
        versions = [{address.version for device, address in addresses if device == interface} for addresses in found]
        alike = set.intersection(*versions)
        if not alike:
            raise UserError(f"--interface {interface}: some nodes have only IPv4 there and others only IPv6")
        host = next(one for device, one in found[0] if device == interface and one.version == min(alike))
        return Meeting(str(host.ip), (interface,) * len(names))
    reached = surveys[0].get("reached_at") or [""]
    one_machine = len({str(one.get("hostname")) for one in surveys}) == 1
    first = sorted(found[0], key=lambda known: (known[1].version, str(known[1].ip) != reached[0]))
    for device, address in first:
        if address.ip.is_loopback and not one_machine:
            continue
        others = [_in_network(addresses, address) for addresses in found[1:]]
        if all(others):
            return Meeting(str(address.ip), (device, *(other or "" for other in others)))
    everywhere = {address.ip for addresses in found[1:] for _, address in addresses}
    routed = next((known for known in first if not known[1].ip.is_loopback and known[1].ip not in everywhere), None)
    if routed is None:
        raise UserError(
            f"node {names[0]} has no address at which the other nodes could reach it: give --interface NAME"
        )
    # the nodes are in different networks with a router between them, so each library chooses its interface
    return Meeting(str(routed[1].ip), ("",) * len(names))


def _addresses(survey: Mapping[str, Any]) -> list[tuple[str, _Address]]:
    return [(name, ipaddress.ip_interface(f"{address}/{bits}")) for name, address, bits in survey["addresses"]]


def _in_network(known: list[tuple[str, _Address]], other: _Address) -> str | None:
    """Return the interface in the network of an address.

    An interface with the identical address is skipped: bridges of containers (docker0, cni0) and of virtual machines
    (virbr0) have the same address on all machines.
    """
    alike = ((device, address) for device, address in known if address.network == other.network)
    return next((device for device, address in alike if address.ip != other.ip or address.ip.is_loopback), None)
