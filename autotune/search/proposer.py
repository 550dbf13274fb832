"""What to try next.

The predictor ranks the candidates, one engine measures many batch shapes, and what cannot fit is left out with its
reason. Where the predictor expects no more gain, Optuna's sampler looks for what it got wrong.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.predict.predictor import Predictor, Table
from autotune.predict.roofline import host_limit_bytes
from autotune.predict.startup import size_seconds
from autotune.problem.candidate import MODEL_KNOBS, Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Outcome, Phase, Source
from autotune.problem.space import SearchSpace
from autotune.search.distances import Distances
from autotune.search.dominance import Dominance
from autotune.search.sampler import Sampler
from autotune.search.study import StudyStore
from autotune.units import format_bytes

STARTUP_SECONDS = 15.0  # an engine's start, until one was measured
HOPELESS_SIGMAS = 2.5  # a candidate whose predicted peak is so far above the capacity is not tried
BLUNT = 0.3  # where the predictor is off by so much (of log seconds), the sampler chooses every other engine
RISK_STEP = 0.25  # by which every out-of-memory raises the least probability of fitting
MOST_CAUTIOUS = 0.8  # up to this
LAST_RESORTS = 4  # engines tried although nothing is predicted to fit
LEAST_EVIDENCE = 8  # candidates measured before a search may end by itself
MISLED = 0.08  # where peaks are off by such a share, what was predicted not to fit is tried after all
WIDER = 1.25  # factor on the intervals of such peaks
MEMORY_END_AFTER = 4  # candidates measured before an exhaustive search looks for where memory ends


@dataclass(frozen=True)
class Proposal:
    """A candidate to measure, and why."""

    candidate: Candidate
    note: str


class Proposer:
    """Knows which candidates are still worth trying, and why the others are not."""

    def __init__(
        self,
        candidates: list[Candidate],
        space: SearchSpace,
        job: Job,
        hardware: Hardware,
        store: StudyStore,
        seed: int,
        predictor: Predictor,
        *,
        tolerance: float = 0.01,
        exhaustive: bool = False,
    ) -> None:
        self.space, self.job, self.hardware, self.predictor = space, job, hardware, predictor
        self.tolerance, self.exhaustive = tolerance, exhaustive
        self.candidates = candidates
        self._index = {candidate: i for i, candidate in enumerate(candidates)}
        self._open = np.ones(len(candidates), dtype=bool)
        self._none = np.zeros(len(candidates), dtype=bool)
        self._too_large = self._none.copy()
        self._fitted = self._none.copy()  # of a kind of which one fitted
        self._dominance = Dominance(candidates)
        families: dict[tuple[tuple[str, Value], ...], int] = {}
        self._family = np.array([families.setdefault(c.family, len(families)) for c in candidates])
        kinds: dict[tuple[object, ...], int] = {}
        self._kind = np.array([kinds.setdefault(_kind(c), len(kinds)) for c in candidates])
        self._micro_batch = np.array([c.micro_batch for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        self._prepared = predictor.prepare(candidates)
        self._table: Table | None = None
        self.skipped: Counter[str] = Counter()
        self.speed: dict[Candidate, float] = {}
        self._refused: dict[str, list[Candidate]] = {}
        self._worked: list[Candidate] = []
        self._startup: list[float] = []
        self._overran: Counter[Candidate] = Counter()  # how often a limit of ours has ended it
        self._slow_start = 0.0  # seconds that an engine had been starting when such a limit ended it
        self._engines = 0
        self._ran_out = 0
        self._last_resorts = 0
        self._doubted_kinds: set[int] = set()
        self._surprises: list[float] = []
        self._sampler = Sampler(space, store, seed)
        self.stopped_early = ""

    @property
    def open(self) -> list[Candidate]:
        """Candidates that may still be tried."""
        return [self.candidates[i] for i in np.flatnonzero(self._open)]

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Learns from an Outcome, and rules out the candidates that it speaks against."""
        if not outcome.kind.says_something_of_the_candidate:
            return
        self._note_surprise(candidate, outcome)
        self._close(candidate)
        self.predictor.observe(candidate, outcome)
        self._table = None
        if outcome.kind is Kind.TIMEOUT:
            self._note_slow_start(outcome)
        if outcome.outside_seconds > 1.0 and outcome.kind in (Kind.OK, Kind.OOM_DEVICE):
            self._startup.append(outcome.outside_seconds)
        if outcome.kind is Kind.OK:
            assert outcome.measurement is not None
            if outcome.measurement.peak_bytes <= self.hardware.ceiling_bytes:
                self.speed[candidate] = outcome.measurement.samples_per_second
            self._worked.append(candidate)
            if candidate in self._index:
                self._fitted |= self._kind == self._kind[self._index[candidate]]
        elif outcome.kind is Kind.OOM_DEVICE:
            self._ran_out += 1
            self._rule_out_larger(candidate)
        elif outcome.source is Source.STOP:
            self._rule_out(self._alike(candidate), f"same engine as {candidate}, which the tuner did not survive")
        elif outcome.kind is Kind.INVALID:
            self._learn_refusal(candidate, outcome.reason, "DeepSpeed refuses")
        elif outcome.kind is Kind.CRASH and outcome.source is Source.EXCEPTION:
            self._learn_refusal(candidate, outcome.reason, "crashes")
        else:  # a hang, a signal or the host's memory: the same engine would end the same way
            self._rule_out(self._alike(candidate), f"same engine as {candidate}: {outcome.kind.value}")

    def allow_longer(self, candidate: Candidate, outcome: Outcome) -> None:
        """A limit of ours has ended the candidate's trial: from now on it has twice as long, and what still was starting
        raises what all others have to start."""
        self._overran[candidate] += 1
        self._note_slow_start(outcome)

    def _note_slow_start(self, outcome: Outcome) -> None:
        if outcome.phase in (Phase.START, Phase.INIT) and outcome.source is Source.LIMIT:
            self._slow_start = max(self._slow_start, outcome.seconds)

    def patience(self, candidate: Candidate) -> float:
        """The factor on limits of a candidate: 2 once one of them has ended it."""
        return 2.0 if self._overran[candidate] else 1.0

    def give_up(self, candidate: Candidate, why: str) -> None:
        """The candidate is not tried again in this call, whatever it would have shown."""
        self._close(candidate)
        self.skipped[f"given up: {why[:160]}"] += 1

    def _alike(self, candidate: Candidate) -> Flags:
        """The candidates of the same engine."""
        at = self._index.get(candidate)
        return self._none if at is None else self._family == self._family[at]

    def _note_surprise(self, candidate: Candidate, outcome: Outcome) -> None:
        """Records by how many standard deviations a step's seconds differ from what was predicted before."""
        at = self._index.get(candidate)
        if self._table is not None and at is not None and outcome.measurement is not None:
            off = math.log(outcome.measurement.step_seconds / self._table.step[at]) / self._table.step_sigma[at]
            self._surprises.append(min(abs(off), 5.0))

    @property
    def _humility(self) -> float:
        """The factor that intervals are widened by where recent predictions were off by more than their intervals said."""
        recent = self._surprises[-8:]
        return max(1.0, math.sqrt(sum(z * z for z in recent) / len(recent))) if len(recent) > 1 else 1.0

    def _close(self, candidate: Candidate) -> None:
        if (at := self._index.get(candidate)) is not None:
            self._open[at] = False

    def _rule_out(self, mask: Flags, reason: str) -> None:
        if count := int((mask & self._open).sum()):
            self._open &= ~mask
            self.skipped[reason] += count

    def _rule_out_larger(self, candidate: Candidate) -> None:
        at = self._index.get(candidate)
        if at is None or self._too_large[at]:  # what ruled it out has ruled out all that needs no less than it
            return
        larger = self._dominance.needs_no_less(candidate)
        self._too_large |= larger
        self._rule_out(larger, f"needs no less memory than {candidate}, which ran out")

    def _learn_refusal(self, candidate: Candidate, reason: str, how: str) -> None:
        """Rules out every candidate with the settings that all failures with this message share.

        Where there is but one failure, or a candidate that worked shares them too, only the same engine is ruled out.
        """
        refused = self._refused.setdefault(reason, [])
        refused.append(candidate)
        shared = set.intersection(*(set(one.family) for one in refused))
        if len(refused) == 1 or any(shared <= set(one.family) for one in self._worked):
            shared = set(candidate.family)
        alike = np.array([shared <= set(other.family) for other in self.candidates])
        self._rule_out(alike, f"{how}: {reason[:160]}")

    def skips(self) -> dict[str, int]:
        """How many candidates were not tried, by reason: what followed from measurements, and what the predictor says."""
        reasons = Counter(self.skipped)
        if self._open.any():
            hopeless, host = self._hopeless()
            capacity = format_bytes(self.hardware.capacity_bytes)
            table = self._predictions()
            for mask, what in (
                (hopeless, f"predicted to need more than the {capacity} of a device"),
                (host & ~hopeless, "predicted to need more than the host's memory"),
            ):
                if (count := int((mask & self._open).sum())) > 0:
                    least = format_bytes(int(table.peak[mask & self._open].min()))
                    reasons[f"{what} beyond the interval" + (f" (the least {least})" if mask is hopeless else "")] = (
                        count
                    )
        return dict(reasons)

    # -- proposing ---------------------------------------------------------------------------------------------------

    def next(self) -> Proposal | None:
        """A candidate for a new engine, or None where none is left or none is worth its time (`stopped_early`)."""
        self.stopped_early = ""
        worth, gain = self._worth()
        allowed = np.isfinite(worth)
        if not allowed.any():
            return self._last_resort() or self._doubted()
        self._engines += 1
        if self.speed and self._engines % 2 == 0 and self.predictor.time_noise > BLUNT:
            return self._advised(allowed)
        best = int(worth.argmax())
        if not self.speed:
            return Proposal(self.candidates[best], "best predicted")
        if (doubted := self._doubted(more_than=gain[best])) is not None:
            return doubted
        if gain[best] < 0.25 * self.tolerance and len(self.speed) >= LEAST_EVIDENCE:
            if not self.exhaustive:
                self.stopped_early = (
                    f"the predicted gain of going on is below {100 * self.tolerance:g} % (--exhaustive goes on)"
                )
                return None
            return self._advised(allowed)
        return Proposal(self.candidates[best], f"predicted gain {100 * math.expm1(gain[best]):.1f} %")

    def _last_resort(self) -> Proposal | None:
        """Where nothing has fitted and nothing is predicted to: the candidate of least memory, in case that is wrong."""
        if self.speed or not self._open.any() or self._last_resorts >= LAST_RESORTS:
            return None
        self._last_resorts += 1
        least = int(np.where(self._open, self._predictions().peak, np.inf).argmin())
        return Proposal(self.candidates[least], "least predicted memory: nothing is predicted to fit")

    def _doubted(self, more_than: float = 0.0) -> Proposal | None:
        """Where memory was predicted badly, a candidate that was predicted not to fit, judged by wider intervals.

        It is the one of least memory of the most promising kind. Each kind is tried once: if the least runs out, the
        others would too. None where no kind promises more than `more_than`, the gain of what is predicted to fit.
        """
        if not self.speed or self.predictor.memory_noise < MISLED:
            return None
        table = self._predictions()
        gain = np.log(table.samples) + table.step_sigma - math.log(max(self.speed.values()))
        gain *= _normal_cdf((self.hardware.ceiling_bytes - table.needed) / (WIDER * table.peak_sigma))
        open_kinds = self._open & ~np.isin(self._kind, list(self._doubted_kinds))
        gain = np.where(open_kinds, gain, -np.inf)
        best = int(gain.argmax())
        if gain[best] < max(0.25 * self.tolerance, more_than):
            return None
        self._doubted_kinds.add(int(self._kind[best]))
        thriftiest = int(np.where(open_kinds & (self._kind == self._kind[best]), table.peak, np.inf).argmin())
        return Proposal(self.candidates[thriftiest], "predicted not to fit by a predictor that was wrong of memory")

    def next_rung(self, current: Candidate) -> Proposal | None:
        """The next candidate for the engine that just measured `current`, or None where another engine is worth more.

        Micro-batches ascend, because memory that an allocator keeps from a larger one would be charged to a smaller one.
        """
        at = self._index.get(current)
        if at is None:
            return None
        mine = self._family == self._family[at]
        mine &= (self._micro_batch > current.micro_batch) | (
            (self._micro_batch == current.micro_batch) & (self._accumulation > current.accumulation)
        )
        if not (mine & self._open).any():
            return None
        if self.exhaustive and not self._ran_out and len(self.speed) >= MEMORY_END_AFTER:
            higher = self._open & mine & (self._micro_batch > current.micro_batch)
            if higher.any():  # one out-of-memory calibrates every prediction of peaks
                return Proposal(self._lowest(higher), "looks for where memory ends")
        worth, gain = self._worth(alive=mine)
        rungs = np.where(mine, worth, -np.inf)
        best = int(rungs.argmax())
        if not np.isfinite(rungs[best]):
            return None
        if self.exhaustive and gain[worth.argmax()] < 0.25 * self.tolerance:
            rung = self._lowest(np.isfinite(rungs))
            return Proposal(rung, "next rung of the ladder")
        if gain[best] < 0.25 * self.tolerance or rungs[best] < worth.max():
            return None
        return Proposal(self.candidates[best], f"same engine, predicted gain {100 * math.expm1(gain[best]):.1f} %")

    def trial_seconds(self, candidate: Candidate) -> float:
        """What a trial of the candidate may take at most, by its size and by what others took."""
        at = self._index.get(candidate)
        table = self._predictions()
        step = float(table.step[at] * np.exp(2 * table.step_sigma[at])) if at is not None else 10.0
        measuring = 12 * step + 30.0
        starting = 4 * max(self._startup, default=STARTUP_SECONDS) + size_seconds(self.job, candidate)
        usual = self.patience(candidate) * (starting + measuring)
        # what was ended while it started shows only that starting takes longer than that
        return max(usual, 3 * self._slow_start + measuring if self._slow_start else 0.0)

    def _predictions(self) -> Table:
        if self._table is None:
            self._table = self.predictor.prepared_table(self._prepared)
        return self._table

    def _hopeless(self) -> tuple[Flags, Flags]:
        """(n,) each: whether the device's memory, and whether the host's, is predicted to be too small beyond doubt."""
        table = self._predictions()
        hopeless = table.needed - HOPELESS_SIGMAS * table.peak_sigma > self.hardware.capacity_bytes
        return hopeless, table.host * self.job.ranks / self.hardware.nodes > 1.1 * host_limit_bytes(self.hardware)

    def _worth(self, alive: Flags | None = None) -> tuple[Floats, Floats]:
        """(gain a second, gain) of measuring each candidate; the first is minus infinity where it is ruled out.

        Gain is the expected improvement of log samples a second over the best so far, times the probability of fitting.
        `alive` marks the candidates that the running engine can measure without a new start.
        """
        table = self._predictions()
        fits = _normal_cdf((self.hardware.ceiling_bytes - table.needed) / table.peak_sigma)
        hopeless, host = self._hopeless()
        barred = ~self._open | hopeless | host
        logs = np.log(table.samples)
        if not self.speed:
            # first something that surely fits: it calibrates everything else
            gain = logs + 4 * np.log(np.maximum(fits, 1e-9))
            return np.where(barred, -np.inf, gain), gain
        best = math.log(max(self.speed.values()))
        sigma = self._humility * table.step_sigma
        z = (logs - best) / sigma
        gain = sigma * (z * _normal_cdf(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)) * fits
        if not self.exhaustive:
            barred = barred | ~self._fitted & (fits < min(MOST_CAUTIOUS, RISK_STEP * self._ran_out))
        startup = float(np.median(self._startup[-8:])) if self._startup else STARTUP_SECONDS
        measuring = table.step * np.minimum(4.0, 6.0 / self._accumulation) + 1.0
        seconds = measuring + np.where(alive, 0.0, startup) if alive is not None else measuring + startup
        return np.where(barred, -np.inf, gain / seconds), gain

    @functools.cached_property
    def _distances(self) -> Distances:
        return Distances(self.candidates)

    def _advised(self, allowed: Flags) -> Proposal:
        """The allowed candidate that is nearest to what Optuna's sampler asks for."""
        wanted = self._sampler.wanted()
        nearest = self.candidates[int(np.where(allowed, self._distances.to(wanted), np.inf).argmin())]
        if self.exhaustive:  # every rung of that engine in one start
            family = self._family == self._family[self._index[nearest]]
            nearest = self._lowest(allowed & family)
        return Proposal(nearest, "Optuna's sampler")

    def _lowest(self, among: Flags) -> Candidate:
        rungs = [self.candidates[i] for i in np.flatnonzero(among)]
        return min(rungs, key=lambda c: (c.micro_batch, c.accumulation))


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """The settings that decide most of a candidate's memory."""
    return (
        candidate.stage,
        candidate.micro_batch,
        candidate.checkpointing,
        candidate.offload_optimizer,
        candidate.offload_param,
        *(candidate.get(knob) for knob in MODEL_KNOBS),
    )


def _normal_cdf(z: Floats) -> Floats:
    """The standard normal's distribution function, interpolated; exact to 1e-5."""
    return np.asarray(np.interp(z, _GRID, _CDF))


_GRID = np.linspace(-8, 8, 2001)
_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _GRID])
