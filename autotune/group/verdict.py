"""Classify a failure from evidence: exception type first, then exit status and signal, counters, text last.

Memory figures (`account.py`) decide ambiguous texts (`texts.py`).
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.group.account import Account
from autotune.group.gauge import FOREIGN_BYTES, Peaks
from autotune.group.texts import Scene, is_echo, recognise
from autotune.problem.outcome import Kind, Phase, Source
from autotune.units import format_bytes


@dataclass
class Evidence:
    """Facts about a failed trial."""

    device: str
    errors: list[dict[str, Any]] = field(default_factory=list)  # `error` messages in order of arrival
    statuses: dict[int, int] = field(default_factory=dict)  # rank -> exit code, negative for a signal
    timed_out: str | None = None  # phase whose deadline passed, with its seconds
    phase: Phase = Phase.START
    peaks: Peaks = field(default_factory=Peaks)
    host_total_bytes: int = 0
    capacity_bytes: int = 0  # bytes of the device available to a rank; 0 if unknown
    logs: dict[int, str] = field(default_factory=dict)  # rank -> tail of its log
    cut_off: str = ""  # name of a lost machine, and how it was lost


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    phase: Phase
    reason: str
    evidence: str
    source: Source
    rank: int | None = None
    missing_bytes: int | None = None
    signal: int | None = None  # signal that ended the rank
    exceptions: tuple[str, ...] = ()  # as in an Outcome


_INVALID_TYPES = ("DeepSpeedConfigError", "pydantic_core._pydantic_core.ValidationError", "ZeRORuntimeException")
_MACHINE_TYPES = ("DistStoreError", "DistNetworkError", "DistBackendError")
_RUNTIME_TYPES = ("builtins.RuntimeError", "builtins.OSError", "builtins.MemoryError")  # includes their subclasses
# Exceptions by which DeepSpeed refuses a config. A text about the machine in one of these does not blame the machine.
_REFUSALS = ("ValueError", "AssertionError", "NotImplementedError", "KeyError", "TypeError", "AttributeError")
_HOST_LOW = 0.03  # share of main memory below which the kernel kills
_TRACEBACK_CHARACTERS = 4000  # length of its end
_SAVING = re.compile(r", in \w*save\w*$", re.MULTILINE)  # a frame of a traceback
_ABORT = re.compile(r"terminate called after throwing an instance of '[^'\n]*'\s+what\(\):\s*(.{1,2000})", re.DOTALL)


def judge(evidence: Evidence) -> Verdict:
    """Return the class of a failed trial, and the evidence that decided it."""
    if evidence.cut_off:  # the lost ranks and those that waited for them do not blame the candidate
        why = "the stream of that machine's agent"
        return Verdict(Kind.INFRASTRUCTURE, evidence.phase, evidence.cut_off, why, Source.NODE)
    if evidence.peaks.lost:  # overrides the ranks' errors, which differ in their words
        why = f"NVML: {evidence.peaks.lost}"
        return Verdict(Kind.INFRASTRUCTURE, evidence.phase, evidence.peaks.lost, why, Source.DEVICE)
    dead = [rank for rank, status in evidence.statuses.items() if status < 0]
    if evidence.errors and not (dead and all(is_secondary(error) for error in evidence.errors)):
        verdicts = [(_weight(error, verdict := _of_error(error, evidence)), verdict) for error in evidence.errors]
        return min(verdicts, key=lambda weighed: weighed[0])[1]
    for rank, status in sorted(evidence.statuses.items()):
        if status < 0:
            return _of_signal(rank, -status, evidence)
    if evidence.timed_out:
        return Verdict(
            Kind.TIMEOUT,
            evidence.phase,
            f"no rank got on: {evidence.timed_out}",
            f"deadline: {evidence.timed_out}",
            Source.SILENCE,
        )
    for rank, status in sorted(evidence.statuses.items()):
        if status != 0:
            return _of_status(rank, status, evidence)
    return Verdict(
        Kind.CRASH, evidence.phase, "the ranks ended without a result", "channel closed, exit status 0", Source.EXIT
    )


# Order of precedence, so that a peer's consequential error does not hide the cause.
_ORDER = [Kind.FOREIGN, Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID, Kind.CRASH, Kind.INFRASTRUCTURE]


def is_secondary(error: dict[str, Any]) -> bool:
    """Return True if a rank's error only states that it lost a peer, whose end is the cause."""
    return is_echo(error.get("text", ""))


def _weight(error: dict[str, Any], verdict: Verdict) -> tuple[int, int]:
    secondary = is_secondary(error) and verdict.kind in (Kind.CRASH, Kind.INFRASTRUCTURE)
    return (len(_ORDER) if secondary else _ORDER.index(verdict.kind), verdict.rank or 0)


def is_memory_error(error: dict[str, Any], device: str) -> bool:
    """Return True if an `error` message reports an OOM of the device or host, by the rules of `judge`."""
    kinds = error.get("kinds") or []
    if not any(kind in _RUNTIME_TYPES or kind.endswith("OutOfMemoryError") for kind in kinds):
        return False  # its text quotes an OOM
    kind = _of_error(error, Evidence(device)).kind
    return kind.is_oom or kind is Kind.FOREIGN


def _of_error(error: dict[str, Any], evidence: Evidence) -> Verdict:
    kinds = tuple(error.get("kinds") or ())
    name, text = kinds[0] if kinds else "Exception", error.get("text", "")
    account = Account.of(text, error.get("numbers"))
    kind, why = _class_of_error(error, Scene(evidence.device, account, _host_ran_out(evidence, account)))
    if kind is Kind.OOM_DEVICE:
        kind, why = _unless_foreign(kind, why, account, evidence.peaks)
    if counted := str(Account.of("", error.get("numbers"))):
        why = f"{why}; {counted}"
    reason = f"{name.split('.')[-1]}: {_first_line(text) or name}"
    if kind is Kind.INFRASTRUCTURE and error.get("full_disk"):  # some libraries' texts do not reveal a full disk
        reason = f"{reason} (the disk of {error['full_disk']} is full)"
    missing = Account.of(text).missing if kind.is_oom else None  # later figures describe another state
    phase, rank = _phase(error.get("phase")), error.get("rank")
    return Verdict(kind, phase, reason, why, Source.EXCEPTION, rank, missing, exceptions=kinds)


def _class_of_error(error: dict[str, Any], scene: Scene) -> tuple[Kind, str]:
    """Return the class of a rank's error and the reason: type first, then frames and text, then origin."""
    kinds, file = error.get("kinds") or ["Exception"], error.get("file", "")
    name = kinds[0]
    by_type = f"exception {name}"
    if any(kind.endswith("OutOfMemoryError") for kind in kinds):
        return (Kind.OOM_HOST if name.startswith("ray.") else Kind.OOM_DEVICE), by_type
    if "builtins.MemoryError" in kinds:
        return (Kind.OOM_DEVICE if scene.device == "cpu" else Kind.OOM_HOST), by_type
    if any(kind.endswith(_INVALID_TYPES) for kind in kinds):
        return Kind.INVALID, by_type
    words = f"{error.get('traceback', '')[-_TRACEBACK_CHARACTERS:]}\n{error.get('text', '')}"
    found = recognise(words, scene, error.get("files"))
    by_text = f"{by_type} with text {found[1]!r}" if found else ""
    if found and (found[0].is_oom or (found[0] is Kind.CRASH and not name.endswith(_REFUSALS))):
        return found[0], by_text
    if any(kind.endswith(_MACHINE_TYPES) for kind in kinds):
        return Kind.INFRASTRUCTURE, by_text or by_type
    if found and not name.endswith(_REFUSALS):
        return found[0], by_text
    if error.get("phase") == Phase.INIT and "/deepspeed/" in file and "/ops/" not in file:
        return Kind.INVALID, f"{by_type} raised by {'/'.join(file.split('/')[-3:])} during init"
    if not found and error.get("full_disk") and _SAVING.search(words):
        return Kind.INFRASTRUCTURE, f"{by_type} in a save, with {error['full_disk']} full"
    return (found[0], by_text) if found else (Kind.CRASH, by_type)


def _unless_foreign(kind: Kind, why: str, account: Account, peaks: Peaks) -> tuple[Kind, str]:
    """Return FOREIGN if another process took enough device memory for the failure, or holds most of the device."""
    capped = account.under_cap is not None and account.under_cap < (account.free or 0)
    if not capped and peaks.foreign > FOREIGN_BYTES and peaks.foreign >= (account.missing or 0):
        return Kind.FOREIGN, f"{why}; NVML: other processes grew by {format_bytes(peaks.foreign)} meanwhile"
    if others := account.held_by_others:
        return Kind.FOREIGN, f"{why}; other processes hold {format_bytes(others)} of the device"
    return kind, why


def _host_ran_out(evidence: Evidence, account: Account) -> bool:
    lowest = min(evidence.peaks.host_low, account.host_available if account.host_available is not None else 2**62)
    return evidence.peaks.oom_kills > 0 or lowest < _HOST_LOW * evidence.host_total_bytes


def _of_signal(rank: int, number: int, evidence: Evidence) -> Verdict:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def verdict(kind: Kind, reason: str, why: str) -> Verdict:
        return Verdict(kind, evidence.phase, reason, why, Source.SIGNAL, rank, signal=number)

    if number == signal.SIGKILL:
        if evidence.peaks.oom_kills > 0:
            return verdict(
                Kind.OOM_HOST, "killed by the kernel for want of main memory", "SIGKILL, oom_kill counter rose"
            )
        if _host_ran_out(evidence, Account()):
            why = f"SIGKILL with {format_bytes(evidence.peaks.host_low)} of main memory left"
            return verdict(Kind.OOM_HOST, "killed, with main memory used up", why)
        return verdict(Kind.CRASH, "killed from outside (SIGKILL)", "SIGKILL, oom_kill counter unchanged")
    if number == signal.SIGBUS:
        return verdict(Kind.OOM_HOST, "shared memory ran out (SIGBUS)", "SIGBUS")
    log = evidence.logs.get(rank, "")
    found = recognise(log, _scene(evidence))
    if found and found[0].is_oom:
        return verdict(found[0], f"died by {name} after running out of memory", f"{name}, log text {found[1]!r}")
    if (last_words := _ABORT.search(log)) and (found := recognise(last_words[1], _scene(evidence))):
        return verdict(found[0], f"died by {name}: {_first_line(last_words[1])}", f"{name}, log text {found[1]!r}")
    return verdict(Kind.CRASH, f"died by {name}", name)


def _of_status(rank: int, status: int, evidence: Evidence) -> Verdict:
    tail = evidence.logs.get(rank, "")
    found = recognise(tail, _scene(evidence))
    if found:
        return Verdict(
            found[0], evidence.phase, _last_line(tail), f"exit {status}, log text {found[1]!r}", Source.EXIT, rank
        )
    return Verdict(
        Kind.CRASH, evidence.phase, _last_line(tail) or f"exit status {status}", f"exit {status}", Source.EXIT, rank
    )


def _scene(evidence: Evidence) -> Scene:
    return Scene(evidence.device, host_ran_out=_host_ran_out(evidence, Account()))


def _phase(name: Any) -> Phase:
    return Phase(name) if name in set(Phase) else Phase.INIT


def _first_line(text: str) -> str:
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def log_tail(path: Path, limit_bytes: int = 16384) -> str:
    """Return the end of a log with any content."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
