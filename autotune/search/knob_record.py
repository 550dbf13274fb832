"""Record of single knobs: measured effects, errors of predicted effects, and the turns that no trial has tested."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.predict.features import Flags, Floats
from autotune.problem.candidate import ACCUMULATION, Candidate
from autotune.problem.knobs import FIRST_ORDER
from autotune.problem.outcome import Measurement
from autotune.search.tpe import accumulation_follows

# Standard deviation of measured minus predicted effects of turning one knob, as logarithms of speed. Source: all pairs
# of measured candidates in searches of the recorded tables (`benchmarks/search/search.py --left-out`).
EFFECT_SIGMA: Mapping[str, float] = {
    "activation_checkpointing": 0.09,
    "offload_optimizer": 0.08,
    "overlap_comm": 0.10,
    "reduce_bucket_size": 0.06,
    "train_micro_batch_size_per_gpu": 0.15,
    "zero_stage": 0.12,
}
OTHER_SIGMA = 0.06  # of a knob that no recorded table has
PRIOR_PAIRS = 4  # weight of the value above, in pairs of this study
SETTLED_PAIRS = 2  # pairs without an effect above noise after which a turn is settled
MOST_PAIRS = 512  # latest pairs of a turn, and latest errors of a knob
LEAST_NOISE = 0.01  # standard deviation of a measured effect, at least: clocks drift by as much


@dataclass(frozen=True)
class KnobTurn:
    """One knob of the best candidate set to another value."""

    knob: str
    at: int  # place of the turned candidate
    settled: bool  # measured often enough in other places, each time without an effect above noise


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two measured candidates that differ in one knob."""

    settings: tuple[int, ...]  # first-order settings of both, without the knob
    effect: float  # logarithm of speed, second over first
    error: float | None  # measured minus predicted effect; None if it was not predicted
    noise: float  # standard deviation of the effect


class KnobRecord:
    """Effects of single knobs in one study.

    Args:
        sigmas: standard deviations of errors of predicted effects, by knob.
    """

    def __init__(self, candidates: Sequence[Candidate], sigmas: Mapping[str, float] = EFFECT_SIGMA) -> None:
        self._sigmas = sigmas
        names = sorted({name for candidate in candidates for name, _ in candidate.knobs})
        if ACCUMULATION in names and accumulation_follows(candidates):
            names.remove(ACCUMULATION)
        self._names = names
        columns, self._is_size = [], []
        for name in names:
            values = [candidate.get(name) for candidate in candidates]
            there = sorted({value for value in values if value is not None}, key=_order)
            numbers = {value: at for at, value in enumerate(there)}
            columns.append([-1 if value is None else numbers[value] for value in values])
            sizes = all(isinstance(value, int | float) and not isinstance(value, bool) for value in there)
            self._is_size.append(sizes and name != "zero_stage")
        # (n, knobs) number of each value, sizes in ascending order; -1 if the candidate lacks the knob
        self._codes = np.array(columns, dtype=np.intp).T.reshape(len(candidates), len(names))
        self._first = [at for at, name in enumerate(names) if name in FIRST_ORDER]
        self._tried = np.zeros(len(candidates), dtype=bool)
        self._measured: dict[int, tuple[float, float]] = {}  # place -> log of speed, its standard deviation
        # by knob and direction
        self._pairs: dict[tuple[int, int, int], deque[_Pair]] = defaultdict(lambda: deque(maxlen=MOST_PAIRS))
        # of predicted effects, by knob
        self.errors: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MOST_PAIRS))

    def observe(self, at: int, measured: Measurement | None, predicted: Floats | None) -> None:
        """Record a trial, and its pairs with all earlier ones.

        Args:
            at: place of the candidate.
            measured: its measurement; None if it failed.
            predicted: (n,) predicted logarithms of speed before the trial; None without a prediction.
        """
        self._tried[at] = True
        if measured is None:
            return
        speed = math.log(measured.samples_per_second)
        noise = measured.step_seconds_spread / 1.96 / measured.step_seconds
        if at not in self._measured and self._measured:
            others = np.fromiter(self._measured, dtype=np.intp)
            differs = self._differs(at)[others]
            for other, knobs in zip(others[differs.sum(1) == 1], differs[differs.sum(1) == 1], strict=True):
                self._pair(int(knobs.argmax()), int(other), at, speed, noise, predicted)
        self._measured[at] = speed, noise

    def _pair(self, knob: int, other: int, at: int, speed: float, noise: float, predicted: Floats | None) -> None:
        before, its_noise = self._measured[other]
        effect, apart = speed - before, max(LEAST_NOISE, math.hypot(noise, its_noise))
        error = None if predicted is None else effect - float(predicted[at] - predicted[other])
        settings = self._settings(at, knob)
        self._pairs[self._key(knob, other, at)].append(_Pair(settings, effect, error, apart))
        self._pairs[self._key(knob, at, other)].append(
            _Pair(settings, -effect, None if error is None else -error, apart)
        )
        if error is not None:
            self.errors[self._names[knob]].append(error)

    def _differs(self, at: int) -> NDArray[np.bool_]:
        """Return which knobs of each candidate differ from this one's, (n, knobs). A missing knob differs from none."""
        codes = self._codes
        return np.asarray((codes != codes[at]) & (codes >= 0) & (codes[at] >= 0))

    def _settings(self, at: int, knob: int) -> tuple[int, ...]:
        return tuple(int(self._codes[at, column]) for column in self._first if column != knob)

    def _key(self, knob: int, before: int, after: int) -> tuple[int, int, int]:
        """Return what a turn has in common with others: values of a choice, the direction of a size."""
        low, high = int(self._codes[before, knob]), int(self._codes[after, knob])
        return (knob, -1, int(high > low)) if self._is_size[knob] else (knob, low, high)

    def turns(self, best: int, allowed: Flags, logs: Floats) -> list[KnobTurn]:
        """Return the untested turns of single knobs, for each value one candidate, and for sizes the next ones.

        A turn is tested if a trial has made it at the best candidate, or at one with the same first-order settings.

        Args:
            best: place of the best candidate.
            allowed: (n,) candidates that may be tried.
            logs: (n,) predicted logarithms of speed, which choose between candidates that differ in missing knobs too.
        """
        differs = self._differs(best)
        near = (differs.sum(1) == 1) & (allowed | self._tried)
        knobs = differs.argmax(1)
        found = []
        for knob in sorted(set(knobs[near].tolist())):
            mine = np.flatnonzero(near & (knobs == knob))
            for value in self._values(knob, best, mine):
                ways = mine[self._codes[mine, knob] == value]
                if self._tried[ways].any():
                    continue
                at = int(ways[logs[ways].argmax()])
                pairs = self._pairs[self._key(knob, best, at)]
                if any(pair.settings == self._settings(best, knob) for pair in pairs) and not self._is_size[knob]:
                    continue
                settled = len(pairs) >= SETTLED_PAIRS and all(pair.effect < pair.noise for pair in pairs)
                settled &= any(self._codes[other, knob] == value for other in self._measured)
                found.append(KnobTurn(self._names[knob], at, settled))
        return found

    def unmeasured_sigma(self) -> Floats:
        """Return the standard deviation of each log speed by second-order choices that no trial has measured, (n,).

        The predicted effects of such values are a belief that nothing has tested, at any setting of the other knobs.
        """
        variance = np.zeros(len(self._codes))
        measured = self._codes[list(self._measured)]
        for knob, name in enumerate(self._names):
            if self._is_size[knob] or knob in self._first:
                continue
            codes = self._codes[:, knob]
            untested = (codes >= 0) & ~np.isin(codes, measured[:, knob])
            variance[untested] += self.sigma(name) ** 2
        return np.asarray(np.sqrt(variance))

    def _values(self, knob: int, best: int, mine: NDArray[np.intp]) -> list[int]:
        """Return the values of a choice, or the next smaller and the next larger one of a size."""
        values, own = sorted(set(self._codes[mine, knob].tolist())), int(self._codes[best, knob])
        if not self._is_size[knob]:
            return values
        smaller, larger = [v for v in values if v < own], [v for v in values if v > own]
        return smaller[-1:] + larger[:1]

    def effect(self, best: int, turn: KnobTurn, logs: Floats) -> tuple[float, float]:
        """Return mean and standard deviation of a turn's effect, as logarithms of speed.

        The predicted effect is corrected by the errors of the same turn in this study. The standard deviation comes from
        all errors of the knob, in this study and in the recorded tables.
        """
        key = self._key(self._names.index(turn.knob), best, turn.at)
        same = [pair.error for pair in self._pairs[key] if pair.error is not None]
        correction = sum(same) / (1 + len(same))
        mean = float(logs[turn.at] - logs[best]) + correction
        return mean, self.sigma(turn.knob) / math.sqrt(1 + len(same))

    def sigma(self, knob: str) -> float:
        """Return the standard deviation of errors of the knob's predicted effect, as a logarithm of speed."""
        errors = self.errors[knob]
        prior = self._sigmas.get(knob, OTHER_SIGMA)
        return math.sqrt((PRIOR_PAIRS * prior**2 + sum(e * e for e in errors)) / (PRIOR_PAIRS + len(errors)))


def _order(value: object) -> tuple[bool, float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (not number, float(value) if number else 0.0, str(value))  # type: ignore[arg-type]
