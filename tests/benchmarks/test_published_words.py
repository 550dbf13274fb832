"""Tables that nobody has seen: what their words, numbers, GPUs and adapters mean, and that no word is silently a default."""

import csv
import json
from pathlib import Path

import pytest

from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.gpu_specs import gpu_table
from benchmarks.predict.published import published
from benchmarks.predict.published.gpus import cards_in, gpu_of
from benchmarks.predict.published.lora import lora_of, targets_in
from benchmarks.predict.published.models import known_models
from benchmarks.predict.published.number_formats import billions, count, length_of, printed
from benchmarks.predict.published.precision import precision_of
from benchmarks.predict.published.rows import COLUMNS, Row
from benchmarks.predict.published.scores import Scored, spearman
from benchmarks.predict.published.sources import read, source_of
from benchmarks.predict.published.words import LeftOut, Unreadable, cell_of, states, vocabulary
from tests.benchmarks.test_published import PLAIN, only, row, run, table

COLUMNS_OF_WORDS = tuple(vocabulary()["columns"])

# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", [*COLUMNS_OF_WORDS, "lora", "gpu"])
@pytest.mark.parametrize("word", ["frobnicate", "Adamish-2", "yes-frobnicate", "zorg3"])
def test_a_word_that_nobody_knows_leaves_the_row_out_and_is_named(column: str, word: str) -> None:
    with pytest.raises(LeftOut) as caught:
        read(row(**{column: word}))
    assert f"column {column}" in str(caught.value)
    assert any(part in str(caught.value).lower() for part in (word.lower(), word.lower().split("-")[-1]))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("optimizer", "Adam-mini"),
        ("optimizer", "Sophia"),
        ("optimizer", "Shampoo"),
        ("optimizer", "1-bit Adam"),
        ("optimizer", "SGD 8bit"),
        ("optimizer", "AdamW + Lion"),
        ("precision", "posit16"),
        ("precision", "mixed precision"),
        ("precision", "bf16/fp32"),
        ("checkpointing", "perhaps"),
        ("checkpointing", "50%"),
        ("checkpointing", "yes/no"),
        ("checkpointing", "use_reentrant=False"),
        ("checkpointing", "every 2 layers"),
        ("attention", "flash/sdpa"),
        ("offload_optimizer", "80 % to cpu"),
        ("attention", "ring"),
        ("attention", "sage attention"),
        ("parallel", "gemini"),
        ("parallel", "zero4"),
        ("parallel", "zero3 tp2"),
        ("parallel", "device_map=auto"),
        ("lora", "OFT r=8"),
        ("lora", "full LoRA"),
        ("lora", "r=8 targets=experts"),
        ("lora", "partial, last 4 layers unlocked"),
    ],
)
def test_what_is_like_something_known_is_no_default(column: str, text: str) -> None:
    with pytest.raises(LeftOut):
        read(row(**{column: text, **({"n_gpus": "4"} if column == "parallel" else {})}))


@pytest.mark.parametrize("column", COLUMNS_OF_WORDS)
@pytest.mark.parametrize("text", ["", "unknown", "n/a", "not stated", "-", "unknown (AdamW, on, cpu presumed)"])
def test_an_empty_cell_is_the_default_that_the_vocabulary_names(column: str, text: str) -> None:
    assert cell_of(column, text).unknown
    assert vocabulary()["columns"][column]["empty"]
    assert read(row(**{column: text}))


def test_the_word_is_named_as_it_is_written() -> None:
    with pytest.raises(LeftOut, match="column optimizer: nobody knows 'Sophia-G'"):
        read(row(optimizer="Sophia-G (bf16)"))


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("no gradient checkpointing", False),
        ("without checkpointing", False),
        ("w/o activation checkpointing", False),
        ("checkpointing disabled", False),
        ("gradient_checkpointing=False", False),
        ("gradient checkpointing: off", False),
        ("no", False),
        ("none", False),
        ("Disabled", False),
        ("0", False),
        ("yes", True),
        ("gradient checkpointing", True),
        ("activation-checkpointing on", True),
        ("full recompute", True),
        ("Enabled (no offload)", True),
        ("yes (not selective)", True),
        ("gradient_checkpointing=True", True),
        ("yes, use_reentrant=False", True),
        ("enabled, no cpu offload", True),
        ("not used", False),
    ],
)
def test_checkpointing_as_people_write_it(text: str, on: bool) -> None:
    assert only(checkpointing=text).candidate.checkpointing is on


@pytest.mark.parametrize(
    ("cells", "states_at", "parameters_at"),
    [
        ({"parallel": "zero3 without offload"}, "none", "none"),
        ({"parallel": "zero3, no offload", "offload_optimizer": "", "offload_param": ""}, "none", "none"),
        ({"parallel": "zero3_offload", "offload_optimizer": "", "offload_param": ""}, "cpu", "cpu"),
        ({"parallel": "DeepSpeed ZeRO-2 + CPU offload", "offload_optimizer": "", "offload_param": ""}, "cpu", "none"),
        ({"parallel": "zero3 optimizer offload", "offload_optimizer": "", "offload_param": ""}, "cpu", "none"),
        ({"parallel": "ZeRO 3 (offload)", "offload_optimizer": "", "offload_param": ""}, "cpu", "cpu"),
        ({"parallel": "zero3 (no offload)", "offload_optimizer": "", "offload_param": ""}, "none", "none"),
        ({"parallel": "zero3 offload optimizer+params", "offload_optimizer": "", "offload_param": ""}, "cpu", "cpu"),
        ({"parallel": "zero3", "offload_optimizer": "Host RAM", "offload_param": "NVMe"}, "cpu", "nvme"),
        ({"parallel": "zero3", "offload_optimizer": "no offload", "offload_param": "disabled"}, "none", "none"),
        ({"parallel": "zero3", "offload_optimizer": "cpu (pinned)", "offload_param": "False"}, "cpu", "none"),
    ],
)
def test_offloading(cells: dict[str, str], states_at: str, parameters_at: str) -> None:
    candidate = only(n_gpus="4", **cells).candidate
    assert (candidate.offload_optimizer, candidate.offload_param) == (states_at, parameters_at)


def test_columns_that_contradict_each_other_are_left_out() -> None:
    with pytest.raises(LeftOut, match="contradict"):
        read(row(n_gpus="4", parallel="fsdp full_shard + offload"))


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("ds_z3", 3),
        ("ZeRO stage 2", 2),
        ("deepspeed_stage_1", 1),
        ("FSDP2", 3),
        ("FULL_SHARD", 3),
        ("fsdp shard_grad_op", 2),
        ("fsdp no_shard", 0),
        ("DistributedDataParallel", 0),
        ("dp8 tp1 pp1", 0),
        ("8 GPUs, ZeRO-3", 3),
        ("torchrun DDP (NCCL)", 0),
        ("FSDP (SHARD_GRAD_OP)", 2),
    ],
)
def test_stages_as_people_write_them(text: str, stage: int) -> None:
    assert only(parallel=text, n_gpus="8").candidate.stage == stage


@pytest.mark.parametrize(
    ("text", "phrase", "stated"),
    [
        ("liger kernel, fa2", "liger", True),
        ("without liger", "liger", False),
        ("no liger kernel", "liger", False),
        ("liger disabled", "liger", False),
        ("not packed; liger kernel", "liger", True),
        ("torch.compile off", "torch.compile", False),
        ("no offload, torch.compile", "torch.compile", True),
        ("without torch.compile; later rows with torch.compile", "torch.compile", True),
        ("activation offloading = false", "activation offloading", False),
    ],
)
def test_notes_that_deny(text: str, phrase: str, stated: bool) -> None:
    assert states(text, phrase) is stated


def test_a_denied_note_changes_nothing() -> None:
    plain, denied = only(), only(notes="no liger, without torch.compile, no activation offloading, not suspicious")
    assert (plain.job, plain.candidate, plain.loss) == (denied.job, denied.candidate, denied.loss)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flash_attention_2", "flash_attention_2"),
        ("FlashAttention-2", "flash_attention_2"),
        ("fa2", "flash_attention_2"),
        ("FA3", "flash_attention_3"),
        ("xformers memory efficient", "sdpa"),
        ("torch sdpa", "sdpa"),
        ("vanilla", "eager"),
        ("flex_attention", "flex_attention"),
    ],
)
def test_attentions(text: str, name: str) -> None:
    assert only(attention=text).job.attention == name


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("adamw_torch_fused", "AdamW"),
        ("adamw_bnb_8bit", "adamw8bit"),
        ("PagedAdamW8bit", "pagedadamw8bit"),
        ("paged_adamw_32bit", "pagedadamw"),
        ("Lion (bf16)", "lion"),
        ("bnb Lion 8-bit", "lion8bit"),
        ("SGD", "sgd"),
        ("adafactor", "adafactor"),
    ],
)
def test_optimizers_as_people_write_them(text: str, kind: str) -> None:
    job = only(optimizer=text).job
    assert (job.base_config.get("optimizer") or {}).get("type", job.optimizer) == kind


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "job_precision", "autocast", "plain"),
    [
        ("16-mixed", "fp32", "float16", False),
        ("bf16-mixed", "fp32", "bfloat16", False),
        ("amp", "fp32", "float16", False),
        ("amp bf16", "fp32", "bfloat16", False),
        ("autocast (bf16)", "fp32", "bfloat16", False),
        ("fp16", "fp32", "float16", False),
        ("fp32", "fp32", None, False),
        ("32-true", "fp32", None, False),
        ("tf32", "fp32", None, False),
        ("bf16 compute, fp32 params", "fp32", "bfloat16", False),
        ("bf16, tf32 enabled", "bf16", None, True),
        ("bf16-true", "bf16", None, True),
        ("16-true", "fp16", None, True),
        ("pure_bf16", "bf16", None, True),
        ("full bf16", "bf16", None, True),
        ("bfloat16", "bf16", None, True),
        ("apex O2 fp16", "fp16", None, False),
        ("no mixed precision", "fp32", None, False),
    ],
)
def test_weights_and_arithmetic(text: str, job_precision: str, autocast: str | None, plain: bool) -> None:
    job = only(precision=text).job
    assert (job.precision, job.autocast, job.plain) == (job_precision, autocast, plain)


def test_fp16_adapters_are_on_a_16_bit_base() -> None:
    job = only(precision="fp16", lora="r=16").job
    assert (job.precision, job.plain, job.element_bytes, job.trained_bytes) == ("fp16", True, 2.0, 4.0)
    assert only(precision="16-mixed", lora="r=16").job.element_bytes == 4.0, "autocast on weights of 32 bits"
    sharded = only(precision="fp16", lora="r=16", parallel="fsdp", n_gpus="4").job
    assert (sharded.plain, sharded.trained_bytes) == (True, 4.0)
    assert only(precision="fp16", lora="r=16", parallel="zero2", n_gpus="4").job.element_bytes == 2.0


def test_the_speed_of_tf32_is_not_predicted() -> None:
    with pytest.raises(LeftOut, match="TF32"):
        read(row(precision="tf32", figure_kind="step_s", unit="s"))
    assert precision_of(row(precision="tf32")).kind == "fp32"


# -- adapters --------------------------------------------------------------------------------------------------------

LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("text", "rank", "targets"),
    [
        ("r=16 targets=all", 16, ("all-linear",)),
        ("r=16 targets=all-linear", 16, ("all-linear",)),
        ("LoRA rank 32, all linear layers", 32, ("all-linear",)),
        ("r=8 targets=qkv", 8, LLAMA[:3]),
        ("r=8 targets=qkvo", 8, LLAMA[:4]),
        ("r=8 targets=attention", 8, LLAMA[:4]),
        ("r=16, attention projections", 16, LLAMA[:4]),
        ("r=8 targets=attn+mlp", 8, LLAMA),
        ("r=8 targets=mlp", 8, LLAMA[4:]),
        ("r=8 target_modules=['q_proj', 'v_proj']", 8, ("q_proj", "v_proj")),
        ("r=8 targets=[q_proj,k_proj]", 8, ("q_proj", "k_proj")),
        ("r=8; alpha=16; targets=wq;wv", 8, ("q_proj", "v_proj")),
        ("lora r=8 on q and v", 8, ("q_proj", "v_proj")),
        ("r=8 targets=self_attn.q_proj,mlp.down_proj", 8, ("q_proj", "down_proj")),
        ("LoRA", 8, ("q_proj", "v_proj")),
        ("yes", 8, ("q_proj", "v_proj")),
        ("lora (q,k,v,o of llm; rank unknown)", 8, LLAMA[:4]),
        ("lora-64", 64, ("q_proj", "v_proj")),
        ("LoRA (r=32, alpha=64)", 32, ("q_proj", "v_proj")),
        ("LoRA r=16 α=32", 16, ("q_proj", "v_proj")),
        ("LoRA(16)", 16, ("q_proj", "v_proj")),
        ("16", 16, ("q_proj", "v_proj")),
        ("LoRA, all", 8, ("all-linear",)),
        ("peft lora rank 128 all modules", 128, ("all-linear",)),
        ("r=16 (no dora, not quantized)", 16, ("q_proj", "v_proj")),
        ("rank=64 alpha=128 dropout=0.05", 64, ("q_proj", "v_proj")),
    ],
)
def test_adapters(text: str, rank: int, targets: tuple[str, ...]) -> None:
    lora = only(lora=text).job.lora
    assert lora is not None
    assert (lora.rank, lora.targets) == (rank, targets)
    assert lora.dropout == (0.05 if "dropout" in text else 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "no",
        "full fine-tuning",
        "no LoRA",
        "FFT",
        "",
        "unknown",
        "full-parameter",
        "all parameters",
        "LoRA: off",
    ],
)
def test_no_adapters(text: str) -> None:
    assert lora_of(row(lora=text)) is None


@pytest.mark.parametrize(
    ("model", "names", "found"),
    [
        ("t5-3b", ("q", "v"), ("q", "v")),
        ("t5-3b", ("attention",), ("q", "k", "v", "o")),
        ("bert-large-uncased", ("qkv",), ("query", "key", "value")),
        ("distilbert-base-uncased", ("q", "v"), ("q_lin", "v_lin")),
        ("pythia-1b", ("attention",), ("query_key_value", "dense")),
        ("phi-3-mini", ("qkv",), ("qkv_proj",)),
        ("bart-large", ("mlp",), ("fc1", "fc2")),
        ("llama-2-7b", ("w1", "w2", "w3"), ("up_proj", "down_proj")),
        ("llama-2-7b", ("all", "q"), ("all-linear",)),
    ],
)
def test_targets_of_other_architectures(model: str, names: tuple[str, ...], found: tuple[str, ...]) -> None:
    of = {spec.name: spec for spec in known_models().values()}
    assert targets_in(of[model], names) == found


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2,048", 2048, ""),
        ("12,5", 12.5, ""),
        ("1.5k", 1500, ""),
        ("1.8k tokens/s", 1800, "tokens/s"),
        ("80 GB", 80, "gb"),
        ("≈ 51", 51, ""),
        ("~51", 51, ""),
        ("about 12.5 GiB", 12.5, "gib"),
        ("72-80", 76, ""),
        ("72–80 GB", 76, "gb"),
        ("10 to 12", 11, ""),
        ("1-2k", 1500, ""),
        ("21.3 ± 0.2", 21.3, ""),
        ("12.6+10.9", 12.6, ""),
        ("1_024", 1024, ""),
        ("1.2e3", 1200, ""),
    ],
)
def test_printed_figures(text: str, value: float, unit: str) -> None:
    found = printed(text)
    assert (found.value, found.unit) == (pytest.approx(value), unit)


@pytest.mark.parametrize(
    "text", ["<24", ">= 40 GB", "up to 30", "at least 12", "12, 14", "12 / 14", "1:18:44", "80-72"]
)
def test_bounds_and_several_figures_are_left_out(text: str) -> None:
    with pytest.raises(LeftOut, match="column value"):
        printed(text)


@pytest.mark.parametrize("text", ["much", "-3", "0", "—"])
def test_no_number_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable, match="column value"):
        printed(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8", 8),
        ("8 GPUs", 8),
        ("8xA100-80GB", 8),
        ("2x8", 16),
        ("2 nodes × 8", 16),
        ("1,024", 1024),
        ("eight", 8),
        ("~8", 8),
    ],
)
def test_counts(text: str, found: int) -> None:
    assert count(text, "n_gpus") == found


@pytest.mark.parametrize("text", ["4-8", "4 or 8", "2 nodes", "1, 2, 4"])
def test_several_counts_are_left_out(text: str) -> None:
    with pytest.raises(LeftOut, match="column n_gpus"):
        count(text, "n_gpus")


@pytest.mark.parametrize(
    ("text", "found"), [("7", 7), ("7B", 7), ("350M", 0.35), ("6.74 billion", 6.74), ("6738415616", 6.738), ("6-8", 7)]
)
def test_sizes(text: str, found: float) -> None:
    assert billions(text) == pytest.approx(found, rel=0.001)


@pytest.mark.parametrize(
    ("text", "longest", "full"),
    [
        ("2,048", 2048, True),
        ("4k", 4096, True),
        ("1.5k", 1536, True),
        ("128-512", 512, False),
        ("2048 tokens", 2048, True),
        ("max_length 1,024", 1024, False),
        ("≤ 4096", 4096, False),
    ],
)
def test_more_lengths(text: str, longest: int, full: bool) -> None:
    found = length_of(text)
    assert found is not None
    assert (found.longest, found.full) == (longest, full)


def test_an_average_is_no_length_and_several_are_none() -> None:
    assert length_of("avg 300") is None
    with pytest.raises(LeftOut, match="seq_len"):
        length_of("512, 1024")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("512 source + 512 target", 512), ("1024 in + 1024 out", 1024), ("512", 512), ("src 512, tgt 512", 512)],
)
def test_both_sides_of_an_encoder_decoder_are_as_long(text: str, tokens: int) -> None:
    assert only(model="t5-3b", seq_len=text).job.seq_len == tokens


def test_sides_of_different_lengths_are_left_out() -> None:
    for text in ("512 source + 128 target", "<=256 + short target"):
        with pytest.raises(LeftOut, match="different lengths"):
            read(row(model="t5-3b", seq_len=text))
    with pytest.raises(LeftOut, match="source's or also the target's"):
        read(row(model="t5-3b", seq_len="512", figure_kind="tokens_per_s_total", value="100", unit="tokens/s"))
    step = only(model="t5-3b", seq_len="512 + 512", figure_kind="tokens_per_s_total", value="1024", unit="tokens/s")
    assert step.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"figure_kind": "throughput", "value": "2,048", "unit": "tok/s"}, 1.0),
        ({"figure_kind": "throughput", "value": "1.024k", "unit": "tokens per second per GPU"}, 2.0),
        ({"figure_kind": "throughput", "value": "0.5", "unit": "samples/sec"}, 2.0),
        ({"figure_kind": "step_time", "value": "1500", "unit": "ms/iter"}, 1.5),
        ({"figure_kind": "step_time", "value": "1.5 s", "unit": ""}, 1.5),
        ({"figure_kind": "throughput", "value": "0.5", "unit": "it/s"}, 2.0),
        ({"figure_kind": "it/s", "value": "2", "unit": "it/s"}, 0.5),
        ({"figure_kind": "tgs", "value": "1024", "unit": "TGS"}, 2.0),
    ],
)
def test_speeds_as_people_write_them(cells: dict[str, str], seconds: float) -> None:
    assert only(**cells).value == pytest.approx(seconds)


def test_a_value_in_another_unit_than_its_column_is_named() -> None:
    assert only(value="44,544 MiB", unit="").value == 43.5 * 2**30
    assert only(figure_kind="peak memory (MiB)", value="44544", unit="").value == 43.5 * 2**30
    with pytest.raises(LeftOut, match="no figure"):
        read(row(value=""))
    with pytest.raises(Unreadable, match="column value"):
        read(row(value="43.5 GB", unit="MiB"))


# -- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "ran"),
    [
        ({"figure_kind": "fits", "value": "yes"}, 1.0),
        ({"figure_kind": "fits", "value": "does not fit"}, 0.0),
        ({"figure_kind": "fits", "value": "no"}, 0.0),
        ({"figure_kind": "fits", "value": "CUDA out of memory"}, 0.0),
        ({"figure_kind": "fits", "value": "no OOM"}, 1.0),
        ({"figure_kind": "oom", "value": "yes"}, 0.0),
        ({"figure_kind": "oom", "value": "False"}, 1.0),
        ({"figure_kind": "oom", "value": ""}, 0.0),
        ({"figure_kind": "OOM", "value": "OOM"}, 0.0),
        ({"figure_kind": "runs", "value": "✓"}, 1.0),
        ({"figure_kind": "peak_alloc", "value": "OOM"}, 0.0),
        ({"figure_kind": "tokens_per_s_total", "value": "OOM", "unit": "tokens/s"}, 0.0),
    ],
)
def test_what_ran(cells: dict[str, str], ran: float) -> None:
    case = only(**{"unit": "", **cells})
    assert (case.quantity, case.value) == ("decision", ran)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"figure_kind": "fits", "value": "perhaps"}, "column value"),
        ({"figure_kind": "oom", "value": "CPU OOM"}, "host memory"),
        ({"figure_kind": "speedup", "value": "2x", "unit": "x"}, "another run"),
        ({"figure_kind": "faster", "value": "yes", "unit": ""}, "another run"),
        ({"figure_kind": "mfu", "value": "45", "unit": "%"}, "utilisation"),
    ],
)
def test_statements_that_are_compared_with_nothing(cells: dict[str, str], why: str) -> None:
    with pytest.raises(LeftOut, match=why):
        read(row(**cells))


@pytest.mark.parametrize(
    ("cells", "largest"),
    [
        ({"micro_batch": "", "value": "12", "unit": "samples/GPU"}, 12),
        ({"micro_batch": "", "value": "64", "unit": "samples (global)", "n_gpus": "8", "parallel": "ddp"}, 8),
        ({"micro_batch": "", "value": "64", "unit": "samples total", "n_gpus": "8", "parallel": "ddp"}, 8),
        ({"micro_batch": "", "value": "8,192", "unit": "tokens"}, 4),
        ({"micro_batch": "6", "value": "fits", "unit": ""}, 6),
    ],
)
def test_the_largest_micro_batch_is_in_its_unit(cells: dict[str, str], largest: int) -> None:
    ran, failed = read(row(figure_kind="max_micro_batch", **cells))
    assert (ran.candidate.micro_batch, ran.value) == (largest, 1.0)
    assert (failed.candidate.micro_batch, failed.value) == (largest + 1, 0.0)


def test_a_largest_micro_batch_of_nothing_and_of_another_unit() -> None:
    failed = only(figure_kind="max_micro_batch", micro_batch="", value="0", unit="")
    assert (failed.candidate.micro_batch, failed.value) == (1, 0.0)
    with pytest.raises(Unreadable, match="column unit"):
        read(row(figure_kind="max_micro_batch", micro_batch="", value="12", unit="GiB"))
    for kind in ("max_micro_batch", "max micro batch", "Max-batch size"):
        assert len(read(row(figure_kind=kind, micro_batch="", value="3", unit=""))) == 2
    with pytest.raises(LeftOut, match="contradicts"):
        read(row(figure_kind="max_micro_batch", micro_batch="4", value="12", unit="samples/GPU"))


# -- GPUs and sources ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gib", "name"),
    [
        ("RTX A4000", "16", "rtxa4000"),
        ("A4000", "", "rtxa4000"),
        ("NVIDIA A40", "48", "a40"),
        ("A10", "24", "a10"),
        ("AWS A10G 24GB", "", "a10g"),
        ("4xRTX 4090", "", "rtx4090"),
        ("A100 (40GB)", "", "a100-40gb"),
        ("L4", "24", "l4"),
        ("L40", "48", "l40"),
        ("2x L40S", "48", "l40s"),
        ("RTX 4070 Ti SUPER", "16", "rtx4070tisuper"),
        ("GeForce RTX 4070Ti", "12", "rtx4070ti"),
        ("RTX 4060 Ti 16GB", "", "rtx4060ti-16gb"),
        ("RTX 4060 Ti", "8", "rtx4060ti"),
        ("3070", "8", "rtx3070"),
        ("RTX3090Ti", "24", "rtx3090ti"),
        ("RTX A4500", "20", "rtxa4500"),
        ("RTX 6000 Ada Generation", "48", "rtx6000-ada"),
        ("Quadro RTX 6000", "24", "quadro-rtx6000"),
        ("GH200 (96GB HBM3)", "96", "gh200"),
        ("V100 16GB", "", "v100-16gb"),
        ("V100-32GB", "32", "v100-32gb"),
        ("A100 PCIe 40GB", "", "a100-40gb"),
        ("H100 PCIe 80GB", "80", "h100-pcie"),
        ("NVIDIA B200 180GB HBM3e", "180", "b200"),
        ("Tesla P100", "16", "p100"),
        ("Tesla T4", "15", "t4"),
    ],
)
def test_gpus_are_whole_words(text: str, gib: str, name: str) -> None:
    facts, _ = gpu_of(row(gpu=text, gpu_mem_gib=gib))
    assert facts is not None
    assert facts.name == name


@pytest.mark.parametrize(
    "text",
    ["AMD MI300X", "MI250X", "TPU v4", "Gaudi2", "RTX 9999", "A16", "A1000", "RTX 4090 Laptop", "H100 MIG", "A100/T4"],
)
def test_other_chips_are_left_out(text: str) -> None:
    with pytest.raises(LeftOut, match="column gpu"):
        gpu_of(row(gpu=text, gpu_mem_gib=""))


def test_every_card_of_the_table_has_a_name_here() -> None:
    words = vocabulary()["gpu"]
    named = {*words["cards"].values(), *(one for others in words["variants"].values() for one in others)}
    assert named == set(gpu_table())
    assert cards_in("NVIDIA GPU 80GB") == ([], 80.0)


@pytest.mark.parametrize(
    ("where", "trust"),
    [
        ("github:deepspeedai/DeepSpeed", "C"),
        ("https://github.com/microsoft/DeepSpeed/issues/1", "C"),
        ("https://github.com/deepspeedai/DeepSpeed/issues/4527", "B"),
        ("github:someone/DeepSpeed-notes", "B"),
        ("github:someone/measured-with-DeepSpeed", "B"),
        ("paper: tuning DeepSpeed ZeRO on A100", "B"),
        ("github:deepspeedai/DeepSpeedExamples", "B"),
        ("github:someone/xlm-roberta-memory", "B"),
    ],
)
def test_trust_is_a_source_s_not_a_word_s(where: str, trust: str) -> None:
    assert source_of(row(source_repo_or_url=where)).trust == trust


# -- no row ends the run ---------------------------------------------------------------------------------------------


@pytest.fixture
def closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is traced: estimates by shape stand in."""
    monkeypatch.setattr("benchmarks.predict.published.scores.trace_jobs", lambda jobs, on_traced=None: None)
    monkeypatch.setattr(
        "benchmarks.predict.published.scores.trace_job", lambda job, **_: closed_form_trace(job, "a test")
    )


def test_equal_figures_have_no_correlation_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_form: None
) -> None:
    assert spearman([Scored(only(value="10"), 10.0, 0.0, 20.0)] * 9) is None
    path = table(tmp_path / "own.csv", *({**PLAIN, "id": str(at)} for at in range(9)))
    assert run(monkeypatch, "--csv", str(path), "--json", str(tmp_path / "out.json")) == 0
    assert published.EQUAL in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["uncalibrated"][0]["rho"] == published.EQUAL


ODD = [
    {"model": "bart-large", "parallel": "fsdp", "n_gpus": "4", "params_b": "0.4"},
    {"params_b": "seven"},
    {"params_b": "7B"},
    {"optimizer": "frobnicate"},
    {"n_gpus": "4-8"},
    {"gpu": "MI300X"},
    {"n_gpus": "3", "parallel": "zero3 (2 nodes)"},
    {"model": "t5-3b", "seq_len": "512 source + 128 target"},
    {"value": "< 24"},
    {"seq_len": "99999999999999"},
    {"micro_batch": "9999999999"},
    {"lora": "r=0"},
    {"lora": "r=16 targets=[[["},
]


def test_no_row_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_form: None
) -> None:
    path = table(tmp_path / "own.csv", PLAIN, *({**PLAIN, "id": str(at), **cells} for at, cells in enumerate(ODD)))
    assert run(monkeypatch, "--csv", str(path), "--json", str(tmp_path / "out.json")) in (0, 2)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    result = json.loads((tmp_path / "out.json").read_text())
    read_rows = sum(line["rows"] for line in result["uncalibrated"] if line["source"] != "all")
    assert read_rows + sum(one["rows"] for one in result["left_out"]) + err.count("error:") == 1 + len(ODD)
    assert any("optimizer" in one["why"] and "frobnicate" in one["why"] for one in result["left_out"])


def test_a_fault_of_a_reader_is_one_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(one: Row) -> list[published.Case]:
        if one.id == "2":
            raise StopIteration("nothing left")
        return read(one)

    monkeypatch.setattr(published, "read", broken)
    cases, left, unreadable = published.cases_in([row(), row(id="2"), row(id="3")])
    assert (len(cases), unreadable) == (2, [])
    assert ["StopIteration" in why for _, why in left] == [True]


def test_tables_of_the_folder_are_read_and_a_broken_one_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed_form: None
) -> None:
    good, bad = table(tmp_path / "a.csv", PLAIN), tmp_path / "b.csv"
    bad.write_text("model,value\nx,1\n")
    assert run(monkeypatch, "--csv", str(good), "--csv", str(bad)) == 2
    out, err = capsys.readouterr()
    assert "has no column" in err
    assert "else" in out
    assert {path.name for path in published.TABLES} == {path.name for path in published.DATA.glob("*.csv")}


def test_a_row_with_too_few_or_too_many_cells_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerow(["1", "github:someone/else"])
        writer.writerow([PLAIN.get(name, "") for name in COLUMNS] + ["more", "still more"])
    rows, wrong = published.tables_in([path])
    assert (len(rows), wrong) == (2, [])
    cases, left, unreadable = published.cases_in(rows)
    assert len(cases) + sum(left.values()) + len(unreadable) == 2
