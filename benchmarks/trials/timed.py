"""Runs a training script and logs its steps, knowing nothing of autotune.

`torchrun … timed.py LOG SCRIPT ARGS…` writes a line to LOG at the end of every optimizer step: its clock
(`time.perf_counter`, one for all processes) and the samples that it trained on. On CPU ranks accelerate's loops are told
so first (accelerate 1.15 takes each for the only process).
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed
from deepspeed.runtime.engine import DeepSpeedEngine

log, script, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
step = DeepSpeedEngine.step


def timed_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
    boundary = engine.is_gradient_accumulation_boundary()
    result = step(engine, *args, **kwargs)
    if not boundary or not engine.module.training:
        return result
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if torch.distributed.get_rank() == 0:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"end": time.perf_counter(), "samples": engine.train_batch_size()}) + "\n")
    return result


DeepSpeedEngine.step = timed_step
if not torch.cuda.is_available():
    accelerate.PartialState(cpu=True)
sys.argv = [script, *arguments]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
