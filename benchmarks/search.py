"""How soon a search finds the best: `python benchmarks/search.py [--landscapes DIR…] [--seeds 20] [--json FILE]`.

Every strategy is replayed against tables of candidates under one set of rules, on a simulated clock: a process costs its
start, a rung its steps, an out-of-memory two seconds and its process. `autotune` is the real proposer and tuner with the
replay executor; `tpe` is Optuna's TPE with memory as a constraint, `random` draws without repetition, `deepspeed`
follows deepspeed/autotuning: stage by stage, micro-batch first, then a grid, five full steps in a process each.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from common import HERE, command_line, parse, print_table, write_json

from autotune.executors.base import SEARCH, Effort
from autotune.executors.replay import Landscape, ReplayExecutor, load_landscape
from autotune.predict.passes import Trace
from autotune.predict.predictor import Predictor, Table
from autotune.predict.trace import trace_job
from autotune.predict.zero import SUMS, TABLES
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.outcome import Kind, Outcome
from autotune.search.proposer import Proposer
from autotune.search.start import Proposal, Start
from autotune.search.study import StudyStore
from autotune.search.tuner import Tuner
from autotune.units import GIB, parse_duration

DATA = HERE / "data"
FULL = Effort(full=True, min_steps=5)  # what DeepSpeed's autotuner runs
Run = Callable[[Candidate, Effort], Outcome]


class Biased(Predictor):
    """A predictor that is wrong on purpose: by 30 % in memory and 50 % in time, one way or the other by stage and batch."""

    memory_salt: tuple[int, ...] = ()
    time_salt: tuple[int, ...] = (7,)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._context_bytes = self.constants()["overhead"] * GIB  # as expected before any calibration

    def prepare(self, candidates: Sequence[Candidate]) -> Any:
        """Wrong before any calibration, which may find out; a step's seconds are proportional to its work."""
        prepared = super().prepare(candidates)
        memory = 1 + 0.3 * signs(candidates, self.memory_salt)
        seconds = 1.5 ** signs(candidates, self.time_salt)
        bill = {name: getattr(prepared.bill, name) * memory for name in (*SUMS, *TABLES)}
        bill["parameters"] += (memory - 1) * self._context_bytes
        work = {name: value * seconds for name, value in vars(prepared.work).items() if name not in SHARES}
        return dataclasses.replace(
            prepared, bill=dataclasses.replace(prepared.bill, **bill), work=dataclasses.replace(prepared.work, **work)
        )


SHARES = ("forward_share", "recompute_share", "hides", "adam_beside")  # fields of Work that are no seconds


def signs(candidates: Sequence[Candidate], salt: tuple[int, ...]) -> Any:
    """1.0 or -1.0 for each candidate, as the hash of its stage and micro-batch has it."""
    return np.array([1.0 if hash((c.stage, c.micro_batch, *salt)) % 2 else -1.0 for c in candidates])


def misled(number: int) -> type[Biased]:
    """Another way of being as wrong."""
    return type(f"Misled{number}", (Biased,), {"memory_salt": (number,), "time_salt": (100 + number,)})


class Wrong(Predictor):
    """A predictor that no measurement calibrates, because what it says is bent on its way out."""

    bends_memory = bends_time = True

    def bend(self, logs: Any) -> Any:
        """The logarithms of a predicted quantity, bent."""
        raise NotImplementedError

    def prepared_table(self, prepared: Any) -> Table:
        table = super().prepared_table(prepared)
        if self.bends_time:
            samples = np.exp(self.bend(np.log(table.samples)))
            table = dataclasses.replace(table, samples=samples, step=table.step * table.samples / samples)
        if self.bends_memory:
            factor = np.exp(self.bend(np.log(table.peak))) / table.peak
            names = ("peak", "peak_sigma", "allocated", "allocated_sigma", "needed")
            table = dataclasses.replace(table, **{name: getattr(table, name) * factor for name in names})
        return table


class Inverted(Wrong):
    """What is fast it holds for slow, and what is large for small."""

    def bend(self, logs: Any) -> Any:
        return 2 * np.median(logs) - logs


class WrongTime(Inverted):
    """Right in memory, inverted in time."""

    bends_memory = False


class WrongMemory(Inverted):
    """Right in time, inverted in memory."""

    bends_time = False


class Constant(Wrong):
    """Every candidate is as fast and as large as any, and it is sure of it."""

    def bend(self, logs: Any) -> Any:
        return np.full(len(logs), np.median(logs))


class Drawn(Wrong):
    """At random, over the range that is right, and sure of it."""

    def bend(self, logs: Any) -> Any:
        return np.random.default_rng(len(logs)).permutation(logs)


class Ignorant(Predictor):
    """A predictor that knows nothing: every candidate may fit and is as fast as any."""

    def prepared_table(self, prepared: Any) -> Table:
        one = np.ones(len(prepared.columns.stage))
        samples = prepared.columns.micro_batch * prepared.columns.accumulation * self.job.ranks
        capacity = float(self.hardware.capacity_bytes)
        half, width, nothing = 0.5 * capacity * one, capacity * one, 0.0 * one
        return Table(
            peak=half,
            peak_sigma=width,
            allocated=half,
            allocated_sigma=width,
            needed=half,
            host=nothing,
            step=samples,
            step_sigma=one,
            samples=one,
        )


class WithoutLadder(Proposer):
    """Every rung in an engine of its own."""

    def next_rung(self, current: Candidate) -> None:
        return None


class WithoutDominance(Proposer):
    """What ran out of memory says nothing of other candidates but through the predictor."""

    def observe(self, candidate: Candidate, outcome: Outcome) -> None:
        before = self._openings.open.copy()
        super().observe(candidate, outcome)
        self._openings.open[:] = before
        self._openings.too_large[:] = False
        if outcome.kind.says_something_of_the_candidate:
            self._openings.close(candidate)


class WithoutSampler(Proposer):
    """The model alone, even where measurements refute the predictor."""

    def _advised(self) -> Proposal:
        return Proposal(self.candidates[int(self._worth()[0].argmax())], "best predicted")


WRONG: dict[str, type[Predictor]] = {
    "inverted": Inverted,
    "constant": Constant,
    "drawn": Drawn,
    "wrong-time": WrongTime,
    "wrong-memory": WrongMemory,
}
MISLED = {f"misled-{number}": misled(number) for number in range(1, 6)}
# One part taken away each, or made wrong.
ABLATIONS: dict[str, tuple[type[Predictor], type[Proposer]]] = {
    "autotune": (Predictor, Proposer),
    "adversarial": (Biased, Proposer),
    "no-predictor": (Ignorant, Proposer),
    "no-ladder": (Predictor, WithoutLadder),
    "no-dominance": (Predictor, WithoutDominance),
    "no-sampler": (Predictor, WithoutSampler),
    **{name: (predictor, Proposer) for name, predictor in (MISLED | WRONG).items()},
}


def autotune(
    landscape: Landscape,
    trace: Trace,
    seed: int,
    budget: float,
    parts: str,
    until_found: bool = False,
    start: Candidate | None = None,
) -> dict[str, Any]:
    executor = ReplayExecutor(landscape, seed)
    job, hardware, space = landscape.job(), landscape.hardware(), landscape.space()
    store = StudyStore.in_memory(job, hardware, space)
    make_predictor, make_proposer = ABLATIONS[parts]
    predictor = make_predictor(job, hardware, trace)
    candidates = sorted(landscape.rows, key=str)
    random.Random(seed).shuffle(candidates)
    proposer = make_proposer(candidates, space, job, hardware, seed, predictor)
    taken = start is not None and proposer.begin_with(Start(start, "a start"))
    began = time.perf_counter()
    tuner = Tuner(
        store,
        executor,
        proposer,
        space,
        hardware,
        budget_seconds=budget,
        cancelled=lambda: until_found and "trials98" in judge(landscape, executor, budget),
    )
    result = tuner.run()
    trials = max(1, len(executor.ledger.trials))
    return {
        **judge(landscape, executor, budget),
        "own_seconds": (time.perf_counter() - began) / trials,
        "ended": result.ended,
        "used": result.used_seconds,
        "taken": taken,
    }


def baseline(landscape: Landscape, seed: int, budget: float, strategy: Callable[..., Iterator[None]]) -> dict[str, Any]:
    """A strategy that starts a process for every trial."""
    executor = ReplayExecutor(landscape, seed)

    def run(candidate: Candidate, effort: Effort = SEARCH) -> Outcome:
        session = executor.session(candidate, "")
        outcome = session.measure(candidate, effort, budget - executor.now())
        session.close()
        return outcome

    for _ in strategy(landscape, seed, run):
        if executor.now() >= budget:
            break
    return judge(landscape, executor, budget)


def at_random(landscape: Landscape, seed: int, run: Run) -> Iterator[None]:
    order = sorted(landscape.rows, key=str)
    random.Random(seed).shuffle(order)
    for candidate in order:
        run(candidate, SEARCH)
        yield


def by_optuna(make: Callable[[int], optuna.samplers.BaseSampler]) -> Callable[..., Iterator[None]]:
    """Any of Optuna's samplers over the table's knobs; an out-of-memory is a violated constraint, in GiB."""

    def strategy(landscape: Landscape, seed: int, run: Run) -> Iterator[None]:
        study = optuna.create_study(direction="maximize", sampler=make(seed))
        space = landscape.space()
        seen: dict[Candidate, tuple[float, float]] = {}
        for _ in range(3000):
            trial = study.ask()
            knobs = {
                name: trial.suggest_categorical(name, domain.values)
                for name, domain in space.knobs.items()
                if name != ACCUMULATION
            }
            batch = landscape.facts.get("global_batch_size")
            if batch:
                knobs[ACCUMULATION] = batch // int(landscape.facts["n_gpus"]) // int(knobs[MICRO_BATCH])
            elif ACCUMULATION in space.knobs:
                knobs[ACCUMULATION] = trial.suggest_categorical(ACCUMULATION, space.knobs[ACCUMULATION].values)
            candidate = Candidate.of(knobs)
            if candidate not in landscape.rows:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            if candidate not in seen:
                outcome = run(candidate, SEARCH)
                speed = outcome.measurement.samples_per_second if outcome.measurement else 0.0
                seen[candidate] = speed, (outcome.missing_bytes or 0) / GIB if not outcome.ok else 0.0
                yield
            speed, short = seen[candidate]
            trial.set_user_attr("short", short)
            study.tell(trial, speed)

    return strategy


def short_of_memory(trial: optuna.trial.FrozenTrial) -> list[float]:
    return [float(trial.user_attrs.get("short", 0.0))]


def tpe(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, constraints_func=short_of_memory)


def gp(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.GPSampler(seed=seed, constraints_func=short_of_memory)


def like_deepspeed(landscape: Landscape, seed: int, run: Run) -> Iterator[None]:
    """The order of deepspeed/autotuning/autotuner.py (0.19.8) over what of its grid the table has. It tunes neither
    offload nor checkpointing; where the table fixes the global batch, accumulation follows from the micro-batch."""

    def speed(candidate: Candidate) -> float:
        outcome = run(candidate, FULL)
        return outcome.measurement.samples_per_second if outcome.measurement else 0.0

    own = [
        c for c in landscape.rows if c.offload_optimizer == "none" and c.offload_param == "none" and not c.checkpointing
    ]
    best_before, largest_before, metric_before = 0, 0, 0.0
    for stage in (0, 1, 2, 3):
        mine = [c for c in own if c.stage == stage]
        # templates: buckets of 5e8, no overlap, contiguous off; sub_group_size as large as the table has
        first = [
            c
            for c in mine
            if c.get("reduce_bucket_size", 5e8) == 5e8
            and not c.get("overlap_comm", False)
            and not c.get("contiguous_gradients", False)
        ]
        top = max((c.get("sub_group_size", 0) for c in first), default=0)
        first = [c for c in first if c.get("sub_group_size", top) == top]
        sizes = sorted({c.micro_batch for c in first})
        metrics: dict[int, float] = {}
        for size in [s for s in sizes if s >= max(1, largest_before)][:1] + sizes[::-1]:
            if size in metrics:
                continue
            candidate = max((c for c in first if c.micro_batch == size), key=lambda c: c.accumulation)
            metrics[size] = speed(candidate)
            yield
            if not metrics[size] and len(metrics) == 1:
                break  # not even the smallest runs: the stage is left
        ran = {size: metric for size, metric in metrics.items() if metric}
        if not ran or max(ran) < largest_before:
            continue
        best = max(ran, key=ran.__getitem__)
        if stage and (best <= best_before or ran[best] < metric_before):
            largest_before = max(largest_before, *ran)
            continue
        if stage:
            grid = [
                c
                for c in mine
                if c.micro_batch in ran
                and c.get("sub_group_size", top) == top
                and c.get("reduce_bucket_size", 5e8) in (5e7, 5e8, 1e9)
            ]
            since = 0
            for candidate in sorted(
                grid,
                key=lambda c: (
                    -c.get("overlap_comm", 0),
                    c.get("reduce_bucket_size", 0),
                    c.get("contiguous_gradients", 0),
                    c.micro_batch,
                ),
            ):
                found = speed(candidate)
                since = 0 if found > ran[best] else since + 1
                if found > ran[best]:
                    best = candidate.micro_batch
                    ran[best] = found
                yield
                if since >= 5:  # tuner_early_stopping
                    break
        best_before, largest_before, metric_before = best, max(ran), ran[best]


def judge(landscape: Landscape, executor: ReplayExecutor, budget: float) -> dict[str, Any]:
    """When the run first measured something within 5 % and 2 % of the table's best, and what that had cost."""
    ledger, best = executor.ledger, landscape.best_step_seconds
    found: dict[str, Any] = {
        "ooms": sum(kind is not Kind.OK for _, _, kind in ledger.trials),
        "oom_share": ledger.oom_seconds / budget,
        "overrun": max(0.0, executor.now() - budget),
        "trials": len(ledger.trials),
    }
    for name, tolerance in (("95", 0.95), ("98", 0.98)):
        for at, (seconds, candidate, kind) in enumerate(ledger.trials):
            if kind is Kind.OK and best / landscape.seconds_per_sample(candidate) >= tolerance and seconds <= budget:
                found |= {
                    f"minutes{name}": seconds / 60,
                    f"trials{name}": at + 1,
                    f"processes{name}": sum(start < seconds for start in ledger.process_starts),
                    f"ooms{name}": sum(k is not Kind.OK for _, _, k in ledger.trials[:at]),
                }
                break
    return found


def one(task: tuple[Path, str, int, float, bool]) -> dict[str, Any]:
    path, strategy, seed, budget, until_found = task
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    landscape = load_landscape(path)
    if strategy in ABLATIONS:
        return autotune(landscape, trace_job(landscape.job()), seed, budget, strategy, until_found)
    kind = {"tpe": by_optuna(tpe), "gp": by_optuna(gp), "random": at_random, "deepspeed": like_deepspeed}[strategy]
    return baseline(landscape, seed, budget, kind)


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
        "trials95": middle(column("trials95")),
        "processes95": middle(column("processes95")),
        "ooms95": middle(column("ooms95")),
        "minutes95": middle(column("minutes95")),
        "minutes95_p90": middle(column("minutes95"), 0.9),
        "ooms": statistics.median(run["ooms"] for run in runs),
        "oom_share": round(statistics.median(run["oom_share"] for run in runs), 4),
        "overrun_seconds": max(run["overrun"] for run in runs),
        "own_seconds": statistics.median(run["own_seconds"] for run in runs) if "own_seconds" in runs[0] else None,
    }


BASELINES = ("tpe", "gp", "random", "deepspeed")
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


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--landscapes", type=Path, nargs="+", default=[DATA / "landscapes"], help="folders of tables")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--strategies", default="autotune,tpe,random,deepspeed")
    parser.add_argument("--budget", default="30m")
    parser.add_argument("--until-found", action="store_true", help="end a study of ours once 98 %% was measured")
    parser.add_argument("--jobs", type=int, default=2)
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
        trace_job(load_landscape(path).job())  # once, before the processes share the cache
    tasks = [
        (path, s, seed, budget, arguments.until_found)
        for path in tables
        for s in strategies
        for seed in range(arguments.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        runs = pool.map(one, tasks, chunksize=1)
    rows = []
    for path in tables:
        for strategy in strategies:
            mine = [run for task, run in zip(tasks, runs, strict=True) if task[:2] == (path, strategy)]
            rows.append(summarise(path.name.split(".csv")[0], strategy, mine))
    print_table(f"simulated, {arguments.seeds} seeds, {arguments.budget} each", rows, keys=2)
    if times := times_fewer(rows):
        print(f"minutes to 95 %, best other strategy / autotune, geometric mean: {times:.2f}")
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
