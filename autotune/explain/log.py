"""A training's log: the failure that came first, and its stack."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from autotune.problem.outcome import OutcomeKind, Phase
from autotune.workers.failure_classifier import FailureContext, MemorySnapshot, classify_text, is_peer_gone

_STACK_LINES = 120  # lines before an error that may hold its stack; those of several ranks may alternate
_HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"\n]+)", line \d+, in (\S+)|([^\s│]+\.py):\d+ in (\w+)')  # Python's and rich's
# prefixes of launchers, Ray and rich: `[rank0]:`, `(Worker pid=7)`, `node1:`, `│`
_PREFIX = re.compile(
    r"^(?:\[rank\d+\]:|\(\w+ pid=\d+[^)]*\)|│|(?![\w.]*(?:Error|Exception):)[\w.-]+:(?= +(?:File|Trace|[\w.]+Error\b)))\s?"
)
_LINE_WITH_ERROR = re.compile(
    r"error|exception|memory|alloc|kill|abort|fatal|fail|fell|fallen|\bbus\b|space left|watchdog|not equal|NCCL WARN|exit ?code"
    r"|return code|-[79]\b|signal",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"[\d.]+")
_RAISED = re.compile(r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b")  # the line of an exception, at its start
_KILLED = re.compile(r"(?:return code = |exit ?code\W+)-9\b|SIGKILL|[Ss]ignal 9\b|^Killed|oom[-_]kill|Killed process")
_COLLECTIVE = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\((.*)\) ran for (\d+) milliseconds")


@dataclass(frozen=True)
class LoggedFailure:
    """The failure of a training that its log shows first, leaving out those that follow from it."""

    kind: OutcomeKind | None  # None: an exception that says nothing of memory, machine or config
    text: str  # the line of the error
    frames: tuple[str, ...] = ()  # "file function code", outermost first
    phase: Phase | None = None  # phase of a trial, which is known without its frames
    killed: bool = False  # SIGKILL, by the kernel for want of main memory as far as a log can tell
    collective: str = ""  # fields of the WorkNCCL that a rank did not join
    waited_seconds: float = 0.0  # for that collective

    @property
    def snapshot(self) -> MemorySnapshot:
        """Return the memory figures in the error's text."""
        return MemorySnapshot.of(self.text)


def find_failure(text: str) -> LoggedFailure | None:
    """Return the failure that a log shows, or None.

    An OOM of a GPU comes before anything else, since its rank's end makes the others fail. Then come other errors in the log's
    order, a rank that was killed, and collectives that a rank did not join.
    """
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    places: dict[str, int] = {}  # lines that differ in numbers alone repeat what the first says
    for at, line in enumerate(lines):
        if _LINE_WITH_ERROR.search(line):
            places.setdefault(_NUMBERS.sub("", line), at)
    found = (_failure_at(lines, at) for at in places.values())
    return min((one for one in found if one is not None), key=_precedence, default=None)


def _precedence(failure: LoggedFailure) -> tuple[bool, ...]:
    of_gpu = failure.kind is OutcomeKind.OOM_DEVICE
    of_host = failure.kind is OutcomeKind.OOM_HOST and not failure.killed
    told = of_gpu and failure.snapshot.asked is not None
    return not told, not of_gpu, not of_host, not failure.killed, not failure.collective, not failure.frames


def _failure_at(lines: list[str], at: int) -> LoggedFailure | None:
    line = lines[at].strip()
    message = " ".join([line, *(one.strip() for one in lines[at + 1 : at + 4] if "iB" in one)])  # a terminal wraps it
    if collective := _COLLECTIVE.search(message):
        return LoggedFailure(None, line, collective=collective[1], waited_seconds=int(collective[2]) / 1000)
    if _KILLED.search(line):
        return LoggedFailure(OutcomeKind.OOM_HOST, line, killed=True)
    if is_peer_gone(line):
        return None
    stack = _stack_above(lines, at)
    found = classify_text("\n".join([*stack, message]), FailureContext("cuda", MemorySnapshot.of(message)))
    if found is None and not _RAISED.match(line):
        return None
    frames = (
        " ".join([*filter(None, match.groups()), code.strip()])
        for frame, code in itertools.pairwise([*stack, ""])
        if (match := _FRAME.search(frame))
    )
    return LoggedFailure(found[0] if found else None, message, tuple(frames))


def _stack_above(lines: list[str], at: int) -> list[str]:
    """Return the lines of the traceback that ends above a line; empty if there is none."""
    above = lines[max(0, at - _STACK_LINES) : at]
    starts = [i for i, line in enumerate(above) if line.startswith(_HEAD) or _RAISED.match(line)]
    stack = above[starts[-1] :] if starts else above
    return stack if any(map(_FRAME.search, stack)) else []
