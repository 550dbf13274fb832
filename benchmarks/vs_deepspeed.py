"""The real `deepspeed --autotuning tune` against `autotune run`: same model, machine and rank, one after the other.

`python benchmarks/vs_deepspeed.py [--rounds 1] [--json FILE]`. Both winners are then trained by plain DeepSpeed for 50
steps, in turn. On CPU it needs `pip install deepspeed[autotuning]` and Debian's pdsh; without them the small form leaves
DeepSpeed's tuner out and says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import HERE, command_line, parse, print_table, write_json
from ranks import autotune_run, train_plainly

from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.problem.models import resolve_model

WARMUP_STEPS = 5  # of train_plain.py


@dataclass(frozen=True)
class Found:
    """What one tuner found."""

    config: dict[str, Any]
    seconds: float
    winner: str
    experiments: int | None = None
    checkpointing: bool = False


def autotuner_config(stages: list[int], micro_batches: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stages},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "autotuning": {
            "enabled": True,
            "fast": True,
            "metric": "throughput",
            "start_profile_step": 3,
            "end_profile_step": 5,
            "max_train_batch_size": 64,
            "num_tuning_micro_batch_sizes": micro_batches,
        },
    }


def by_deepspeed(job: Job, folder: Path, config: dict[str, Any]) -> Found:
    (folder / "model.json").write_text(json.dumps(job.model.config))
    (folder / "ds.json").write_text(json.dumps(config))
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "2",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [
        *["deepspeed", "--autotuning", "tune", "--num_gpus", "1", str(HERE / "train_for_autotuner.py")],
        *[str(folder / "model.json"), str(job.seq_len), "--deepspeed", "--deepspeed_config", str(folder / "ds.json")],
    ]
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1500)
    seconds = time.monotonic() - began
    found = folder / "autotuning_results" / "ds_config_optimal.json"
    if not found.exists():
        raise SystemExit(f"DeepSpeed's autotuner gave no config: {done.stdout[-3000:]} {done.stderr[-3000:]}")
    best = json.loads(found.read_text())
    best.pop("autotuning", None)
    experiments = len([p for p in (folder / "autotuning_results").iterdir() if p.is_dir()])
    winner = f"z{best['zero_optimization']['stage']} mb{best['train_micro_batch_size_per_gpu']}"
    return Found(best, seconds, winner, experiments)


def by_autotune(job: Job, folder: Path, global_batch: int, *limits: str) -> Found:
    began = time.monotonic()
    done = autotune_run(
        *["--model", job.model.name, "--device", "cpu", "--gpus", "1", "--seq-len", str(job.seq_len)],
        *["--study", "vs", "--global-batch-size", str(global_batch), *limits],
        cwd=folder,
    )
    seconds = time.monotonic() - began
    if done.code:
        raise SystemExit(done.stderr[-3000:])
    winner = Candidate.of(done.report["winner"]["candidate"])
    config = json.loads((folder / done.report["files"][0]).read_text())
    return Found(config, seconds, str(winner), checkpointing=winner.checkpointing)


def row(tuner: str, found: list[Found], trained: list[float]) -> dict[str, Any]:
    last = found[-1]
    return {
        "tuner": tuner,
        "wall s": statistics.median(one.seconds for one in found),
        "experiments": last.experiments,
        "winner": last.winner,
        "trained samples/s": statistics.median(trained),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="tiny-gemma-2")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--budget", default="40s")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50, help="of each winner's training")
    parser.add_argument("--trainings", type=int, default=3)
    arguments = parse(parser, model="tiny-llama", seq_len=32, budget="5m", steps=3, trainings=1)
    tuner = shutil.which("pdsh") is not None and importlib.util.find_spec("tabulate") is not None
    if not tuner:
        print("DeepSpeed's autotuner needs pdsh and tabulate (apt-get install pdsh; pip install deepspeed[autotuning])")
        if not arguments.small:
            raise SystemExit(1)
    job = Job(resolve_model(arguments.model), 1, arguments.seq_len, "fp32")
    limits = ["--budget", arguments.budget, *(["--max-trials", "1"] if arguments.small else [])]
    asked = autotuner_config([0], 1) if arguments.small else autotuner_config([0, 1, 2, 3], 3)
    theirs: list[Found] = []
    ours: list[Found] = []
    with tempfile.TemporaryDirectory() as name:
        if not arguments.small:  # builds DeepSpeed's ops for both, once a machine
            by_autotune(job, made(Path(name) / "ops"), 8, "--budget", "20s")
        for at in range(arguments.rounds):
            batch = 8
            if tuner:
                theirs.append(by_deepspeed(job, made(Path(name) / f"theirs{at}"), asked))
                print("deepspeed:", theirs[-1], flush=True)
                batch = int(theirs[-1].config["train_batch_size"])  # the same batches for both
            ours.append(by_autotune(job, made(Path(name) / f"ours{at}"), batch, *limits))
            print("autotune:", ours[-1], flush=True)
    found = {"deepspeed": theirs, "autotune": ours} if tuner else {"autotune": ours}
    rates: dict[str, list[float]] = {which: [] for which in found}
    for _ in range(arguments.trainings):
        for which, all_found in found.items():
            one, steps = all_found[-1], arguments.steps + WARMUP_STEPS
            trained = train_plainly(job, one.config, one.checkpointing, steps, "cpu")
            rates[which].append(trained["samples_per_second"])
    rows = [row("autotune run", ours, rates["autotune"])]
    if tuner:
        rows.insert(0, row("deepspeed --autotuning tune", theirs, rates["deepspeed"]))
        against = {name: rows[1][name] / rows[0][name] for name in ("wall s", "trained samples/s")}
        target = "target: wall 0.2, trained 1"
        rows.append({"tuner": "autotune / deepspeed", "experiments": None, "winner": target, **against})
    title = f"{arguments.model}, one CPU rank, {arguments.steps} steps by plain DeepSpeed in turn"
    print_table(title, rows)
    config = theirs[-1].config if theirs else None
    write_json(arguments.json, {"rows": rows, "trained": rates, "config": config, "winner": ours[-1].config})


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
