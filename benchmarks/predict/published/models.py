"""Models by the names that people publish them under, and how the code of their time ran them."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import cache
from typing import Any

from autotune.problem.models import ModelSpec, shipped_models
from benchmarks.predict.published.number_formats import billions
from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import DATA, LeftOut, bare

ANOTHER_SIZE = 0.5  # names round (StableLM's 3B has 3.6, Gemma 2's 2B 2.6); what is further off is another model


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


def model_of(row: Row) -> ModelSpec:
    """The model that the row names, by its name or an alias in `models.json`: none stands in for one that is not known.

    Raises:
        LeftOut: nothing is known of it, or the row states another size.
    """
    model = known_models().get(key_of(row["model"]))
    if model is None:
        raise LeftOut(f"column model: no configuration of {row['model']!r} is known")
    if not row.unknown("params_b"):
        stated = billions(row["params_b"])
        if abs(stated * 1e9 / parameters_of(model) - 1) > ANOTHER_SIZE:
            raise LeftOut(f"column params_b: {row['params_b']}, and {model.name} has another size")
    return model


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


def untied(model: ModelSpec) -> ModelSpec:
    """The model with a head of its own, as code bases have it that do not share the embedding's matrix."""
    if not model.config.get("tie_word_embeddings"):
        return model
    head = int(model.config["vocab_size"]) * hidden_size(model)
    config = {**model.config, "tie_word_embeddings": False}
    return dataclasses.replace(model, config=config, parameters=int(parameters_of(model)) + head)


def hidden_size(model: ModelSpec) -> int:
    """Width of the model, by which transformers fills the buckets that a DeepSpeed config calls `auto`.

    Raises:
        LeftOut: the configuration does not say.
    """
    text = model.config.get("text_config") or model.config
    width = next((text[k] for k in ("hidden_size", "n_embd", "d_model", "dim") if k in text), None)
    if width is None:
        raise LeftOut("the model's configuration does not say how wide it is")
    return int(width)
