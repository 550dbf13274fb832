"""Trials of peer tuners on a shared study."""

from __future__ import annotations

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome
from autotune.search.records import SEARCH, Record
from autotune.search.study import StudyStore


class Company:
    """This tuner's view of the study's trials. An unshared study has no peers."""

    def __init__(self, store: StudyStore) -> None:
        self._store = store
        self.known: set[int] = set()  # numbers of trials that were already processed
        self.elsewhere: list[Record] = []  # running trials of peers
        self._found: dict[tuple[Candidate, str], Outcome] = {}  # outcomes of peers since this call began

    def hear(self) -> list[tuple[Record, Outcome]]:
        """Return outcomes that peers stored since the last poll."""
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
        """Return the candidates that peers measure in their searches."""
        return [record.candidate for record in self.elsewhere if record.role == SEARCH]

    def are_at(self, candidate: Candidate, role: str) -> bool:
        return any((record.candidate, record.role) == (candidate, role) for record in self.elsewhere)

    def found(self, candidate: Candidate, role: str) -> Outcome | None:
        return self._found.get((candidate, role))

    def forget(self, candidate: Candidate, role: str) -> None:
        self._found.pop((candidate, role), None)
