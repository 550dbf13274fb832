"""What is believed of every candidate's speed and memory: by the predictor until measurements refute it, else by them alone.

Two models expect every measurement before it is made: the predictor, and a surrogate that knows nothing but the measurements
before. Each is charged by how likely it held what then came (the logarithm of its density). The one that is ahead is believed;
of time and of memory apart, since a predictor may be right in one and wrong in the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.gathered import saved_bytes
from autotune.predict.knobs import Flags, Floats, Places
from autotune.predict.predictor import Predictor, Table
from autotune.predict.prepared import Prepared
from autotune.predict.roofline import host_limit_bytes
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome
from autotune.search.surrogate import Surrogate, features

HOPELESS_SIGMAS = 2.5  # a candidate whose predicted peak is so far above the capacity is not tried
CREDIT = 2.0  # of the predictor, in logarithms of likelihood, before anything is measured
MOST_CREDIT, MOST_DEBT = 6.0, 3.0  # what counts is how it does of late
ONE_SURPRISE = 2.0  # the most that one measurement may say
RECALLED = 16  # Outcomes of a study that is resumed by which both are charged anew: more than credit and debt can hold
SHORTLIST = 2048  # candidates of a large space that are predicted anew after every measurement
ALL_EVERY = 8  # tables
MOST_OF_HOST = 1.1  # of what the bill leaves free of the host's memory; beyond that nothing is tried
REPEAT_TIME, REPEAT_MEMORY = 0.03, 0.01  # of one logarithm measured twice


@dataclass
class Trust:
    """How far the predictor is ahead of measurements alone, in logarithms of likelihood."""

    credit: float = CREDIT

    def charge(self, predictor: float, surrogate: float) -> None:
        gained = max(-ONE_SURPRISE, min(ONE_SURPRISE, predictor - surrogate))
        self.credit = max(-MOST_DEBT, min(MOST_CREDIT, self.credit + gained))

    @property
    def refuted(self) -> bool:
        return self.credit < 0


@dataclass(frozen=True)
class Forecast:
    """What is believed of every candidate, in their order."""

    logs: Floats  # of samples a second
    sigma: Floats  # of these
    step: Floats  # seconds
    fits: Floats  # probability of staying under the ceiling
    share: Floats  # what a rank is believed to need, as a share of the device
    held: Floats  # what a node's ranks are believed to need of its host's memory, as a share of what they may
    hopeless: Flags  # whether the device's memory is too small beyond doubt
    host: Flags  # whether the host's is


class Beliefs:
    """The predictor and its rival, and which of them is believed."""

    def __init__(self, predictor: Predictor, job: Job, hardware: Hardware, candidates: Sequence[Candidate]) -> None:
        self.predictor, self.job, self.hardware = predictor, job, hardware
        self._prepared = predictor.prepare(candidates)
        self._saved_bytes = saved_bytes(job, predictor.trace, self._prepared.columns)
        self._count = len(candidates)
        first, second = features(candidates)
        self._speeds, self._peaks = Surrogate(first, second), Surrogate(first, second)
        self.speed, self.memory = Trust(), Trust()
        self._stage = np.array([candidate.stage for candidate in candidates])
        # bytes by which verification goes beyond what a search measures: what may be predicted, and what may be measured
        self._room = np.full(self._count, float(hardware.ceiling_bytes))
        self._measured_room = self._room.copy()
        self._host_ran_out = False
        self._surprises: list[float] = []
        self._table: Table | None = None
        self._forecasts: dict[bool, Forecast] = {}
        self._before: Table | None = None  # the latest; of a large space partly older
        self._short: tuple[Places, Prepared] | None = None
        self._fresh = 0  # tables since all were predicted

    @property
    def refuted(self) -> bool:
        """Whether measurements speak against the predictor, in time or in memory."""
        return self.speed.refuted or self.memory.refuted

    def table(self) -> Table:
        """The predictor's, by all that was observed."""
        if self._table is None:
            table = self._refreshed()
            # a predictor that is far off may correct a peak to less than nothing
            self._table = dataclasses.replace(table, peak=np.maximum(table.peak, 1.0))
        return self._table

    def _refreshed(self) -> Table:
        """Of a large space only the candidates that may come to be of use are predicted anew after every measurement, and all
        of them after every few."""
        due = self._fresh % ALL_EVERY == 0 or len(self._peaks) < ALL_EVERY
        if self._before is None or due or self._count < 2 * SHORTLIST:
            self._fresh = 1
            self._before = self.predictor.prepared_table(self._prepared)
            self._short = None
            return self._before
        self._fresh += 1
        if self._short is None:
            some = self._promising(self._before)
            self._short = some, self._prepared.rows(some)
        some, prepared = self._short
        part, table = self.predictor.prepared_table(prepared), self._before
        for name, column in vars(part).items():
            getattr(table, name)[some] = column
        return table

    def _promising(self, table: Table) -> Places:
        """Places of the SHORTLIST candidates that would be the fastest if all went well."""
        capacity = float(self.hardware.capacity_bytes)
        promise = np.log(table.samples) + 2 * table.step_sigma
        promise += np.log(np.maximum(normal_cdf((capacity - table.needed) / table.peak_sigma), 1e-9))
        return np.argpartition(promise, -SHORTLIST)[-SHORTLIST:]

    @property
    def host_bytes(self) -> Floats | None:
        """(n,) what each keeps in the host's memory by the bill; None where host and device are one."""
        return self._prepared.bill.host if self.hardware.device == "cuda" else None

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, at: int | None, outcome: Outcome) -> None:
        """Charges both for what they expected, and lets them learn. `at` is the candidate's place; None where it has none."""
        if at is not None and outcome.measurement is not None:
            self._hear(at, outcome.measurement)
        elif at is not None and outcome.kind is Kind.OOM_DEVICE:
            self._hear_shortage(at, outcome)
        self._host_ran_out |= outcome.kind is Kind.OOM_HOST
        self.predictor.observe(candidate, outcome)
        self._table = None
        self._forecasts.clear()

    def tighten(self, at: int, searched: Measurement, share: float) -> None:
        """The candidate at this place ran in the search and not in verification, which takes more: of its stage only what needs
        less than `share` of its memory is believed to fit from now on."""
        alike = self._stage == self._stage[at]
        rooms = (self._room, self.table().needed[at]), (self._measured_room, searched.peak_bytes)
        for room, most in rooms:
            room[alike] = np.minimum(room[alike], share * float(most))
        self._forecasts.clear()

    def _hear(self, at: int, measured: Measurement) -> None:
        speed, peak = math.log(measured.samples_per_second), math.log(measured.peak_bytes)
        if self._table is not None:
            expected, sigma = math.log(self._table.samples[at]), float(self._table.step_sigma[at])
            self._surprises.append(min(5.0, abs(speed - expected) / sigma))
            if len(self._speeds):
                self.speed.charge(
                    _density(speed, expected, sigma, REPEAT_TIME), _density(speed, *_one(self._speeds, at), REPEAT_TIME)
                )
            if len(self._peaks):
                expected, sigma = (
                    math.log(self._table.peak[at]),
                    float(self._table.peak_sigma[at] / self._table.peak[at]),
                )
                self.memory.charge(
                    _density(peak, expected, sigma, REPEAT_MEMORY),
                    _density(peak, *_one(self._peaks, at), REPEAT_MEMORY),
                )
        self._speeds.observe(at, speed)
        self._peaks.observe(at, peak)

    def _hear_shortage(self, at: int, outcome: Outcome) -> None:
        capacity = float(outcome.capacity_bytes or self.hardware.capacity_bytes)
        least = math.log(capacity + 0.5 * (outcome.missing_bytes or 0))
        if self._table is not None and len(self._peaks):
            expected, sigma = _one(self._peaks, at)
            z = float((self._table.needed[at] - capacity) / self._table.peak_sigma[at])
            self.memory.charge(_log_share(z), _log_share((expected - math.log(capacity)) / sigma))
            least = max(least, expected)  # it says that more is needed, not how much
        self._peaks.observe(at, least)

    # -- believing ---------------------------------------------------------------------------------------------------

    @property
    def _humility(self) -> float:
        """The factor that intervals are widened by where recent predictions were off by more than their intervals said."""
        recent = self._surprises[-8:]
        return max(1.0, math.sqrt(sum(z * z for z in recent) / len(recent))) if len(recent) > 1 else 1.0

    def forecast(self, rival: bool = False) -> Forecast:
        """Of every candidate, by whoever is believed; with `rival`, of speed by measurements alone."""
        if rival not in self._forecasts:
            self._forecasts[rival] = self._forecast(rival)
        return self._forecasts[rival]

    def _forecast(self, rival: bool) -> Forecast:
        table = self.table()
        logs, sigma, step = np.log(table.samples), self._humility * table.step_sigma, table.step
        if (rival or self.speed.refuted) and len(self._speeds):
            logs, sigma = self._speeds.predict()
            step = table.samples * table.step / np.exp(logs)
        capacity = float(self.hardware.capacity_bytes)
        held = self._held(table.host * self.job.ranks / self.hardware.nodes)
        host, in_host = held > MOST_OF_HOST, np.ones(self._count)
        if self._host_ran_out:  # until then the bill is taken at its word
            in_host = normal_cdf(-np.log(np.maximum(held, 1e-9)) / self.predictor.host_sigma)
        if self.memory.refuted and len(self._peaks):
            peak, spread = self._peaks.predict()
            fits = in_host * normal_cdf((np.log(self._measured_room) - peak) / spread)
            hopeless = np.zeros(len(peak), dtype=bool)
            return Forecast(logs, sigma, step, fits, np.exp(peak) / capacity, held, hopeless, host)
        fits = in_host * normal_cdf((self._room - table.needed) / table.peak_sigma)
        hopeless = table.needed - HOPELESS_SIGMAS * table.peak_sigma > capacity
        return Forecast(logs, sigma, step, fits, table.needed / capacity, held, hopeless, host)

    def _held(self, kept: Floats) -> Floats:
        """Shares of a node's main memory. What its ranks keep there leaves room for their processes. While its first rank saves
        the weights, as a verification has it do, there are these, too: the processes' 2 GiB a rank are a guess, and rule out no
        save, which has all of the memory.

        Args:
            kept: bytes of a node's ranks.
        """
        if self.hardware.device != "cuda":
            return np.zeros(self._count)
        saving = (kept + self._saved_bytes) / max(1, self.hardware.host_memory_bytes)
        return np.asarray(np.maximum(kept / max(1.0, host_limit_bytes(self.hardware)), saving))


def _one(surrogate: Surrogate, at: int) -> tuple[float, float]:
    expected, spread = surrogate.predict(np.array([at]))
    return float(expected[0]), float(spread[0])


def _density(value: float, expected: float, sigma: float, repeat: float) -> float:
    """The logarithm of a normal's density, but for a constant."""
    width = math.hypot(sigma, repeat)
    return -0.5 * ((value - expected) / width) ** 2 - math.log(width)


def _log_share(z: float) -> float:
    """The logarithm of the probability that something is below z; what was thought impossible is not held against anyone
    without end."""
    return math.log(max(float(normal_cdf(z)), 1e-3))


def expected_gain(ahead: Floats, sigma: Floats) -> Floats:
    """By how much something will be above zero, of which `ahead` is expected: on average, what is below counting for nothing."""
    z = ahead / sigma
    return np.asarray(sigma * (z * normal_cdf(z) + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)))


def normal_cdf(z: Floats | float) -> Floats:
    """The standard normal's distribution function, interpolated; exact to 1e-5."""
    return np.asarray(np.interp(z, _GRID, _CDF))


_GRID = np.linspace(-8, 8, 2001)
_CDF = np.array([0.5 * (1 + math.erf(x / math.sqrt(2))) for x in _GRID])
