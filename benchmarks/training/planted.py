"""Planted faults: how many changes of a training the certificate finds, and how often it raises a false alarm.

Two CPU ranks train small models under real DeepSpeed at stages 0 to 3, with and without offload. Each run's trace is
compared with that of stage 0, as a candidate's is with the user's own config.

- Faults scale, drop, delay and double gradients, sum the loss instead of averaging it, and scale the learning rate or
  the batch, by factors from 0.25 to 4.
- Clean runs change only stage, offload, split of the batch and data. Each must be `same`.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import queue
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.training_trace import MOST_STEPS, TrainingTrace
from autotune.search.certificate import Verdict, compare, with_noise
from benchmarks.common import command_line, parse, print_table, write_json

RANKS = 2
GLOBAL = 16  # rows of an optimizer step, over all ranks
FACTORS = (0.25, 0.5, 0.67, 1.5, 2.0, 4.0)
ENGINES = ((0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True))  # (stage, offload)
SPLITS = (1, 2, 4, 8)  # micro-batches
OWN = Candidate.of({"zero_stage": 0, MICRO_BATCH: 2, ACCUMULATION: GLOBAL // RANKS // 2})


@dataclass(frozen=True)
class Run:
    """One training of a few steps."""

    stage: int = 0
    offload: bool = False
    micro_batch: int = 2
    model: str = "mlp"  # mlp, dropout, attention or large
    optimizer: str = "AdamW"
    precision: str = "fp32"
    data: int = 0  # seed
    fault: str = ""
    factor: float = 1.0
    reseed: bool = False  # draws other random numbers from the first forward on

    @property
    def candidate(self) -> Candidate:
        """Return its config as a candidate."""
        batch = {MICRO_BATCH: self.micro_batch, ACCUMULATION: GLOBAL // RANKS // self.micro_batch}
        offload = {"offload_optimizer": "cpu"} if self.offload else {}
        return Candidate.of({"zero_stage": self.stage, **batch, **offload})

    @property
    def reference(self) -> Run:
        """Return the user's own run of the same training."""
        return dataclasses.replace(self, stage=0, offload=False, micro_batch=2, fault="", factor=1.0)


def faulty() -> Iterator[Run]:
    """Yield runs with a planted fault."""
    trained = (
        ("mlp", "AdamW", "fp32"),
        ("mlp", "SGD", "fp32"),
        ("dropout", "AdamW", "fp32"),
        ("attention", "AdamW", "bf16"),
    )
    for (stage, offload), (model, optimizer, precision) in itertools.product(ENGINES, trained):
        made = Run(stage, offload, model=model, optimizer=optimizer, precision=precision)
        for factor, fault in itertools.product(FACTORS, ("gradient", "rate", "batch")):
            if not (fault == "batch" and factor in (0.67, 1.5)):  # no whole number of rows
                yield dataclasses.replace(made, fault=fault, factor=factor)
        for fault, factor in (("drop", 0.75), ("delay", 0.0), ("double", 2.0), ("sum", 2.0)):
            yield dataclasses.replace(made, fault=fault, factor=factor)


def clean() -> Iterator[Run]:
    """Yield runs that train the same as their reference."""
    for (stage, offload), micro_batch in itertools.product(ENGINES, SPLITS):
        for model, optimizer in (("mlp", "AdamW"), ("mlp", "SGD"), ("attention", "AdamW"), ("dropout", "AdamW")):
            yield Run(stage, offload, micro_batch, model, optimizer)
        for data in (1, 2):
            yield Run(stage, offload, micro_batch, "mlp", "AdamW", "bf16", data)
        yield Run(stage, offload, micro_batch, "attention", "AdamW", "bf16")
        yield Run(stage, offload, micro_batch, "dropout", "AdamW", "bf16")


# -- a rank ------------------------------------------------------------------------------------------------------------


def _model(kind: str) -> Any:
    import torch

    torch.manual_seed(0)
    if kind == "attention":
        return torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    if kind == "large":
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(1536, 1536), torch.nn.Tanh())]
        return torch.nn.Sequential(torch.nn.Linear(32, 1536), *layers, torch.nn.Linear(1536, 32))
    middle = [torch.nn.Dropout(0.1)] if kind == "dropout" else []
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), *middle, torch.nn.Linear(64, 32))


def _trained(run: Run, rank: int) -> dict[str, Any]:
    """Train under real DeepSpeed and return the rank's report."""
    import deepspeed
    import torch

    from autotune.rank.random_state import RandomState
    from autotune.rank.training_trace import TraceRecorder

    model, accumulation = _model(run.model), GLOBAL // RANKS // run.micro_batch
    rate = 1e-3 * (run.factor if run.fault == "rate" else 1.0)
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[run.optimizer]
    zero: dict[str, Any] = {"stage": run.stage}
    if run.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if run.precision == "bf16" else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=rate), config=config)
    random_state = RandomState()
    recorder = TraceRecorder(random_state)
    rows = max(1, round(run.micro_batch * run.factor)) if run.fault == "batch" else run.micro_batch
    data = torch.randn(4096, 4, 32, generator=torch.Generator().manual_seed(run.data))
    random_state.seed(99 if run.reseed else 1)
    at, number, began = 0, 0, time.perf_counter()
    for step in range(MOST_STEPS):
        for _ in range(accumulation):
            batch = data[(at * RANKS + rank) * rows :][:rows]
            batch, at, number = batch.to(next(engine.module.parameters()).dtype), at + 1, number + 1
            recorder.forward(batch, len(batch))
            loss = (engine(batch) - batch).square().mean()
            weight = _weight(run, step, number, accumulation)
            if run.fault == "sum":  # a loss that the script sums over the rows of the micro-batch
                loss = loss * run.micro_batch
            recorder.backward(engine, loss)
            # The gradient is changed behind the loss that is seen, as DeepSpeed's own faults do.
            engine.backward(loss * weight)
            with recorder.step(engine) if engine.is_gradient_accumulation_boundary() else nullcontext():
                engine.step()
    report = recorder.report()
    assert report is not None
    return {**report, "seconds": [recorder.take_seconds(), time.perf_counter() - began]}


def _weight(run: Run, step: int, number: int, accumulation: int) -> float:
    """Return the factor by which a fault changes the gradient of a micro-batch."""
    if run.fault in ("gradient", "double"):
        return run.factor
    if run.fault == "drop":  # the last micro-batch of each step
        return 0.0 if number % accumulation == 0 else 1.0
    return 0.0 if run.fault == "delay" and step == 0 else 1.0


def _rank(rank: int, store: str, runs: list[Run], results: Any) -> None:
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    import deepspeed

    # DeepSpeed would compile its own collective of CPU ranks for minutes. An attribute hides the module `comm.torch`.
    collectives: Any = importlib.import_module("deepspeed.comm.torch")
    collectives.build_shm_op = lambda: None
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for at, run in enumerate(runs):
        try:
            results.put((at, rank, _trained(run, rank)))
        except Exception as error:  # both ranks fail alike: a config that DeepSpeed refuses
            results.put((at, rank, f"{type(error).__name__}: {error}"[:200]))
    torch.distributed.barrier()


def known_traces(file: Path | None) -> dict[Run, TrainingTrace | str]:
    """Return the traces that earlier calls have appended to a file."""
    found: dict[Run, TrainingTrace | str] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else ():
        with suppress(ValueError):  # the last line of a call that was killed
            row = json.loads(line)
            trace = row["trace"]
            found[Run(**row["run"])] = trace if isinstance(trace, str) else TrainingTrace.from_json(trace)
    return found


def traces(runs: list[Run], seconds: float, file: Path | None = None) -> dict[Run, TrainingTrace | str]:
    """Train all runs in two ranks and return their traces, or why a run failed.

    Args:
        runs: the runs.
        seconds: after which the ranks are stopped; the runs that are left have no entry.
        file: file of JSON lines to which each trace is appended. Runs that it has are not trained again.
    """
    found = known_traces(file)

    def keep(run: Run, reports: list[Any]) -> None:
        found[run] = _merged(reports)
        _append(file, run, found[run])

    _reports([run for run in runs if run not in found], seconds, keep)
    return found


def _reports(runs: list[Run], seconds: float, keep: Callable[[Run, list[Any]], None]) -> dict[Run, list[Any]]:
    """Train all runs in two ranks and return the reports of the ranks.

    Args:
        runs: the runs.
        seconds: after which the ranks are stopped.
        keep: called with each run and its reports.
    """
    import multiprocessing as mp

    done: dict[Run, list[Any]] = {}
    if not runs:
        return done
    context = mp.get_context("spawn")
    results = context.Queue()
    reports: dict[int, dict[int, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(r, f"{folder}/store", runs, results)) for r in range(RANKS)]
        for one in ranks:
            one.start()
        until = time.monotonic() + seconds
        left = RANKS * len(runs)
        while left and time.monotonic() < until and all(one.exitcode in (None, 0) for one in ranks):
            with suppress(queue.Empty):
                at, rank, report = results.get(timeout=1.0)
                reports.setdefault(at, {})[rank] = report
                left -= 1
                if len(reports[at]) == RANKS:
                    done[runs[at]] = [reports[at][one] for one in range(RANKS)]
                    keep(runs[at], done[runs[at]])
        for one in ranks:
            one.join(timeout=5)
            if one.is_alive():
                one.kill()
    return done


def _merged(reports: list[Any]) -> TrainingTrace | str:
    why = next((one for one in reports if isinstance(one, str)), None)
    return why or TrainingTrace.merged(reports) or "no trace"


def _append(file: Path | None, run: Run, trace: TrainingTrace | str) -> None:
    if file is not None:
        row = {"run": dataclasses.asdict(run), "trace": trace if isinstance(trace, str) else dataclasses.asdict(trace)}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _print_cost() -> None:
    """Print the share of the traced steps that recording takes, for 14 million parameters on two CPU ranks."""
    runs = [Run(stage, offload, model="large", optimizer="SGD") for stage, offload in ENGINES]
    reports = _reports(runs, 600.0, lambda run, each: None)
    rows = []
    for run, each in reports.items():
        recording, whole = ([one["seconds"][at] for one in each] for at in (0, 1))
        name = f"stage {run.stage}{', offload' * run.offload}"
        rows.append(
            {"": name, "step ms": 1e3 * max(whole) / MOST_STEPS, "recording %": 100 * max(recording) / max(whole)}
        )
    print_table("recording, share of the traced steps", rows)


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which no further run is started")
    parser.add_argument("--every", type=int, default=1, help="take only every n-th run")
    parser.add_argument("--traces", type=Path, help="file of JSON lines with each run's trace; a later call resumes it")
    parser.add_argument("--cost", action="store_true", help="print what recording costs, and end")
    arguments = parse(parser, every=37, seconds=200.0)
    if arguments.cost:
        _print_cost()
        return
    wrong, right = list(faulty())[:: arguments.every], list(clean())[:: arguments.every]
    references = list(dict.fromkeys(run.reference for run in [*right, *wrong]))
    again = [dataclasses.replace(one, reseed=True) for one in references if one.model == "dropout"]
    found = traces([*references, *again, *right, *wrong], arguments.seconds, arguments.traces)
    counts: Counter[str] = Counter()
    examples: list[dict[str, str]] = []
    for run in [*right, *wrong]:
        trace, reference = found.get(run), found.get(run.reference)
        if not isinstance(trace, TrainingTrace) or not isinstance(reference, TrainingTrace):
            counts["not run"] += 1
            examples.append({"run": str(run), "verdict": str(trace)})
            continue
        second = found.get(dataclasses.replace(run.reference, reseed=True))
        if isinstance(second, TrainingTrace):
            reference = with_noise(reference, second)
        verdict = compare(reference, OWN, trace, run.candidate)
        wanted = Verdict.DIFFERS if run.fault else Verdict.SAME
        counts[f"{run.fault or 'clean'}: {verdict.verdict}"] += 1
        if verdict.verdict is not wanted:
            examples.append({"run": str(run), "verdict": verdict.line})
    detected = sum(n for name, n in counts.items() if name.endswith("differs") and not name.startswith("clean"))
    planted = sum(n for name, n in counts.items() if ": " in name and not name.startswith("clean"))
    alarms, winners = counts["clean: differs"], sum(n for name, n in counts.items() if name.startswith("clean"))
    rows = [
        {"": "planted faults detected", "count": detected, "of": planted},
        {"": "false alarms among clean runs", "count": alarms, "of": winners},
        {"": "runs that failed or were out of time", "count": counts["not run"], "of": len(right) + len(wrong)},
    ]
    print_table("planted faults and clean runs, two CPU ranks", rows)
    print_table("by fault", [{"fault: verdict": name, "runs": n} for name, n in sorted(counts.items())])
    for one in examples[:20]:
        print(one)
    write_json(arguments.json, {"summary": rows, "counts": dict(counts), "unexpected": examples})


if __name__ == "__main__":
    main()
