"""Whether a larger space costs more trials: `python benchmarks/search/spaces.py [--landscapes DIR…] [--seeds 5] [--json FILE]`.

The same tables searched as they are (the knobs of `default`), and with what `full` and `lossy` add. No table has those
knobs: what one of their values does there in truth is what the predictor says of it, to a power between 0 and 1.5, times up to a
few percent, both drawn once a table and value. So the predictor is right about most of them in sign and about few in size. What
decides by what is installed (compile, Liger) is left out. Each space is judged by 95 % of its own best, and of that of `default`.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import random
import sys
import warnings
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import optuna

from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import RUNG_KNOBS, Candidate, Value
from autotune.problem.knobs import COMPILED, DEEPCOMPILE, LIGER
from autotune.problem.outcome import OutcomeKind
from autotune.problem.space import Domain, SearchSpace, fitted, load_space
from autotune.util.units import parse_duration
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.search.replay import ReplayTable, Row, load_replay_table
from benchmarks.search.search import DATA, autotune, middle, summarise

SPACES = ("default", "full", "lossy")
INSTALLED = (COMPILED, LIGER, DEEPCOMPILE)
MOST_POWER, SPEED_SIGMA, MEMORY_SIGMA = 1.5, 0.03, 0.01


class Held(ReplayTable):
    """A table that is held against the best of another."""

    @property
    def best_step_seconds(self) -> float:
        return float(self.facts["reference"])


def widened(replay_table: ReplayTable, name: str) -> ReplayTable:
    """The table with the knobs that a shipped space adds; as it is for `default`."""
    if name == "default":
        return replay_table
    job, hardware = replay_table.job(), replay_table.hardware()
    theirs = fitted(load_space(name), job, hardware).space
    own = replay_table.space().knobs
    knobs = {knob: domain for knob, domain in theirs.knobs.items() if knob not in INSTALLED}
    knobs = {**own, **knobs, **{knob: _ordered(domain, knobs.get(knob)) for knob, domain in own.items()}}
    space = SearchSpace(name, "", knobs, "", theirs.at_once, theirs.lossy)
    pairs = sorted({tuple(row.get(knob) for knob in RUNG_KNOBS) for row in replay_table.rows})
    wide = [
        Candidate.of({**family, **dict(zip(RUNG_KNOBS, pair, strict=True))})
        for family in space.families()
        for pair in pairs
    ]
    base = {one: Candidate.of({k: v for k, v in one.knobs if k in own}) for one in wide}
    wide = [one for one in dict.fromkeys(wide) if base[one] in replay_table.rows]
    return dataclasses.replace(replay_table, rows=_rows(replay_table, wide, [base[one] for one in wide]))


def _ordered(domain: Domain, theirs: Domain | None) -> Domain:
    """The table's values, the space's first value first."""
    first = theirs.values[0] if theirs else None
    return Domain(tuple(sorted(domain.values, key=lambda value: value != first)))


def _rows(replay_table: ReplayTable, wide: list[Candidate], base: list[Candidate]) -> dict[Candidate, Row]:
    job, hardware = replay_table.job(), replay_table.hardware()
    predictor = Predictor(job, hardware, trace_job(job))
    cores = list(replay_table.rows)
    before, after = predictor.table(cores), predictor.table(wide)
    place = {one: at for at, one in enumerate(cores)}
    at = np.array([place[one] for one in base])
    # a core that ran out has no time: what others of its stage take, as a factor on what is predicted
    slower: dict[int, list[float]] = {}
    for i, one in enumerate(cores):
        seconds = replay_table.rows[one].step_seconds
        if seconds:
            slower.setdefault(one.stage, []).append(seconds / before.step[i])
    drawn = [_drawn(replay_table.name, one, core) for one, core in zip(wide, base, strict=True)]
    rows = {}
    for i, (one, core, (power, speed, memory)) in enumerate(zip(wide, base, drawn, strict=True)):
        row = replay_table.rows[core]
        alike = slower.get(core.stage) or [factor for found in slower.values() for factor in found]
        seconds = row.step_seconds or float(before.step[at[i]] * np.median(alike))
        peak = row.peak_gib * float(after.peak[i] / before.peak[at[i]]) ** power * memory
        seconds *= float(after.step[i] / before.step[at[i]]) ** power * speed
        fits = peak <= float(replay_table.facts["gpu_memory_gib"])
        rows[one] = Row(
            peak, seconds if fits else None, row.startup_seconds, OutcomeKind.OK if fits else OutcomeKind.OOM_DEVICE
        )
    return rows


def _drawn(table: str, one: Candidate, core: Candidate) -> tuple[float, float, float]:
    """(power, factor of seconds, factor of bytes) of what a candidate has beside its core."""
    added: list[tuple[str, Value]] = [item for item in one.knobs if item[0] not in core.as_dict]
    power, speed, memory = 1.0, 0.0, 0.0
    for knob, value in added:
        nature = random.Random(f"{table} {knob} {value}")
        power *= nature.uniform(0, MOST_POWER) ** (1 / len(added))
        speed += nature.gauss(0, SPEED_SIGMA)
        memory += nature.gauss(0, MEMORY_SIGMA)
    return power, float(np.exp(speed)), float(np.exp(memory))


def one(task: tuple[Path, str, int, float]) -> dict[str, Any]:
    path, space, seed, budget = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    table = load_replay_table(path)
    replay_table, trace = widened(table, space), trace_job(table.job())
    best = min(table.seconds_per_sample(c) for c, row in table.rows.items() if row.kind is OutcomeKind.OK)
    held = Held(replay_table.name, {**replay_table.facts, "reference": best}, replay_table.rows)
    found = autotune(replay_table, trace, seed, budget, "autotune", until_found=True)
    soon = autotune(held, trace, seed, budget, "autotune", until_found=True)
    of_defaults = {f"{key}_of_default": soon[key] for key in ("trials95", "minutes95") if key in soon}
    return {**found, **of_defaults, "candidates": len(replay_table.rows), "best": replay_table.best_step_seconds}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--landscapes", type=Path, nargs="+", default=[DATA / "landscapes"], help="folders of tables")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parse(parser, landscapes=[DATA / "landscapes_own"], seeds=1, budget="5m", jobs=1)
    paths = [path for folder in arguments.landscapes for path in sorted(folder.glob("*.csv.gz"))]
    if not paths:
        parser.error(f"no tables (*.csv.gz) in {' '.join(map(str, arguments.landscapes))}")
    for path in paths:
        trace_job(load_replay_table(path).job())  # once, before the processes share the cache
    budget = parse_duration(arguments.budget)
    tasks = [(path, space, seed, budget) for path in paths for space in SPACES for seed in range(arguments.seeds)]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        runs = pool.map(one, tasks, chunksize=1)
    rows = []
    for path in paths:
        best = None
        for space in SPACES:
            mine = [run for task, run in zip(tasks, runs, strict=True) if task[:2] == (path, space)]
            best = best or mine[0]["best"]
            found = summarise(path.name.split(".csv")[0], space, mine)
            for key in ("trials95", "minutes95"):
                found[f"{key}_of_default"] = middle([run.get(f"{key}_of_default", math.inf) for run in mine])
            kept = {
                key: found[key]
                for key in (
                    "landscape",
                    "share95",
                    "trials95",
                    "processes95",
                    "ooms95",
                    "minutes95",
                    "trials95_of_default",
                    "minutes95_of_default",
                )
            }
            added = {"candidates": mine[0]["candidates"], "faster": round(best / mine[0]["best"], 3)}
            rows.append({"landscape": kept.pop("landscape"), "space": space, **added, **kept})
    print_table(f"simulated, {arguments.seeds} seeds, until 95 % of each space's best", rows, keys=2)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
