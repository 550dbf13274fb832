"""DeepSpeed's hostfile, with lines such as `worker-1 slots=8`, and its launcher's `--include` and `--exclude`."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.bounds import read_text, shown, whole_number
from autotune.errors import UserError, near

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)")
_NAME = re.compile(r"[\w.\[:][\w.:@%\[\]+-]{0,255}")  # may contain ssh's user name, and an IPv6 address in brackets
MOST_SLOTS = 4096
_FILTER = "expected HOST@HOST, or HOST:SLOT,SLOT@HOST as DeepSpeed's launcher takes it"


@dataclass(frozen=True)
class Host:
    """Line of a hostfile.

    Args:
        name: the host's name.
        slots: its devices, by number.
        chosen: a filter has named the slots, so that other devices must be hidden from ranks.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False


def read_hostfile(path: Path, include: str | None = None, exclude: str | None = None) -> list[Host]:
    """Return the hosts of a hostfile in order, after the filters.

    Args:
        path: the hostfile.
        include: filter of hosts and slots to use.
        exclude: filter of hosts and slots to leave out.

    Raises:
        UserError: the file cannot be read or parsed, or names a host twice. A filter names an unknown host or slot, or
            leaves no host.
    """
    if include and exclude:
        raise UserError("--include and --exclude together: give one of them")
    hosts = _hosts(path)
    for option, text in (("--include", include), ("--exclude", exclude)):
        if text:
            named = _filter(option, text, hosts, path)
            hosts = _kept(hosts, named) if option == "--include" else _without(hosts, named)
            if not hosts:
                raise UserError(f"{option} {text}: no host of {path} is left")
    return hosts


def _hosts(path: Path) -> list[Host]:
    lines = read_text(path, f"--hostfile {path}", "expected lines like `worker-1 slots=8`").splitlines()
    found: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise UserError(f"{path}:{number}: {shown(text)!r} does not parse: expected a line like `worker-1 slots=8`")
        name = match["host"]
        slots = whole_number(match["slots"], f"{path}:{number}: slots", 0, MOST_SLOTS)
        if not _NAME.fullmatch(name):  # ssh would treat a name that begins with `-` as an option
            raise UserError(
                f"{path}:{number}: {shown(name)!r} is no host's name: expected a line like `worker-1 slots=8`"
            )
        if _bare(name) in map(_bare, found):
            raise UserError(f"{path}:{number}: {name} a second time: give each host one line, with all its slots")
        if not slots:
            raise UserError(f"{path}:{number}: {name} has no slots: expected at least 1, or leave the line out")
        found[name] = Host(name, tuple(range(slots)))
    if not found:
        raise UserError(f"{path} names no host: expected lines like `worker-1 slots=8`")
    return list(found.values())


def _filter(option: str, text: str, hosts: list[Host], path: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the slots that a filter names, by host; None stands for all slots."""
    known = {host.name: host for host in hosts}
    full = {called: host.name for host in hosts for called in (host.name, _bare(host.name))}
    named: dict[str, tuple[int, ...] | None] = {}
    for part in _parts(text, known):
        called, colon, numbers = part.partition(":")
        if called not in full:
            raise UserError(f"{option} {text}: {path} has no host {called!r}{near(called, full)}; {_FILTER}")
        name = full[called]
        slots = None
        if colon:
            if not re.fullmatch(r"\d+(,\d+)*", numbers):
                raise UserError(f"{option} {text}: {part!r} does not parse: {_FILTER}")
            slots = tuple(sorted({whole_number(one, option, 0, MOST_SLOTS) for one in numbers.split(",")}))
            if missing := set(slots) - set(known[name].slots):
                raise UserError(
                    f"{option} {text}: {name} has no slot {min(missing)}, its {len(known[name].slots)} count from 0"
                )
        named[name] = slots
    return named


def _parts(text: str, known: Container[str]) -> list[str]:
    """Split a filter into hosts with slots. `@` separates hosts and also follows a user name."""
    parts: list[str] = []
    for word in (one.strip() for one in text.split("@")):
        joined = f"{parts[-1]}@{word}" if parts and ":" not in parts[-1] else ""
        if joined.partition(":")[0] in known:
            parts[-1] = joined
        else:
            parts.append(word)
    return parts


def _bare(name: str) -> str:
    """Return a host's name without ssh's user name."""
    return name.rpartition("@")[2]


def _kept(hosts: list[Host], named: dict[str, tuple[int, ...] | None]) -> list[Host]:
    kept = [host for host in hosts if host.name in named]
    return [host if (slots := named[host.name]) is None else Host(host.name, slots, True) for host in kept]


def _without(hosts: list[Host], named: dict[str, tuple[int, ...] | None]) -> list[Host]:
    left = []
    for host in hosts:
        gone = named.get(host.name, ())
        slots = () if gone is None else tuple(slot for slot in host.slots if slot not in gone)
        if slots:
            left.append(host if slots == host.slots else Host(host.name, slots, True))
    return left


def evenly(hosts: list[Host], nodes: int | None, per_node: int | None, said: str) -> list[Host]:
    """Return the first `nodes` hosts with `per_node` slots each.

    Args:
        hosts: the hosts.
        nodes: number of hosts; None: all.
        per_node: slots per host; None: all, which must be the same number on each.
        said: source of the hosts, for error messages.

    Raises:
        UserError: there are too few hosts or slots, or the numbers of slots differ.
    """
    if nodes is not None and not 1 <= nodes <= len(hosts):
        raise UserError(f"--nodes {nodes}: {said} has {len(hosts)} hosts; give 1 to {len(hosts)}")
    used = hosts[:nodes] if nodes else hosts
    fewest = min(used, key=lambda host: len(host.slots))
    if per_node is None:
        most = max(used, key=lambda host: len(host.slots))
        if len(most.slots) != len(fewest.slots):
            raise UserError(
                f"{said}: {fewest.name} has {len(fewest.slots)} slots and {most.name} {len(most.slots)}; autotune takes as "
                f"many of each: --gpus {len(fewest.slots)} takes so many, --exclude leaves a host out"
            )
        return used
    if not 1 <= per_node <= len(fewest.slots):
        raise UserError(
            f"--gpus {per_node}: {fewest.name} has {len(fewest.slots)} slots; give 1 to {len(fewest.slots)}"
        )
    return [
        host if len(host.slots) == per_node else Host(host.name, host.slots[:per_node], host.chosen) for host in used
    ]


def hostfile_of(folder: Path) -> Path:
    """Return the path of the hostfile in a study's folder."""
    return folder / "hostfile"


def hostfile_text(hosts: Sequence[Host]) -> str:
    """Return a hostfile of these hosts. Slot numbers are lost, because only filters can express them."""
    return "".join(f"{host.name} slots={len(host.slots)}\n" for host in hosts)
