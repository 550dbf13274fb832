"""Card rates that the gallery's entries teach. Predictions for a job near an entry start from them.

`python -m autotune.gallery.rates` lets a predictor observe each entry and writes the learnt rates to
`data/gallery_rates.json`, as tracing an entry's model takes longer than a run may wait. Only step times are learnt, since
memory use does not depend on the card.
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


def taught(entry: Entry) -> Evidence | None:
    """Let a predictor learn from an entry's steps. None if the entry has no known GPU, or its sizes do not define a model."""
    tried = [one for one in entry.candidates if one.step_seconds is not None]
    if entry.machine.gpu is None or not tried:
        return None
    try:
        predictor = Predictor(entry.job.job(entry.machine.count), entry.machine.hardware())
    except UserError:
        return None
    before = predictor.table([one.candidate for one in tried])
    for one, peak in zip(tried, before.peak, strict=True):  # the peak is the predicted one, so that it teaches nothing
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
