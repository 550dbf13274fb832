"""A row of a published table as a case: Job, Hardware, Candidate, and the figure that was measured.

`settings_of` makes the best of the columns, for any source. What a column leaves open is filled by the source's own code
(`published_sources.py`), and else by the defaults here, each with its reason:

* Memory columns without a method mean what nvidia-smi shows.
* `single` and `ddp` in bf16 without DeepSpeed train in the weights' own type: torch keeps no master weights.
* FSDP in bf16 keeps 32-bit shards (torch.distributed.fsdp.MixedPrecision casts what it gathers), unless a row says `pure`.
* fp16 without DeepSpeed is autocast: gradients in fp16 cannot be unscaled (torch.amp.GradScaler).
* `fsdp` is stage 3 with a block as the unit (`published_models.as_fsdp`).
* Without DeepSpeed transformers' Trainer runs forward under autocast also of 16-bit weights (`bf16=True`), unless a row says
  `pure`: cross entropy is then taken in 32 bits.
* Logits are made 32-bit or not as the model's code of the figure's year did (`published_models.loss_of`).
* DeepSpeed's configs are those of transformers' examples: buckets `auto`, that is hidden_size^2, with `overlap_comm`.
* Unknown checkpointing is off, unknown accumulation 1: every framework's default. Unknown attention is what transformers
  chose for the architecture at the time (`published_models.eager_then`).
* A LoRA of unknown rank, targets or dropout has peft's defaults (8, query and value, none). Outside DeepSpeed its weights are
  fp32 since peft 0.12 (August 2024, `autocast_adapter_dtype`) and up to 0.5 (2023, tuners/lora.py), else of the model's type.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from published_lora import lora_of, targets_in
from published_models import as_fsdp, eager_then, gpu_of, hidden_size, loss_of, model_of, year_of
from published_rows import (
    LeftOut,
    Length,
    Row,
    Unreadable,
    bare,
    length,
    memory_bytes,
    quantity_of,
    step_seconds,
    whole,
)

from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, LIGER, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware, gpu_table
from autotune.problem.job import Job, Lora
from autotune.problem.models import ModelSpec
from autotune.problem.tasks import ANSWERS, CAUSAL, CLASSIFICATION, MASKED, default_task
from autotune.units import GIB

HOST_BYTES = 4096 * GIB  # sources do not say what main memory a machine has: it never decides
GPUS_A_NODE = 8
FP32_ADAPTERS_SINCE = 2025  # the first whole year with peft 0.12


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
    deepspeed: bool = False
    offload_optimizer: str = "none"
    offload_param: str = "none"
    checkpointing: bool | None = None
    lora: Lora | None = None
    attention: str | None = None
    loss: str = "own"  # one of `trace.LOSSES`
    task: str = CAUSAL
    compiled: bool = False
    rate_is: str | None = None  # total or per_gpu, where the figure's kind leaves it open
    gigabyte: float = GIB  # what the source's GB is in bytes
    tried: int | None = None  # the micro-batch that a `max_micro_batch` row says fails
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

    @property
    def configuration(self) -> tuple[Job, Candidate]:
        return self.job, self.candidate


# -- columns ---------------------------------------------------------------------------------------------------------


def settings_of(row: Row) -> Settings:
    """What the columns of a row of any source say.

    Raises:
        LeftOut: the row is of something that is not predicted.
        Unreadable: a cell that nobody could read.
    """
    s = Settings(quantity_of(row))
    s.model, guessed = model_of(row)
    s.doubts += [f"{s.model.name} stands for {row['model']}"] if guessed else []
    _only_what_is_modelled(row)
    s.gpus = whole(row, "n_gpus")
    s.length = length(row)
    s.packed = "packing" in row["seq_len"]
    s.micro_batch, s.accumulation = whole(row, "micro_batch"), whole(row, "grad_accum")
    if s.micro_batch and s.gpus and re.search("global|total", row["micro_batch"].lower()):
        s.micro_batch = max(1, s.micro_batch // (s.gpus * (s.accumulation or 1)))
    _parallel(row, s)
    _precision(row, s)
    _optimizer(row, s)
    s.offload_optimizer, s.offload_param = _offloaded(row["offload_optimizer"]), _offloaded(row["offload_param"])
    checkpointing = bare(row["checkpointing"])
    if "selective" in checkpointing:
        raise LeftOut("selective checkpointing")
    if not checkpointing.startswith("unknown"):
        s.checkpointing = checkpointing.startswith(("yes", "true", "on", "full"))
    s.lora = lora_of(row)
    if "fp32 adapters" in row["precision"] or year_of(row, s.model) >= FP32_ADAPTERS_SINCE:
        adapters_in_32_bits(s)
    attention = bare(row["attention"])
    for word, name in (("flash", "flash_attention_2"), ("sdpa", "sdpa"), ("eager", "eager")):
        s.attention = s.attention or (name if attention.startswith(word) else None)
    if s.attention is None and eager_then(row, s.model):
        s.attention = "eager"
    plainly = row.says("no liger")
    if row.says("liger", "fused linear", "no full logits") and not plainly:
        s.loss = "chunked"
        if s.quantity == "step" and row.says("liger"):  # its kernels for norms, rotation and gates, too
            s.zero[LIGER] = True
    elif row.says("chunked c", "fused cross", "chunked lm_head") and not plainly:
        s.loss = "fused"
    else:
        s.loss = loss_of(row, s.model, autocast=not s.deepspeed and "pure" not in row["precision"].lower())
    s.task = _task(row, s.model)
    s.compiled = row.says("torch.compile")
    return s


def adapters_in_32_bits(s: Settings) -> None:
    """As peft makes them outside DeepSpeed; under autocast they compute in 16 bits, so steps take no longer."""
    if s.lora and not s.deepspeed and s.precision != "fp32" and s.quantity != "step":
        s.lora = dataclasses.replace(s.lora, fp32=True)


def _offloaded(text: str) -> str:
    return "nvme" if "nvme" in bare(text) else "cpu" if bare(text) in ("cpu", "yes", "true") else "none"


def _only_what_is_modelled(row: Row) -> None:
    """Raises:
    LeftOut: weights are quantised, or what is trained beside them is no LoRA.
    """
    text = " ".join(row[column].lower() for column in ("model", "precision", "lora"))
    if re.search(r"4-?bit|8-?bit|\bnf4|qlora|int4|int8|gptq|awq|\bfp8|float8|mxfp", text):
        raise LeftOut("quantised weights or arithmetic")
    if re.search(r"dora\b|ia3|ia\^3|prefix|prompt|adalora|loha|lokr|vera\b|galore|lisa\b|bitfit", row["lora"].lower()):
        raise LeftOut("adapters other than LoRA")


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
    text = row["parallel"].lower()
    if re.search(r"ulysses|\bsp\d|\btp\d|tensor|pipeline|\bpp\d|megatron|sequence parallel [2-9]", text):
        raise LeftOut("tensor, pipeline or sequence parallel")
    if row.says("ulysses", "sequence parallel 2", "sequence parallel 4", "sequence parallel 8"):
        raise LeftOut("tensor, pipeline or sequence parallel")
    zero = re.search(r"(?:zero|stage)[-_ ]*(?:stage)?[-_ ]*([0-3])(?!\d)", text)
    if "fsdp" in text or "full_shard" in text:
        s.stage = 3
        if "shard_grad_op" in text:
            s.stage = 2
    elif zero:
        s.stage, s.deepspeed = int(zero.group(1)), True
    elif re.match(r"single|none|ddp|dp|data|plain|1 gpu", text):
        s.stage = 0
        s.gpus = 1 if s.gpus is None and text.startswith("single") else s.gpus
    elif s.gpus == 1 and row.unknown("parallel"):
        s.stage = 0
    nodes = re.search(r"(\d+) nodes", text + " " + row["notes"].lower())
    s.nodes = int(nodes.group(1)) if nodes else None


def _precision(row: Row, s: Settings) -> None:
    """Type of the arithmetic, and whether weights are kept in 32 bits: as masters, or as the weights under autocast."""
    text = row["precision"].lower()
    mixed = any(word in text for word in ("mixed", "autocast", "amp", "fp32 weights"))
    if text.startswith(("fp16", "float16", "half")) or "fp16 likely" in text:
        s.precision = "fp16"
    elif text.startswith(("bf16", "bfloat16")) or "bf16" in text.split("(")[0]:
        s.precision = "bf16"
    elif "fp32" in text or "float32" in text or "tf32" in text:
        s.precision = "fp32"
    elif "fp16" in text:
        s.precision = "fp16"
    if s.precision in ("bf16", "fp16") and not s.deepspeed and "fp32 adapters" not in text:
        pure = any(word in text for word in ("pure", "-true", "states")) or row.says("pure bf16", "states are bf16")
        s.masters = not pure and ("fp32 master" in text or s.stage == 3)
        if not pure and not s.masters and (mixed or s.precision == "fp16"):
            s.config["torch_autocast"] = {"enabled": True, "dtype": _TORCH_TYPES[s.precision]}
            s.precision = "fp32"
    if "bf16_master_weights_and_grads" in text:
        s.config["bf16"] = {"bf16_master_weights_and_grads": True}


_TORCH_TYPES = {"fp16": "float16", "bf16": "bfloat16"}

# Names of optimizers -> the Job's, or the type of DeepSpeed's config that no Job names.
_OPTIMIZERS = (
    (r"paged.*8-?bit", "pagedadamw8bit"),
    (r"paged", "pagedadamw"),
    (r"8bit|8-bit", "adamw8bit"),
    (r"adafactor", "adafactor"),
    (r"muon", "muon"),
    (r"lion", "lion"),
    (r"sgd", "sgd"),
    (r"adagrad", "adagrad"),
    (r"adam", "adamw"),
)


def _optimizer(row: Row, s: Settings) -> None:
    text = row["optimizer"].lower()
    # torch's AdamW takes its foreach form on CUDA unless it is told to fuse (torch 2.0 to 2.13); transformers' own AdamW
    # (`adamw_hf`) goes parameter by parameter, as if fused, and its Trainer fuses since version 5
    if "adam" in text and not s.deepspeed:
        fused = any(word in text for word in ("fused", "_hf")) or row.says("transformers 5")
        s.config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, **({"fused": True} if fused else {})}}
    s.optimizer = next((name for pattern, name in _OPTIMIZERS if re.search(pattern, text)), None)
    if row.says("in backward", column="optimizer") or row.says("optimizer in backward", "optimizer_in_bwd on"):
        raise LeftOut("optimizer steps in backward")
    if row.says("activation offloading"):
        raise LeftOut("activations offloaded to the host")


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
            raise LeftOut(f"{what} not stated")
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
    assert s.micro_batch
    assert s.model

    def case(candidate: Candidate, value: float) -> Case:
        return Case(row, job, hardware, candidate, s.loss, s.quantity, value, tuple(s.doubts))

    if s.quantity == "decision":
        ran = not bare(row["figure_kind"]).startswith("oom") and "oom" not in row["value"].lower()
        if not row["figure_kind"].startswith("max_micro_batch"):
            return [case(candidate, float(ran))]
        fails = s.tried or s.micro_batch + 1
        return [case(candidate, 1.0), case(candidate.but(**{MICRO_BATCH: fails}), 0.0)]
    if s.quantity == "step":
        samples = s.micro_batch * (s.accumulation or 1) * s.gpus
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
    extra = {"nodes": nodes} if "nodes" in known and s.gpus % nodes == 0 else {}
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
    config = dict(s.config)
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
        task=s.task,
        lengths=s.lengths or _varied(s.length),
        packed=s.packed and bool(s.lengths),
    )


def _varied(length: Length) -> tuple[tuple[int, int], ...]:
    """Rows that are not all full, of which only the longest is known. No speed is judged: it counts only that they differ."""
    return () if length.full or length.longest < 2 else ((length.longest // 2, 1), (length.longest, 1))


def _candidate(s: Settings) -> Candidate:
    assert s.micro_batch
    assert s.stage is not None
    assert s.model
    knobs: dict[str, Any] = {
        "zero_stage": s.stage,
        MICRO_BATCH: s.micro_batch,
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
            knobs |= {} if s.deepspeed else as_fsdp(s.model)
    knobs |= s.zero
    return Candidate.of(knobs)


__all__ = ["Case", "Settings", "Unreadable", "cases_of", "hidden_size", "settings_of", "targets_in"]
