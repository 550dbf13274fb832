"""Who may win: what was measured, verified and rejected so far, and how candidates compare."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome
from autotune.search.records import RESUME, VERIFY

RIVAL_SHARE = 0.05  # verified candidates nearer than this are measured in turn: clocks drift by as much within minutes
RETRY_SHARE = 0.02  # a candidate with allocator retries must be faster by this to win
THRIFT_SHARE = 0.03  # what a winner with a lower peak may be slower by, where intervals overlap
THRIFT = 0.97  # of the fastest's peak, at the most, is one that is worth that
NOT_VERIFIED = "not verified"

Measured = tuple[int, Measurement]  # of the trial of this number


class Standings:
    """The measured candidates of a study, as one call of `run` sees them.

    Args:
        job: whose global batch a winner has, where it names one.
        candidates: of this call's space, which may be another than that of earlier calls on the study; None: all may win.
    """

    def __init__(
        self, hardware: Hardware, job: Job | None = None, candidates: Collection[Candidate] | None = None
    ) -> None:
        self._hardware, self._job = hardware, job
        self._candidates = None if candidates is None else frozenset(candidates)
        self.set_aside: set[Candidate] = set()  # measured, and not among these
        self.measured: dict[Candidate, Measured] = {}  # what verification measured replaces what the search did
        self.verified: dict[Candidate, Measured] = {}
        self.resumed: dict[Candidate, Outcome] = {}  # the latest try to go on from a checkpoint
        self._why_not: dict[Candidate, str] = {}  # what failed in verification
        self._doubted: set[Candidate] = set()  # need no less than one that ran out in verification
        self._most_held: dict[int, float] = {}  # by stage, bytes in a search: from there on verification failed
        self._turns: dict[Candidate, list[Measurement]] = {}  # verifications of this call

    def learn(self, number: int, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Takes in a trial's Outcome."""
        if self._is_of_another_batch(candidate):  # a script as it is, where another batch was asked for
            self.reject(candidate, "its steps are of another global batch")
        if self._candidates is not None and candidate not in self._candidates:
            self.reject(candidate, "it is not in the space of this call")
            if outcome.measurement is not None:
                self.set_aside.add(candidate)
        if role == RESUME:
            self.resumed[candidate] = outcome
            if (
                outcome.kind.is_oom
            ):  # such a training dies when it is resumed; what else fails may be the save's own fault
                self.reject(candidate, f"it does not go on from a checkpoint: {outcome.reason}")
            return
        if outcome.measurement is None:
            if role == VERIFY and outcome.kind.says_something_of_the_candidate:
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
        """What was learnt so far was measured in earlier calls: nothing of it was measured in turn with what follows."""
        self._turns.clear()

    def reject(self, candidate: Candidate, why: str) -> None:
        """The candidate cannot win."""
        self._why_not.setdefault(candidate, why)

    def doubt(self, candidates: Iterable[Candidate]) -> None:
        """Verification will hardly let these pass: they come after those of which nothing is known."""
        self._doubted.update(candidates)

    def doubt_stage(self, stage: int, held: float) -> None:
        """The same of all candidates of the stage that held so many bytes in the search, or will."""
        self._most_held[stage] = min(held, self._most_held.get(stage, held))

    def is_doubted(self, candidate: Candidate) -> bool:
        """Whether a measured candidate will hardly pass verification."""
        if candidate in self.verified or candidate not in self.measured:
            return False
        most = self._most_held.get(candidate.stage, math.inf)
        return candidate in self._doubted or held_bytes(self.measured[candidate][1]) >= most

    @property
    def rejected(self) -> int:
        """How many candidates cannot win."""
        return len(self._why_not)

    def why_not(self, candidate: Candidate) -> str:
        """What keeps a candidate from being a verified winner; empty where nothing does."""
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
        """Measured candidates under the ceiling, fastest first, those that are doubted last; allocator retries cost 2 %."""
        good = [
            candidate
            for candidate, (_, measured) in self.measured.items()
            if measured.peak_bytes <= self._hardware.ceiling_bytes and candidate not in self._why_not
        ]

        def worth(candidate: Candidate) -> tuple[bool, float]:
            measured = self.measured[candidate][1]
            speed = measured.samples_per_second * (1 - RETRY_SHARE if measured.alloc_retries else 1)
            return not self.is_doubted(candidate), speed

        return sorted(good, key=worth, reverse=True)

    @property
    def best(self) -> Candidate | None:
        return next(iter(self.feasible()), None)

    def passed(self) -> list[Candidate]:
        """Verified candidates that nothing speaks against."""
        return [candidate for candidate in self.verified if not self.why_not(candidate)]

    def contender(self) -> Candidate | None:
        """The candidate that should be verified next: none is, or one that looks faster than what is, or as fast with less
        memory; None where what has passed is good enough."""
        ranked = self.feasible()
        passed = [candidate for candidate in ranked if candidate in self.verified]
        contenders = [candidate for candidate in ranked if candidate not in self.verified]
        if not passed:
            return next(iter(contenders), None)
        measured = self.verified[passed[0]][1]
        # a search measures a second, verification three: a rival that is nearer than both are sure of has its turn, too
        near = 1 - RIVAL_SHARE if len(self._turns) == 1 else 1.0
        for candidate in contenders:
            other = self.measured[candidate][1]
            if self.is_doubted(candidate):
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
        """Of the two fastest that have passed, where they are rivals, the one to measure once more so that both have had an
        equal share of a drifting machine: A, B, A. None where that is done, or one is clearly faster."""
        ranked = sorted(self.passed(), key=lambda c: self.verified[c][1].samples_per_second, reverse=True)[:2]
        if len(ranked) < 2 or any(candidate not in self._turns for candidate in ranked):
            return None
        first, second = (self.verified[candidate][1].samples_per_second for candidate in ranked)
        if second < (1 - RIVAL_SHARE) * first or sum(len(self._turns[candidate]) for candidate in ranked) > 2:
            return None
        return min(ranked, key=list(self._turns).index)

    def thriftiest(self, passed: list[Candidate]) -> Candidate:
        """Among those whose throughput intervals overlap the fastest's and whose peak is clearly lower, the one with the lowest;
        else the fastest."""
        fastest = max(passed, key=lambda c: self.verified[c][1].samples_per_second)
        best = self.verified[fastest][1]
        rivals = [c for c in passed if overlap(self.verified[c][1], best) and as_fast(self.verified[c][1], best)]
        saving = [c for c in rivals if self.verified[c][1].peak_bytes < THRIFT * best.peak_bytes]
        return min(saving, key=lambda c: self.verified[c][1].peak_bytes, default=fastest)


def held_bytes(measured: Measurement) -> int:
    """Bytes in use where that is known: the peak that NVML shows is as high for all that fill the allocator's cache."""
    return measured.torch_allocated_bytes or measured.peak_bytes


def averaged(turns: list[Measurement]) -> Measurement:
    """The latest of several measurements of one candidate, at the mean speed of all, the highest peak and the lowest clock of
    any, with all that has limited a clock."""
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
    """Whether `one` may win by its lower memory: overlapping intervals can be wide, and speed is what is tuned."""
    return one.samples_per_second >= (1 - THRIFT_SHARE) * best.samples_per_second


def overlap(one: Measurement, other: Measurement) -> bool:
    """Whether the 95 % intervals of two throughputs meet."""
    low = [m.samples_per_second / (1 + m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    high = [m.samples_per_second / max(1e-9, 1 - m.step_seconds_spread / m.step_seconds) for m in (one, other)]
    return low[0] <= high[1] and low[1] <= high[0]
