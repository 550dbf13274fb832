"""What other tuners do, for benchmarks/search/search.py: at random, Optuna's samplers, and the order of deepspeed/autotuning."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from typing import Any

import optuna

from autotune.executors.base import SEARCH, MeasureSpec
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.outcome import Outcome
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayTable

FULL = MeasureSpec(full=True, min_steps=5)  # what DeepSpeed's autotuner runs
Run = Callable[[Candidate, MeasureSpec], Outcome]
Strategy = Callable[[ReplayTable, int, Run], Iterator[None]]


def at_random(replay_table: ReplayTable, seed: int, run: Run) -> Iterator[None]:
    order = sorted(replay_table.rows, key=str)
    random.Random(seed).shuffle(order)
    for candidate in order:
        run(candidate, SEARCH)
        yield


def by_optuna(make: Callable[[int], optuna.samplers.BaseSampler]) -> Strategy:
    """Any of Optuna's samplers over the table's knobs; an out-of-memory is a violated constraint, in GiB."""

    def strategy(replay_table: ReplayTable, seed: int, run: Run) -> Iterator[None]:
        study = optuna.create_study(direction="maximize", sampler=make(seed))
        space = replay_table.space()
        seen: dict[Candidate, tuple[float, float]] = {}
        for _ in range(3000):
            if len(seen) == len(replay_table.rows):
                return
            trial = study.ask()
            knobs: dict[str, Any] = {
                name: trial.suggest_categorical(name, domain.values)
                for name, domain in space.knobs.items()
                if name != ACCUMULATION
            }
            batch = replay_table.facts.get("global_batch_size")
            if batch:
                knobs[ACCUMULATION] = batch // int(replay_table.facts["n_gpus"]) // int(knobs[MICRO_BATCH])
            elif ACCUMULATION in space.knobs:
                knobs[ACCUMULATION] = trial.suggest_categorical(ACCUMULATION, space.knobs[ACCUMULATION].values)
            candidate = Candidate.of(knobs)
            if candidate not in replay_table.rows:
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


# -- deepspeed/autotuning/autotuner.py (0.19.8) --------------------------------------------------------------------------


def like_deepspeed(replay_table: ReplayTable, seed: int, run: Run) -> Iterator[None]:
    """Its order over what of its grid the table has. It tunes neither offload nor checkpointing; where the table fixes the
    global batch, accumulation follows from the micro-batch."""
    own = [
        c
        for c in replay_table.rows
        if c.offload_optimizer == "none" and c.offload_param == "none" and not c.checkpointing
    ]
    best_before, largest_before, metric_before = 0, 0, 0.0
    for stage in (0, 1, 2, 3):
        mine = [c for c in own if c.stage == stage]
        first, top = of_templates(mine)
        ran = yield from micro_batches(first, max(1, largest_before), run)
        if not ran or max(ran) < largest_before:
            continue
        best = max(ran, key=ran.__getitem__)
        if stage and (best <= best_before or ran[best] < metric_before):
            largest_before = max(largest_before, *ran)
            continue
        if stage:
            best = yield from grid(mine, top, ran, best, run)
        best_before, largest_before, metric_before = best, max(ran), ran[best]


def of_templates(stage: list[Candidate]) -> tuple[list[Candidate], int]:
    """What a stage begins with: buckets of 5e8, no overlap, contiguous off, and sub_group_size as large as the table has, which
    comes beside it."""
    first = [
        c
        for c in stage
        if c.get("reduce_bucket_size", 5e8) == 5e8
        and not c.get("overlap_comm", False)
        and not c.get("contiguous_gradients", False)
    ]
    top = max((c.get("sub_group_size", 0) for c in first), default=0)
    return [c for c in first if c.get("sub_group_size", top) == top], top


def micro_batches(first: list[Candidate], least: int, run: Run) -> Generator[None, None, dict[int, float]]:
    """Speeds by micro-batch of those that run: the least that is worth a try, then from the largest down."""
    sizes = sorted({c.micro_batch for c in first})
    metrics: dict[int, float] = {}
    for size in [s for s in sizes if s >= least][:1] + sizes[::-1]:
        if size in metrics:
            continue
        candidate = max((c for c in first if c.micro_batch == size), key=lambda c: c.accumulation)
        metrics[size] = speed(run, candidate)
        yield
        if not metrics[size] and len(metrics) == 1:
            break  # not even the smallest runs: the stage is left
    return {size: metric for size, metric in metrics.items() if metric}


def grid(stage: list[Candidate], top: int, ran: dict[int, float], best: int, run: Run) -> Generator[None, None, int]:
    """The other knobs at micro-batches that ran, whose speeds it corrects; returns the best micro-batch."""
    tried = [
        c
        for c in stage
        if c.micro_batch in ran
        and c.get("sub_group_size", top) == top
        and c.get("reduce_bucket_size", 5e8) in (5e7, 5e8, 1e9)
    ]
    since = 0
    for candidate in sorted(tried, key=place_in_grid):
        found = speed(run, candidate)
        since = 0 if found > ran[best] else since + 1
        if found > ran[best]:
            best = candidate.micro_batch
            ran[best] = found
        yield
        if since >= 5:  # tuner_early_stopping
            break
    return best


def place_in_grid(c: Candidate) -> tuple[Any, ...]:
    buckets, contiguous = c.get("reduce_bucket_size", 0), c.get("contiguous_gradients", 0)
    return -c.get("overlap_comm", 0), buckets, contiguous, c.micro_batch


def speed(run: Run, candidate: Candidate) -> float:
    outcome = run(candidate, FULL)
    return outcome.measurement.samples_per_second if outcome.measurement else 0.0


STRATEGIES: dict[str, Strategy] = {
    "tpe": by_optuna(tpe),
    "gp": by_optuna(gp),
    "random": at_random,
    "deepspeed": like_deepspeed,
}
