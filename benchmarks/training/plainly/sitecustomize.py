"""Observer of a training without autotune: notes losses and weights of its DeepSpeed engines, and ends it after some steps.

Python imports this file in every process whose path has its folder. Variables, set by `benchmarks/training/winners.py`:
`OBSERVED` names the file to write, `OBSERVED_STEPS` the optimizer steps of the first engine with an optimizer,
`OBSERVED_CONFIG` a DeepSpeed config to put where the script has its own, and `OBSERVED_SEED` other random numbers from the
first forward on.
"""

# mypy: disable-error-code="no-untyped-def,union-attr"
import importlib.abc
import importlib.machinery
import os
import sys
import time
from typing import Any


class _Observed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that runs a function on a module once it is imported."""

    def __init__(self, name, changed):
        self._name, self._changed = name, changed

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._changed(module)


def put_config(module):
    """Make the first DeepSpeed config of the process the file's, as its user would."""
    original, path = module.DeepSpeedConfig.__init__, [os.environ["OBSERVED_CONFIG"]]

    def init(config, source, *args, **kwargs):
        original(config, path.pop() if path else source, *args, **kwargs)

    module.DeepSpeedConfig.__init__ = init


def weights(engine):
    """Return all weights of an engine in one row, since frozen ones may be trained later. Every rank must call this."""
    import deepspeed
    import torch

    found = []
    for one in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([one], enabled=hasattr(one, "ds_id")):
            found.append(one.detach().float().flatten().clone())
    return torch.cat(found)


def observe(module):
    """Wrap the methods of a training step, and seed a script that names no seed: it has drawn nothing yet."""
    import random

    import numpy as np
    import torch

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    engine_class, last = module.DeepSpeedEngine, int(os.environ["OBSERVED_STEPS"])
    forward, backward, step = engine_class.forward, engine_class.backward, engine_class.step
    engines: list[Any] = []
    initial, steps, now = [], [], {"rows": 0, "loss": 0.0, "micro_batches": 0}

    def trains(engine):
        return getattr(engine, "optimizer", None) is not None

    def note(engine):
        if trains(engine) and all(one is not engine for one in engines):
            engines.append(engine)
            initial.append(weights(engine))
        return bool(engines) and engines[0] is engine

    def observed_forward(engine, *args, **kwargs):
        if torch.is_grad_enabled() and trains(engine):
            if not engines and "OBSERVED_SEED" in os.environ:
                torch.manual_seed(int(os.environ["OBSERVED_SEED"]))
            if note(engine):
                first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
                now["rows"] += 0 if first is None else len(first)
        return forward(engine, *args, **kwargs)

    def observed_backward(engine, loss, *args, **kwargs):
        if note(engine) and loss.numel() == 1:
            scaled = kwargs.get("scale_wrt_gas", True)
            now["loss"] += float(loss.detach()) / (engine.gradient_accumulation_steps() if scaled else 1)
            now["micro_batches"] += 1
        return backward(engine, loss, *args, **kwargs)

    def observed_step(engine, *args, **kwargs):
        first, before = note(engine), getattr(engine, "global_steps", 0)
        result = step(engine, *args, **kwargs)
        if first and engine.global_steps > before:
            steps.append({**now, "at": time.perf_counter()})
            now.update(rows=0, loss=0.0, micro_batches=0)
            if len(steps) == last:
                write()
        return result

    def write():
        import torch.distributed as dist

        figures = torch.tensor([[one["rows"], one["loss"]] for one in steps], dtype=torch.float64)
        dist.all_reduce(figures)
        final = [weights(engine) for engine in engines]
        if dist.get_rank() == 0:
            report = {
                "rows": figures[:, 0].tolist(),
                "losses": (figures[:, 1] / dist.get_world_size()).tolist(),
                "micro_batches": [one["micro_batches"] for one in steps],
                "at": [one["at"] for one in steps],
                "stage": engines[0].zero_optimization_stage(),
                "initial": initial,
                "final": final,
            }
            torch.save(report, os.environ["OBSERVED"])
        dist.barrier()
        os._exit(0)

    engine_class.forward, engine_class.backward, engine_class.step = observed_forward, observed_backward, observed_step


if "OBSERVED" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, _Observed("deepspeed.runtime.engine", observe))
    if "OBSERVED_CONFIG" in os.environ:
        sys.meta_path.insert(0, _Observed("deepspeed.runtime.config", put_config))
