"""Runs a training script for some steps and times them, knowing nothing of autotune.

`torchrun … timed.py STEPS OUT SCRIPT ARGS…` writes the median seconds of an optimizer step, the losses and samples a
second to OUT. On CPU ranks accelerate's loops are told so first (accelerate 1.15 takes each for the only process).
"""

import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path

import accelerate
import torch
import torch.distributed
from deepspeed.runtime.engine import DeepSpeedEngine

steps, out, script, arguments = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
ends: list[float] = []
losses: list[float] = []
step, backward = DeepSpeedEngine.step, DeepSpeedEngine.backward


def timed_step(engine, *args, **kwargs):
    boundary = engine.is_gradient_accumulation_boundary()
    result = step(engine, *args, **kwargs)
    if not boundary or not engine.module.training:
        return result
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ends.append(time.perf_counter())
    if len(ends) > steps:
        seconds = [b - a for a, b in itertools.pairwise(ends[5:])]
        if torch.distributed.get_rank() == 0:
            median = statistics.median(seconds)
            found = {"step_seconds": median, "samples_per_second": engine.train_batch_size() / median,
                     "mean_step_seconds": statistics.fmean(seconds)}  # fmt: skip
            out.write_text(json.dumps(found))
        torch.distributed.barrier()
        os._exit(0)
    return result


DeepSpeedEngine.step = timed_step
if not torch.cuda.is_available():
    accelerate.PartialState(cpu=True)
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
