"""Is what a trial measures what training does? `python benchmarks/trials/fidelity.py [STUDY] [--rounds 3] [--steps 25]`.

Each candidate is measured by a trial of the model, by a trial of a script that trains the same, and trained by the command
that `autotune` prints (`OMP_NUM_THREADS=… torchrun …`) in the environment of whoever started this, one after another, round
after round; which comes first moves on with every round, since a machine's pace drifts. Each is timed for as long: at least
so many seconds and steps as a trial. A trial of a model takes the median of its steps; one of a script the mean where slow
steps recur (`rank/step_statistics.py`). Plain training's steps are taken as those are that they are compared with.

A candidate's ratio is the median over rounds of trial / torchrun of the same round. The order is Spearman's, of speeds divided
by their own job's median: between models it would say nothing.

Without STUDY: 4 candidates each of 3 models on 1 and on 2 CPU ranks. With it: the study's winner and others of its trials,
on what it was tuned on, without the script.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.commands.script_probe import StartupDeadline, probe
from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware, detect, threads_per_rank
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec, resolve_model
from autotune.rank.step_statistics import pace_of
from autotune.script.profile import job_of, unknown_job
from autotune.search.fingerprint import watched_variables
from autotune.search.study import StudyStore
from autotune.workers.launchers import variables_of
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.predict.rows import spearman
from benchmarks.trials.ranks import WARMUP_STEPS, LocalExecutor, opened, plain_words, train_plainly

SEQ_LEN, ROWS_PER_RANK = 64, 8  # micro-batch x accumulation
RATIO_TARGET, ORDER_TARGET = 0.03, 0.95
MEASURE_SPEC = MeasureSpec(full=True, min_steps=8, max_steps=60, min_seconds=4.0)
SMALL_SPEC = MeasureSpec(full=True, min_steps=2, max_steps=3, min_seconds=0.0)
DEADLINE_SECONDS = 600.0
ENDLESS = 10**6  # steps of a script that is measured: it is ended before

# Large enough that most of its tensors have sizes at which malloc's thresholds decide (28 million parameters, bf16).
GEMMA_28M = ModelSpec(
    "gemma-28m",
    {
        "model_type": "gemma2",
        "vocab_size": 32_000,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "sliding_window": 256,
    },
    "made here",
)
MODELS = ((resolve_model("tiny-llama"), "fp32"), (resolve_model("tiny-gemma-2"), "fp32"), (GEMMA_28M, "bf16"))
FAMILIES: tuple[tuple[dict[str, Any], int], ...] = (  # and their micro-batch
    ({"zero_stage": 0}, 8),
    ({"zero_stage": 0}, 1),
    ({"zero_stage": 1, "offload_optimizer": "cpu", "reduce_bucket_size": 5_000_000}, 2),
    ({"zero_stage": 3, "reduce_bucket_size": 5_000_000, "sub_group_size": 10_000_000}, 4),
)


Way = Callable[["Row"], list[float]]  # samples a second of a candidate, under each of the way's names
# What each way of trials is compared with: plain training's steps, taken as the trial takes its own.
PLAIN = {"--model": "torchrun", "script": "torchrun as a script's"}


@dataclass(frozen=True)
class How:
    """How carefully to compare."""

    rounds: int
    steps: int  # of torchrun's trainings, after their warm-up, at least
    measure_spec: MeasureSpec

    def steps_of(self, row: Row) -> int:
        """Steps that take as long as a trial does, by what is known of the candidate's speed."""
        speeds = [speed for speeds in row.speeds.values() for speed in speeds]
        samples = row.job.ranks * row.candidate.micro_batch * row.candidate.accumulation
        seconds = samples / statistics.median(speeds) if speeds else math.inf
        return max(self.steps, math.ceil(self.measure_spec.min_seconds / seconds))


@dataclass
class Row:
    """One candidate of one job, and its speeds round by round in samples a second, by who measured or trained it."""

    job: Job
    candidate: Candidate
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def ratio(self, who: str) -> float:
        return statistics.median(t / p for t, p in zip(self.speeds[who], self.speeds[PLAIN[who]], strict=True))

    def to_json(self) -> dict[str, Any]:
        trials = {f"{who} / torchrun": self.ratio(who) for who in PLAIN if who in self.speeds}
        speed = statistics.median(self.speeds["torchrun"])
        named = {"model": self.job.model.name, "ranks": self.job.ranks, "candidate": str(self.candidate)}
        return {**named, "torchrun samples/s": speed, **trials, "speeds": self.speeds}


def candidates() -> list[Candidate]:
    return [Candidate.of({**knobs, MICRO_BATCH: size, ACCUMULATION: ROWS_PER_RANK // size}) for knobs, size in FAMILIES]


def of_study(store: StudyStore, count: int) -> list[Candidate]:
    """The winner and others that were measured, evenly from the fastest to the slowest."""
    measured = store.measured()
    if store.winner is None or store.job.script or store.job.workload:
        raise SystemExit("expected a study of a named model with a winner")
    order = sorted(measured, key=lambda one: -measured[one].samples_per_second)
    several = min(count, len(order))
    kept = [order[at * len(order) // several] for at in range(several)]
    return list(dict.fromkeys([store.winner.candidate, *kept]))[:count]


def compare(
    job: Job, hardware: Hardware, tried: list[Candidate], folder: Path, how: How, *, with_script: bool
) -> list[Row]:
    """Every candidate of a job, round after round in each of the ways."""
    rows = [Row(job, one) for one in tried]
    with ExitStack() as stack:
        of_model = stack.enter_context(opened(job, hardware, folder / "model", tried))
        ways: dict[tuple[str, ...], Way] = {
            tuple(PLAIN.values()): lambda row: trained(job, row.candidate, how.steps_of(row), hardware.device),
            ("--model",): lambda row: measured(of_model, row.candidate, how.measure_spec),
        }
        if with_script:
            config = tried[0].ds_config(job)
            script = Script(tuple(plain_words(job, config, ENDLESS, folder)), str(folder))
            of_script = stack.enter_context(opened(unknown_job(script, hardware), hardware, folder / "script", tried))
            seen = probe(
                of_script, script, folder, StartupDeadline(DEADLINE_SECONDS), lambda text: print(text, file=sys.stderr)
            )
            of_script.job = job_of(seen.script, hardware, job.global_batch_size)
            ways["script",] = lambda row: measured(of_script, row.candidate, how.measure_spec)
        in_turn(rows, ways, how.rounds)
    return rows


def in_turn(rows: list[Row], ways: dict[tuple[str, ...], Way], rounds: int) -> None:
    names = [*list(ways)[1:], *list(ways)[:1]]  # torchrun last, at first: by then a speed is known
    for at, row in itertools.product(range(rounds), rows):
        first = at % len(names)
        for way in names[first:] + names[:first]:
            for who, speed in zip(way, ways[way](row), strict=True):
                row.speeds.setdefault(who, []).append(speed)
        said = {who: round(values[-1], 3) for who, values in row.speeds.items()}
        print(row.job.model.name, row.job.ranks, row.candidate, said, file=sys.stderr, flush=True)


def trained(job: Job, candidate: Candidate, steps: int, device: str, warmup: int = WARMUP_STEPS) -> list[float]:
    """Samples a second of a training without autotune, by the median of its steps and as a script's are taken.

    Args:
        steps: after those of the warm-up.
    """
    variables = variables_of(candidate, threads_per_rank(job.ranks), watched_variables())
    config = candidate.ds_config(job)
    found = train_plainly(job, config, candidate.checkpointing, steps, device, variables, warmup=warmup)
    samples = job.ranks * candidate.micro_batch * candidate.accumulation
    return [found["samples_per_second"], samples / pace_of(found["each"]).seconds]


def measured(executor: LocalExecutor, candidate: Candidate, measure_spec: MeasureSpec) -> list[float]:
    """Samples a second of a trial in fresh ranks."""
    with closing(executor.session(candidate, uuid.uuid4().hex[:8])) as session:
        outcome = session.measure(candidate, measure_spec, DEADLINE_SECONDS)
    if outcome.measurement is None:
        raise SystemExit(f"{candidate}: {outcome.kind}: {outcome.reason}")
    return [outcome.measurement.samples_per_second]


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """For each way and number of ranks: the ratios' range, how many are within the target, and the order."""
    found = []
    for ranks in sorted({row.job.ranks for row in rows}):
        some = [row for row in rows if row.job.ranks == ranks]
        for who in [name for name in PLAIN if name in some[0].speeds]:
            ratios = [row.ratio(who) for row in some]
            order = spearman(relative(some, who), relative(some, PLAIN[who])) if len(some) > 1 else None
            found.append(
                {
                    "trial of": who,
                    "ranks": ranks,
                    "candidates": len(some),
                    "trial / torchrun, least": min(ratios),
                    "median": statistics.median(ratios),
                    "most": max(ratios),
                    f"within {100 * RATIO_TARGET:.0f} %": sum(abs(ratio - 1) <= RATIO_TARGET for ratio in ratios),
                    f"Spearman (target {ORDER_TARGET})": order,
                }
            )
    return found


def relative(rows: list[Row], who: str) -> list[float]:
    """Each row's speed over the median of its job's."""
    speeds = [statistics.median(row.speeds[who]) for row in rows]
    of_job: dict[str, list[float]] = {}
    for row, speed in zip(rows, speeds, strict=True):
        of_job.setdefault(row.job.key, []).append(speed)
    return [speed / statistics.median(of_job[row.job.key]) for row, speed in zip(rows, speeds, strict=True)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("study", nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--models", type=int, default=len(MODELS), help="the first so many")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--candidates", type=int, help="of each job; default: 12 of a study, all 4 else")
    arguments = parse(parser, rounds=1, steps=3, models=1, ranks="1", candidates=2)
    how = How(arguments.rounds, arguments.steps, SMALL_SPEC if arguments.small else MEASURE_SPEC)
    rows: list[Row] = []
    hardware = detect("cpu", 1)
    with tempfile.TemporaryDirectory() as name:
        if arguments.study:
            store = StudyStore.load(arguments.study)
            hardware = store.hardware
            tried = of_study(store, arguments.candidates or 12)
            rows = compare(store.job, hardware, tried, Path(name), how, with_script=False)
        for (model, precision), ranks in itertools.product(
            () if arguments.study else MODELS[: arguments.models], arguments.ranks.split(",")
        ):
            hardware = detect("cpu", int(ranks))
            job = Job(model, int(ranks), SEQ_LEN, precision, global_batch_size=ROWS_PER_RANK * int(ranks))
            folder = Path(name) / f"{model.name}-{ranks}"
            folder.mkdir()
            rows += compare(job, hardware, candidates()[: arguments.candidates], folder, how, with_script=True)
    each, whole = [row.to_json() for row in rows], summary(rows)
    shown = [{key: value for key, value in row.items() if key != "speeds"} for row in each]
    print_table(f"{how.steps} steps by torchrun against trials, {how.rounds} rounds in turn", shown, keys=3)
    print_table("of all", whole, keys=2)
    write_json(arguments.json, {"hardware": hardware.name, "candidates": each, "summary": whole})


if __name__ == "__main__":
    main()
