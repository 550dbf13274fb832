"""Card rates that the gallery's entries teach. Predictions for a job near an entry start from them.

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
    """Rates learnt from one entry."""

    entry: str  # name of the entry
    learnt: Evidence
    why: str  # for the user: source, job and machine


def rates_for(entries: Mapping[str, Entry], job: Job, hardware: Hardware) -> Rates | None:
    """Return the rates of the nearest entry on the same card; None if none is near."""
    known = shipped_rates()
    for _, name in nearest(entries, job, hardware):
        entry = entries[name]
        if name in known and entry.machine.gpu == hardware.facts:
            return Rates(name, known[name], whose(entry))
    return None


@cache
def shipped_rates() -> dict[str, Evidence]:
    """Read the learnt rates by entry name. The result is empty if they belong to other constants, or cannot be read."""
    try:
        data = json.loads(resources.files("autotune.data").joinpath(FILE).read_text(encoding="utf-8"))
        learnt = {name: Evidence(**one) for name, one in data["entries"].items()}
        return learnt if data["constants"] == constants() else {}
    except Exception:  # rates are optional, so reading them may not end a run
        return {}


def constants() -> str:
    """Return a digest of the predictor's prior constants, which identifies the rates that fit them."""
    priors = [(name, float(prior.mean), float(prior.sigma)) for name, prior in TIME.items()]
    return hashlib.sha256(json.dumps([priors, list(QUIRKS.items())]).encode()).hexdigest()[:16]
