"""Survey of a node, for the comparison of all nodes before anything starts."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from autotune.errors import UserError
from autotune.files import cache_root
from autotune.group.locks import holder_of
from autotune.inquiry import PACKAGES
from autotune.interpreter import current
from autotune.problem.cpus import threads_per_rank
from autotune.problem.gpus import open_nvml
from autotune.problem.hardware import detect

LEAST_FREE_BYTES = 64 * 2**20  # bytes free on a disk for logs
_ADDRESS_OF_SSH = "SSH_CONNECTION"  # client's address and port, then the server's: ssh(1)
_ADDRESS_OF_RAY = "AUTOTUNE_REACHED_AT"  # see ray_driver.Carrier


def survey(*, device: str, count: int, headroom: float, memory_cap_bytes: int | None, path: str) -> dict[str, Any]:
    """Return all values that the tuner compares, as JSON.

    Args:
        device: `auto`, `cuda` or `cpu`.
        count: number of devices that the job uses on this node.
        headroom: share of capacity left free.
        memory_cap_bytes: limit per rank.
        path: the script's folder, which must exist; empty without a script.

    Raises:
        UserError: the node has too few devices, the path is missing, or a required folder cannot be written.
    """
    hardware = detect(device, count, memory_cap_bytes=memory_cap_bytes, headroom=headroom)
    if path and not Path(path).exists():
        raise UserError(f"no {path} there; expected what is trained in the same place on every node, or --sync")
    for folder in (Path(tempfile.gettempdir()), cache_root()):
        _check_writable(folder)
    held = [f"{gpu} is in use by autotune ({who})" for gpu in hardware.gpus if (who := holder_of(gpu))]
    if held:
        raise UserError(f"{held[0]}: wait for it, or leave the node out")
    versions = {package: found for package in PACKAGES if (found := current().version(package))}
    return {
        "hardware": hardware.to_json(),
        "versions": {**versions, "cuda": current().cuda, "nccl": current().nccl, "driver": _driver()},
        "threads": threads_per_rank(count),
        "clock": time.time(),
        "addresses": addresses(),
        "reached_at": _reached_at(),
        "hostname": socket.gethostname(),
    }


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"autotune")
            file.flush()
        free = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror})") from None
    if free.f_bavail * free.f_frsize < LEAST_FREE_BYTES:
        raise UserError(f"{folder} is full: its disk has less than {LEAST_FREE_BYTES >> 20} MiB left")


def addresses() -> list[tuple[str, str, int]]:
    """Return (interface, address, prefix length) of every active address of this machine, IPv4 first.

    Link-local IPv6 addresses (fe80::) are left out, because each use would need the interface name.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [(name, one) for name, known in psutil.net_if_addrs().items() if name in up for one in known]
    return [
        (name, one.address, _prefix(one.netmask, most))
        for family, most in ((socket.AF_INET, 32), (socket.AF_INET6, 128))
        for name, one in found
        if one.family == family and not (most == 128 and ipaddress.ip_address(one.address).is_link_local)
    ]


def _prefix(mask: str | None, most: int) -> int:
    """Return the number of bits that a netmask sets; all bits without a netmask."""
    return int(ipaddress.ip_address(mask)).bit_count() if mask else most


def _reached_at() -> list[str]:
    """Return the address by which the transport reached this node; empty if unknown."""
    by_ray = os.environ.get(_ADDRESS_OF_RAY)
    return [by_ray] if by_ray else os.environ.get(_ADDRESS_OF_SSH, "").split()[2:3]


def _driver() -> str | None:
    with suppress(Exception):  # the detection of GPUs reports a driver that does not answer
        if (lib := open_nvml()) is not None:
            found = lib.nvmlSystemGetDriverVersion()
            return found.decode() if isinstance(found, bytes) else str(found)
    return None
