"""The other tuners of a study, as one of them hears of them."""

from __future__ import annotations

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome
from autotune.search.records import SEARCH, Record
from autotune.search.study import StudyStore


class Company:
    """What this tuner knows of the study's trials. Where the study is not shared it has no company."""

    def __init__(self, store: StudyStore) -> None:
        self._store = store
        self.known: set[int] = set()  # numbers of trials that were learnt from
        self.elsewhere: list[Record] = []  # what others have under way
        self._found: dict[tuple[Candidate, str], Outcome] = {}  # what they have found since this call began

    def hear(self) -> list[tuple[Record, Outcome]]:
        """What others have found since the last time."""
        if not self._store.tuners.shared:
            return []
        ended, self.elsewhere = self._store.news(self.known)
        news = []
        for record in ended:
            self.known.add(record.number)
            if record.outcome is not None:
                self._found[record.candidate, record.role] = record.outcome
                news.append((record, record.outcome))
        return news

    def searching(self) -> list[Candidate]:
        """What others measure in their search."""
        return [record.candidate for record in self.elsewhere if record.role == SEARCH]

    def are_at(self, candidate: Candidate, role: str) -> bool:
        return any((record.candidate, record.role) == (candidate, role) for record in self.elsewhere)

    def found(self, candidate: Candidate, role: str) -> Outcome | None:
        return self._found.get((candidate, role))

    def forget(self, candidate: Candidate, role: str) -> None:
        self._found.pop((candidate, role), None)
