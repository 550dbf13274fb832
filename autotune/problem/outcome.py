"""Outcome of a trial, with a Measurement if one was made. Plain data, with conversion to JSON and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.masking import masked_data
from autotune.problem.training_trace import TrainingTrace
from autotune.util.bounds import known_fields


class OutcomeKind(StrEnum):
    """Class of an Outcome; each has its own policy in `search/`."""

    OK = "ok"
    OOM_DEVICE = "oom_device"  # the accelerator, or a CPU rank's cap
    OOM_HOST = "oom_host"  # main memory, pinned memory, shared memory
    TIMEOUT = "timeout"  # a phase passed its deadline
    # DeepSpeed refused the config, or the script had another batch, too few steps, or trained something else
    INVALID = "invalid"
    CRASH = "crash"  # the model's or the script's own error, or death by a signal
    GPU_CONTENTION = "foreign"  # another process took the device's memory during the trial
    INFRASTRUCTURE = "infrastructure"  # port, NCCL, disk: the machine, not the candidate
    # ended without evidence about the candidate: stop of the user, dead tuner, used budget, first time limit, first host
    # OOM in parallel, or a disk without space for a checkpoint
    INTERRUPTED = "interrupted"

    @property
    def word(self) -> str:
        """Return the kind's name for display."""
        words = {
            OutcomeKind.OOM_DEVICE: "OOM",
            OutcomeKind.OOM_HOST: "host OOM",
            OutcomeKind.GPU_CONTENTION: "GPU contention",
        }
        return words.get(self, self.value)

    @property
    def is_oom(self) -> bool:
        """Return True for an OOM of a device or of the host."""
        return self in (OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_HOST)

    @property
    def is_attributable_to_candidate(self) -> bool:
        """True if it counts against the candidate: on the same machine, a repeated trial would end the same way."""
        return self not in (OutcomeKind.GPU_CONTENTION, OutcomeKind.INFRASTRUCTURE, OutcomeKind.INTERRUPTED)

    @property
    def may_be_fixed_between_calls(self) -> bool:
        """True if the user may fix the cause, in the machine or the job, before the next call."""
        return self in (OutcomeKind.TIMEOUT, OutcomeKind.CRASH)


class Phase(StrEnum):
    """Phase of a trial's life."""

    START = "start"
    INIT = "init"
    LOAD = "load"  # loading a checkpoint in a new worker group
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"


class Source(StrEnum):
    """Evidence that decided an Outcome's kind; `Outcome.evidence` has the details in words."""

    EXCEPTION = "exception"  # reported by a rank
    SIGNAL = "signal"  # the signal that killed a rank
    EXIT = "exit"  # a rank's exit status
    SILENCE = "silence"  # a rank sent nothing for longer than its phase may take
    DEVICE = "device"  # the driver reports a lost GPU
    NODE = "node"  # one of several machines is gone, or cut off
    BUDGET = "budget"  # the trial's share of the budget ended
    LIMIT = "limit"  # a time limit set by the tuner, which may have been too short
    DISK = "disk"  # the disk lacks space for a checkpoint; LIMIT in studies of earlier versions
    STOP = "stop"  # the tuner was stopped
    DEATH = "death"  # the tuner's process was gone
    TABLE = "table"  # a row of a replay's table
    STEPS = "steps"  # a script's data ended before enough steps
    BATCH = "batch"  # sequences counted in a script's steps
    SHORT = "short"  # like BATCH, but some steps had the requested batch and too many had less
    TRACE = "trace"  # the training trace differs from the reference's


class Limit(StrEnum):
    """Limit set by the tuner that may have caused a failure."""

    MEMORY_CAP = "memory cap"
    SANDBOX = "sandbox"


@dataclass(frozen=True)
class Measurement:
    """End-to-end figures of one candidate; memory is the worst rank's, speed the whole group's."""

    # s; median of optimizer steps, the mean if a script's steps differ (rank/step_statistics.py), or extrapolated
    step_seconds: float
    step_seconds_spread: float  # s; half the width of the 95 % interval of step_seconds
    steps: int
    samples_per_second: float  # over all ranks
    tokens_per_second: float  # over all ranks
    # bytes, comparable to capacity: on CUDA the maximum of the process sizes that NVML shows and the ranks' own figures,
    # on CPU bytes of RLIMIT_DATA
    peak_bytes: int
    extrapolated: bool = False  # computed from micro-steps and boundary steps of a shortened accumulation
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    nvml_peak_bytes: int | None = None  # bytes; if NVML hides the ranks' processes, growth of the whole GPU
    alloc_retries: int = 0
    host_peak_bytes: int | None = None  # bytes; highest RSS of one rank
    pinned_bytes: int | None = None
    model_tflops_per_gpu: float | None = None
    mfu: float | None = None
    overhead_bytes: int | None = None  # bytes of a GPU outside torch's allocator: context, NCCL, kernels

    def per_gpu(self, ranks: int) -> tuple[float, float]:
        """Return samples and tokens per second of one rank."""
        return self.samples_per_second / ranks, self.tokens_per_second / ranks


@dataclass(frozen=True)
class Outcome:
    """End of one trial of one candidate."""

    kind: OutcomeKind
    phase: Phase = Phase.STEP
    measurement: Measurement | None = None
    reason: str = ""  # one line for display
    evidence: str = ""  # evidence for the kind, in words: exception type, exit status, counter, or log text
    exceptions: tuple[str, ...] = ()  # full names of the exception's types, its own first; empty if none was raised
    source: Source | None = None
    limits: tuple[Limit, ...] = ()  # that may have caused a failure; a used budget is a `source`
    missing_bytes: int | None = None  # bytes that a failed allocation lacked, if the allocator reported them
    capacity_bytes: int | None = None  # bytes of the device or main memory that ran out; None: as much as today
    # bytes; the measurement's peak, or in a failed trial the highest that was sampled or that a rank reported
    peak_bytes: int | None = None
    rank: int | None = None  # the rank that failed first
    log: str | None = None
    seconds: float = 0.0  # s; wall time of the trial
    outside_seconds: float = 0.0  # s; the part outside measured steps
    # s; lower bound of a step of a trial that was too slow for its share of the budget (TIMEOUT)
    least_step_seconds: float | None = None
    started: bool = False  # a new engine was started; a rung of a living engine costs less
    trace: TrainingTrace | None = None  # first optimizer steps; None in studies of earlier versions
    trains_otherwise: str = ""  # knob because of which it trains something else than the reference

    @property
    def ok(self) -> bool:
        """Return True if the candidate was measured."""
        return self.kind is OutcomeKind.OK

    @property
    def is_retried_now(self) -> bool:
        """True if a verification that ended so is retried in the same call, because the candidate is not the cause."""
        return self.kind in (OutcomeKind.INFRASTRUCTURE, OutcomeKind.GPU_CONTENTION) or (
            self.kind is OutcomeKind.INTERRUPTED and self.source in (Source.LIMIT, Source.SILENCE)
        )

    @property
    def device_capacity_bytes(self) -> int | None:
        """Bytes of a rank's device if that ran out; None: as much as today."""
        return self.capacity_bytes if self.kind is OutcomeKind.OOM_DEVICE else None

    def without_details(self) -> Outcome:
        """Return the outcome without what no search reads: trace, log and evidence."""
        return dataclasses.replace(self, trace=None, log=None, evidence="")

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set; secrets in the ranks' texts are masked."""
        return {
            key: masked_data(value) if isinstance(value, str) else value
            for key, value in dataclasses.asdict(self).items()
            if value not in (None, "", ()) and value is not False
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Outcome:
        """Read the output of `to_json`; fields of a newer version are dropped."""
        values = known_fields(cls, data)
        values["kind"] = OutcomeKind(values["kind"])
        values["exceptions"] = tuple(values.get("exceptions", ()))
        values["limits"] = tuple(map(Limit, values.get("limits", ())))
        values["phase"] = Phase(values.get("phase", Phase.STEP))
        values["source"] = Source(values["source"]) if values.get("source") else None
        if values.get("measurement"):
            values["measurement"] = Measurement(**known_fields(Measurement, values["measurement"]))
        if values.get("trace"):
            values["trace"] = TrainingTrace.from_json(values["trace"])
        return cls(**values)
