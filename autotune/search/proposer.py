"""What to try next: a few engines of each kind, then what Optuna's sampler advises; never what cannot fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import optuna

from autotune.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.hardware import Hardware
from autotune.job import Job
from autotune.outcome import Kind, Outcome
from autotune.search.study import StudyStore
from autotune.space import SearchSpace

FALLING = 0.97  # a rung this much slower than the family's best is a falling return


@dataclass(frozen=True)
class Proposal:
    candidate: Candidate
    note: str


class Proposer:
    """Holds what is still worth trying, and why the rest is not."""

    def __init__(
        self,
        candidates: list[Candidate],
        space: SearchSpace,
        job: Job,
        hardware: Hardware,
        store: StudyStore,
        seed: int,
    ) -> None:
        self.space, self.job, self.hardware, self.store = space, job, hardware, store
        self.open: dict[Candidate, None] = dict.fromkeys(candidates)
        self.families: dict[tuple[tuple[str, Value], ...], list[Candidate]] = {}
        for candidate in candidates:
            self.families.setdefault(candidate.family, []).append(candidate)
        self.skipped: Counter[str] = Counter()
        self.speed: dict[Candidate, float] = {}
        self._refused: dict[str, list[Candidate]] = {}
        self._worked: list[Candidate] = []
        self._seeds = self._seed_order()
        self._sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, n_startup_trials=4)
        self._known_trials: set[int] = set()
        self._shadow = optuna.create_study(direction="maximize", sampler=self._sampler)

    # -- learning ----------------------------------------------------------------------------------------------------

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Takes an Outcome in, and everything that follows from it about candidates not tried."""
        if not outcome.kind.says_something_of_the_candidate:
            return
        self.open.pop(candidate, None)
        if outcome.kind is Kind.OK:
            assert outcome.measurement is not None
            self.speed[candidate] = outcome.measurement.samples_per_second
            self._worked.append(candidate)
        elif outcome.kind is Kind.OOM_DEVICE:
            self._skip(
                lambda other: needs_no_less(other, candidate), f"needs no less memory than {candidate}, which ran out"
            )
        elif outcome.kind is Kind.INVALID:
            self._learn_refusal(candidate, outcome.reason)
        else:  # a hang, a crash or the host's memory: the same engine would end the same way
            self._skip(
                lambda other: other.family == candidate.family, f"same engine as {candidate}: {outcome.kind.value}"
            )

    def _skip(self, matches: Callable[[Candidate], bool], reason: str) -> None:
        for other in [other for other in self.open if matches(other)]:
            del self.open[other]
            self.skipped[reason] += 1

    def _learn_refusal(self, candidate: Candidate, reason: str) -> None:
        """DeepSpeed refused: what all candidates refused with this message share, and none that worked has, is out."""
        refused = self._refused.setdefault(reason, [])
        refused.append(candidate)
        shared = set.intersection(*(set(one.family) for one in refused))
        if len(refused) == 1 or any(shared <= set(one.family) for one in self._worked):
            shared = set(candidate.family)
        self._skip(lambda other: shared <= set(other.family), f"DeepSpeed refuses: {reason[:160]}")

    # -- proposing ---------------------------------------------------------------------------------------------------

    def next(self) -> Proposal | None:
        """A candidate for a new engine, or None where nothing is left."""
        while self._seeds:
            candidate = self._seeds.pop(0)
            if candidate in self.open:
                return Proposal(candidate, "one of each kind first")
        if not self.open:
            return None
        return self._advised()

    def next_rung(self, current: Candidate) -> Proposal | None:
        """The next candidate for the engine that just measured `current`, or None where climbing no longer pays."""
        rungs = [rung for rung in self.families[current.family] if rung in self.speed or rung in self.open]
        known = {rung: self.speed[rung] for rung in rungs if rung in self.speed}
        best = max(known, key=known.__getitem__, default=None)
        if best is None:
            return None
        higher = [
            rung for rung in rungs
            if rung in self.open and rung.micro_batch > current.micro_batch
            and (self.job.global_batch_size is not None or rung.accumulation == current.accumulation)
        ]  # fmt: skip
        if higher and known.get(current, 0.0) >= FALLING * known[best]:
            return Proposal(min(higher, key=lambda rung: rung.micro_batch), "next rung of the micro-batch ladder")
        longer = [
            rung for rung in rungs
            if rung in self.open and rung.micro_batch == best.micro_batch and rung.accumulation > best.accumulation
        ]  # fmt: skip
        if longer:
            return Proposal(
                max(longer, key=lambda rung: rung.accumulation), "longest accumulation at the best micro-batch"
            )
        return None

    def _seed_order(self) -> list[Candidate]:
        """The smallest candidate of one family of each kind, lightest treatment first."""
        kinds: dict[tuple[int, bool, str, str], Candidate] = {}
        for family in sorted(self.families.values(), key=lambda rungs: _burden(rungs[0])):
            first = min(family, key=lambda rung: (rung.micro_batch, rung.accumulation))
            kind = (first.stage, first.checkpointing, first.offload_optimizer, first.offload_param)
            kinds.setdefault(kind, first)
        plain = [first for kind, first in kinds.items() if kind[1:] == (False, "none", "none")]
        rest = sorted((first for first in kinds.values() if first not in plain), key=_burden)
        return [*plain, *rest[:3]]

    def _advised(self) -> Proposal:
        for trial in self.store.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
            if trial.number not in self._known_trials:
                self._known_trials.add(trial.number)
                self._shadow.add_trial(trial)
        asked = self._shadow.ask()
        wanted: dict[str, Value] = {}
        for name in (*self.space.order, MICRO_BATCH, ACCUMULATION):
            if name in self.space.knobs:
                wanted[name] = self._suggest(asked, name)
        self._shadow.tell(asked, state=optuna.trial.TrialState.FAIL)
        target = Candidate.of(wanted)
        nearest = min(self.open, key=lambda other: _distance(target, other))
        return Proposal(nearest, "Optuna's sampler")

    def _suggest(self, trial: optuna.Trial, name: str) -> Value:
        from autotune.search.study import distribution

        values = self.space.knobs[name].values
        kind = distribution(values, values[0])
        value: Value
        if isinstance(kind, optuna.distributions.CategoricalDistribution):
            value = trial.suggest_categorical(name, kind.choices)  # type: ignore[assignment]
        elif isinstance(kind, optuna.distributions.IntDistribution):
            value = trial.suggest_int(name, kind.low, kind.high, log=kind.log)
        else:
            assert isinstance(kind, optuna.distributions.FloatDistribution)
            value = trial.suggest_float(name, kind.low, kind.high, log=kind.log)
        return value


def _burden(candidate: Candidate) -> tuple[int, int, int]:
    """How much a candidate gives up for memory."""
    offloads = (candidate.offload_optimizer != "none") + (candidate.offload_param != "none")
    return (offloads + candidate.checkpointing, candidate.stage, offloads)


def _distance(wanted: Candidate, other: Candidate) -> float:
    """Between two settings: 1 for a different choice, the log2 ratio for numbers."""
    import math

    total = 0.0
    for name in {*wanted.as_dict, *other.as_dict}:
        a, b = wanted.get(name), other.get(name)
        if a == b:
            continue
        if name in (CHECKPOINTING, "zero_stage") or a is None or b is None or isinstance(a, bool | str):
            total += 4.0
        else:
            total += min(4.0, abs(math.log2(max(a, 1e-9) / max(b, 1e-9))))
    return total


_MORE_IS_MORE = ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", MICRO_BATCH)


def needs_no_less(candidate: Candidate, other: Candidate) -> bool:
    """Whether the candidate needs at least as much device memory as the other in every knob.

    Only what holds for every model is used: stage 1 keeps what stage 2 partitions; no other stages are compared, since
    each brings buffers of its own.
    """
    if candidate.stage != other.stage and (candidate.stage, other.stage) != (1, 2):
        return False
    mine, theirs = candidate.as_dict, other.as_dict
    for name in {*mine, *theirs}:
        a, b = mine.get(name), theirs.get(name)
        if a == b or name == "zero_stage":
            continue
        if name == ACCUMULATION:
            if candidate.accumulation == 1:  # accumulating may need a gradient buffer of its own
                return False
        elif name in _MORE_IS_MORE:
            if not isinstance(a, int | float) or not isinstance(b, int | float) or a < b:
                return False
        elif name == CHECKPOINTING or name in ("offload_optimizer", "offload_param"):
            if a not in (False, "none"):
                return False
        elif name == "overlap_comm":
            if a is not True:
                return False
        else:
            return False
    return True
