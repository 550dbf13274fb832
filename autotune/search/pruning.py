"""Exclusion of candidates by outcomes of trials, each with its reason.

`CandidatePool.observe` excludes by the kind of a failure:

- Device OOM: candidates of the same stage that surely need at least as much (`Dominance`).
- Host OOM: candidates that surely need at least as much host memory, and as other failures.
- Any other failure: the same engine. If several engines failed with one text, the settings that all of them share.

An exclusion by host memory or by shared settings needs that none of its candidates has worked.

Some OOMs exclude nothing:

- The first host OOM of a candidate in parallel trials is stored as interrupted, and the candidate is retried alone
  (`downgrade_first_failure` in `search/tuner.py`).
- A stored or a peer's OOM on a machine with clearly less memory (`Hardware.outgrew` in `problem/hardware.py`) is
  skipped by `TrialRecorder._learn` (`search/tuner.py`). The predictor still learns a device OOM of a search trial.
- A candidate outside this call's space has no place in the pool.

`Proposer.observe` (`search/proposer.py`) calls the pool after a search trial, also after a stored or a peer's one.
`Proposer.apply_verification_failure` calls it after an OOM in a verification or a resume trial.

Other effects of an OOM change the order of trials, and exclude no candidate for good. The predictor is calibrated, and the
belief takes the OOM as a lower bound of the peak (`Belief.forecast` in `search/belief.py`). After a verification that needs
too much memory, measured candidates that need as much rank last (`Leaderboard.is_deprioritized`), and a device OOM lowers
the memory limit of the stage. After a host OOM, `FallbackSchedule` (`search/proposer.py`) tries only candidates of that
stage that offload less, so a search in which nothing fits may end earlier.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.predict.features import Flags, Floats, Places
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, EXPANDABLE, MICRO_BATCH, Candidate, Value
from autotune.problem.knobs import FIRST_ORDER, OFFLOAD_RATIO, OFFLOADING
from autotune.problem.outcome import Outcome, OutcomeKind, Source

# -- candidate pool ----------------------------------------------------------------------------------------------------


class CandidatePool:
    """The candidates of a study, with the reason for each exclusion."""

    def __init__(self, candidates: list[Candidate], rules: DominanceRules, host: Floats | None = None) -> None:
        """Index the candidates.

        Args:
            rules: dominance rules for device memory.
            host: (n,) bytes that each candidate keeps in host memory; None if host and device are one.
        """
        self.candidates = candidates
        self.index = {candidate: i for i, candidate in enumerate(candidates)}
        self.open_mask = np.ones(len(candidates), dtype=bool)
        self.running = np.zeros(len(candidates), dtype=bool)  # peer tuners or other workers measure them now
        self._reserved = self.running  # running candidates and similar ones
        self.skipped: Counter[str] = Counter()
        self._dominance = Dominance(candidates, rules, host)
        self._micro_batch = np.array([candidate.micro_batch for candidate in candidates])
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
            self._exclude_larger(candidate)
        elif outcome.least_step_seconds is not None:
            self._exclude_slower(candidate)
        elif outcome.source is Source.STEPS:
            reason = f"its batch is no smaller than that of {candidate}, which left too few steps"
            self.exclude_sharing_cause(candidate, lambda other: other.rows_per_rank >= candidate.rows_per_rank, reason)
        elif outcome.source is not Source.TRACE:  # `exclude_sharing_cause` excludes what trains something else
            if outcome.kind is OutcomeKind.OOM_HOST and outcome.source is not Source.DEATH:
                self._exclude_larger_on_host(candidate)
            self._exclude_shared_settings(candidate, outcome)

    def _exclude_slower(self, candidate: Candidate) -> None:
        """Exclude candidates of the same engine with no smaller micro-batch and no fewer of them in a step.

        Fewer and larger micro-batches may take less time, as each one gathers, or reads from the host, all weights.
        """
        slower = self.same_engine(candidate) & (self._micro_batch >= candidate.micro_batch)
        slower &= self._accumulation >= candidate.accumulation
        self.exclude(slower, f"same engine and no smaller batch than {candidate}, which was too slow")

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

    def _exclude_larger(self, candidate: Candidate) -> None:
        """Exclude candidates that need at least as much device memory as one with a device OOM."""
        at = self.index.get(candidate)
        if at is not None:
            larger = self._dominance.at_least_as_large(at)
            self.exclude(larger, f"needs no less memory than {candidate}, which ran out")

    def _exclude_larger_on_host(self, candidate: Candidate) -> None:
        """Exclude candidates that need at least as much host memory as one with a host OOM, unless one of them has worked."""
        at = self.index.get(candidate)
        if at is None:
            return
        larger = self._dominance.at_least_as_large(at, OutcomeKind.OOM_HOST)
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


def _settings(candidate: Candidate) -> frozenset[tuple[str, Value]]:
    """Return the settings of a candidate's engine, and if it offloads anything: the host or an op may be the cause."""
    return frozenset({*candidate.family, ("offloads", bool(candidate.offloaded))})


_NUMBERS = re.compile(r"\d+")  # sizes and addresses differ between failures with one cause


def numbered(keys: Iterable[object]) -> Places:
    """Return the number of each key in order of first appearance, (n,)."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.intp)


# -- dominance ---------------------------------------------------------------------------------------------------------
#
# Find candidates that need at least as much device memory as a failed one, by rules that hold for every model.
#
# Some settings that look thriftier need more memory. The following cases were seen on measured tables or in DeepSpeed's
# source and are therefore no rules:
#
# - Stage 2 may need more than stage 1: with large buckets, or in 32 bits on one rank.
# - On CPU ranks, whose host and device are one, offloading needs more memory. At stage 2, malloc may keep more for many
#   small micro-batches than a few larger ones need (the table of the encoder's script).
# - An offloaded optimizer stages a whole gradient on its way to the host. If many ranks share the optimizer states, the
#   gradient is larger than the states.
# - Stage 1 keeps gradients that are larger than its bucket in place, so a larger bucket may need less.
# - Overlap uses a second bucket only at stages 1 and 2. On CPU ranks, peaks vary by about one bucket between
#   measurements.
# - A split optimizer keeps whole sub-groups on the device, so larger sub-groups may leave fewer there.

MORE_IS_MORE = (MICRO_BATCH, "reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
# Settings that save memory. Expandable segments have fewer holes than segments of fixed size.
_SPARES = {"offload_optimizer": ("cpu", "nvme"), "offload_param": ("cpu", "nvme"), EXPANDABLE: (True,)}
# Bytes per parameter for master weights and Adam's states; other optimizers have at most as much. Bytes per element of
# a gradient on its way to the host.
_STATES, _STAGED = 12.0, 4.0


@dataclass(frozen=True)
class DominanceRules:
    """Rules that hold for a job on a machine."""

    spared_by: tuple[str, ...] = OFFLOADING  # kinds of offloading that always save device memory
    counts_steps: bool = False  # True if stage 2 may need less with fewer accumulation steps
    overlap_doubles: bool = True  # True if the second bucket exceeds the variation of peaks

    @classmethod
    def for_device(cls, device: str, ranks: int = 1, trace: Trace | None = None) -> DominanceRules:
        """Return the rules of a device, "cuda" or "cpu".

        Args:
            ranks: number of ranks.
            trace: the model's trace; None if its sizes are unknown.
        """
        if device != "cuda":
            return cls((), counts_steps=True, overlap_doubles=False)
        states = _STATES * sum(trace.parameters) / ranks if trace else 0.0
        return cls(OFFLOADING if trace and states / 2 > _STAGED * trace.largest else ("offload_param",))


EVERY_RULE = DominanceRules()


class Dominance:
    """Compare the memory need of one candidate with all others at once.

    Each stage has its own buffers, so candidates of different stages are not compared. Knobs that may raise or lower
    memory must be equal.

    A candidate needs at least as much host memory under two further conditions. At least the same parts are offloaded to
    the same places, and the memory estimate counts no fewer bytes. Micro-batches and buckets are on the device and do not
    matter.

    Args:
        host: (n,) bytes in host memory; 0 if nothing is offloaded, which excludes the candidate from comparison. None if
            host and device are one.
    """

    def __init__(
        self, candidates: Sequence[Candidate], rules: DominanceRules = EVERY_RULE, host: Floats | None = None
    ) -> None:
        self._host = host
        self._where = [np.array([str(c.get(name, "none")) for c in candidates]) for name in OFFLOADING]
        spares = {name: kinds for name, kinds in _SPARES.items() if name not in OFFLOADING or name in rules.spared_by}
        handled = {
            *MORE_IS_MORE,
            *spares,
            ACCUMULATION,
            CHECKPOINTING,
            "overlap_comm",
        }  # the stage stays among the other knobs
        handled |= {OFFLOAD_RATIO} if "offload_optimizer" in spares else set()
        self._rules = rules
        self._stage = np.array([c.stage for c in candidates])
        self._accumulation = np.array([c.accumulation for c in candidates])
        # -1 if the candidate lacks the knob: DeepSpeed's default or the user's config decides
        self._more = {name: np.array([float(c.get(name, -1)) for c in candidates]) for name in MORE_IS_MORE}
        # number of the saving setting; 0 if the candidate does not save
        self._spares = [
            np.array([kinds.index(c.get(name)) + 1 if c.get(name) in kinds else 0 for c in candidates])
            for name, kinds in spares.items()
        ]
        self._checkpointed = np.array([c.checkpointed_share for c in candidates])
        # requested shares of the optimizer that go to the host
        offloading = [candidate.offload_optimizer != "none" for candidate in candidates]
        requested = np.array([float(candidate.get(OFFLOAD_RATIO, 1.0)) for candidate in candidates])
        self._offload_ratios = np.where(offloading, requested, 0.0)
        self._overlap = np.array([{True: 1.0, False: 0.0}.get(c.get("overlap_comm"), -1.0) for c in candidates])
        self._others = numbered(tuple(item for item in c.knobs if item[0] not in handled) for c in candidates)

    def at_least_as_large(self, at: int, kind: OutcomeKind = OutcomeKind.OOM_DEVICE) -> Flags:
        """Return whether each candidate needs at least as much of the exhausted memory as the one at a place, (n,)."""
        if kind is OutcomeKind.OOM_HOST and self._host is not None:
            found = (self._stage == self._stage[at]) & (self._host >= self._host[at]) & (self._host[at] > 0)
            for where in self._where:
                found &= (where == where[at]) | (where[at] == "none")
            return np.asarray(found)
        found = self._others == self._others[at]  # the other knobs include the stage
        # accumulation may need its own gradient buffer
        found &= (self._accumulation == self._accumulation[at]) | (self._accumulation > 1)
        if self._rules.counts_steps and self._stage[at] == 2:
            found &= self._accumulation >= self._accumulation[at]
        for name, more in self._more.items():
            keeps = name == "reduce_bucket_size" and self._stage[at] == 1
            found &= more == more[at] if keeps or more[at] < 0 else more >= more[at]
        found &= self._checkpointed <= self._checkpointed[at]
        for spares in self._spares:
            found &= (spares == 0) | (spares == spares[at])
        # A split optimizer keeps whole sub-groups on the device, rounded down. Shares are therefore compared only between
        # equal sub-group sizes.
        groups, ratios = self._more["sub_group_size"], self._offload_ratios
        comparable = (groups == groups[at]) | (ratios[at] == 1) | (ratios == 0)
        found &= (ratios <= ratios[at]) & comparable
        doubles = self._rules.overlap_doubles and self._stage[at] in (1, 2)
        found &= (self._overlap == self._overlap[at]) | (doubles & (self._overlap == 1.0))
        return np.asarray(found)
