"""Which candidates may still be tried, and why the others may not: what follows from measurements, whatever is predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from autotune.predict.knobs import Flags, Floats
from autotune.problem.candidate import Candidate, Value
from autotune.problem.outcome import Kind, Outcome, Source
from autotune.search.dominance import Dominance, HostDominance, Rules
from autotune.search.places import Places


class Openings:
    """The candidates of a study, those that are ruled out marked with their reason."""

    def __init__(self, candidates: list[Candidate], rules: Rules, host: Floats | None = None) -> None:
        """Args:
        host: (n,) bytes that each keeps in the host's memory; None: nothing is offloaded, or host and device are one.
        """
        self.candidates = candidates
        self.index = {candidate: i for i, candidate in enumerate(candidates)}
        self.open = np.ones(len(candidates), dtype=bool)
        self.too_large = np.zeros(len(candidates), dtype=bool)  # need no less than one that ran out
        self.running = np.zeros(len(candidates), dtype=bool)  # others measure them just now
        self._kept_back = self.running  # these, and what is like them
        self.skipped: Counter[str] = Counter()
        self._dominance = Dominance(candidates, rules)
        self._host = HostDominance(candidates, np.zeros(len(candidates)) if host is None else host)
        self._places = Places(candidates)
        families: dict[tuple[tuple[str, Value], ...], int] = {}
        self.family = np.array([families.setdefault(c.family, len(families)) for c in candidates])
        self._refused: dict[str, list[Candidate]] = {}
        self._forgiven: set[Candidate] = set()
        self._worked: list[Candidate] = []

    @property
    def free(self) -> Flags:
        """(n,) whether each may be tried now."""
        return self.open & ~self._kept_back

    def keep_back(self, running: Iterable[Candidate], kinds: NDArray[np.intp]) -> None:
        """Holds back what runs elsewhere and, until `let_alike`, what is like it: candidates of the same engine, which
        measures them one after the other there, and of the same kind.

        Args:
            kinds: (n,) each candidate's.
        """
        self.running = np.zeros_like(self.open)
        at = [self.index[candidate] for candidate in running if candidate in self.index]
        self.running[at] = True
        self._kept_back = self.running | np.isin(self.family, self.family[at]) | np.isin(kinds, kinds[at])

    def let_alike(self) -> bool:
        """Hands out what is like something that runs; whether that is more than before."""
        more = bool((self.open & self._kept_back & ~self.running).any())
        self._kept_back = self.running
        return more

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Closes the candidate, and what its Outcome speaks against."""
        self.close(candidate)
        if outcome.kind is Kind.OK:
            self._worked.append(candidate)
            if (at := self.index.get(candidate)) is not None:
                self._places.work(at)
        elif outcome.kind is Kind.OOM_DEVICE:
            self._rule_out_larger(candidate)
        elif outcome.source is Source.DEATH:
            self.rule_out(self.alike(candidate), f"same engine as {candidate}, which the tuner did not survive")
            self._blame_place(candidate, outcome)
        elif outcome.source is Source.STEPS:
            self._rule_out_larger_batches(candidate)
        elif outcome.kind is Kind.INVALID:
            self._learn_refusal(candidate, outcome.reason, "DeepSpeed refuses")
        elif outcome.kind is Kind.CRASH and outcome.source is Source.EXCEPTION:
            self._learn_refusal(candidate, outcome.reason, "crashes")
            self._blame_place(candidate, outcome)
        else:  # a hang, a signal or the host's memory: the same engine would end the same way
            if outcome.kind is Kind.OOM_HOST:
                self._rule_out_hungrier(candidate)
            self.rule_out(self.alike(candidate), f"same engine as {candidate}: {outcome.kind.value}")
            self._blame_place(candidate, outcome)

    def forgive(self, candidate: Candidate, outcome: Outcome) -> None:
        """The candidate may end otherwise now. One that hung or crashed twice even so is closed, and nothing with it: calls that
        begin again and again get on."""
        if outcome.kind.may_be_mended:
            if candidate in self._forgiven:
                self.close(candidate)
            self._forgiven.add(candidate)

    def alike(self, candidate: Candidate) -> Flags:
        """The candidates of the same engine."""
        at = self.index.get(candidate)
        return np.zeros_like(self.open) if at is None else self.family == self.family[at]

    def needing_no_less(self, candidate: Candidate, kind: Kind) -> Flags:
        """(n,) whether each needs at least as much as the candidate of the memory that ran out."""
        if kind is Kind.OOM_DEVICE:
            return self._dominance.needs_no_less(candidate)
        return self.alike(candidate) | self._host.needs_no_less(candidate)

    def close(self, candidate: Candidate) -> None:
        if (at := self.index.get(candidate)) is not None:
            self.open[at] = False

    def rule_out(self, mask: Flags, reason: str) -> None:
        if count := int((mask & self.open).sum()):
            self.open &= ~mask
            self.skipped[reason] += count

    def _rule_out_larger(self, candidate: Candidate) -> None:
        at = self.index.get(candidate)
        if at is None or self.too_large[at]:  # what ruled it out has ruled out all that needs no less than it
            return
        larger = self._dominance.needs_no_less(candidate)
        self.too_large |= larger
        self.rule_out(larger, f"needs no less memory than {candidate}, which ran out")

    def _rule_out_hungrier(self, candidate: Candidate) -> None:
        """Rules out what offloads no less to the host than one for which that was too small, unless some of it has worked."""
        hungrier = self._host.needs_no_less(candidate)
        if not any(hungrier[self.index[one]] for one in self._worked if one in self.index):
            self.too_large |= hungrier
            self.rule_out(
                hungrier, f"offloads no less to the host than {candidate}, for which its memory was too small"
            )

    def _blame_place(self, candidate: Candidate, outcome: Outcome) -> None:
        if (at := self.index.get(candidate)) is not None:
            blamed = self._places.fail(at, int(self.family[at]))
            self.rule_out(blamed, f"first-order settings like those of {candidate} and others: {outcome.kind.value}")

    def _rule_out_larger_batches(self, candidate: Candidate) -> None:
        """Rules out all batches of no fewer samples than one that left too few steps of the script's data, unless one worked."""

        def no_smaller(other: Candidate) -> bool:
            return other.micro_batch * other.accumulation >= candidate.micro_batch * candidate.accumulation

        if not any(map(no_smaller, self._worked)):
            larger = np.array([no_smaller(other) for other in self.candidates])
            self.rule_out(larger, f"its batch is no smaller than that of {candidate}, which left too few steps")

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
        self.rule_out(alike, f"{how}: {reason[:160]}")
