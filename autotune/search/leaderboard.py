"""Leaderboard of a study: measured, verified and rejected candidates, and their order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome
from autotune.search.trials import RESUME, VERIFY

# share of speed; closer verified candidates are measured alternately, because GPU clocks drift as much within minutes
RIVAL_SHARE = 0.05
RETRY_SHARE = 0.02  # share of speed by which a candidate with allocator retries must be faster to win
THRIFT_SHARE = 0.03  # share of speed that a winner with a lower peak may lose, if the intervals overlap
THRIFT = 0.97  # share of the fastest candidate's peak, at most, that justifies this loss
NOT_VERIFIED = "not verified"

Measured = tuple[int, Measurement]  # (trial number, measurement)


class Leaderboard:
    """Measured candidates of a study, as seen by one `run` call.

    Args:
        hardware: gives the memory ceiling.
        job: a winner must have its global batch size, if set.
        candidates: the call's space, which may differ from that of earlier calls; None allows all candidates to win.
    """

    def __init__(
        self, hardware: Hardware, job: Job | None = None, candidates: Collection[Candidate] | None = None
    ) -> None:
        self._hardware, self._job = hardware, job
        self._candidates = None if candidates is None else frozenset(candidates)
        self.set_aside: set[Candidate] = set()  # measured candidates outside this call's space
        self.measured: dict[Candidate, Measured] = {}  # a verification replaces the search's measurement
        self.verified: dict[Candidate, Measured] = {}
        self.resumed: dict[Candidate, Outcome] = {}  # outcome of the latest resume trial
        self._why_not: dict[Candidate, str] = {}  # reasons why candidates cannot win
        self._doubted: set[Candidate] = set()  # need at least as much memory as one with an OOM in verification
        self._most_held: dict[int, float] = {}  # by stage: bytes in a search, from which on verification failed
        self._turns: dict[Candidate, list[Measurement]] = {}  # verifications in this call

    def learn(self, number: int, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Record a trial's outcome."""
        # the probe run of a script, while the job sets another global batch size
        if self._is_of_another_batch(candidate):
            self.reject(candidate, "its steps are of another global batch")
        if self._candidates is not None and candidate not in self._candidates:
            self.reject(candidate, "it is not in the space of this call")
            if outcome.measurement is not None:
                self.set_aside.add(candidate)
        if role == RESUME:
            self.resumed[candidate] = outcome
            if (
                outcome.kind.is_oom
            ):  # an OOM would also end a resumed training; other failures may be errors of the save itself
                self.reject(candidate, f"it does not go on from a checkpoint: {outcome.reason}")
            return
        if outcome.measurement is None:
            if role == VERIFY and outcome.kind.is_attributable_to_candidate:
                self._why_not[candidate] = f"{outcome.kind.value}: {outcome.reason}"
            return
        if role == VERIFY:
            turns = self._turns.setdefault(candidate, [])
            turns.append(outcome.measurement)
            self.verified[candidate] = (number, averaged(turns))
        if role == VERIFY or candidate not in self.verified:
            self.measured[candidate] = self.verified.get(candidate, (number, outcome.measurement))

    def _is_of_another_batch(self, candidate: Candidate) -> bool:
        if self._job is None or self._job.global_batch_size is None:
            return False
        return candidate.micro_batch * candidate.accumulation * self._job.ranks != self._job.global_batch_size

    def begin_call(self) -> None:
        """Start this call's verifications. Earlier calls' measurements do not count as alternating with them."""
        self._turns.clear()

    def reject(self, candidate: Candidate, why: str) -> None:
        """Record why the candidate cannot win; the first reason is kept."""
        self._why_not.setdefault(candidate, why)

    def deprioritize(self, candidates: Iterable[Candidate]) -> None:
        """Rank these candidates last, because they will probably fail verification."""
        self._doubted.update(candidates)

    def deprioritize_stage(self, stage: int, held: float) -> None:
        """Rank all candidates of the stage last that hold at least this many bytes in a search."""
        self._most_held[stage] = min(held, self._most_held.get(stage, held))

    def is_deprioritized(self, candidate: Candidate) -> bool:
        """Return True if a measured candidate will probably fail verification."""
        if candidate in self.verified or candidate not in self.measured:
            return False
        most = self._most_held.get(candidate.stage, math.inf)
        return candidate in self._doubted or held_bytes(self.measured[candidate][1]) >= most

    @property
    def rejected(self) -> int:
        """Number of candidates that cannot win."""
        return len(self._why_not)

    def why_not(self, candidate: Candidate) -> str:
        """Return why a candidate is not a verified winner; empty if nothing prevents it."""
        if candidate in self._why_not:
            return self._why_not[candidate]
        if candidate not in self.verified:
            return NOT_VERIFIED
        measured = self.verified[candidate][1]
        if measured.peak_bytes > self._hardware.ceiling_bytes:
            return "its peak leaves less than the headroom"
        if measured.alloc_retries:
            return f"{measured.alloc_retries} allocator retries"
        return ""

    def feasible(self) -> list[Candidate]:
        """Return measured candidates under the ceiling, fastest first, doubted ones last.

        Allocator retries count as 2 % less speed.
        """
        good = [
            candidate
            for candidate, (_, measured) in self.measured.items()
            if measured.peak_bytes <= self._hardware.ceiling_bytes and candidate not in self._why_not
        ]

        def worth(candidate: Candidate) -> tuple[bool, float]:
            measured = self.measured[candidate][1]
            speed = measured.samples_per_second * (1 - RETRY_SHARE if measured.alloc_retries else 1)
            return not self.is_deprioritized(candidate), speed

        return sorted(good, key=worth, reverse=True)

    @property
    def best(self) -> Candidate | None:
        """Return the best feasible candidate, or None."""
        return next(iter(self.feasible()), None)

    def least_winning_speed(self, best: Candidate) -> float:
        """Return the samples per second below which nothing wins against `best`, neither by speed nor by thrift."""
        measured = self.measured[best][1]
        low = measured.samples_per_second / (1 + measured.step_seconds_spread / measured.step_seconds)
        return (1 - THRIFT_SHARE) * low

    def passed(self) -> list[Candidate]:
        """Return verified candidates that may win."""
        return [candidate for candidate in self.verified if not self.why_not(candidate)]

    def contender(self) -> Candidate | None:
        """Return the next candidate to verify.

        Returns:
            The first candidate if none has passed, or one that looks faster than the best verified one, or as fast with
                less memory. None if no such candidate is left.
        """
        ranked = self.feasible()
        passed = [candidate for candidate in ranked if candidate in self.verified]
        contenders = [candidate for candidate in ranked if candidate not in self.verified]
        if not passed:
            return next(iter(contenders), None)
        measured = self.verified[passed[0]][1]
        # a search measures for one second and verification for three, so a candidate within both uncertainties is
        # verified too
        near = 1 - RIVAL_SHARE if len(self._turns) == 1 else 1.0
        for candidate in contenders:
            other = self.measured[candidate][1]
            if self.is_deprioritized(candidate):
                if (1 - RIVAL_SHARE) * other.samples_per_second > measured.samples_per_second:
                    return candidate
                continue
            if other.samples_per_second > near * measured.samples_per_second:
                return candidate
            if (
                overlap(other, measured)
                and as_fast(other, measured)
                and other.peak_bytes < THRIFT * measured.peak_bytes
            ):
                return candidate
        return None

    def next_turn(self) -> Candidate | None:
        """Return which of the two fastest verified candidates to measure again, in the order A, B, A.

        Alternating measurements distribute the machine's drift equally.

        Returns:
            None if this is done, or if one candidate is clearly faster.
        """
        ranked = sorted(self.passed(), key=lambda c: self.verified[c][1].samples_per_second, reverse=True)[:2]
        if len(ranked) < 2 or any(candidate not in self._turns for candidate in ranked):
            return None
        first, second = (self.verified[candidate][1].samples_per_second for candidate in ranked)
        if second < (1 - RIVAL_SHARE) * first or sum(len(self._turns[candidate]) for candidate in ranked) > 2:
            return None
        return min(ranked, key=list(self._turns).index)

    def thriftiest(self, passed: list[Candidate]) -> Candidate:
        """Return the candidate with the lowest peak among those about as fast as the fastest; else the fastest.

        The throughput intervals must overlap, and the peak must be clearly lower.
        """
        fastest = max(passed, key=lambda c: self.verified[c][1].samples_per_second)
        best = self.verified[fastest][1]
        rivals = [c for c in passed if overlap(self.verified[c][1], best) and as_fast(self.verified[c][1], best)]
        saving = [c for c in rivals if self.verified[c][1].peak_bytes < THRIFT * best.peak_bytes]
        return min(saving, key=lambda c: self.verified[c][1].peak_bytes, default=fastest)


def held_bytes(measured: Measurement) -> int:
    """Return allocated bytes if known, else the peak.

    The NVML peak includes the allocator's cache and is similar for many candidates.
    """
    return measured.torch_allocated_bytes or measured.peak_bytes


def averaged(turns: list[Measurement]) -> Measurement:
    """Merge measurements of one candidate: mean speed, highest peak, lowest clock and all clock limits.

    Other values come from the latest measurement.
    """
    step_seconds = sum(one.step_seconds for one in turns) / len(turns)
    latest = turns[-1]
    scale = latest.step_seconds / step_seconds
    return dataclasses.replace(
        latest,
        step_seconds=step_seconds,
        samples_per_second=latest.samples_per_second * scale,
        tokens_per_second=latest.tokens_per_second * scale,
        peak_bytes=max(one.peak_bytes for one in turns),
        alloc_retries=max(one.alloc_retries for one in turns),
        sm_clock_mhz=min((one.sm_clock_mhz for one in turns if one.sm_clock_mhz), default=None),
        clock_limits=list(dict.fromkeys(limit for one in turns for limit in one.clock_limits)),
    )


def as_fast(one: Measurement, best: Measurement) -> bool:
    """Return True if `one` may win by its lower memory. Overlap alone is not enough, because intervals can be wide."""
    return one.samples_per_second >= (1 - THRIFT_SHARE) * best.samples_per_second


def overlap(one: Measurement, other: Measurement) -> bool:
    """Return True if the 95 % intervals of two throughputs overlap."""
    low = [m.samples_per_second / (1 + m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    high = [m.samples_per_second / max(1e-9, 1 - m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    return low[0] <= high[1] and low[1] <= high[0]
