"""Observer of a search's progress."""

from __future__ import annotations

from typing import Protocol

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome


class Observer(Protocol):
    """Receives events of a search. NullObserver ignores them."""

    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None: ...
    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None: ...
    def say(self, text: str) -> None: ...
    def clock(self, used_seconds: float, budget_seconds: float) -> None: ...


class NullObserver:
    def trial_started(self, number: int, candidate: Candidate, role: str, note: str) -> None:
        pass

    def trial_finished(self, number: int, candidate: Candidate, role: str, outcome: Outcome) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def clock(self, used_seconds: float, budget_seconds: float) -> None:
        pass
