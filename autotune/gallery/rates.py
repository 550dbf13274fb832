"""What the steps of the gallery's entries teach of a card: with what predictions begin for a job that is near one of them.

`python -m autotune.gallery.taught` has a predictor observe each entry and writes what it has learnt to
`data/gallery_rates.json`: to trace an entry's model takes longer than a run may wait. It is of steps alone, since what
memory takes is not the card's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autotune.gallery.entry import Entry
from autotune.gallery.nearest import nearest, whose
from autotune.predict.constants import QUIRKS, TIME
from autotune.predict.fit import Evidence
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job

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
