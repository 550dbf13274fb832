"""The pages that are looked at in a browser, by kind; each is written into a folder and its path is returned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.search.study import StudyStore
from tests.conftest import make_candidate
from tests.results.report.studies import EVIL, everything, in_memory, large, measured, page, tell


def _of(made: Callable[[], StudyStore]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        folder.mkdir()
        return page(made(), folder / "page.html")

    return write


def _one_trial() -> StudyStore:
    store = in_memory()
    store.set_winner(tell(store, make_candidate(0, 1), measured(10, 3)), "measured, not verified")
    return store


KINDS: dict[str, Callable[[Path], Path]] = {
    "everything": _of(everything),
    "evil": _of(lambda: everything(in_memory(EVIL), EVIL)),
    "empty": _of(in_memory),
    "one trial": _of(_one_trial),
    "500 trials": _of(large),
}
