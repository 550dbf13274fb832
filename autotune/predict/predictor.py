"""Peak memory and step time of any candidate without running it, corrected by a study's measurements."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autotune.errors import UserError
from autotune.predict.calibration import (
    MEASURED_OVERHEAD_GIB,
    MEMORY,
    MEMORY_CONSTANTS,
    MEMORY_NOISE,
    QUIRKS,
    SHARDED,
    STUCK,
    STUCK_UNEVEN,
    TIME,
    TIME_NOISE,
    UNREAD_STATES,
    UNTRACED,
    Prior,
    coverage_factors,
    fit,
    fit_host,
    jacobian_of,
    memory_priors,
    time_priors,
)
from autotune.predict.calibration import PRIOR as HOST_PRIOR
from autotune.predict.features import (
    Columns,
    Flags,
    Floats,
    Places,
    columns_of,
    installed_deepspeed,
    joined,
    longest_shares,
    selected,
    unknown_newer,
)
from autotune.predict.step_time import (
    DeviceRates,
    StepWork,
    dense_shape,
    fsdp_settings,
    host_limit_bytes,
    seconds_by_part,
    step_seconds,
    step_work,
)
from autotune.predict.trace_cache import loss_bytes
from autotune.predict.trace_data import Trace
from autotune.predict.zero_memory import (
    ACTIVATIONS,
    BUCKET,
    COPIES,
    GATHERED,
    GRADIENTS,
    HOLES_LEFT,
    HOST,
    MOMENT,
    MOMENTS,
    RESIDENT,
    SEGMENTS,
    WEIGHTS,
    MemoryEstimate,
    Terms,
    estimate_memory,
    optimizer_of_trials,
    unread_keys,
    unread_knobs,
)
from autotune.problem.candidate import ATTENTION, LIGER, LOSS, TRACED_KNOBS, Candidate, job_with_candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.util.units import GIB, MIB

__all__ = ["SIGMAS", "SURE_SIGMAS", "Prediction", "Predictor", "Prepared", "Table"]

_MOST_OBSERVATIONS = 512  # latest ones; the constants are known by then


class Tracer(Protocol):
    """Returns the trace of a job."""

    def __call__(self, job: Job, *, device: str) -> Trace: ...


def untraced(job: Job, *, device: str) -> Trace:
    """Trace nothing.

    Raises:
        UserError: always.
    """
    raise UserError("not traced")


class Predictor:
    """Predicts for one job on one machine.

    Args:
        trace: of the job's model.
        tracer: traces other ways of making the model, like another attention. `predict.trace.traced_predictor` passes
            `trace.trace_job`, which may run the job's code.
        widened: widen the intervals by `calibration.coverage_factors` until something is observed.
    """

    def __init__(
        self, job: Job, hardware: Hardware, trace: Trace, tracer: Tracer = untraced, *, widened: bool = False
    ) -> None:
        self.job, self.hardware, self.tracer, self.widened = job, hardware, tracer, widened
        self._rates = DeviceRates.of(hardware, job)
        self.trace = trace
        self._own_way = {ATTENTION: job.attention, LIGER: job.liger, LOSS: job.loss}
        self._traces: dict[tuple[object, ...], Trace] = {self._way({}): self.trace}
        # reason for each way of making the model that cannot be built
        self._refused: dict[tuple[object, ...], str] = {}
        widen = 1.0 if self.trace.exact else UNTRACED
        self._unread = unread_keys(job.base_config)
        self._newer = unknown_newer(job.interpreter)
        if not optimizer_of_trials(job).known:
            self._unread.append(f"optimizer {job.optimizer_kind}")
        wider = UNTRACED if self._newer or self._unread else 1.0
        if job.optimizer_kind == "muon":
            self._unread.append("memory that Muon keeps between steps")
        self._memory_priors = memory_priors(job, hardware, widen, bool(self._unread or self._newer))
        self._time_priors = time_priors(hardware, wider, not self.trace.exact, self.trace.counted)
        self._packed_rows = job.seq_len / job.tokens_per_sample
        self._memory_noise, self._time_noise = MEMORY_NOISE * widen, TIME_NOISE * widen
        self._seen: dict[Candidate, Outcome] = {}
        self._host_seen: dict[Candidate, Outcome] = {}  # outcomes of candidates that offload
        # logarithm of the factor on the estimate
        self._host = fit([HOST_PRIOR], None, noise=0.0)
        self._stale = False
        self._memory = fit(self._memory_priors, None, noise=self._memory_noise)
        # priors before any measurement on this machine
        self._time = fit(self._time_priors, None, noise=self._time_noise)

    # -- calibration -------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Record an Outcome. The next prediction fits the constants again."""
        known, ran = self._seen.get(candidate, outcome), outcome.measurement is not None
        if ran or outcome.kind is OutcomeKind.OOM_DEVICE:
            self._seen[candidate] = outcome
        elif outcome.least_step_seconds is not None and known.least_step_seconds is not None:
            self._seen[candidate] = outcome  # a call with a larger budget raises the bound
        if candidate.offloaded and (ran or outcome.kind is OutcomeKind.OOM_HOST):
            self._host_seen[candidate] = outcome
        self._stale = True

    def for_torch_alone(self) -> Predictor:
        """Return a predictor for the job without DeepSpeed, with this one's traces and calibration so far."""
        self.calibrate()
        found = copy.copy(self)
        found.job = dataclasses.replace(self.job, torch_alone=True)
        return found

    def calibrate(self) -> None:
        """Fit the constants to all observed Outcomes."""
        if not self._stale:
            return
        self._stale = False
        self._calibrate_host()
        candidates = [*self._seen][-_MOST_OBSERVATIONS:]
        if not candidates:
            return
        prepared, outcomes = self.prepare(candidates), np.array([self._seen[one] for one in candidates], dtype=object)
        sizes = np.array([o.measurement is not None or o.kind is OutcomeKind.OOM_DEVICE for o in outcomes])
        exact = np.array([o.measurement.step_seconds if o.measurement else 0.0 for o in outcomes])
        least = np.where(sizes, 0.0, [o.least_step_seconds or 0.0 for o in outcomes])
        timed = exact + least > 0
        if sizes.any():
            self._fit_memory(selected(prepared, sizes), outcomes[sizes].tolist())
        if timed.any():
            self._fit_time(selected(prepared, timed), (exact + least)[timed], least[timed] > 0)

    def _calibrate_host(self) -> None:
        if self.hardware.device != "cuda" or not self._host_seen:
            return
        candidates, outcomes = zip(*[*self._host_seen.items()][-_MOST_OBSERVATIONS:], strict=True)
        estimate = self.prepare(candidates).memory.host
        offloaded = estimate > 0  # otherwise all of it is on NVMe
        if offloaded.any():
            told = np.array(outcomes, dtype=object)[offloaded].tolist()
            self._host = fit_host(estimate[offloaded], told, self.hardware)

    @property
    def host_sigma(self) -> float:
        """Standard deviation of the logarithm of the host memory that a candidate keeps."""
        self.calibrate()
        return float(np.hypot(np.sqrt(self._host.covariance[0, 0]), self._host.noise))

    def _fit_memory(self, prepared: Prepared, outcomes: Sequence[Outcome]) -> None:
        measured = np.array([o.measurement is not None for o in outcomes])
        seen = np.array([o.measurement.peak_bytes if o.measurement else self._lacked(o) for o in outcomes])
        # Bytes allocated by torch are more precise than NVML's, which include the allocator's cache. 0: unknown.
        torchs = np.array([getattr(o.measurement, "torch_allocated_bytes", None) or 0 for o in outcomes], dtype=float)
        known = torchs > 0

        def residuals(constants: Floats) -> Floats:
            at = peaks(prepared, self.hardware, constants)
            off = at.shown / seen - 1
            inside = np.where(known, at.allocated / np.where(known, torchs, 1.0) - 1, off)
            # After an OOM more is needed than the card has. Only a prediction below the capacity pulls, as agreement
            # is no evidence.
            return np.asarray(np.where(measured, 0.5 * (off + inside), np.minimum(at.needed / seen - 1, 0.0)))

        self._memory = fit(self._with_measured_overhead(outcomes), residuals, noise=self._memory_noise)

    def _lacked(self, ran_out: Outcome) -> float:
        """Return the bytes that were not enough."""
        return (ran_out.capacity_bytes or self.hardware.capacity_bytes) + 0.5 * (ran_out.missing_bytes or 0)

    def _with_measured_overhead(self, outcomes: Sequence[Outcome]) -> list[Prior]:
        """Return the priors, with the overhead's replaced by the ranks' own measurement if there is one."""
        measured = [getattr(o.measurement, "overhead_bytes", None) for o in outcomes]
        gib = np.array([one for one in measured if one]) / GIB
        if not len(gib):
            return self._memory_priors
        return [Prior(float(np.median(gib)), max(MEASURED_OVERHEAD_GIB, float(gib.std()))), *self._memory_priors[1:]]

    def _fit_time(self, prepared: Prepared, seconds: Floats, bounded: Flags) -> None:
        """Fit the rates to steps of these seconds, which are lower bounds if `bounded` is true, (n,) each."""
        measured = np.log(seconds)

        def residuals(constants: Floats) -> Floats:
            off = self._log_step(prepared, constants) - measured
            return np.asarray(np.where(bounded, np.minimum(off, 0.0), off))

        self._time = fit(self._time_priors, residuals, noise=self._time_noise)

    # -- prediction --------------------------------------------------------------------------------------------------

    def table(self, candidates: Sequence[Candidate]) -> Table:
        """Predict many candidates at once."""
        return self.prepared_table(self.prepare(candidates))

    def prepare(self, candidates: Sequence[Candidate]) -> Prepared:
        """Compute the parts of predictions that do not depend on the calibration.

        Knobs that change the model cost a trace each.
        """
        ways: dict[tuple[object, ...], list[int]] = {}
        for i, candidate in enumerate(candidates):
            ways.setdefault(self._way(candidate), []).append(i)
        for way, at in ways.items():
            self._trace(way, candidates[at[0]])
        if not candidates:
            return self._prepare(self.trace, candidates)
        parts = [self._prepare(self._traces[way], [candidates[i] for i in at]) for way, at in ways.items()]
        found: Prepared = joined(parts, np.argsort(np.concatenate([*ways.values()])))
        return found

    def _prepare(self, trace: Trace, candidates: Sequence[Candidate]) -> Prepared:
        guessed = self.trace.exact and not trace.exact
        return Prepared.of(self.job, self.hardware.device, trace, candidates, guessed=guessed)

    def buildable(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """Return the candidates whose model can be built, and a line for each way of building it that is left out.

        Raises:
            UserError: no candidate is left.
        """
        for candidate in candidates:
            self._trace(self._way(candidate), candidate)
        left = [candidate for candidate in candidates if self._way(candidate) not in self._refused]
        if candidates and not left:
            raise UserError(next(iter(self._refused.values())))
        return left, [f"{why}: left out" for why in self._refused.values()]

    def notes(self) -> list[str]:
        """Return a line for each unknown that widens the predictions."""
        unread = [f"{key} is not modelled: intervals are wider" for key in self._unread]
        facts = self.hardware.gpu_facts
        if facts is not None and facts.whence:
            unread.insert(0, f"{self.hardware.name} is not in autotune's table of GPUs: its rates are {facts.whence}")
        return [*self._newer, *unread, *dict.fromkeys(trace.note for trace in self._traces.values() if trace.note)]

    def _way(self, knobs: Candidate | Mapping[str, object]) -> tuple[object, ...]:
        """Return a key for the way of making the model with these knobs, limited to knobs that a trace depends on."""
        return tuple(knobs.get(knob, self._own_way.get(knob)) for knob in TRACED_KNOBS)

    def _trace(self, way: tuple[object, ...], candidate: Candidate) -> Trace:
        """Return the trace for a way of making the model, or the job's own trace if the model cannot be built that way.

        `candidate` is one example of that way.
        """
        if way not in self._traces:
            try:
                self._traces[way] = self.tracer(job_with_candidate(self.job, candidate), device=self.hardware.device)
            except UserError as error:
                self._refused[way] = str(error)
                self._traces[way] = self.trace
        return self._traces[way]

    def prepared_table(self, prepared: Prepared) -> Table:
        """Predict prepared candidates, using all observations so far."""
        self.calibrate()
        c, mean = prepared.columns, self._memory.mean
        at = peaks(prepared, self.hardware, mean)
        by_shown, by_allocated = slopes(prepared, self.hardware, mean, at)
        widening = self._widening(c)[0]
        peak_sigma, allocated_sigma = (
            widening * np.sqrt(self._memory.variance(slope) + prepared.doubt**2 + (self._memory.noise * size) ** 2)
            for size, slope in ((at.shown, by_shown), (at.allocated, by_allocated))
        )
        step = np.exp(self._log_step(prepared, self._time.mean))
        rows = c.micro_batch * c.accumulation * self.job.data_ranks
        samples = rows * np.where(c.packed > 0, self._packed_rows, 1.0) / step
        host_bytes = prepared.memory.host * float(np.exp(self._host.mean[0]))
        return Table(at.shown, peak_sigma, at.allocated, allocated_sigma, at.needed, host_bytes, step, samples)

    def step_sigma(self, prepared: Prepared) -> Floats:
        """Return (n,) standard deviations of the logarithms of steps."""
        slope = jacobian_of(lambda many: self._log_step(prepared, many), self._time.mean)
        return np.asarray(
            self._widening(prepared.columns)[1] * np.sqrt(self._time.variance(slope) + self._time.noise**2)
        )

    def _widening(self, c: Columns) -> tuple[Floats, Floats]:
        """Return (n,) factors each on the intervals of peaks and of steps."""
        if self.widened and not self._seen:
            return coverage_factors(self.job, self.hardware, c)
        return np.ones(len(c)), np.ones(len(c))

    def margins(self, table: Table) -> Floats:
        """Return each candidate's expected distance below the device's ceiling, in standard deviations.

        Minus infinity if a candidate exceeds the host's limit.
        """
        host_all = table.host_bytes * self.job.ranks / self.hardware.nodes  # bytes of one node
        under_it = (self.hardware.ceiling_bytes - table.needed) / table.peak_sigma
        return np.where(host_all <= host_limit_bytes(self.hardware), under_it, -np.inf)

    def ranked(self, table: Table) -> list[int]:
        """Return the indices of the candidates to recommend, best first: the fastest that fit with the probability SURE.

        If there are none, return those that are expected to fit, likeliest first.
        """
        margins = self.margins(table)
        sure = np.flatnonzero(margins >= SURE_SIGMAS)
        if len(sure):
            return [int(i) for i in sure[np.argsort(-table.samples[sure], kind="stable")]]
        likely = np.flatnonzero(margins >= 0)
        return [int(i) for i in likely[np.argsort(-margins[likely], kind="stable")]]

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict one candidate, with its breakdowns."""
        return self.predict_many([candidate])[0]

    def predict_many(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        """Predict each candidate, with its breakdowns."""
        prepared = self.prepare(candidates)
        return self.prepared_predictions(candidates, prepared, self.prepared_table(prepared))

    def prepared_predictions(
        self, candidates: Sequence[Candidate], prepared: Prepared, table: Table
    ) -> list[Prediction]:
        """Return the predictions of prepared candidates, with their breakdowns; `table` is that of `prepared_table`."""
        breakdowns = _Breakdowns(
            self.hardware,
            self.job.ranks,
            prepared,
            table,
            self.margins(table),
            self._memory.mean,
            self._seconds(prepared, self._time.mean),
            self.step_sigma(prepared),
        )
        return [
            breakdowns.of(candidate, i, self._trace(self._way(candidate), candidate).exact)
            for i, candidate in enumerate(candidates)
        ]

    def _seconds(self, p: Prepared, constants: Floats) -> dict[str, Floats]:
        return seconds_by_part(p.work, p.columns, self._rates, rate_factors(constants))

    def _log_step(self, p: Prepared, constants: Floats) -> Floats:
        """Return (..., n) logarithms of a step's seconds at constants (..., constants)."""
        step = step_seconds(self._seconds(p, constants))
        return np.asarray(np.log(step) + constants[..., len(TIME) :] @ p.quirks)


def rate_factors(constants: Floats) -> dict[str, Floats]:
    """Return factors on full rates, (..., 1) each, from constants (..., constants)."""
    k = {name: np.exp(constants[..., i, None]) for i, name in enumerate(TIME)}
    k["hidden"] = k["hidden"] / (1 + k["hidden"])
    return k


# -- prediction --------------------------------------------------------------------------------------------------------
#
# Predictions for their readers: arrays of many candidates, and one candidate with its memory and time broken down.

SIGMAS = 2.0  # half the width of an interval, in standard deviations
SURE = 0.9  # smallest probability of fitting at which a config is recommended
SURE_SIGMAS = 1.2816  # standard deviations between the expected need and the ceiling, at that probability


@dataclass(frozen=True)
class Prediction:
    """Prediction of one candidate; intervals hold 95 %."""

    candidate: Candidate
    peak_bytes: float  # NVML's figure: at most the card's capacity, unless more is needed
    peak_interval: tuple[float, float]
    allocated_bytes: float  # by torch
    allocated_interval: tuple[float, float]
    # bytes that the card must have; the allocator returns the rest of what NVML shows before an OOM
    needed_bytes: float
    sure_bytes: float  # bytes that are enough with the probability SURE
    memory: dict[str, float]  # bytes by content, at the peak
    moment: str  # moment of the peak: forward, backward, step or init
    host_bytes: float  # of one rank
    step_seconds: float
    step_interval: tuple[float, float]
    time: dict[str, float]  # seconds by cause
    samples_per_second: float
    binding: str  # the limit: device memory, host memory, or the largest cause of step time
    fits: bool  # expected value, at even odds
    chance: float  # probability that the need stays under the ceiling; 0 if main memory is too small
    exact: bool  # False if the model could not be traced

    @property
    def sure(self) -> bool:
        """Check that it fits with the probability SURE."""
        return self.chance >= SURE - 1e-4


@dataclass
class Table:
    """Predictions of many candidates as arrays, in their order."""

    peak: Floats  # NVML's figure
    peak_sigma: Floats
    allocated: Floats  # by torch
    allocated_sigma: Floats
    needed: Floats  # bytes of the card
    host_bytes: Floats  # of a rank
    step: Floats
    samples: Floats  # per second, all ranks together

    @property
    def sure(self) -> Floats:
        """Return the bytes of the card that are enough with the probability SURE."""
        return self.needed + SURE_SIGMAS * self.peak_sigma


@dataclass
class _Breakdowns:
    """Describe each of many candidates. Arrays are in the candidates' order."""

    hardware: Hardware
    ranks: int
    prepared: Prepared
    table: Table
    margins: Floats  # standard deviations, from `Predictor.margins`
    constants: Floats  # memory constants, in the order of MEMORY_CONSTANTS
    seconds: dict[str, Floats]  # of a step by part, before corrections
    step_sigma: Floats  # in the logarithm

    def __post_init__(self) -> None:
        self._moments = moments(self.prepared, self.hardware, self.constants)
        self._slower = self.table.step / step_seconds(self.seconds)

    def of(self, candidate: Candidate, i: int, exact: bool) -> Prediction:
        """Return the prediction of the candidate at index `i`; `exact`: its model was traced."""
        table, estimate = self.table, self.prepared.memory
        at = int(self._moments[:, i].argmax())
        time = {part: float(size[i] * self._slower[i]) for part, size in self.seconds.items()}
        peak, sigma, needed = float(table.peak[i]), float(table.peak_sigma[i]), float(table.needed[i])
        allocated, host, margin = float(table.allocated[i]), float(estimate.host[i]), float(self.margins[i])
        step, spread = float(table.step[i]), float(np.exp(SIGMAS * self.step_sigma[i]))
        low, high = _interval(peak, sigma)
        # NVML shows at most the card's capacity, unless more may be needed.
        high = max(min(high, float(self.hardware.capacity_bytes)), needed + SIGMAS * sigma, peak)
        return Prediction(
            candidate=candidate,
            peak_bytes=peak,
            peak_interval=(low, high),
            allocated_bytes=allocated,
            allocated_interval=_interval(allocated, float(table.allocated_sigma[i])),
            needed_bytes=needed,
            sure_bytes=float(table.sure[i]),
            memory=self._memory(i, at),
            moment=MOMENTS[int(estimate.terms[MOMENT][at, i])],
            host_bytes=host,
            step_seconds=step,
            step_interval=(step / spread, step * spread),
            time=time,
            samples_per_second=float(table.samples[i]),
            binding=self._binding(needed, host * self.ranks / self.hardware.nodes, time),
            fits=margin >= 0,
            chance=0.5 * math.erfc(-margin / math.sqrt(2)),
            exact=exact,
        )

    def _memory(self, i: int, at: int) -> dict[str, float]:
        """Return the bytes at moment `at` by content; they add up to the peak. The allocator gets the rest."""
        k, terms = dict(zip(MEMORY_CONSTANTS, self.constants, strict=True)), self.prepared.memory.terms
        activations = float(terms[ACTIVATIONS][at, i])
        # The logits exist in forward, and in backward until what forward left is freed.
        held = activations >= 0.9 * float(terms[ACTIVATIONS][:, i].max())
        loss = held * min(float(self.prepared.loss[i]), activations)
        memory = {name: float(terms[name][i]) for name in RESIDENT}
        copies = k["temporaries"] * float(terms[COPIES][at, i])
        in_step = float(terms[MOMENT][at, i] >= MOMENTS.index("step"))
        memory[GRADIENTS] += (1 - in_step) * copies
        memory |= {
            ACTIVATIONS: activations - loss,
            "logits and loss": loss,
            BUCKET: k["buckets"] * terms[BUCKET][at, i],
            GATHERED: k["gathered"] * terms[GATHERED][at, i],
            "step copies": in_step * copies,
        }
        if self.hardware.device == "cpu":
            memory[HOST] = terms[HOST][i]
        overhead = k["overhead"] * GIB
        tensors, whole = sum(float(size) for size in memory.values()), float(self.table.peak[i]) - overhead
        # a calibration may find slightly less than the tensors' sum
        less = min(1.0, whole / max(tensors, 1.0))
        memory = {name: less * float(size) for name, size in memory.items()}
        return {**memory, "allocator": max(0.0, whole - tensors), "context and communication": float(overhead)}

    def _binding(self, needed: float, host_of_all: float, time: dict[str, float]) -> str:
        """Return the limit of the candidate: memory that it exceeds, or the cause that takes most of its step."""
        if needed > self.hardware.ceiling_bytes:
            return "device memory"
        if host_of_all > host_limit_bytes(self.hardware):
            return "host memory"
        causes = {
            "computation": time["forward"] + time["backward"] + time["recompute"],
            "kernel launches": time["host"],
            "communication": time["communication"],
            "optimizer": time["optimizer"],
            "offload": time["offload"],
            "the training loop": time["loop"],
        }
        return max(causes, key=causes.__getitem__)


def _interval(size: float, sigma: float) -> tuple[float, float]:
    return max(0.0, size - SIGMAS * sigma), size + SIGMAS * sigma


# -- prepared features -------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """Parts of predictions without calibration and rates; one entry or row per candidate, in their order."""

    columns: Columns
    memory: MemoryEstimate
    work: StepWork
    quirks: Floats  # (quirks, n)
    doubt: Floats  # (n,) bytes: standard deviation of peaks that no constant covers
    uneven: Floats  # (n,) share of the activations that batches of many lengths leave behind
    loss: Floats  # (n,) bytes of logits and loss while both exist; 0 if the loss is computed in chunks

    @classmethod
    def of(
        cls, job: Job, device: str, trace: Trace, candidates: Sequence[Candidate], *, guessed: bool = False
    ) -> Prepared:
        """Prepare candidates that share this trace. `guessed`: the trace is an estimate, while the job's own is exact."""
        alone = fsdp_settings(job.model.config, float(sum(trace.every_size))) if job.torch_alone else {}
        c = columns_of(candidates, job, installed_deepspeed(job.interpreter), alone)
        made = job_with_candidate(job, candidates[0]) if candidates else job  # all compute the loss the same way
        loss = loss_bytes(made) * c.rows
        b = estimate_memory(job, trace, c, device, loss)
        uneven, spread = uneven_shares(job, c, b.terms[ACTIVATIONS].max(axis=0))
        doubt = doubt_of(b, c, candidates, job.ranks, guessed, spread)
        return cls(c, b, step_work(job, trace, c, device, loss), quirks_of(c), doubt, uneven, loss)


def doubt_of(
    b: MemoryEstimate, c: Columns, candidates: Sequence[Candidate], ranks: int, guessed: bool, uneven: Floats
) -> Floats:
    """Return (n,) bytes of uncertainty in the peaks.

    Sources are keys that no formula reads, states shared among ranks, guessed traces, and batches of many lengths. The order
    of such batches decides what they leave behind; `uneven` is its deviation as a share of activations.
    """
    dotted = [tuple(knob for knob in candidate.knobs if "." in knob[0]) for candidate in candidates]
    unread_by = {knobs: bool(unread_knobs(Candidate(knobs))) for knobs in set(dotted)}
    unread = np.array([unread_by[knobs] for knobs in dotted], dtype=bool)
    terms = b.terms
    of_states = np.where(unread, UNREAD_STATES * b.resident(), 0.0)
    shared = b.resident() - terms[WEIGHTS] + (terms[BUCKET] + terms[GATHERED] + terms[COPIES]).max(axis=0)
    of_shares = SHARDED * shared * ((c.stage > 0) & (ranks > 1))
    of_activations = np.hypot(UNTRACED * MEMORY["activations"].sigma * guessed, uneven) * terms[ACTIVATIONS].max(axis=0)
    return np.asarray(np.sqrt(of_states**2 + of_shares**2 + of_activations**2))


def quirks_of(c: Columns) -> Floats:
    """Return (quirks, n): the extent to which each of `calibration.QUIRKS` applies to each candidate, in their order."""
    zero = c.stage > 0
    columns = {
        "machine": np.ones(len(c)),
        "stage1": c.stage == 1,
        "stage2": c.stage == 2,
        "stage3": c.stage == 3,
        "checkpointed": c.checkpointing,
        "offloaded": c.offload_optimizer > 0,
        "parameters out": c.offload_param > 0,
        "overlapped": (c.overlap > 0) & zero,
        "micro-batch": np.log2(c.micro_batch) - 2,
        "bucket": np.where(zero, np.log10(c.reduce_bucket / 5e8), 0.0),
        "sub-group": np.where(c.stage == 3, np.log10(c.sub_group / 1e9), 0.0),
        "contiguous": (c.contiguous > 0) & zero,
        "compiled": c.compiled,
        "adapted": c.lora > 0,
        "packed": c.packed,
    }
    return np.array([columns[name] for name in QUIRKS], dtype=np.float64)


# -- uneven batches ----------------------------------------------------------------------------------------------------
#
# Memory that the caching allocator keeps if batches differ in length: blocks of batches that were the longest so far.
#
# A batch longer than all before finds no free block of sufficient size. The allocator then takes a new block for each
# of its tensors and keeps the old ones, which only shorter batches can fill. The smallest sufficient block is split,
# and segments never grow unless they are `expandable_segments` (torch, c10/cuda/CUDACachingAllocator.cpp). After many
# batches the allocator holds the tensors of every record: as many times the longest batch as the records' lengths add
# up to. A replay with the allocator's rules (`benchmarks/predict/caching_allocator.py`) gives exactly that for tensors of one
# size.

BATCHES = 100  # batches of a training before its memory is read; later records are rare and hardly ever observed
# Blocks of at least this size have a separate segment; smaller ones share segments that any length can use.
OWN_SEGMENT_BYTES = 10 * MIB
# A layer's blocks have many sizes, and the larger ones of a shorter batch serve as smaller ones of a longer batch.
# Replays of layers alone keep 0.7 to 1.4 times the bytes in use; tensors of one size would keep 2.7.
MIXED = 0.4
# Bytes per token and vocabulary entry during the loss: logits, their shifted copy, both in 32 bits, the softmax.
_LOSS_BYTES = 12.0


def uneven_shares(job: Job, c: Columns, activations: Floats) -> tuple[Floats, Floats]:
    """Return (mean, standard deviation), (n,) each, of the kept blocks of the longest batches.

    Both are shares of `activations` (bytes of the longest batch, (n,)).
    """
    if not c.many_lengths.any():
        return np.zeros(len(c)), np.zeros(len(c))
    large = c.many_lengths * _in_large_blocks(job, c, activations)
    mean, deviation = kept_records(job.lengths, c.micro_batch)
    return large * mean, large * deviation


def kept_records(
    lengths: Sequence[tuple[int, int]], micro_batch: Floats, batches: int = BATCHES
) -> tuple[Floats, Floats]:
    """Return (mean, standard deviation), (n,) each, of the summed lengths of the records, in multiples of the longest length.

    A batch is as long as its longest row. A record is a batch longer than all before it; the longest batch of all is not
    counted. A length is a record if the first batch of at least that length has exactly that length, independently of other
    lengths.

    Args:
        lengths: (tokens, count).
    """
    tokens, up_to, place = longest_shares(lengths, micro_batch)
    shorter, at_least = up_to[:, :-1], np.maximum(1 - up_to[:, :-1], 1e-12)
    record = np.minimum(1.0, np.diff(up_to, axis=1) / at_least) * (1 - shorter**batches)
    share = tokens / tokens[-1]
    mean, variance = np.maximum(0.0, record @ share - 1), (record * (1 - record)) @ share**2
    return np.asarray(mean[place]), np.asarray(np.sqrt(variance)[place])


def _in_large_blocks(job: Job, c: Columns, activations: Floats) -> Floats:
    """Return (n,) the share of the activations whose record blocks cannot be reused.

    These are all of the loss, and a part of the layers if they are too large to share a segment.
    """
    shape = dense_shape(job.model.config)
    if shape is None:
        return np.full(len(c), MIXED)
    _, width, vocabulary, _ = shape
    entries = job.element_bytes * c.rows * job.seq_len
    of_loss = np.minimum(1.0, _LOSS_BYTES * vocabulary * c.rows * job.seq_len / np.maximum(activations, 1.0))
    of_loss = np.where(entries * vocabulary >= OWN_SEGMENT_BYTES, of_loss, 0.0)
    return np.asarray(of_loss + (1 - of_loss) * np.where(entries * width >= OWN_SEGMENT_BYTES, MIXED, 0.0))


# -- memory ------------------------------------------------------------------------------------------------------------
#
# Device memory from the memory estimate and the constants of MEMORY_CONSTANTS: bytes that torch allocates, and bytes that NVML
# shows.
#
# `allocated` counts what torch's allocator has handed out. NVML shows what the allocator has reserved, including the
# blocks it keeps for later (`cached`), and the overhead: the process's context, NCCL's buffers, kernels. Before an OOM
# the allocator returns whole unused segments (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`).
# A candidate therefore *needs* the allocated bytes, the overhead, and the cached blocks between used ones. NVML shows
# at most the card's capacity, unless more is needed.


@dataclass(frozen=True)
class PredictedPeaks:
    """Bytes of a rank, each at its own peak; (..., n) each."""

    allocated: Floats  # by torch
    needed: Floats  # of the device, by the whole process
    shown: Floats  # by NVML
    allocated_at: Places  # moments of the peaks
    shown_at: Places


def _moments(p: Prepared, terms: Terms, device: str, constants: Floats) -> tuple[Floats, Floats, Floats]:
    """Return (allocated, cached, free segments) in bytes at constants (..., constants).

    The shape of each is (..., *shape of a passing term). Free segments are cached, too, and can be given back.
    """
    axes = [None] * terms[ACTIVATIONS].ndim
    k = {name: constants[(..., i, *axes)] for i, name in enumerate(MEMORY_CONSTANTS)}
    held = k["scale"] * k["states"] * sum(terms[name] for name in RESIDENT)
    if device == "cpu":  # host and device share their memory
        held = held + terms[HOST]
    factor = k["activations"] * np.where(p.columns.checkpointing > 0, k["recomputed"], 1.0)
    passing = k["buckets"] * terms[BUCKET] + k["gathered"] * terms[GATHERED] + k["temporaries"] * terms[COPIES]
    passing = k["scale"] * (passing + factor * terms[ACTIVATIONS])
    cached = k["cached"] * passing
    if device == "cuda":
        cached = cached + terms[HOLES_LEFT]
    free = k["uneven"] * factor * p.uneven * terms[ACTIVATIONS] + k["segments"] * terms[SEGMENTS]
    return np.asarray(held + passing), np.asarray(cached), np.asarray((device == "cuda") * k["scale"] * free)


def moments(p: Prepared, hardware: Hardware, constants: Floats) -> Floats:
    """Return (..., moments, n) bytes that NVML would show on a card of unlimited memory, at constants (..., constants)."""
    shown = np.sum(_moments(p, p.memory.terms, hardware.device, constants), axis=0)
    return np.asarray(shown + GIB * constants[..., 0, None, None])


def peaks(p: Prepared, hardware: Hardware, constants: Floats) -> PredictedPeaks:
    """Return the peaks at constants (..., constants)."""
    allocated, cached, free = _moments(p, p.memory.terms, hardware.device, constants)
    overhead = GIB * constants[..., 0, None]
    needed = (allocated + STUCK * cached + STUCK_UNEVEN * free).max(axis=-2) + overhead
    total = allocated + cached + free
    shown = np.maximum(np.minimum(total.max(axis=-2) + overhead, float(hardware.capacity_bytes)), needed)
    return PredictedPeaks(allocated.max(axis=-2), needed, shown, allocated.argmax(axis=-2), total.argmax(axis=-2))


def slopes(p: Prepared, hardware: Hardware, constants: Floats, at: PredictedPeaks) -> tuple[Floats, Floats]:
    """Return (n, constants) derivatives by the constants, of two predictions at the moments of their peaks `at`.

    The predictions are NVML's bytes on a card of unlimited memory, and the bytes that torch allocates.
    """
    of_shown, of_allocated = p.memory.at(at.shown_at), p.memory.at(at.allocated_at)
    by_shown = jacobian_of(lambda many: np.sum(_moments(p, of_shown, hardware.device, many), axis=0), constants)
    by_shown[:, 0] = GIB
    return by_shown, jacobian_of(lambda many: _moments(p, of_allocated, hardware.device, many)[0], constants)
