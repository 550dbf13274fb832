"""Build the DeepSpeed config of a trial of a named model, and list the DeepSpeed ops that it loads. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.problem.candidate import BATCH_KEYS, Candidate, job_with_candidate, settings_of
from autotune.problem.job import Job
from autotune.problem.knobs import KNOBS, is_off, lossy_of
from autotune.problem.models import CAUSAL

# The type of the optimizer determines memory and time of a step. The learning rate does not, and is never exported.
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True, "fused": True}},
    "adam": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True, "fused": True, "adam_w_mode": False}},
    "fused_adam": {"type": "AdamW", "params": {"lr": 1e-5}},
    "lion": {"type": "Lion", "params": {"lr": 1e-6}},
    "sgd": {"type": "SGD", "params": {"lr": 1e-5, "momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-5}},
    "muon": {"type": "Muon", "params": {"lr": 1e-3}},
}
MOST_SCALE_POWER = 8  # cap of a dynamic loss scale's initial power in trials; exported configs keep their own
QUIET = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "autotuning", "dump_state")

GROUP_OP = "ShareMemCommBuilder"  # loaded with the process group of CPU ranks under any config


def trial_config(candidate: Candidate, job: Job) -> dict[str, Any]:
    """Return the candidate's config without `"auto"` values and trackers, and with an optimizer if it names none."""
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
    fp16 = config.get("fp16")
    if job.precision == "fp16" and isinstance(fp16, dict) and not fp16.get("loss_scale"):
        # Random weights may overflow where trained ones do not, so the search for a loss scale starts low.
        fp16["initial_scale_power"] = min(MOST_SCALE_POWER, fp16.get("initial_scale_power", MOST_SCALE_POWER))
    return config


def optimizer_section(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Return the `optimizer` section for a trial whose config has none.

    An offloaded optimizer is DeepSpeed's CPU Adam, as DeepSpeed advises. torch's own is slow there, and DeepSpeed
    refuses it unless its check is turned off.
    """
    section = _OPTIMIZERS[job.optimizer]
    params = dict(section["params"])
    if candidate.offload_optimizer != "none":
        params.pop("torch_adam", None)
        params.pop("fused", None)
    return {"type": section["type"], "params": params}


# Keys of a trial's config that a torch engine follows, or that change nothing in it.
_TORCH_HAS = {"optimizer", "gradient_clipping", "zero_optimization", "bf16", "fp16", *BATCH_KEYS}
_TORCH_HAS |= {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"}


def torch_optimizer(section: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the class in torch.optim that corresponds to an `optimizer` section, and its arguments; None if none does.

    Source: deepspeed 0.19.8, runtime/engine.py, `_configure_basic_optimizer`; FusedAdam's weight decay is 0 by default.
    """
    kind, params = str(section["type"]).lower(), dict(section.get("params") or {})
    is_torchs, decoupled = params.pop("torch_adam", False), params.pop("adam_w_mode", True)
    if kind in ("adam", "adamw"):
        params = params if is_torchs else {"weight_decay": 0.0, **params, "fused": True}
        return "AdamW" if decoupled or kind == "adamw" else "Adam", params
    names = {"sgd": "SGD", "adagrad": "Adagrad"}
    return (names[kind], params) if kind in names else None


def why_no_reference(candidate: Candidate, job: Job) -> str:
    """Return why torch alone cannot run a candidate's training; empty if it can.

    Args:
        candidate: stage 0 stands for DDP, stage 3 for FSDP2.
    """
    if job.script is not None or job.workload is not None:
        return "only named models are trained without DeepSpeed"
    if job.precision == "fp16":
        return "DeepSpeed's loss scale of fp16 is its own"
    if job.plain:
        return f"DeepSpeed trains this job in {job.precision} without fp32 master weights"
    if candidate.stage == 3 and job.ranks == 1:
        return "it needs several ranks"
    lora = job_with_candidate(job, candidate).lora
    if candidate.stage == 3 and lora is not None and lora.quantize:
        return "4-bit weights are whole on each rank"
    config = trial_config(candidate, job)
    if torch_optimizer(config["optimizer"]) is None:
        return f"torch has no optimizer {config['optimizer']['type']}"
    for name, how in lossy_of(settings_of(config), job.precision).items():
        return f"torch has no counterpart of {name}: {how}"
    if unlike := sorted(config.keys() - _TORCH_HAS):
        return f"torch has no counterpart of {unlike[0]} in the DeepSpeed config"
    return ""


def may_skip_parameters(job: Job) -> bool:
    """Return True if a forward may leave out parameters: experts without tokens, the last layers of a vision tower, a pooler.

    DDP ends with an error then, and FSDP2 may hang, unless they look for such parameters. The search costs time, so a
    dense causal model does without it.
    """
    return job.task != CAUSAL or any("expert" in key for key in job.model.config)


def needed_ops(candidates: Sequence[Candidate], job: Job, device: str) -> list[str]:
    """Return the builders of the DeepSpeed JIT ops that trials of these candidates load.

    The selection follows that of the optimizer in `DeepSpeedEngine`. The ops are built before the budget starts.
    """
    ops = [GROUP_OP] if device == "cpu" else []
    offloads = {candidate.offload_optimizer for candidate in candidates}
    cpu, fused = _optimizer_ops(job)
    if cpu and offloads - {"none"}:
        ops.append(cpu)
    if fused and "none" in offloads:
        ops.append(fused)
    if any("nvme" in (candidate.offload_optimizer, candidate.offload_param) for candidate in candidates):
        ops.append("AsyncIOBuilder")
    loading = {name: knob.op for name, knob in KNOBS.items() if knob.op}
    turned_on = {name for candidate in candidates for name, value in candidate.knobs if not is_off(name, value)}
    ops += dict.fromkeys(op for name, op in loading.items() if name in turned_on)
    pins = offloads - {"none"} or any(candidate.offload_param != "none" for candidate in candidates)
    if pins and os.environ.get("DS_PIN_MEMORY_BACKEND") == "native":
        ops.append("PinMemoryBuilder")
    return ops


def all_ops(candidates: Sequence[Candidate], job: Job, device: str) -> list[str]:
    """Return the needed ops and the optional ones that the probe run of a script loaded."""
    return [*needed_ops(candidates, job, device), *job.profile.ops]


def _optimizer_ops(job: Job) -> tuple[str, str]:
    """Return the builders of the optimizer's step with and without offloading; an empty name means torch's own."""
    if job.profile.client_optimizer and not job.profile.through_arguments:
        return "", ""  # the script's own optimizer is kept (`job_of`)
    own = job.own_optimizer if "type" in job.own_optimizer else None
    kind = str(own["type"] if own else job.optimizer).lower()
    if kind in ("adam", "adamw", "fused_adam", "muon"):
        if own and (own.get("params") or {}).get("torch_adam"):
            return "", ""
        # For a config without an optimizer, `optimizer_section` uses torch's; Trainer brings its own.
        return "CPUAdamBuilder", "FusedAdamBuilder" if own or kind == "fused_adam" else ""
    return {
        "lion": ("CPULionBuilder", "FusedLionBuilder"),
        "adagrad": ("CPUAdagradBuilder", ""),
        "lamb": ("", "FusedLambBuilder"),
    }.get(kind, ("", ""))


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(item) for key, item in value.items() if item != "auto"}
    return value
