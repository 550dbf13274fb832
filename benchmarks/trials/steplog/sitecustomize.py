"""Logs the optimizer steps of a training that knows nothing of it: Python imports this where PYTHONPATH names its folder.

STEP_LOG names the file: a line at the end of every step of rank 0, with the clock (`time.perf_counter`, one for all
processes), and the rows and tokens that entered forwards of this rank since the step before, times the ranks. What they are
is seen in the forwards, not read from a config. Nothing is logged, and nothing is imported, in processes without DeepSpeed.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from typing import Any

ENGINE = "deepspeed.runtime.engine"


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for DeepSpeed's engine to be imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader  # whose method is replaced
        run = loader.exec_module

        def run_and_watch(module: Any) -> None:
            run(module)
            _watch(module.DeepSpeedEngine)

        loader.exec_module = run_and_watch
        return spec


def _watch(engine_class: Any) -> None:
    import torch

    forward, step = engine_class.forward, engine_class.step
    seen = {"rows": 0, "tokens": 0}

    def counted_forward(engine: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args and isinstance(args[0], torch.Tensor) else None)
        if ids is not None and engine.module.training and torch.is_grad_enabled():
            mask = kwargs.get("attention_mask")
            whole = mask if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else torch.ones_like(ids)
            seen["rows"] += ids.shape[0]
            seen["tokens"] += int(whole.sum())
        return forward(engine, *args, **kwargs)

    def timed_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
        boundary = engine.is_gradient_accumulation_boundary()
        result = step(engine, *args, **kwargs)
        if boundary and engine.module.training and seen["rows"]:
            ranks = torch.distributed.get_world_size()
            line = {"end": time.perf_counter(), "samples": seen["rows"] * ranks, "tokens": seen["tokens"] * ranks}
            seen.update(rows=0, tokens=0)
            if torch.distributed.get_rank() == 0:
                with open(os.environ["STEP_LOG"], "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        return result

    engine_class.forward, engine_class.step = counted_forward, timed_step


if os.environ.get("STEP_LOG"):
    sys.meta_path.insert(0, _Finder())
