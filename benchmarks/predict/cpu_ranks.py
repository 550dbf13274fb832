"""How much longer a step of ZeRO's stages takes on CPU ranks than what is predicted once stage 0 is measured:
`python benchmarks/predict/cpu_ranks.py [--json FILE]`, over the tables of real DeepSpeed.

Three steps of stage 0 are observed, as a search would, and all steps of stages 1 to 3 are predicted. `longer` is the mean
logarithm of measured over predicted without what is believed of the stage beforehand (`_CPU_QUIRKS`); `others` is the mean of the
other models' tables; `inside` is the share of rows in the 95 % intervals, were that what is believed.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np

from autotune.predict.calibration import QUIRKS, TIME, time_priors
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.search.replay import ReplayTable, load_replay_table

TABLES = tuple(
    path for name in ("landscapes_real", "landscapes_own") for path in sorted((HERE / "data" / name).glob("*.json"))
)
INTERVAL = 1.96  # standard deviations


def measured(replay_table: ReplayTable, seconds: float, candidate: Candidate) -> Outcome:
    """A step of the table, as a trial would report it."""
    samples = candidate.micro_batch * candidate.accumulation * replay_table.job().ranks / seconds
    return Outcome(OutcomeKind.OK, measurement=Measurement(seconds, 0.0, 5, samples, samples, 2**30))


def errors(path: Path, slower: float = 1.0) -> tuple[list[Candidate], Any, Any]:
    """The candidates of stages 1 to 3 that do not offload, the logarithms of measured over predicted steps once three of stage 0
    are measured on a machine that is so many times slower, and what is believed of these errors, as standard deviations."""
    replay_table = load_replay_table(path)
    rows = replay_table.rows.items()
    seconds = {c: slower * row.step_seconds for c, row in rows if row.step_seconds and not c.offloaded}
    own = sorted((c for c in seconds if c.stage == 0), key=lambda c: (c.micro_batch, str(c)))
    predictor = traced_predictor(replay_table.job(), replay_table.hardware())
    for candidate in (own[0], own[len(own) // 2], own[-1]):
        predictor.observe(candidate, measured(replay_table, seconds[candidate], candidate))
    others = [candidate for candidate in seconds if candidate.stage > 0]
    prepared = predictor.prepare(others)
    predicted = predictor.prepared_table(prepared).step
    return others, np.log([seconds[c] for c in others]) - np.log(predicted), predictor.step_sigma(prepared)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Of each stage of a table: how much longer its steps are than predicted with no belief about the stage."""
    others, off, sigma = errors(path)
    stages = np.array([candidate.stage for candidate in others])
    believed = time_priors(load_replay_table(path).hardware(), 1.0)[len(TIME) :]
    means = {name: prior.mean for name, prior in zip(QUIRKS, believed, strict=True)}
    return [
        {"table": path.stem, "stage": stage, "longer": off[at] + means[f"stage{stage}"], "sigma": sigma[at]}
        for stage in sorted(set(stages.tolist()))
        for at in [stages == stage]
    ]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tables", nargs="+", type=Path, default=list(TABLES), metavar="FILE")
    arguments = parse(parser, tables=TABLES[:2])
    rows = [row for path in arguments.tables for row in rows_of(path)]
    for row in rows:
        of_stage = [other for other in rows if other["stage"] == row["stage"]]
        found = [float(other["longer"].mean()) for other in of_stage if model(other) != model(row)]
        row["others"] = statistics.fmean(found) if found else None
    shown = [described(row) for row in rows]
    print_table("steps of later stages, predicted from three of stage 0", shown, keys=2)
    for stage in (1, 2, 3):
        means_of = [row["longer"] for row in shown if row["stage"] == stage]
        if len(means_of) > 1:
            print(
                f"stage {stage}: {statistics.fmean(means_of):.2f} ± {statistics.stdev(means_of):.2f} ({len(means_of)} tables)"
            )
    write_json(arguments.json, shown)


def model(row: dict[str, Any]) -> str:
    """Of a table: `gemma` and `gemma-bf16` are one."""
    return str(row["table"].split("_")[0].split("-bf16")[0])


def described(row: dict[str, Any]) -> dict[str, Any]:
    off = row["longer"] - row["others"] if row["others"] is not None else None
    return {
        "table": row["table"],
        "stage": row["stage"],
        "rows": len(row["longer"]),
        "longer": float(row["longer"].mean()),
        "others": row["others"],
        "inside": None if off is None else float((abs(off) < INTERVAL * row["sigma"]).mean()),
    }


if __name__ == "__main__":
    main()
