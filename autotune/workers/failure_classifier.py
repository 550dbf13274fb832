"""Classification of failures: from evidence to an outcome's kind."""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.problem.outcome import Limit, Outcome, OutcomeKind, Phase, Source
from autotune.util.units import GIB, KIB, MIB, format_bytes
from autotune.workers.memory_peaks import FOREIGN_BYTES, MemoryPeaks

# -- failure kind ------------------------------------------------------------------------------------------------------
#
# Exception type first, then exit status and signal, counters, text last. Memory figures decide ambiguous texts.


@dataclass
class FailureEvidence:
    """Facts about a failed trial."""

    device: str
    errors: list[dict[str, Any]] = field(default_factory=list)  # `error` messages in order of arrival
    statuses: dict[int, int] = field(default_factory=dict)  # rank -> exit code, negative for a signal
    silence: str | None = None  # the missing heartbeat that ended the watch: phase and seconds
    phase: Phase = Phase.START
    peaks: MemoryPeaks = field(default_factory=MemoryPeaks)
    host_total_bytes: int = 0
    capacity_bytes: int = 0  # bytes of the device available to a rank; 0 if unknown
    logs: dict[int, str] = field(default_factory=dict)  # rank -> tail of its log
    unreachable: str = ""  # name of a lost machine, and how it was lost


_INVALID_TYPES = ("DeepSpeedConfigError", "pydantic_core._pydantic_core.ValidationError", "ZeRORuntimeException")
_MACHINE_TYPES = ("DistStoreError", "DistNetworkError", "DistBackendError")
_RUNTIME_TYPES = ("builtins.RuntimeError", "builtins.OSError", "builtins.MemoryError")  # includes their subclasses
# Exceptions by which DeepSpeed refuses a config. A text about the machine in one of these does not concern the machine.
_REFUSALS = ("ValueError", "AssertionError", "NotImplementedError", "KeyError", "TypeError", "AttributeError")
_HOST_LOW = 0.03  # share of main memory below which the kernel kills
_TRACEBACK_CHARACTERS = 4000  # length of its end
_SAVING = re.compile(r", in \w*save\w*$", re.MULTILINE)  # a frame of a traceback
_ABORT = re.compile(r"terminate called after throwing an instance of '[^'\n]*'\s+what\(\):\s*(.{1,2000})", re.DOTALL)

# Known causes of a forward or backward in which every rank waits in a collective, at ZeRO stage 3 for the most part.
# `set_z3_leaf_modules` is DeepSpeed's remedy; Mixtral, Qwen2-MoE and Qwen3-MoE have it by default (0.19.8,
# runtime/zero/leaf_module_config.py). gloo ends a rank that receives another size, NCCL waits.
UNEQUAL_COLLECTIVES = (
    "ranks may run unequal collectives: tokens of a rank choose other experts (deepspeed.utils.set_z3_leaf_modules with the "
    "class of the MoE block), or the batch of a rank has no image (give each rank one, or a blank one), or its code branches"
)
_MISMATCH = "collective mismatch"  # gloo's words


def classify_failure(evidence: FailureEvidence) -> Outcome:
    """Return the class of a failed trial, and the evidence that decided it."""

    def verdict(kind: OutcomeKind, source: Source, reason: str, why: str) -> Outcome:
        return Outcome(kind, evidence.phase, reason=reason, evidence=why, source=source)

    if lost := evidence.unreachable:  # the lost ranks and those that waited for them say nothing of the candidate
        return verdict(OutcomeKind.INFRASTRUCTURE, Source.NODE, lost, "the stream of that machine's agent")
    if lost := evidence.peaks.lost:  # overrides the ranks' errors, which differ in their words
        return verdict(OutcomeKind.INFRASTRUCTURE, Source.DEVICE, lost, f"NVML: {lost}")
    dead = [rank for rank, status in evidence.statuses.items() if status < 0]
    if evidence.errors and not (dead and all(is_secondary(error) for error in evidence.errors)):
        verdicts = [(_weight(error, found := _classify_error(error, evidence)), found) for error in evidence.errors]
        return min(verdicts, key=lambda weighed: weighed[0])[1]
    if dead:
        return _classify_signal(min(dead), -evidence.statuses[min(dead)], evidence)
    if late := evidence.silence:
        return verdict(OutcomeKind.TIMEOUT, Source.SILENCE, f"no rank got on: {late}", f"deadline: {late}")
    if failed := [rank for rank, status in evidence.statuses.items() if status]:
        return _classify_status(min(failed), evidence.statuses[min(failed)], evidence)
    why = "channel closed, exit status 0"
    return verdict(OutcomeKind.CRASH, Source.EXIT, "the ranks ended without a result", why)


# Errors of the kernel by which a limit shows. Native libraries and child processes print its texts.
_ERRORS = {Limit.MEMORY_CAP: (errno.ENOMEM, errno.EAGAIN), Limit.SANDBOX: (errno.EACCES, errno.EPERM, errno.EROFS)}
_LOADER_REFUSAL = "failed to map segment from shared object"  # glibc's loader prints no error of the kernel there


def suspected_limits(evidence: FailureEvidence) -> tuple[Limit, ...]:
    """Return the tuner's limits that may have caused a failure.

    The evidence is an error of the kernel that ranks met, or a text that is classified as an OOM of main memory.
    """
    met = {number for error in evidence.errors for number in error.get("errnos", ())}
    texts = [*(error.get("text", "") for error in evidence.errors), *evidence.logs.values()]
    found = []
    for limit, numbers in _ERRORS.items():
        words = [os.strerror(number).lower() for number in numbers]
        if limit is Limit.MEMORY_CAP:
            words += [_LOADER_REFUSAL, *(text.lower() for text in texts if _is_host_oom(text))]
        if met & {*numbers} or any(word in text.lower() for text in texts for word in words):
            found.append(limit)
    return tuple(found)


def _is_host_oom(text: str) -> bool:
    found = classify_text(text, FailureContext("cuda"))
    return found is not None and found[0] is OutcomeKind.OOM_HOST


# Order of precedence, so that a peer's consequential error does not hide the cause.
_ORDER = [
    OutcomeKind.GPU_CONTENTION,
    OutcomeKind.OOM_DEVICE,
    OutcomeKind.OOM_HOST,
    OutcomeKind.INVALID,
    OutcomeKind.CRASH,
    OutcomeKind.INFRASTRUCTURE,
]


def is_secondary(error: dict[str, Any]) -> bool:
    """Return True if a rank's error only states that it lost a peer, whose end is the cause."""
    return is_peer_gone(error.get("text", ""))


def _weight(error: dict[str, Any], verdict: Outcome) -> tuple[int, int]:
    secondary = is_secondary(error) and verdict.kind in (OutcomeKind.CRASH, OutcomeKind.INFRASTRUCTURE)
    return (len(_ORDER) if secondary else _ORDER.index(verdict.kind), verdict.rank or 0)


def is_memory_error(error: dict[str, Any], device: str) -> bool:
    """Return True if an `error` message reports an OOM of the device or host, by the rules of `classify_failure`."""
    type_names = error.get("kinds") or []
    if not any(name in _RUNTIME_TYPES or name.endswith("OutOfMemoryError") for name in type_names):
        return False  # its text quotes an OOM
    kind = _classify_error(error, FailureEvidence(device)).kind
    return kind.is_oom or kind is OutcomeKind.GPU_CONTENTION


def _classify_error(error: dict[str, Any], evidence: FailureEvidence) -> Outcome:
    type_names = tuple(error.get("kinds") or ())
    name, text = type_names[0] if type_names else "Exception", error.get("text", "")
    snapshot = MemorySnapshot.of(text, error.get("numbers"))
    kind, why = _class_of_error(error, FailureContext(evidence.device, snapshot, _is_host_full(evidence, snapshot)))
    if kind is OutcomeKind.OOM_DEVICE and (taken := _gpu_contention(snapshot, evidence.peaks)):
        kind, why = OutcomeKind.GPU_CONTENTION, f"{why}; {taken}"
    if counted := str(MemorySnapshot.of("", error.get("numbers"))):
        why = f"{why}; {counted}"
    reason = f"{name.split('.')[-1]}: {_line(text, 0) or name}{f' ({UNEQUAL_COLLECTIVES})' * (_MISMATCH in text)}"
    if kind is OutcomeKind.INFRASTRUCTURE and error.get("full_disk"):  # some libraries' texts do not reveal a full disk
        reason = f"{reason} (the disk of {error['full_disk']} is full)"
    missing = MemorySnapshot.of(text).missing if kind.is_oom else None  # later figures describe another state
    return Outcome(
        kind,
        _phase(error.get("phase")),
        reason=reason,
        evidence=why,
        exceptions=type_names,
        source=Source.EXCEPTION,
        missing_bytes=missing,
        rank=error.get("rank"),
    )


def _class_of_error(error: dict[str, Any], context: FailureContext) -> tuple[OutcomeKind, str]:
    """Return the class of a rank's error and the reason: type first, then frames and text, then origin."""
    type_names, file = error.get("kinds") or ["Exception"], error.get("file", "")
    name = type_names[0]
    by_type = f"exception {name}"
    if any(one.endswith("OutOfMemoryError") for one in type_names):
        return (OutcomeKind.OOM_HOST if name.startswith("ray.") else OutcomeKind.OOM_DEVICE), by_type
    if "builtins.MemoryError" in type_names:
        return (OutcomeKind.OOM_DEVICE if context.device == "cpu" else OutcomeKind.OOM_HOST), by_type
    if any(one.endswith(_INVALID_TYPES) for one in type_names):
        return OutcomeKind.INVALID, by_type
    words = f"{error.get('traceback', '')[-_TRACEBACK_CHARACTERS:]}\n{error.get('text', '')}"
    found = classify_text(words, context, error.get("files"))
    by_text = f"{by_type} with text {found[1]!r}" if found else ""
    if found and (found[0].is_oom or (found[0] is OutcomeKind.CRASH and not name.endswith(_REFUSALS))):
        return found[0], by_text
    if any(one.endswith(_MACHINE_TYPES) for one in type_names):
        return OutcomeKind.INFRASTRUCTURE, by_text or by_type
    if found and not name.endswith(_REFUSALS):
        return found[0], by_text
    if error.get("phase") == Phase.INIT and "/deepspeed/" in file and "/ops/" not in file:
        return OutcomeKind.INVALID, f"{by_type} raised by {'/'.join(file.split('/')[-3:])} during init"
    if not found and error.get("full_disk") and _SAVING.search(words):
        return OutcomeKind.INFRASTRUCTURE, f"{by_type} in a save, with {error['full_disk']} full"
    return (found[0], by_text) if found else (OutcomeKind.CRASH, by_type)


def _gpu_contention(snapshot: MemorySnapshot, peaks: MemoryPeaks) -> str:
    """Describe other processes that took enough device memory for the failure, or hold most of the device."""
    capped = snapshot.under_cap is not None and snapshot.under_cap < (snapshot.free or 0)
    if not capped and peaks.foreign > FOREIGN_BYTES and peaks.foreign >= (snapshot.missing or 0):
        return f"NVML: other processes grew by {format_bytes(peaks.foreign)} meanwhile"
    others = snapshot.elsewhere
    if others > (snapshot.total or 0) / 2:  # a desktop or a small process of another user is the machine's usual state
        return f"other processes hold {format_bytes(others)} of the device"
    return ""


def _is_host_full(evidence: FailureEvidence, snapshot: MemorySnapshot) -> bool:
    lowest = min(evidence.peaks.host_low, snapshot.host_available if snapshot.host_available is not None else 2**62)
    return evidence.peaks.oom_kills > 0 or lowest < _HOST_LOW * evidence.host_total_bytes


def _classify_signal(rank: int, number: int, evidence: FailureEvidence) -> Outcome:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"

    def verdict(kind: OutcomeKind, reason: str, why: str) -> Outcome:
        return Outcome(kind, evidence.phase, reason=reason, evidence=why, source=Source.SIGNAL, rank=rank)

    if number == signal.SIGKILL:
        if evidence.peaks.oom_kills > 0:
            why = "SIGKILL, oom_kill counter rose"
            return verdict(OutcomeKind.OOM_HOST, "killed by the kernel for want of main memory", why)
        if _is_host_full(evidence, MemorySnapshot()):
            why = f"SIGKILL with {format_bytes(evidence.peaks.host_low)} of main memory left"
            return verdict(OutcomeKind.OOM_HOST, "killed, with main memory used up", why)
        return verdict(OutcomeKind.CRASH, "killed from outside (SIGKILL)", "SIGKILL, oom_kill counter unchanged")
    if number == signal.SIGBUS:
        return verdict(OutcomeKind.OOM_HOST, "shared memory ran out (SIGBUS)", "SIGBUS")
    log = evidence.logs.get(rank, "")
    found = classify_text(log, _context(evidence))
    if found and found[0].is_oom:
        return verdict(found[0], f"died by {name} after running out of memory", f"{name}, log text {found[1]!r}")
    if _MISMATCH in log:
        return verdict(OutcomeKind.CRASH, f"died by {name}: {UNEQUAL_COLLECTIVES}", f"{name}, log text {_MISMATCH!r}")
    if (last_words := _ABORT.search(log)) and (found := classify_text(last_words[1], _context(evidence))):
        return verdict(found[0], f"died by {name}: {_line(last_words[1], 0)}", f"{name}, log text {found[1]!r}")
    return verdict(OutcomeKind.CRASH, f"died by {name}", name)


def _classify_status(rank: int, status: int, evidence: FailureEvidence) -> Outcome:
    tail = evidence.logs.get(rank, "")
    found = classify_text(tail, _context(evidence))
    kind = found[0] if found else OutcomeKind.CRASH
    why = f"exit {status}, log text {found[1]!r}" if found else f"exit {status}"
    reason = _line(tail, -1) or f"exit status {status}"
    return Outcome(kind, evidence.phase, reason=reason, evidence=why, source=Source.EXIT, rank=rank)


def _context(evidence: FailureEvidence) -> FailureContext:
    return FailureContext(evidence.device, host_is_full=_is_host_full(evidence, MemorySnapshot()))


def _phase(name: Any) -> Phase:
    return Phase(name) if name in set(Phase) else Phase.INIT


def _line(text: str, at: int) -> str:
    """Return the line of that number among those with content, or an empty text."""
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return lines[at] if lines else ""


def log_tail(path: Path, limit_bytes: int = 16384) -> str:
    """Return the end of a log with any content."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - limit_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# -- memory accounting -------------------------------------------------------------------------------------------------

_FULL = 0.02  # share of a device free below which handles and communicators (tens to hundreds of MiB) may not fit
_ROOMY = 0.10  # share of a device free above which no handle fails for lack of memory
_MUCH_PINNED_BYTES = GIB  # an offloaded optimizer pins tens of GiB, a loader's batches some MiB

_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = r"(?<![\d.])([\d.]{1,24})\s*(bytes|[KMGT]iB|[KMG]B)"

# torch prints one text for CUDA, HIP, XPU and, in its older form, NPU ("c10/cuda/CUDACachingAllocator.cpp", malloc):
#   since 2.1  "Tried to allocate A. GPU 0 has a total capacity of B of which C is free. Process 7 has D memory in use.
#              Including non-PyTorch memory, this process has E memory in use. F allowed; Of the allocated memory G is
#              allocated by PyTorch, with H allocated in private pools, and I is reserved by PyTorch but unallocated."
#              (2.1 writes "capacty"; F appears only under a cap; G includes H; the total reserved is G + I)
#   until 2.0  "Tried to allocate A (GPU 0; B total capacity; G already allocated; C free; F allowed; R reserved in total"
# The cudaMallocAsync backend ("CUDAMallocAsyncAllocator.cpp") and MPS have other forms.
_ASKED = (
    re.compile(r"(?:[Tt]ried|[Tt]rying) to allocate ([\d.]+)\s*(bytes|[KMGT]iB|[KMG]B)?"),
    re.compile(r"Unable to allocate " + _SIZE),  # numpy
    re.compile(r"Requested\s*: " + _SIZE),  # cudaMallocAsync
    re.compile(r"memory allocation of (\d+) (bytes) failed"),  # Rust: tokenizers, safetensors
)
_TOTAL = re.compile(rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity|Device limit\s*: {_SIZE}")
_FREE = re.compile(rf"{_SIZE} is free|{_SIZE} free;|Free \(according to CUDA\)\s*: {_SIZE}")
_ALLOWED = re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}|user-supplied memory fraction\)\s*: {_SIZE}")
_OWN = re.compile(rf"this process has (?!\d{{6}}){_SIZE} memory in use")  # 2^64 bytes: torch cannot read it
_ALLOCATED = re.compile(
    rf"Of the allocated memory {_SIZE} is allocated|{_SIZE} already allocated|Currently allocated\s*: {_SIZE}"
    rf"|MPS allocated: {_SIZE}"
)
_UNALLOCATED = re.compile(
    rf"{_SIZE} is reserved by PyTorch but unallocated|{_SIZE} cached|other allocations: {_SIZE}"  # until 1.3; MPS
)
_RESERVED = re.compile(rf"{_SIZE} reserved in total")


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory figures at the failure in bytes; None if unknown."""

    asked: int | None = None  # size of the failed allocation
    free: int | None = None  # free on the device for all processes
    total: int | None = None  # capacity of the device
    unused: int | None = None  # reserved by the allocator, and in no tensor
    reserved: int | None = None  # by this process's allocator, cache included; CPU rank: counted by its cap
    reserved_peak: int | None = None
    own: int | None = None  # held by this process, including memory outside the allocator
    allowed: int | None = None  # the allocator's limit under a cap
    pinned: int | None = None  # main memory that this process has page-locked through torch
    host_available: int | None = None

    @classmethod
    def of(cls, text: str, numbers: dict[str, Any] | None = None) -> MemorySnapshot:
        """Build from an error's text, which is closer to the failure and wins, and from `rank.base.collect`."""
        counted = {key: value for key, value in (numbers or {}).items() if isinstance(value, int) and value >= 0}
        reserved, allocated, unused = _find(_RESERVED, text), _find(_ALLOCATED, text), _find(_UNALLOCATED, text)
        if allocated is not None:
            reserved = reserved or allocated + (unused or 0)
            unused = reserved - allocated
        said = {
            "asked": next((size for pattern in _ASKED if (size := _find(pattern, text)) is not None), None),
            "free": _find(_FREE, text),
            "total": _find(_TOTAL, text),
            "unused": unused,
            "reserved": reserved,
            "own": _find(_OWN, text),
            "allowed": _find(_ALLOWED, text),
        }
        fields = {key: value for key in cls.__dataclass_fields__ if (value := counted.get(f"{key}_bytes")) is not None}
        return cls(**{**fields, **{key: value for key, value in said.items() if value is not None}})

    @property
    def under_cap(self) -> int | None:
        """Bytes that the cap still allowed."""
        if self.allowed is None or self.reserved is None:
            return None
        return max(0, self.allowed - self.reserved)

    @property
    def missing(self) -> int | None:
        """Bytes by which the allocation failed.

        The value is 1 if enough memory was free in pieces too small, and None if the text names no size.
        """
        if self.asked is None:
            return None
        room = [size for size in (self.free, self.under_cap) if size is not None]
        return max(1, self.asked - min(room, default=0))

    @property
    def is_full(self) -> bool:
        """True if the device has almost nothing free."""
        return self.free is not None and self.total is not None and self.free < _FULL * self.total

    @property
    def is_roomy(self) -> bool:
        """True if the device has so much free that no small allocation can have failed."""
        return self.free is not None and bool(self.total) and self.free > _ROOMY * (self.total or 0)

    @property
    def elsewhere(self) -> int:
        """Bytes of the device that neither are free nor belong to this process; 0 if unknown, or if a cap was the limit.

        NVML cannot name the owner of a process reliably: in a container this process has another pid. The figure is therefore the
        used memory minus this process's own. If torch cannot read its own memory, it prints 0 bytes (vLLM's workers) or 2^64
        (WSL). In that case the allocator's total is used.
        """
        if not self.total or self.free is None or self.reserved is None:
            return 0
        if self.under_cap is not None and self.under_cap < self.free:
            return 0
        own = self.own if self.own is not None and self.own <= self.total else 0
        return self.total - self.free - max(own, self.reserved)

    def __str__(self) -> str:
        """Return a text like `0.2 of 23.7 GiB of the device free, ...`; empty without figures."""
        parts = []
        if self.free is not None and self.total is not None:
            parts.append(f"{format_bytes(self.free)} of the device's {format_bytes(self.total)} free")
        if self.reserved is not None:
            peak = f", {format_bytes(self.reserved_peak)} at most" if self.reserved_peak is not None else ""
            parts.append(f"{format_bytes(self.reserved)} reserved{peak}")
        for size, what in ((self.allowed, "allowed"), (self.pinned, "pinned")):
            if size is not None:
                parts.append(f"{format_bytes(size)} {what}")
        if self.host_available is not None:
            parts.append(f"{format_bytes(self.host_available)} of main memory available")
        return ", ".join(parts)


def _find(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [*(group for group in match.groups() if group), "bytes"][:2]
    try:
        return int(float(number.rstrip(".")) * _UNITS[unit])  # the number may end a sentence
    except (ValueError, OverflowError):  # text like "1.2.3"
        return None


# -- failure texts -----------------------------------------------------------------------------------------------------
#
# The first match decides, so certain texts precede general ones. The patterns come from real failures, which
# `tests/data/failures.yaml` lists with their threads.

_FRAMES = 3  # number of innermost frames, because pinning passes through an accelerator's wrappers
_WORDS = 120  # longest quote of a match


@dataclass(frozen=True)
class FailureContext:
    """Circumstances of a text, which decide ambiguous ones."""

    device: str
    snapshot: MemorySnapshot = field(default_factory=MemorySnapshot)
    host_is_full: bool = False  # True if the kernel killed for lack of main memory, or almost none is left


def _memory(context: FailureContext) -> OutcomeKind:
    """Classify an OOM of main memory, which is the device's memory on a CPU rank."""
    return OutcomeKind.OOM_DEVICE if context.device == "cpu" else OutcomeKind.OOM_HOST


def _allocation(context: FailureContext) -> OutcomeKind:
    """Classify CUDA's text, which is identical for device memory and pinned memory.

    torch's own allocator prints another text. The remaining device allocations (contexts, modules, streams, workspaces)
    are small.
    """
    pins_much = (context.snapshot.pinned or 0) >= _MUCH_PINNED_BYTES
    if context.snapshot.is_roomy and (pins_much or context.host_is_full):
        return OutcomeKind.OOM_HOST
    return OutcomeKind.OOM_DEVICE


def _if_roomy(kind: OutcomeKind) -> Callable[[FailureContext], OutcomeKind]:
    """Return `kind` if the device has memory, and otherwise an OOM."""
    return lambda context: kind if context.snapshot.is_roomy else OutcomeKind.OOM_DEVICE


def _unless_full(kind: OutcomeKind) -> Callable[[FailureContext], OutcomeKind]:
    """Return `kind` unless a full device explains the failure."""
    return lambda context: OutcomeKind.OOM_DEVICE if context.snapshot.is_full else kind


def _lost(context: FailureContext) -> OutcomeKind | None:
    """Classify a killed process: a host OOM if main memory had run out, otherwise unknown."""
    return _memory(context) if context.host_is_full else None


@dataclass(frozen=True)
class FailurePattern:
    """Pattern of one failure text. If `points_to` returns None, the search continues with the next pattern."""

    points_to: OutcomeKind | Callable[[FailureContext], OutcomeKind | None]
    text: re.Pattern[str]
    frames: re.Pattern[str] | None = None  # an innermost frame must match too: file, function, source


def _patterns(
    points_to: OutcomeKind | Callable[[FailureContext], OutcomeKind | None], *texts: str, frames: str | None = None
) -> list[FailurePattern]:
    where = re.compile(frames, re.IGNORECASE) if frames else None
    return [FailurePattern(points_to, re.compile(text, re.IGNORECASE | re.DOTALL), where) for text in texts]


# Errors that a peer reports after another rank's failure. They describe connections or waits, never a cause.
_PEER_GONE = (
    r"Connection (?:closed|reset|refused)|closed by (?:remote )?peer|Broken pipe|Socket (?:closed|Timeout)"
    r"|application timeout caused pair closure|Timed out waiting \d+ms for|remote process exited|ncclRemoteError"
    r"|caught collective operation timeout|communicator was aborted"
)

# Texts that always name a cause, so that no consequential error hides it.
_CERTAIN = (
    # A kernel's failure is sticky: every later call fails too, with its own text.
    *_patterns(
        OutcomeKind.CRASH,
        r"device-side assert triggered|Assertion `[^`\n]*` failed",
        r"illegal memory access|misaligned address|illegal instruction|unspecified launch (?:failure|error)",
        r"CUDA_ERROR_ILLEGAL_ADDRESS|an illegal address",
        r"out of resources?: (?:shared|tensor) memory|OutOfResources",  # Triton's block resources, not device memory
    ),
    *_patterns(
        OutcomeKind.INFRASTRUCTURE,
        r"uncorrectable ECC|fallen off(?: of)? the bus|GPU is lost|DEVICE_LOST|\bXid\b|NVLink error|NVML_ERROR_GPU_IS_LOST",
        r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver|NVIDIA driver on your system is too old",
        r"driver version is insufficient|invalid device ordinal|system not yet initialized|CUDA unknown error",
        r"CUDA(?: runtime)? error[^\n]{0,10}: (?:unknown error|initialization error|invalid device function)",
        r"launch timed out and was terminated|or a hardware error",
        r"no kernel image is available|unsupported toolchain|kernel image is invalid|not compiled with CUDA enabled",
        r"Duplicate GPU detected|device unavailable|busy or unavailable|peer access is not supported|peer mapping",
        r"CUDA was woken before the fork|nccl-shm|shared memory segment /dev/shm/nccl|extend /dev/shm/nccl",
    ),
)

_PATTERNS = (
    *_CERTAIN,
    # Pinned or shared main memory. CUDA's text does not name it, but the frames do.
    *_patterns(
        OutcomeKind.OOM_HOST,
        r"(?:CUDA|HIP) error: (?:out of memory|invalid argument|resource already mapped)|cudaErrorMemoryAllocation",
        r"out of memory|ENOMEM",
        frames=r"pin_(?:memory|empty)|pinned|cudaHost|locked_tensor|\.to\(\W*cpu\b.{0,80}non_blocking\s*=\s*True",
    ),
    *_patterns(
        OutcomeKind.OOM_HOST,
        r"No space left on device",
        frames=r"multiprocessing/(?:heap|synchronize|shared_memory|reductions)\.py|_share_(?:fd|filename)",
    ),
    *_patterns(
        OutcomeKind.OOM_HOST,
        r"cuda(?:HostAlloc|HostRegister|MallocHost)\b(?!.{0,80}AlreadyRegistered)|Failed to CUDA host alloc",
        r"could not allocate pinned|bytes on host\b[^\n]{0,40}OUT_OF_MEMORY",
        r"out of memory.*CachingHostAllocator|CachingHostAllocator.*out of memory",
        r"(?:pin(?:ned)?[ _]memory|page-?locked)\b[^\n]{0,200}out of memory|error while trying to pin memory|mlock failed",
        r"in pin memory thread for device.{0,6000}out of memory",
        r"unable to (?:mmap|open shared memory|write to file </torch_|resize file </torch_|allocate shared memory)",
        r"(?<!PCIe )Bus error|shared memory \(shm\)|/dev/shm.*No space left|out of shared memory|signal SIGBUS",
        r"killed by signal: Killed|oom[-_]kill|Out of memory: Kill|low on memory|out-of-memory handler|code\W+-7\b",
    ),
    *_patterns(
        OutcomeKind.OOM_DEVICE,
        r"(?:CUDA|HIP|XPU|NPU|MLU|MUSA|GCU) out of memory|MPS backend out of memory|Triton Error.{0,20}out of memory",
        r"\b\w+_STATUS_ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED|would exceed allowed memory",
        r"OUT_OF_DEVICE_MEMORY|UR_RESULT_ERROR_OUT_OF_RESOURCES|hipErrorOutOfMemory|HIP_ERROR_OutOfMemory",
        r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)",
        r"failed to alloc[^\n]{0,80} from device|unable to allocate (?:CUDA|ROCm)\d* buffer",
        r"No available memory for the cache blocks|Free memory on device[^\n]{0,80}is less than|enough GPU RAM",  # vLLM; HF
        r"NCCL WARN.{0,200}out of memory|Cuda failure[^\n]{0,20}out of memory|Failed to CUDA (?:m|c)alloc",
        r"unhandled cuda error.{0,400}out of memory",
    ),
    # The driver's virtual memory (`expandable_segments`), of which some machines (Jetson, vGPU, WSL) have too little or
    # none. torch prints another text when the device is full.
    *_patterns(_if_roomy(OutcomeKind.INFRASTRUCTURE), r"(?:CUDA|HIP) driver error: out of memory"),
    *_patterns(
        _allocation,
        r"(?:CUDA|HIP)(?: runtime)? error[^\n]{0,200}out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
        r"cu(?:da)?M(?:em)?alloc[^\n]{0,200}out of memory",
        r"(?:CUDA|HIP) failed with error[^\n]{0,20}out of memory|Error out of memory at line \d+ in file",  # bitsandbytes
    ),
    *_patterns(
        _memory,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)",
        r"could not create a (?:primitive(?! descriptor)|memory)|could not execute a primitive",
        r"(?:std::)?bad_alloc|\bMemoryError\b|memory allocation of \d+ bytes failed|malloc of size \d+ failed|memalign",
        r"unable to allocate \w+ buffer",
        r"Cannot allocate memory|can't allocate region|mmap failed|out of memory trying to allocate|ENOMEM",
        r"can't start new thread|pthread_create|libgomp: Thread creation failed",
        r"\b(?:CPU|host|system|RAM)\b[^\n]{0,40}out of memory|out of (?:CPU|host|system|main|RAM)\b(?: memory)?",
    ),
    *_patterns(
        _lost,
        r"workers? \(pid(?:\(s\))? [\d, ]+\) exited unexpectedly|process pool was terminated abruptly",
        r"subprocesses has abruptly died|exit ?code:? (?:-9|137)\b|exit(?:ed with)? status 137|signal 9\b|SIGKILL",
    ),
    *_patterns(
        _if_roomy(OutcomeKind.CRASH),  # no handle: an OOM, or a consequence of a failed kernel
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_STATUS_NOT_INITIALIZED",
        r"when calling `?(?:cublas|cusolver|cudnn|cusparse)\w*Create",
        r"unable to find an engine to execute|valid (?:cuDNN|convolution) algorithm",
    ),
    *_patterns(
        _unless_full(OutcomeKind.CRASH),
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)",
    ),
    *_patterns(  # a hang, which NCCL's watchdog ends
        OutcomeKind.TIMEOUT,
        r"caught collective operation timeout|NCCL operations have failed or timed out|watchdog got stuck|heartbeat monitor",
    ),
    *_patterns(
        OutcomeKind.INFRASTRUCTURE,
        r"Address already in use|EADDRINUSE",
        r"No space left on device|Disk quota exceeded|Read-only file system|Stale file handle|file write failed",
        r"PytorchStreamWriter failed|inline_container\.cc:\d+\] \. unexpected pos|basic_ios::clear: iostream error",  # torch.save
        r"Too many open files|Input/output error",
        _PEER_GONE,
        r"Timed out initializing process group|client socket has timed out|wait timeout after \d+ ?ms",
        r"CUDA driver|CUDA initialization|cannot re-initialize CUDA in forked subprocess",
        r"Unable to find address for|No socket interface found|Name or service not known|name resolution",
        r"couldn't connect to .{0,3}https?:|Max retries exceeded with url|HTTPSConnectionPool",
    ),
    *_patterns(
        _unless_full(OutcomeKind.INFRASTRUCTURE),  # NCCL's buffers (0.2-1.5 GiB) are outside torch's allocator
        r"nccl(?:System|Internal|Remote|UnhandledCuda)Error|NCCL error|NCCL WARN",
        r"unhandled (?:cuda|system) error",
    ),
    *_patterns(
        OutcomeKind.INVALID, r"correct the following DeepSpeed config values|validation errors? for DeepSpeed\w*Config"
    ),
    # Any other text about an OOM, except lines that only guess ("may be caused by ...").
    *_patterns(
        _allocation,
        r"(?:^|\n)(?![^\n]*\b(?:may|might|could|possibl[ey]|probably|likely|if)\b)[^\n]*\bout[ -]of[ -]memory\b",
    ),
)


def classify_text(text: str, context: FailureContext, files: list[str] | None = None) -> tuple[OutcomeKind, str] | None:
    """Return the outcome class of a text and the words that decided it, or None if no pattern matches.

    Args:
        text: an error's text, preceded by its traceback if there is one.
        files: files of the frames that raised it, the innermost last, for a truncated traceback.
    """
    for pattern in _PATTERNS:
        match = pattern.text.search(text)
        if match is None:
            continue
        seen = _frame_match(pattern.frames, text[: match.start()], files or []) if pattern.frames else match[0]
        if seen is not None:
            kind = pattern.points_to if isinstance(pattern.points_to, OutcomeKind) else pattern.points_to(context)
            if kind is not None:
                words = seen if pattern.frames is None else f"{match[0]} in {seen}"
                return kind, words.strip()[:_WORDS]
    return None


def _frame_match(pattern: re.Pattern[str], before: str, files: list[str]) -> str | None:
    """Return the match in one of the innermost frames, which are printed last before a text."""
    frames = before.split('File "')[1:] or files
    for frame in frames[-_FRAMES:]:
        if match := pattern.search(frame):
            return match[0]
    return None


def is_peer_gone(text: str) -> bool:
    """Return True if a text only states that a peer is gone."""
    if re.search(_PEER_GONE, text, re.IGNORECASE) is None or any(pattern.text.search(text) for pattern in _CERTAIN):
        return False
    found = classify_text(text, FailureContext("cuda"))
    return found is None or not found[0].is_oom
