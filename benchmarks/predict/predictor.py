"""How right the predictor is: `python benchmarks/predict/predictor.py [--json FILE] [--measure] [--skip live,speed]`.

One table against everything measured that we have: live tensors of real DeepSpeed on CPU ranks (`--measure` measures
them anew, else those of data/live_tensors_cpu.json), reference traces, published throughputs, landscapes, and what
DeepSpeed's and accelerate's own estimators say of the same rows. Rows of a skipped part stay in FILE as they were.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np

from autotune.predict import tracer
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job, traced_predictor
from autotune.predict.trace_data import Trace
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search.belief import HOPELESS_SIGMAS
from autotune.util.units import GIB
from autotune.versions import release
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.predict.live_error import live_error
from benchmarks.predict.rows import about, at_least, at_most, judged, percent, spearman
from benchmarks.predict.throughputs import published
from benchmarks.search.replay import load_replay_table
from tests.predict.passes import act_bytes_per_sequence

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Amount:
    """How much of each part is done."""

    live_rows: int | None = None
    reference_models: int | None = None
    published_models: int | None = None  # those that ran on most types of GPU first
    landscapes: int | None = None
    seeds: int = 20
    known: int = 3  # rows of a landscape that calibrate
    candidates: int = 10_000


def live_tensors(amount: Amount, measure: bool) -> list[dict[str, Any]]:
    """Against real engines, and what other estimators say of the same rows."""
    path = DATA / "live_tensors_cpu.json"
    if measure:
        script = str(Path(__file__).parent / "live_tensors.py")
        subprocess.run([sys.executable, script, "--json", str(path)], check=True)
    rows = [row for row in json.loads(path.read_text())["rows"] if row["live"]][: amount.live_rows]
    under_keys, of_adapters, of_images = (recorded_errors(kind, amount) for kind in ("keys", "lora", "images"))
    ours, on_same, deepspeed, accelerate = [], [], [], []
    for row in rows:
        job = Job(resolve_model(row["model"]), row["ranks"], row["seq_len"], row["precision"])
        trace, candidate, real = trace_job(job), Candidate.of(row["candidate"]), max(row["live"].values())
        ours.append(abs(live_error(row)))
        if candidate.stage >= 2:
            on_same.append(ours[-1])
            deepspeed.append(abs(deepspeed_says(candidate, trace, job) / real - 1))
        accelerate.append(abs(accelerate_says(trace, job) / real - 1))
    return [
        *about(f"real DeepSpeed, {len(rows)} candidates on CPU ranks", *median_and_worst(ours)),
        *about(
            f"the same under keys of a user's own config, {len(under_keys)} candidates", *median_and_worst(under_keys)
        ),
        *about(
            f"the same of which only adapters are trained, {len(of_adapters)} candidates",
            *median_and_worst(of_adapters),
        ),
        *about(
            f"the same of a vision-language model, {len(of_images)} candidates",
            at_most("live bytes at peak, mean error", statistics.fmean(of_images), 0.087),  # arXiv 2512.07853, of LLaVA
        ),
        *older_deepspeed(amount),
        *about(f"DeepSpeed's estimate_zero2/3, {len(on_same)} of those rows", five_times(deepspeed, on_same)),
        *about(f"accelerate estimate-memory, {len(rows)} rows", five_times(accelerate, ours)),
    ]


def recorded_errors(kind: str, amount: Amount) -> list[float]:
    """Errors of the rows that were counted of one kind of job."""
    rows = json.loads((DATA / f"live_tensors_{kind}_cpu.json").read_text())["rows"][: amount.live_rows]
    return [abs(live_error(row)) for row in rows]


def median_and_worst(errors: list[float]) -> list[dict[str, Any]]:
    return [
        at_most("live bytes at peak, median error", statistics.median(errors), 0.02),
        at_most("live bytes at peak, worst error", max(errors), 0.08),
    ]


def older_deepspeed(amount: Amount) -> list[dict[str, Any]]:
    """Against real engines of earlier versions, as they were counted then."""
    found = []
    for path in sorted(DATA.glob("live_tensors_deepspeed-*_cpu.json")):
        counted = json.loads(path.read_text())
        rows = counted["rows"][: amount.live_rows]
        errors = [abs(live_error(row, release(counted["deepspeed"]))) for row in rows]
        found += about(f"real DeepSpeed {counted['deepspeed']}, {len(rows)} candidates", *median_and_worst(errors))
    return found


def five_times(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """Another estimator's median error on the same rows against ours."""
    other, own = statistics.median(theirs), statistics.median(ours)
    shown = f"{percent(other)} / {percent(own)}"
    return judged("its median error / ours", other, shown, "5 times", other >= 5 * own)


def deepspeed_says(candidate: Candidate, trace: Trace, job: Job) -> float:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    total, out = sum(trace.parameters), candidate.offload_optimizer != "none"
    if candidate.stage == 2:
        host, device = estimate_zero2_model_states_mem_needs(total, job.ranks, 1, out, 1.0)[:2]
    else:
        host, device, _ = estimate_zero3_model_states_mem_needs(
            total, trace.largest, job.ranks, 1, out, candidate.offload_param != "none", True, 1.0
        )
    return float(device + (host / job.ranks if out else 0))


def accelerate_says(trace: Trace, job: Job) -> float:
    from accelerate.commands.estimate import estimate_training_usage

    kind = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[job.precision]
    parts = estimate_training_usage(4 * sum(trace.parameters), kind)
    return float(max(parts.values()))


def traces(amount: Amount) -> list[dict[str, Any]]:
    """The reference kept the key-value cache on, as the models' own configurations do."""
    reference = json.loads((DATA / "activation_traces.json").read_text())
    errors = []
    for name, row in list(reference.items())[: amount.reference_models]:
        with patch.object(tracer, "keep_cache"):
            trace = tracer.trace_model(Job(resolve_model(name), 1, row["seq"], "bf16"))
        errors += [
            abs(act_bytes_per_sequence(trace.plain) / row["act0"] - 1),
            abs(act_bytes_per_sequence(trace.of(True)) / row["act1"] - 1),
        ]
    return about(
        f"reference traces, {len(errors)} figures", at_most("act bytes a sequence, worst error", max(errors), 0.01)
    )


def landscapes(amount: Amount, folder: Path) -> list[dict[str, Any]]:
    """The first `ok` rows of a random order calibrate, all others are predicted."""
    found = []
    for path in sorted(folder.glob("*.csv*"), key=lambda path: path.stat().st_size)[: amount.landscapes]:
        replay_table = load_replay_table(path)
        job, hardware = replay_table.job(), replay_table.hardware()
        trace = trace_job(job)
        candidates = list(replay_table.rows)
        rows = [replay_table.rows[c] for c in candidates]
        ok = np.array([row.kind is OutcomeKind.OK for row in rows])
        peak = np.array([row.peak_gib for row in rows]) * GIB
        step = np.array([row.step_seconds or np.nan for row in rows])
        per_sample = step / np.array([c.micro_batch * c.accumulation for c in candidates])
        best = int(np.nanargmin(per_sample))
        errors, ranks, lost = [], [], 0
        for seed in range(amount.seeds):
            order = [i for i in range(len(rows)) if ok[i]]
            random.Random(seed).shuffle(order)
            predictor = Predictor(job, hardware, trace)
            for i in order[: amount.known]:
                measured = Measurement(step[i], 0.0, 4, 1.0, 1.0, int(peak[i]))
                predictor.observe(candidates[i], Outcome(OutcomeKind.OK, measurement=measured))
            table = predictor.table(candidates)
            others = np.ones(len(rows), dtype=bool)
            others[order[: amount.known]] = False
            errors.append(float(np.median(abs(table.peak / peak - 1)[others])))
            ranks.append(spearman(table.step[others & ok], step[others & ok]))
            lost += bool(table.needed[best] - HOPELESS_SIGMAS * table.peak_sigma[best] > hardware.capacity_bytes)
        rank = statistics.median(ranks)
        found += about(
            f"landscape {replay_table.name}, {amount.known} rows, {amount.seeds} orders",
            at_most("peak error", statistics.median(errors), 0.03),
            at_least("Spearman", rank, 0.95, f"{rank:.3f}"),
            judged("best ruled out", lost, str(lost), "0", lost == 0),
        )
    return sorted(found, key=lambda row: row["against"])


def speed(amount: Amount) -> list[dict[str, Any]]:
    """Seconds of 10,000 predictions after tracing."""
    job = Job(resolve_model("tiny-gemma-2"), 2, 64, "fp32")
    candidates = load_space("default").candidates(job)[: amount.candidates]
    predictor = traced_predictor(job, detect("cpu", 2))
    predictor.table(candidates[:10])
    began = time.perf_counter()
    predictor.table(candidates)
    seconds = time.perf_counter() - began
    return about(
        f"{len(candidates)} candidates",
        judged("seconds, columns to intervals", seconds, f"{seconds:.2f}", "1", seconds <= 1),
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--landscapes", type=Path, default=DATA / "landscapes")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=3, help="of a landscape that calibrate")
    parser.add_argument("--skip", default="", help="comma-separated: live,traces,published,landscapes,speed")
    arguments = parse(parser, seeds=1)
    small = {"live_rows": 40, "reference_models": 1, "published_models": 1, "landscapes": 1, "candidates": 200}
    amount = Amount(seeds=arguments.seeds, known=arguments.rows, **(small if arguments.small else {}))
    skipped = arguments.skip.split(",")
    rows = measured_parts(arguments, amount, skipped)
    print_table("the predictor", [shown(row, rows[at - 1] if at else None) for at, row in enumerate(rows)])
    known = kept_rows(arguments.json, "part", [name for name in PARTS if name not in skipped])
    write_json(arguments.json, sorted([*known, *rows], key=lambda row: PARTS.index(row["part"])))


def shown(row: dict[str, Any], above: dict[str, Any] | None) -> dict[str, Any]:
    """A row as the table has it: what it is about only where that changes."""
    same = above is not None and above["against"] == row["against"]
    met = "yes" if row["met"] else "no"
    return {"against": "" if same else row["against"], **{k: row[k] for k in ("measure", "ours", "target")}, "met": met}


PARTS = ("live", "traces", "published", "landscapes", "speed")


def measured_parts(arguments: argparse.Namespace, amount: Amount, skipped: list[str]) -> list[dict[str, Any]]:
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "live": lambda: live_tensors(amount, arguments.measure),
        "traces": lambda: traces(amount),
        "published": lambda: published(amount.published_models),
        "landscapes": lambda: landscapes(amount, arguments.landscapes),
        "speed": lambda: speed(amount),
    }
    return [{"part": name, **row} for name in PARTS if name not in skipped for row in parts[name]()]


if __name__ == "__main__":
    main()
