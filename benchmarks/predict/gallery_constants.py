"""Whether what entries teach of a card helps to predict others' steps:
`python benchmarks/predict/gallery_constants.py [--json FILE]`.

Each published step (docs/published.md) that is near an entry of another source on its card is predicted twice: by the predictor
alone, and by one that begins with the entry's rates, as `autotune run` does. So is each after the first step of its own source
has been observed, as a study observes its first trial. Medians of the error, the share inside the 95 % intervals, and their
half-width.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.gallery.warm_start import WarmStartRates, rates_for, shipped_entries
from autotune.predict.predictor import Predictor
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.predict.gallery_entries import address
from benchmarks.predict.published.published import cases_in
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.rows import read_table
from benchmarks.predict.published.scores import Scored, figure, learnt, predictor_of, summary, traced
from benchmarks.predict.published.sources import source_of

TABLE = HERE / "data" / "published" / "gpu_published.csv"


def rates_of(case: Case) -> WarmStartRates | None:
    """Of the nearest entry of another source on the case's card."""
    there = shipped_entries().items()
    others = {name: entry for name, entry in there if entry.origin.source != address(case.row)}
    return rates_for(others, case.job, case.hardware)


def begun(case: Case, rates: WarmStartRates | None) -> Predictor:
    predictor = predictor_of(case)
    if rates is not None:
        predictor.begin_with(rates.learnt)
    return predictor


def scored(case: Case, predictor: Predictor) -> Scored:
    return Scored(case, *figure(case, predictor.predict(case.candidate)))


def before(cases: Sequence[Case]) -> dict[str, list[Scored]]:
    """Nothing of the job has been measured."""
    found = defaultdict[str, list[Scored]](list)
    for case in cases:
        if rates := rates_of(case):
            found["alone"].append(scored(case, begun(case, None)))
            found["with an entry's rates"].append(scored(case, begun(case, rates)))
    return found


def after_one(cases: Sequence[Case]) -> dict[str, list[Scored]]:
    """The first step of each source has been observed."""
    found = defaultdict[str, list[Scored]](list)
    by_source = defaultdict[str, list[Case]](list)
    for case in cases:
        by_source[source_of(case.row).name].append(case)
    for first, *others in by_source.values():
        rates = rates_of(first)
        if rates is None:
            continue
        for how, begins in (("alone", None), ("with an entry's rates", rates)):
            known = learnt(first, begun(first, begins))
            for case in others:
                predictor = predictor_of(case)
                predictor.believe(time=known)
                found[how].append(scored(case, predictor))
    return found


def line(name: str, cases: Sequence[Scored]) -> dict[str, Any]:
    found = {"sources": len({source_of(one.case.row).name for one in cases}), **summary(cases)}
    return {"of": name, **{key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", metavar="NAME", help="figures of this model alone")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="figures of sequences of this length alone")
    arguments = parse(parser, model="llama-3-8b", length=2048)
    chosen = [case for case in cases_in(read_table(TABLE))[0] if arguments.model in (None, case.job.model.name)]
    chosen = [case for case in chosen if case.quantity == "step" and arguments.length in (None, case.job.seq_len)]
    cases, _ = traced(chosen)
    lines = [
        line(f"{when}: {how}", found)
        for when, parts in (("a first prediction", before(cases)), ("after one step", after_one(cases)))
        for how, found in parts.items()
    ]
    print_table("published steps near an entry of another source, predicted", lines)
    write_json(arguments.json, lines)


if __name__ == "__main__":
    main()
