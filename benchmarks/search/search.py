"""How soon a search finds the best: `python benchmarks/search/search.py [--landscapes DIR…] [--seeds 20] [--json FILE]`.

`--left-out` sets what the recorded tables have set without the table that is searched: how much longer steps of stages 1 to 3
take than predicted on CPU ranks (tables of the same model are left out too).

`--trials FILE` also writes each trial of each run. Tests compare these sequences byte for byte (tests/golden), so they read
the models' traces with `--traces FILE`: what another torch traces does not change them.

Every strategy is replayed against tables of candidates under one set of rules, on a simulated clock: a process costs its
start, a rung its steps, an out-of-memory two seconds and its process. `autotune` is the real proposer and tuner with the
replay executor; `tpe` is Optuna's TPE with memory as a constraint, `random` draws without repetition, `deepspeed`
follows deepspeed/autotuning: stage by stage, micro-batch first, then a grid, five full steps in a process each.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import optuna

from autotune.executors.base import SEARCH, MeasureSpec
from autotune.predict import calibration
from autotune.predict.trace import trace_job
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.search.study import StudyStore
from autotune.search.tuner import Tuner
from autotune.util.units import parse_duration
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.predict import cpu_ranks
from benchmarks.search.baselines import STRATEGIES as BASELINES
from benchmarks.search.baselines import Strategy
from benchmarks.search.parts import ABLATIONS, EXECUTORS
from benchmarks.search.replay import ReplayExecutor, ReplayTable, load_replay_table

DATA = HERE / "data"
STOPS = (1, 2, 3, 5, 10)  # trials after which a search's bound of the speed left is checked, in addition to its end
END = "end"


def autotune(
    replay_table: ReplayTable, trace: Trace, seed: int, budget: float, parts: str, until_found: bool = False
) -> dict[str, Any]:
    executor = EXECUTORS.get(parts, ReplayExecutor)(replay_table, seed)
    job, hardware, space = replay_table.job(), replay_table.hardware(), replay_table.space()
    store = StudyStore.in_memory(job, hardware, space)
    make_predictor, make_proposer = ABLATIONS[parts]
    predictor = make_predictor(job, hardware, trace)
    candidates = sorted(replay_table.rows, key=str)
    random.Random(seed).shuffle(candidates)
    proposer = make_proposer(candidates, space, predictor)
    began = time.perf_counter()
    bounds: dict[str, tuple[float, float]] = {}

    def ends() -> bool:
        """Note the bound after each stop, and end a search that has found enough.

        The last call at a stop counts, which comes after the search has learned that trial.
        """
        if (trials := len(executor.log.trials)) in STOPS:
            note_bound(bounds, str(trials), tuner, executor)
        return until_found and "trials98" in judge(replay_table, executor, budget)

    tuner = Tuner(store, executor, proposer, budget_seconds=budget, cancelled=ends)
    result = tuner.run()
    note_bound(bounds, END, tuner, executor)
    trials = max(1, len(executor.log.trials))
    return {
        **judge(replay_table, executor, budget),
        "own_seconds": (time.perf_counter() - began) / trials,
        "ended": result.stop_sentence,
        "used": result.used_seconds,
        "bounds": bounds,
        "sequence": sequence(executor),
    }


def note_bound(bounds: dict[str, tuple[float, float]], stop: str, tuner: Tuner, executor: ReplayExecutor) -> None:
    """Note the bound of untried candidates' speed that a search claims now, and that speed by the table, as shares.

    A bound of more than twice the speed is none: its sentence claims nothing.
    """
    confidence, replay_table = tuner.proposer.confidence(), executor.replay_table
    best = tuner.leaderboard.best
    bounds.pop(stop, None)
    if confidence is None or best is None or confidence.left_share > 1:
        return
    tried = {candidate for _, candidate, _ in executor.log.trials}
    untried = [one for one, row in replay_table.rows.items() if row.kind is OutcomeKind.OK and one not in tried]
    least = min(map(replay_table.seconds_per_sample, untried), default=math.inf)
    bounds[stop] = (confidence.left_share, replay_table.seconds_per_sample(best) / least - 1)


def sequence(executor: ReplayExecutor) -> list[tuple[float, str, str]]:
    """(simulated seconds at its end, candidate, outcome) of each trial. The clock's last bits depend on the machine's libm."""
    return [(round(seconds, 6), str(candidate), kind.value) for seconds, candidate, kind in executor.log.trials]


def baseline(replay_table: ReplayTable, seed: int, budget: float, strategy: Strategy) -> dict[str, Any]:
    """A strategy that starts a process for every trial."""
    executor = ReplayExecutor(replay_table, seed)

    def run(candidate: Candidate, measure_spec: MeasureSpec = SEARCH) -> Outcome:
        session = executor.session(candidate, "")
        outcome = session.measure(candidate, measure_spec, budget - executor.now())
        session.close()
        return outcome

    for _ in strategy(replay_table, seed, run):
        if executor.now() >= budget:
            break
    return {**judge(replay_table, executor, budget), "sequence": sequence(executor)}


def judge(replay_table: ReplayTable, executor: ReplayExecutor, budget: float) -> dict[str, Any]:
    """When the run first measured something within 5 % and 2 % of the table's best, and what that had cost."""
    ledger, best = executor.log, replay_table.best_step_seconds
    found: dict[str, Any] = {
        "ooms": sum(kind is not OutcomeKind.OK for _, _, kind in ledger.trials),
        "oom_share": ledger.oom_seconds / budget,
        "overrun": max(0.0, executor.now() - budget),
        "trials": len(ledger.trials),
        "minutes": executor.now() / 60,
    }
    for name, tolerance in (("95", 0.95), ("98", 0.98)):
        for at, (seconds, candidate, kind) in enumerate(ledger.trials):
            if (
                kind is OutcomeKind.OK
                and best / replay_table.seconds_per_sample(candidate) >= tolerance
                and seconds <= budget
            ):
                found |= {
                    f"minutes{name}": seconds / 60,
                    f"trials{name}": at + 1,
                    f"processes{name}": sum(start < seconds for start in ledger.process_starts),
                    f"ooms{name}": sum(k is not OutcomeKind.OK for _, _, k in ledger.trials[:at]),
                }
                break
    return found


Stages = Mapping[str, calibration.Prior]  # how much longer steps of later stages take than predicted, on CPU ranks


def left_out(tables: list[Path]) -> dict[Path, Stages]:
    """Each table's settings, from the other tables alone."""
    stage_rows = [row for path in tables for row in cpu_ranks.rows_of(path.with_name(f"{table_name(path)}.json"))]
    found: dict[Path, Stages] = {}
    for path in tables:
        mine = cpu_ranks.model({"table": table_name(path)})
        longer: dict[str, list[float]] = {f"stage{stage}": [] for stage in (1, 2, 3)}
        for row in stage_rows:
            if cpu_ranks.model(row) != mine:
                longer[f"stage{row['stage']}"].append(float(row["longer"].mean()))
        found[path] = {stage: believed(values) for stage, values in longer.items()}
    return found


def believed(longer: list[float]) -> calibration.Prior:
    """What the tables say of another one; far apart if one or none says anything."""
    mean = statistics.fmean(longer) if longer else 0.0
    return calibration.Prior(mean, statistics.stdev(longer) if len(longer) > 1 else 0.3)


def one(
    task: tuple[Path, str, int, float, bool], traces: Path | None = None, settings: Mapping[Path, Stages] | None = None
) -> dict[str, Any]:
    path, strategy, seed, budget, until_found = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    replay_table = load_replay_table(path)
    if strategy in ABLATIONS:
        with mock.patch.dict(calibration._CPU_QUIRKS, (settings or {}).get(path, {})):
            return autotune(replay_table, traced(replay_table, traces), seed, budget, strategy, until_found)
    return baseline(replay_table, seed, budget, BASELINES[strategy])


def table_name(path: Path) -> str:
    return path.name.split(".csv")[0]


def of_table(path: Path) -> dict[str, Any]:
    """Candidates of a table, how many of them fit, and the minutes to 95 % that no search can undercut."""
    replay_table = load_replay_table(path)
    kinds = [row.kind for row in replay_table.rows.values()]
    return {
        "candidates": len(kinds),
        "fit": kinds.count(OutcomeKind.OK),
        "least_minutes": round(least_minutes(replay_table), 3),
    }


def least_minutes(replay_table: ReplayTable) -> float:
    """Of a search that is told the answer: one process, and one measurement of a candidate within 5 % of the best."""
    good = replay_table.best_step_seconds / 0.95
    minutes = []
    for candidate, row in replay_table.rows.items():
        if row.kind is OutcomeKind.OK and replay_table.seconds_per_sample(candidate) <= good:
            executor = ReplayExecutor(replay_table)
            executor.session(candidate, "").measure(candidate, SEARCH, math.inf)
            minutes.append(executor.now() / 60)
    return min(minutes)


def traced(replay_table: ReplayTable, traces: Path | None = None) -> Trace:
    """The trace of the table's job: from a file that has one by each table's name, else made here."""
    if traces is not None:
        return Trace.from_json(json.loads(traces.read_text())[replay_table.name])
    return trace_job(replay_table.job(), device=replay_table.hardware().device)


def middle(values: list[float], share: float = 0.5) -> float | None:
    """The quantile over all seeds, those that never arrived counted as infinite."""
    value = sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
    return None if math.isinf(value) else round(value, 3)


def summarise(name: str, strategy: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    def column(key: str) -> list[float]:
        return [run.get(key, math.inf) for run in runs]

    return {
        "landscape": name,
        "strategy": strategy,
        "seeds": len(runs),
        "share95": sum("minutes95" in run for run in runs) / len(runs),
        "share98": sum("minutes98" in run for run in runs) / len(runs),
        "trials": statistics.median(run["trials"] for run in runs),
        "minutes": round(statistics.median(run["minutes"] for run in runs), 3),
        "trials95": middle(column("trials95")),
        "processes95": middle(column("processes95")),
        "ooms95": middle(column("ooms95")),
        "minutes95": middle(column("minutes95")),
        "minutes95_p90": middle(column("minutes95"), 0.9),
        "ooms": statistics.median(run["ooms"] for run in runs),
        "oom_share": round(statistics.median(run["oom_share"] for run in runs), 4),
        "overrun_seconds": max(run["overrun"] for run in runs),
        "own_seconds": statistics.median(run["own_seconds"] for run in runs) if "own_seconds" in runs[0] else None,
        "bounds": bounds_held(runs),
    }


STRATEGIES = (*ABLATIONS, *BASELINES)


def times_fewer(rows: list[dict[str, Any]]) -> float | None:
    """Minutes to 95 % of the best baseline of each landscape against ours, geometric mean; None without both."""
    minutes: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["minutes95"]:
            minutes.setdefault(row["landscape"], {})[row["strategy"]] = row["minutes95"]
    ratios = []
    for mine in minutes.values():
        others = [mine[name] for name in BASELINES if name in mine]
        if "autotune" in mine and others:
            ratios.append(min(others) / mine["autotune"])
    return statistics.geometric_mean(ratios) if ratios else None


def shown(path: Path, settings: Stages) -> dict[str, Any]:
    stages = {stage: f"{prior.mean:.2f} ± {prior.sigma:.2f}" for stage, prior in settings.items()}
    return {"left out": table_name(path), **stages}


def bounds_held(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By stop: searches that gave a bound, those of them with no more speed left than that, and the median bound."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for stop, pair in run.get("bounds", {}).items():
            found.setdefault(stop, []).append(pair)
    return {
        stop: [
            len(pairs),
            sum(left <= bound for bound, left in pairs),
            round(statistics.median(b for b, _ in pairs), 4),
        ]
        for stop in (*map(str, STOPS), END)
        if (pairs := found.get(stop))
    }


def bound_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each strategy's bounds of 90 % hold, over all tables, by the number of trials."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    searches: dict[str, int] = {}
    for row in rows:
        searches[row["strategy"]] = searches.get(row["strategy"], 0) + row["seeds"]
        for stop, held in row["bounds"].items():
            found.setdefault((row["strategy"], stop), []).append(held)
    return [
        {
            "strategy": strategy,
            "trials": stop,
            "searches": searches[strategy],
            "with a bound": sum(int(held[0]) for held in each),
            "it holds": round(sum(held[1] for held in each) / sum(held[0] for held in each), 3),
            "median of medians": statistics.median(held[2] for held in each),
        }
        for (strategy, stop), each in sorted(found.items(), key=lambda item: item[0][0])
    ]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--landscapes", type=Path, nargs="+", default=[DATA / "landscapes"], help="folders of tables")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--strategies", default="autotune,tpe,random,deepspeed")
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--until-found", action="store_true", help="end a study of ours once 98 %% was measured")
    parser.add_argument("--left-out", action="store_true", help="set what tables have set without the searched table")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trials", type=Path, metavar="FILE", help="where every trial of every run is written")
    parser.add_argument(
        "--traces", type=Path, metavar="FILE", help="JSON with the trace of each table's job, by its name"
    )
    arguments = parse(parser, landscapes=[DATA / "landscapes_own"], seeds=1, budget="5m", jobs=1)
    strategies = arguments.strategies.split(",")
    if unknown := set(strategies) - set(STRATEGIES):
        parser.error(f"unknown strategy {', '.join(sorted(unknown))}; expected some of {', '.join(STRATEGIES)}")
    every = [path for folder in arguments.landscapes for path in sorted(folder.glob("*.csv*"))]
    tables = [path for path in every if path.name.endswith((".csv", ".csv.gz"))]
    if not tables:
        parser.error(f"no tables (*.csv.gz) in {' '.join(map(str, arguments.landscapes))}")
    budget = parse_duration(arguments.budget)
    for path in tables:
        traced(load_replay_table(path), arguments.traces)  # once, before the processes share the cache
    tasks = [
        (path, s, seed, budget, arguments.until_found)
        for path in tables
        for s in strategies
        for seed in range(arguments.seeds)
    ]
    settings = left_out(tables) if arguments.left_out else {}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        runs = pool.map(functools.partial(one, traces=arguments.traces, settings=settings), tasks, chunksize=1)
    rows = []
    for path in tables:
        for strategy in strategies:
            mine = [run for task, run in zip(tasks, runs, strict=True) if task[:2] == (path, strategy)]
            rows.append({**summarise(table_name(path), strategy, mine), **of_table(path)})
    shown_rows = [{key: value for key, value in row.items() if key != "bounds"} for row in rows]
    print_table(f"simulated, {arguments.seeds} seeds, {arguments.budget} each", shown_rows, keys=2)
    if times := times_fewer(rows):
        print(f"minutes to 95 %, best other strategy / autotune, geometric mean: {times:.2f}")
    if settings:
        print_table("settings from the other tables", [shown(path, settings[path]) for path in tables])
    print_table("bounds of the speed left that hold (target: 90 %)", bound_rows(rows), keys=2)
    write_json(arguments.json, rows)
    trials = [
        {"table": table_name(path), "strategy": strategy, "seed": seed, "trials": run["sequence"]}
        for (path, strategy, seed, *_), run in zip(tasks, runs, strict=True)
    ]
    write_json(arguments.trials, trials)


if __name__ == "__main__":
    main()
