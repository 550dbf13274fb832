"""How a trial ended: an Outcome, with a Measurement where one was made. Plain data, to JSON and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from autotune.masking import masked_data
from autotune.versions import StrEnum


class Kind(StrEnum):
    """The class of an Outcome; each has its own policy in `search/`."""

    OK = "ok"
    OOM_DEVICE = "oom_device"  # the accelerator, or a CPU rank's cap
    OOM_HOST = "oom_host"  # main memory, pinned memory, shared memory
    TIMEOUT = "timeout"  # a phase passed its deadline
    INVALID = "invalid"  # DeepSpeed refused the config, or the script trained on another batch
    CRASH = "crash"  # the model's or the script's own error, or death by a signal
    FOREIGN = "foreign"  # another process took the device's memory meanwhile
    INFRASTRUCTURE = "infrastructure"  # port, NCCL, disk: the machine, not the candidate
    INTERRUPTED = "interrupted"  # the tuner was stopped while it ran

    @property
    def is_oom(self) -> bool:
        return self in (Kind.OOM_DEVICE, Kind.OOM_HOST)

    @property
    def says_something_of_the_candidate(self) -> bool:
        """Whether trying the candidate again would give the same."""
        return self not in (Kind.FOREIGN, Kind.INFRASTRUCTURE, Kind.INTERRUPTED)

    @property
    def may_be_mended(self) -> bool:
        """Whether the machine or the job may be the cause, so that somebody can have mended it before the next call."""
        return self in (Kind.TIMEOUT, Kind.CRASH)


class Phase(StrEnum):
    """Where in its life a trial was."""

    START = "start"
    INIT = "init"
    LOAD = "load"  # of a checkpoint, by a fresh group
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"


class Source(StrEnum):
    """What decided an Outcome's kind; `Outcome.evidence` has the details in words."""

    EXCEPTION = "exception"  # that a rank reported
    SIGNAL = "signal"  # that a rank died of
    EXIT = "exit"  # a rank's exit status
    SILENCE = "silence"  # nothing was heard for longer than its phase may take
    DEVICE = "device"  # the driver's word: a GPU is gone
    NODE = "node"  # a machine of several is gone, or cut off
    BUDGET = "budget"  # its share of the budget ended
    LIMIT = "limit"  # a limit of ours, which may have been too short
    STOP = "stop"  # the tuner was stopped
    DEATH = "death"  # the tuner's process was gone
    TABLE = "table"  # a replay's row
    STEPS = "steps"  # a script's data ended before enough of them
    BATCH = "batch"  # the sequences that were seen in a script's steps
    SHORT = "short"  # the same: as many as it was told in some, and fewer in too many

    @classmethod
    def of_evidence(cls, text: str) -> Source | None:
        """The source of an Outcome that version 0.1 stored: it kept only the text of the evidence."""
        starts = {
            "exception": cls.EXCEPTION,
            "text": cls.EXCEPTION,
            "SIG": cls.SIGNAL,
            "signal": cls.SIGNAL,
            "exit": cls.EXIT,
            "channel": cls.EXIT,
            "deadline of the trial": cls.LIMIT,
            "deadline of": cls.BUDGET,
            "deadline:": cls.SILENCE,
            "stop": cls.STOP,
            "found running": cls.DEATH,
            "replay": cls.TABLE,
        }
        return next((source for start, source in starts.items() if text.startswith(start)), None)


@dataclass(frozen=True)
class Measurement:
    """End-to-end figures of one candidate; memory is the worst rank's, speed the whole group's."""

    step_seconds: (
        float  # median of optimizer steps, the mean where a script's differ (rank/recurring.py), or extrapolated
    )
    step_seconds_spread: float  # half the width of the 95 % interval of that
    steps: int
    samples_per_second: float  # of all ranks
    tokens_per_second: float  # of all ranks
    peak_bytes: int  # the quantity that capacity is compared with: NVML's on CUDA, RLIMIT_DATA's on CPU
    predicted_seconds: float | None = None  # of the step: communication of nodes that are not there (a slice)
    micro_step_seconds: float | None = None  # forward and backward off the boundary
    boundary_seconds: float | None = None  # forward, backward, reduction and optimizer step on it
    extrapolated: bool = False  # from micro-steps and boundary steps of a shortened accumulation
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    nvml_peak_bytes: int | None = None
    live_tensor_bytes: dict[str, int] = field(default_factory=dict)  # peak by phase, where tensors were counted
    alloc_retries: int = 0
    host_peak_bytes: int | None = None  # RSS high water of one rank
    pinned_bytes: int | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    overhead_bytes: int | None = None  # of a GPU outside torch's allocator: context, NCCL, kernels
    sm_clock_mhz: int | None = None  # the slowest GPU's median
    clock_limits: list[str] = field(default_factory=list)  # what kept a GPU below its clock

    def per_gpu(self, ranks: int) -> tuple[float, float]:
        """Samples and tokens per second of one rank."""
        return self.samples_per_second / ranks, self.tokens_per_second / ranks


@dataclass(frozen=True)
class Outcome:
    """The end of one trial of one candidate."""

    kind: Kind
    phase: Phase = Phase.STEP
    measurement: Measurement | None = None
    reason: str = ""  # one line for people
    evidence: str = ""  # what decided the kind, in words: exception type, exit status, counter, or log text
    exceptions: tuple[str, ...] = ()  # full names of its types, the exception's own first; none where none was raised
    source: Source | None = None
    missing_bytes: int | None = None  # by how much an allocation failed, where an allocator said so
    capacity_bytes: int | None = None  # of what ran out: a rank's device, a node's main memory; None: as much as today
    peak_bytes: int | None = None  # the highest the gauge saw, also of a failed trial
    rank: int | None = None  # which rank failed first
    log: str | None = None
    seconds: float = 0.0  # wall time the trial cost
    outside_seconds: float = 0.0  # of it, outside measured steps
    started: bool = False  # whether an engine was started for it: a rung of a living one costs less

    @property
    def ok(self) -> bool:
        return self.kind is Kind.OK

    @property
    def may_end_otherwise(self) -> bool:
        """Whether it says nothing of the candidate, and its trial may end otherwise the next time."""
        return self.kind in (Kind.INFRASTRUCTURE, Kind.FOREIGN) or (
            self.kind is Kind.INTERRUPTED and self.source in (Source.LIMIT, Source.SILENCE)
        )

    @property
    def device_capacity_bytes(self) -> int | None:
        """Of a rank's device, where that ran out; None: as much as today."""
        return self.capacity_bytes if self.kind is Kind.OOM_DEVICE else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set; what ranks wrote is without secrets."""
        return {
            key: masked_data(value)
            for key, value in dataclasses.asdict(self).items()
            if value not in (None, "", ()) and value is not False
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Reads `to_json`'s output; fields of a newer version are dropped."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["kind"] = Kind(values["kind"])
        values["exceptions"] = tuple(values.get("exceptions", ()))
        values["phase"] = Phase(values.get("phase", Phase.STEP))
        said = values.get("source")
        values["source"] = Source(said) if said else Source.of_evidence(values.get("evidence", ""))
        if values.get("measurement"):
            fields = {f.name for f in dataclasses.fields(Measurement)}
            values["measurement"] = Measurement(**{k: v for k, v in values["measurement"].items() if k in fields})
        return cls(**values)
