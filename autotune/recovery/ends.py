"""What an attempt came to: the script's own end, or a failure after which training goes on."""

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

_NEAR_FULL = 0.97  # of the capacity: a hang this near to it is memory's
_GOES_ON = (Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID, Kind.INFRASTRUCTURE, Kind.FOREIGN)


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    code: int
    kind: Kind | None  # None: the script's own end
    reason: str
    steps: int
    resumed_from: str
    unloaded: str = ""  # a checkpoint upon loading which the script has failed
    origin: str | None = None  # what it went on from, and when that was written; empty: began anew; None: nobody knows
    words: str = ""  # in which a rank, or what starts one, has told itself that the machine fails


@dataclass
class Heard:
    """What the ranks of one attempt have said."""

    say: Callable[[str], None]
    steps: int = 0
    resumed_from: str = ""
    origin: str = ""
    strayed: bool = False
    earlier: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # `rank.trainer_checkpoints.Ledger`s by output folder
    begun: set[str] = field(default_factory=set)  # output folders of Trainer's arguments

    def take(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "resumed":
            self.origin = f"{message['path']} {message.get('written')}"  # the last: a script may train in phases
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
        # of a script through Trainer's arguments each load is heard of; another may load by torch alone
        origin = self.origin or ("" if self.begun else None)
        return End(code, kind, reason, self.steps, self.resumed_from, origin=origin)

    def broken(self, error: Exception) -> End:
        """An attempt that this machine refuses to start."""
        words = one_line(error)
        return replace(self.end(1, Kind.INFRASTRUCTURE, words), words=words)


def end_of(stop: Stop, group: Group, heard: Heard, hardware: Hardware) -> End:
    """What an attempt came to that nobody has stopped; the group is ended after this."""
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
    if not group.greeted:  # nothing of the script or of its config has reached them
        end = heard.end(code, Kind.INFRASTRUCTURE, f"the ranks did not come up: {verdict.reason}")
        broken = verdict.source is Source.EXIT  # as an environment that was upgraded by half ends each of them
        return replace(end, words=verdict.reason if broken else "")
    # by SIGABRT torch ends a rank whose collective has timed out
    deadly = (signal.SIGKILL, signal.SIGABRT) if heard.steps else (signal.SIGKILL,)
    killed = verdict.kind is Kind.CRASH and verdict.signal in deadly
    if killed or verdict.kind in _GOES_ON:
        own = verdict.kind is Kind.INFRASTRUCTURE and verdict.source in (Source.EXCEPTION, Source.EXIT)
        return replace(heard.end(code, verdict.kind, verdict.reason), words=verdict.reason if own else "")
    end = heard.end(code, None, f"the script's own failure ({verdict.reason})")
    return replace(end, unloaded=next((error["unloaded"] for error in evidence.errors if error.get("unloaded")), ""))


def _hang(group: Group, heard: Heard, hardware: Hardware) -> End:
    """No rank shows life: memory's doing where a device or the host is as good as full."""
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
