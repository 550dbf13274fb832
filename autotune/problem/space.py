"""Search space: the knobs of a study, their values, and the candidates that they make for a Job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autotune.errors import UserError
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, RUNG_KNOBS, Candidate, Value, is_read
from autotune.problem.job import Job
from autotune.problem.knobs import FIRST_ORDER, KNOBS, refusal

MAX_CANDIDATES = 2_000_000  # more would take minutes to enumerate


@dataclass(frozen=True)
class Domain:
    """Values of one knob, and the conditions under which it exists."""

    values: tuple[Value, ...]
    when: tuple[tuple[str, tuple[Value, ...]], ...] = ()
    is_range: bool = False  # written as from/to: a global batch may use any whole number in it
    fixed: bool = False  # set by the user: the tuner must not drop it

    def applies(self, knobs: dict[str, Value]) -> bool:
        return all(knobs.get(name) in allowed for name, allowed in self.when)


@dataclass(frozen=True)
class SearchSpace:
    """Knobs that a study may change, and keys that it fixes."""

    name: str
    about: str
    knobs: dict[str, Domain]
    text: str  # the YAML as read, stored in the study
    at_once: int | None = None  # how many second-order knobs may differ from their first values together; None: all
    lossy: bool = False  # may change arithmetic, so that losses may differ
    shipped: bool = False  # written for every DeepSpeed: keys that the installed version does not know are left out

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the knobs that need a new engine, in dependency order.

        Each follows the knobs that its `when` names and those that decide whether it is read.
        """
        done: list[str] = [name for name in ("zero_stage", "offload_optimizer", "offload_param") if name in self.knobs]
        rest = [name for name in self.knobs if name not in done and name not in RUNG_KNOBS]
        while rest:
            ready = [n for n in rest if all(c in done or c not in rest for c in self._before(n))]
            done += ready or rest
            rest = [] if not ready else [n for n in rest if n not in ready]
        return tuple(done)

    def _before(self, name: str) -> list[str]:
        decides = KNOBS[name].read.of if name in KNOBS else None
        return [*(condition for condition, _ in self.knobs[name].when), *([decides] if decides else [])]

    def families(self) -> Iterator[dict[str, Value]]:
        """Yield every distinct setting of the knobs that need a new engine, in canonical form."""
        seen = set()
        for knobs in self._grow({}, 0, self._most_at_once):
            key = tuple(sorted(knobs.items()))
            if key not in seen and not refusal(knobs):
                seen.add(key)
                yield knobs

    def why_refused(self) -> str:
        """Return the first reason why DeepSpeed refuses a setting of this space; empty if it refuses none."""
        return next((why for knobs in self._grow({}, 0, self._most_at_once) if (why := refusal(knobs))), "")

    def never_read(self) -> set[str]:
        """Return the knobs that DeepSpeed reads under no setting of the others."""
        unread = set(self.order)
        for knobs in self.families():
            unread -= knobs.keys()
            if not unread:
                break
        return unread

    @property
    def _most_at_once(self) -> int:
        return len(self.knobs) if self.at_once is None else self.at_once

    def _grow(self, knobs: dict[str, Value], at: int, may_leave: int) -> Iterator[dict[str, Value]]:
        """Yield settings that extend these; `may_leave` second-order knobs may still leave their first values."""
        if at == len(self.order):
            yield knobs
            return
        name = self.order[at]
        domain = self.knobs[name]
        if not domain.applies(knobs) or not is_read(name, knobs):
            yield from self._grow(knobs, at + 1, may_leave)
            return
        for value in domain.values:
            left = may_leave - (name not in FIRST_ORDER and value != domain.values[0])
            if left >= 0:
                yield from self._grow({**knobs, name: value}, at + 1, left)

    def rungs(self, job: Job) -> list[tuple[int, int]]:
        """Return the (micro-batch, accumulation) pairs that the job allows, ascending.

        With a global batch only exact factorisations micro-batch x accumulation x ranks are allowed.

        Raises:
            UserError: no pair meets the global batch.
        """
        micro = self.knobs.get(MICRO_BATCH, Domain((1,)))
        accumulation = self.knobs.get(ACCUMULATION, Domain((1,)))
        sizes = sorted(int(value) for value in micro.values)
        if job.global_batch_size is None:
            return sorted(itertools.product(sizes, sorted(int(value) for value in accumulation.values)))
        share = job.global_batch_size // job.ranks
        if micro.is_range:
            sizes = list(range(sizes[0], min(sizes[-1], share) + 1))
        pairs = [(size, share // size) for size in sizes if share % size == 0]
        if not accumulation.is_range and ACCUMULATION in self.knobs:
            pairs = [pair for pair in pairs if pair[1] in accumulation.values]
        if not pairs:
            raise UserError(
                f"a global batch of {job.global_batch_size} over {job.ranks} ranks cannot be made from the "
                f"micro-batches of space {self.name!r} ({sizes[0]} to {sizes[-1]}): "
                "change the batch (--global-batch-size) or the space"
            )
        return pairs

    def candidates(self, job: Job) -> list[Candidate]:
        """Return every distinct Candidate of the space for this job.

        Raises:
            UserError: there is none, or there are too many to list.
        """
        pairs = self.rungs(job)
        found = []
        for family in self.families():
            for micro_batch, accumulation in pairs:
                knobs = {**family, MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
                found.append(Candidate(tuple(sorted(knobs.items()))))
            if len(found) > MAX_CANDIDATES:
                raise UserError(
                    f"space {self.name!r} has over {MAX_CANDIDATES} candidates: give its ranges fewer values"
                )
        if not found:
            raise UserError(f"space {self.name!r} has no valid candidate: `autotune spaces validate` shows its knobs")
        return found
