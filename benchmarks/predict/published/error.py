"""Writes `autotune/data/predictor_error.json`: published figures and their predictions without calibration.

    python benchmarks/predict/published/published.py --json benchmarks/results/published.json
    python benchmarks/run_all.py published-jobs
    python benchmarks/predict/published/error.py [--of FILE …] [--write FILE]
    python benchmarks/predict/published/error.py --rows 40
    python benchmarks/predict/published/error.py --trials

`autotune plan` shows the errors of jobs of the same kind, widens its intervals to what they held, and shows the nearest
rows. All rows count that `published.py` could use, held-out sources among them, but those of sequence parallelism: all are of
one source, and say little of other jobs. The table of coverage is printed. `--trials` prints our own trials on GPUs, and how well
the rates of one card or model predict the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[3])

import numpy as np

from autotune.predict.calibration import TIME, TIME_NOISE, fit, time_priors
from autotune.predict.features import Floats
from autotune.predict.step_time import spend
from autotune.predict.what_if import FIGURES, PublishedRow, known_error, published_rows
from autotune.util.units import GIB
from benchmarks.common import RESULTS, print_table
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.scores import predictor_of, traced, uncalibrated
from benchmarks.predict.published.trials import own_trials

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


# -- our own trials ----------------------------------------------------------------------------------------------------


def trial_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Every trial's step with its prediction before any trial, and its 95 % interval."""
    found = []
    for one in uncalibrated(cases):
        case = one.case
        found.append(
            {
                "card": case.hardware.facts,
                "job": f"{case.job.model.name}, {case.job.seq_len} tokens",
                "candidate": str(case.candidate),
                "measured s": f"{case.value:.3f}",
                "predicted s": f"{one.predicted:.3f} ({one.low:.3f} to {one.high:.3f})",
                "predicted / measured": f"{one.predicted / case.value:.2f}",
                "held": "in" if one.inside else "out",
            }
        )
    return found


def transfer(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Errors of steps before any trial, and with the rates of other cards or other models alone."""
    before = {
        id(case): math.log(one.predicted / case.value) for case, one in zip(cases, uncalibrated(cases), strict=True)
    }
    found = []
    for split, part_of in (("card", lambda one: one.hardware.facts), ("model", lambda one: one.job.model.name)):
        for part in dict.fromkeys(map(part_of, cases)):
            tested = [case for case in cases if part_of(case) == part]
            fitted = fitted_rates([case for case in cases if part_of(case) != part])
            for rates, errors in (
                ("no trial", [before[id(case)] for case in tested]),
                (f"trials of the other {split}", fitted.errors(tested)),
            ):
                absolute = sorted(abs(math.expm1(one)) for one in errors)
                found.append(
                    {
                        "tested": part,
                        "steps": len(tested),
                        "fitted to": rates,
                        "median error": f"{statistics.median(absolute):.1%}",
                        "worst": f"{absolute[-1]:.1%}",
                        "bias": f"{math.expm1(statistics.median(errors)):+.1%}",
                        **{name: f"{fitted.factor(name):.2f}" if "other" in rates else "" for name in HOST},
                    }
                )
    return found


HOST = ("starts", "hooks", "moved")  # rates that are shown: host seconds per operator and module, and pointwise kernels


@dataclass(frozen=True)
class FittedRates:
    """Constants of TIME fitted to steps of several jobs."""

    mean: Floats

    def factor(self, name: str) -> float:
        """Return a constant relative to what is believed before any trial."""
        return math.exp(self.mean[list(TIME).index(name)] - TIME[name].mean)

    def errors(self, cases: Sequence[Case]) -> list[float]:
        """Return the logarithm of predicted over measured steps."""
        return [float(one) for one in _residuals(cases)(self.mean)]


def fitted_rates(cases: Sequence[Case]) -> FittedRates:
    priors = time_priors(cases[0].hardware, 1.0)[: len(TIME)]
    return FittedRates(fit(priors, _residuals(cases), noise=TIME_NOISE).mean)


def _residuals(cases: Sequence[Case]) -> Callable[[Floats], Floats]:
    prepared = [predictor_of(case).prepare([case.candidate]) for case in cases]
    measured = np.log([case.value for case in cases])

    def off(constants: Floats) -> Floats:
        k: dict[str, Floats] = {name: np.exp(constants[..., i, None]) for i, name in enumerate(TIME)}
        k["hidden"] = k["hidden"] / (1 + k["hidden"])
        steps = [spend(one.work, one.columns, k).step[..., 0] for one in prepared]
        return np.asarray(np.log(np.stack(steps, axis=-1)) - measured)

    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of",
        type=Path,
        nargs="+",
        default=[RESULTS / "published.json", RESULTS / "published-jobs.json"],
        metavar="FILE",
        help="what it is made of",
    )
    parser.add_argument("--write", type=Path, default=SHIPPED, metavar="FILE", help="where it goes")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="only print N shipped rows of all sources in turn"
    )
    parser.add_argument("--trials", action="store_true", help="only print our own trials on GPUs")
    arguments = parser.parse_args()
    if arguments.trials:
        cases, _ = traced(own_trials())
        rows = trial_rows(cases)
        print_table("steps of our own trials, predicted before any trial", rows, keys=3)
        print(f"{sum(one['held'] == 'in' for one in rows)} of {len(rows)} inside their 95 % intervals")
        print_table("rates of one part predict the other", transfer(cases), keys=3)
        return
    if arguments.rows:
        found = planned(arguments.rows)
        print_table("predicted beside measured", found, keys=2)
        held = sum(one["held"] == "in" for one in found)
        print(f"{held} of {len(found)} rows of {len({one['source'].rsplit(' ', 1)[0] for one in found})} sources held")
        return
    try:
        read = [row for path in arguments.of for row in json.loads(path.read_text())["rows"]]
        rows = [shipped(one) for one in read if one["figure"] in FIGURES and one.get("sequence_ranks", 1) == 1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        files = ", ".join(map(str, arguments.of))
        print(f"error: {files}: no result of published.py ({type(error).__name__}: {error})", file=sys.stderr)
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
