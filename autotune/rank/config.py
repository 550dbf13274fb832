"""The DeepSpeed config that a trial of a named model runs, and the DeepSpeed ops that it loads. Plain data, no torch."""

from __future__ import annotations

from typing import Any

from autotune.problem.candidate import Candidate
from autotune.problem.job import Job

# The kind of optimizer decides the memory and time of a step; the learning rate does not, and is never exported.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}},
    "adam": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True, "fused": True, "adam_w_mode": False}},
    "fused_adam": {"type": "AdamW", "params": {"lr": 1e-5}},
    "lion": {"type": "Lion", "params": {"lr": 1e-6}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-5, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-5}},
}
QUIET = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "dump_state")


def trial_config(candidate: Candidate, job: Job) -> dict[str, Any]:
    """The candidate's config without `"auto"` values and trackers, and with an optimizer if it names none."""
    config: dict[str, Any] = _without_auto(candidate.ds_config(job))
    for key in QUIET:
        config.pop(key, None)
    if not isinstance(config.get("optimizer"), dict) or "type" not in config["optimizer"]:
        config["optimizer"] = optimizer_section(job, candidate)
        config.pop("scheduler", None)
    scheduler: Any = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    if params is not None and "total_num_steps" not in params and "Decay" in str(scheduler.get("type")):
        del config["scheduler"]  # its length was "auto"; the learning rate changes neither time nor memory
    if config["optimizer"]["type"].lower() not in ("adam", "adamw", "lion", "adagrad"):
        config.setdefault("zero_allow_untested_optimizer", True)
    config["steps_per_print"] = 10**9
    config["wall_clock_breakdown"] = False
    config.setdefault("zero_optimization", {})
    return config


def optimizer_section(job: Job, candidate: Candidate) -> dict[str, Any]:
    """The `optimizer` section of a trial whose config names none. Where the optimizer is offloaded it is DeepSpeed's CPU
    Adam, as DeepSpeed advises: torch's own is slow there, and refused unless DeepSpeed's check is turned off."""
    section = _OPTIMIZERS[job.optimizer]
    params = dict(section["params"])
    if candidate.offload_optimizer != "none":
        params.pop("torch_adam", None)
        params.pop("fused", None)
    return {"type": section["type"], "params": params}


def needed_ops(candidates: list[Candidate], job: Job, device: str) -> list[str]:
    """Names of the builders of the DeepSpeed JIT ops that trials of these candidates load. They are built before the
    budget starts."""
    ops = ["ShareMemCommBuilder"] if device == "cpu" else []
    kind = job.optimizer_kind
    offloads = {candidate.offload_optimizer for candidate in candidates}
    if offloads - {"none"}:
        ops.append({"lion": "CPULionBuilder", "adagrad": "CPUAdagradBuilder"}.get(kind, "CPUAdamBuilder"))
    own = job.base_config.get("optimizer")
    if kind == "fused_adam" or (own and "adam" in kind and not (own.get("params") or {}).get("torch_adam")):
        ops.append("FusedAdamBuilder")
    if kind == "lion" and "none" in offloads:
        ops.append("FusedLionBuilder")
    if any("nvme" in (candidate.offload_optimizer, candidate.offload_param) for candidate in candidates):
        ops.append("AsyncIOBuilder")
    return ops


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value
