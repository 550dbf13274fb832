"""Peak memory and step time of any candidate without running it, corrected by what a study has measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.fit import Neighbours, Posterior, Prior, fit, jacobian_of
from autotune.predict.knobs import Columns, Flags, Floats, columns_of
from autotune.predict.passes import Trace
from autotune.predict.roofline import Spent, Work, host_limit_bytes, spend, work
from autotune.predict.trace import trace_job
from autotune.predict.zero import SUMS, TABLES, Bill, bill
from autotune.problem.candidate import TRACED_KNOBS, Candidate, under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Outcome
from autotune.units import GIB

SIGMAS = 2.0  # half the width of an interval
MEMORY_NOISE = 0.025  # of a peak, before calibration
TIME_NOISE = 0.08  # of the logarithm of a step's seconds

# Memory: factors on what ZeRO's bill says, and bytes beside it. What the caching allocator adds to activations is 7 to
# 20 % with memory to spare (benchmarks/allocator.py replays traces through its rules); at the limit, where it counts, it
# gives cached blocks back first.
_MEMORY = {
    "states": Prior(1.0, 0.02),
    "buckets": Prior(1.0, 0.2),
    "gathered": Prior(1.0, 0.3),
    "temporaries": Prior(1.0, 0.25),
    "activations": Prior(1.04, 0.08),
    "recomputed": Prior(1.0, 0.15),
}
# Context of one CUDA process 0.4 to 0.5 GiB; NCCL's buffers and cuBLAS's workspaces come on top.
_OVERHEAD_GIB = {"cuda": Prior(0.55, 0.25), "cpu": Prior(0.40, 0.1)}
_NCCL_GIB = 0.25

# Time: logarithms of factors on full rates; a matrix product reaches 60 to 70 % of a GPU's peak, a stream of memory
# or of a link 75 to 85 %. The tail is in tokens.
_TIME = {
    "products": Prior(np.log(1 / 0.62), 0.25),
    "tail": Prior(np.log(500.0), 1.0),
    "moved": Prior(np.log(1 / 0.8), 0.35),
    "starts": Prior(0.0, 0.4),
    "comm": Prior(np.log(1 / 0.7), 0.4),
    "reduce": Prior(np.log(0.8), 0.4),
    "hidden": Prior(0.4, 0.8),
    "pcie": Prior(np.log(1 / 0.7), 0.4),
    "cpu_adam": Prior(0.4, 0.6),
    "optimizer": Prior(np.log(1 / 0.7), 0.3),
    "collectives": Prior(0.0, 0.8),
}
_CPU_SIGMA = 1.2  # a CPU's rates are guesses until the first trial
# What no formula above knows: small factors by kind of config, and slopes.
_QUIRKS = {
    "stage1": 0.2,
    "stage2": 0.2,
    "stage3": 0.2,
    "checkpointed": 0.05,
    "offloaded": 0.1,
    "parameters out": 0.1,
    "overlapped": 0.05,
    "micro-batch": 0.03,
    "bucket": 0.03,
    "sub-group": 0.02,
    "contiguous": 0.03,
    "compiled": 0.3,
    "adapted": 0.1,
    "packed": 0.15,
}
# What is not explained is shared among candidates that are alike; more neighbours than these tell little and cost much.
_MOST_NEIGHBOURS = 128
_MOST_OBSERVATIONS = 512  # of the latest; the constants are known by then
_REPEAT_MEMORY, _REPEAT_TIME = 0.004, 0.02  # the same candidate measured twice


@dataclass(frozen=True)
class Prediction:
    """What is expected of one candidate; intervals hold 95 %."""

    candidate: Candidate
    peak_bytes: float
    peak_interval: tuple[float, float]
    memory: dict[str, float]  # bytes by what they hold, at the peak
    moment: str  # of the peak: forward, backward, step or init
    host_bytes: float  # of one rank
    step_seconds: float
    step_interval: tuple[float, float]
    time: dict[str, float]  # seconds by cause
    samples_per_second: float
    binding: str  # what limits it
    fits: bool
    exact: bool  # False where the model could not be traced


@dataclass
class Table:
    """Predictions of many candidates as arrays, in their order."""

    peak: Floats
    peak_sigma: Floats
    host: Floats
    step: Floats
    step_sigma: Floats  # of the logarithm
    samples: Floats  # a second, all ranks


class Predictor:
    """Of one job on one machine. Tracing happens once, at the first prediction unless a trace is given."""

    def __init__(self, job: Job, hardware: Hardware, trace: Trace | None = None) -> None:
        self.job, self.hardware = job, hardware
        self.trace = trace if trace is not None else trace_job(job)
        self._traces: dict[tuple[object, ...], Trace] = {(None,) * len(TRACED_KNOBS): self.trace}
        widen = 1.0 if self.trace.exact else 3.0
        gib = _OVERHEAD_GIB[hardware.device]
        extra = _NCCL_GIB if hardware.device == "cuda" and job.ranks > 1 else 0.0
        self._memory_names = ["overhead", *_MEMORY]
        self._memory_priors = [Prior(gib.mean + extra, gib.sigma), *_MEMORY.values()]
        self._memory_priors[-2] = Prior(_MEMORY["activations"].mean, _MEMORY["activations"].sigma * widen)
        self._time_names = [*_TIME, *_QUIRKS]
        rates = [
            Prior(p.mean, max(p.sigma, _CPU_SIGMA if hardware.device == "cpu" and n != "hidden" else 0.0) * widen)
            for n, p in _TIME.items()
        ]
        self._time_priors = [*rates, *(Prior(0.0, sigma) for sigma in _QUIRKS.values())]
        self._packed_rows = job.seq_len / job.tokens_per_sample
        self._memory_noise, self._time_noise = MEMORY_NOISE * widen, TIME_NOISE * widen
        self._seen: dict[Candidate, Outcome] = {}
        self._stale = False
        self._memory = fit(self._memory_priors, None, noise=self._memory_noise)
        self._time = fit(self._time_priors, None, noise=self._time_noise)
        self._memory_near: Neighbours | None = None
        self._time_near: Neighbours | None = None

    # -- calibration -------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Takes an Outcome in; constants are fitted again when next asked for."""
        if outcome.measurement is not None or outcome.kind is Kind.OOM_DEVICE:
            self._seen[candidate] = outcome
            self._stale = True

    def calibrate(self) -> None:
        """Fits the constants to all Outcomes seen."""
        if not self._stale:
            return
        self._stale = False
        candidates = list(self._seen)[-_MOST_OBSERVATIONS:]
        outcomes = [self._seen[c] for c in candidates]
        prepared = self.prepare(candidates)
        ok = np.array([o.measurement is not None for o in outcomes])
        capacity = float(self.hardware.capacity_bytes)
        peaks = np.array(
            [o.measurement.peak_bytes if o.measurement else capacity + 0.5 * (o.missing_bytes or 0) for o in outcomes]
        )

        def memory_residuals(constants: Floats) -> Floats:
            off = self._peaks(prepared, constants) / peaks - 1
            # ran out: the true peak is above; agreeing is no evidence, so only a prediction below it pulls
            return np.asarray(np.where(ok, off, np.minimum(off, 0.0)))

        self._memory = fit(self._memory_priors, memory_residuals, noise=self._memory_noise)
        off = -memory_residuals(self._memory.mean)
        told = ok | (off > 0)  # an out-of-memory where enough was predicted says something too
        latest = slice(-_MOST_NEIGHBOURS, None)
        self._memory_near = Neighbours.of(
            prepared.features[told][latest], off[told][latest], self._memory.noise, _REPEAT_MEMORY
        )
        if not ok.any():
            return
        timed = prepared.rows(ok)
        seconds = np.log([o.measurement.step_seconds for o in outcomes if o.measurement])
        self._time = fit(
            self._time_priors, lambda constants: self._log_step(timed, constants) - seconds, noise=self._time_noise
        )
        slower = seconds - self._log_step(timed, self._time.mean)
        self._time_near = Neighbours.of(timed.features[latest], slower[latest], self._time.noise, _REPEAT_TIME)

    @property
    def time_noise(self) -> float:
        """What the fit leaves unexplained of a step's logarithm: 0.1 is about 10 %."""
        self.calibrate()
        return self._time.noise

    @property
    def memory_noise(self) -> float:
        """What the fit leaves unexplained of a peak, as a share of it."""
        self.calibrate()
        return self._memory.noise

    def constants(self) -> dict[str, float]:
        """What the calibration believes: overhead in GiB, factors on full rates."""
        self.calibrate()
        memory = dict(zip(self._memory_names, self._memory.mean, strict=True))
        quirks = dict(zip(_QUIRKS, np.exp(self._time.mean[len(_TIME) :]), strict=True))
        named = {**memory, **self._time_constants(self._time.mean), **quirks}
        return {name: np.asarray(value).item() for name, value in named.items()}

    # -- prediction --------------------------------------------------------------------------------------------------

    def table(self, candidates: Sequence[Candidate]) -> Table:
        """Predictions of many candidates at once."""
        return self.prepared_table(self.prepare(candidates))

    def prepare(self, candidates: Sequence[Candidate]) -> _Prepared:
        """What of a prediction does not depend on the calibration."""
        ways: dict[tuple[object, ...], list[int]] = {}
        for i, candidate in enumerate(candidates):
            ways.setdefault(tuple(candidate.get(knob) for knob in TRACED_KNOBS), []).append(i)
        for way, at in ways.items():
            if way not in self._traces:
                self._traces[way] = trace_job(under(self.job, candidates[at[0]]))
        if len(ways) <= 1:
            trace = self._traces[next(iter(ways))] if ways else self.trace
            return _Prepared.of(self.job, self.hardware, trace, candidates)
        parts = [
            _Prepared.of(self.job, self.hardware, self._traces[way], [candidates[i] for i in at])
            for way, at in ways.items()
        ]
        return _Prepared.joined(parts, list(ways.values()))

    def prepared_table(self, prepared: _Prepared) -> Table:
        self.calibrate()
        peak, by_constants = self._peaks_and_slopes(prepared, self._memory.mean)
        shift, sigma = _corrected(self._memory, by_constants / peak[:, None], self._memory_near, prepared.features)
        peak = peak * (1 + shift)
        log_step = self._log_step(prepared, self._time.mean)
        # one setting of the constants at a time: the arrays of ten thousand candidates stay in the cache
        rates = jacobian_of(
            lambda many: np.array([np.log(self._spent(prepared, k).step) for k in many]), self._time.mean[: len(_TIME)]
        )
        by_constants = np.hstack([rates, prepared.quirks])
        shift, log_sigma = _corrected(self._time, by_constants, self._time_near, prepared.features)
        log_step = log_step + shift
        c = prepared.columns
        rows = c.micro_batch * c.accumulation * self.job.ranks
        samples = rows * np.where(c.packed > 0, self._packed_rows, 1.0) / np.exp(log_step)
        return Table(peak, sigma * peak, prepared.bill.host, np.exp(log_step), log_sigma, samples)

    def fits(self, table: Table) -> Flags:
        """Which are expected under the device's ceiling and the host's limit."""
        host_all = table.host * self.job.ranks
        return (table.peak <= self.hardware.ceiling_bytes) & (host_all <= host_limit_bytes(self.hardware))

    def predict(self, candidate: Candidate) -> Prediction:
        """One candidate, with its breakdowns."""
        return self.predict_many([candidate])[0]

    def predict_many(self, candidates: Sequence[Candidate]) -> list[Prediction]:
        prepared = self.prepare(candidates)
        table = self.prepared_table(prepared)
        spent = self._spent(prepared, self._time.mean)
        factor = table.step / spent.step
        return [
            self._describe(candidate, i, prepared, table, spent, factor[i]) for i, candidate in enumerate(candidates)
        ]

    def _describe(
        self, candidate: Candidate, i: int, prepared: _Prepared, table: Table, spent: Spent, factor: float
    ) -> Prediction:
        k = dict(zip(self._memory_names, self._memory.mean, strict=True))
        b = prepared.bill
        parts = self._moments(prepared, self._memory.mean)[:, i]
        at = int(parts.argmax())
        fragmentation = k["activations"] * (k["recomputed"] if candidate.checkpointing else 1.0)
        memory = {
            "parameters": b.parameters[i],
            "gradients": b.gradients[i],
            "optimizer": b.optimizer[i],
            "activations": b.activations[at, i],
            "buckets": k["buckets"] * b.buckets[at, i],
            "gathered parameters": k["gathered"] * b.gathered[at, i],
            "temporaries": k["temporaries"] * b.temporaries[at, i],
            "allocator": (fragmentation - 1) * b.activations[at, i]
            + (k["states"] - 1) * (b.parameters[i] + b.gradients[i] + b.optimizer[i]),
            "context and communication": k["overhead"] * GIB,
        }
        if self.hardware.device == "cpu":
            memory["host"] = b.host[i]
        time = {
            name: float(getattr(spent, name)[i]) * factor
            for name in ("forward", "backward", "recompute", "communication", "optimizer", "offload")
        }
        peak, sigma, host = float(table.peak[i]), float(table.peak_sigma[i]), float(b.host[i])
        host_all = host * self.job.ranks
        fits = bool(self.fits(table)[i])
        step, spread = float(table.step[i]), float(np.exp(SIGMAS * table.step_sigma[i]))
        return Prediction(
            candidate,
            peak,
            (peak - SIGMAS * sigma, peak + SIGMAS * sigma),
            {n: float(v) for n, v in memory.items()},
            b.moments[at],
            host,
            step,
            (step / spread, step * spread),
            time,
            float(table.samples[i]),
            self._binding(peak, host_all, time, spent, i),
            fits,
            self.trace.exact,
        )

    def _binding(self, peak: float, host: float, time: dict[str, float], spent: Spent, i: int) -> str:
        if peak > self.hardware.ceiling_bytes:
            return "device memory"
        if host > host_limit_bytes(self.hardware):
            return "host memory"
        compute = time["forward"] + time["backward"] + time["recompute"]
        causes = {
            "kernel launches": compute * float(spent.launch_bound[i]),
            "memory bandwidth": compute * float(spent.moved_share[i]) * (1 - float(spent.launch_bound[i])),
            "computation": compute * float(1 - spent.moved_share[i]) * (1 - float(spent.launch_bound[i])),
            "communication": time["communication"],
            "optimizer": time["optimizer"],
            "offload": time["offload"],
        }
        return max(causes, key=causes.__getitem__)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _moments(self, p: _Prepared, constants: Floats) -> Floats:
        """(..., moments, n) bytes at constants (..., constants)."""
        k = {name: constants[..., i, None, None] for i, name in enumerate(self._memory_names)}
        b = p.bill
        held = k["states"] * (b.parameters + b.gradients + b.optimizer) + k["overhead"] * GIB
        if self.hardware.device == "cpu":  # host and device are one
            held = held + b.host
        factor = k["activations"] * np.where(p.columns.checkpointing > 0, k["recomputed"], 1.0)
        return np.asarray(
            held
            + k["buckets"] * b.buckets
            + k["gathered"] * b.gathered
            + k["temporaries"] * b.temporaries
            + factor * b.activations
        )

    def _peaks(self, p: _Prepared, constants: Floats) -> Floats:
        return np.asarray(self._moments(p, constants).max(axis=-2))

    def _peaks_and_slopes(self, p: _Prepared, constants: Floats) -> tuple[Floats, Floats]:
        """Peaks, and their derivatives by the constants: a peak is linear in them but for which moment it is."""
        moments = self._moments(p, constants)
        at, every = moments.argmax(axis=0), np.arange(moments.shape[1])
        k, b = dict(zip(self._memory_names, constants, strict=True)), p.bill
        activations, again = b.activations[at, every], p.columns.checkpointing > 0
        slopes = {
            "overhead": np.full(len(every), float(GIB)),
            "states": b.parameters + b.gradients + b.optimizer,
            "buckets": b.buckets[at, every],
            "gathered": b.gathered[at, every],
            "temporaries": b.temporaries[at, every],
            "activations": activations * np.where(again, k["recomputed"], 1.0),
            "recomputed": np.where(again, k["activations"] * activations, 0.0),
        }
        return np.asarray(moments[at, every]), np.array([slopes[name] for name in self._memory_names]).T

    def _time_constants(self, constants: Floats) -> dict[str, Floats]:
        """Factors on full rates, (..., 1) each, from constants (..., constants)."""
        k = {name: np.exp(constants[..., i, None]) for i, name in enumerate(_TIME)}
        k["hidden"] = k["hidden"] / (1 + k["hidden"])
        return k

    def _spent(self, p: _Prepared, constants: Floats) -> Spent:
        return spend(p.work, p.columns, self._time_constants(constants))

    def _log_step(self, p: _Prepared, constants: Floats) -> Floats:
        """(..., n) logarithms of a step's seconds at constants (..., constants)."""
        return np.asarray(np.log(self._spent(p, constants).step) + constants[..., len(_TIME) :] @ p.quirks.T)


@dataclass
class _Prepared:
    columns: Columns
    bill: Bill
    work: Work
    quirks: Floats  # (n, quirks)
    features: Floats  # (n, knobs): distances between them say how alike candidates are

    @classmethod
    def of(cls, job: Job, hardware: Hardware, trace: Trace, candidates: Sequence[Candidate]) -> _Prepared:
        c = columns_of(candidates, job)
        zero = c.stage > 0
        quirks = np.array(
            [
                c.stage == 1,
                c.stage == 2,
                c.stage == 3,
                c.checkpointing,
                c.offload_optimizer > 0,
                c.offload_param > 0,
                (c.overlap > 0) & zero,
                np.log2(c.micro_batch) - 2,
                np.where(zero, np.log10(c.reduce_bucket / 5e8), 0.0),
                np.where(c.stage == 3, np.log10(c.sub_group / 1e9), 0.0),
                (c.contiguous > 0) & zero,
                c.compiled,
                c.lora > 0,
                c.packed,
            ],
            dtype=np.float64,
        ).T
        features = np.array(
            [
                1.5 * (c.stage == 0),
                1.5 * (c.stage == 1),
                1.5 * (c.stage == 2),
                1.5 * (c.stage == 3),
                c.checkpointing,
                1.5 * (c.offload_optimizer > 0),
                1.5 * (c.offload_param > 0),
                0.7 * c.overlap * zero,
                0.4 * c.contiguous * zero,
                0.5 * np.log2(c.micro_batch),
                0.3 * np.log2(c.accumulation),
                np.where(zero, 0.3 * np.log10(c.reduce_bucket), 0.0),
                np.where(c.stage == 3, 0.2 * np.log10(c.sub_group), 0.0),
                3.0 * c.attention,
                1.5 * c.compiled,
                1.5 * (c.lora > 0),
                0.2 * np.log2(1 + c.lora),
                1.5 * c.packed,
            ],
            dtype=np.float64,
        ).T
        return cls(c, bill(job, trace, c), work(job, hardware, trace, c), quirks, features)

    @classmethod
    def joined(cls, parts: list[_Prepared], at: list[list[int]]) -> _Prepared:
        """Candidates of several traces as one table; `at` says where those of each part stand in it."""
        order = np.argsort(np.concatenate([np.array(places) for places in at]))

        def beside(whole: list[Any], names: Sequence[str]) -> dict[str, Any]:
            return {name: np.concatenate([getattr(one, name) for one in whole])[order] for name in names}

        def joined(whole: list[Any]) -> Any:
            kind = type(whole[0])
            return kind(**beside(whole, [field.name for field in dataclasses.fields(kind)]))

        bills = [part.bill for part in parts]
        moments = tuple(name for one in bills for name in one.moments)  # each part's are its own
        tables = {name: _diagonal([getattr(one, name) for one in bills])[:, order] for name in TABLES}
        return cls(
            joined([part.columns for part in parts]),
            Bill(moments=moments, **beside(bills, SUMS), **tables),
            joined([part.work for part in parts]),
            **beside(parts, ("quirks", "features")),
        )

    def rows(self, mask: Floats) -> _Prepared:
        """Only some candidates."""
        columns = Columns(**{name: value[mask] for name, value in vars(self.columns).items()})
        w = Work(**{name: value[mask] for name, value in vars(self.work).items()})
        return _Prepared(columns, self.bill, w, self.quirks[mask], self.features[mask])


def _diagonal(tables: list[Floats]) -> Floats:
    """Tables along the diagonal of one, zeros elsewhere."""
    found = np.zeros((sum(len(one) for one in tables), sum(one.shape[1] for one in tables)))
    row = column = 0
    for one in tables:
        found[row : row + len(one), column : column + one.shape[1]] = one
        row, column = row + len(one), column + one.shape[1]
    return found


def _corrected(
    posterior: Posterior, jacobian: Floats, near: Neighbours | None, features: Floats
) -> tuple[Floats, Floats]:
    """(shift, standard deviation) of predictions, by the constants and by measured neighbours."""
    by_constants = posterior.spread(jacobian)
    if near is None:
        return np.zeros(len(features)), np.hypot(by_constants, posterior.noise)
    shift, unexplained = near.shift(features)
    return shift, np.hypot(np.minimum(by_constants, by_constants * unexplained / near.amplitude + 0.01), unexplained)
