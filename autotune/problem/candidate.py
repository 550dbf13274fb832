"""Candidate: one setting of every knob, in canonical form, and the DeepSpeed config that it stands for.

`knobs.py` lists the knobs and the conditions under which DeepSpeed reads each.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.problem.ds_config import in_new_names, value_at
from autotune.problem.import_time_env import ALLOCATOR_VARIABLES
from autotune.problem.job import FULL, Job, Script, ScriptProfile, parse_lora, under_lightning
from autotune.problem.knobs import (
    ACCUMULATION,
    ATTENTION,
    CHECKPOINTING,
    COMPILED,
    EXPANDABLE,
    KNOBS,
    LIGER,
    LORA,
    LOSS,
    MICRO_BATCH,
    MODEL_KNOBS,
    OFFLOADING,
    PACKING,
    RUNG_KNOBS,
    SHORT_NAMED,
    TRACED_KNOBS,
    Knobs,
    Value,
    is_off,
    is_read,
    short_name,
)

__all__ = [  # imported names that users of candidates need
    "ACCUMULATION",
    "ALLOCATOR_VARIABLES",
    "ATTENTION",
    "CHECKPOINTING",
    "COMPILED",
    "EXPANDABLE",
    "KNOBS",
    "LIGER",
    "LORA",
    "LOSS",
    "MICRO_BATCH",
    "MODEL_KNOBS",
    "PACKING",
    "RUNG_KNOBS",
    "TRACED_KNOBS",
    "Value",
    "is_read",
    "short_name",
]

BATCH_KEYS = ("train_batch_size", MICRO_BATCH, ACCUMULATION)  # keys of a DeepSpeed config
GATHER_ON_SAVE = "stage3_gather_16bit_weights_on_model_save"

# DeepSpeed's defaults for keys that a config leaves out (deepspeed 0.19.8, runtime/zero/config.py).
ZERO_DEFAULTS: dict[str, float] = {
    "reduce_bucket_size": 5e8,
    "sub_group_size": 1e9,
    "contiguous_gradients": 1.0,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
}


@dataclass(frozen=True)
class Candidate:
    """One setting of the knobs. Two Candidates that give DeepSpeed the same behaviour are equal."""

    knobs: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, knobs: Knobs) -> Candidate:
        """Return the canonical candidate: knobs that DeepSpeed would ignore or force are dropped, the rest is sorted by name."""
        # earlier studies do not name the full loss
        named = {short_name(name): value for name, value in knobs.items() if (name, value) != (LOSS, FULL)}
        return cls(tuple(sorted((name, value) for name, value in named.items() if is_read(name, named))))

    @functools.cached_property
    def as_dict(self) -> dict[str, Value]:
        """Return the knobs as a dict."""
        return dict(self.knobs)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a knob's value, or the default if it is not set."""
        return self.as_dict.get(name, default)

    def but(self, **changes: Value) -> Candidate:
        """Return this candidate with some knobs changed, in canonical form."""
        return Candidate.of({**self.as_dict, **changes})

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.get("zero_stage", 0))

    @property
    def micro_batch(self) -> int:
        """Return the micro-batch size in samples per rank."""
        return int(self.get(MICRO_BATCH, 1))

    @property
    def accumulation(self) -> int:
        """Return the number of accumulation steps."""
        return int(self.get(ACCUMULATION, 1))

    @property
    def rows_per_rank(self) -> int:
        """Return the rows of one optimizer step on one rank, packed ones counted as one."""
        return self.micro_batch * self.accumulation

    @property
    def checkpointing(self) -> bool:
        """Return True if activations are checkpointed."""
        return bool(self.get(CHECKPOINTING, False))

    @property
    def checkpointed_share(self) -> float:
        """Return the share of the layers whose activations are checkpointed."""
        return float(self.get(CHECKPOINTING, False))

    @property
    def offload_optimizer(self) -> str:
        """Return the device of the optimizer states: none, cpu or nvme."""
        return str(self.get("offload_optimizer", "none"))

    @property
    def offload_param(self) -> str:
        """Return the device of the offloaded parameters: none, cpu or nvme."""
        return str(self.get("offload_param", "none"))

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The sections of `OFFLOADING` whose tensors are kept off the device."""
        return tuple(name for name in OFFLOADING if self.get(name, "none") != "none")

    @functools.cached_property
    def family(self) -> tuple[tuple[str, Value], ...]:
        """The knobs that need a new engine: all but micro-batch and accumulation."""
        return tuple(item for item in self.knobs if item[0] not in RUNG_KNOBS)

    def passed_knobs(self, script: Script | None) -> tuple[tuple[str, Value], ...]:
        """Return the knobs that are passed to a training. A script with a fixed batch gets no batch knobs.

        Arguments switch checkpointing on; `rank/model_builder.py` switches it off again in a share of the layers.
        """
        whole = self
        if self.checkpointing:
            whole = self.but(**{CHECKPOINTING: True})
        return whole.family if script is not None and script.holds_batch else whole.knobs

    def engine_batch(self, profile: ScriptProfile) -> tuple[int, int]:
        """Return (micro-batch, accumulation) of the engine's config; a script's own loop may accumulate instead."""
        if not profile.loop_accumulates:
            return self.micro_batch, self.accumulation
        return self.rows_per_rank if profile.loop_accumulates == "cuts" else self.micro_batch, 1

    def __str__(self) -> str:
        return describe(self.as_dict)

    def ds_config(self, job: Job) -> dict[str, Any]:
        """Return the DeepSpeed config: the user's own, overlaid with this candidate's keys and the job's precision."""
        config = copy.deepcopy(in_new_names(job.base_config))
        for name, value in self.passed_knobs(job.script):
            path = KNOBS[name].path if name in KNOBS else name
            if path is not None:
                put(config, path, value)
        _tidy_zero(config, self)
        if self.stage == 3:  # otherwise Trainer saves no model, and accelerate raises, at the end of the training
            config["zero_optimization"].setdefault(GATHER_ON_SAVE, True)
            if job.optimizer_kind == "muon":  # stage3.py refuses it with `reduce_scatter`, which is on by default
                config["zero_optimization"].setdefault("reduce_scatter", False)
        if not job.profile.batch_note:
            micro_batch, accumulation = self.engine_batch(job.profile)
            if job.profile.loop_accumulates:
                config |= {MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
            # Under Ulysses, Trainer counts it over all ranks and DeepSpeed over groups of them; DeepSpeed computes a missing one.
            if job.script is None or job.data_ranks == job.ranks:
                config["train_batch_size"] = micro_batch * accumulation * job.data_ranks
        if job.script is not None and under_lightning(job.script):
            config.pop(ACCUMULATION, None)  # Lightning raises if a config has this key; its Trainer passes the value
        for precision in ("bf16", "fp16"):
            section, used = config.get(precision), precision == job.precision
            if used or section is not None:
                config[precision] = {**(section if isinstance(section, dict) else {}), "enabled": used}
        return config

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that a process must have before torch first allocates CUDA memory, given its `own`."""
        if EXPANDABLE not in self.as_dict:
            return {}
        text = next((own[name] for name in ALLOCATOR_VARIABLES if own.get(name)), "")
        # commas in brackets do not separate settings (`roundup_power2_divisions:[256:1,>:4]`)
        settings = [one.strip() for one in re.split(r",(?![^\[]*\])", text) if one.strip()]
        others = [one for one in settings if one.partition(":")[0].rstrip() != EXPANDABLE]
        on = bool(self.get(EXPANDABLE))
        if not on and others == settings:
            return {}  # off is torch's own default
        return {ALLOCATOR_VARIABLES[0]: ",".join([*others, f"{EXPANDABLE}:{on}"])}


def rank_variables(candidate: Candidate, job: Job, own: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's variables for a candidate, given the tuner's `own`.

    They are the device's variables that the script's code was seen to set, and the candidate's.
    """
    seen = job.profile.variables
    return {**seen, **candidate.environment({**own, **seen})}


def job_with_candidate(job: Job, candidate: Candidate) -> Job:
    """Return the job with its attention, compilation, LoRA, packing, kernels and loss replaced by the candidate's."""
    lora = candidate.get(LORA)
    return dataclasses.replace(
        job,
        attention=candidate.get(ATTENTION, job.attention),
        compiled=candidate.get(COMPILED, job.compiled),
        lora=job.lora if lora is None else None if lora == "none" else parse_lora(lora),
        packed=candidate.get(PACKING, job.packed),
        liger=candidate.get(LIGER, job.liger),
        loss=candidate.get(LOSS, job.loss),
    )


def samples(job: Job, candidate: Candidate) -> float:
    """Return the sequences of one optimizer step over all ranks. Packed sequences are counted individually."""
    return candidate.rows_per_rank * job.data_ranks * job_with_candidate(job, candidate).samples_per_row


def knobs_of(config: dict[str, Any]) -> dict[str, Value]:
    """Return the knobs with short names that a DeepSpeed config sets. Missing keys and `"auto"` are left out."""
    return {name: value for name, value in settings_of(config).items() if name in SHORT_NAMED}


def settings_of(config: dict[str, Any]) -> dict[str, Value]:
    """Return every knob that a DeepSpeed config sets, under the rules of `knobs_of`."""
    config = in_new_names(config)
    found: dict[str, Value] = {}
    for name, knob in KNOBS.items():
        value = value_at(config, knob.path.split(".")) if knob.path else None
        if isinstance(value, float) and knob.kind is not float:
            value = int(value) if value.is_integer() else None  # 5e8
        if isinstance(value, int | float | str) and value != "auto":
            found[name] = value
    return found


def put(config: dict[str, Any], path: str, value: Value) -> None:
    """Set the value at a dotted path of a config."""
    *parents, leaf = path.split(".")
    for parent in parents:
        if not isinstance(config.get(parent), dict):
            config[parent] = {}
        config = config[parent]
    config[leaf] = value


def _remove(config: dict[str, Any], path: str) -> None:
    *parents, leaf = path.split(".")
    if isinstance(section := value_at(config, parents), dict):
        section.pop(leaf, None)


def _tidy_zero(config: dict[str, Any], candidate: Candidate) -> None:
    """Remove keys of the user's own config that the candidate turns off or that its stage refuses."""
    for name, knob in KNOBS.items():
        if knob.refused_unread and knob.path is not None and not is_read(name, candidate.as_dict):
            _remove(config, knob.path)
    for section in OFFLOADING:
        entry = value_at(config, ("zero_optimization", section))
        if not isinstance(entry, dict):
            continue
        if candidate.get(section) == "none" or not is_read(section, candidate.as_dict):
            del config["zero_optimization"][section]
        elif section in candidate.as_dict:
            entry.setdefault("pin_memory", True)


_SHOWN_FIRST = ["zero_stage", MICRO_BATCH, ACCUMULATION, CHECKPOINTING, *OFFLOADING]
_SHOWN_IF_ON = (CHECKPOINTING, LORA, *OFFLOADING)


def describe(knobs: Knobs) -> str:
    """Describe knobs in one line for tables and logs, like `z3 mb8 ga4 ckpt opt=cpu rbs=5e+08`.

    Knobs are shown only if their value changes something.
    """
    words = []
    hidden = [name for name in _SHOWN_IF_ON if knobs.get(name) in (False, "none")]
    told = [name for name in knobs if name not in hidden and not is_off(name, knobs[name])]
    first = [name for name in _SHOWN_FIRST if name in told]
    for name in dict.fromkeys([*first, *told]):
        value, short = knobs[name], (KNOBS[name].short if name in KNOBS else "") or name.split(".")[-1]
        if isinstance(value, bool):
            words.append(short if value else f"no-{short}")
        elif name in ("zero_stage", MICRO_BATCH, ACCUMULATION):
            words.append(f"{short}{value}")
        else:
            words.append(f"{short}={value:.3g}" if isinstance(value, int | float) else f"{short}={value}")
    return " ".join(words)
