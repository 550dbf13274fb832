"""Content of a study's page: plain, frozen data, without any drawing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.problem.candidate import Value
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import OutcomeKind


class Status(StrEnum):
    """Status of a trial in charts: an Outcome's kind, split by the ceiling for measurements."""

    FITS = "fits"
    ABOVE = "above the ceiling"  # it ran, and leaves less than the headroom
    RAN_OUT = "ran out of memory"
    FAILED = "failed"  # a timeout, a refusal, a crash: a retry would fail again
    UNDECIDED = "inconclusive"  # interrupted, or the machine's fault
    RUNNING = "running"


@dataclass(frozen=True)
class TrialPrediction:
    """Prediction of a candidate before its measurement; intervals hold 95 %."""

    peak_bytes: float
    peak_interval: tuple[float, float]
    step_seconds: float
    step_interval: tuple[float, float]
    fits: bool


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
    forecast: TrialPrediction | None = None
    remark: str = ""  # why a measured trial cannot win

    @property
    def measured(self) -> bool:
        """Return True if the trial has a throughput."""
        return self.samples_per_second is not None

    def lacks_memory_on(self, hardware: Hardware) -> bool:
        """Check for an OOM on devices that had at least about the memory of this machine's."""
        return self.kind == OutcomeKind.OOM_DEVICE and not hardware.outgrew(OutcomeKind.OOM_DEVICE, self.capacity_bytes)


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
class Bar:
    """Bytes of a rank by content, in order."""

    name: str  # `predicted`, `measured` or `resuming`
    parts: tuple[tuple[str, float], ...]
    note: str = ""

    @property
    def whole(self) -> float:
        """Return the sum of the parts in bytes."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Bars:
    """Predicted and measured memory of a config."""

    name: str  # `winner`, `runner-up`, `the script as it is`
    label: str
    bars: tuple[Bar, ...]
    limits: tuple[int, int] | None = None  # bytes: (capacity, ceiling), if they differ from the page's


class Cell(StrEnum):
    """Knowledge about a micro-batch under one kind of config. The first that applies counts, since it is the most certain."""

    FITS = "fits"
    ABOVE = "above the ceiling"
    RAN_OUT = "ran out of memory"
    FAILED = "failed"
    RULED_OUT = "not tried: needs no less than what ran out"
    TOO_MUCH = "not tried: predicted to need too much"
    PREDICTED = "not tried: predicted to fit"
    UNKNOWN = "not known"
    NONE = "not in the space"


@dataclass(frozen=True)
class Square:
    """One square of the memory map."""

    cell: Cell
    bytes_low: float | None = None  # smallest measured or predicted bytes of its candidates
    phases: tuple[str, ...] = ()  # phases of the trials that ran out of memory
    tooltip: str = ""
    trials: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryMap:
    """Micro-batches as columns; stage, checkpointing and offload as rows."""

    micro_batches: tuple[int, ...]
    # (stage, checkpointing and offload in words; one square per micro-batch)
    rows: tuple[tuple[str, tuple[Square, ...]], ...]
    note: str = ""


@dataclass(frozen=True)
class TimeUse:
    """Use of a study's time, in seconds."""

    calls: tuple[tuple[str, float, float, str], ...]  # (started, used, budget, reason for its end)
    spent: tuple[tuple[str, float], ...]  # by cause, in order


@dataclass(frozen=True)
class KnobPair:
    """Effect of one change of one knob, all else equal."""

    knob: str
    change: str  # `1 → 2`
    pairs: int
    speed: float  # median of the relative change
    speed_range: tuple[float, float]
    bytes: float  # median change of the peak
    bytes_range: tuple[float, float]
    is_noise: bool = False  # the change of speed has an interval that holds 0, or pairs of both signs


@dataclass(frozen=True)
class Step:
    """One step of one knob away from the winner."""

    knob: str
    change: str
    label: str
    status: Status | None  # None: not tried, so the figures are predicted
    speed: float | None  # relative to the winner's; None if it is not expected to fit
    bytes: float | None  # difference to the winner's peak
    trial: int | None = None
    cell: Cell | None = None  # for untried candidates: expected fit, as in the map
    is_noise: bool = False  # its speed cannot be told from the winner's

    @property
    def fits(self) -> bool:
        """Return True if the neighbour fits, measured or predicted."""
        return self.status is Status.FITS or self.cell is Cell.PREDICTED


@dataclass(frozen=True)
class KnobEffects:
    """Effects of knobs, and the neighbours of the winner."""

    pairs: tuple[KnobPair, ...] = ()
    steps: tuple[Step, ...] = ()
    basin: str = ""  # sentence about how the winner's neighbours compare


@dataclass(frozen=True)
class Accuracy:
    """The predictor's error on unseen trials; shares."""

    count: int
    memory: float  # median
    step: float
    memory_inside: float  # share of trials within the 95 % interval
    step_inside: float
    tried: int  # trials that were expected to fit
    ran_out: int  # of these, those that ran out of memory


@dataclass(frozen=True)
class StudyReport:
    """Full content of a study's page."""

    study: str
    model: str
    job: str
    hardware: Hardware
    objective: str
    verdict: WinnerSummary
    trials: tuple[Trial, ...]
    varying: tuple[str, ...]  # knobs that differ between trials
    constant: tuple[tuple[str, str], ...]  # other knobs, and their value
    memory: tuple[Bars, ...]
    map: MemoryMap | None
    clock: TimeUse
    mattered: KnobEffects
    accuracy: Accuracy | None
    no_forecast: str  # reason why there are none, or notes about them
    skips: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, str], ...]  # machine, versions, environment
    commands: tuple[str, ...]
    space: str  # its YAML
    fingerprint: dict[str, Any] = field(default_factory=dict)
    forced: tuple[str, ...] = ()  # differences that --force accepted
