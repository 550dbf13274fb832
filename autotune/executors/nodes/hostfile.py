"""DeepSpeed's hostfile: `worker-1 slots=8` a line, and the filters `--include` and `--exclude` of its launcher."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.bounds import read_text, shown, whole_number
from autotune.errors import UserError, near

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)")
_NAME = re.compile(r"[\w.\[:][\w.:@%\[\]+-]{0,255}")  # with the user as whom ssh logs in; an IPv6 address in brackets
MOST_SLOTS = 4096
_FILTER = "expected HOST@HOST, or HOST:SLOT,SLOT@HOST as DeepSpeed's launcher takes it"


@dataclass(frozen=True)
class Host:
    """A line of a hostfile.

    Args:
        slots: its devices, by their numbers there.
        chosen: whether a filter has named them: all others must then be hidden from ranks.
    """

    name: str
    slots: tuple[int, ...]
    chosen: bool = False


def read_hostfile(path: Path, include: str | None = None, exclude: str | None = None) -> list[Host]:
    """The hosts of a hostfile, in its order, as the filters leave them.

    Raises:
        UserError: it cannot be read or does not parse, names a host twice, or a filter names what is not there or leaves nothing.
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
        if not _NAME.fullmatch(name):  # ssh would take what begins with `-` for an option
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
    """The slots that a filter names, by host; None: all of them."""
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
    """The hosts of a filter, with their slots: the sign between two of them is also the one after a user's name."""
    parts: list[str] = []
    for word in (one.strip() for one in text.split("@")):
        joined = f"{parts[-1]}@{word}" if parts and ":" not in parts[-1] else ""
        if joined.partition(":")[0] in known:
            parts[-1] = joined
        else:
            parts.append(word)
    return parts


def _bare(name: str) -> str:
    """A host's name without the user as whom ssh logs in there."""
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
    """The first `nodes` hosts with `per_node` slots of each; None: all of them, which then must be as many on each.

    Args:
        said: where the hosts come from, for complaints.

    Raises:
        UserError: there are fewer, or not as many on each host.
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
    """Where a study of several nodes says which they are."""
    return folder / "hostfile"


def hostfile_text(hosts: Sequence[Host]) -> str:
    """A hostfile of these hosts. Which slots of them were meant it cannot say: filters do."""
    return "".join(f"{host.name} slots={len(host.slots)}\n" for host in hosts)
