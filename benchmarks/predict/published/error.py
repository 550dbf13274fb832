"""Writes `autotune/data/predictor_error.json`: published figures and their predictions without calibration.

    python benchmarks/predict/published/published.py --json benchmarks/results/published.json
    python benchmarks/predict/published/error.py [--of FILE] [--write FILE]
    python benchmarks/predict/published/error.py --rows 40

`autotune plan` shows the errors of jobs of the same kind, widens its intervals to what they held, and shows the nearest
rows. All rows count that `published.py` could use, held-out sources among them, but those of sequence parallelism: all are of
one source, and say little of other jobs. The table of coverage is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[3])

from autotune.predict.what_if import FIGURES, PublishedRow, known_error, published_rows
from autotune.util.units import GIB
from benchmarks.common import RESULTS, print_table

_FIELDS = tuple(one.name for one in dataclasses.fields(PublishedRow)[:13])  # the figures follow
SHIPPED = Path(__file__).parents[3] / "autotune" / "data" / "predictor_error.json"


def shipped(one: dict[str, Any]) -> dict[str, Any]:
    """A row of `published.json` with what a plan reads, in 4 digits."""
    low, high = one["interval"]
    kept = {name: one[name] for name in _FIELDS}
    figures = {"measured": one["measured"], "predicted": one["predicted"], "low": low, "high": high}
    return {**kept, **{name: float(f"{value:.4g}") for name, value in figures.items()}}


def coverage() -> list[dict[str, Any]]:
    """Errors and coverage of each kind of job that has rows, as a plan counts them."""
    found = []
    for figure in FIGURES:
        kinds = {row.kind for row in published_rows() if row.figure == figure}
        errors = {known_error(kind, figure).kind: known_error(kind, figure) for kind in sorted(kinds, key=str)}
        for one in errors.values():
            held = f"{one.held} of {one.rows}"
            found.append(
                {
                    "figure": figure,
                    "kind": one.kind,
                    "rows": one.rows,
                    "sources": one.sources,
                    "bias": f"{one.bias:+.1%}",
                    "median": f"{one.median:.1%}",
                    "widened": f"{one.widening:.2f}",
                    "held": held,
                }
            )
    return found


def planned(most: int) -> list[dict[str, Any]]:
    """That many rows in turn from every source, with the intervals of a plan and whether they hold the measured figure."""
    sources: dict[str, list[PublishedRow]] = {}
    for row in published_rows():
        sources.setdefault(row.source, []).append(row)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*sources.values()))
    chosen = itertools.islice((row for row in turns if row is not None), most)
    return [_planned(row) for row in sorted(chosen, key=lambda row: row.source)]


def _planned(row: PublishedRow) -> dict[str, Any]:
    widening, step = known_error(row.kind, row.figure).widening, row.figure == "step"
    if step:
        low, high = (row.predicted * (edge / row.predicted) ** widening for edge in (row.low, row.high))
    else:
        low, high = (max(0.0, row.predicted + widening * (edge - row.predicted)) for edge in (row.low, row.high))
    unit, word = (1.0, "s") if step else (float(GIB), "GiB")
    return {
        "source": f"{row.source} {row.id}",
        "job": f"{row.model} L{row.seq_len} {row.gpus} x {row.gpu}, {row.kind.training}, ZeRO {row.kind.stage}",
        "measured": f"{row.measured / unit:.3g} {word}",
        "predicted": f"{row.predicted / unit:.3g} ({low / unit:.3g} to {high / unit:.3g})",
        "held": "in" if low <= row.measured * (1 + 1e-9) and row.measured <= high * (1 + 1e-9) else "out",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", type=Path, default=RESULTS / "published.json", metavar="FILE", help="what it is made of"
    )
    parser.add_argument("--write", type=Path, default=SHIPPED, metavar="FILE", help="where it goes")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="only print N shipped rows of all sources in turn"
    )
    arguments = parser.parse_args()
    if arguments.rows:
        found = planned(arguments.rows)
        print_table("predicted beside measured", found, keys=2)
        held = sum(one["held"] == "in" for one in found)
        print(f"{held} of {len(found)} rows of {len({one['source'].rsplit(' ', 1)[0] for one in found})} sources held")
        return
    try:
        read = json.loads(arguments.of.read_text())["rows"]
        rows = [shipped(one) for one in read if one["figure"] in FIGURES and one.get("sequence_ranks", 1) == 1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {arguments.of}: no result of published.py ({type(error).__name__}: {error})", file=sys.stderr)
        raise SystemExit(2) from None
    lines = ",\n".join("  " + json.dumps(one) for one in rows)
    source = json.dumps(
        "benchmarks/predict/published/error.py, of what benchmarks/predict/published/published.py finds without calibration"
    )
    arguments.write.write_text(f'{{\n "source": {source},\n "rows": [\n{lines}\n ]\n}}\n')
    if arguments.write == SHIPPED:
        print_table("errors by kind of job", coverage(), keys=2)


if __name__ == "__main__":
    main()
