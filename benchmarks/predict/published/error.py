"""Writes `autotune/data/predictor_error.json`: the predictor's median error on published rows, by kind of job.

    python benchmarks/predict/published/published.py --json benchmarks/results/published.json
    python benchmarks/predict/published/error.py [--of FILE] [--write FILE]

`autotune plan` shows these errors beside what it predicts for jobs of the same kind. They are those without calibration, of
all rows that `published.py` could use, held-out sources among them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[3])

from autotune.predict.what_if import FIGURES, JobKind
from benchmarks.common import RESULTS, print_table
from benchmarks.predict.published.scores import Scored
from benchmarks.predict.published.sources import source_of

SHIPPED = Path(__file__).parents[3] / "autotune" / "data" / "predictor_error.json"


def errors(scored: Iterable[tuple[str, Scored]]) -> list[dict[str, Any]]:
    """The error of each figure for each kind of job, and for every kind together (`kind` null), as shares.

    Args:
        scored: each with its figure; of those that are not in FIGURES there is no error.
    """
    groups: dict[tuple[JobKind | None, str], list[Scored]] = {}
    for figure, one in scored:
        if figure in FIGURES:
            for kind in (None, JobKind.of(one.case.job, one.case.candidate, one.case.hardware)):
                groups.setdefault((kind, figure), []).append(one)
    return [
        {
            "kind": vars(kind) if kind else None,
            "figure": figure,
            "rows": len(own),
            "sources": len({source_of(one.case.row).name for one in own}),
            "median": round(statistics.median(one.error for one in own), 4),
            "inside": round(sum(one.inside for one in own) / len(own), 4),
        }
        for (kind, figure), own in sorted(groups.items(), key=lambda item: (str(item[0][0] or ""), item[0][1]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", type=Path, default=RESULTS / "published.json", metavar="FILE", help="what it is made of"
    )
    parser.add_argument("--write", type=Path, default=SHIPPED, metavar="FILE", help="where it goes")
    arguments = parser.parse_args()
    try:
        found = json.loads(arguments.of.read_text())["by_kind"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {arguments.of}: no result of published.py ({type(error).__name__}: {error})", file=sys.stderr)
        raise SystemExit(2) from None
    print_table(
        "errors by kind of job",
        [{**one, "kind": str(JobKind(**one["kind"])) if one["kind"] else "every kind"} for one in found],
        keys=2,
    )
    lines = ",\n".join("  " + json.dumps(one) for one in found)
    source = json.dumps(
        "benchmarks/predict/published/error.py, of what benchmarks/predict/published/published.py finds without calibration"
    )
    arguments.write.write_text(f'{{\n "source": {source},\n "errors": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
