"""DeepSpeed's own autotuner on the model of `study`.

It cleans up through pdsh, which a machine without a network lacks: a stand-in is enough, since all of it runs on this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.problem.models import resolve_model
from benchmarks.common import HERE
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.study import MODEL
from benchmarks.trials.ranks import plain_environment, run_limited

_SPARE_SECONDS = 15.0  # of the step, to report what was found until then
_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}}


def run(ground: Ground) -> Iterator[Row]:
    if importlib.util.find_spec("tabulate") is None:
        why = "not measured: tabulate is not installed (pip install deepspeed[autotuning])"
        yield {"what": "DeepSpeed's autotuner", "why": why}
        return
    os.chdir(ground.folder)
    Path("model.json").write_text(
        json.dumps(resolve_model(ground.choose(MODEL, "tiny-llama")).config), encoding="utf-8"
    )
    Path("ds.json").write_text(json.dumps(config(ground)), encoding="utf-8")
    Path("bin").mkdir()
    Path("bin/pdsh").write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
    Path("bin/pdsh").chmod(0o755)
    words = ["deepspeed", "--autotuning", "tune", "--num_gpus", "1", str(HERE / "search" / "deepspeed_train.py")]
    words += ["--model", str(ground.folder / "model.json"), "--tokens", ground.choose("1024", "32")]
    words += ["--deepspeed", "--deepspeed_config", "ds.json"]
    began = time.monotonic()
    try:
        done = run_limited(words, ground.seconds - _SPARE_SECONDS, env=environment(ground))
        said = f"exit {done.returncode}: {(done.stdout + done.stderr)[-5000:]}"
    except RuntimeError as late:
        said = str(late)
    results = Path("autotuning_results")
    optimal = results / "ds_config_optimal.json"
    best = json.loads(optimal.read_text()) if optimal.exists() else None
    tried = [[path.parent.name, path.read_text()[:300]] for path in sorted(results.glob("*/metrics.json"))]
    ended = {path.parent.name: path.read_text(errors="replace")[-800:] for path in results.glob("*/stderr.log")}
    row: Row = {"what": "DeepSpeed's autotuner", "s": time.monotonic() - began, "experiments": len(tried)}
    yield {**row, "best": best, "tried": tried, "said": [said], "stderr": ended, EXPECTED: best is not None}


def config(ground: Ground) -> dict[str, Any]:
    """Return the training's config, of which the autotuner searches stage and micro-batch."""
    tuning = {"enabled": True, "fast": True, "metric": "throughput", "start_profile_step": 3, "end_profile_step": 5}
    tuning |= {"num_tuning_micro_batch_sizes": ground.choose(2, 1), "max_train_batch_size": ground.choose(64, 2)}
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "optimizer": _OPTIMIZER,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": ground.choose([1, 2], [1])},
        "autotuning": tuning,
    }


def environment(ground: Ground) -> dict[str, str]:
    """Return the launcher's environment: `deepspeed` lies beside Python, or in the `bin` of a `pip install --target`."""
    packages = [Path(one) / "bin" for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    places = [ground.folder / "bin", *packages, Path(sys.executable).parent, os.environ.get("PATH", os.defpath)]
    # an experiment whose standard error has the word "error" counts as failed: many warnings have it
    quiet = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    env = {**plain_environment(ground.device, 1), "DS_ACCELERATOR": ground.device, **quiet}
    return {**env, "PATH": os.pathsep.join(map(str, places))}
