"""Predict peak memory and step time of any candidate without running it, corrected by a study's measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from autotune.errors import UserError
from autotune.predict.constants import (
    ELSEWHERE,
    MEASURED_OVERHEAD_GIB,
    MEMORY_CONSTANTS,
    MEMORY_NOISE,
    QUIRKS,
    REPEAT_MEMORY,
    REPEAT_TIME,
    TIME,
    TIME_NOISE,
    UNTRACED,
    memory_priors,
    time_priors,
)
from autotune.predict.fit import Evidence, Neighbours, Posterior, Prior, fit, jacobian_of
from autotune.predict.host import PRIOR as HOST
from autotune.predict.host import fit_host
from autotune.predict.knobs import Flags, Floats
from autotune.predict.memory import moments, peaks, slopes
from autotune.predict.optimizers import stepper
from autotune.predict.passes import Trace
from autotune.predict.prediction import SURE_SIGMAS, Breakdowns, Prediction, Table
from autotune.predict.prepared import Prepared
from autotune.predict.roofline import Spent, host_limit_bytes, spend
from autotune.predict.unread import unread_keys
from autotune.predict.versions import unknown_newer
from autotune.problem.candidate import ATTENTION, LIGER, TRACED_KNOBS, Candidate, under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome
from autotune.units import GIB

__all__ = ["Prediction", "Predictor", "Table"]

# Similar candidates share what the fit leaves unexplained. More neighbours add little and cost much.
_LATEST = slice(-128, None)
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
        tracer: traces other ways of making the model, like another attention. It may run the job's code, so the commands that
            read a study pass `trace_cache.stored_trace`; `predict.traced.traced_predictor` passes `trace.trace_job`.
    """

    def __init__(self, job: Job, hardware: Hardware, trace: Trace, tracer: Tracer = untraced) -> None:
        self.job, self.hardware, self.tracer = job, hardware, tracer
        self.trace = trace
        self._traces: dict[tuple[object, ...], Trace] = {_way(job, {}): self.trace}
        # reason for each way of making the model that cannot be built
        self._refused: dict[tuple[object, ...], str] = {}
        widen = 1.0 if self.trace.exact else UNTRACED
        self._unread = unread_keys(job.base_config)
        self._newer = unknown_newer()
        if not stepper(job).known:
            self._unread.append(f"optimizer {job.optimizer_kind}")
        self._memory_priors = memory_priors(job, hardware, widen, bool(self._unread or self._newer))
        wider = UNTRACED if self._newer else 1.0
        self._time_priors = time_priors(hardware, wider, not self.trace.exact, self.trace.counted)
        self._packed_rows = job.seq_len / job.tokens_per_sample
        self._memory_noise, self._time_noise = MEMORY_NOISE * widen, TIME_NOISE * widen
        self._seen: dict[Candidate, Outcome] = {}
        self._host_seen: dict[Candidate, Outcome] = {}  # outcomes of candidates that offload
        # logarithm of the factor on the bill
        self._host = Posterior(np.array([HOST.mean]), np.array([[HOST.sigma**2]]), 0.0)
        self._stale = False
        self._memory = fit(self._memory_priors, None, noise=self._memory_noise)
        # priors before any measurement on this machine
        self._time_known: Sequence[Prior] | Posterior = self._time_priors
        self._time = fit(self._time_known, None, noise=self._time_noise)
        self._memory_near: Neighbours | None = None
        self._time_near: Neighbours | None = None

    # -- calibration -------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Record an Outcome. The next prediction fits the constants again."""
        if outcome.measurement is not None or outcome.kind is Kind.OOM_DEVICE:
            self._seen[candidate] = outcome
            self._stale = True
        ran = outcome.measurement is not None or outcome.kind is Kind.OOM_HOST
        if ran and candidate.offloaded:
            self._host_seen[candidate] = outcome
            self._stale = True

    def believe(self, memory: Predictor | None = None, time: Predictor | None = None) -> None:
        """Adopt the posteriors of predictors for other jobs on similar machines. `observe` would start from the priors.

        The weight of their residuals depends on the similarity of the jobs (`prepared.job_features`).
        """
        self._stale = False
        if memory is not None:
            memory.calibrate()
            self._memory, self._memory_near = memory._memory, memory._memory_near
        if time is not None:
            time.calibrate()
            self._time, self._time_near = time._time, time._time_near

    def begin_with(self, rates: Evidence) -> None:
        """Add rates measured on a like job and card to the priors.

        Raises:
            ValueError: the rates have other constants than this version.
        """
        self._time_known = rates.posterior(self._time_priors, self._time_noise)
        self._time, self._time_near = fit(self._time_known, None, noise=self._time_noise), None
        self._stale = bool(self._seen)

    def rates(self) -> Evidence | None:
        """Return the card's rates from the measured steps, for other jobs on such a card; None without a measurement."""
        ran = {candidate: o.measurement for candidate, o in self._seen.items() if o.measurement}
        if not ran:
            return None
        residuals = self._time_residuals(self.prepare(list(ran)), list(ran.values()))
        return Evidence.of(self._time_priors, fit(self._time_priors, residuals, noise=ELSEWHERE))

    def calibrate(self) -> None:
        """Fit the constants to all observed Outcomes."""
        if not self._stale:
            return
        self._stale = False
        self._calibrate_host()
        if not self._seen:
            return
        candidates = list(self._seen)[-_MOST_OBSERVATIONS:]
        outcomes = [self._seen[c] for c in candidates]
        prepared = self.prepare(candidates)
        measured = np.array([o.measurement is not None for o in outcomes])
        self._fit_memory(prepared, outcomes, measured)
        if measured.any():
            self._fit_time(prepared.rows(measured), [o.measurement for o in outcomes if o.measurement])

    def _calibrate_host(self) -> None:
        if self.hardware.device != "cuda" or not self._host_seen:
            return
        candidates = list(self._host_seen)[-_MOST_OBSERVATIONS:]
        bill = self.prepare(candidates).bill.host
        outcomes = [self._host_seen[c] for c in candidates]
        offloaded = bill > 0  # otherwise all of it is on NVMe
        if offloaded.any():
            told = [o for o, one in zip(outcomes, offloaded, strict=True) if one]
            self._host = fit_host(bill[offloaded], told, self.hardware)

    @property
    def host_sigma(self) -> float:
        """Standard deviation of the logarithm of the host memory that a candidate keeps."""
        self.calibrate()
        return float(np.hypot(np.sqrt(self._host.covariance[0, 0]), self._host.noise))

    def _fit_memory(self, prepared: Prepared, outcomes: Sequence[Outcome], measured: Flags) -> None:
        seen = np.array([o.measurement.peak_bytes if o.measurement else self._lacked(o) for o in outcomes])
        # Bytes allocated by torch are more precise than NVML's, which include the allocator's cache. 0: unknown.
        torchs = np.array([(o.measurement and o.measurement.torch_allocated_bytes) or 0 for o in outcomes], dtype=float)
        known = torchs > 0

        def residuals(constants: Floats) -> Floats:
            at = peaks(prepared, self.hardware, constants)
            off = at.shown / seen - 1
            inside = np.where(known, at.allocated / np.where(known, torchs, 1.0) - 1, off)
            # After an OOM more is needed than the card has. Only a prediction below the capacity pulls, as agreement
            # is no evidence.
            off = np.where(measured, 0.5 * (off + inside), np.minimum(at.needed / seen - 1, 0.0))
            return np.asarray(off)

        self._memory = fit(self._with_measured_overhead(outcomes), residuals, noise=self._memory_noise)
        off = -residuals(self._memory.mean)
        told = measured | (off > 0)  # an OOM that was not predicted is informative, too
        self._memory_near = Neighbours.of(
            prepared.features[told][_LATEST], off[told][_LATEST], self._memory.noise, REPEAT_MEMORY
        )

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

    def _fit_time(self, prepared: Prepared, measured: Sequence[Measurement]) -> None:
        residuals = self._time_residuals(prepared, measured)
        self._time = fit(self._time_known, residuals, noise=self._time_noise)
        slower = -residuals(self._time.mean)
        self._time_near = Neighbours.of(prepared.features[_LATEST], slower[_LATEST], self._time.noise, REPEAT_TIME)

    def _time_residuals(self, prepared: Prepared, measured: Sequence[Measurement]) -> Callable[[Floats], Floats]:
        """Return a function of the constants: logarithms of predicted steps less those measured."""
        seconds = np.log([one.step_seconds for one in measured])
        return lambda constants: self._log_step(prepared, constants) - seconds

    @property
    def time_noise(self) -> float:
        """Standard deviation of a step's logarithm that the fit leaves unexplained: 0.1 is about 10 %."""
        self.calibrate()
        return self._time.noise

    def constants(self) -> dict[str, float]:
        """Return the calibrated constants: overhead in GiB, factors on full rates."""
        self.calibrate()
        memory = dict(zip(MEMORY_CONSTANTS, self._memory.mean, strict=True))
        quirks = dict(zip(QUIRKS, np.exp(self._time.mean[len(TIME) :]), strict=True))
        named = {**memory, **self._time_constants(self._time.mean), **quirks}
        return {name: np.asarray(value).item() for name, value in named.items()}

    # -- prediction --------------------------------------------------------------------------------------------------

    def table(self, candidates: Sequence[Candidate]) -> Table:
        """Predict many candidates at once."""
        return self.prepared_table(self.prepare(candidates))

    def prepare(self, candidates: Sequence[Candidate]) -> Prepared:
        """Compute the parts of predictions that do not depend on the calibration. Knobs that change the model cost a trace
        each."""
        ways: dict[tuple[object, ...], list[int]] = {}
        for i, candidate in enumerate(candidates):
            ways.setdefault(_way(self.job, candidate), []).append(i)
        for way, at in ways.items():
            self._trace(way, candidates[at[0]])
        if len(ways) <= 1:
            trace = self._traces[next(iter(ways))] if ways else self.trace
            return self._prepare(trace, candidates)
        parts = [self._prepare(self._traces[way], [candidates[i] for i in at]) for way, at in ways.items()]
        return Prepared.joined(parts, list(ways.values()))

    def _prepare(self, trace: Trace, candidates: Sequence[Candidate]) -> Prepared:
        guessed = self.trace.exact and not trace.exact
        return Prepared.of(self.job, self.hardware, trace, candidates, guessed=guessed)

    def buildable(self, candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
        """Return the candidates whose model can be built, and a line for each way of building it that is left out.

        Raises:
            UserError: no candidate is left.
        """
        for candidate in candidates:
            self._trace(_way(self.job, candidate), candidate)
        left = [candidate for candidate in candidates if _way(self.job, candidate) not in self._refused]
        if candidates and not left:
            raise UserError(next(iter(self._refused.values())))
        return left, [f"{why}: left out" for why in self._refused.values()]

    def notes(self) -> list[str]:
        """Return a line for each unknown that widens the predictions."""
        unread = [f"{key} is not part of the memory model" for key in self._unread]
        facts = self.hardware.gpu_facts
        if facts is not None and facts.whence:
            unread.insert(0, f"{self.hardware.name} is not in autotune's table of GPUs: its rates are {facts.whence}")
        return [*self._newer, *unread, *dict.fromkeys(trace.note for trace in self._traces.values() if trace.note)]

    def _trace(self, way: tuple[object, ...], candidate: Candidate) -> Trace:
        """Return the trace for a way of making the model, or the job's own trace if the model cannot be built that way.
        `candidate` is one example of that way."""
        if way not in self._traces:
            try:
                self._traces[way] = self.tracer(under(self.job, candidate), device=self.hardware.device)
            except UserError as error:
                self._refused[way] = str(error)
                self._traces[way] = self.trace
        return self._traces[way]

    def prepared_table(self, prepared: Prepared) -> Table:
        """Predict prepared candidates, using all observations so far."""
        self.calibrate()
        memory = self._memory_table(prepared)
        log_step = self._log_step(prepared, self._time.mean)
        # The constants vary in turn, so that the arrays of ten thousand candidates stay in the cache.
        rates = jacobian_of(
            lambda many: np.array([np.log(self._spent(prepared, k).step) for k in many]), self._time.mean[: len(TIME)]
        )
        by_constants = np.hstack([rates, prepared.quirks])
        shift, log_sigma = _corrected(self._time, by_constants, self._time_near, prepared.features)
        log_step = log_step + shift
        c = prepared.columns
        rows = c.micro_batch * c.accumulation * self.job.ranks
        samples = rows * np.where(c.packed > 0, self._packed_rows, 1.0) / np.exp(log_step)
        host = prepared.bill.host * float(np.exp(self._host.mean[0]))
        return Table(*memory, host, np.exp(log_step), log_sigma, samples)

    def _memory_table(self, prepared: Prepared) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Return (peak, its sigma, allocated, its sigma, needed) in bytes, corrected by measured neighbours."""
        mean = self._memory.mean
        at = peaks(prepared, self.hardware, mean)
        found: list[Floats] = []
        for size, by_constants in zip((at.shown, at.allocated), slopes(prepared, self.hardware, mean), strict=True):
            doubt, relative = prepared.doubt / size, by_constants / size[:, None]
            shift, sigma = _corrected(self._memory, relative, self._memory_near, prepared.features, doubt)
            found += [size * (1 + shift), sigma * size]
        peak, needed = found[0], at.needed * (1 + shift)
        card = float(self.hardware.capacity_bytes)
        peak = np.maximum(np.where(needed <= card, np.minimum(peak, card), peak), needed)
        return peak, found[1], found[2], found[3], needed

    def fits(self, table: Table) -> Flags:
        """Select the candidates that are expected to stay under the device's ceiling and the host's limit."""
        return self.margins(table) >= 0

    def margins(self, table: Table) -> Floats:
        """Return the standard deviations by which each candidate is expected to stay under the device's ceiling; minus
        infinity if it exceeds the host's limit."""
        host_all = table.host * self.job.ranks / self.hardware.nodes  # bytes of one node
        under_it = (self.hardware.ceiling_bytes - table.needed) / table.peak_sigma
        return np.where(host_all <= host_limit_bytes(self.hardware), under_it, -np.inf)

    def ranked(self, table: Table, among: Flags | bool = True) -> list[int]:
        """Return the indices of the candidates to recommend, best first: the fastest that fit with the probability SURE. If
        there are none, return those that are expected to fit, likeliest first."""
        margins = self.margins(table)
        sure = np.flatnonzero(among & (margins >= SURE_SIGMAS))
        if len(sure):
            return [int(i) for i in sure[np.argsort(-table.samples[sure], kind="stable")]]
        likely = np.flatnonzero(among & (margins >= 0))
        return [int(i) for i in likely[np.argsort(-margins[likely], kind="stable")]]

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict one candidate, with its breakdowns."""
        return self.predict_many([candidate])[0]

    def predict_many(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        """Predict each candidate, with its breakdowns."""
        prepared = self.prepare(candidates)
        table = self.prepared_table(prepared)
        spent = self._spent(prepared, self._time.mean)
        breakdowns = Breakdowns(
            hardware=self.hardware,
            ranks=self.job.ranks,
            prepared=prepared,
            table=table,
            fits=self.fits(table),
            margins=self.margins(table),
            moments=moments(prepared, self.hardware, self._memory.mean),
            memory_constants=dict(zip(MEMORY_CONSTANTS, self._memory.mean, strict=True)),
            spent=spent,
            slower=table.step / spent.step,
            exact=[self._traces[_way(self.job, candidate)].exact for candidate in candidates],
        )
        return [breakdowns.of(candidate, i) for i, candidate in enumerate(candidates)]

    def _time_constants(self, constants: Floats) -> dict[str, Floats]:
        """Return factors on full rates, (..., 1) each, from constants (..., constants)."""
        k = {name: np.exp(constants[..., i, None]) for i, name in enumerate(TIME)}
        k["hidden"] = k["hidden"] / (1 + k["hidden"])
        return k

    def _spent(self, p: Prepared, constants: Floats) -> Spent:
        return spend(p.work, p.columns, self._time_constants(constants))

    def _log_step(self, p: Prepared, constants: Floats) -> Floats:
        """Return (..., n) logarithms of a step's seconds at constants (..., constants)."""
        return np.asarray(np.log(self._spent(p, constants).step) + constants[..., len(TIME) :] @ p.quirks.T)


def _way(job: Job, knobs: Candidate | Mapping[str, object]) -> tuple[object, ...]:
    """Return a key for the way of making the model with these knobs, limited to knobs that a trace depends on."""
    own = {ATTENTION: job.attention, LIGER: job.liger}
    return tuple(knobs.get(knob, own.get(knob)) for knob in TRACED_KNOBS)


def _corrected(
    posterior: Posterior, jacobian: Floats, near: Neighbours | None, features: Floats, doubt: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """Return (shift, standard deviation) of predictions, from the constants, measured neighbours and `doubt`, which no
    constant covers."""
    by_constants = np.hypot(posterior.spread(jacobian), doubt)
    if near is None:
        return np.zeros(len(features)), np.hypot(by_constants, posterior.noise)
    shift, unexplained = near.shift(features)
    return shift, np.hypot(np.minimum(by_constants, by_constants * unexplained / near.amplitude + 0.01), unexplained)
