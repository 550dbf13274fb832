"""From evidence to the Kind of an Outcome: exception type first, then exit status and signal, counters, text last."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.group.gauge import FOREIGN_BYTES, Peaks
from autotune.problem.outcome import Kind, Phase, Source
from autotune.units import GIB, KIB, MIB, format_bytes


@dataclass
class Evidence:
    """What is known of a trial that did not end well."""

    device: str
    errors: list[dict[str, Any]] = field(default_factory=list)  # `error` messages, as they came
    statuses: dict[int, int] = field(default_factory=dict)  # rank -> exit code, negative for a signal
    timed_out: str | None = None  # phase whose deadline passed, with its seconds
    phase: Phase = Phase.START
    peaks: Peaks = field(default_factory=Peaks)
    host_total_bytes: int = 0
    logs: dict[int, str] = field(default_factory=dict)  # rank -> tail of its log


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    phase: Phase
    reason: str
    evidence: str
    source: Source
    rank: int | None = None
    missing_bytes: int | None = None
    signal: int | None = None  # that the rank died of


# Texts of running out, each seen in the wild; the first group that matches decides. Host texts come before device texts
# where CUDA says the same of both.
_HOST_TEXTS = (
    r"cudaHostAlloc|CachingHostAllocator|cudaHostRegister|pin_memory.*out of memory",
    r"unable to (?:mmap|open shared memory)|Bus error|shared memory \(shm\)|/dev/shm.*No space left",
)
_DEVICE_TEXTS = (
    r"CUDA out of memory|CUDA error: out of memory|HIP out of memory",
    r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED",
    r"cudaErrorMemoryAllocation",
    r"(?:unhandled cuda error|Cuda failure|NCCL).*out of memory",
)
_CPU_TEXTS = (
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
    r"could not create a (?:primitive|memory)|could not execute a primitive",
    r"std::bad_alloc|bad_alloc",
    r"Cannot allocate memory|can't allocate region|mmap failed|out of memory trying to allocate",
    r"can't start new thread|pthread_create|libgomp: Thread creation failed",
)
_MACHINE_TEXTS = (
    r"Address already in use|EADDRINUSE",
    r"No space left on device|Disk quota exceeded",
    r"Too many open files",
    r"nccl(?:SystemError|InternalError|RemoteError|UnhandledCudaError)|NCCL error|NCCL WARN",
    r"unhandled (?:cuda|system) error",
    r"CUDA driver|uncorrectable ECC|GPU has fallen off the bus|device unavailable|busy or unavailable",
)
_PEER_TEXTS = r"Connection (?:closed|reset|refused)|Broken pipe|peer|Socket (?:closed|Timeout)|application timeout"
_TRIED = re.compile(r"(?:[Tt]ried|trying) to allocate ([\d.]+)\s*(bytes|[KMG]iB|[KMG]B)?")
_FREE = re.compile(r"([\d.]+)\s*([KMG]iB|bytes) is free")
_UNITS = {"bytes": 1, None: 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_INVALID_TYPES = ("DeepSpeedConfigError", "pydantic_core._pydantic_core.ValidationError", "ZeRORuntimeException")


def judge(evidence: Evidence) -> Verdict:
    """The class of a failed trial, and the evidence that decided it."""
    if evidence.peaks.lost:  # whatever the ranks say of it: each fails in words of its own
        why = f"NVML: {evidence.peaks.lost}"
        return Verdict(Kind.INFRASTRUCTURE, evidence.phase, evidence.peaks.lost, why, Source.DEVICE)
    dead = [rank for rank, status in evidence.statuses.items() if status < 0]
    if evidence.errors and not (dead and all(is_secondary(error) for error in evidence.errors)):
        return min((_of_error(error, evidence) for error in evidence.errors), key=_weight)
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


# What a peer reports after another rank's failure must not hide it.
_ORDER = [Kind.FOREIGN, Kind.OOM_DEVICE, Kind.OOM_HOST, Kind.INVALID, Kind.CRASH, Kind.INFRASTRUCTURE]


def is_secondary(error: dict[str, Any]) -> bool:
    """Whether a rank's error is only that it lost a peer, whose own end is the cause."""
    return re.search(_PEER_TEXTS, error.get("text", "")) is not None


def _weight(verdict: Verdict) -> tuple[int, int]:
    secondary = is_secondary({"text": verdict.reason}) and verdict.kind in (Kind.CRASH, Kind.INFRASTRUCTURE)
    return (len(_ORDER) if secondary else _ORDER.index(verdict.kind), verdict.rank or 0)


def _of_error(error: dict[str, Any], evidence: Evidence) -> Verdict:
    kinds, text = error.get("kinds") or ["Exception"], error.get("text", "")
    rank, phase = error.get("rank"), _phase(error.get("phase"))
    name = kinds[0]
    line = _first_line(text) or name
    missing = missing_bytes(text)

    def verdict(kind: Kind, why: str) -> Verdict:
        reason, short = f"{name.split('.')[-1]}: {line}", missing if kind.is_oom else None
        return Verdict(kind, phase, reason, why, Source.EXCEPTION, rank, short)

    if any(kind.endswith("OutOfMemoryError") for kind in kinds):
        if evidence.peaks.foreign > FOREIGN_BYTES:
            grown = format_bytes(evidence.peaks.foreign)
            return verdict(Kind.FOREIGN, f"exception {name}; NVML: other processes grew by {grown} meanwhile")
        return verdict(Kind.OOM_DEVICE, f"exception {name}")
    if "builtins.MemoryError" in kinds:
        return verdict(_cpu_oom(evidence), f"exception {name}")
    if any(kind.endswith(_INVALID_TYPES) for kind in kinds):
        return verdict(Kind.INVALID, f"exception {name}")
    text_kind = classify_text(f"{text}\n{error.get('traceback', '')[-4000:]}", evidence.device)
    if text_kind and text_kind[0].is_oom:
        if text_kind[0] is Kind.OOM_DEVICE and evidence.peaks.foreign > FOREIGN_BYTES:
            return verdict(Kind.FOREIGN, f"text {text_kind[1]!r}; NVML: other processes grew meanwhile")
        return verdict(text_kind[0], f"exception {name} with text {text_kind[1]!r}")
    if any(kind.endswith(("DistStoreError", "DistNetworkError", "DistBackendError")) for kind in kinds):
        return verdict(Kind.INFRASTRUCTURE, f"exception {name}")
    if "builtins.OSError" in kinds and text_kind:
        return verdict(text_kind[0], f"exception {name} with text {text_kind[1]!r}")
    if phase is Phase.INIT and "/deepspeed/" in error.get("file", "") and "/ops/" not in error.get("file", ""):
        return verdict(
            Kind.INVALID, f"exception {name} raised by {'/'.join(error['file'].split('/')[-3:])} during init"
        )
    if text_kind:
        return verdict(text_kind[0], f"exception {name} with text {text_kind[1]!r}")
    return verdict(Kind.CRASH, f"exception {name}")


def _of_signal(rank: int, number: int, evidence: Evidence) -> Verdict:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def verdict(kind: Kind, reason: str, why: str) -> Verdict:
        return Verdict(kind, evidence.phase, reason, why, Source.SIGNAL, rank, signal=number)

    if number == signal.SIGKILL:
        if evidence.peaks.oom_kills > 0:
            return verdict(
                Kind.OOM_HOST, "killed by the kernel for want of main memory", "SIGKILL, oom_kill counter rose"
            )
        low = evidence.peaks.host_low
        if evidence.host_total_bytes and low < 0.03 * evidence.host_total_bytes:
            why = f"SIGKILL with {format_bytes(low)} of main memory left"
            return verdict(Kind.OOM_HOST, "killed, with main memory used up", why)
        return verdict(Kind.CRASH, "killed from outside (SIGKILL)", "SIGKILL, oom_kill counter unchanged")
    if number == signal.SIGBUS:
        return verdict(Kind.OOM_HOST, "shared memory ran out (SIGBUS)", "SIGBUS")
    found = classify_text(evidence.logs.get(rank, ""), evidence.device)
    if found and found[0].is_oom:
        return verdict(found[0], f"died by {name} after running out of memory", f"{name}, log text {found[1]!r}")
    return verdict(Kind.CRASH, f"died by {name}", name)


def _of_status(rank: int, status: int, evidence: Evidence) -> Verdict:
    tail = evidence.logs.get(rank, "")
    found = classify_text(tail, evidence.device)
    if found:
        return Verdict(
            found[0], evidence.phase, _last_line(tail), f"exit {status}, log text {found[1]!r}", Source.EXIT, rank
        )
    return Verdict(
        Kind.CRASH, evidence.phase, _last_line(tail) or f"exit status {status}", f"exit {status}", Source.EXIT, rank
    )


def classify_text(text: str, device: str) -> tuple[Kind, str] | None:
    """The class that a text points to, with the words that matched; None where no pattern does."""
    cpu = Kind.OOM_DEVICE if device == "cpu" else Kind.OOM_HOST
    for patterns, kind in (
        (_HOST_TEXTS, Kind.OOM_HOST),
        (_DEVICE_TEXTS, Kind.OOM_DEVICE),
        (_CPU_TEXTS, cpu),
        (_MACHINE_TEXTS, Kind.INFRASTRUCTURE),
    ):
        for pattern in patterns:
            if match := re.search(pattern, text, re.IGNORECASE):
                return kind, match[0][:120]
    return None


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception in a rank says that memory ran out, the device's or the host's."""
    if isinstance(error, MemoryError) or type(error).__name__.endswith("OutOfMemoryError"):
        return True
    found = classify_text(str(error), "cpu") if isinstance(error, RuntimeError | OSError) else None
    return found is not None and found[0].is_oom


def _cpu_oom(evidence: Evidence) -> Kind:
    return Kind.OOM_DEVICE if evidence.device == "cpu" else Kind.OOM_HOST


def missing_bytes(text: str) -> int | None:
    """Bytes that a failed allocation lacked: what it asked for, less what the text says was free. None: it names no size."""
    tried = _TRIED.search(text)
    if not tried:
        return None
    asked = _size(tried[1], tried[2])
    free = _FREE.search(text)
    return max(1, asked - (_size(free[1], free[2]) if free else 0))


def _size(number: str, unit: str | None) -> int:
    return int(float(number.rstrip(".")) * _UNITS[unit])  # a sentence may end at the number


def _phase(name: Any) -> Phase:
    return Phase(name) if name in set(Phase) else Phase.INIT


def _first_line(text: str) -> str:
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")


def log_tail(path: Path, limit_bytes: int = 16384) -> str:
    """The end of a log, whatever bytes it holds."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
