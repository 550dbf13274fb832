"""Leaderboard of a study: measured, verified and rejected candidates, their order, and the facts of its verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, describe, samples
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.search.certificate import Verdict, compare
from autotune.search.trials import AS_IS, NO_CALL, RESUME, SEARCH, TRAINING, VERIFY, Call, Record, constraints
from autotune.util.units import counted, format_bytes, format_change

# share of speed; closer verified candidates are measured alternately, because GPU clocks drift as much within minutes
RIVAL_SHARE = 0.05
RETRY_SHARE = 0.02  # share of speed by which a candidate with allocator retries must be faster to win
SPEED_FOR_MEMORY = 0.03  # share of speed that a winner with a lower peak may lose, if the intervals overlap
MEMORY_FOR_SPEED = 0.97  # share of the fastest candidate's peak, at most, that justifies this loss
DRIFT = 1.25  # ratio of two speeds of the winner from which the verdict says that the machine's speed has changed
SHOWN_DRIFT = 1.005  # ratio of two speeds of the winner from which its margin names the speeds that it compares
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
        self.searched: dict[Candidate, Measured] = {}  # latest measurement of the search
        self.resumed: dict[Candidate, Outcome] = {}  # outcome of the latest resume trial
        self._why_not: dict[Candidate, str] = {}  # reasons why candidates cannot win
        self._doubted: set[Candidate] = set()  # need at least as much memory as one with an OOM in verification
        self._most_allocated: dict[int, float] = {}  # by stage: bytes in a search, from which on verification failed
        self._verifications: dict[Candidate, list[Measurement]] = {}  # verifications in this call
        self._earlier: dict[Candidate, Measured] = {}  # verifications of earlier calls
        self._new: set[Candidate] = set()  # measured in this call
        self._chosen: Candidate | None = None  # choice of the earlier calls

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
            # an OOM would also end a resumed training; other failures may be errors of the save itself
            if outcome.kind.is_oom:
                self.reject(candidate, f"it does not resume from a checkpoint: {outcome.reason}")
            return
        if outcome.measurement is None:
            if role == VERIFY and outcome.kind.is_attributable_to_candidate:
                self._why_not[candidate] = f"{outcome.kind.value}: {outcome.reason}"
            return
        if role == VERIFY:
            measurements = self._verifications.setdefault(candidate, [])
            measurements.append(outcome.measurement)
            self.verified[candidate] = (number, averaged(measurements))
        else:
            self.searched[candidate] = (number, outcome.measurement)
        if role == VERIFY or candidate not in self.verified:
            self._new.add(candidate)
            self.measured[candidate] = self.verified.get(candidate, (number, outcome.measurement))

    def replay_calls(self, records: Sequence[Record]) -> None:
        """Record the trials of a study, in order, with the limits of its calls."""
        for begins, record in first_of_calls(records):
            if begins:
                self.begin_call()
            self.replay(record)

    def replay(self, record: Record) -> None:
        """Record a stored trial. An OOM on a machine with clearly less memory does not count."""
        outcome = record.outcome
        if outcome is None or record.role == TRAINING:
            return
        if not self._hardware.outgrew(outcome.kind, outcome.capacity_bytes):
            self.learn(record.number, record.candidate, outcome, record.role)

    def _is_of_another_batch(self, candidate: Candidate) -> bool:
        if self._job is None or self._job.global_batch_size is None:
            return False
        return candidate.rows_per_rank * self._job.data_ranks != self._job.global_batch_size

    def begin_call(self) -> None:
        """Start a call. Its speeds are compared with those of earlier calls only through a config verified in both.

        The pace of a machine may change between calls: clocks, load, drivers.
        """
        passed = self.passed()
        self._chosen = self.choose_least_memory(passed) if passed else None
        self._earlier = dict(self.verified)
        self._verifications.clear()
        self._new.clear()

    @property
    def incumbent(self) -> Candidate | None:
        """Return the choice of earlier calls, while this call has not verified it; None if there is none.

        Nothing wins against it before this call has verified it, too.
        """
        good = [candidate for candidate in self.verified if not self.why_not(candidate)]
        if self._chosen in good:
            return None if self._chosen in self._verifications else self._chosen
        if not good or any(candidate in self._verifications for candidate in good):
            return None
        return self.choose_least_memory(good)

    @property
    def pace(self) -> float:
        """Return this call's speeds divided by those of earlier calls, by what was verified in both; 1 if nothing was."""
        both = [candidate for candidate in self._verifications if candidate in self._earlier]
        speeds = ((self.verified[one][1].samples_per_second, self._earlier[one][1].samples_per_second) for one in both)
        return statistics.median([now / before for now, before in speeds] or [1.0])

    def _speed(self, candidate: Candidate) -> float:
        """Return samples per second at the pace of this call."""
        return self.measured[candidate][1].samples_per_second * (1.0 if candidate in self._new else self.pace)

    def reject(self, candidate: Candidate, why: str) -> None:
        """Record why the candidate cannot win; the first reason is kept."""
        self._why_not.setdefault(candidate, why)

    def deprioritize(self, candidates: Iterable[Candidate]) -> None:
        """Rank these candidates last, because they will probably fail verification."""
        self._doubted.update(candidates)

    def deprioritize_stage(self, stage: int, allocated_bytes: float) -> None:
        """Rank all candidates of the stage last that hold at least this many bytes in a search."""
        self._most_allocated[stage] = min(allocated_bytes, self._most_allocated.get(stage, allocated_bytes))

    def verified_now(self, candidate: Candidate) -> bool:
        """Return True if this call has verified the candidate."""
        return candidate in self._verifications

    def is_deprioritized(self, candidate: Candidate) -> bool:
        """Return True if a measured candidate will probably fail verification."""
        if candidate in self.verified or candidate not in self.measured:
            return False
        most = self._most_allocated.get(candidate.stage, math.inf)
        return candidate in self._doubted or allocated_bytes(self.measured[candidate][1]) >= most

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

    def may_win(self, candidate: Candidate) -> bool:
        """Return True if a candidate is measured under the ceiling and nothing but a missing verification is against it."""
        if candidate not in self.measured or self.why_not(candidate) not in ("", NOT_VERIFIED):
            return False
        return self.measured[candidate][1].peak_bytes <= self._hardware.ceiling_bytes

    def remark(self, candidate: Candidate, outcome: Outcome) -> str:
        """Return why a measured trial cannot win, in a few words for its line; empty if it can."""
        if outcome.measurement is None:
            return ""
        over = outcome.measurement.peak_bytes - self._hardware.ceiling_bytes
        if over > 0:
            return f"over by {format_bytes(over)}"
        why = self.why_not(candidate)
        return "" if why in ("", NOT_VERIFIED) else f"rejected: {why}"

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
            speed = self._speed(candidate) * (1 - RETRY_SHARE if measured.alloc_retries else 1)
            return not self.is_deprioritized(candidate), speed

        return sorted(good, key=worth, reverse=True)

    @property
    def best(self) -> Candidate | None:
        """Return the best feasible candidate, or None."""
        return next(iter(self.feasible()), None)

    def least_winning_speed(self) -> float:
        """Return the samples per second below which nothing wins in this call, neither by speed nor by thrift.

        Returns:
            0 without a measurement. Also 0 if an earlier call made the best one, and this call's pace is unknown.
        """
        best = self.best
        if best is None or (self.incumbent is not None and best not in self._new):
            return 0.0
        measured = self.measured[best][1]
        low = self._speed(best) / (1 + measured.step_seconds_spread / measured.step_seconds)
        return (1 - SPEED_FOR_MEMORY) * low

    def passed(self) -> list[Candidate]:
        """Return verified candidates that may win: those of this call, or the incumbent alone."""
        if (incumbent := self.incumbent) is not None:
            return [incumbent]
        return [
            candidate for candidate in self._verifications if candidate in self.verified and not self.why_not(candidate)
        ]

    def contender(self) -> Candidate | None:
        """Return the next candidate to verify.

        Returns:
            The first candidate if none has passed, or one that looks faster than the best verified one, or as fast with
                less memory. The incumbent comes before its first contender. None if no such candidate is left.
        """
        ranked = self.feasible()
        passed = self.passed()
        contenders = [candidate for candidate in ranked if candidate not in passed]
        if not passed:
            return next(iter(contenders), None)
        incumbent = self.incumbent
        if incumbent is not None:
            # a config of this call may be slower than the incumbent was, and faster than it is now
            new = any(one in self._new and not self.is_deprioritized(one) for one in contenders)
            return incumbent if new or self._looks_better(contenders, incumbent) else None
        best = max(passed, key=self._speed)
        return self._looks_better(contenders, best)

    def _looks_better(self, contenders: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """Return the first contender that may win against the best verified candidate, or None."""
        measured, speed = self.verified[best][1], self._speed(best)
        # a search measures for one second and verification for three, so a candidate within both uncertainties is
        # verified too
        near = 1 - RIVAL_SHARE if len(self._verifications) == 1 else 1.0
        for candidate in contenders:
            other, its_speed = self.measured[candidate][1], self._speed(candidate)
            if candidate in self._earlier:  # an earlier call has chosen another one; only its pace may differ
                if its_speed > speed:
                    return candidate
                continue
            if self.is_deprioritized(candidate):
                if (1 - RIVAL_SHARE) * its_speed > speed:
                    return candidate
                continue
            if its_speed > near * speed:
                return candidate
            if (candidate in self._new) == (best in self._new) and wins_by_memory(other, measured):
                return candidate
        return None

    def next_to_repeat(self) -> Candidate | None:
        """Return which of the two fastest verified candidates to measure again, in the order A, B, A.

        Alternating measurements distribute the machine's drift equally.

        Returns:
            None if this is done, or if one candidate is clearly faster.
        """
        ranked = sorted(self.passed(), key=lambda c: self.verified[c][1].samples_per_second, reverse=True)[:2]
        if len(ranked) < 2 or any(candidate not in self._verifications for candidate in ranked):
            return None
        first, second = (self.verified[candidate][1].samples_per_second for candidate in ranked)
        if second < (1 - RIVAL_SHARE) * first or sum(len(self._verifications[candidate]) for candidate in ranked) > 2:
            return None
        return min(ranked, key=list(self._verifications).index)

    def choose_least_memory(self, passed: list[Candidate]) -> Candidate:
        """Return the candidate with the lowest peak among those that win by it; else the fastest."""
        fastest = max(passed, key=lambda c: self.verified[c][1].samples_per_second)
        saving = [c for c in passed if wins_by_memory(self.verified[c][1], self.verified[fastest][1])]
        return min(saving, key=lambda c: self.verified[c][1].peak_bytes, default=fastest)


def allocated_bytes(measured: Measurement) -> int:
    """Return allocated bytes if known, else the peak.

    The NVML peak includes the allocator's cache and is similar for many candidates.
    """
    return measured.torch_allocated_bytes or measured.peak_bytes


def averaged(measurements: list[Measurement]) -> Measurement:
    """Merge measurements of one candidate: mean speed, highest peak, lowest clock and all clock limits.

    Other values come from the latest measurement.
    """
    step_seconds = sum(one.step_seconds for one in measurements) / len(measurements)
    latest = measurements[-1]
    scale = latest.step_seconds / step_seconds
    return dataclasses.replace(
        latest,
        step_seconds=step_seconds,
        samples_per_second=latest.samples_per_second * scale,
        tokens_per_second=latest.tokens_per_second * scale,
        peak_bytes=max(one.peak_bytes for one in measurements),
        alloc_retries=max(one.alloc_retries for one in measurements),
        sm_clock_mhz=min((one.sm_clock_mhz for one in measurements if one.sm_clock_mhz), default=None),
        clock_limits=list(dict.fromkeys(limit for one in measurements for limit in one.clock_limits)),
    )


def wins_by_memory(one: Measurement, best: Measurement) -> bool:
    """Return True if `one` has a clearly lower peak and is about as fast.

    Overlap of the intervals alone is not enough, because they can be wide.
    """
    return (
        SpeedRatio.of(one, best).is_noise
        and one.samples_per_second >= (1 - SPEED_FOR_MEMORY) * best.samples_per_second
        and one.peak_bytes < MEMORY_FOR_SPEED * best.peak_bytes
    )


# -- facts of a study --------------------------------------------------------------------------------------------------
#
# Facts about the verdict of a study. Terminal, `show`, its JSON, report and dashboard all read StudyFacts.


@dataclass(frozen=True)
class SpeedRatio:
    """Speed of one config divided by that of another, in samples per second, with its 95 % interval."""

    times: float
    low: float
    high: float
    samples_per_second: float
    other_samples_per_second: float

    @classmethod
    def of(cls, one: Measurement, other: Measurement) -> SpeedRatio:
        """Return the ratio of two measurements; its interval is that of the ends of their intervals."""
        (low, high), (other_low, other_high) = map(_interval, (one, other))
        times = one.samples_per_second / other.samples_per_second
        return cls(times, low / other_high, high / other_low, one.samples_per_second, other.samples_per_second)

    @property
    def speeds(self) -> str:
        """Text for the user, such as `114.6 against 102.3 samples/s, measured alike`."""
        return f"{self.samples_per_second:.4g} against {self.other_samples_per_second:.4g} samples/s, measured alike"

    @property
    def is_noise(self) -> bool:
        """Return True if the interval holds 1, so that neither is known to be faster."""
        return self.low <= 1 <= self.high


def _interval(one: Measurement) -> tuple[float, float]:
    """Return the 95 % interval of a throughput in samples per second."""
    share = one.step_seconds_spread / one.step_seconds
    return one.samples_per_second / (1 + share), one.samples_per_second / max(1e-9, 1 - share)


@dataclass(frozen=True)
class RunnerUp:
    """Another config that may win, and the winner's speed divided by its speed."""

    candidate: Candidate
    ratio: SpeedRatio
    peak_bytes: int
    verified: bool


def reference_name(stage: int, job: Job) -> str:
    """Return the name of torch's counterpart of a stage: 0 or 3."""
    return "FSDP2" if stage == 3 else "plain DDP" if job.ranks > 1 else "plain torch"


def _split_of(candidate: Candidate) -> str:
    """Return how a candidate splits its batch, like `mb4 ga2 ckpt`."""
    names = {MICRO_BATCH: candidate.micro_batch, ACCUMULATION: candidate.accumulation}
    return describe({**names, CHECKPOINTING: candidate.checkpointing})


@dataclass(frozen=True)
class Reference:
    """The winner's training without DeepSpeed: same model, data, global batch and optimizer."""

    name: str
    candidate: Candidate  # stage 0 stands for DDP, stage 3 for FSDP2
    outcome: Outcome
    ratio: SpeedRatio | None  # its speed divided by the winner's; None if it failed or trains something else
    training: str  # line of its certificate against the winner; empty if it failed
    over_bytes: int  # bytes of its peak above the ceiling

    @property
    def wins(self) -> bool:
        """True if it is faster than the winner beyond noise, and fits."""
        return self.ratio is not None and self.ratio.low > 1 and self.over_bytes <= 0

    def sentence(self, winner: Candidate) -> str:
        """Return what the reference says about the winner."""
        measured, ratio = self.outcome.measurement, self.ratio
        if measured is None:
            return f"{self.name} ({self.candidate}): {self.outcome.kind.value}, {self.outcome.reason}"
        figures = f"{measured.samples_per_second:.4g} samples/s, peak {format_bytes(measured.peak_bytes)}"
        if ratio is None:
            return f"{self.name} is not compared: it {self.training}"
        own = _split_of(self.candidate)
        split = f" ({own})" if own != _split_of(winner) else ""
        if self.wins:
            alike = self.candidate.stage == 3 and winner.stage > 0 and not (split or winner.offloaded)
            how = " (`autotune export --format fsdp`)" if alike else ""
            return (
                f"{self.name}{split} was {ratio.times:.2f}x as fast as the best DeepSpeed config: {figures}; "
                f"use it if your training allows{how}"
            )
        over = f", {format_bytes(self.over_bytes)} over the ceiling" if self.over_bytes > 0 else ""
        said = "below noise" if ratio.is_noise else "faster" if ratio.times > 1 else "slower"
        return f"{self.name}{split}, without DeepSpeed: {ratio.times:.2f}x the winner's speed ({said}), {figures}{over}"

    def to_json(self, winner: Candidate) -> dict[str, object]:
        """Return the reference as JSON data; its ratio is its speed divided by the winner's."""
        measured = self.outcome.measurement
        return {
            "name": self.name,
            "candidate": self.candidate.as_dict,
            "outcome": self.outcome.kind.value,
            "samples_per_second": measured.samples_per_second if measured else None,
            "peak_bytes": measured.peak_bytes if measured else self.outcome.peak_bytes,
            "ratio": vars(self.ratio) if self.ratio else None,
            "training": self.training,
            "wins": self.wins,
            "line": self.sentence(winner),
        }


@dataclass(frozen=True)
class StudyFacts:
    """Facts about the verdict of a finished or running study, each computed once.

    A rival was measured as the winner was: in the same call, and both in verification or both in the search. The pace of a
    machine may change in between.
    """

    winner: Record | None  # its measurement is the mean of the verifications of a call
    verified: bool
    best: Record | None  # the best that can still win: the winner, or the first of the leaderboard
    tied: tuple[RunnerUp, ...]  # the intervals overlap the winner's
    slower: tuple[RunnerUp, ...]  # clearly slower than the winner, fastest first
    faster: tuple[RunnerUp, ...]  # clearly faster than the winner, and not chosen: unverified, or measured since
    apart: tuple[Candidate, ...]  # may win, and were never measured as the winner was
    remarks: Mapping[int, str]  # by trial number: why a measured trial cannot win
    not_compared: Mapping[int, str]  # by trial number: why a measured trial that may win has no ratio to the winner
    own: Record | None  # trial of the script's own config
    own_ratio: SpeedRatio | None  # the winner's speed divided by that of the script's own config
    closest: Record | None  # the config closest to fitting, if memory is why nothing can win
    too_large: tuple[Candidate, ...]  # with a device OOM, or measured above the ceiling
    # (kind and reason of a trial without a measurement, count), most frequent first
    failures: tuple[tuple[str, int], ...]
    trials: int  # ended trials
    cut_short: bool  # nothing was measured, and the budget ended a trial
    call: Call  # the latest
    references: tuple[Reference, ...] = ()  # measured in the call that last verified the winner

    @property
    def next_best(self) -> RunnerUp | None:
        """Return the fastest rival that is clearly slower than the winner."""
        return self.slower[0] if self.slower else None

    @property
    def _winner_measured(self) -> Measurement:
        """Measurement of the winner. Call this only if there is a winner."""
        assert self.winner is not None
        assert self.winner.outcome is not None
        assert self.winner.outcome.measurement is not None
        return self.winner.outcome.measurement

    def remark(self, number: int) -> str:
        """Return why a measured trial cannot win or is not compared with the winner; empty if it is a rival."""
        return self.remarks.get(number) or self.not_compared.get(number, "")

    def _why_chosen(self) -> str:
        """Return why the winner was chosen among the configs that tie with it."""
        peak_bytes = self._winner_measured.peak_bytes
        ahead = [rival for rival in self.tied if rival.ratio.times < 1]
        if not ahead:
            return "it measured fastest"
        if all(peak_bytes < rival.peak_bytes for rival in self.tied):
            return "it needs least memory"
        if all(peak_bytes < rival.peak_bytes for rival in ahead):
            return "it needs less memory than those that measured faster"
        return "it is verified" if self.verified else "it is the least likely to fail verification"

    def _named(self, rival: RunnerUp) -> str:
        """Return a tied config, with the memory that it would save."""
        peak_bytes = self._winner_measured.peak_bytes
        if rival.peak_bytes >= MEMORY_FOR_SPEED * peak_bytes:
            return str(rival.candidate)
        unverified = "" if rival.verified else ", not verified"
        return f"{rival.candidate} ({format_bytes(peak_bytes - rival.peak_bytes)} less memory{unverified})"

    def comparison(self) -> list[str]:
        """Return sentences that compare the winner with the other configs that may win; empty without any."""
        lines = []
        if self.tied:
            others = counted(len(self.tied), "other")
            named = ", ".join(map(self._named, self.tied[:2])) + (", …" if len(self.tied) > 2 else "")
            lines.append(f"tied with {others} (difference below noise): {named}; chosen because {self._why_chosen()}")
        if self.next_best is not None:
            count = 1 + len(self.tied) + len(self.slower)
            slowest = max(rival.ratio.times for rival in (*self.slower, *self.tied))
            beyond, ratio = " that is not tied" if self.tied else "", self.next_best.ratio
            then, now = ratio.samples_per_second, self._winner_measured.samples_per_second
            alike = "" if 1 / SHOWN_DRIFT < then / now < SHOWN_DRIFT else f": {ratio.speeds}"
            lines.append(
                f"{format_change(ratio.times - 1)} against the next best{beyond} "
                f"({self.next_best.candidate}{alike}), {slowest:.1f}x the slowest of {count} measured that fit"
            )
            if not 1 / DRIFT < then / now < DRIFT:
                lines.append(
                    f"both were measured when the winner ran at {then:.4g} samples/s: the machine's speed has changed since"
                )
        for rival in self.faster[:3]:
            gain = 100 * (1 / rival.ratio.times - 1)
            why = "was measured after the winner was chosen" if rival.verified else "is not verified"
            lines.append(f"{rival.candidate} was {gain:.1f} % faster and {why}; run again to choose between them")
        if self.apart:
            others, were = counted(len(self.apart), "other config"), "was" if len(self.apart) == 1 else "were"
            lines.append(f"{others} that may win {were} never measured in one call with the winner: not compared")
        if self.winner is not None:
            lines += [one.sentence(self.winner.candidate) for one in self.references]
        return lines

    def to_json(self) -> dict[str, object]:
        """Return the facts as JSON data, trials by their numbers."""

        def rivals(found: Sequence[RunnerUp]) -> list[dict[str, object]]:
            return [{**vars(one), "candidate": one.candidate.as_dict, "ratio": vars(one.ratio)} for one in found]

        return {
            "winner": self.winner.number if self.winner else None,
            "verified": self.verified,
            "best": self.best.number if self.best else None,
            "margin": self.next_best.ratio.times - 1 if self.next_best else None,
            "next_best": rivals([self.next_best])[0] if self.next_best else None,
            "tied": rivals(self.tied),
            "slower": len(self.slower),
            "faster_unverified": rivals(self.faster),
            "cannot_win": {str(number): why for number, why in self.remarks.items()},
            "not_compared": {str(number): why for number, why in self.not_compared.items()},
            "own": self.own.number if self.own else None,
            "times_own": vars(self.own_ratio) if self.own_ratio else None,
            "closest": self.closest.number if self.closest else None,
            "stop_reason": self.call.ended,
            "budget_seconds": self.call.budget_seconds,
            "used_seconds": self.call.used_seconds,
            "references": [one.to_json(self.winner.candidate) for one in self.references] if self.winner else [],
            "lines": self.comparison(),
        }


def study_facts(
    records: Sequence[Record],
    job: Job,
    hardware: Hardware,
    *,
    winner: int | None = None,
    set_aside: Collection[int] = (),
    call: Call = NO_CALL,
    references: Sequence[Record] = (),
) -> StudyFacts:
    """Return the facts of a study.

    Args:
        records: all trials in order.
        hardware: gives the memory ceiling.
        winner: trial number of the stored winner. It is not the winner any more if it was rejected since, or if the
            ceiling is lower now.
        set_aside: numbers of trials outside the space of the latest call.
        call: the latest call.
        references: trials without DeepSpeed.
    """
    leaderboard, alike = Leaderboard(hardware, job), MeasuredAlike(records)
    chosen = next((one.candidate for one in records if one.number == winner), None)
    aside = {one.candidate for one in records if one.number in set_aside} - {chosen}
    leaderboard.replay_calls(records)
    for candidate in aside:
        leaderboard.reject(candidate, "not in the space of the latest call")
    at = chosen if chosen is not None and leaderboard.may_win(chosen) else None
    won = _as_measured(records, leaderboard, at)
    groups: dict[str, list[RunnerUp]] = {"tied": [], "slower": [], "faster": []}
    apart = []
    for other, (_, theirs) in leaderboard.measured.items():
        if at in (None, other) or not leaderboard.may_win(other):
            continue
        if (ratio := alike.ratio(at, other)) is None:
            apart.append(other)
        else:
            group = "tied" if ratio.is_noise else "slower" if ratio.times > 1 else "faster"
            groups[group].append(RunnerUp(other, ratio, theirs.peak_bytes, other in leaderboard.verified))
    tied, slower, faster = (tuple(sorted(found, key=lambda one: one.ratio.times)) for found in groups.values())
    own = next((one for one in reversed(records) if one.note == AS_IS), None)
    best = at if at is not None else next(filter(leaderboard.may_win, leaderboard.feasible()), None)
    ended = [(one, one.outcome) for one in records if one.outcome is not None and one.role != TRAINING]
    remarks = {one.number: text for one, end in ended if (text := leaderboard.remark(one.candidate, end))}
    not_compared = {
        one.number: why
        for one, end in ended
        if at is not None and end.measurement is not None and one.number not in remarks
        if (why := alike.why_not_compared(at, one))
    }
    failures = Counter(f"{one.kind.value}: {one.reason}" for _, one in ended if one.measurement is None and not one.ok)
    return StudyFacts(
        winner=won,
        verified=at in leaderboard.verified,
        best=_as_measured(records, leaderboard, best),
        tied=tied,
        slower=slower,
        faster=faster,
        apart=tuple(apart),
        remarks=remarks,
        not_compared=not_compared,
        own=own,
        own_ratio=alike.ratio(at, own.candidate) if own and own.outcome and own.outcome.measurement else None,
        closest=None
        if best is not None
        else _closest([one for one in records if one.number not in set_aside], hardware),
        too_large=tuple(
            one.candidate
            for one, end in ended
            if end.kind is not OutcomeKind.OOM_HOST and missing_bytes(end, hardware) is not None
        ),
        failures=tuple(failures.most_common()),
        trials=len(ended),
        cut_short=not leaderboard.measured and any(one.source is Source.BUDGET for _, one in ended),
        call=call,
        references=_references(references, won, job, hardware, alike) if won is not None else (),
    )


def _references(
    references: Sequence[Record], winner: Record, job: Job, hardware: Hardware, alike: MeasuredAlike
) -> tuple[Reference, ...]:
    """Return the references of the winner's latest verification; one that trains something else has no ratio."""
    found = []
    for record in references:
        theirs = alike.verification(winner.candidate, record.tuner)
        if theirs is None or record.outcome is None or samples(job, record.candidate) != samples(job, winner.candidate):
            continue
        measured, trace, training = record.outcome.measurement, record.outcome.trace, ""
        ratio = SpeedRatio.of(measured, theirs) if measured else None
        won = winner.outcome.trace if winner.outcome is not None else None
        if measured and trace and won:
            seen = compare(won, winner.candidate, trace, record.candidate, is_users=False)
            training, ratio = seen.line, None if seen.verdict is Verdict.DIFFERS else ratio
        over = measured.peak_bytes - hardware.ceiling_bytes if measured else 0
        name = reference_name(record.candidate.stage, job)
        found.append(Reference(name, record.candidate, record.outcome, ratio, training, over))
    return tuple(found)


class MeasuredAlike:
    """Measurements of a study, each with the call that took it. Only those of one call and one role are compared.

    A call is the work of one tuner. Tuners that worked at the same time count as one call, because the load of the machines
    was the same for both.

    Args:
        records: all trials in order.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._call_of_tuner = _calls(records)
        measurements: dict[tuple[str, int], dict[Candidate, list[Measurement]]] = {}
        for record in records:
            if (
                record.role in (SEARCH, VERIFY)
                and record.outcome is not None
                and record.outcome.measurement is not None
            ):
                here = measurements.setdefault((record.role, self.call(record)), {})
                # the search measures again only what has changed, as after an interruption: the latest counts
                before = here.get(record.candidate, []) if record.role == VERIFY else []
                here[record.candidate] = [*before, record.outcome.measurement]
        self._measured = {
            place: {candidate: averaged(found) for candidate, found in here.items()}
            for place, here in measurements.items()
        }

    def call(self, record: Record) -> int:
        """Return the number of the call that a trial belongs to, in order of their starts."""
        return self._call_of_tuner[record.tuner]

    def ratio(self, winner: Candidate | None, other: Candidate) -> SpeedRatio | None:
        """Return the winner's speed divided by another's, from the latest call that measured both alike.

        Verifications are longer and come first.

        Returns:
            None if no call has measured both alike, or if they are the same.
        """
        if winner is None or winner == other:
            return None
        for place in sorted(self._measured, key=lambda place: (place[0] == VERIFY, place[1]), reverse=True):
            here = self._measured[place]
            if winner in here and other in here:
                return SpeedRatio.of(here[winner], here[other])
        return None

    def verification(self, winner: Candidate, tuner: str | None) -> Measurement | None:
        """Return the winner's verification in a tuner's call; None unless it is the latest one."""
        calls = [call for role, call in self._measured if role == VERIFY and winner in self._measured[role, call]]
        if not calls or self._call_of_tuner.get(tuner) != max(calls):
            return None
        return self._measured[VERIFY, max(calls)][winner]

    def why_not_compared(self, winner: Candidate, record: Record) -> str:
        """Return why a measured trial of another config says nothing about the winner; empty if it does."""
        if record.candidate == winner:
            return ""
        call = self.call(record)
        if not any(winner in self._measured.get((role, call), {}) for role in (SEARCH, VERIFY)):
            return "of another call than the winner's: not compared"
        return "" if self.ratio(winner, record.candidate) else "not measured as the winner was: not compared"


def first_of_calls(records: Sequence[Record]) -> Iterator[tuple[bool, Record]]:
    """Yield (True if the trial is the first of a call after another one, trial)."""
    calls = _calls(records)
    for before, record in zip([None, *records], records, strict=False):
        yield before is not None and calls[before.tuner] != calls[record.tuner], record


def _calls(records: Sequence[Record]) -> dict[str | None, int]:
    """Return the number of the call of each tuner; tuners whose trials began in turns share one."""
    began: dict[str | None, list[str]] = {}
    for record in records:
        began.setdefault(record.tuner, []).append(record.started)
    calls, latest, number = {}, "", -1
    for tuner, starts in sorted(began.items(), key=lambda item: min(item[1])):
        if number < 0 or min(starts) >= latest:
            number += 1
        calls[tuner] = number
        latest = max(latest, *starts)
    return calls


def _as_measured(records: Sequence[Record], leaderboard: Leaderboard, candidate: Candidate | None) -> Record | None:
    """Return the record of a candidate's measurement, with the mean of its verifications."""
    if candidate is None:
        return None
    number, measured = leaderboard.measured[candidate]
    record = next(one for one in records if one.number == number)
    assert record.outcome is not None
    return dataclasses.replace(record, outcome=dataclasses.replace(record.outcome, measurement=measured))


def missing_bytes(outcome: Outcome, hardware: Hardware) -> int | None:
    """Return a lower bound of the bytes by which a config missed the ceiling.

    None if the config did not miss it, or failed for another reason.
    """
    if outcome.measurement is not None:
        over = outcome.measurement.peak_bytes - hardware.ceiling_bytes
        return over if over > 0 else None
    headroom = hardware.capacity_bytes - hardware.ceiling_bytes if outcome.kind is not OutcomeKind.OOM_HOST else 0
    return (outcome.missing_bytes or 0) + headroom if outcome.kind.is_oom else None


def _closest(records: Sequence[Record], hardware: Hardware) -> Record | None:
    """Return the trial closest to fitting: the furthest phase, then the fewest missing bytes. None if memory failed none."""
    order = [phase.value for phase in Phase]
    over = [
        (-order.index(record.outcome.phase.value), missing, record)
        for record in records
        if record.outcome is not None and (missing := missing_bytes(record.outcome, hardware)) is not None
    ]
    return min(over, key=lambda item: item[:2])[2] if over else None


def dashboard_note(facts: StudyFacts, number: int, why: str, shown: Record | None, hardware: Hardware) -> str:
    """Return a Markdown note that names the winner and explains why the dashboard may show another best trial.

    Args:
        facts: of the study.
        why: how the winner was chosen.
        shown: the dashboard's best trial.
    """
    lines = [f"**autotune's winner is trial {number}** ({why})."]
    if facts.winner is not None:
        lines += [f"It is {line}." if line.startswith("tied") else f"{line}." for line in facts.comparison()]
    if shown is not None and shown.number != number:
        lines.append(
            f"The best trial as this dashboard shows it, {shown.number}, {_why_not_shown(facts, shown, hardware)}"
        )
    lines.append(
        "Trials that did not fit are shown as pruned; `kind` says how each ended, and `over_gib` by how much it was above the "
        "memory ceiling. `autotune report` has the whole study on one page."
    )
    lines.append(
        "Read hyperparameter importances with care: a knob that exists only under another, like the ratio of an offload, is "
        "compared only over the trials that have it, and the search tries promising candidates more often than others."
    )
    return "\n\n".join(lines)


def _why_not_shown(facts: StudyFacts, shown: Record, hardware: Hardware) -> str:
    if shown.outcome and any(value > 0 for value in constraints(shown.outcome, hardware).values()):
        return "does not fit: it was recorded by an earlier version, or under another ceiling."
    if facts.winner is not None and facts.winner.candidate == shown.candidate:
        return "is the same config, as the search measured it."
    if why := facts.remark(shown.number):
        return f"is another config, which was faster in the search; {why}."
    return "is another config, which looked faster when it was measured; it is not the winner."
