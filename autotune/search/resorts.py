"""Fallback schedule if nothing has fitted: try the candidate with the least memory of every stage, then stop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.problem.candidate import Candidate
from autotune.problem.knobs import OFFLOADING
from autotune.problem.outcome import Kind

ENOUGH = 8  # failed trials after which only fallback candidates are tried
_SPARED = 8.0  # doublings of the micro-batch that one memory-saving setting is worth


class Resorts:
    """Fallback candidates tried so far, and failures since the last fit."""

    def __init__(self, candidates: Sequence[Candidate], device: str) -> None:
        self._stage = np.array([candidate.stage for candidate in candidates])
        self._greed = np.array([_greed(candidate, device) for candidate in candidates])
        self._offloads = np.array([len(candidate.offloaded) for candidate in candidates])
        self._most_offloads = np.full(4, len(OFFLOADING))  # by stage
        self._tried: set[tuple[int, bool]] = set()
        self._failed: Counter[Kind] = Counter()

    def take(self, at: int | None, kind: Kind, fitted: bool) -> None:
        """Record a trial.

        A stage whose fallback candidate failed for another reason than device memory gets another turn with less
        offloading, because the offloading may be the cause.

        Args:
            at: place of the candidate; None if this space does not contain it.
            kind: kind of the outcome.
            fitted: True if the candidate fits.
        """
        if fitted:
            self._failed.clear()
            self._tried.clear()
            return
        self._failed[kind] += 1
        if at is not None and kind is not Kind.OOM_DEVICE and self._offloads[at]:
            stage = int(self._stage[at])
            if turns := {turn for turn in self._tried if turn[0] == stage}:
                self._most_offloads[stage] = min(self._most_offloads[stage], self._offloads[at] - 1)
                self._tried -= turns

    @property
    def due(self) -> bool:
        """True after so many failures that only fallback candidates are tried."""
        return self._failed.total() >= ENOUGH

    def next(self, free: Flags, need: Floats, believed: bool) -> int | None:
        """Return the place of the next fallback candidate; None if each stage has had its turn.

        Args:
            free: (n,) candidates that may be tried.
            need: (n,) predicted need, as a share of the available memory.
            believed: rank by `need` only; otherwise also by memory-saving settings.
        """
        free = free & (self._offloads <= self._most_offloads[self._stage])
        for by_settings in (False,) if believed else (False, True):
            greed = np.where(free, self._greed + 1e-3 * np.tanh(need) if by_settings else need, np.inf)
            for at in greed.argsort(kind="stable")[: int(free.sum())]:
                turn = (int(self._stage[at]), by_settings)
                if turn not in self._tried:
                    self._tried.add(turn)
                    return int(at)
        return None

    @property
    def why(self) -> str:
        """Reason for the end of the search, if no candidate is left."""
        tried = f"{self._failed.total()} candidates, the thriftiest of every stage among them"
        if all(kind.is_oom or kind is Kind.OK for kind in self._failed):
            return f"nothing fits: memory was too small for {tried} (--exhaustive goes on)"
        kinds = ", ".join(f"{count} {kind.value}" for kind, count in self._failed.most_common())
        return f"nothing runs: {tried}, have failed ({kinds}; --exhaustive goes on)"


def _greed(candidate: Candidate, device: str) -> float:
    """Return a memory demand score from settings alone. On CPU ranks offloading saves no memory."""
    spends = (not candidate.checkpointing) + (len(OFFLOADING) - len(candidate.offloaded) if device == "cuda" else 0)
    return math.log2(candidate.micro_batch) + _SPARED * spends
