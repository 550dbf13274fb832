"""Writes `autotune/data/gallery_rates.json`: a predictor observes the steps of each shipped entry.

python benchmarks/predict/card_rates.py
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import UserError
from autotune.gallery.schema import Entry
from autotune.gallery.warm_start import FILE, constants, shipped_entries
from autotune.predict.calibration import CalibrationEvidence
from autotune.predict.trace import traced_predictor
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.util.files import write_atomically


def rates_of_entry(entry: Entry) -> CalibrationEvidence | None:
    """Return the evidence of the entry's steps.

    None if the entry has no GPU, or if its model cannot be built from its sizes.
    """
    tried = [one for one in entry.candidates if one.step_seconds is not None]
    if entry.machine.gpu is None or not tried:
        return None
    try:
        predictor = traced_predictor(entry.job.job(entry.machine.count), entry.machine.hardware())
    except UserError:
        return None
    before = predictor.table([one.candidate for one in tried])
    for one, peak in zip(tried, before.peak, strict=True):  # the peak as predicted: it teaches nothing
        assert one.step_seconds is not None
        measured = Measurement(one.step_seconds, one.spread or 0.0, 4, 1.0, 1.0, int(peak))
        predictor.observe(one.candidate, Outcome(OutcomeKind.OK, measurement=measured))
    return predictor.rates()


def main() -> None:
    """Write `data/gallery_rates.json` from the shipped entries."""
    learnt = {name: rates_of_entry(entry) for name, entry in shipped_entries().items()}
    entries = {name: dataclasses.asdict(one) for name, one in sorted(learnt.items()) if one is not None}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in entries.items())
    text = f'{{\n "constants": {json.dumps(constants())},\n "entries": {{\n{lines}\n }}\n}}\n'
    write_atomically(Path(__file__).parents[2] / "autotune" / "data" / FILE, text)


if __name__ == "__main__":
    main()
