"""The knob table, requirements of knobs, and checks of their values."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import UserError, did_you_mean
from autotune.problem.hardware import Hardware
from autotune.problem.import_time_env import ALLOCATOR_VARIABLES, settings_in
from autotune.problem.job import ATTENTIONS, FULL, LIGER_LOSS, LOSSES, Job, Lora, parse_lora, script_text
from autotune.problem.models import CAUSAL, DECODED
from autotune.util.bounds import MOST, display_value, invalid_reason
from autotune.util.interpreter import OWN, Interpreter, console_script
from autotune.versions import dotted, release

# -- requirements ------------------------------------------------------------------------------------------------------
#
# Requirements of knobs' settings on the job and the machine. Each function returns a short text about what is missing,
# or an empty one. The first line of its docstring names the requirement without commas, for people too (`requirement_text`).

Value = bool | int | float | str
Release = tuple[int, ...]
READ: Release = (0, 19, 8)  # the DeepSpeed from which knobs, defaults and formulas were read
# package of an attention or a loss
KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface", LIGER_LOSS: "liger_kernel"}
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes of DeepSpeed's dtypes
ADAMS = ("adamw", "adam", "fused_adam")


@dataclass(frozen=True)
class RequirementInputs:
    """Inputs of the requirements, besides the other knobs of a candidate."""

    job: Job
    hardware: Hardware
    lossy: bool = False  # the space may change arithmetic
    deepspeed: Release = READ
    packages: bool = True  # check the packages of the ranks' environment

    @classmethod
    def of(cls, job: Job, hardware: Hardware, lossy: bool = False) -> RequirementInputs:
        """Return the circumstances with the DeepSpeed that ranks will have."""
        return cls(job, hardware, lossy, release(job.interpreter.version("deepspeed")) or READ)


Need = Callable[[Value, RequirementInputs], str]  # returns what is missing, or an empty text


def requirement_text(need: Need) -> str:
    """Return what a need requires, by the first line of its docstring."""
    return (need.__doc__ or "").partition("\n")[0].removeprefix("Require ").removesuffix(".")


def not_quantized(config: Mapping[str, Any]) -> str:
    """Return why bitsandbytes cannot quantize most of a model; empty if it can."""
    experts = any("experts" in key for key in config)
    return (
        "transformers 5 keeps all experts of a layer in one parameter, which bitsandbytes does not quantize" * experts
    )


def whole_if_quantized(value: Value, c: RequirementInputs) -> str:
    """Require weights of at least 16 bits for stage 3.

    zero.Init partitions weights while the model is made, and bitsandbytes quantizes whole ones. transformers has a path through
    `from_pretrained` with a 16-bit storage type, which a model with random weights does not take.
    """
    return "is not for quantize=nf4: 4-bit weights are whole on each rank" * bool(
        value == 3 and c.job.lora and c.job.lora.quantize
    )


def unscattered_for_muon(value: Value, c: RequirementInputs) -> str:
    """Require no `reduce_scatter` and no quantized gradients in the user's config if Muon runs at stage 3.

    Candidates turn `reduce_scatter` off.

    Source: deepspeed 0.19.8, stage3.py, `Muon and reduce scatter cannot be used together`, and the same of all2all groups.
    """
    zero = c.job.base_config.get("zero_optimization")
    own = zero if isinstance(zero, Mapping) and value == 3 and c.job.optimizer_kind == "muon" else {}
    key = next((key for key in ("reduce_scatter", "zero_quantized_gradients") if own.get(key) is True), "")
    return f"needs zero_optimization.{key}: false, as the optimizer is Muon: your own config sets true" if key else ""


def unquantized_for_muon(value: Value, c: RequirementInputs) -> str:
    """Require another optimizer than Muon."""
    return "is refused by DeepSpeed's Muon" * bool(value and c.job.optimizer_kind == "muon")


def _quantized_refused(knobs: Knobs) -> str:
    """Refuse stage 3 for 4-bit weights of the knob `lora`, see `whole_if_quantized`."""
    lora = str(knobs.get(LORA, "none"))
    at_three = stage_of(knobs) == 3 and lora != "none" and bool(parse_lora(lora).quantize)
    return "4-bit weights of lora cannot be combined with stage 3" * at_three


def cuda(value: Value, c: RequirementInputs) -> str:
    """Require CUDA devices."""
    return "" if c.hardware.device == "cuda" else "is for CUDA alone"


def own_allocator(value: Value, c: RequirementInputs) -> str:
    """Require a script that sets no allocator variable."""
    set_by_it = settings_in(script_text(c.job.script) or "") if c.job.script is not None else []
    seen = c.job.profile.variables
    names = [*(one.name for one in set_by_it if not one.default), *seen]
    name = next((one for one in names if one in ALLOCATOR_VARIABLES), "")
    return f"is the script's own to set: its code sets {name}" if name else ""


def several_ranks(value: Value, c: RequirementInputs) -> str:
    """Require several ranks."""
    return "" if c.job.ranks > 1 else "needs more than one rank"


def several_nodes(value: Value, c: RequirementInputs) -> str:
    """Require several nodes whose ranks the value divides.

    The second partition of hpZ lies within a node. On a single node it would hold the memory that ZeRO-3 saves, without a
    gain.
    """
    if c.hardware.nodes < 2:
        return "needs more than one node"
    if not 1 <= int(value) <= c.hardware.per_node or c.hardware.per_node % int(value):
        return f"has to divide the {c.hardware.per_node} ranks of a node"
    return ""


def bf16(value: Value, c: RequirementInputs) -> str:
    """Require --precision bf16."""
    return "" if c.job.precision == "bf16" else f"needs --precision bf16, not {c.job.precision}"


def fp16(value: Value, c: RequirementInputs) -> str:
    """Require --precision fp16."""
    return "" if c.job.precision == "fp16" else f"needs --precision fp16, not {c.job.precision}"


def adam(value: Value, c: RequirementInputs) -> str:
    """Require DeepSpeed's Adam.

    Source: stage3.py, `Hybrid Optimizer Only Supports DeepSpeedCPUAdam`.
    """
    kind = c.job.optimizer_kind
    return "" if kind in ADAMS else f"needs DeepSpeed's Adam, not {kind}"


def place_of_its_optimizer(value: Value, c: RequirementInputs) -> str:
    """Require a device on which the script's own optimizer can step.

    Only DeepSpeed's and apex's optimizers are limited. Fused ones accept only GPU tensors (`expected input to be on cuda`), CPU
    ones only tensors in main memory (ops/adam/cpu_adam.py, `CPUAdam param is on`).
    """
    profile = c.job.profile
    kind = "" if profile.through_arguments else profile.optimizer  # Trainer follows the config
    if c.hardware.device == "cuda" and steps_on_gpu(kind) and value != "none":
        return f"is not for the script's own {kind}, which steps on the GPU alone"
    if c.hardware.device == "cuda" and "CPU" in kind and value == "none":
        return f"is not for the script's own {kind}, which steps on the CPU alone"
    return ""


def sharded_for_its_optimizer(value: Value, c: RequirementInputs) -> str:
    """Require an optimizer of the script that can step without offloading."""
    return place_of_its_optimizer("none", c) if value == 0 else ""


def steps_on_gpu(optimizer: str) -> bool:
    """Check by the name of an optimizer's class, DeepSpeed's or apex's, that its kernels run on GPUs only."""
    return optimizer.startswith("Fused")


def no_clipping(value: Value, c: RequirementInputs) -> str:
    """Require `gradient_clipping: 0` in the user's config.

    DeepSpeed clips at 1.0 by default (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT).
    """
    own = c.job.base_config.get("gradient_clipping")
    return "" if own == 0 and not isinstance(own, bool) else "needs gradient_clipping: 0 in your own config"


def no_narrower_than_the_model(value: Value, c: RequirementInputs) -> str:
    """Require a dtype that is no narrower than the model's or a lossy space."""
    own = WIDTHS.get(c.job.precision, 4)
    narrower = WIDTHS.get(str(value), own) < own and not c.lossy
    return f"is narrower than {c.job.precision}, so that losses may differ: it needs a `lossy: true` space" * narrower


def memory_of_its_own(value: Value, c: RequirementInputs) -> str:
    """Require a GPU with its own memory for offloading to the CPU."""
    return "frees nothing here, where the GPU's memory is main memory" * (c.hardware.unified and value == "cpu")


def a_compiler(value: Value, c: RequirementInputs) -> str:
    """Require triton on GPUs and a C++ compiler on CPU ranks."""
    if c.hardware.device == "cuda":
        return "" if c.job.interpreter.has("triton") else "needs the package triton, which is not installed"
    return (
        ""
        if any(console_script(one, c.job.interpreter) for one in ("g++", "clang++", "c++"))
        else "needs a C++ compiler (g++), which is not installed"
    )


def a_script(value: Value, c: RequirementInputs) -> str:
    """Require a training script.

    A trial of a model sets explicitly when a step ends, which ZenFlow decides itself (runtime/zenflow/engine.py).
    """
    return "" if c.job.script is not None else "needs a training script: a named model has fixed steps and batches"


def its_package(value: Value, c: RequirementInputs) -> str:
    """Require the package of an attention or a loss or adapters."""
    package = missing_package(value, c.job.interpreter)
    return f"needs the package {package}, which is not installed" if package else ""


def missing_package(choice: object, interpreter: Interpreter = OWN) -> str | None:
    """Return the package that an attention, a loss or adapters (`r=16,…`) need and the ranks' environment lacks, or None."""
    if choice in (None, "none"):
        return None
    package = "peft" if str(choice).startswith("r=") else KERNELS.get(str(choice))
    if package == "peft" and parse_lora(str(choice)).quantize and interpreter.has(package):
        package = "bitsandbytes"
    return package if package and not interpreter.has(package) else None


def layers_of_their_own(value: Value, c: RequirementInputs) -> str:
    """Require a transformers whose layers can be checkpointed one by one."""
    version = c.job.interpreter.version("transformers")
    old = version is not None and release(version) < _LAYERS_OF_THEIR_OWN
    return f"needs transformers {dotted(_LAYERS_OF_THEIR_OWN)} or newer" if old and not isinstance(value, bool) else ""


def liger_kernel(value: Value, c: RequirementInputs) -> str:
    """Require the package liger_kernel.

    A trial shows if its version supports the model.
    """
    return its_package(LIGER_LOSS, c)


def liger_task(value: Value, c: RequirementInputs) -> str:
    """Require a task with a language-model head.

    Liger replaces the forward of any head by that of a language model.
    """
    return "" if c.job.task in DECODED else f"is for {' and '.join(f'--task {task}' for task in DECODED)}"


def loss_possible(value: Value, c: RequirementInputs) -> str:
    """Require a task and adapters whose loss can be computed without logits.

    The model's structure is checked when it is built.
    """
    if value == LIGER_LOSS:
        return cuda(value, c) or liger_task(value, c)
    if c.job.task != CAUSAL:
        return f"is for --task {CAUSAL}, not {c.job.task}"
    return "is not for adapters that save lm_head" if c.job.lora and "lm_head" in c.job.lora.saved else ""


# Needs without which DeepSpeed fails. If another need is missing, the knob only gains nothing.
FATAL: tuple[Need, ...] = (cuda, adam, whole_if_quantized, unscattered_for_muon, unquantized_for_muon)
OF_PACKAGES: tuple[Need, ...] = (its_package, liger_kernel, a_compiler)


# -- knobs -------------------------------------------------------------------------------------------------------------
#
# Table of all knobs: place in the DeepSpeed config, values, when DeepSpeed reads each, its needs, and effects on
# arithmetic.
#
# Source: the config classes of deepspeed 0.19.8 (docs/deepspeed-facts.md lists the places). `since` is
# from its repository's tags, beginning with 0.16.0.

Knobs = Mapping[str, Value]

_LAYERS_OF_THEIR_OWN = (4, 53)  # transformers: GradientCheckpointingLayer

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
CHECKPOINTING = "activation_checkpointing"
ATTENTION = "attention"
COMPILED = "compile"
LORA = "lora"
PACKING = "packing"
LIGER = "liger_kernel"
LOSS = "loss"
WORKERS = "dataloader_num_workers"
# settings of the model and its batches; a script builds its own
LEVERS = (COMPILED, LIGER, WORKERS)  # those that hooks turn on in a script
MODEL_KNOBS = (ATTENTION, LORA, PACKING, LOSS, *LEVERS)
TRACED_KNOBS = (ATTENTION, LORA, LIGER, LOSS)  # knobs that change the allocations of a forward for one row
EXPANDABLE = "expandable_segments"
OFFLOADING = ("offload_optimizer", "offload_param")
# knobs with a large effect on memory or time at any setting of the others; buckets, overlap and the like have none
FIRST_ORDER = ("zero_stage", MICRO_BATCH, ACCUMULATION, CHECKPOINTING, *OFFLOADING, *MODEL_KNOBS)
RUNG_KNOBS = (MICRO_BATCH, ACCUMULATION)  # knobs that may change while an engine lives
ZERO = "zero_optimization."
OFFLOAD_RATIO = ZERO + "offload_optimizer.ratio"
SUPER_OFFLOAD = ZERO + "offload_optimizer.super_offload"
LOW_MASTERS, LOW_STATES = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
GRADIENT_SUMS = "data_types.grad_accum_dtype"
SENT_AS = "communication_data_type"
DEEPCOMPILE = "compile.deepcompile"
OFFLOADED_ACTIVATIONS, OFFLOADED_STATES = "compile.offload_activation", "compile.offload_opt_states"
TOP_K = ZERO + "zenflow.topk_ratio"


@dataclass(frozen=True)
class ReadCondition:
    """Condition, on the other knobs, under which DeepSpeed reads a knob, with a description."""

    holds: Callable[[Knobs], bool] = lambda knobs: True
    where: str = "everywhere"
    of: str | None = None  # the knob that it depends on, besides stage and offloading


def stage_of(knobs: Knobs) -> int:
    """Return the ZeRO stage of knobs."""
    return int(knobs.get("zero_stage", 0))


def offloads(knobs: Knobs, what: str) -> bool:
    """Return True if the knobs offload the optimizer or the parameters, as `what` names."""
    return knobs.get(what, "none") != "none"


def _at(*stages: int) -> ReadCondition:
    where = " and ".join(map(str, stages)) if len(stages) < 3 else f"{stages[0]} to {stages[-1]}"
    return ReadCondition(lambda knobs: stage_of(knobs) in stages, f"stage{'s' * (len(stages) > 1)} {where}")


def _under(what: str, *devices: str, stages: tuple[int, ...] = (1, 2, 3)) -> ReadCondition:
    """Return the condition that `what` is offloaded to one of these devices; without devices, to any."""
    places = devices or ("cpu", "nvme")
    where = f"{_at(*stages).where} with {what} {' or '.join(places)}"
    return ReadCondition(lambda knobs: stage_of(knobs) in stages and knobs.get(what, "none") in places, where)


def _with(name: str, value: Value = True, stages: tuple[int, ...] = (0, 1, 2, 3)) -> ReadCondition:
    """Return the condition that another knob has the value, at these stages."""
    where = f"{name} {str(value).lower()}"
    where = where if len(stages) == 4 else f"{_at(*stages).where} with {where}"
    return ReadCondition(lambda knobs: stage_of(knobs) in stages and knobs.get(name, False) == value, where, name)


class Share:
    """Kind of a knob that is true, false, or a share between them."""


@dataclass(frozen=True)
class Knob:
    """A knob: its place in the config, its values and its properties."""

    kind: type | tuple[str, ...]
    read: ReadCondition = ReadCondition()
    # dotted path in the DeepSpeed config; None: it belongs to the model or the environment; empty: `_placed` fills it in
    path: str | None = ""
    low: float = 0
    high: float = float("inf")
    off: Value | None = None  # the value without effect or needs; None: every value is a choice
    follows_model: bool = False  # a dtype, for which the model's own dtype changes nothing
    needs: tuple[Need, ...] = ()  # requirements on the job and the machine for any value except `off`
    refused: Callable[[Knobs], str] = lambda knobs: ""  # reason why DeepSpeed refuses this knob together with others
    # DeepSpeed refuses the key where it does not read it, so `Candidate.ds_config` removes it from the user's own config
    refused_unread: bool = False
    op: str = ""  # builder of the DeepSpeed JIT op that any value except `off` loads; empty: none, or as the optimizer decides
    lossy: str = ""  # effect on arithmetic; empty: none
    since: Release = ()  # first DeepSpeed that knows it; empty: all supported ones do
    short: str = ""  # name in tables and logs
    trainer: str = ""  # name in transformers' TrainingArguments; empty: they have none
    in_code: str = ""  # how a training's own code has any value except `off`, as an order

    @property
    def is_switch(self) -> bool:
        """Return True if a flag of yes and no can carry it."""
        return self.kind in (bool, Share)


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
    without = knobs.get(ZERO + "compute_grad_norm") is False
    return "compute_grad_norm: false is not for stage 1 with 32-bit sums" if without and bf16 else ""


def _ratio_refused(knobs: Knobs) -> str:
    """Source: superoffload_stage3.py offloads the whole optimizer; zenflow has its own."""
    split = float(knobs.get(OFFLOAD_RATIO, 1.0)) < 1
    return "a ratio below 1 is not for super_offload" if split and knobs.get(SUPER_OFFLOAD) else ""


def _loss_refused(knobs: Knobs) -> str:
    """Liger's kernels include a loss. They would replace the other one, or be replaced."""
    both = knobs.get(LOSS, FULL) != FULL and knobs.get(LIGER)
    return f"liger_kernel includes a loss and cannot be combined with loss {knobs.get(LOSS)}" if both else ""


def _stage3(kind: type = int, **facts: object) -> Knob:
    return Knob(kind, _at(3), **facts)  # type: ignore[arg-type]


_ZENFLOW = ReadCondition(lambda knobs: TOP_K in knobs, f"candidates with {TOP_K}", TOP_K)
_DEVICES = ("none", "cpu", "nvme")
_OWN = (memory_of_its_own,)
_PLACE = (memory_of_its_own, place_of_its_optimizer)
_DTYPES = ("fp32", "fp16", "bf16")
_QUANTIZER = "QuantizerBuilder"
# Knobs with short names, and those without a key.
SHORT_NAMED: dict[str, Knob] = {
    MICRO_BATCH: Knob(int, path=MICRO_BATCH, low=1, short="mb", trainer="per_device_train_batch_size"),
    ACCUMULATION: Knob(int, path=ACCUMULATION, low=1, short="ga", trainer=ACCUMULATION),
    "zero_stage": Knob(
        int,
        path=ZERO + "stage",
        high=3,
        needs=(sharded_for_its_optimizer, whole_if_quantized, unscattered_for_muon),
        short="z",
    ),
    CHECKPOINTING: Knob(Share, path=None, short="ckpt", needs=(layers_of_their_own,), trainer="gradient_checkpointing"),
    ATTENTION: Knob(ATTENTIONS, path=None, needs=(its_package,)),
    COMPILED: Knob(
        bool,
        path=None,
        off=False,
        needs=(a_compiler,),
        trainer="torch_compile",
        in_code="compile the model by engine.compile()",
    ),
    LORA: Knob(Lora, path=None, needs=(its_package,), refused=_quantized_refused),
    PACKING: Knob(bool, path=None),
    LIGER: Knob(
        bool,
        path=None,
        off=False,
        needs=(cuda, liger_task, liger_kernel),
        trainer="use_liger_kernel",
        in_code="use Liger's kernels",
    ),
    LOSS: Knob(LOSSES, path=None, off=FULL, needs=(loss_possible, its_package), refused=_loss_refused),
    WORKERS: Knob(
        int, path=None, off=0, needs=(a_script,), short="workers", trainer=WORKERS, in_code="load data in processes"
    ),
    EXPANDABLE: Knob(bool, path=None, off=False, needs=(cuda, own_allocator), short="expandable"),
    "offload_optimizer": Knob(_DEVICES, _at(1, 2, 3), ZERO + "offload_optimizer.device", needs=_PLACE, short="opt"),
    "offload_param": Knob(_DEVICES, _at(3), ZERO + "offload_param.device", needs=_OWN, short="par"),
    "reduce_bucket_size": Knob(int, _at(1, 2, 3), ZERO + "reduce_bucket_size", low=1, short="rbs"),
    "allgather_bucket_size": Knob(int, _at(1, 2), ZERO + "allgather_bucket_size", low=1, short="agbs"),
    "sub_group_size": Knob(int, _at(3), ZERO + "sub_group_size", low=1, short="sgs"),
    # stage_1_and_2.py forces it on if the optimizer is offloaded
    "contiguous_gradients": Knob(
        bool,
        ReadCondition(
            lambda k: stage_of(k) == 3 or (stage_of(k) in (1, 2) and not offloads(k, "offload_optimizer")),
            "stage 3, and stages 1 and 2 without offload_optimizer",
        ),
        ZERO + "contiguous_gradients",
        short="contig",
    ),
    "overlap_comm": Knob(bool, _at(1, 2, 3), ZERO + "overlap_comm", short="overlap"),
}
# Knobs under `zero_optimization`, by their leaves. Studies name them by their paths.
_ZERO: dict[str, Knob] = {
    "stage3_prefetch_bucket_size": _stage3(off=50_000_000),
    **dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), _stage3(off=10**9)),
    "stage3_param_persistence_threshold": _stage3(off=100_000),
    "stage3_model_persistence_threshold": _stage3(),
    "stage3_module_granularity_threshold": _stage3(off=0),
    "stage3_use_all_reduce_for_fetch_params": _stage3(bool, off=False, needs=(several_ranks,)),
    "stage3_allgather_sequential": _stage3(bool, off=False, needs=(several_ranks,), since=(0, 18, 5)),
    "memory_efficient_linear": _stage3(bool),
    "zero_hpz_partition_size": _stage3(off=1, needs=(several_nodes,), short="hpz"),
    "zero_quantized_weights": _stage3(
        bool,
        off=False,
        needs=(cuda, several_ranks),
        op=_QUANTIZER,
        lossy="weights travel as 8-bit numbers",
        short="qwZ",
    ),
    "zero_quantized_nontrainable_weights": _stage3(
        bool, off=False, needs=(cuda,), op=_QUANTIZER, lossy="frozen weights are kept as 8-bit numbers", short="qnwZ"
    ),
    "zero_quantized_gradients": _stage3(
        bool,
        off=False,
        needs=(cuda, several_ranks, unquantized_for_muon),
        op=_QUANTIZER,
        lossy="gradients travel as 4- and 8-bit numbers",
        short="qgZ",
    ),
    "round_robin_gradients": Knob(bool, _at(1, 2), off=False, needs=(several_ranks,)),
    **dict.fromkeys(
        ("use_multi_rank_bucket_allreduce", "allgather_partitions"),
        Knob(bool, _at(1, 2), off=True, needs=(several_ranks,)),
    ),
    "reduce_scatter": Knob(bool, _at(1, 2, 3), off=True, needs=(several_ranks,)),
    "parameter_alignment": Knob(bool, _at(1, 2), off=False, since=(0, 19, 7)),
    "compute_grad_norm": Knob(
        bool, _at(1, 2), off=True, needs=(no_clipping,), refused=_norm_refused, refused_unread=True, since=(0, 19, 7)
    ),
    "offload_optimizer.ratio": Knob(
        float,
        _under("offload_optimizer", "cpu", stages=(3,)),
        high=1.0,
        off=1.0,
        needs=(adam,),
        refused=_ratio_refused,
        refused_unread=True,
        # stage3.py, `backup_optimizer`: a torch AdamW that is built once. Later writes skip its first group, and no state dict
        # holds it.
        lossy="what stays on the device keeps the learning rate of the start, whatever the schedule, and forgets on resume",
    ),
    "offload_optimizer.pin_memory": Knob(bool, _under("offload_optimizer")),
    "offload_optimizer.super_offload": Knob(
        bool,
        _under("offload_optimizer", "cpu", stages=(3,)),
        off=False,
        needs=(cuda, adam),
        since=(0, 18, 0),
        short="superoffload",
    ),
    "offload_optimizer.cpuadam_cores_perc": Knob(float, _with(SUPER_OFFLOAD), high=1.0, since=(0, 18, 0)),
    **dict.fromkeys(
        ("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write"),
        Knob(bool, _under("offload_optimizer", "nvme", stages=(3,)), off=False),
    ),
    "offload_param.pin_memory": Knob(bool, _under("offload_param", stages=(3,))),
    "offload_param.max_in_cpu": Knob(int, _under("offload_param", "nvme", stages=(3,))),
    "zenflow.topk_ratio": Knob(
        float,
        _under("offload_optimizer", "cpu"),
        high=1.0,
        needs=(cuda, adam, a_script),
        lossy="most of a gradient is applied later than the step that made it",
        since=(0, 17, 5),
    ),
    "zenflow.update_interval": Knob(int, _ZENFLOW, low=1, since=(0, 17, 5)),
    "zenflow.overlap_step": Knob(bool, _ZENFLOW, off=False, since=(0, 17, 5)),
}
# Knobs outside `zero_optimization`.
_ELSEWHERE: dict[str, Knob] = {
    SENT_AS: Knob(_DTYPES, follows_model=True, needs=(several_ranks, no_narrower_than_the_model), short="sent"),
    GRADIENT_SUMS: Knob(
        _DTYPES,
        _at(1, 2, 3),  # refused at stage 0 in 16 bits (engine.py, _do_optimizer_sanity_check)
        follows_model=True,
        lossy="gradients are summed in another precision",
        short="sums",
    ),
    LOW_MASTERS: Knob(
        bool,
        _at(1, 2, 3),
        off=False,
        needs=(bf16, adam),
        refused=_low_masters_refused,
        lossy="master weights and gradients are kept in bf16",
        since=(0, 18, 3),
        short="bf16-masters",
    ),
    LOW_STATES: Knob(
        bool,
        _with(LOW_MASTERS),
        off=False,
        needs=(bf16,),
        lossy="the optimizer's states are kept in bf16",
        since=(0, 18, 3),
        short="bf16-states",
    ),
    "bf16.immediate_grad_update": Knob(bool, _with(GRADIENT_SUMS, "fp32", stages=(1,)), off=False, needs=(bf16,)),
    "fp16.fp16_master_weights_and_grads": Knob(
        bool,
        _under("offload_optimizer"),
        off=False,
        needs=(fp16, adam),
        lossy="master weights and gradients are kept in fp16",
    ),
    DEEPCOMPILE: Knob(
        bool, _with(COMPILED, stages=(1, 2, 3)), off=False, needs=(cuda,), op="DeepCompileBuilder", since=(0, 16, 6)
    ),
    OFFLOADED_ACTIVATIONS: Knob(bool, _with(DEEPCOMPILE, stages=(3,)), off=False, since=(0, 16, 6)),
    OFFLOADED_STATES: Knob(
        bool, _with(DEEPCOMPILE, stages=(3,)), off=False, refused=_states_out_refused, since=(0, 16, 6)
    ),
}


def _placed(knobs: Mapping[str, Knob], prefix: str = "") -> dict[str, Knob]:
    """Return the knobs named by their paths."""
    return {prefix + leaf: dataclasses.replace(knob, path=prefix + leaf) for leaf, knob in knobs.items()}


KNOBS: dict[str, Knob] = {**SHORT_NAMED, **_placed(_ZERO, ZERO), **_placed(_ELSEWHERE)}
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
        return KNOBS[name].read.holds(knobs)
    if not name.startswith(ZERO):
        return True
    stage, leaf = stage_of(knobs), name.removeprefix(ZERO)
    head = leaf.split(".")[0]
    if stage == 0:
        return False
    stage_reads = stage == 3 or not (head.startswith("stage3_") or head in _STAGE3_ONLY)
    if head in OFFLOADING and "." in leaf:
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
        Share: "true, false, or a share of the layers",
        Lora: "none or r=RANK",
    }
    kind = ", ".join(knob.kind) if isinstance(knob.kind, tuple) else words[knob.kind]
    told = {
        "values": kind,
        "read at": knob.read.where,
        "changes nothing at": "" if knob.off is None else str(knob.off).lower(),
        "needs": ", ".join(map(requirement_text, knob.needs)),
        "since deepspeed": dotted(knob.since),
        "changes what is computed": knob.lossy,
        "in the config": knob.path or "nowhere: it is of the model or the environment",
    }
    return {what: said for what, said in told.items() if said}


# -- knob values -------------------------------------------------------------------------------------------------------
#
# Validation of knob values, shared by space files and the user's own DeepSpeed config.


def knob_value(knob: Knob, value: Any) -> Value:
    """Return the value in the form that candidates use: `5e8` becomes a whole number in any spelling.

    Raises:
        ValueError: the knob cannot have the value; the message names what was expected and found.
    """
    if why := invalid_reason(value):
        raise ValueError(why)
    if knob.kind is Lora:
        return _lora(value)
    if knob.kind is Share:
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise ValueError(f"expected true, false or a share of the layers like 0.5, found {value!r}")
        return bool(value) if value in (0, 1) else float(value)
    if isinstance(knob.kind, tuple):
        word = "none" if value is None else value
        if not isinstance(word, str) or word not in knob.kind:
            hint = difflib.get_close_matches(str(word), knob.kind, 1)
            raise ValueError(f"expected one of {', '.join(knob.kind)}, found {value!r}{did_you_mean(str(word), hint)}")
        return word
    if knob.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"expected true or false, found {value!r}")
        return value
    if knob.kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not knob.low <= value <= knob.high:
            expected = f"at least {knob.low:g}" if knob.high == float("inf") else f"from {knob.low:g} to {knob.high:g}"
            raise ValueError(f"expected a number {expected}, found {value!r}")
        return float(value)
    return _whole(knob, value)


def _whole(knob: Knob, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML reads 5.0e+8 as a float, and 5e8 as a word
    if isinstance(value, str):
        try:
            value = int(float(value))
        except (ValueError, OverflowError):
            raise ValueError(f"expected a whole number, found {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {display_value(value)}")
    high = min(knob.high, MOST)
    if not knob.low <= value <= high:
        expected = f"at least {knob.low}" if knob.high > MOST and value < knob.low else f"{knob.low} to {high}"
        raise ValueError(f"{display_value(value)} is out of range: expected {expected}")
    return value


def _lora(value: Any) -> str:
    """Return `none` for full training, or adapters in their shortest spelling; a number is a rank."""
    if value in (None, "none"):
        return "none"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected none, a rank, or r=16,targets=all-linear, found {value!r}")
    try:
        return str(parse_lora(f"r={value}" if isinstance(value, int) else value))
    except UserError as error:
        raise ValueError(str(error)) from None
