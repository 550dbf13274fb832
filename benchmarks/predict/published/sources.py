"""What the code and text of each source say beyond the columns: a small reader a source, its assumptions beside it.

A reader changes the settings that the generic reader found, and only where the source gives a reason. Sources without one
are read by the columns alone, as is any table of `--csv`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from benchmarks.predict.published.models import untied
from benchmarks.predict.published.number_formats import Length
from benchmarks.predict.published.readers import Case, Settings, adapters_in_32_bits, cases_of, settings_of
from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import DATA, LeftOut


@dataclass(frozen=True)
class Source:
    """Where figures come from."""

    name: str
    trust: str  # A, B or C, as GPU_PUBLISHED.md has it
    held_out: bool  # never looked at while constants were chosen


@cache
def _sources() -> list[tuple[str, Source]]:
    rows = json.loads((DATA / "sources.json").read_text())["sources"]
    return [
        (row["match"], Source(row.get("name", row["match"]), row["trust"], row.get("held_out", False))) for row in rows
    ]


def source_of(row: Row) -> Source:
    """The row's source; one that is not in `sources.json` counts as B."""
    where = row.source.lower()
    return next(
        (source for match, source in _sources() if re.match(re.escape(match.lower()) + r"(?![\w.-])", where)),
        Source(row.source, "B", False),
    )


def read(row: Row) -> list[Case]:
    """The cases of a row.

    Raises:
        LeftOut: it is not judged; the reason.
        Unreadable: a cell that nobody could read.
    """
    source = source_of(row)
    if source.trust == "C":
        raise LeftOut("trust C")
    if row.says("suspicious", "unreliable"):
        raise LeftOut("suspicious by GPU_PUBLISHED.md")
    settings = settings_of(row)
    if (own := READERS.get(source.name)) is not None:
        own(row, settings)
    return cases_of(row, settings)


# -- readers ---------------------------------------------------------------------------------------------------------


def qwen(row: Row, s: Settings) -> None:
    """QwenLM/Qwen: finetune.py and finetune/*.sh.

    Every row is padded to model_max_length (finetune.py, preprocess). Single-GPU scripts run without DeepSpeed on weights
    in bf16. `s/it` is Trainer's, an optimizer step. LoraArguments: lora_dropout 0.05.
    The page's figures of 7B are of October 2023, before peft 0.6, which left adapters in 32 bits outside DeepSpeed.
    `162.0G` on two cards of 80 GiB is more than they have: a G of this page is less than a GiB. It is 1e9: in any larger unit
    single-GPU LoRA of 1.8B, 7B and 14B has a part beside states and context that grows with the frozen weights, and nothing does.
    LoRA on several machines is finetune_lora_ds.sh, which has micro-batches of 2. The page says that it is as the single-GPU runs
    are, of 1, but its memory grows with the length and its steps take as long as two sequences do.
    """
    if s.stage == 2 and s.lora and "finetune_lora_ds" in row["parallel"]:
        s.micro_batch = 2
    with_dropout(s, 0.05)
    adapters_in_32_bits(s)
    s.gigabyte = 1e9
    s.length = s.length and Length(s.length.longest, True)


def gist(row: Row, s: Settings) -> None:
    """chenyaofo's gist: LLaMA-7B with DeepSpeed 0.14.2, `torch.cuda.max_memory_allocated`.

    Precision is not stated: 14 bytes a parameter go with the optimizer when it is offloaded, as they do in 16 bits.
    GPU_PUBLISHED.md: peaks of ZeRO-2 at micro-batch 1 without offload were read before the first step, and `8/128` is a typo.
    Its peaks have one more 32-bit tensor of logits a row than Trainer's: a loop of its own, which holds the outputs.
    """
    s.loss = "held32"
    if "zero++" in row["parallel"].lower():
        raise LeftOut("ZeRO++")
    if s.stage == 2 and s.micro_batch == 1 and s.offload_optimizer == "none" and s.quantity == "allocated":
        raise LeftOut("suspicious by GPU_PUBLISHED.md")
    if s.micro_batch == 8 and s.accumulation and s.accumulation > 1:
        raise LeftOut("suspicious by GPU_PUBLISHED.md")
    # 7.9 GiB for 4 rows with parameters offloaded, 9.4 for 2 rows with their 1.57 on the device: the same but for these
    if s.micro_batch == 4 and s.offload_param == "cpu" and s.quantity == "allocated":
        raise LeftOut("the source's rows contradict each other")


def llmq(row: Row, s: Settings) -> None:
    """IST-DASLab/llmq, benchmarks/{1,4}x4090: LLaMA-Factory's stage pt on packed rows of 1024, yaml and JSON beside.

    The JSONs set bf16_master_weights_and_grads and offload with pinning; buckets are `auto` at ZeRO-3 and 5e8 at ZeRO-2.
    """
    if s.stage == 2:
        s.zero |= {"reduce_bucket_size": int(5e8), "allgather_bucket_size": int(5e8)}
        s.zero["zero_optimization.round_robin_gradients"] = True
    if row.says("computed by the authors from the second step"):
        raise LeftOut("repeats another row in another unit")


def ml_sys(row: Row, s: Settings) -> None:
    """justin-aj/ml-sys, of November 2025 (its commits): transformers' attention and loss of then. Buckets of 5e8 in every
    config; the engine builds the loader from the config, of micro-batch 4.

    The configs name AdamW, which DeepSpeed makes its FusedAdam of. Memory is printed over 1e9.
    """
    s.micro_batch, s.loss, s.attention = 4, "own", None
    if s.deepspeed:
        s.config["optimizer"] = {"type": "AdamW"}
        s.zero = {"reduce_bucket_size": int(5e8), "allgather_bucket_size": int(5e8)}
        s.zero |= {"overlap_comm": s.stage != 1, "contiguous_gradients": s.stage != 1}
        if s.stage == 3:
            s.zero["zero_optimization.stage3_prefetch_bucket_size"] = int(5e8)


def with_dropout(s: Settings, share: float) -> None:
    if s.lora:
        s.lora = dataclasses.replace(s.lora, dropout=share)


def litgpt(row: Row, s: Settings) -> None:
    """Lightning-AI/litgpt: finetune/lora.py (lora_dropout 0.05); its loss is computed in chunks of the head's output.

    Its GPT (litgpt/model.py) has a head of its own beside the embedding, also for Gemma and Llama 3.2, whose checkpoints are
    converted with a copy of the embedding (scripts/convert_hf_checkpoint.py). Phi's GELU is torch's kernel there, and
    seven operators in transformers (`gelu_new`).
    """
    with_dropout(s, 0.05)
    s.loss = "fused"
    if s.model:
        s.model = untied(s.model)
        if s.model.config["model_type"] == "phi":
            s.model = dataclasses.replace(s.model, config={**s.model.config, "hidden_act": "gelu_pytorch_tanh"})
    if row.says("init/flattening peak") and s.quantity != "step":
        raise LeftOut("peak of loading the model, not of training")


def peft(row: Row, s: Settings) -> None:
    """huggingface/peft: docs/source/accelerate/{deepspeed,fsdp}.md (lora_dropout 0.1, packed to 2048), and
    method_comparison/MetaMathQA (torch 2.13, transformers 5.13: a loss of today's code)."""
    if "Llama-2-70b" in row["model"]:
        with_dropout(s, 0.1)
    if row.says("transformers 5"):
        s.loss = "own"


# Token statistics of ms-swift's benchmark data: mean and standard deviation (docs/source_en/LLM/Benchmark.md).
_SWIFT_MEAN, _SWIFT_DEVIATION, _SWIFT_LEAST = 3234.4, 2547.5, 91


def ms_swift(row: Row, s: Settings) -> None:
    """modelscope/ms-swift, docs/source_en/LLM/Benchmark.md and best practices.

    swift drops what is longer than max_length (`truncation_strategy` "delete", the default of 2024), so the others' lengths
    are those of a lognormal below it, with the statistics that the page prints. Two moments tell little of the mean below a cut
    far to the left: steps at a max_length below the mean are left out. Several GPUs of that page are
    `device_map`'s pipeline. The comments on top of scripts are rounded; one that equals the card says nothing. SftArguments:
    lora_dropout_p 0.05. Baichuan's 13B adds ALiBi to its scores (its modeling_baichuan.py): no flash kernel, whatever is asked.
    """
    with_dropout(s, 0.05)
    if s.model and s.model.name.startswith("baichuan") and s.model.name.endswith("13b"):
        s.attention = "eager"
    if "Benchmark.md" in row["source_path_or_section"]:
        if s.gpus and s.gpus > 1:
            raise LeftOut("tensor or pipeline parallel")
        if s.loss == "shifted16":
            s.loss = "shifted-cast"  # swift's trainer is transformers': autocast, also of weights that are pure bf16
        if s.length and s.quantity == "step" and s.length.longest < _SWIFT_MEAN:
            raise LeftOut("speed over rows of unknown length")
        if s.length:
            s.lengths = lognormal(_SWIFT_MEAN, _SWIFT_DEVIATION, _SWIFT_LEAST, s.length.longest)
            s.length = Length(s.length.longest, False)
    elif row.says("packed") and not row.says("no packing") and s.length:
        s.length = Length(s.length.longest, True)
    if row.says("80 = full card") and s.quantity == "nvml" and row["value"].startswith("80"):
        raise LeftOut("equals the card: a requirement, no peak")
    if row["value"].strip() == "60" and "Qwen3" in row["model"]:
        raise LeftOut("equals the card: a requirement, no peak")


def lognormal(mean: float, deviation: float, least: int, most: int, bins: int = 96) -> tuple[tuple[int, int], ...]:
    """A data set's lengths in tokens as (length, how often): a lognormal cut at both ends, the longest among them."""
    spread = math.log1p((deviation / mean) ** 2)
    centre = math.log(mean) - spread / 2

    def below(tokens: float) -> float:
        return 0.5 * (1 + math.erf((math.log(tokens) - centre) / math.sqrt(2 * spread)))

    edges = [least * (most / least) ** (i / bins) for i in range(bins + 1)]
    pairs = [
        (round(math.sqrt(low * high)), round(1e5 * (below(high) - below(low))))
        for low, high in itertools.pairwise(edges)
    ]
    return (*(pair for pair in pairs if pair[1]), (most, 1))


def torchtune(row: Row, s: Settings) -> None:
    """pytorch/torchtune: recipe tables of the README (A100, 4090) and tutorials.

    Weights, gradients and states are all bf16 (`dtype: bf16` in every recipe named). Tokens a second of a README table are
    of all GPUs: 3497 on each of 8 for a 70B model would be six times an A100's peak. AdamW is torch's, with `fused: True` in the
    recipes of that commit (November 2024; llama3_1/8B_lora_single_device.yaml). The table of techniques adds them up.
    Memory is what its own log has, which knows nothing of the context: active bytes, as the table of techniques of that README
    says, and reserved ones in the README before.
    """
    if s.quantity == "nvml":
        s.quantity = "allocated" if "482734bd5" in row["source_path_or_section"] else "reserved"
    if "482734bd5" in row["source_path_or_section"] and "params" in s.config.get("optimizer", {}):
        s.config["optimizer"]["params"]["fused"] = True
    if row.says("8-bit adamw"):
        raise LeftOut("optimizer steps in backward")  # and its activations are on the host
    if s.loss != "fused":
        s.loss = "shifted32"  # modules/transformer.py: `self.output(h).float()`; the recipe shifts a contiguous copy
    if "cumulative" in row["source_path_or_section"]:
        _techniques_so_far(row, s)
    if s.quantity == "step" and row.says("swapped between readme versions"):
        raise LeftOut("the source's versions contradict each other")
    s.rate_is = "total" if "total_or_per_gpu" in row["figure_kind"] else None
    if row.says("no optimizer_in_bwd"):
        return
    if row.says("optimizer_in_bwd"):
        raise LeftOut("optimizer steps in backward")
    if row.unknown("optimizer"):
        raise LeftOut("optimizer not stated")


# Of the table that adds them up, in its order, as the notes name them.
_TECHNIQUES = ("+ packed", "+ torch.compile", "+ chunked cross entropy", "+ activation checkpointing")


def _techniques_so_far(row: Row, s: Settings) -> None:
    """A row has what those above it have."""
    reached = next((at for at, name in enumerate(_TECHNIQUES) if row.says(name)), -1)
    s.compiled = reached >= _TECHNIQUES.index("+ torch.compile")
    s.loss = "fused" if reached >= _TECHNIQUES.index("+ chunked cross entropy") else "shifted32"


def internevo(row: Row, s: Settings) -> None:
    """InternLM/InternEvo: its own engine; states of 32-bit masters over `zero1` GPUs, whole weights on each. A step takes all
    of a rank's part at once (hybrid_zero_optim.py: one flat 32-bit gradient a group of parameters). Its FSDP
    keeps 32-bit masters beside 16-bit shards (fsdp_optimizer.py, FSDPadaptOptimizer)."""
    s.own_engine = not s.deepspeed
    if "within node" in row["parallel"]:
        raise LeftOut("states sharded within a node only")
    if s.stage == 3:
        s.zero = {"sub_group_size": int(1e12)}


def vectorlm(row: Row, s: Settings) -> None:
    """VectorInstitute/vectorlm: weights are loaded in bf16 and sharded as they are: the same settings fit an 8B model, trained
    whole, on one 80 GB card."""
    s.masters = False


def belle(row: Row, s: Settings) -> None:
    """LianjiaTech/BELLE of May 2023: train/main.py is DeepSpeed-Chat's, with FusedAdam of its own making and the config of
    utils/ds_utils.py (get_train_ds_config): DeepSpeed's own buckets, small windows of stage 3, torch's own linear.
    """
    s.config["optimizer"] = {"type": "AdamW"}
    s.zero = {"reduce_bucket_size": int(5e8), "allgather_bucket_size": int(5e8), "overlap_comm": s.stage == 3}
    if s.stage == 3:
        stage3 = "zero_optimization.stage3_"
        s.zero |= {stage3 + "max_live_parameters": int(3e7), stage3 + "prefetch_bucket_size": int(3e7)}
        s.zero |= {stage3 + "param_persistence_threshold": 10_000, "zero_optimization.memory_efficient_linear": False}


def xtuner(row: Row, s: Settings) -> None:
    """InternLM/xtuner: its sequence parallelism exchanges as Ulysses does (xtuner/parallel/sequence), and DeepSpeed is told of no
    group of it: gradients travel in the model's type."""
    if s.sequence_ranks > 1:
        s.config["seq_parallel_communication_data_type"] = s.precision


def muon_post(row: Row, s: Settings) -> None:
    """deepspeedai/DeepSpeed, blogs/muon-optimizer: finetune_llama.py of delock/deepspeed_finetune_demo, whose configs name the
    optimizer (AdamW is DeepSpeed's FusedAdam) and no buckets. Neither post nor script says how the memory was measured."""
    s.zero = {"reduce_bucket_size": int(5e8), "allgather_bucket_size": int(5e8), "overlap_comm": False}
    if s.optimizer == "adamw":
        s.config["optimizer"] = {"type": "AdamW"}


READERS: dict[str, Callable[[Row, Settings], None]] = {
    "QwenLM/Qwen": qwen,
    "chenyaofo gist": gist,
    "IST-DASLab/llmq": llmq,
    "InternLM/xtuner": xtuner,
    "justin-aj/ml-sys": ml_sys,
    "Lightning-AI/litgpt": litgpt,
    "huggingface/peft": peft,
    "modelscope/ms-swift": ms_swift,
    "pytorch/torchtune": torchtune,
    "InternLM/InternEvo": internevo,
    "LianjiaTech/BELLE": belle,
    "VectorInstitute/vectorlm": vectorlm,
    "DeepSpeed Muon post": muon_post,
}
