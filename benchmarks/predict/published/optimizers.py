"""Optimizers by the names that people publish them under, and what they are in DeepSpeed's configs."""

from __future__ import annotations

from typing import Any

from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import LeftOut, cell_of

_KINDS = ("adamw", "adam", "fused_adam", "adafactor", "muon", "lamb", "lion", "sgd", "adagrad")
_IN_8_BITS = ("adamw", "adam", "lion")  # bitsandbytes' that optimizers.OTHER_STATES knows
# Meanings of an optimizer's words, all of which have to be said -> the Job's, or the type of DeepSpeed's config that no Job has.
_OPTIMIZERS = (
    ({"paged", "8bit"}, "pagedadamw8bit"),
    ({"paged"}, "pagedadamw"),
    ({"lion", "8bit"}, "lion8bit"),
    ({"8bit"}, "adamw8bit"),
    *(({name}, name) for name in _KINDS[3:]),
    ({"fused_adam"}, "adamw"),
    ({"adamw"}, "adamw"),
    ({"adam"}, "adamw"),
)


def optimizer_of(row: Row, deepspeed: bool) -> tuple[str | None, dict[str, Any]]:
    """(the optimizer, None where the row names none; what of a DeepSpeed config stands for torch's own kind of it).

    Raises:
        LeftOut: it steps in backward, or keeps states that are not known; or nobody knows a word.
    """
    cell, config = cell_of("optimizer", row["optimizer"]), dict[str, Any]()
    if "in-backward" in cell or row.says("optimizer in backward", "optimizer_in_bwd on"):
        raise LeftOut("optimizer steps in backward")
    named = cell.one_of(*_KINDS)
    if not cell.unknown and named is None:
        raise LeftOut(f"column optimizer: {row['optimizer']!r} names none")
    if ("8bit" in cell and named not in (None, *_IN_8_BITS)) or ("paged" in cell and named == "lion"):
        raise LeftOut(f"column optimizer: the states of {row['optimizer']!r} are not known")
    # torch's AdamW takes its foreach form on CUDA unless it is told to fuse (torch 2.0 to 2.13); transformers' own AdamW
    # (`adamw_hf`) goes parameter by parameter, as if fused, and its Trainer fuses since version 5
    if "adam" in row["optimizer"].lower() and not deepspeed:
        fused = "fused" in cell or "hf" in cell or row.says("transformers 5")
        config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, **({"fused": True} if fused else {})}}
    said = {*cell.heads, *cell.remarked}
    return (None if cell.unknown else next(name for words, name in _OPTIMIZERS if words <= said)), config
