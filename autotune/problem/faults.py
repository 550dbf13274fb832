"""Known faults of DeepSpeed by version, and the keys that it refuses by their mere presence.

`data/deepspeed_faults.json` is the table. A fault holds for a training if every condition in its `when` holds for the facts of
that training (`facts_of`). A condition is a list of allowed values, or `{"from": N}` for a number of at least N.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.problem.ds_config import SIXTEEN_BITS, in_new_names, sixteen_bits_enabled, value_at
from autotune.problem.job import Job
from autotune.util.files import shipped_json
from autotune.versions import dotted, release

Facts = Mapping[str, Any]
_MISSING = object()


@dataclass(frozen=True)
class Fault:
    """Setting that DeepSpeed computes wrongly in a range of versions."""

    setting: str  # in words
    when: Mapping[str, Any]  # fact -> allowed values, or {"from": least}
    effect: str
    known: str  # `measured` here, `read` in the source, or `reported`
    source: str
    since: str = ""  # first version with the fault; empty: all before `until`
    until: str = ""  # last version with the fault; empty: not fixed yet
    harmless: bool = False  # the training comes out the same in the long run

    def concerns(self, deepspeed: tuple[int, ...]) -> bool:
        """Return True if this DeepSpeed has the fault."""
        return release(self.since) <= deepspeed and (not self.until or deepspeed <= release(self.until))

    def holds(self, facts: Facts) -> bool | None:
        """Return True or False if the facts decide that a training shows the fault, else None."""
        found = [_holds(wanted, facts[name]) if name in facts else None for name, wanted in self.when.items()]
        return False if False in found else None if None in found else True

    def __str__(self) -> str:
        return f"{self.setting}: {self.effect}"


def _holds(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(value, int | float) and value >= wanted["from"]
    return value in wanted


@functools.cache
def _table() -> dict[str, Any]:
    return dict(shipped_json("deepspeed_faults.json"))


@functools.cache
def known_faults(deepspeed: tuple[int, ...] | None = None) -> tuple[Fault, ...]:
    """Return the faults of a DeepSpeed; None: of all versions."""
    faults = (Fault(**row) for row in _table()["faults"])
    return tuple(one for one in faults if deepspeed is None or one.concerns(deepspeed))


def removed_keys(config: Mapping[str, Any], deepspeed: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, problem) for the keys that this DeepSpeed refuses by their presence, `enabled: false` too.

    Source: deepspeed 0.19.8, runtime/config.py, `_reject_removed_config_keys`.
    """
    for row in _table()["removed"]:
        found = value_at(config, row["key"].split("."), _MISSING)
        if deepspeed < release(row["since"]) or found is _MISSING:
            continue
        values = [str(one).lower() for one in row.get("values", ())]
        if not values or str(found).lower() in values:
            what = f"{found!r}" if values else "this key, whatever its value"
            yield row["key"], f"deepspeed {dotted(deepspeed)} refuses {what}: {row.get('instead', 'leave it out')}"


# -- facts -------------------------------------------------------------------------------------------------------------
#
# Facts of a training that the conditions name. A fact that is not known is left out.


def facts_of(config: Mapping[str, Any], job: Job | None = None) -> dict[str, Any]:
    """Return the facts of a training with this DeepSpeed config.

    Args:
        config: a config in current names; `"auto"` leaves a fact unknown.
        job: the job of a model, or of a script after its probe run; None for a script before it.
    """
    return _known({**_config_facts(config), **(job_facts(job) if job is not None else {})})


def own_facts(job: Job) -> dict[str, Any]:
    """Return the facts of the user's own training; empty if the user has no config."""
    seen = job.profile
    if seen.config is None:
        return facts_of(job.base_config, job) if job.base_config else {}
    return {**facts_of(in_new_names(seen.config), job), **accumulation_facts(job, seen.accumulation)}


def accumulation_facts(job: Job, accumulation: int) -> dict[str, Any]:
    """Return the facts of a training with this accumulation, of the engine or of the script's own loop.

    An engine whose boundary the loop sets accumulates as by its config. Under `engine.no_sync`, only the last backward
    reduces gradients, and it reduces the sum of all.
    """
    seen = job.profile
    if not seen.loop_accumulates or seen.boundary_by_hand:
        return {"accumulation": accumulation}
    return {"accumulation": 1, "backwards_per_step": 1 if seen.unsynced else accumulation}


def warnings(facts: Facts, deepspeed: tuple[int, ...]) -> list[str]:
    """Return a line for each known fault that the user's own training has."""
    found = (one for one in known_faults(deepspeed) if one.holds(facts) and not one.harmless)
    return [f"warning: your own config has a known fault: {one}" for one in found]


def _known(facts: Facts) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None and value != "auto"}


def _config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    zero = functools.partial(value_at, config.get("zero_optimization"))
    stage = zero(("stage",), 0)
    devices = [zero((f"offload_{what}", "device"), "none") for what in ("optimizer", "param")]
    overlap = zero(("overlap_comm",))
    return {
        "stage": stage,
        "precision": _precision(config),
        "accumulation": _accumulation(config),
        "grad_accum_dtype": value_at(config, ("data_types", "grad_accum_dtype")),
        "offload_optimizer": devices[0],
        "offloads": devices != ["none", "none"],
        "overlap_comm": stage == 3 if overlap is None else overlap,  # DeepSpeed's default by stage
        "contiguous_gradients": zero(("contiguous_gradients",), True),
        "reduce_scatter": zero(("reduce_scatter",), True),
        "deepcompile": value_at(config, ("compile", "deepcompile"), False),
        **_optimizer_facts(config, devices[0]),
    }


def _accumulation(config: Mapping[str, Any]) -> Any:
    steps, total = config.get("gradient_accumulation_steps"), config.get("train_batch_size")
    return (1 if total is None else None) if steps is None else steps


def _precision(config: Mapping[str, Any]) -> str | None:
    said = sixteen_bits_enabled(config)
    on = next((SIXTEEN_BITS[name] for name, word in said.items() if word is True), None)
    return on or (None if "auto" in said.values() else "fp32")


def _optimizer_facts(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return facts of a config's optimizer (deepspeed 0.19.8, engine.py, `_configure_basic_optimizer`)."""
    if not isinstance(kind := value_at(config, ("optimizer", "type")), str):
        return {}
    torchs = bool(value_at(config, ("optimizer", "params", "torch_adam")))
    return {
        "optimizer": kind.lower(),
        "fused_optimizer": kind.lower() in ("adam", "adamw") and not torchs and place == "none",
    }


def job_facts(job: Job) -> dict[str, Any]:
    """Return the facts of all trainings of a job: a model's, or a script's after its probe run."""
    found: dict[str, Any] = {
        "precision": job.precision,
        "compiled": job.compiled,
        "sequence_ranks": job.ranks_per_sequence,
    }
    if job.script is None:  # the tuner's own loop
        if "type" not in job.own_optimizer:
            found |= {"optimizer": job.optimizer, "fused_optimizer": job.optimizer == "fused_adam"}
        return {**found, "backwards_per_step": 1, "grad_changed_by_hand": False, "boundary_by_hand": False}
    seen = job.profile
    found["compiled"] = None  # a script may compile its model itself
    # transformers, integrations: deepspeed_sp_compute_loss
    found["gathered_loss"] = seen.through_arguments or None
    if seen.client_optimizer and (kind := seen.optimizer.lower()):
        found |= {"optimizer": "muon" if "muon" in kind else kind, "fused_optimizer": kind.startswith("fused")}
    found |= {name: True for name in ("zero_init", "boundary_by_hand", "grad_changed_by_hand") if getattr(seen, name)}
    if seen.boundary_by_hand or seen.unsynced:
        found["backwards_per_step"] = 1
    elif seen.counted and not seen.loop_accumulates:
        found["backwards_per_step"] = seen.micros_per_accumulation
    return _known(found)
