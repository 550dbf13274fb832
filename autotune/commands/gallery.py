"""Commands `autotune share` and `autotune gallery check`, and the start of a run from the gallery."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.commands.setup import Setup
from autotune.errors import UserError
from autotune.files import cannot_write, write_atomically
from autotune.gallery.entry import Entry
from autotune.gallery.folder import checked, shipped_entries
from autotune.gallery.nearest import start_from
from autotune.gallery.plausible import check
from autotune.gallery.rates import rates_for
from autotune.gallery.sharing import entry_of
from autotune.predict.predictor import Predictor
from autotune.results.targets import check_out
from autotune.search.proposer import Proposer
from autotune.search.records import AS_IS
from autotune.search.start import Start
from autotune.search.storage import failures_in_one_line, output_file
from autotune.search.study import StudyStore

NOTE = "the gallery's nearest"  # reason of such a trial


@dataclass(frozen=True)
class Shared:
    """A study as written for the gallery."""

    path: Path
    entry: Entry
    left_out: int  # candidates that an entry cannot hold

    @property
    def suggested(self) -> str:
        """Suggested name for its file in the gallery: model and machine, and a few characters of a hash that makes it unique."""
        job, machine = self.entry.job, self.entry.machine
        model = job.model or job.architecture or "model"
        key = hashlib.sha256(self.entry.text().encode()).hexdigest()[:6]
        return f"{model}_{machine.count}x{machine.gpu or machine.device}_{key}.json"

    def lines(self) -> list[str]:
        model = (
            self.entry.job.model or f"a model of {(self.entry.job.parameters or 0) / 1e6:.4g}M parameters, not named"
        )
        left = f"; {self.left_out} candidates were left out, their settings are texts" if self.left_out else ""
        return [
            f"wrote {self.path}: {model}, {self.entry.machine.count} x {self.entry.machine.gpu or self.entry.machine.name}, "
            f"{len(self.entry.candidates)} candidates with how each ended{left}",
            "no path, host name, script or argument is in it; look at it, and if you like, send it: a pull request that adds it "
            f"as gallery/entries/{self.suggested}",
        ]

    def to_json(self) -> dict[str, Any]:
        return {"files": [str(self.path)], "suggested": self.suggested, "candidates": len(self.entry.candidates)}


def share_study(study: str, storage: str | None, out: Path | None) -> Shared:
    """Write a study as an entry to `out`, or as `share.json` into the study's folder.

    Raises:
        UserError: there is no such study, it has measured nothing, or the file cannot be written.
    """
    store = StudyStore.load(study, storage)
    out = out or output_file(store.folder, "share.json")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder; expected a file")
    check_out(out, makes_folders=True)
    with failures_in_one_line():
        entry = entry_of(store)
        tried = {r.candidate for r in store.records() if r.outcome and r.outcome.kind.says_something_of_the_candidate}
    try:
        check(entry)
    except UserError as error:
        raise UserError(f"study {store.name} is not for the gallery: {error}") from None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, entry.text())
    except OSError as error:
        raise cannot_write(out, error, "choose another --out") from None
    return Shared(out, entry, len({one for one in tried if one.knobs}) - len(entry.candidates))


def check_entries(files: Sequence[Path]) -> dict[Path, int]:
    """Return the number of candidates of each entry.

    Raises:
        UserError: an entry breaks the schema, or has an impossible figure.
    """
    return {path: len(checked(path).candidates) for path in files}


def begin_with_rates(setup: Setup, store: StudyStore, predictor: Predictor, say: Callable[[str], None]) -> None:
    """Start predictions from the rates of the nearest entry on the same card. For a new study, log one line about it."""
    rates = rates_for(shipped_entries(), setup.job, setup.hardware) if setup.gallery else None
    if rates is None:
        return
    try:
        predictor.begin_with(rates.learnt)
    except (ValueError, ArithmeticError):  # rates for another version's constants are ignored
        return
    if all(record.note == AS_IS for record in store.records()):
        say(f"gallery: steps are predicted with what is known of {rates.why}, until yours are measured")


def begin_with_gallery(setup: Setup, store: StudyStore, proposer: Proposer, say: Callable[[str], None]) -> None:
    """Start a new study from the nearest entry's winner, and log one line about it."""
    records = store.records()
    if not setup.gallery or any(record.note != AS_IS for record in records):
        return
    start = start_from(shipped_entries(), setup.job, setup.hardware, setup.candidates)
    if start is None:
        return
    whose = f"{start.candidate}, {start.why}"
    if not proposer.begin_with(Start(start.candidate, NOTE)):
        say(f"gallery: knows {whose}; it is not predicted to be among the best here, and waits its turn")
    elif records:  # only the probe run: its outcome informs the search's start
        say(
            f"gallery: proposes {whose}; it is tried if it promises more than the script as it is (--no-gallery: without)"
        )
    else:
        say(f"gallery: begins with {whose}; it is measured as all are (--no-gallery begins without)")
