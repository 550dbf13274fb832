"""A training's log: the failure that came first, and its stack."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from autotune.problem.outcome import OutcomeKind, Phase
from autotune.workers.failure_classifier import FailureContext, MemorySnapshot, classify_text, is_peer_gone

_STACK_LINES = 120  # lines before an error that may tell of it; those of several ranks may alternate
_HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "([^"\n]+)", line \d+, in (\S+)')
# the place of a frame in rich's and IPython's form, which may be wrapped, and code, of which only the marked line was running
_PLACE = re.compile(r"([^\s\"]{1,300}\.py):\s*(\d+),?\s+in\s+([\w.<>]+)")
_CODE = re.compile(r"^(?:│ *\d+ │.*|  +\d+ .*|│? *(?:❱|-+>) *\d+(.*))$", re.MULTILINE)
_LINE = re.compile(
    r"^$|^.{0,99}Error: *\n+.{1,999}|.{1,9999}", re.MULTILINE
)  # a hundred patterns search each line, so a longer one is cut into several
# prefixes of launchers, loggers and Ray: `[rank0]:`, `(Worker pid=7)`, `node1:`, a time, a level
_PREFIX = re.compile(
    r"^(?:(?:\[[^\]\n]{1,90}\]|\(\w+ (?:pid|ip)=[^)]*\)|\d{2,4}-\d\d[-\d]*T?|\d\d:\d\d:\d\d[\d.,]*Z?|>"
    r"|(?:INFO|WARNING|ERROR|std(?:err|out))\b|(?![\w.]*(?:Error|Exception|Exit|Interrupt):)[\w.-]+:(?=\s))[\s:]*)+"
)
_LINE_WITH_ERROR = re.compile(
    r"error|exception|memory|alloc|kill|abort|fatal|fail|fell|fallen|\bbus\b|space left|watchdog|not equal|NCCL WARN|exit ?code"
    r"|return code|-[79]\b|signal|core dumped",
    re.IGNORECASE,
)
_NUMBERS = re.compile(r"[\d.]+")
# the line of an exception, at its start, or of a rank that crashed outside of Python
_RAISED = re.compile(
    r"[\w.]+(?:Error|Exception|Exit|Interrupt)\b|.*(?:return |exit ?)code\W+-(?:4|11)\b|.*\bSIG(?:SEGV|ILL)\b|.*\(core dumped\)"
    r"|Fatal Python error: (?:Seg|Ill)"
)
_WRAPPED = range(60, 250)  # characters of a line that a terminal may have wrapped
_NEXT = re.compile(r"\s*$|Traceback|File |\S+(?:Error|Exception|Exit|Interrupt)\b|Killing|[A-Z]+:")
_KILLED = re.compile(
    r"(?:return code = |exit ?code\W+)-9\b|SIGKILL|[Ss]ignal 9\b|\bKilled(?:\s{2}|$)|OOM.?Killed|oom[-_]kill|Killed process"
    r"|task \d+: Out Of Memory|(?<!\w)OUT_OF_ME"
)
_COLLECTIVE = re.compile(
    r"Watchdog caught collective operation timeout: Work\wCCL\((.*)\) ran for (\d{1,15}) milliseconds"
)


@dataclass(frozen=True)
class LoggedFailure:
    """The failure of a training that its log shows first, leaving out those that follow from it."""

    kind: OutcomeKind | None  # None: an exception that says nothing of memory, machine or config
    text: str  # the line of the error
    frames: tuple[str, ...] = ()  # "file function code", outermost first
    phase: Phase | None = None  # phase of a trial, which is known without its frames
    before: tuple[str, ...] = ()  # lines before it, which may tell what the training was doing
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
    if re.search(r"❱|^-+> \d", text, re.MULTILINE):
        text = _CODE.sub(r"\1", re.sub("[│╭╮╰╯─]", " ", text))
        text = _PLACE.sub(r'File "\1", line \2, in \3', text)
    lines = [_PREFIX.sub("", line) for line in _LINE.findall(text)]
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
    line = " ".join(lines[at].split())
    pairs = itertools.pairwise(lines[at : at + _STACK_LINES])
    wrapped = itertools.takewhile(lambda pair: len(pair[0]) in _WRAPPED and not _NEXT.match(pair[1]), pairs)
    message = " ".join([line, *(one.strip() for _, one in wrapped)])
    before = tuple(lines[max(0, at - _STACK_LINES) : at])
    if collective := _COLLECTIVE.search(message):
        return LoggedFailure(None, line, collective=collective[1], waited_seconds=int(collective[2]) / 1000)
    if _KILLED.search(line):
        return LoggedFailure(OutcomeKind.OOM_HOST, line, killed=True, before=before)
    if is_peer_gone(line):
        return None
    stack = [one for one in _stack_above(before) if one.strip()]
    found = classify_text("\n".join([*stack, message]), FailureContext("cuda", MemorySnapshot.of(message)))
    if found is None and not _RAISED.match(line):
        return None
    frames = (
        " ".join([*match.groups(), code.strip()])
        for frame, code in itertools.pairwise([*stack, ""])
        if (match := _FRAME.search(frame))
    )
    return LoggedFailure(found[0] if found else None, message, tuple(frames), before=before)


def _stack_above(above: tuple[str, ...]) -> tuple[str, ...]:
    """Return the last traceback in the lines above an error; empty if there is none."""
    starts = [i for i, line in enumerate(above) if line.startswith(_HEAD) or _RAISED.match(line)]
    stack = above[starts[-1] :] if starts else above
    return stack if any(map(_FRAME.search, stack)) else ()
