"""What a page says of a study: plain data, frozen, with nothing of how it is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autotune.problem.candidate import Value
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Kind
from autotune.versions import StrEnum


class Status(StrEnum):
    """How a trial is drawn: an Outcome's kind, and for a measurement whether it stays under the ceiling."""

    FITS = "fits"
    ABOVE = "above the ceiling"  # it ran, and leaves less than the headroom
    RAN_OUT = "ran out of memory"
    FAILED = "failed"  # a timeout, a refusal, a crash: it would do so again
    UNDECIDED = "inconclusive"  # interrupted, or the machine's fault
    RUNNING = "running"


@dataclass(frozen=True)
class Forecast:
    """What the predictor said of a candidate before it was measured; intervals hold 95 %."""

    peak_bytes: float
    peak_interval: tuple[float, float]
    step_seconds: float
    step_interval: tuple[float, float]
    fits: bool


@dataclass(frozen=True)
class Trial:
    """One trial as it is shown."""

    number: int
    label: str  # of the candidate, like `z2 mb8 ga4 ckpt`
    knobs: dict[str, Value]
    role: str  # of search/study.py
    status: Status
    kind: str  # of the Outcome; "running" while there is none
    phase: str = ""
    rank: int | None = None  # that failed first
    samples_per_second: float | None = None  # of all ranks
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    spread: float | None = None  # half the 95 % interval of the step, as a share of it
    peak_bytes: int | None = None
    missing_bytes: int | None = None  # by how much an allocation failed
    capacity_bytes: int | None = None  # of a rank, where it ran out; None: as today
    retries: int = 0  # of the allocator
    seconds: float = 0.0  # that the trial cost
    why: str = ""  # why it was tried
    happened: str = ""  # instead of a measurement
    log: str = ""  # folder of its logs
    forecast: Forecast | None = None

    @property
    def measured(self) -> bool:
        return self.samples_per_second is not None

    def lacks_memory_on(self, hardware: Hardware) -> bool:
        """Whether it ran out of no clearly less memory than this machine's ranks have."""
        return self.kind == Kind.OOM_DEVICE and not hardware.outgrew(Kind.OOM_DEVICE, self.capacity_bytes)


@dataclass(frozen=True)
class Gain:
    """How many times the tokens a second of another config the winner has, both measured in the same way."""

    over: str  # what the other is
    label: str
    times: float
    interval: tuple[float, float]
    detail: str = ""


@dataclass(frozen=True)
class Code:
    """Something to copy."""

    name: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The answer, and what to do with it."""

    winner: Trial | None
    head: str  # one line
    verified: bool = False
    checks: tuple[str, ...] = ()  # what the winner has shown, and what it has not
    gains: tuple[Gain, ...] = ()
    lines: tuple[str, ...] = ()  # what came closest where nothing fits, or how to begin
    run_now: tuple[Code, ...] = ()
    instead: str = ""  # what can be done in place of the commands
    needs: tuple[str, ...] = ()  # what the training must do besides
    mfu: float | None = None


@dataclass(frozen=True)
class Bar:
    """Bytes of a rank by what holds them, in order."""

    name: str  # `predicted` or `measured`
    parts: tuple[tuple[str, float], ...]
    note: str = ""

    @property
    def whole(self) -> float:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Bars:
    """A config's memory, predicted beside measured."""

    name: str  # `winner`, `runner-up`, `the script as it is`
    label: str
    bars: tuple[Bar, ...]
    limits: tuple[int, int] | None = None  # (capacity, ceiling) in bytes, where these are not the page's


class Cell(StrEnum):
    """What is known of a micro-batch under one kind of config. What is best known counts: the first of these that holds."""

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
    """A place of the memory map."""

    cell: Cell
    bytes_low: float | None = None  # the least that any of its candidates was measured, or is predicted, to take
    phases: tuple[str, ...] = ()  # in which trials ran out
    told: str = ""  # for people who point at it
    trials: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryMap:
    """Micro-batch against stage, checkpointing and offload."""

    micro_batches: tuple[int, ...]
    rows: tuple[
        tuple[str, tuple[Square, ...]], ...
    ]  # (stage, checkpointing and offload in words, a square a micro-batch)
    note: str = ""


@dataclass(frozen=True)
class Clock:
    """Where the time of a study went; seconds."""

    calls: tuple[tuple[str, float, float, str], ...]  # (started, used, budget, why it ended)
    used_seconds: float
    spent: tuple[tuple[str, float], ...]  # by cause, in order


@dataclass(frozen=True)
class Pair:
    """What one change of one knob did, all else equal."""

    knob: str
    change: str  # `1 → 2`
    pairs: int
    speed: float  # median of the share that it adds
    speed_range: tuple[float, float]
    bytes: float  # median of what it adds to the peak
    bytes_range: tuple[float, float]


@dataclass(frozen=True)
class Step:
    """One step of one knob away from the winner."""

    knob: str
    change: str
    label: str
    status: Status | None  # None: it was not tried, and the figures are predicted
    speed: float | None  # the share that it adds to the winner's; of what is not believed to fit there is none
    bytes: float | None  # what it adds to the winner's peak
    trial: int | None = None
    cell: Cell | None = None  # of what was not tried: whether it is believed to fit, as the map says it

    @property
    def fits(self) -> bool:
        return self.status is Status.FITS or self.cell is Cell.PREDICTED


@dataclass(frozen=True)
class Mattered:
    pairs: tuple[Pair, ...] = ()
    steps: tuple[Step, ...] = ()
    basin: str = ""  # whether the winner is a sharp peak


@dataclass(frozen=True)
class Accuracy:
    """The predictor's error on what it had not seen; shares."""

    count: int
    memory: float  # median
    step: float
    memory_inside: float  # of those within the 95 % interval
    step_inside: float
    tried: int  # expected to fit when they were tried
    ran_out: int  # of these


@dataclass(frozen=True)
class StudyReport:
    """Everything that the page of a study says."""

    study: str
    model: str
    job: str
    machine: str
    device: str
    capacity_bytes: int
    ceiling_bytes: int
    headroom: float
    objective: str
    verdict: Verdict
    trials: tuple[Trial, ...]
    varying: tuple[str, ...]  # knobs that differ between trials
    constant: tuple[tuple[str, str], ...]  # knobs that do not, and their value
    memory: tuple[Bars, ...]
    map: MemoryMap | None
    clock: Clock
    mattered: Mattered
    accuracy: Accuracy | None
    no_forecast: str  # why there is none, or what is to be known of them
    skips: tuple[tuple[str, int], ...]
    facts: tuple[tuple[str, str], ...]  # machine, versions, environment
    commands: tuple[str, ...]
    space: str  # its YAML
    fingerprint: dict[str, Any] = field(default_factory=dict)
    forced: tuple[str, ...] = ()  # differences that --force went over
    version: str = ""  # of autotune
    confidential: bool = False
