"""The Job that a user's script is: a stand-in before its first run, its profile's after it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.ds_file import read_config
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.problem.script import candidate_of_config, config_path
from autotune.problem.script_text import script_text

SPLIT = "loader_split"  # of a profile: accelerate splits the batches of its loader over the ranks
UNCOUNTED = "the sequences of the script's batches cannot be counted: no tensor is among what its model is given"

UNCOUNTED_BESIDE = "a second engine trains, on rows that cannot be counted or that change from step to step"


@dataclass(frozen=True)
class Counted:
    """How what is seen in a script's steps is counted, against the batch sizes that it was told."""

    unit: str  # `rows` of a forward's tensors, the `sequences` in them, or empty where nothing could be counted
    per_sample: float  # of these, for each sample of the micro-batch: 2 where a loss compares pairs
    micros_per_accumulation: float  # forwards with a backward, for each step of accumulation

    @classmethod
    def of(cls, profile: dict[str, Any]) -> Counted:
        """Of a profile; one that an earlier version has stored knew rows alone."""
        per_sample = profile.get("rows_per_sample", 1.0)
        return cls(profile.get("counted", "rows"), per_sample, profile.get("micros_per_accumulation", 1.0))


def batch_seen(facts: dict[str, Any]) -> dict[str, Any]:
    """The script's own micro-batch and accumulation, and how they are counted (the fields of `Counted`).

    What its config says is believed where what was seen is a multiple of it, and what an argument or a loader of its own says
    where that is nearer to what was seen: DeepSpeed never compares the two. A loop that takes its batch from elsewhere is
    taken to have what was seen, until it is told another.

    Args:
        facts: `micro_batch` and `accumulation` of the config; `micros`, `rows` and `sequences` of a rank's step; `said`: by
            knob, what its arguments and loaders say.
    """
    known = _known(facts)
    if known is not None:
        return known
    accumulation, micros, rows = facts["accumulation"], _micros(facts), facts["rows"]
    if rows % accumulation == 0:
        return _counted(facts, rows // accumulation, accumulation, "rows", 1)
    return _counted(facts, max(1, rows // micros), micros, "rows", 1)


def batch_held(facts: dict[str, Any]) -> dict[str, Any]:
    """The same of a script that goes on with its own batch, whatever it is told: its config is believed where nothing that
    it says was seen. `held` has what each of its steps has."""
    found = _known(facts) or _counted(facts, facts["micro_batch"], facts["accumulation"], "rows", 1)
    return {**found, "held": {"micros": _micros(facts), "rows": facts.get("rows") or 0}}


def _known(facts: dict[str, Any]) -> dict[str, Any] | None:
    """The batch that something says and of which what was seen is a multiple, of all the nearest; None where there is none."""
    seen = {unit: facts.get(unit) or 0 for unit in ("rows", "sequences")}
    micros, said = _micros(facts), facts.get("said", {})
    if not seen["rows"]:
        return _counted(facts, facts["micro_batch"], facts["accumulation"], "", 1)
    sizes = [facts["micro_batch"], *said.get(MICRO_BATCH, ())]
    steps = [facts["accumulation"], *(one for one in said.get(ACCUMULATION, ()) if micros % one == 0)]
    pairs = [(size, times) for times in steps for size in sizes]
    for unit, count in seen.items():
        fits = [
            (count // (size * times), size, times) for size, times in pairs if count and count % (size * times) == 0
        ]
        if fits:
            per_sample, size, times = min(fits, key=lambda fit: fit[0])  # the first of as near ones: the config's
            return _counted(facts, size, times, unit, per_sample)
    # a loop that steps at every backward, whatever accumulation the config says
    unheeded = next((size for size in sizes if seen["rows"] == size * micros), None)
    return None if unheeded is None else _counted(facts, unheeded, micros, "rows", 1)


def _micros(facts: dict[str, Any]) -> int:
    return int(facts.get("micros") or facts["accumulation"])


def _counted(facts: dict[str, Any], micro_batch: int, accumulation: int, unit: str, per_sample: int) -> dict[str, Any]:
    return {
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "counted": unit,
        "rows_per_sample": per_sample,
        "micros_per_accumulation": _micros(facts) / accumulation,
    }


def first_candidates(script: Script) -> list[Candidate]:
    """What the script's first run may be, as far as is known before it: its config where its command names one, else what
    its text speaks of."""
    path = config_path(script)
    if path is not None:
        return [candidate_of_config(read_config(path))]
    offloads = re.search("offload_optimizer|CPUAdam", script_text(script) or "")
    return [Candidate(()), *([Candidate.of({"zero_stage": 2, "offload_optimizer": "cpu"})] if offloads else [])]


def unknown_job(script: Script, hardware: Hardware) -> Job:
    """The stand-in: of the script only the command is known, and the optimizer if the command names a DeepSpeed config; else
    it may be DeepSpeed's Adam wherever the script's text has the word."""
    model = ModelSpec(script.name, {}, " ".join(script.argv))
    path = config_path(script)
    if path is not None:
        optimizer = read_config(path).get("optimizer")
    else:
        text = script_text(script)
        optimizer = {"type": "AdamW"} if text is None or re.search("[\"']optimizer[\"']", text) else None
    base = {"optimizer": optimizer} if isinstance(optimizer, dict) else {}
    return Job(model, hardware.count, 1, "fp32", base_config=base, script=script)


def job_of(script: Script, hardware: Hardware, global_batch_size: int | None, free: bool = False) -> Job:
    """The Job of a script with a profile; its global batch is the script's own unless another is asked for, or it is free."""
    seen = script.profile
    base = {key: value for key, value in seen["config"].items() if script.holds_batch or key not in BATCH_KEYS}
    if seen["client_optimizer"] and not seen["through_arguments"]:
        base.setdefault("zero_force_ds_cpu_optimizer", False)  # offloaded or not, it stays the script's optimizer
    if seen["untested_optimizer"]:
        base.setdefault("zero_allow_untested_optimizer", True)
    own = own_samples(script, hardware.count)
    parameters = sum(seen["trained"]) + seen["frozen"]
    config = {"model_type": "", **seen["model_config"]}
    model = ModelSpec(script.name, config, " ".join(script.argv), parameters)
    return Job(
        model,
        hardware.count,
        seen["seq_len"],
        seen["precision"],
        global_batch_size=None if free else global_batch_size or own,
        base_config=base,
        script=script,
    )


def own_samples(script: Script, ranks: int) -> int:
    """Samples of one optimizer step over all ranks, of the script as it is; with a profile."""
    return int(script.profile["micro_batch"] * script.profile["accumulation"] * ranks)


def own_candidate(script: Script) -> Candidate:
    """The script's own config as a Candidate; what it leaves open is at DeepSpeed's defaults."""
    seen = script.profile
    knobs: dict[str, Value] = {MICRO_BATCH: seen["micro_batch"], ACCUMULATION: seen["accumulation"]}
    if seen["checkpointing"] or seen.get("checkpointed"):
        knobs[CHECKPOINTING] = seen["checkpointed"]
    return Candidate.of({**candidate_of_config(seen["config"]).as_dict, **knobs})


def other_batch(candidate: Candidate, job: Job) -> str:
    """What to see to where a script's steps are of another size than its own; empty where they are not."""
    if job.script is None or "micro_batch" not in job.script.profile:
        return ""
    own, now = own_samples(job.script, job.ranks), candidate.micro_batch * candidate.accumulation * job.ranks
    if own == now:
        return ""
    return (
        f"its steps are of {now} samples, the script's own of {own}: the learning rate, its warm-up and the number of steps "
        "need your attention"
    )
