"""Job of a user's script: a stand-in before the probe run, and a Job from the profile after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune.masking import masked_words
from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.ds_config import SIXTEEN_BITS, in_new_names, read_config, sixteen_bits_enabled
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.models import ModelSpec
from autotune.script.script import candidate_of_config, config_path

RAN = "ran"  # key of facts: seconds of the start and of an optimizer step so far, of a run that ended before its measurement
UNCOUNTED = "the sequences of the script's batches cannot be counted: no tensor is among what its model is given"

_END_TO_END = "its rows are packed end to end, so its micro-batch cannot be checked"
UNCOUNTED_BESIDE = "a second engine trains, on rows that cannot be counted or that change from step to step"


TOKENS = (
    "tokens"  # unit of a profile: rows are packed end to end: their number of sequences varies, their tokens do not
)


def batch_seen(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the script's own micro-batch and accumulation, and how they are counted (fields of a `ScriptProfile`).

    The config's values hold if the observed count is a multiple of them. The value of an argument or a loader holds if it is
    nearer to the observed count: DeepSpeed never compares the two. A loop that takes its batch from elsewhere is assumed to have
    the observed batch, until it is passed another.

    Args:
        facts: `micro_batch` and `accumulation` of the config; `micros`, `rows` and `sequences` of a rank's step; `said`: by knob,
            the values of its arguments and loaders. If rows are packed end to end, also `packed_tokens` of a micro-batch (0 if
            they differ). `counted_by` names the counted tensor, unless it is the first; `uncounted` gives the reason for no
            count.
    """
    known = _known(facts)
    if known is not None:
        return known
    accumulation, micros, rows = facts["accumulation"], _micros(facts), facts["rows"]
    if rows % accumulation == 0:
        return _counted(facts, rows // accumulation, accumulation, "rows", 1)
    return _counted(facts, max(1, rows // micros), micros, "rows", 1)


def batch_held(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of a script that always trains on its own, in the form of `batch_seen`.

    The config's values hold if none of the declared values was observed. `held` gives the counts of each of its steps.
    """
    found = _known(facts) or _counted(facts, facts["micro_batch"], facts["accumulation"], "rows", 1)
    return {**found, "held": {"micros": _micros(facts), "rows": facts.get("rows") or 0}}


def _known(facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return the declared batch of which the observed count is the smallest multiple, or None if there is none."""
    seen = {unit: facts.get(unit) or 0 for unit in ("rows", "sequences")}
    micros, said = _micros(facts), facts.get("said", {})
    sizes = [facts["micro_batch"], *said.get(MICRO_BATCH, ())]
    if "packed_tokens" in facts and (packed := _packed(facts, sizes)) is not None:
        return packed
    if not seen["rows"]:
        return _counted(facts, facts["micro_batch"], facts["accumulation"], "", 1)
    declared = [facts["accumulation"], *(one for one in said.get(ACCUMULATION, ()) if micros % one == 0)]
    pairs = [(size, times) for times in declared for size in sizes]
    for unit, count in seen.items():
        fits = [
            (count // (size * times), size, times) for size, times in pairs if count and count % (size * times) == 0
        ]
        if fits:
            # min() takes the first of equally near values, which is the config's
            per_sample, size, times = min(fits, key=lambda fit: fit[0])
            return _counted(facts, size, times, unit, per_sample)
    # A loop that steps at every backward ignores the config's accumulation.
    unheeded = next((size for size in sizes if seen["rows"] == size * micros), None)
    return None if unheeded is None else _counted(facts, unheeded, micros, "rows", 1)


def growth_line(grows: Sequence[int]) -> str:
    """Return a line about sequences that grow from step to step (a length warm-up, a curriculum).

    Args:
        grows: tokens of a row in the first and in the last step, and in the data if it is measured at that.
    """
    first, last, *longest = grows
    if longest:
        return f"its sequences grow, from {first} to {last} tokens in the first steps: measured at the {longest[0]} of its data"
    return (
        f"its sequences grow, from {first} to {last} tokens in the first steps: later steps are slower and need more memory "
        "than measured. Tune with the script's last length"
    )


def unheeded_accumulation(facts: dict[str, Any], profile: ScriptProfile, ranks: int) -> str:
    """Return a text if the engine steps after every micro-batch although its config accumulates; empty otherwise.

    accelerate's engine does so in a loop without `accumulate()`.

    Args:
        facts: report of the probe run.
        profile: batch of its steps.
        ranks: ranks with their own rows.
    """
    told = facts["accumulation"]
    if facts.get("micros") != 1 or told == 1 or profile.accumulation != 1 or not profile.counted:
        return ""
    whose = "plugin" if facts.get("loader_prepared") else "config"
    rows = profile.micro_batch * ranks
    return (
        f"your {whose} accumulates {told}, but the engine steps after every micro-batch: you train {rows} rows a step, not "
        f"{rows * told}"
    )


def _packed(facts: dict[str, Any], sizes: list[int]) -> dict[str, Any] | None:
    """Return the batch of rows that are packed end to end: only declared values give the number of sequences in a forward.

    Return None if a declared micro-batch of 1 may hold, a single row with positions that restart in its padding.
    """
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
    times = _micros(facts) / accumulation
    by_hand = times > 1 and times.is_integer() and unit == "rows" and per_sample % times == 0
    return {
        **{key: facts[key] for key in ("counted_by", "uncounted") if key in facts},
        **({"accumulated_by_hand": int(times)} if by_hand else {}),
        "loop_accumulates": _is_looped(facts, accumulation),
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "counted": unit,
        "rows_per_sample": per_sample,
        "micros_per_accumulation": times,
    }


def _is_looped(facts: dict[str, Any], accumulation: int) -> bool:
    """Return True if a step has an argument's accumulation, while its engine has none.

    Trainer and accelerate pass theirs to the engine.
    """
    passed_on = facts.get("through_arguments") or facts.get("loader_prepared")
    return not passed_on and facts["accumulation"] == 1 < accumulation == _micros(facts)


def first_candidate(script: Script) -> Candidate:
    """Return the candidate of the config that the command names, or one without knobs.

    The probe run reports each op that it needs besides.
    """
    path = config_path(script)
    return Candidate(()) if path is None else candidate_of_config(read_config(path))


def unknown_job(script: Script, hardware: Hardware) -> Job:
    """Return the stand-in for a script of which only the command is known, with the optimizer of a config that it names."""
    model = ModelSpec(script.name, {}, " ".join(masked_words(script.argv)))
    path = config_path(script)
    optimizer = None if path is None else read_config(path).get("optimizer")
    base = {"optimizer": optimizer} if isinstance(optimizer, dict) else {}
    return Job(model, hardware.count, 1, "fp32", base_config=base, script=script)


def job_of(script: Script, hardware: Hardware, global_batch_size: int | None, free: bool = False) -> Job:
    """Return the Job of a script with a profile.

    The global batch is the script's own, unless another is requested or it is free.
    """
    seen = script.profile
    config = in_new_names(seen.config or {})
    base = {key: value for key, value in config.items() if script.holds_batch or key not in BATCH_KEYS}
    if seen.client_optimizer and not seen.through_arguments:
        base.setdefault("zero_force_ds_cpu_optimizer", False)  # even if offloaded, the optimizer stays the script's
    if seen.untested_optimizer:
        base.setdefault("zero_allow_untested_optimizer", True)
    own = own_samples(script, hardware.count)
    parameters = sum(seen.trained) + seen.frozen
    shape = {"model_type": "", **seen.model_config}
    model = ModelSpec(script.name, shape, " ".join(masked_words(script.argv)), parameters)
    return Job(
        model,
        hardware.count,
        seen.seq_len,
        seen.precision,
        global_batch_size=None if free else global_batch_size or own,
        base_config=base,
        script=script,
    )


def over_present(job: Job, present: dict[str, Any]) -> Job:
    """Return the job over the config that its script has now, since the user may have edited it after the probe run.

    A key that was removed stays removed. Only keys that the user never set are kept from the job.
    """
    first = job.profile.config
    mine = (*present, *BATCH_KEYS) if first is None else (*present, *BATCH_KEYS, *first)
    ours = {key: value for key, value in job.base_config.items() if key not in mine}
    return replace(job, base_config={**present, **ours}, precision=_precision(job, first, present))


def _precision(job: Job, first: dict[str, Any] | None, present: dict[str, Any]) -> str:
    """Return the precision of the present config.

    The job's precision is kept if that config still agrees with the first one, or leaves the choice to its caller.
    """
    if first is None or all(first.get(name) == present.get(name) for name in SIXTEEN_BITS):
        return job.precision
    then, now = sixteen_bits_enabled(first), sixteen_bits_enabled(present)
    if on := next((SIXTEEN_BITS[name] for name, word in now.items() if word is True), None):
        return on
    return "fp32" if True in then.values() and "auto" not in now.values() else job.precision


def loops_by_hand(script: Script) -> bool:
    """Return True if the script's own loop may count micro-batches. Trainer and Lightning count optimizer steps."""
    seen = script.profile
    return seen.is_known and not seen.through_arguments and not seen.lightning


def own_samples(script: Script, ranks: int) -> int:
    """Return the samples per optimizer step over all ranks of the unmodified script; requires a profile."""
    own = script.profile
    return own.micro_batch * own.accumulation * (ranks // own.sequence_ranks)


def own_candidate(script: Script) -> Candidate:
    """Return the script's own config as a Candidate; open settings have DeepSpeed's defaults."""
    seen = script.profile
    knobs: dict[str, Value] = {MICRO_BATCH: seen.micro_batch, ACCUMULATION: seen.accumulation}
    if seen.checkpointing or seen.checkpointed:
        knobs[CHECKPOINTING] = seen.checkpointed
    return Candidate.of({**candidate_of_config(seen.config or {}).as_dict, **knobs})


def other_batch(candidate: Candidate, job: Job) -> str:
    """Return a warning if a script's steps have another size than its own; empty otherwise."""
    if job.script is None or not job.profile.is_known:
        return ""
    own, now = own_samples(job.script, job.ranks), candidate.rows_per_rank * job.data_ranks
    if own == now:
        return ""
    return (
        f"its steps are of {now} samples, the script's own of {own}: the learning rate, its warm-up and the number of steps "
        "need your attention"
    )
