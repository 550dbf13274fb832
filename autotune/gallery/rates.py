"""What the steps of the gallery's entries teach of a card: with what predictions begin for a job that is near one of them.

`python -m autotune.gallery.rates` has a predictor observe each entry and writes what it has learnt to
`data/gallery_rates.json`: to trace an entry's model takes longer than a run may wait. It is of steps alone, since what
memory takes is not the card's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from autotune.errors import UserError
from autotune.files import write_atomically
from autotune.gallery.entry import Entry
from autotune.gallery.folder import shipped_entries
from autotune.gallery.nearest import nearest, whose
from autotune.predict.constants import QUIRKS, TIME
from autotune.predict.fit import Evidence
from autotune.predict.predictor import Predictor
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome

FILE = "gallery_rates.json"


@dataclass(frozen=True)
class Rates:
    """What one entry teaches."""

    entry: str  # its name
    learnt: Evidence
    why: str  # for people: whose, on what, from where


def rates_for(entries: Mapping[str, Entry], job: Job, hardware: Hardware) -> Rates | None:
    """Of the nearest entry on the same card; None where none is near."""
    known = shipped_rates()
    for _, name in nearest(entries, job, hardware):
        entry = entries[name]
        if name in known and entry.machine.gpu == hardware.facts:
            return Rates(name, known[name], whose(entry))
    return None


@cache
def shipped_rates() -> dict[str, Evidence]:
    """By the name of the entry; none where they are of another predictor's constants, or cannot be read."""
    try:
        data = json.loads(resources.files("autotune.data").joinpath(FILE).read_text(encoding="utf-8"))
        learnt = {name: Evidence(**one) for name, one in data["entries"].items()}
        return learnt if data["constants"] == constants() else {}
    except Exception:  # none of them is needed, and nobody's run ends by what lies there
        return {}


def constants() -> str:
    """A digest of the constants that the rates are of, as they are before anything is measured."""
    priors = [(name, float(prior.mean), float(prior.sigma)) for name, prior in TIME.items()]
    return hashlib.sha256(json.dumps([priors, list(QUIRKS.items())]).encode()).hexdigest()[:16]


def taught(entry: Entry) -> Evidence | None:
    """What a predictor learns of the entry's steps; None of one that is not of a GPU, or whose model its sizes do not make."""
    tried = [one for one in entry.candidates if one.step_seconds is not None]
    if entry.machine.gpu is None or not tried:
        return None
    try:
        predictor = Predictor(entry.job.job(entry.machine.count), entry.machine.hardware())
    except UserError:
        return None
    before = predictor.table([one.candidate for one in tried])
    for one, peak in zip(tried, before.peak, strict=True):  # the peak as predicted: it teaches nothing
        assert one.step_seconds is not None
        measured = Measurement(one.step_seconds, one.spread or 0.0, 4, 1.0, 1.0, int(peak))
        predictor.observe(one.candidate, Outcome(Kind.OK, measurement=measured))
    return predictor.rates()


def main() -> None:
    learnt = {name: taught(entry) for name, entry in shipped_entries().items()}
    entries = {name: dataclasses.asdict(one) for name, one in sorted(learnt.items()) if one is not None}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in entries.items())
    text = f'{{\n "constants": {json.dumps(constants())},\n "entries": {{\n{lines}\n }}\n}}\n'
    write_atomically(Path(__file__).parents[1] / "data" / FILE, text)


if __name__ == "__main__":
    main()
