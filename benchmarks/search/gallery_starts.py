"""What a start from the gallery is worth, right or wrong: `python benchmarks/search/gallery_starts.py [--seeds 5] [--json FILE]`.

The search is replayed against tables, once without a start and once with each of these: the table's best (`right`), the winner of
each other table, which is of another model on another card (`others`), a config within half of the best speed (`half`), the
slowest (`slowest`), one that runs out of memory (`runs out`), and one at random. Of each: the share of runs in which the search
took the start for its first trial, and trials and simulated minutes until a config within 5 % and 2 % of the table's best was
measured.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.executors.replay import ReplayTable, load_replay_table
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.tpe import Distances
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.search import search

TABLES = (*sorted((HERE / "data" / "landscapes").glob("*.json")), *(HERE / "data" / "landscapes_own").glob("*.json"))
BUDGET_SECONDS = 1800.0
NONE, RIGHT, OTHERS, HALF, SLOWEST, RUNS_OUT, DRAWN = "none", "right", "others", "half", "slowest", "runs out", "random"
STARTS = (NONE, RIGHT, OTHERS, HALF, SLOWEST, RUNS_OUT, DRAWN)


def ranked(table: ReplayTable) -> list[Candidate]:
    """What runs, the fastest first."""
    return sorted((c for c, row in table.rows.items() if row.kind is OutcomeKind.OK), key=table.seconds_per_sample)


def start_of(kind: str, table: ReplayTable, others: list[ReplayTable], seed: int) -> Candidate | None:
    draw, fast = random.Random(seed), ranked(table)
    if kind == OTHERS:
        candidates = sorted(table.rows, key=str)
        return candidates[int(Distances(candidates).to(ranked(others[seed % len(others)])[0]).argmin())]
    half = [c for c in fast if table.seconds_per_sample(c) > 1.8 * table.best_step_seconds]
    out = sorted((c for c, row in table.rows.items() if row.kind is OutcomeKind.OOM_DEVICE), key=str)
    found = {RIGHT: fast[:1], HALF: half[:1], SLOWEST: fast[-1:], RUNS_OUT: out, DRAWN: sorted(table.rows, key=str)}
    return draw.choice(found[kind]) if found.get(kind) else None


def runs(path: Path, kind: str, seeds: int) -> dict[str, Any]:
    table = load_replay_table(path)
    others = [load_replay_table(other) for other in TABLES if other != path]
    trace = trace_job(table.job())
    found = []
    for seed in range(seeds):
        start = start_of(kind, table, others, seed)
        found.append(search.autotune(table, trace, seed, BUDGET_SECONDS, "autotune", until_found=True, start=start))
    row: dict[str, Any] = {"table": table.name, "start": kind, "taken": sum(one["taken"] for one in found) / seeds}
    for name in ("trials95", "minutes95", "trials98", "minutes98"):
        row[name] = round(statistics.mean(one.get(name, BUDGET_SECONDS) for one in found), 2)
    row["ooms"] = round(statistics.mean(one["ooms"] for one in found), 2)
    return row


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", type=Path, nargs="+", default=list(TABLES))
    arguments = parse(parser, seeds=1, tables=[TABLES[-1]])
    rows = [runs(path, kind, arguments.seeds) for path in arguments.tables for kind in STARTS]
    print_table(f"trials until a good config is measured ({arguments.seeds} seeds)", rows, keys=2)
    means = []
    for kind in STARTS:
        mine = [row for row in rows if row["start"] == kind]
        means.append({"start": kind, **{n: round(statistics.mean(r[n] for r in mine), 2) for n in list(rows[0])[2:]}})
    print_table("mean of all tables", means)
    write_json(arguments.json, {"tables": rows, "mean": means})


if __name__ == "__main__":
    main()
