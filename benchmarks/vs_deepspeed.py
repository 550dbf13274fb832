"""The real `deepspeed --autotuning tune` against `autotune run`: same model, machine and rank, one after the other.

`python benchmarks/vs_deepspeed.py [--rounds 1] [--json FILE]`. Both winners are then trained by plain DeepSpeed for 50
steps, in turn. On CPU it needs `pip install deepspeed[autotuning]` and Debian's pdsh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import print_table, train_plainly, write_json

from autotune.problem.job import Job
from autotune.problem.models import resolve_model

HERE = Path(__file__).parent


def by_deepspeed(job: Job, folder: Path) -> tuple[dict[str, Any], float, int]:
    """(its best config, seconds, experiments)."""
    (folder / "model.json").write_text(json.dumps(job.model.config))
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": "all"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "autotuning": {
            "enabled": True,
            "fast": True,
            "metric": "throughput",
            "start_profile_step": 3,
            "end_profile_step": 5,
            "max_train_batch_size": 64,
            "num_tuning_micro_batch_sizes": 3,
        },
    }
    config["zero_optimization"] = {"stage": [0, 1, 2, 3]}
    (folder / "ds.json").write_text(json.dumps(config))
    env = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(HERE.parent),
        "OMP_NUM_THREADS": "2",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    began = time.monotonic()
    done = subprocess.run(
        [
            "deepspeed",
            "--autotuning",
            "tune",
            "--num_gpus",
            "1",
            str(HERE / "train_for_autotuner.py"),
            str(folder / "model.json"),
            str(job.seq_len),
            "--deepspeed",
            "--deepspeed_config",
            str(folder / "ds.json"),
        ],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    seconds = time.monotonic() - began
    found = folder / "autotuning_results" / "ds_config_optimal.json"
    if not found.exists():
        raise SystemExit(f"DeepSpeed's autotuner gave no config: {done.stdout[-3000:]} {done.stderr[-3000:]}")
    best = json.loads(found.read_text())
    best.pop("autotuning", None)
    experiments = len([p for p in (folder / "autotuning_results").iterdir() if p.is_dir()])
    return best, seconds, experiments


def by_autotune(job: Job, budget: str, name: str, global_batch: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """(its winner's config, the report, seconds)."""
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "autotune.cli",
            "run",
            "--model",
            job.model.name,
            "--device",
            "cpu",
            "--gpus",
            "1",
            "--seq-len",
            str(job.seq_len),
            "--budget",
            budget,
            "--study",
            name,
            "--global-batch-size",
            str(global_batch),
            "--yes",
            "--json",
        ],
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    report = json.loads(done.stdout)
    return json.loads(Path(report["files"][0]).read_text()), report, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-gemma-2")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--budget", default="40s")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if shutil.which("pdsh") is None:
        raise SystemExit("DeepSpeed's autotuner needs pdsh: apt-get install pdsh")
    job = Job(resolve_model(arguments.model), 1, arguments.seq_len, "fp32")
    by_autotune(job, "20s", f"vs-{int(time.time())}-ops", 8)  # builds DeepSpeed's ops for both, once a machine
    theirs, ours = [], []
    for at in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            theirs.append(by_deepspeed(job, Path(folder)))
        print("deepspeed:", theirs[-1], flush=True)
        batch = int(theirs[-1][0]["train_batch_size"])  # the same batches for both
        ours.append(by_autotune(job, arguments.budget, f"vs-{int(time.time())}-{at}", batch))
        print("autotune:", ours[-1][0], f"{ours[-1][2]:.0f} s", flush=True)
    config, seconds, experiments = theirs[-1]
    winner, report, own_seconds = ours[-1]
    checkpointing = bool(report["winner"]["candidate"].get("activation_checkpointing", False))
    rates: dict[str, list[float]] = {"deepspeed": [], "autotune": []}
    for _ in range(3):
        rates["deepspeed"].append(train_plainly(job, config, False, 55, "cpu")["samples_per_second"])
        rates["autotune"].append(train_plainly(job, winner, checkpointing, 55, "cpu")["samples_per_second"])
    medians = {name: statistics.median(values) for name, values in rates.items()}
    rows = [
        {
            "tuner": "deepspeed --autotuning tune",
            "wall s": statistics.median(t[1] for t in theirs),
            "experiments": experiments,
            "winner": f"z{config['zero_optimization']['stage']} mb{config['train_micro_batch_size_per_gpu']}",
            "trained samples/s": medians["deepspeed"],
        },
        {
            "tuner": "autotune run",
            "wall s": statistics.median(o[2] for o in ours),
            "experiments": None,
            "winner": str(report["winner"]["candidate"]),
            "trained samples/s": medians["autotune"],
        },
        {
            "tuner": "autotune / deepspeed",
            "wall s": own_seconds / seconds,
            "experiments": None,
            "winner": "target: wall 0.2, trained 1",
            "trained samples/s": medians["autotune"] / medians["deepspeed"],
        },
    ]
    print_table(f"{arguments.model}, one CPU rank, 50 steps by plain DeepSpeed in turn", rows)
    write_json(arguments.json, {"rows": rows, "trained": rates, "config": config, "winner": winner})


if __name__ == "__main__":
    main()
