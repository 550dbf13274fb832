"""A row of a published table as a case: Job, Hardware, Candidate, and the figure that was measured.

`settings_of` makes the best of the columns, for any source. What a column leaves open is filled by the source's own code
(`sources.py`), and else by the defaults here, each with its reason:

* Memory columns without a method mean what nvidia-smi shows.
* `single` and `ddp` in bf16 without DeepSpeed train in the weights' own type: torch keeps no master weights.
* FSDP in bf16 keeps 32-bit shards (torch.distributed.fsdp.MixedPrecision casts what it gathers), unless a row says `pure`.
* fp16 without DeepSpeed is autocast: gradients in fp16 cannot be unscaled (torch.amp.GradScaler).
* `fsdp` is stage 3 with a block as the unit (`step_time.fsdp_settings`), stage 0 without DeepSpeed torch's DDP.
* Without DeepSpeed transformers' Trainer runs forward under autocast also of 16-bit weights (`bf16=True`), unless a row says
  `pure`: cross entropy is then taken in 32 bits.
* Logits are made 32-bit or not as the model's code of the figure's year did (`models.loss_of`).
* DeepSpeed's configs are those of transformers' examples: buckets `auto`, that is hidden_size^2, with `overlap_comm`.
* Unknown checkpointing is off, unknown accumulation 1: every framework's default. Unknown attention is what transformers
  chose for the architecture at the time (`models.eager_then`).
* A LoRA of unknown rank, targets or dropout has peft's defaults (8, query and value, none). Outside DeepSpeed its weights are
  fp32 since peft 0.12 (August 2024, `autocast_adapter_dtype`) and up to 0.5 (2023, tuners/lora.py), else of the model's type.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from autotune.predict.step_time import fsdp_settings
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.gpu_specs import gpu_table
from autotune.problem.hardware import Hardware
from autotune.problem.job import ATTENTIONS, SEQUENCE_RANKS, Job, Lora
from autotune.problem.models import ANSWERS, CAUSAL, CLASSIFICATION, MASKED, SEQ2SEQ, ModelSpec, default_task
from autotune.util.units import GIB
from benchmarks.predict.published.decisions import largest_micro_batch, verdict
from benchmarks.predict.published.gpus import gpu_of
from benchmarks.predict.published.lora import IN_4_BITS, lora_of, targets_in
from benchmarks.predict.published.models import eager_then, hidden_size, loss_of, model_of, parameters_of, year_of
from benchmarks.predict.published.number_formats import Length
from benchmarks.predict.published.optimizers import optimizer_of
from benchmarks.predict.published.parallel import parallel_of
from benchmarks.predict.published.precision import TORCH_TYPES, precision_of
from benchmarks.predict.published.rows import Row, length, memory_bytes, quantity_of, step_seconds, whole
from benchmarks.predict.published.words import LeftOut, Unreadable, cell_of, states

HOST_BYTES = 4096 * GIB  # sources do not say what main memory a machine has: it never decides
GPUS_A_NODE = 8
FP32_ADAPTERS_SINCE = 2025  # the first whole year with peft 0.12
LARGEST = ("max_micro_batch", "max_batch", "largest")  # kinds of figures whose value is a batch


@dataclass
class Settings:
    """What a row trains and how; None where the source does not say."""

    quantity: str
    model: ModelSpec | None = None
    gpus: int | None = None
    nodes: int | None = None
    length: Length | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    packed: bool = False
    micro_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None  # of arithmetic
    masters: bool | None = None  # whether 32-bit weights are kept
    optimizer: str | None = None
    stage: int | None = None
    sequence_ranks: int = 1  # GPUs that share each sequence
    deepspeed: bool = False
    own_engine: bool = False  # neither DeepSpeed's nor torch's, with masters beside 16-bit weights as ZeRO's
    offload_optimizer: str = "none"
    offload_param: str = "none"
    checkpointing: bool | None = None
    lora: Lora | None = None
    attention: str | None = None
    loss: str = "own"  # one of `trace.LOSSES`
    liger: bool = False
    keeps_inputs: bool = False  # 4-bit layers save their inputs until backward
    task: str = CAUSAL
    compiled: bool = False
    rate_is: str | None = None  # total or per_gpu, where the figure's kind leaves it open
    gigabyte: float = GIB  # what the source's GB is in bytes
    ran: bool | None = None  # whether the row says that it ran, where it says so without a number
    largest: int | None = None  # the micro-batch up to which it ran
    tried: int | None = None  # the micro-batch that a `max_micro_batch` row says fails
    open_batch: str = ""  # why the micro-batch's cell tells none, though it is filled
    zero: dict[str, Any] = field(default_factory=dict)  # further keys of zero_optimization
    config: dict[str, Any] = field(default_factory=dict)  # further keys of the DeepSpeed config
    doubts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One figure and all that predicts it."""

    row: Row
    job: Job
    hardware: Hardware
    candidate: Candidate
    loss: str
    quantity: str  # allocated, reserved, nvml: bytes of one GPU; step: seconds; decision: 1 ran, 0 did not
    value: float
    doubts: tuple[str, ...] = ()
    keeps_inputs: bool = False

    @property
    def configuration(self) -> tuple[Job, Candidate]:
        return self.job, self.candidate


# -- columns ---------------------------------------------------------------------------------------------------------


def settings_of(row: Row) -> Settings:
    """What the columns of a row of any source say.

    Raises:
        LeftOut: the row is of something that is not predicted, or has a word that no vocabulary has.
        Unreadable: a cell that nobody could read.
    """
    s = Settings(quantity_of(row), ran=verdict(row))
    s.quantity = s.quantity if s.ran is None else "decision"
    s.model = model_of(row)
    _only_what_is_modelled(row)
    s.task = _task(row, s.model)
    s.lora = lora_of(row)
    s.gpus = whole(row, "n_gpus")
    s.length = length(row)
    if s.task == SEQ2SEQ:
        s.length = _of_two_sides(row, s.length)
    s.packed = row.says("packing", "packed", column="seq_len")
    _parallel(row, s)
    _batch(row, s)
    _precision(row, s)
    s.optimizer, config = optimizer_of(row, s.deepspeed)
    s.config |= config
    checkpointing = cell_of("checkpointing", row["checkpointing"])
    if "selective" in checkpointing:
        raise LeftOut("selective checkpointing")
    if "offload" in checkpointing or row.says("activation offloading", "offloaded activations"):
        raise LeftOut("activations offloaded to the host")
    if not checkpointing.unknown:
        s.checkpointing = checkpointing.one_of("yes", "no") == "yes"
    if precision_of(row).adapters32 or s.precision == "fp16" or year_of(row, s.model) >= FP32_ADAPTERS_SINCE:
        adapters_in_32_bits(s)
    s.attention = cell_of("attention", row["attention"]).one_of(*ATTENTIONS)
    if s.attention is None and eager_then(row, s.model):
        s.attention = "eager"
    _loss(row, s, s.model)
    s.compiled = row.says("torch.compile")
    # bitsandbytes 0.41, autograd/_functions.py, MatMul4Bit.forward: `ctx.tensors = (A, B)`; 0.50 keeps the weight alone
    s.keeps_inputs = bool(s.lora and s.lora.quantize and row.says("bitsandbytes 0.41"))
    return s


def _batch(row: Row, s: Settings) -> None:
    """Micro-batch and accumulation. One of several figures counts as not stated: the source's own code may tell."""
    s.accumulation = whole(row, "grad_accum")
    if row.kind.startswith(LARGEST) and s.ran is None:
        s.micro_batch = s.largest = largest_micro_batch(row, s.gpus, s.accumulation)
        return
    try:
        s.micro_batch = whole(row, "micro_batch")
    except LeftOut as why:
        s.open_batch = str(why)
        return
    if s.micro_batch and re.search("global|total|effective|all gpus", row["micro_batch"].lower()):
        if s.gpus is None:
            raise LeftOut("number of GPUs not stated")
        at_once = s.gpus // s.sequence_ranks * (s.accumulation or 1)
        if s.micro_batch % at_once:
            raise LeftOut("the global batch is no multiple of the GPUs and the accumulation")
        s.micro_batch //= at_once


def _of_two_sides(row: Row, length: Length | None) -> Length | None:
    """An encoder-decoder's length is that of its source, and of its target.

    Raises:
        LeftOut: they differ, or one is not stated.
    """
    if length is None:
        return None
    if length.sides and (len(length.sides) != 2 or len(set(length.sides)) != 1):
        raise LeftOut("source and target of different lengths")
    if not length.sides and row.kind.startswith(("tokens", "throughput", "tgs")) and "tok" in row["unit"].lower():
        raise LeftOut("whether tokens are the source's or also the target's is not stated")
    return dataclasses.replace(length, longest=length.sides[0] if length.sides else length.longest)


def _loss(row: Row, s: Settings, model: ModelSpec) -> None:
    """How the loss is taken from the logits."""
    if row.says("liger"):
        s.liger = True  # its kernels for norms, rotation and gates, and its loss
    elif row.says("fused linear", "no full logits"):
        s.loss = "chunked"
    elif row.says("chunked c", "fused cross", "chunked lm_head"):
        s.loss = "fused"
    else:
        s.loss = loss_of(row, model, autocast=not s.deepspeed and not precision_of(row).pure)


def adapters_in_32_bits(s: Settings) -> None:
    """As peft makes them outside DeepSpeed; under autocast they compute in 16 bits, so steps take no longer."""
    if s.lora and not s.deepspeed and s.precision != "fp32" and s.quantity != "step":
        s.lora = dataclasses.replace(s.lora, fp32=True)


def _only_what_is_modelled(row: Row) -> None:
    """Raises:
    LeftOut: weights are quantised in another way than QLoRA's, or what is trained beside them is no LoRA.
    """
    adapters = IN_4_BITS.sub("lora", row["lora"].lower())
    text = " ; ".join((row["model"].lower(), row["precision"].lower(), adapters))
    for where, pattern, why in (
        (text, _QUANTISED, "quantised weights or arithmetic"),
        (row["lora"].lower(), _OTHER_ADAPTERS, "adapters other than LoRA"),
    ):
        if any(states(where, found.group()) for found in re.finditer(pattern, where)):
            raise LeftOut(why)


_QUANTISED = r"\b[48]-?bit|\bnf4|\bfp4|\bnvfp4|qlora|int[48]\b|gptq|awq|\bfp8|float8|mxfp|\bw4a16|bnb4|quanti[sz]ed"
_OTHER_ADAPTERS = (
    r"dora\b|ia3|ia\^3|prefix|prompt|adalora|loha|lokr|vera\b|galore|lisa\b|bitfit|\boft\b|boft|reft\b|p-?tuning"
)


def _task(row: Row, model: ModelSpec) -> str:
    """What the model is trained for: as the row says, or as its configuration is published for."""
    text = row["model"].lower()
    for words, task in (
        (("classif",), CLASSIFICATION),
        (("qa head", "question"), ANSWERS),
        (("masked", "mlm"), MASKED),
    ):
        if any(word in text for word in words):
            return task
    return default_task(model.config)


def _parallel(row: Row, s: Settings) -> None:
    found = parallel_of(row, s.gpus)
    s.stage, s.deepspeed, s.nodes = found.stage, found.deepspeed, found.nodes
    s.sequence_ranks = found.sequence_ranks
    s.offload_optimizer, s.offload_param = found.offload_optimizer, found.offload_param
    if s.gpus is None and found.single:
        s.gpus = 1


def _precision(row: Row, s: Settings) -> None:
    """Type of the arithmetic, and whether weights are kept in 32 bits: as masters, or as the weights under autocast."""
    said = precision_of(row)
    s.precision = said.kind
    if said.kind in TORCH_TYPES and not s.deepspeed and not said.adapters32:
        halved = said.kind == "fp16" and s.lora is not None and not said.mixed  # frozen weights need no scaler
        s.masters = not said.pure and not halved and (said.masters or s.stage == 3)
        if not said.pure and not s.masters and not halved and (said.mixed or said.kind == "fp16"):
            s.config["torch_autocast"] = {"enabled": True, "dtype": TORCH_TYPES[said.kind]}
            s.precision = "fp32"
    if said.low_masters:
        s.config["bf16"] = {"bf16_master_weights_and_grads": True}


# -- cases -----------------------------------------------------------------------------------------------------------


def cases_of(row: Row, s: Settings) -> list[Case]:
    """The row's figure with all that predicts it; two where it says of one micro-batch that it runs and of the next that it
    does not.

    Raises:
        LeftOut: the source does not say what a prediction needs.
        Unreadable: a cell that nobody could read.
    """
    for value, what in ((s.gpus, "number of GPUs"), (s.length, "sequence length"), (s.micro_batch, "micro-batch")):
        if value is None:
            raise LeftOut(s.open_batch if what == "micro-batch" and s.open_batch else f"{what} not stated")
    if s.stage is None:
        raise LeftOut("ZeRO stage not stated")
    if s.length and not s.length.full and not s.lengths:
        if s.quantity == "step":
            raise LeftOut("speed over rows of unknown length")
        if s.quantity == "decision":
            raise LeftOut("fits or not with rows of unknown length")
    hardware = _hardware(row, s)
    job = _job(s, hardware)
    candidate = _candidate(s)
    assert s.gpus
    assert s.length
    assert s.model

    def case(candidate: Candidate, value: float) -> Case:
        return Case(row, job, hardware, candidate, s.loss, s.quantity, value, tuple(s.doubts), s.keeps_inputs)

    if s.quantity == "decision":
        if s.largest is None and s.ran is None:
            raise Unreadable("value", f"{row['value']!r} says neither that it ran nor that it did not")
        if s.largest is None:
            return [case(candidate, float(bool(s.ran)))]
        fails = case(candidate.but(**{MICRO_BATCH: s.tried or s.largest + 1}), 0.0)
        return [case(candidate, 1.0), fails] if s.largest else [fails]
    assert s.micro_batch
    if s.quantity == "step":
        samples = s.micro_batch * (s.accumulation or 1) * job.data_ranks
        tokens = samples * job.tokens_per_sample * job.samples_per_row
        seconds = step_seconds(row, samples=samples, tokens=tokens, gpus=s.gpus, rate_is=s.rate_is)
        return [case(candidate, seconds)]
    return [case(candidate, memory_bytes(row, s.gpus, hardware.memory_bytes, s.gigabyte))]


def _hardware(row: Row, s: Settings) -> Hardware:
    facts, gib = gpu_of(row)
    if facts is None and s.quantity == "step":
        raise LeftOut("GPU not stated")
    if gib is None and s.quantity == "decision":
        raise LeftOut("the GPU's memory is not stated")
    rates = facts or gpu_table()["a100-80gb"]  # memory hardly depends on which card it is
    assert s.gpus
    nodes = s.nodes or max(1, -(-s.gpus // GPUS_A_NODE))
    known = {f.name for f in dataclasses.fields(Hardware)}
    extra: dict[str, Any] = {"nodes": nodes} if "nodes" in known and s.gpus % nodes == 0 else {}
    return Hardware(
        device="cuda",
        name=row["gpu"] or "unknown",
        count=s.gpus,
        memory_bytes=int((gib or rates.memory_gib) * GIB),
        memory_cap_bytes=None,
        host_memory_bytes=HOST_BYTES,
        facts=rates.name,
        headroom=0.0,
        bf16=rates.bf16,
        **extra,
    )


def _job(s: Settings, hardware: Hardware) -> Job:
    assert s.gpus
    assert s.length
    assert s.model
    precision = s.precision or ("bf16" if hardware.bf16 else "fp16")
    config = {**s.config, **({SEQUENCE_RANKS: s.sequence_ranks} if s.sequence_ranks > 1 else {})}
    masters = s.masters if s.masters is not None else s.deepspeed
    if precision != "fp32" and not masters and not s.deepspeed:
        config[precision] = {"enabled": False}
    optimizer = s.optimizer or "adamw"
    if optimizer not in ("adamw", "adam", "fused_adam", "lion", "sgd", "adagrad"):
        config["optimizer"], optimizer = {"type": optimizer}, "adamw"
    lora = dataclasses.replace(s.lora, targets=targets_in(s.model, s.lora.targets)) if s.lora else None
    attention = s.attention
    if s.model.config["model_type"] in ("bloom", "gemma2") or (
        attention == "flash_attention_2" and precision == "fp32"
    ):
        attention = None  # what has no such kernel runs transformers' own choice
    return Job(
        s.model,
        s.gpus,
        s.length.longest,
        precision,
        optimizer,
        base_config=config,
        lora=lora,
        attention=attention,
        compiled=s.compiled,
        liger=s.liger,
        task=s.task,
        lengths=s.lengths or _varied(s.length),
        packed=s.packed and bool(s.lengths),
        torch_alone=not s.deepspeed and not s.own_engine,
    )


def _varied(length: Length) -> tuple[tuple[int, int], ...]:
    """Rows that are not all full, of which only the longest is known. No speed is judged: it counts only that they differ."""
    return () if length.full or length.longest < 2 else ((length.longest // 2, 1), (length.longest, 1))


def _candidate(s: Settings) -> Candidate:
    assert s.micro_batch is not None
    assert s.stage is not None
    assert s.model
    knobs: dict[str, Any] = {
        "zero_stage": s.stage,
        MICRO_BATCH: s.micro_batch or 1,
        ACCUMULATION: s.accumulation or 1,
        CHECKPOINTING: bool(s.checkpointing),
    }
    if s.stage:
        hidden = hidden_size(s.model)
        knobs |= {"reduce_bucket_size": hidden**2, "overlap_comm": True, "contiguous_gradients": True}
        knobs["offload_optimizer"] = s.offload_optimizer
        if s.stage == 3:
            knobs["offload_param"] = s.offload_param
            knobs["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden**2)
            knobs |= {} if s.deepspeed else fsdp_settings(s.model.config, parameters_of(s.model))
    knobs |= s.zero
    return Candidate.of(knobs)


__all__ = ["Case", "Settings", "Unreadable", "cases_of", "hidden_size", "settings_of", "targets_in"]
