"""Models and GPUs by the names that people publish them under."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from published_rows import LeftOut, Row, bare

from autotune.problem.hardware import GpuFacts, gpu_table
from autotune.problem.models import ModelSpec, shipped_models

DATA = Path(__file__).parent / "data" / "published"
NEAR = 0.25  # a model of unknown name is taken for one of its family whose size differs by no more than this share


@cache
def _data() -> dict[str, Any]:
    return dict(json.loads((DATA / "models.json").read_text()))


@cache
def known_models() -> dict[str, ModelSpec]:
    """All models, by the keys of their names and aliases."""
    data = _data()
    found = {}
    for name, spec in shipped_models().items():
        if not name.startswith("tiny-"):
            for known in (name, *data["shipped_aliases"].get(name, ())):
                found[key_of(known)] = spec
    for name, entry in data["models"].items():
        spec = ModelSpec(name, entry["config"], f"https://huggingface.co/{entry['source']}")
        for known in (name, *entry.get("aliases", ())):
            found[key_of(known)] = spec
    return found


def key_of(name: str) -> str:
    """Letters and digits of a name, without its owner and the words that leave its shape as it is."""
    text = bare(name).split("/")[-1].replace("_", "-").replace(" ", "-")
    text = re.sub(r"^meta-", "", text).replace("gpt-2", "gpt2")
    words = ("chat", "instruct", "hf", "base", "it", "sft", "dpo", "deduped", "mt", "model", "1m", "128k", "4k", "2407")
    text = "-".join(part for part in text.split("-") if part not in words and not re.fullmatch(r"v0\.\d", part))
    text = re.sub(r"(llama|qwen|gemma|phi)-?(\d)", r"\1-\2", text)
    return re.sub(r"[^a-z0-9.]", "", text)


def model_of(row: Row) -> tuple[ModelSpec, bool]:
    """(the row's model, whether it is one of the same family and size instead).

    Raises:
        LeftOut: nothing is known of it, or it is none that a Job describes.
    """
    name, known = row["model"], known_models()
    if key_of(name) in known:
        return known[key_of(name)], False
    size = row["params_b"] and not row.unknown("params_b") and float(re.findall(r"[\d.]+", row["params_b"])[0])
    if not size:
        found = re.search(r"(\d+(?:\.\d+)?)\s*b\b", name.lower())
        size = float(found.group(1)) if found else 0.0
    if not size or re.search(r"\bvl\b|vision|-v\b|megatron|moe|whisper|vit|diffusion", name.lower()):
        raise LeftOut("no configuration of the model is known")
    family = re.match(r"[a-z]+", key_of(name))
    alike = [s for key, s in known.items() if family and key.startswith(family.group()[:4])]
    near = nearest(alike, size) or nearest([s for k, s in known.items() if k.startswith(("llama", "mistral"))], size)
    if near is None:
        raise LeftOut("no configuration of the model is known")
    return near, True


def nearest(models: list[ModelSpec], billions: float) -> ModelSpec | None:
    """The model nearest in size, unless that is too far."""
    sized = [(abs(parameters_of(spec) / 1e9 / billions - 1), spec.name, spec) for spec in models]
    best = min(sized, default=None, key=lambda one: one[:2])
    return best[2] if best and best[0] <= NEAR else None


def parameters_of(spec: ModelSpec) -> float:
    """Elements of a known model, as transformers builds it."""
    return float(spec.parameters or _data()["models"][spec.name]["parameters"])


TORCH_OF_2025 = (2, 6)  # released in January
YEAR_OF_SDPA = 2024
SHIFTS_SINCE = 2025  # from transformers 4.50 (March 2025) on labels are shifted and logits are not


def year_of(row: Row, model: ModelSpec) -> int:
    """When the figure was measured: the latest year that the row names, the year of the torch that it names, or that in which
    its model was new (2023 and 2024 stand for before 2025, 2025 for since)."""
    text = row["source_path_or_section"] + " " + row["notes"]
    years = [int(year) for year in re.findall(r"\b(20[12]\d)(?!\d)", text)]
    years += [
        2024 if tuple(map(int, version.split("."))) < TORCH_OF_2025 else 2025
        for version in re.findall(r"torch (2\.\d+)", text)
    ]
    if years:
        return max(years)
    return 2023 if model.name.startswith(tuple(_data()["losses"]["before_2025"])) else 2025


def eager_then(row: Row, model: ModelSpec) -> bool:
    """Whether transformers had no fused attention for the model when the figure was measured: none before 4.36 (December 2023),
    and for the architectures of `eager_before_2025` none before 4.41 to 4.48 (the second half of 2024)."""
    year = year_of(row, model)
    dated = re.search(r"\b20[12]\d(?!\d)|torch 2\.\d", row["source_path_or_section"] + " " + row["notes"])
    late = model.config["model_type"] in _data()["losses"]["eager_before_2025"]
    return bool(year < SHIFTS_SINCE if late else dated and year < YEAR_OF_SDPA)


def loss_of(row: Row, model: ModelSpec, autocast: bool) -> str:
    """How the model's code took its loss when the figure was measured: one of `trace.LOSSES`."""
    if year_of(row, model) >= SHIFTS_SINCE:
        return "own"
    code = _data()["losses"]
    own_code = model.name.startswith(tuple(code["own_code_16_bit"]))
    if model.config["model_type"] in code["upcast"] and not own_code:
        return "shifted32"
    return "shifted-cast" if autocast else "shifted16"


# What people write -> the row of autotune's table. The first that is found counts; the memory decides between two.
GPUS = {
    "a100-40": "a100-40gb",
    "a100": "a100-80gb",
    "a800": "a800",
    "h100pcie": "h100-pcie",
    "h100": "h100",
    "h800": "h800",
    "h200": "h200",
    "h20": "h20",
    "b200": "b200",
    "v100": "v100-32gb",
    "p100": "p100",
    "t4": "t4",
    "a10g": "a10g",
    "a10": "a10",
    "a30": "a30",
    "a40": "a40",
    "l40s": "l40s",
    "l40": "l40",
    "l4": "l4",
    "6000ada": "rtx6000-ada",
    "a6000": "rtxa6000",
    "a5000": "rtxa5000",
    "a4000": "rtxa4000",
    "rtx6000": "quadro-rtx6000",
    "titanrtx": "titan-rtx",
    "2080ti": "rtx2080ti",
    "3060": "rtx3060",
    "3080": "rtx3080",
    "3090": "rtx3090",
    "4070ti": "rtx4070ti",
    "4080": "rtx4080",
    "4090": "rtx4090",
    "5090": "rtx5090",
}


def gpu_of(row: Row) -> tuple[GpuFacts | None, float | None]:
    """(facts of the row's GPU, its memory in GiB); None where they are not stated.

    Where several are named (`RTX 3090/4090`) the first. An 80 GB card of unknown name has no facts.
    """
    text = re.sub(r"[^a-z0-9]", "", row["gpu"].lower().split("/")[0].split("limited")[0])
    stated = re.search(r"\d+(?:\.\d+)?", row["gpu_mem_gib"])
    gib = float(stated.group()) if stated and not row.unknown("gpu_mem_gib") else None
    name = next((row_name for words, row_name in GPUS.items() if words.replace("-", "") in text), None)
    if text.startswith("unknown"):
        name = None
    if name == "a100-80gb" and ((gib is not None and 30 < gib <= 40) or "40gb" in text):
        name = "a100-40gb"
    if name == "v100-32gb" and ((gib is not None and gib <= 16) or "16gb" in text):
        name = "v100-16gb"
    facts = gpu_table().get(name) if name else None
    if facts is not None and (gib is None or abs(gib / facts.memory_gib - 1) < 0.15):
        gib = facts.memory_gib
    return facts, gib


def as_fsdp(model: ModelSpec) -> dict[str, Any]:
    """torch's FullyShardedDataParallel, wrapped block by block, in ZeRO-3's words.

    The root's own parameters (embedding and head) stay whole from forward to backward, and beside the block that runs the
    next one is gathered (torch/distributed/fsdp: the root is not resharded; BackwardPrefetch.BACKWARD_PRE). A block's
    gradients are reduced together, out of a copy that is made when they are complete; those of the root wait for the
    embedding's, so that the head's gradient is there through all of backward. Nothing is kept for gradients beforehand.
    """
    text = model.config.get("text_config") or model.config
    layers = int(next(text[k] for k in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if k in text))
    vocabulary = int(text.get("vocab_size", 0))
    ends = vocabulary * hidden_size(model) * (1 if text.get("tie_word_embeddings") else 2)
    block = max(1, int((parameters_of(model) - ends) / layers))
    zero = "zero_optimization.stage3_"
    return {
        "reduce_bucket_size": max(block, ends),
        "contiguous_gradients": False,
        zero + "prefetch_bucket_size": block,
        zero + "max_live_parameters": ends + 2 * block,
        zero + "max_reuse_distance": ends + 2 * block,
    }


def untied(model: ModelSpec) -> ModelSpec:
    """The model with a head of its own, as code bases have it that do not share the embedding's matrix."""
    if not model.config.get("tie_word_embeddings"):
        return model
    head = int(model.config["vocab_size"]) * hidden_size(model)
    config = {**model.config, "tie_word_embeddings": False}
    return dataclasses.replace(model, config=config, parameters=int(parameters_of(model)) + head)


def hidden_size(model: ModelSpec) -> int:
    """Width of the model, by which transformers fills the buckets that a DeepSpeed config calls `auto`."""
    text = model.config.get("text_config") or model.config
    return int(next(text[k] for k in ("hidden_size", "n_embd", "d_model", "dim") if k in text))
