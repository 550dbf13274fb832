"""The Job that a user's script is: a stand-in before its first run, its profile's after it."""

from __future__ import annotations

import json

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.problem.script import candidate_of_config, config_path


def unknown_job(script: Script, hardware: Hardware) -> Job:
    """The stand-in: of the script only the command is known, and the optimizer if the command names a DeepSpeed config."""
    model = ModelSpec(script.name, {}, " ".join(script.argv))
    path = config_path(script)
    optimizer = {"type": "AdamW"} if path is None else json.loads(path.read_text()).get("optimizer")
    base = {"optimizer": optimizer} if isinstance(optimizer, dict) else {}
    return Job(model, hardware.count, 1, "fp32", base_config=base, script=script)


def job_of(script: Script, hardware: Hardware, global_batch_size: int | None) -> Job:
    """The Job of a script with a profile; its global batch is the script's own unless another is asked for."""
    seen = script.profile
    base = {
        key: value
        for key, value in seen["config"].items()
        if key not in ("train_batch_size", MICRO_BATCH, ACCUMULATION)
    }
    if seen["client_optimizer"] and not seen["through_arguments"]:
        base.setdefault("zero_force_ds_cpu_optimizer", False)  # offloaded or not, it stays the script's optimizer
    if seen["untested_optimizer"]:
        base.setdefault("zero_allow_untested_optimizer", True)
    own = seen["micro_batch"] * seen["accumulation"] * hardware.count
    parameters = sum(seen["trained"]) + seen["frozen"]
    config = {"model_type": "", **seen["model_config"]}
    model = ModelSpec(script.name, config, " ".join(script.argv), parameters)
    return Job(
        model,
        hardware.count,
        seen["seq_len"],
        seen["precision"],
        global_batch_size=global_batch_size or own,
        base_config=base,
        script=script,
    )


def own_candidate(script: Script) -> Candidate:
    """The script's own config as a Candidate; what it leaves open is at DeepSpeed's defaults."""
    seen = script.profile
    knobs: dict[str, Value] = {MICRO_BATCH: seen["micro_batch"], ACCUMULATION: seen["accumulation"]}
    if seen["checkpointing"]:
        knobs[CHECKPOINTING] = seen["checkpointed"]
    return Candidate.of({**candidate_of_config(seen["config"]).as_dict, **knobs})
