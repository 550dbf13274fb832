"""The Job that a user's script is: a stand-in before its first run, its profile's after it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.ds_file import in_new_names, read_config
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.problem.script import candidate_of_config, config_path
from autotune.problem.script_text import script_text

SPLIT = "loader_split"  # of a profile: accelerate splits the batches of its loader over the ranks
CALL = "checkpointing_call"  # of a profile: how its model is switched on, where not as transformers' are
ZERO_INIT = "zero_init"  # of a profile: the script's own code makes its model under `deepspeed.zero.Init`
TORCHS = "torch_optimizer"  # of a profile: class, `fused` and `foreach` of one of torch's that the script has made
EARLIER = "earlier"  # of a profile: engines that have an optimizer, made before the one that trains
KEPT = "kept_configs"  # of a profile: what accelerate's other plugins say of ZeRO, which no candidate changes
OPS = "ops"  # of a profile: builders of ops of DeepSpeed's that its first run was the first to show
UNCOUNTED = "the sequences of the script's batches cannot be counted: no tensor is among what its model is given"

_END_TO_END = "its rows are packed end to end, so its micro-batch cannot be checked"
UNCOUNTED_BESIDE = "a second engine trains, on rows that cannot be counted or that change from step to step"


TOKENS = "tokens"  # of rows packed end to end: how many sequences are in them differs, how full they are does not


@dataclass(frozen=True)
class Counted:
    """How what is seen in a script's steps is counted, against the batch sizes that it was told."""

    unit: str  # `rows` of a forward's tensors, the `sequences` in them, their `tokens`, or empty where nothing can be counted
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
            knob, what its arguments and loaders say. Where rows are packed end to end, `packed_tokens` of a micro-batch, 0 if
            they differ; `counted_by` which tensor they are counted, where it is not the first; `uncounted` why not.
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
    sizes = [facts["micro_batch"], *said.get(MICRO_BATCH, ())]
    if "packed_tokens" in facts and (packed := _packed(facts, sizes)) is not None:
        return packed
    if not seen["rows"]:
        return _counted(facts, facts["micro_batch"], facts["accumulation"], "", 1)
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


def _packed(facts: dict[str, Any], sizes: list[int]) -> dict[str, Any] | None:
    """Of rows that are packed end to end: what is said is all that tells how many there are in a forward. None where that may be
    one, with positions that begin anew in its padding."""
    tokens, micros, told = facts["packed_tokens"], _micros(facts), facts.get("said", {}).get(ACCUMULATION, ())
    accumulation = next((one for one in (facts["accumulation"], *told) if one == micros), facts["accumulation"])
    if tokens and len(set(sizes)) == 1:
        return _counted(facts, sizes[0], accumulation, TOKENS, tokens / sizes[0])
    if 1 in sizes:
        return None
    return _counted({**facts, "uncounted": _END_TO_END}, facts["micro_batch"], accumulation, "", 1)


def _micros(facts: dict[str, Any]) -> int:
    return int(facts.get("micros") or facts["accumulation"])


def _counted(
    facts: dict[str, Any], micro_batch: int, accumulation: int, unit: str, per_sample: float
) -> dict[str, Any]:
    return {
        **{key: facts[key] for key in ("counted_by", "uncounted") if key in facts},
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
    config = in_new_names(seen["config"])
    base = {key: value for key, value in config.items() if script.holds_batch or key not in BATCH_KEYS}
    if seen["client_optimizer"] and not seen["through_arguments"]:
        base.setdefault("zero_force_ds_cpu_optimizer", False)  # offloaded or not, it stays the script's optimizer
    if seen["untested_optimizer"]:
        base.setdefault("zero_allow_untested_optimizer", True)
    own = own_samples(script, hardware.count)
    parameters = sum(seen["trained"]) + seen["frozen"]
    shape = {"model_type": "", **seen["model_config"]}
    model = ModelSpec(script.name, shape, " ".join(script.argv), parameters)
    return Job(
        model,
        hardware.count,
        seen["seq_len"],
        seen["precision"],
        global_batch_size=None if free else global_batch_size or own,
        base_config=base,
        script=script,
    )


def over_present(job: Job, present: dict[str, Any]) -> Job:
    """The job over the config that its script has now, as its user may have edited it since its first run: a key that was taken
    out stays out, and of the job's there is only what is no user's."""
    first = job.script.profile.get("config") if job.script is not None else None
    mine = (*present, *BATCH_KEYS) if first is None else (*present, *BATCH_KEYS, *first)
    ours = {key: value for key, value in job.base_config.items() if key not in mine}
    return dataclasses.replace(job, base_config={**present, **ours}, precision=_precision(job, first, present))


_SIXTEEN_BITS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # section of a config -> precision


def _precision(job: Job, first: dict[str, Any] | None, present: dict[str, Any]) -> str:
    """As the present config says it; the job's where that says nothing else than the first, or leaves it to its caller."""
    if first is None or all(first.get(name) == present.get(name) for name in _SIXTEEN_BITS):
        return job.precision
    then, now = ([_enabled(config, name) for name in _SIXTEEN_BITS] for config in (first, present))
    on = [precision for precision, word in zip(_SIXTEEN_BITS.values(), now, strict=True) if word is True]
    if on:
        return on[0]
    return "fp32" if True in then and "auto" not in now else job.precision


def _enabled(config: dict[str, Any], name: str) -> Any:
    section = config.get(name)
    return section.get("enabled", False) if isinstance(section, dict) else False


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
