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
    OOM = "OOM"
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
    kind: str  # word of the Outcome's kind; "running" before there is one
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
    def result(self) -> str:
        """Return the speed, or the kind of the failure."""
        return f"{self.samples_per_second:.4g} samples/s" if self.measured else self.kind

    @property
    def measured(self) -> bool:
        """Return True if the trial has a throughput."""
        return self.samples_per_second is not None


@dataclass(frozen=True)
class WinnerSummary:
    """The answer, and how to use it."""

    winner: Trial | None
    own: str  # comparison with the script's own config; empty without a script
    lines: tuple[str, ...]  # the winner in words, or why there is none
    verified: bool = False
    details: tuple[str, ...] = ()
    run_now: tuple[tuple[str, str], ...] = ()  # (name, text to copy)
    config: str = ""  # DeepSpeed JSON
    needs: tuple[str, ...] = ()  # further changes that the training needs


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
