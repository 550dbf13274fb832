"""Table of all knobs: place in the DeepSpeed config, values, when DeepSpeed reads each, its needs, and effects on arithmetic.

Source: the config classes of deepspeed 0.19.8 (docs/deepspeed-facts.md lists the places). `since` and `until` are from its
repository's tags, beginning with 0.16.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autotune.problem import needs
from autotune.problem.job import ATTENTIONS, Lora
from autotune.problem.needs import Need, Release, Value
from autotune.versions import dotted

Knobs = Mapping[str, Value]

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
CHECKPOINTING = "activation_checkpointing"
ATTENTION = "attention"
COMPILED = "compile"
LORA = "lora"
PACKING = "packing"
LIGER = "liger_kernel"
# settings of the model and its batches; a script builds its own
MODEL_KNOBS = (ATTENTION, COMPILED, LORA, PACKING, LIGER)
TRACED_KNOBS = (ATTENTION, LORA, LIGER)  # knobs that change the allocations of a forward for one row
EXPANDABLE = "expandable_segments"
# knobs with a large effect on memory or time at any setting of the others; buckets, overlap and the like have none
FIRST_ORDER = (
    "zero_stage",
    MICRO_BATCH,
    ACCUMULATION,
    CHECKPOINTING,
    "offload_optimizer",
    "offload_param",
    *MODEL_KNOBS,
)
RUNG_KNOBS = (MICRO_BATCH, ACCUMULATION)  # knobs that may change while an engine lives
ZERO = "zero_optimization."
OFFLOAD_RATIO = ZERO + "offload_optimizer.ratio"
SUPER_OFFLOAD = ZERO + "offload_optimizer.super_offload"
LOW_MASTERS, LOW_STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
GRADIENT_SUMS = "data_types.grad_accum_dtype"
SENT_AS = "communication_data_type"
DEEPCOMPILE = "compile.deepcompile"
OFFLOADED_ACTIVATIONS, OFFLOADED_STATES = "compile.offload_activation", "compile.offload_opt_states"
QUANTIZED = tuple(ZERO + f"zero_quantized_{what}" for what in ("weights", "nontrainable_weights", "gradients"))
TOP_K = ZERO + "zenflow.topk_ratio"


@dataclass(frozen=True)
class Read:
    """Condition, on the other knobs, under which DeepSpeed reads a knob, with a description."""

    holds: Callable[[Knobs], bool] = lambda knobs: True
    where: str = "everywhere"
    of: str | None = None  # the knob that it depends on, besides stage and offloading

    def __call__(self, knobs: Knobs) -> bool:
        return self.holds(knobs)


def stage_of(knobs: Knobs) -> int:
    return int(knobs.get("zero_stage", 0))


OFFLOADING = ("offload_optimizer", "offload_param")


def offloads(knobs: Knobs, what: str) -> bool:
    return knobs.get(what, "none") != "none"


def _at(*stages: int) -> Read:
    where = " and ".join(map(str, stages)) if len(stages) < 3 else f"{stages[0]} to {stages[-1]}"
    return Read(lambda knobs: stage_of(knobs) in stages, f"stage{'s' * (len(stages) > 1)} {where}")


def _under(what: str, *devices: str, stages: tuple[int, ...] = (1, 2, 3)) -> Read:
    """Return the condition that `what` is offloaded to one of these devices; without devices, to any."""
    places = devices or ("cpu", "nvme")
    where = f"{_at(*stages).where} with {what} {' or '.join(places)}"
    return Read(lambda knobs: stage_of(knobs) in stages and knobs.get(what, "none") in places, where)


def _with(name: str, value: Value = True, stages: tuple[int, ...] = (0, 1, 2, 3), otherwise: Value = False) -> Read:
    """Return the condition that another knob has the value, at these stages."""
    where = f"{name} {str(value).lower()}"
    where = where if len(stages) == 4 else f"{_at(*stages).where} with {where}"
    return Read(lambda knobs: stage_of(knobs) in stages and knobs.get(name, otherwise) == value, where, name)


@dataclass(frozen=True)
class Knob:
    """A knob: its place in the config, its values and its properties."""

    path: str | None  # dotted path in the DeepSpeed config; None: it belongs to the model or the environment
    kind: type | tuple[str, ...]
    read: Read = Read()
    low: float = 0
    high: float = float("inf")
    off: Value | None = None  # the value without effect or needs; None: every value is a choice
    follows_model: bool = False  # a dtype, for which the model's own dtype changes nothing
    needs: tuple[Need, ...] = ()  # requirements on the job and the machine for any value except `off`
    refused: Callable[[Knobs], str] = lambda knobs: ""  # reason why DeepSpeed refuses this knob together with others
    lossy: str = ""  # effect on arithmetic; empty: none
    since: Release = ()  # first DeepSpeed that knows it; empty: all supported ones do
    until: Release = ()  # last DeepSpeed that knows it
    short: str = ""  # name in tables and logs


def _low_masters_refused(knobs: Knobs) -> str:
    """Source: base_optimizer.py, `_configure_master_weights`."""
    if not knobs.get(LOW_MASTERS) or knobs.get(LOW_STATES) or offloads(knobs, "offload_optimizer"):
        return ""
    return f"{LOW_MASTERS} needs {LOW_STATES} or an offloaded optimizer"


def _states_out_refused(knobs: Knobs) -> str:
    """Source: compile/init_z3.py, the first lines."""
    if knobs.get(OFFLOADED_STATES) and offloads(knobs, "offload_optimizer"):
        return f"{OFFLOADED_STATES} cannot be combined with offload_optimizer"
    if knobs.get(OFFLOADED_STATES) and knobs.get(OFFLOADED_ACTIVATIONS):
        return f"{OFFLOADED_STATES} cannot be combined with {OFFLOADED_ACTIVATIONS}"
    return ""


def _norm_refused(knobs: Knobs) -> str:
    """Source: engine.py, `_do_optimizer_sanity_check`; BF16_Optimizer always computes the norm."""
    bf16 = stage_of(knobs) == 1 and knobs.get(GRADIENT_SUMS) == "fp32" and not offloads(knobs, "offload_optimizer")
    return "compute_grad_norm: false is not for stage 1 with 32-bit sums" if _no_norm(knobs) and bf16 else ""


def _no_norm(knobs: Knobs) -> bool:
    return knobs.get(ZERO + "compute_grad_norm") is False


def _ratio_refused(knobs: Knobs) -> str:
    """Source: superoffload_stage3.py offloads the whole optimizer; zenflow has its own."""
    return "a ratio below 1 is not for super_offload" if _split(knobs) and knobs.get(SUPER_OFFLOAD) else ""


def _split(knobs: Knobs) -> bool:
    return float(knobs.get(OFFLOAD_RATIO, 1.0)) < 1


def _stage3(kind: type = int, **facts: object) -> Knob:
    return Knob("", kind, _at(3), **facts)  # type: ignore[arg-type]


_ZENFLOW = Read(lambda knobs: TOP_K in knobs, f"candidates with {TOP_K}", TOP_K)
_DEVICES = ("none", "cpu", "nvme")
_OWN = (needs.memory_of_its_own,)
_PLACE = (needs.memory_of_its_own, needs.place_of_its_optimizer)
_DTYPES = ("fp32", "fp16", "bf16")
# Knobs that are always read; they are named by short names.
_FIRST: dict[str, Knob] = {
    MICRO_BATCH: Knob(MICRO_BATCH, int, low=1, short="mb"),
    ACCUMULATION: Knob(ACCUMULATION, int, low=1, short="ga"),
    "zero_stage": Knob(ZERO + "stage", int, high=3, needs=(needs.sharded_for_its_optimizer,), short="z"),
    CHECKPOINTING: Knob(None, bool, short="ckpt"),
    ATTENTION: Knob(None, ATTENTIONS, needs=(needs.its_package,)),
    COMPILED: Knob(None, bool, off=False, needs=(needs.a_compiler,)),
    LORA: Knob(None, Lora, needs=(needs.its_package,)),
    PACKING: Knob(None, bool),
    LIGER: Knob(None, bool, off=False, needs=(needs.cuda, needs.liger_model, needs.liger_kernel)),
    EXPANDABLE: Knob(None, bool, off=False, needs=(needs.cuda, needs.own_allocator), short="expandable"),
    "offload_optimizer": Knob(ZERO + "offload_optimizer.device", _DEVICES, _at(1, 2, 3), needs=_PLACE, short="opt"),
    "offload_param": Knob(ZERO + "offload_param.device", _DEVICES, _at(3), needs=_OWN, short="par"),
    "reduce_bucket_size": Knob(ZERO + "reduce_bucket_size", int, _at(1, 2, 3), low=1, short="rbs"),
    "allgather_bucket_size": Knob(ZERO + "allgather_bucket_size", int, _at(1, 2), low=1, short="agbs"),
    "sub_group_size": Knob(ZERO + "sub_group_size", int, _at(3), low=1, short="sgs"),
    # stage_1_and_2.py forces it on if the optimizer is offloaded
    "contiguous_gradients": Knob(
        ZERO + "contiguous_gradients",
        bool,
        Read(
            lambda k: stage_of(k) == 3 or (stage_of(k) in (1, 2) and not offloads(k, "offload_optimizer")),
            "stage 3, and stages 1 and 2 without offload_optimizer",
        ),
        short="contig",
    ),
    "overlap_comm": Knob(ZERO + "overlap_comm", bool, _at(1, 2, 3), short="overlap"),
}
# Knobs under `zero_optimization`, by their leaves. Studies name them by their paths.
_ZERO: dict[str, Knob] = {
    "stage3_prefetch_bucket_size": _stage3(off=50_000_000),
    "stage3_max_live_parameters": _stage3(off=10**9),
    "stage3_max_reuse_distance": _stage3(off=10**9),
    "stage3_param_persistence_threshold": _stage3(off=100_000),
    "stage3_model_persistence_threshold": _stage3(),
    "stage3_module_granularity_threshold": _stage3(off=0),
    "stage3_use_all_reduce_for_fetch_params": _stage3(bool, off=False, needs=(needs.several_ranks,)),
    "stage3_allgather_sequential": _stage3(bool, off=False, needs=(needs.several_ranks,), since=(0, 18, 5)),
    "memory_efficient_linear": _stage3(bool),
    "zero_hpz_partition_size": _stage3(off=1, needs=(needs.several_nodes,), short="hpz"),
    "mics_shard_size": _stage3(low=-1, off=-1, needs=(needs.mics_init,), until=(0, 19, 6), short="mics"),
    "mics_hierarchical_params_gather": _stage3(bool, off=False, needs=(needs.mics_init,), until=(0, 19, 6)),
    "zero_quantized_weights": _stage3(
        bool, off=False, needs=(needs.cuda, needs.several_ranks), lossy="weights travel as 8-bit numbers", short="qwZ"
    ),
    "zero_quantized_nontrainable_weights": _stage3(
        bool, off=False, needs=(needs.cuda,), lossy="frozen weights are kept as 8-bit numbers", short="qnwZ"
    ),
    "zero_quantized_gradients": _stage3(
        bool,
        off=False,
        needs=(needs.cuda, needs.several_ranks),
        lossy="gradients travel as 4- and 8-bit numbers",
        short="qgZ",
    ),
    "round_robin_gradients": Knob("", bool, _at(1, 2), off=False, needs=(needs.several_ranks,)),
    "use_multi_rank_bucket_allreduce": Knob("", bool, _at(1, 2), off=True, needs=(needs.several_ranks,)),
    "allgather_partitions": Knob("", bool, _at(1, 2), off=True, needs=(needs.several_ranks,)),
    "reduce_scatter": Knob("", bool, _at(1, 2, 3), off=True, needs=(needs.several_ranks,)),
    "parameter_alignment": Knob("", bool, _at(1, 2), off=False, since=(0, 19, 7)),
    "compute_grad_norm": Knob(
        "", bool, _at(1, 2), off=True, needs=(needs.no_clipping,), refused=_norm_refused, since=(0, 19, 7)
    ),
    "offload_optimizer.ratio": Knob(
        "",
        float,
        _under("offload_optimizer", "cpu", stages=(3,)),
        high=1.0,
        off=1.0,
        needs=(needs.adam,),
        refused=_ratio_refused,
        # stage3.py, `backup_optimizer`: a torch AdamW that is built once. Later writes skip its first group, and no state dict
        # holds it.
        lossy="what stays on the device keeps the learning rate of the start, whatever the schedule, and forgets on resume",
    ),
    "offload_optimizer.pin_memory": Knob("", bool, _under("offload_optimizer")),
    "offload_optimizer.super_offload": Knob(
        "",
        bool,
        _under("offload_optimizer", "cpu", stages=(3,)),
        off=False,
        needs=(needs.cuda, needs.adam),
        since=(0, 18, 0),
        short="superoffload",
    ),
    "offload_optimizer.cpuadam_cores_perc": Knob("", float, _with(SUPER_OFFLOAD), high=1.0, since=(0, 18, 0)),
    "offload_optimizer.pipeline_read": Knob("", bool, _under("offload_optimizer", "nvme", stages=(3,)), off=False),
    "offload_optimizer.pipeline_write": Knob("", bool, _under("offload_optimizer", "nvme", stages=(3,)), off=False),
    "offload_param.pin_memory": Knob("", bool, _under("offload_param", stages=(3,))),
    "offload_param.max_in_cpu": Knob("", int, _under("offload_param", "nvme", stages=(3,))),
    "zenflow.topk_ratio": Knob(
        "",
        float,
        _under("offload_optimizer", "cpu"),
        high=1.0,
        needs=(needs.cuda, needs.adam, needs.a_script),
        lossy="most of a gradient is applied later than the step that made it",
        since=(0, 17, 5),
    ),
    "zenflow.update_interval": Knob("", int, _ZENFLOW, low=1, since=(0, 17, 5)),
    "zenflow.overlap_step": Knob("", bool, _ZENFLOW, off=False, since=(0, 17, 5)),
}
# Knobs outside `zero_optimization`.
_ELSEWHERE: dict[str, Knob] = {
    SENT_AS: Knob(
        "", _DTYPES, follows_model=True, needs=(needs.several_ranks, needs.no_narrower_than_the_model), short="sent"
    ),
    GRADIENT_SUMS: Knob(
        "",
        _DTYPES,
        _at(1, 2, 3),  # refused at stage 0 in 16 bits (engine.py, _do_optimizer_sanity_check)
        follows_model=True,
        lossy="gradients are summed in another precision",
        short="sums",
    ),
    LOW_MASTERS: Knob(
        "",
        bool,
        _at(1, 2, 3),
        off=False,
        needs=(needs.bf16, needs.adam),
        refused=_low_masters_refused,
        lossy="master weights and gradients are kept in bf16",
        since=(0, 18, 3),
        short="bf16-masters",
    ),
    LOW_STATES: Knob(
        "",
        bool,
        _with(LOW_MASTERS),
        off=False,
        needs=(needs.bf16,),
        lossy="the optimizer's states are kept in bf16",
        since=(0, 18, 3),
        short="bf16-states",
    ),
    "bf16.immediate_grad_update": Knob(
        "", bool, _with(GRADIENT_SUMS, "fp32", stages=(1,)), off=False, needs=(needs.bf16,)
    ),
    "fp16.fp16_master_weights_and_grads": Knob(
        "",
        bool,
        _under("offload_optimizer"),
        off=False,
        needs=(needs.fp16, needs.adam),
        lossy="master weights and gradients are kept in fp16",
    ),
    DEEPCOMPILE: Knob(
        "",
        bool,
        _with(COMPILED, stages=(1, 2, 3), otherwise=True),
        off=False,
        needs=(needs.cuda, needs.engine_compile, needs.a_compiler),
        since=(0, 16, 6),
    ),
    OFFLOADED_ACTIVATIONS: Knob("", bool, _with(DEEPCOMPILE, stages=(3,)), off=False, since=(0, 16, 6)),
    OFFLOADED_STATES: Knob(
        "", bool, _with(DEEPCOMPILE, stages=(3,)), off=False, refused=_states_out_refused, since=(0, 16, 6)
    ),
}


def _placed(knobs: Mapping[str, Knob], prefix: str = "") -> dict[str, Knob]:
    """Return the knobs named by their paths."""
    return {prefix + leaf: Knob(**{**vars(knob), "path": prefix + leaf}) for leaf, knob in knobs.items()}


KNOBS: dict[str, Knob] = {**_FIRST, **_placed(_ZERO, ZERO), **_placed(_ELSEWHERE)}
SHORT_NAMED = frozenset(_FIRST)
_BY_PATH = {knob.path: name for name, knob in KNOBS.items() if knob.path}
_BY_LEAF = {leaf: ZERO + leaf for leaf in _ZERO}
_BY_LEAF |= {name.rpartition(".")[2]: name for name in _ELSEWHERE}


def short_name(key: str) -> str:
    """Return the name that candidates use for a key, or the key itself if it is no knob.

    `zero_optimization.stage` and `zero_stage` are one knob; `stage3_max_live_parameters` is the key under `zero_optimization`.
    """
    return _BY_PATH.get(key, _BY_LEAF.get(key, key))


# Keys under zero_optimization that are no knobs and are read at stage 3 only.
_STAGE3_ONLY = ("offload_param", "use_all_reduce_for_fetch_params")


def is_read(name: str, knobs: Knobs) -> bool:
    """Check that DeepSpeed reads the knob, given the others."""
    if name in KNOBS:
        return KNOBS[name].read(knobs)
    if not name.startswith(ZERO):
        return True
    stage, leaf = stage_of(knobs), name.removeprefix(ZERO)
    head = leaf.split(".")[0]
    if stage == 0:
        return False
    stage_reads = stage == 3 or not (head.startswith("stage3_") or head in _STAGE3_ONLY)
    if head in ("offload_optimizer", "offload_param") and "." in leaf:
        return stage_reads and offloads(knobs, head)
    return stage_reads


def refusal(knobs: Knobs) -> str:
    """Return why DeepSpeed refuses this combination of knobs; empty if it accepts it."""
    return next((why for name in knobs if name in KNOBS and (why := KNOBS[name].refused(knobs))), "")


def is_off(name: str, value: Value, precision: str | None = None) -> bool:
    """Check that the value changes nothing, for a model of this precision."""
    knob = KNOBS.get(name)
    return knob is not None and (value == knob.off or (knob.follows_model and value == precision))


def lossy_of(knobs: Knobs, precision: str) -> dict[str, str]:
    """Return the knobs whose values change arithmetic, and how."""
    changed = [name for name, value in knobs.items() if not is_off(name, value, precision)]
    return {name: KNOBS[name].lossy for name in changed if name in KNOBS and KNOBS[name].lossy}


def facts(knob: Knob) -> dict[str, str]:
    """Describe a knob in words; empty facts are left out."""
    words = {
        int: "whole number",
        bool: "true or false",
        float: f"{knob.low:g} to {knob.high:g}",
        Lora: "none or r=RANK",
    }
    kind = ", ".join(knob.kind) if isinstance(knob.kind, tuple) else words[knob.kind]
    told = {
        "values": kind,
        "read at": knob.read.where,
        "changes nothing at": "" if knob.off is None else str(knob.off).lower(),
        "needs": ", ".join(need.__name__.replace("_", " ") for need in knob.needs),
        "since deepspeed": dotted(knob.since),
        "until deepspeed": dotted(knob.until),
        "changes what is computed": knob.lossy,
        "in the config": knob.path or "nowhere: it is of the model or the environment",
    }
    return {what: said for what, said in told.items() if said}
