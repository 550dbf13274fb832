"""Pool of candidates that may still be tried, and the reasons that exclude the others. Only measurements exclude."""

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
    """The candidates of a study, with the reason for each exclusion."""

    def __init__(self, candidates: list[Candidate], rules: Rules, host: Floats | None = None) -> None:
        """Index the candidates.

        Args:
            candidates: the candidates.
            rules: dominance rules for device memory.
            host: (n,) bytes that each candidate keeps in host memory; None if nothing is offloaded, or host and device
                are one.
        """
        self.candidates = candidates
        self.index = {candidate: i for i, candidate in enumerate(candidates)}
        self.open = np.ones(len(candidates), dtype=bool)
        # need at least as much memory as a candidate with an OOM
        self.too_large = np.zeros(len(candidates), dtype=bool)
        self.running = np.zeros(len(candidates), dtype=bool)  # peer tuners or other workers measure them now
        self._kept_back = self.running  # running candidates and similar ones
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
        """Return whether each candidate may be tried now, (n,)."""
        return self.open & ~self._kept_back

    def keep_back(self, running: Iterable[Candidate], kinds: NDArray[np.intp]) -> None:
        """Reserve candidates that run elsewhere and, until `let_alike`, candidates similar to them.

        Similar candidates have the same engine, which measures them one after the other, or the same kind.

        Args:
            running: the running candidates.
            kinds: (n,) kind of each candidate.
        """
        self.running = np.zeros_like(self.open)
        at = [self.index[candidate] for candidate in running if candidate in self.index]
        self.running[at] = True
        self._kept_back = self.running | np.isin(self.family, self.family[at]) | np.isin(kinds, kinds[at])

    def let_alike(self) -> bool:
        """Release candidates that are similar to running ones; return whether this adds any."""
        more = bool((self.open & self._kept_back & ~self.running).any())
        self._kept_back = self.running
        return more

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Close the candidate, and exclude the candidates that its outcome speaks against."""
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
        else:  # a hang, a signal or a host OOM would recur in the same engine
            if outcome.kind is Kind.OOM_HOST:
                self._rule_out_hungrier(candidate)
            self.rule_out(self.alike(candidate), f"same engine as {candidate}: {outcome.kind.value}")
            self._blame_place(candidate, outcome)

    def forgive(self, candidate: Candidate, outcome: Outcome) -> None:
        """Keep a candidate open whose failure is retryable.

        A second hang or crash closes the candidate without excluding any other, so that repeated calls make progress.
        """
        if outcome.kind.may_be_mended:
            if candidate in self._forgiven:
                self.close(candidate)
            self._forgiven.add(candidate)

    def alike(self, candidate: Candidate) -> Flags:
        """Return a mask of the candidates with the same engine."""
        at = self.index.get(candidate)
        return np.zeros_like(self.open) if at is None else self.family == self.family[at]

    def needing_no_less(self, candidate: Candidate, kind: Kind) -> Flags:
        """Return whether each candidate needs at least as much of the exhausted memory as the given one, (n,)."""
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
        if at is None or self.too_large[at]:  # the OOM that excluded it has already excluded all larger candidates
            return
        larger = self._dominance.needs_no_less(candidate)
        self.too_large |= larger
        self.rule_out(larger, f"needs no less memory than {candidate}, which ran out")

    def _rule_out_hungrier(self, candidate: Candidate) -> None:
        """Exclude candidates that offload at least as much as one with a host OOM, unless one of them has worked."""
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
        """Exclude batches that are at least as large as one that left too few steps of data.

        Nothing is excluded if such a batch has worked.
        """

        def no_smaller(other: Candidate) -> bool:
            return other.micro_batch * other.accumulation >= candidate.micro_batch * candidate.accumulation

        if not any(map(no_smaller, self._worked)):
            larger = np.array([no_smaller(other) for other in self.candidates])
            self.rule_out(larger, f"its batch is no smaller than that of {candidate}, which left too few steps")

    def _learn_refusal(self, candidate: Candidate, reason: str, how: str) -> None:
        """Exclude every candidate with the settings that all failures with this message share.

        After a single failure, or if a working candidate has the shared settings too, only the same engine is excluded.
        """
        refused = self._refused.setdefault(reason, [])
        refused.append(candidate)
        shared = set.intersection(*(set(one.family) for one in refused))
        if len(refused) == 1 or any(shared <= set(one.family) for one in self._worked):
            shared = set(candidate.family)
        alike = np.array([shared <= set(other.family) for other in self.candidates])
        self.rule_out(alike, f"{how}: {reason[:160]}")
