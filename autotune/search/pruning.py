"""Exclusion of candidates by outcomes of trials, each with its reason.

`CandidatePool.observe` excludes by the kind of a failure:

- Device OOM: the same engine with no smaller batch. The belief learns what it says of other engines.
- Host OOM: candidates of the same stage with no fewer bytes in host memory, and as other failures.
- Any other failure: the same engine. If several engines failed with one text, the settings that all of them share.

An exclusion by host memory or by shared settings needs that none of its candidates has worked.

Some OOMs exclude nothing:

- The first host OOM of a candidate in parallel trials is stored as interrupted, and the candidate is retried alone
  (`downgrade_first_failure` in `search/tuner.py`).
- A stored or a peer's OOM on a machine with clearly less memory (`Hardware.outgrew` in `problem/hardware.py`) is
  skipped by `TrialRecorder._learn` (`search/tuner.py`). The predictor still learns a device OOM of a search trial.

`Proposer.observe` (`search/proposer.py`) calls the pool after a search trial, also after a stored or a peer's one.
`Proposer.apply_verification_failure` calls it after an OOM in a verification or a resume trial.

Other effects of an OOM change the order of trials, and exclude no candidate for good. The predictor is calibrated, and the
belief takes the OOM as a lower bound of the peak (`Belief.forecast` in `search/belief.py`). After a verification that needs
too much memory, measured candidates that need as much rank last (`Leaderboard.is_deprioritized`), and a device OOM lowers
the memory limit of the stage. If nothing has fitted, `Proposer._last_resort` (`search/proposer.py`) ends the search earlier.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.predict.features import Flags, Floats, Places
from autotune.problem.candidate import Candidate, Value
from autotune.problem.knobs import FIRST_ORDER
from autotune.problem.outcome import Outcome, OutcomeKind, Source

# -- candidate pool ----------------------------------------------------------------------------------------------------


class CandidatePool:
    """The candidates of a study, with the reason for each exclusion."""

    def __init__(self, candidates: list[Candidate], host: Floats | None = None) -> None:
        """Index the candidates.

        Args:
            host: (n,) bytes that each candidate keeps in host memory; None if host and device are one.
        """
        self.candidates = candidates
        self.index = {candidate: i for i, candidate in enumerate(candidates)}
        self.open_mask = np.ones(len(candidates), dtype=bool)
        self.running = np.zeros(len(candidates), dtype=bool)  # peer tuners or other workers measure them now
        self._reserved = self.running  # running candidates and similar ones
        self.skipped: Counter[str] = Counter()
        self._host = host
        self._stage = np.array([candidate.stage for candidate in candidates])
        self._accumulation = np.array([candidate.accumulation for candidate in candidates])
        self.family = numbered(candidate.family for candidate in candidates)
        self._failed: dict[str, list[Candidate]] = {}  # by kind and text of the failure
        self._fixable: set[Candidate] = set()
        self._worked: list[Candidate] = []  # candidates of other spaces too

    @property
    def available_mask(self) -> Flags:
        """Return whether each candidate may be tried now, (n,)."""
        return self.open_mask & ~self._reserved

    def reserve(self, running: Iterable[Candidate], groups: NDArray[np.intp]) -> None:
        """Reserve candidates that run elsewhere and, until `release_similar`, candidates similar to them.

        Similar candidates have the same engine, which measures them one after the other, or the same first-order settings.

        Args:
            groups: (n,) number of each candidate's first-order settings (`first_order_key`).
        """
        self.running = np.zeros_like(self.open_mask)
        at = [self.index[candidate] for candidate in running if candidate in self.index]
        self.running[at] = True
        self._reserved = self.running | np.isin(self.family, self.family[at]) | np.isin(groups, groups[at])

    def release_similar(self) -> bool:
        """Release candidates that are similar to running ones; return whether this adds any."""
        more = bool((self.open_mask & self._reserved & ~self.running).any())
        self._reserved = self.running
        return more

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        """Close the candidate, and exclude other candidates by its outcome, which is never an interrupted one.

        `downgrade_first_failure` (`search/tuner.py`) marks the first host OOM beside another trial as interrupted. Its
        candidate is retried alone.
        """
        self.close(candidate)
        if outcome.kind is OutcomeKind.OK:
            self._worked.append(candidate)
        elif outcome.kind is OutcomeKind.OOM_DEVICE:
            self._exclude_larger(candidate, "ran out of memory")
        elif outcome.least_step_seconds is not None:
            self._exclude_larger(candidate, "was too slow")
        elif outcome.source is Source.STEPS:
            reason = f"its batch is no smaller than that of {candidate}, which left too few steps"
            self.exclude_sharing_cause(candidate, lambda other: other.rows_per_rank >= candidate.rows_per_rank, reason)
        elif outcome.source is not Source.TRACE:  # `exclude_sharing_cause` excludes what trains something else
            if outcome.kind is OutcomeKind.OOM_HOST and outcome.source is not Source.DEATH:
                self._exclude_larger_on_host(candidate)
            self._exclude_shared_settings(candidate, outcome)

    def _exclude_larger(self, candidate: Candidate, end: str) -> None:
        """Exclude candidates of the same engine with no smaller micro-batch and no fewer of them in a step.

        Fewer and larger micro-batches may take less time, as each one gathers, or reads from the host, all weights. They may
        also need less memory, as accumulation may have its own gradient buffer.
        """
        larger = no_smaller(self.candidates, candidate) & (self._accumulation >= candidate.accumulation)
        self.exclude(larger, f"same engine and no smaller batch than {candidate}, which {end}")

    def note_fixable(self, candidate: Candidate, outcome: Outcome) -> None:
        """Keep a candidate open whose failure may have been fixed between calls.

        A second hang or crash closes the candidate without excluding any other, so that repeated calls make progress.
        Trials that were too slow for earlier budgets close nothing.
        """
        if outcome.kind.may_be_fixed_between_calls and outcome.least_step_seconds is None:
            if candidate in self._fixable:
                self.close(candidate)
            self._fixable.add(candidate)

    def same_engine(self, candidate: Candidate) -> Flags:
        """Return a mask of the candidates with the same engine."""
        at = self.index.get(candidate)
        return np.zeros_like(self.open_mask) if at is None else self.family == self.family[at]

    def close(self, candidate: Candidate) -> None:
        """Remove a candidate from the open ones."""
        if (at := self.index.get(candidate)) is not None:
            self.open_mask[at] = False

    def exclude(self, mask: Flags, reason: str) -> None:
        """Exclude the open candidates in a mask, and count them under the reason."""
        if count := int((mask & self.open_mask).sum()):
            self.open_mask &= ~mask
            self.skipped[reason] += count

    def exclude_sharing_cause(
        self, candidate: Candidate, shares_cause: Callable[[Candidate], bool], reason: str
    ) -> None:
        """Exclude all candidates of a test, or only this one if a candidate of the test has worked."""
        self.close(candidate)
        if not any(map(shares_cause, self._worked)):
            self.exclude(np.array([shares_cause(other) for other in self.candidates], dtype=bool), reason)

    def _exclude_larger_on_host(self, candidate: Candidate) -> None:
        """Exclude candidates that need at least as much host memory as one with a host OOM, unless one of them has worked."""
        at = self.index.get(candidate)
        if at is None or self._host is None or not self._host[at]:
            return
        larger = (self._stage == self._stage[at]) & (self._host >= self._host[at])
        worked = [self.index[one] for one in self._worked if one in self.index]
        if not larger[worked].any():
            self.exclude(larger, f"offloads no less to the host than {candidate}, for which its memory was too small")

    def _exclude_shared_settings(self, candidate: Candidate, outcome: Outcome) -> None:
        """Exclude the engine, and every candidate with the settings that all failures with this text share.

        An exception tells its cause, so two failed engines suffice. A hang or a signal needs an engine more for each
        first-order knob in which the failed ones differ.
        """
        is_told = outcome.kind is OutcomeKind.INVALID or outcome.source is Source.EXCEPTION
        how = "DeepSpeed refuses" if outcome.kind is OutcomeKind.INVALID else outcome.kind.value
        reason = f"{how}: {outcome.reason[:160]}"
        self.exclude(self.same_engine(candidate), reason)
        failed = self._failed.setdefault(f"{outcome.kind} {_NUMBERS.sub('#', outcome.reason)}", [])
        failed.append(candidate)
        engines = {_settings(one) for one in failed}
        shared = frozenset.intersection(*engines)
        differing = {name for engine in engines for name, _ in engine - shared} & set(FIRST_ORDER)
        least = 1 if is_told else 1 + len(differing)
        if len(engines) > least and not any(shared <= _settings(one) for one in self._worked):
            self.exclude(np.array([shared <= _settings(other) for other in self.candidates]), reason)


def no_smaller(candidates: Sequence[Candidate], one: Candidate) -> Flags:
    """Return whether each candidate is the same engine with no smaller micro-batch, (n,)."""
    return np.array([other.family == one.family and other.micro_batch >= one.micro_batch for other in candidates])


def _settings(candidate: Candidate) -> frozenset[tuple[str, Value]]:
    """Return the settings of a candidate's engine, and if it offloads anything: the host or an op may be the cause."""
    return frozenset({*candidate.family, ("offloads", bool(candidate.offloaded))})


_NUMBERS = re.compile(r"\d+")  # sizes and addresses differ between failures with one cause


def numbered(keys: Iterable[object]) -> Places:
    """Return the number of each key in order of first appearance, (n,)."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)
