"""Classify an attempt's end: the script's own end, or a failure after which training goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.errors import one_line
from autotune.group.group import Group
from autotune.group.policy import Stop
from autotune.group.protocol import Message
from autotune.group.verdict import judge
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Kind, Source

_NEAR_FULL = 0.97  # share of the capacity; a hang above it counts as an OOM
_GOES_ON = (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID, Kind.INFRASTRUCTURE, Kind.FOREIGN)


@dataclass(frozen=True)
class End:
    """End of an attempt."""

    code: int
    kind: Kind | None  # None: the script ended by itself
    reason: str
    steps: int
    resumed_from: str
    unloaded: str = ""  # checkpoint that the script failed to load
    # checkpoint that it resumed from, and when that was written; empty: started from scratch; None: unknown
    origin: str | None = None
    words: str = ""  # message of a rank, or of the launcher, that reports a failing machine


@dataclass
class Heard:
    """State collected from the messages of one attempt's ranks."""

    say: Callable[[str], None]
    steps: int = 0
    resumed_from: str = ""
    origin: str = ""
    strayed: bool = False
    earlier: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # fields of `rank.trainer_checkpoints.Ledger` by output folder
    begun: set[str] = field(default_factory=set)  # output folders of Trainer's arguments

    def take(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "resumed":
            # the last one counts, as a script may train in phases
            self.origin = f"{message['path']} {message.get('written')}"
            if not self.resumed_from:
                self.resumed_from = message["path"]
                self.say(f"going on from {self.resumed_from}")
        elif kind == "checkpoints":
            self.earlier[message["folder"]] = message["ledger"]
        elif kind == "output":
            self.begun.add(message["folder"])
        elif kind == "note":
            self.say(message["text"])
        elif kind == "strayed" and not self.strayed:
            self.strayed = True
            self.say("the script trains without DeepSpeed: no config of ours is in it")
        self.steps = max(self.steps, int(message.get("steps") or 0))

    def end(self, code: int, kind: Kind | None, reason: str) -> End:
        # A script with Trainer's arguments reports each load. Other scripts may load through torch alone.
        origin = self.origin or ("" if self.begun else None)
        return End(code, kind, reason, self.steps, self.resumed_from, origin=origin)

    def broken(self, error: Exception) -> End:
        """Return the end of an attempt that this machine refuses to start."""
        words = one_line(error)
        return replace(self.end(1, Kind.INFRASTRUCTURE, words), words=words)


def end_of(stop: Stop, group: Group, heard: Heard, hardware: Hardware) -> End:
    """Return the end of an attempt that was not stopped by a signal. The caller ends the group afterwards."""
    if stop is Stop.SILENT and group.greeted:
        return _hang(group, heard, hardware)
    if stop is Stop.ARRIVED:
        for rank, status in group.statuses().items():
            if status < 0:
                name = signal.Signals(-status).name
                heard.say(f"rank {rank} died by {name} on its way out, after the script's end")
        return heard.end(0, None, "done")
    evidence = group.evidence()
    codes = [128 - status if status < 0 else status for status in evidence.statuses.values() if status]
    code = codes[0] if codes else 1
    verdict = judge(evidence)
    if not group.greeted:  # neither the script nor its config has reached the ranks
        end = heard.end(code, Kind.INFRASTRUCTURE, f"the ranks did not come up: {verdict.reason}")
        broken = verdict.source is Source.EXIT  # a half-upgraded environment ends each rank like this
        return replace(end, words=verdict.reason if broken else "")
    # torch ends a rank with SIGABRT when its collective times out.
    deadly = (signal.SIGKILL, signal.SIGABRT) if heard.steps else (signal.SIGKILL,)
    killed = verdict.kind is Kind.CRASH and verdict.signal in deadly
    if killed or verdict.kind in _GOES_ON:
        own = verdict.kind is Kind.INFRASTRUCTURE and verdict.source in (Source.EXCEPTION, Source.EXIT)
        return replace(heard.end(code, verdict.kind, verdict.reason), words=verdict.reason if own else "")
    end = heard.end(code, None, f"the script's own failure ({verdict.reason})")
    return replace(end, unloaded=next((error["unloaded"] for error in evidence.errors if error.get("unloaded")), ""))


def _hang(group: Group, heard: Heard, hardware: Hardware) -> End:
    """Return the end of an attempt without a heartbeat: an OOM if a device or the host is nearly full."""
    if (code := group.scripts_code) is not None:
        heard.say("the script is over, and ranks do not leave: ended")
        return heard.end(code, None, "done")
    peaks = group.peaks()
    text = f"hang in {group.silence}"
    if peaks.worst > _NEAR_FULL * hardware.capacity_bytes:
        return heard.end(1, Kind.OOM_DEVICE, f"{text}, with the device's memory full")
    if peaks.host_low < 0.03 * hardware.host_memory_bytes:
        return heard.end(1, Kind.OOM_HOST, f"{text}, with main memory full")
    return heard.end(1, Kind.TIMEOUT, f"{text}, with memory to spare")
