"""Content of a study's page: plain, frozen data, without any drawing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.problem.candidate import Value
from autotune.problem.hardware import Hardware


class Status(StrEnum):
    """Status of a trial in charts: an Outcome's kind, split by the ceiling for measurements."""

    FITS = "fits"
    ABOVE = "above the ceiling"  # it ran, and leaves less than the headroom
    RAN_OUT = "ran out of memory"
    FAILED = "failed"  # a timeout, a refusal, a crash: a retry would fail again
    UNDECIDED = "inconclusive"  # interrupted, or the machine's fault
    RUNNING = "running"


@dataclass(frozen=True)
class Trial:
    """One trial on the page."""

    number: int
    label: str  # candidate, like `z2 mb8 ga4 ckpt`
    knobs: dict[str, Value]
    role: str  # a role of search/study.py
    status: Status
    kind: str  # kind of the Outcome; "running" before there is one
    phase: str = ""
    rank: int | None = None  # first rank that failed
    samples_per_second: float | None = None  # all ranks together
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    spread: float | None = None  # half the 95 % interval of the step, as a share of it
    peak_bytes: int | None = None
    missing_bytes: int | None = None  # bytes by which an allocation failed
    capacity_bytes: int | None = None  # bytes of a rank at an OOM; None: unchanged since
    retries: int = 0  # retries of the allocator
    seconds: float = 0.0  # cost of the trial
    why: str = ""  # reason for trying it
    happened: str = ""  # failure, if there is no measurement
    log: str = ""  # folder of its logs
    remark: str = ""  # why a measured trial cannot win

    @property
    def measured(self) -> bool:
        """Return True if the trial has a throughput."""
        return self.samples_per_second is not None


@dataclass(frozen=True)
class MeasuredGain:
    """The winner's tokens per second divided by another config's, both measured in the same way."""

    over: str  # description of the other config
    label: str
    times: float
    interval: tuple[float, float]
    detail: str = ""


@dataclass(frozen=True)
class WinnerSummary:
    """The answer, and how to use it."""

    winner: Trial | None
    head: str  # one line
    sentence: str = ""  # the winner's config in words
    legend: str = ""  # meaning of the short codes of its config
    own: str = ""  # comparison with the script's own config
    comparison: tuple[str, ...] = ()  # with the other configs that may win
    verified: bool = False
    checks: tuple[str, ...] = ()  # checks that the winner has passed, and open ones
    gains: tuple[MeasuredGain, ...] = ()
    lines: tuple[str, ...] = ()  # the config that came closest if nothing fits, or how to begin
    run_now: tuple[tuple[str, str], ...] = ()  # (name, text to copy)
    instead: str = ""  # alternative to the commands
    needs: tuple[str, ...] = ()  # further changes that the training needs
    mfu: float | None = None


@dataclass(frozen=True)
class StudyReport:
    """Full content of a study's page."""

    study: str
    model: str
    job: str
    hardware: Hardware
    verdict: WinnerSummary
    trials: tuple[Trial, ...]
    varying: tuple[str, ...]  # knobs that differ between trials
    constant: tuple[tuple[str, str], ...]  # other knobs, and their value
    mattered: tuple[tuple[str, float], ...]  # (knob, importance for speed), largest first
    skips: tuple[tuple[str, int], ...]  # (reason for not trying candidates, count)
    calls: tuple[tuple[str, float, float, str], ...]  # (started, used and budget in seconds, reason for its end)
    facts: tuple[tuple[str, str], ...]  # machine, versions, environment
    commands: tuple[str, ...]
    space: str  # its YAML
    fingerprint: dict[str, Any] = field(default_factory=dict)
    forced: tuple[str, ...] = ()  # differences that --force accepted
