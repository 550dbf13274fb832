"""Leaderboard of a study: measured, verified and rejected candidates, their order, and the facts of its verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, describe, samples
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.knobs import FIRST_ORDER, LEVERS
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.search.certificate import Verdict, compare
from autotune.search.trials import AS_IS, NO_CALL, RESUME, SEARCH, TRAINING, VERIFY, Call, Record
from autotune.util.units import counted, format_bytes, format_change

# share of speed; closer verified candidates are measured alternately, because GPU clocks drift as much within minutes
RIVAL_SHARE = 0.05
# share of speed that a winner may lose for a peak that is lower by more than this share, if the intervals overlap
SPEED_FOR_MEMORY = 0.03
NOT_VERIFIED = "not verified"

Measured = tuple[int, Measurement]  # (trial number, measurement)


class Leaderboard:
    """Measured candidates of a study as one `run` call sees them: a function of the study's trials.

    Args:
        records: all trials in order.
        hardware: gives the memory ceiling.
        job: a winner must have its global batch size, if set.
        outside: candidates that are not in the call's space, and cannot win.
        began: number of the first trial of the call; None stands for the latest call of the records.
    """

    def __init__(
        self,
        records: Sequence[Record],
        hardware: Hardware,
        job: Job | None = None,
        *,
        outside: Collection[Candidate] = (),
        began: int | None = None,
    ) -> None:
        self._hardware, self._job, self._outside, self._began = hardware, job, outside, began
        self.ended = [record for record in records if record.outcome is not None and record.role != TRAINING]
        self.trials_now = [record for record in self.ended if began is not None and record.number >= began]
        self._calls = _calls(records)
        self._now = max(self._calls.values(), default=0) + (began is not None)
        ended = [(record, record.outcome) for record in self.ended if record.outcome is not None]
        # an OOM on a machine with clearly less memory does not count
        self._counted = [one for one in ended if not hardware.outgrew(one[1].kind, one[1].capacity_bytes)]
        self.verified: dict[Candidate, Measured] = {}
        self.searched: dict[Candidate, Measured] = {}  # latest measurement of the search
        self._turns: defaultdict[tuple[int, Candidate], list[Measurement]] = defaultdict(list)  # verifications by call
        # by role and call: the latest measurement of a search, the mean of the verifications
        self._means: defaultdict[tuple[str, int], dict[Candidate, Measurement]] = defaultdict(dict)
        for record, outcome in self._counted:
            measured, candidate, call = outcome.measurement, record.candidate, self.call(record)
            if measured is None or record.role == RESUME:
                continue
            latest = self.searched
            if record.role == VERIFY:
                self._turns[call, candidate].append(measured)
                measured, latest = averaged(self._turns[call, candidate]), self.verified
            latest[candidate] = record.number, measured
            self._means[record.role, call][candidate] = measured
        self.measured = self.searched | self.verified

    @cached_property
    def resumed(self) -> dict[Candidate, Outcome]:
        """Outcome of the latest resume trial of each candidate."""
        return {record.candidate: outcome for record, outcome in self._counted if record.role == RESUME}

    @cached_property
    def _failures(self) -> dict[Candidate, str]:
        """Failures of verifications and resume trials, for which a candidate cannot win."""
        found: dict[Candidate, str] = {}
        for record, outcome in self._counted:
            # an OOM would also end a resumed training; other failures may be errors of the save itself
            if record.role == RESUME and outcome.kind.is_oom:
                found.setdefault(record.candidate, f"it does not resume from a checkpoint: {outcome.reason}")
            elif record.role == VERIFY and not outcome.measurement and outcome.kind.is_attributable_to_candidate:
                found[record.candidate] = f"{outcome.kind.value}: {outcome.reason}"
        return found

    def call(self, record: Record) -> int:
        """Return the number of the call that a trial belongs to, in order of their starts.

        A call is the work of one tuner. Tuners that worked at the same time count as one call, because the load of the
        machines was the same for both.
        """
        if self._began is not None and record.number >= self._began:
            return self._now
        return self._calls[record.tuner]

    def mean_of(self, record: Record) -> Measurement:
        """Return the mean of a candidate's verifications in the call of one of them."""
        return self._verified_in(self.call(record))[record.candidate]

    def _verified_in(self, call: int) -> dict[Candidate, Measurement]:
        return self._means.get((VERIFY, call), {})

    def _is_of_another_batch(self, candidate: Candidate) -> bool:
        if self._job is None or self._job.global_batch_size is None:
            return False
        return candidate.rows_per_rank * self._job.data_ranks != self._job.global_batch_size

    # -- order -------------------------------------------------------------------------------------------------------

    @cached_property
    def incumbent(self) -> Candidate | None:
        """Return the choice of earlier calls, while this call has not verified it; None if there is none.

        Nothing wins against it before this call has verified it, too. The pace of a machine may change between calls:
        clocks, load, drivers.
        """
        earlier = sorted(call for role, call in self._means if role == VERIFY and call < self._now)
        choices = (self._choice(call) for call in reversed(earlier))
        chosen = next(filter(None, choices), None)
        return None if chosen is not None and self.verified_now(chosen) else chosen

    @cached_property
    def chosen(self) -> Candidate | None:
        """Return the verified candidate that wins: the incumbent, or the choice of this call; None if none has passed."""
        return self.incumbent or self._choice(self._now)

    def _passing(self, call: int) -> dict[Candidate, Measurement]:
        means = self._verified_in(call)
        return {candidate: measured for candidate, measured in means.items() if not self.why_not(candidate)}

    def _choice(self, call: int) -> Candidate | None:
        """Return the candidate with the lowest peak among those that win by it; else the fastest. None without any."""
        passing = self._passing(call)
        if not passing:
            return None
        fastest = max(passing, key=lambda c: passing[c].samples_per_second)
        saving = [c for c in passing if wins_by_memory(passing[c], passing[fastest])]
        return min(saving, key=lambda c: passing[c].peak_bytes, default=fastest)

    @cached_property
    def pace(self) -> float:
        """Return this call's speeds divided by those of earlier calls, by what was verified in both; 1 if nothing was."""
        now, before = self._verified_in(self._now), self._earlier
        ratios = [now[one].samples_per_second / before[one].samples_per_second for one in now if one in before]
        return statistics.median(ratios or [1.0])

    @cached_property
    def _earlier(self) -> dict[Candidate, Measurement]:
        """Latest verifications of earlier calls."""
        found: dict[Candidate, Measurement] = {}
        for role, call in sorted(self._means):
            if role == VERIFY and call < self._now:
                found |= self._means[role, call]
        return found

    def is_new(self, candidate: Candidate) -> bool:
        """Return True if the candidate's measurement is of this call."""
        role = VERIFY if candidate in self.verified else SEARCH
        return candidate in self._means.get((role, self._now), {})

    def _speed(self, candidate: Candidate) -> float:
        """Return samples per second at the pace of this call."""
        speed = self.measured[candidate][1].samples_per_second
        return speed if self.is_new(candidate) else speed * self.pace

    def verified_now(self, candidate: Candidate) -> bool:
        """Return True if this call has verified the candidate."""
        return candidate in self._verified_in(self._now)

    @cached_property
    def _least_failed(self) -> dict[tuple[int, tuple[str, ...]], float]:
        """Least allocated bytes of a candidate whose verification memory made fail, by stage and by what it offloads.

        A host OOM counts for all that offload the same, and a device OOM for all of the stage.
        """
        least: defaultdict[tuple[int, tuple[str, ...]], float] = defaultdict(lambda: math.inf)
        for record, outcome in self._counted:
            candidate, share = record.candidate, share_that_fits(outcome, self._hardware)
            if record.role not in (VERIFY, RESUME) or share is None or candidate not in self.searched:
                continue
            is_host = outcome.kind is OutcomeKind.OOM_HOST
            place = candidate.stage, candidate.offloaded if is_host else ()
            held = 0.0 if is_host else share * allocated_bytes(self.searched[candidate][1])
            least[place] = min(held, least[place])
        return least

    def is_deprioritized(self, candidate: Candidate) -> bool:
        """Return True if a measured candidate will probably fail verification."""
        if candidate in self.verified or candidate not in self.measured:
            return False
        held, least = allocated_bytes(self.measured[candidate][1]), self._least_failed
        return held >= min(least[candidate.stage, ()], least[candidate.stage, candidate.offloaded])

    @property
    def rejected(self) -> int:
        """Number of candidates that cannot win."""
        return sum(self.why_not(one) not in ("", NOT_VERIFIED) for one in {record.candidate for record in self.ended})

    def why_not(self, candidate: Candidate) -> str:
        """Return why a candidate is not a verified winner; empty if nothing prevents it."""
        if candidate in self._failures:
            return self._failures[candidate]
        if self._is_of_another_batch(candidate):  # the probe run of a script, while the job sets another batch
            return "its steps are of another global batch"
        if candidate in self._outside:
            return "not in the space of the latest call"
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

    @cached_property
    def feasible(self) -> list[Candidate]:
        """Candidates that may win, fastest first, doubted ones last."""
        able = filter(self.may_win, self.measured)
        return sorted(able, key=lambda one: (not self.is_deprioritized(one), self._speed(one)), reverse=True)

    @property
    def best(self) -> Candidate | None:
        """Return the best feasible candidate, or None."""
        return next(iter(self.feasible), None)

    def least_winning_speed(self) -> float:
        """Return the samples per second below which nothing wins in this call, neither by speed nor by thrift.

        Returns:
            0 without a measurement. Also 0 if an earlier call made the best one, and this call's pace is unknown.
        """
        best = self.best
        if best is None or (self.incumbent is not None and not self.is_new(best)):
            return 0.0
        measured = self.measured[best][1]
        low = self._speed(best) / (1 + measured.step_seconds_spread / measured.step_seconds)
        return (1 - SPEED_FOR_MEMORY) * low

    def contender(self) -> Candidate | None:
        """Return the next candidate to verify.

        Returns:
            The first candidate if none has passed, or one that looks faster than the best verified one, or as fast with
                less memory. The incumbent comes before its first contender. None if no such candidate is left.
        """
        passed = [self.incumbent] if self.incumbent is not None else list(self._passing(self._now))
        contenders = [candidate for candidate in self.feasible if candidate not in passed]
        if not passed:
            return next(iter(contenders), None)
        if self.incumbent is not None:
            # a config of this call may be slower than the incumbent was, and faster than it is now
            new = any(self.is_new(one) and not self.is_deprioritized(one) for one in contenders)
            return self.incumbent if new or self._looks_better(contenders, self.incumbent) else None
        return self._looks_better(contenders, max(passed, key=self._speed))

    def _looks_better(self, contenders: Sequence[Candidate], best: Candidate) -> Candidate | None:
        """Return the first contender that may win against the best verified candidate, or None."""
        measured, speed = self.verified[best][1], self._speed(best)
        # a search measures for one second and verification for three, so a candidate within both uncertainties is
        # verified too
        near = 1 - RIVAL_SHARE if len(self._verified_in(self._now)) == 1 else 1.0
        for candidate in contenders:
            needed = near * speed
            if candidate in self._earlier:  # an earlier call has chosen another one; only its pace may differ
                needed = speed
            elif self.is_deprioritized(candidate):
                needed = speed / (1 - RIVAL_SHARE)
            elif self.is_new(candidate) == self.is_new(best) and wins_by_memory(self.measured[candidate][1], measured):
                return candidate
            if self._speed(candidate) > needed:
                return candidate
        return None

    def next_to_repeat(self) -> Candidate | None:
        """Return the verified candidate to measure again, which shows the machine's drift; None if one was repeated.

        It is the fastest, or an earlier one that is as fast within RIVAL_SHARE. The order A, B, A distributes the drift equally.
        """
        passing = self._passing(self._now)
        if self.incumbent is not None or any(len(self._turns[self._now, one]) > 1 for one in passing):
            return None
        near = (1 - RIVAL_SHARE) * max((one.samples_per_second for one in passing.values()), default=0.0)
        return next((one for one, measured in passing.items() if measured.samples_per_second >= near), None)

    # -- comparison --------------------------------------------------------------------------------------------------

    def ratio(self, winner: Candidate | None, other: Candidate) -> SpeedRatio | None:
        """Return the winner's speed divided by another's, from the latest call that measured both alike.

        Only measurements of one call and one role are compared. Verifications are longer and come first. The winner's change
        of speed from the search to its verification is noise of speeds in the search.

        Returns:
            None if no call has measured both alike, or if they are the same.
        """
        if winner is None or winner == other:
            return None
        for role, call in sorted(self._means, key=lambda place: (place[0] == VERIFY, place[1]), reverse=True):
            here = self._means[role, call]
            if winner in here and other in here:
                ratio = SpeedRatio.of(here[winner], here[other])
                again = self._means.get((VERIFY, call), here).get(winner, here[winner])
                drift = SpeedRatio.of(again, here[winner]).times
                return dataclasses.replace(
                    ratio, low=ratio.low * min(drift, 1 / drift), high=ratio.high * max(drift, 1 / drift)
                )
        return None

    def verification(self, winner: Candidate, tuner: str | None) -> Measurement | None:
        """Return the winner's verification in a tuner's call; None unless it is the latest one."""
        latest = max((call for call, candidate in self._turns if candidate == winner), default=None)
        if latest is None or self._calls.get(tuner) != latest:
            return None
        return self._verified_in(latest)[winner]

    def why_not_compared(self, winner: Candidate, record: Record) -> str:
        """Return why a measured trial of another config says nothing about the winner; empty if it does."""
        if record.candidate == winner:
            return ""
        call = self.call(record)
        if not any(winner in self._means.get((role, call), {}) for role in (SEARCH, VERIFY)):
            return "of another call than the winner's: not compared"
        return "" if self.ratio(winner, record.candidate) else "not measured as the winner was: not compared"


def share_that_fits(outcome: Outcome, hardware: Hardware) -> float | None:
    """Return the share of the memory of a verification that would fit; None unless memory made it fail.

    An OOM and allocator retries show only that the peak was too high.
    """
    measured = outcome.measurement
    if measured is None:
        return 1.0 if outcome.kind.is_oom else None  # a hang or a crash says nothing about other candidates
    if measured.peak_bytes > hardware.ceiling_bytes:
        return hardware.ceiling_bytes / measured.peak_bytes
    return 1.0 if measured.alloc_retries else None


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


def allocated_bytes(measured: Measurement) -> int:
    """Return allocated bytes if known, else the peak.

    The NVML peak includes the allocator's cache and is similar for many candidates.
    """
    return measured.torch_allocated_bytes or measured.peak_bytes


def averaged(measurements: list[Measurement]) -> Measurement:
    """Merge measurements of one candidate: mean speed and highest peak.

    The difference of the speeds is noise of the mean. Other values come from the latest measurement.
    """
    times = [one.step_seconds for one in measurements]
    step_seconds, latest = statistics.fmean(times), measurements[-1]
    scale = latest.step_seconds / step_seconds
    return dataclasses.replace(
        latest,
        step_seconds=step_seconds,
        step_seconds_spread=math.hypot(latest.step_seconds_spread, max(times) - min(times)),
        samples_per_second=latest.samples_per_second * scale,
        tokens_per_second=latest.tokens_per_second * scale,
        peak_bytes=max(one.peak_bytes for one in measurements),
        alloc_retries=max(one.alloc_retries for one in measurements),
    )


def wins_by_memory(one: Measurement, best: Measurement) -> bool:
    """Return True if `one` has a clearly lower peak and is about as fast.

    Overlap of the intervals alone is not enough, because they can be wide.
    """
    return (
        SpeedRatio.of(one, best).is_noise
        and one.samples_per_second >= (1 - SPEED_FOR_MEMORY) * best.samples_per_second
        and one.peak_bytes < (1 - SPEED_FOR_MEMORY) * best.peak_bytes
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


class StudyFacts:
    """Facts about the verdict of a finished or running study: functions of its trials.

    A rival was measured as the winner was: in the same call, and both in verification or both in the search. The pace of a
    machine may change in between.

    Args:
        records: all trials in order.
        hardware: gives the memory ceiling.
        winner: trial number of the stored winner. It is not the winner any more if it was rejected since, or if the
            ceiling is lower now.
        set_aside: numbers of trials outside the space of the latest call.
        call: the latest call.
        references: trials without DeepSpeed.
    """

    def __init__(
        self,
        records: Sequence[Record],
        job: Job,
        hardware: Hardware,
        *,
        winner: int | None = None,
        set_aside: Collection[int] = (),
        call: Call = NO_CALL,
        references: Sequence[Record] = (),
    ) -> None:
        self._records, self._job, self._hardware, self.call = records, job, hardware, call
        self._set_aside, self._references = set_aside, references
        chosen = next((one.candidate for one in records if one.number == winner), None)
        outside = {one.candidate for one in records if one.number in set_aside} - {chosen}
        self._board = board = Leaderboard(records, hardware, job, outside=outside)
        self._at = chosen if chosen is not None and board.may_win(chosen) else None
        self.verified = self._at in board.verified
        self._ended = [(one, one.outcome) for one in board.ended if one.outcome is not None]
        self.trials = len(self._ended)
        self.own = next(
            (one for one in reversed(records) if one.note == AS_IS), None
        )  # trial of the script's own config

    def _as_measured(self, candidate: Candidate | None) -> Record | None:
        """Return the record of a candidate's measurement, with the mean of its verifications."""
        if candidate is None:
            return None
        number, measured = self._board.measured[candidate]
        record = next(one for one in self._records if one.number == number)
        assert record.outcome is not None
        return dataclasses.replace(record, outcome=dataclasses.replace(record.outcome, measurement=measured))

    @cached_property
    def winner(self) -> Record | None:
        """Trial of the winner; its measurement is the mean of the verifications of a call."""
        return self._as_measured(self._at)

    @cached_property
    def best(self) -> Record | None:
        """Trial of the best that can still win: the winner, or the first of the leaderboard."""
        return self._as_measured(self._at or self._board.best)

    @cached_property
    def _rivals(self) -> list[RunnerUp]:
        found = []
        for other in self._others:
            if ratio := self._board.ratio(self._at, other):
                peak_bytes = self._board.measured[other][1].peak_bytes
                found.append(RunnerUp(other, ratio, peak_bytes, other in self._board.verified))
        return sorted(found, key=lambda one: one.ratio.times)

    @property
    def _others(self) -> list[Candidate]:
        """Measured candidates that may win instead of the winner."""
        return [one for one in self._board.measured if self._at not in (None, one) and self._board.may_win(one)]

    @property
    def tied(self) -> tuple[RunnerUp, ...]:
        """Rivals whose intervals overlap the winner's."""
        return tuple(one for one in self._rivals if one.ratio.is_noise)

    @property
    def slower(self) -> tuple[RunnerUp, ...]:
        """Rivals that are clearly slower than the winner, fastest first."""
        return tuple(one for one in self._rivals if one.ratio.low > 1)

    @property
    def faster(self) -> tuple[RunnerUp, ...]:
        """Rivals that are clearly faster than the winner, and not chosen: unverified, or measured since."""
        return tuple(one for one in self._rivals if one.ratio.high < 1)

    @property
    def apart(self) -> list[Candidate]:
        """Candidates that may win, and were never measured as the winner was."""
        return [one for one in self._others if self._board.ratio(self._at, one) is None]

    @cached_property
    def remarks(self) -> dict[int, str]:
        """By trial number: why a measured trial cannot win."""
        texts = {one.number: self._board.remark(one.candidate, outcome) for one, outcome in self._ended}
        return {number: text for number, text in texts.items() if text}

    @cached_property
    def not_compared(self) -> dict[int, str]:
        """By trial number: why a measured trial that may win has no ratio to the winner."""
        if self._at is None:
            return {}
        measured = [one for one, outcome in self._ended if outcome.measurement is not None]
        texts = {one.number: self._board.why_not_compared(self._at, one) for one in measured}
        return {number: text for number, text in texts.items() if text and number not in self.remarks}

    @property
    def winning(self) -> Measurement | None:
        """Measurement of the winner."""
        return self._board.measured[self._at][1] if self._at is not None else None

    @property
    def gains(self) -> list[tuple[list[str], float]]:
        """Parts of `own_ratio`, with the knobs of each: of all but the levers, and of each lever; empty without levers."""
        (base, levers), ratio = self.levers, self.own_ratio
        if not levers or ratio is None or self.own is None:
            return []
        own = self.own.candidate
        first = [name for name in FIRST_ORDER if base.get(name, False) != own.get(name, False)]
        return [(first, ratio.times / math.prod(levers.values())), *(([name], gain) for name, gain in levers.items())]

    @property
    def levers(self) -> tuple[Candidate, dict[str, float]]:
        """The winner without its levers, and by lever the ratio of the speeds with it and without."""
        at, gains = self._at or Candidate(()), dict[str, float]()
        for name in LEVERS[::-1]:
            base = Candidate(tuple(one for one in at.knobs if one[0] != name))
            if ratio := self._board.ratio(at, base):
                at, gains[name] = base, ratio.times
        return at, gains

    @property
    def own_ratio(self) -> SpeedRatio | None:
        """The winner's speed divided by that of the script's own config."""
        if self.own is None or self.own.outcome is None or self.own.outcome.measurement is None:
            return None
        return self._board.ratio(self._at, self.own.candidate)

    @cached_property
    def closest(self) -> Record | None:
        """Trial closest to fitting, if memory is why nothing can win: the furthest phase, then the fewest missing bytes."""
        order, found = [phase.value for phase in Phase], []
        for record, outcome in self._ended:
            missing = missing_bytes(outcome, self._hardware)
            if missing is not None and record.number not in self._set_aside:
                found.append((-order.index(outcome.phase.value), missing, record))
        if self.best is not None or not found:
            return None
        return min(found, key=lambda item: item[:2])[2]

    @property
    def too_large(self) -> tuple[Candidate, ...]:
        """Candidates with a device OOM, or measured above the ceiling."""
        device = [(one, outcome) for one, outcome in self._ended if outcome.kind is not OutcomeKind.OOM_HOST]
        return tuple(one.candidate for one, outcome in device if missing_bytes(outcome, self._hardware) is not None)

    @property
    def failures(self) -> list[tuple[str, int]]:
        """(kind and reason of a trial without a measurement, count), most frequent first."""
        failed = [outcome for _, outcome in self._ended if outcome.measurement is None and not outcome.ok]
        return Counter(f"{one.kind.value}: {one.reason}" for one in failed).most_common()

    @property
    def cut_short(self) -> bool:
        """True if nothing was measured, and the budget ended a trial."""
        return not self._board.measured and any(one.source is Source.BUDGET for _, one in self._ended)

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """References of the winner's latest verification; one that trains something else has no ratio."""
        return tuple(filter(None, map(self._reference, self._references)))

    def _reference(self, record: Record) -> Reference | None:
        winner, job = self.winner, self._job
        if winner is None or winner.outcome is None or record.outcome is None:
            return None
        theirs = self._board.verification(winner.candidate, record.tuner)
        if theirs is None or samples(job, record.candidate) != samples(job, winner.candidate):
            return None
        name, training = reference_name(record.candidate.stage, job), ""
        measured, trace, won = record.outcome.measurement, record.outcome.trace, winner.outcome.trace
        if measured is None:
            return Reference(name, record.candidate, record.outcome, None, "", 0)
        ratio: SpeedRatio | None = SpeedRatio.of(measured, theirs)
        if trace and won:
            seen = compare(won, winner.candidate, trace, record.candidate, is_users=False)
            training, ratio = seen.line, None if seen.verdict is Verdict.DIFFERS else ratio
        over = measured.peak_bytes - self._hardware.ceiling_bytes
        return Reference(name, record.candidate, record.outcome, ratio, training, over)

    @property
    def next_best(self) -> RunnerUp | None:
        """Return the fastest rival that is clearly slower than the winner."""
        return self.slower[0] if self.slower else None

    def remark(self, number: int) -> str:
        """Return why a measured trial cannot win or is not compared with the winner; empty if it is a rival."""
        return self.remarks.get(number) or self.not_compared.get(number, "")

    def _why_chosen(self, peak_bytes: int) -> str:
        """Return why the winner, with this peak, was chosen among the configs that tie with it."""
        ahead = [rival for rival in self.tied if rival.ratio.times < 1]
        if not ahead:
            return "it measured fastest"
        if all(peak_bytes < rival.peak_bytes for rival in self.tied):
            return "it needs least memory"
        if all(peak_bytes < rival.peak_bytes for rival in ahead):
            return "it needs less memory than those that measured faster"
        return "it is verified" if self.verified else "it is the least likely to fail verification"

    def _named(self, rival: RunnerUp, peak_bytes: int) -> str:
        """Return a tied config, with the memory that it would save against the winner's peak."""
        if rival.peak_bytes >= (1 - SPEED_FOR_MEMORY) * peak_bytes:
            return str(rival.candidate)
        unverified = "" if rival.verified else ", not verified"
        return f"{rival.candidate} ({format_bytes(peak_bytes - rival.peak_bytes)} less memory{unverified})"

    def comparison(self) -> list[str]:
        """Return sentences that compare the winner with the other configs that may win; empty without any."""
        lines, winning = [], self.winning
        if self._at is None or winning is None:
            return []
        if self.tied:
            others, peak = counted(len(self.tied), "other"), winning.peak_bytes
            named = ", ".join(self._named(one, peak) for one in self.tied[:2]) + (", …" if len(self.tied) > 2 else "")
            lines.append(
                f"tied with {others} (difference below noise): {named}; chosen because {self._why_chosen(peak)}"
            )
        if self.next_best is not None:
            beyond, ratio = " that is not tied" if self.tied else "", self.next_best.ratio
            then, now = ratio.samples_per_second, winning.samples_per_second
            alike = "" if f"{then:.3g}" == f"{now:.3g}" else f": {ratio.speeds}"
            lines.append(
                f"{format_change(ratio.times - 1)} against the next best{beyond} ({self.next_best.candidate}{alike})"
            )
        lines += self.better
        if self.apart:
            lines.append(
                f"not compared with {counted(len(self.apart), 'other config')}, which no call measured together with the winner"
            )
        return lines + [one.sentence(self._at) for one in self.references]

    @property
    def better(self) -> list[str]:
        """Sentences about configs that were clearly faster than the winner."""
        lines = []
        for rival in self.faster[:3]:
            gain = 100 * (1 / rival.ratio.times - 1)
            why = "was measured after the winner was chosen" if rival.verified else "is not verified"
            lines.append(f"{rival.candidate} was {gain:.1f} % faster and {why}; run again to choose between them")
        return lines

    def to_json(self) -> dict[str, object]:
        """Return the facts as JSON data, trials by their numbers."""

        def rivals(found: Sequence[RunnerUp]) -> list[dict[str, object]]:
            return [{**vars(one), "candidate": one.candidate.as_dict, "ratio": vars(one.ratio)} for one in found]

        return {
            "best": self.best.number if self.best else None,
            "next_best": rivals([self.next_best])[0] if self.next_best else None,
            "tied": rivals(self.tied),
            "faster_unverified": rivals(self.faster),
            "cannot_win": {str(number): why for number, why in self.remarks.items()},
            "not_compared": {str(number): why for number, why in self.not_compared.items()},
            "own": self.own.number if self.own else None,
            "times_own": vars(self.own_ratio) if self.own_ratio else None,
            "closest": self.closest.number if self.closest else None,
            "references": [one.to_json(self.winner.candidate) for one in self.references] if self.winner else [],
            "comparison": self.comparison(),
        }


def missing_bytes(outcome: Outcome, hardware: Hardware) -> int | None:
    """Return a lower bound of the bytes by which a config missed the ceiling.

    None if the config did not miss it, or failed for another reason.
    """
    if outcome.measurement is not None:
        over = outcome.measurement.peak_bytes - hardware.ceiling_bytes
        return over if over > 0 else None
    headroom = hardware.capacity_bytes - hardware.ceiling_bytes if outcome.kind is not OutcomeKind.OOM_HOST else 0
    return (outcome.missing_bytes or 0) + headroom if outcome.kind.is_oom else None
