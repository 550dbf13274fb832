"""Values that a knob, a LoRA and a model's size may have in a gallery entry."""

from __future__ import annotations

import math
import re
from typing import Any

from autotune.errors import UserError
from autotune.problem.candidate import KNOBS, LORA, Value
from autotune.problem.job import parse_lora
from autotune.problem.knobs import Knob
from autotune.problem.model_sizes import SHAPE_KEYS, size_trouble
from autotune.problem.space_file import DS_TOP_LEVEL, DS_ZERO_KEYS

# Names of layers in public architectures. A LoRA on other layers is recorded as one on all layers.
PUBLIC_TARGETS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"),
        *(
            "c_attn",
            "c_proj",
            "c_fc",
            "wte",
            "query_key_value",
            "dense",
            "dense_h_to_4h",
            "dense_4h_to_h",
            "fc1",
            "fc2",
        ),
        *("query", "key", "value", "q", "k", "v", "o", "wi", "wo", "wi_0", "wi_1", "out_proj", "all-linear", "score"),
    )
)
MOST_NUMBER = 2**63  # DeepSpeed's "no limit" is one less


def knob_trouble(name: str, value: Value) -> str | None:
    """Return the reason why a knob is not allowed in an entry, or None. A string is only allowed if it is in a list."""
    knob = KNOBS.get(name)
    if knob is None:
        return _key_trouble(name, value)
    if isinstance(knob.kind, tuple):
        return None if value in knob.kind else f"expected one of {', '.join(knob.kind)}, found {value!r}"
    if knob.kind is bool:
        return None if isinstance(value, bool) else f"expected true or false, found {value!r}"
    if knob.kind in (int, float):
        return _number_trouble(knob, value)
    if name == LORA:
        return lora_trouble(value) if value != "none" else None
    return f"has no place here, found {value!r}"


def _key_trouble(name: str, value: Value) -> str | None:
    """Check a name that is no knob: a DeepSpeed key with a number or a switch is allowed."""
    head, _, leaf = name.partition(".")
    known = name in DS_TOP_LEVEL or (head in DS_TOP_LEVEL and re.fullmatch(r"[a-z0-9_.]{1,80}", leaf))
    if head == "zero_optimization" and leaf.split(".")[0] not in DS_ZERO_KEYS:
        known = False
    if not known:
        return "is no knob, and DeepSpeed knows no such key"
    if isinstance(value, str):
        return "is a text, which has no place here"
    return None if _is_number(value) else f"expected a number below {MOST_NUMBER}"


def _number_trouble(knob: Knob, value: Value) -> str | None:
    whole = knob.kind is int
    if isinstance(value, bool) or not _is_number(value) or not knob.low <= value <= knob.high or (whole and value % 1):  # type: ignore[operator]
        to = f"of at least {knob.low:g}" if math.isinf(knob.high) else f"from {knob.low:g} to {knob.high:g}"
        return f"expected a {'whole ' * whole}number {to}, found {value!r}"
    return None


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and abs(value) <= MOST_NUMBER  # false for NaN


def lora_trouble(value: Value) -> str | None:
    """Return the reason why a LoRA is not allowed in an entry, or None. Its layers must exist in public architectures, and no
    part may appear twice."""
    if not isinstance(value, str):
        return f"expected none, or r=16,targets=all-linear, found {value!r}"
    try:
        lora = parse_lora(value)
    except UserError as error:
        return str(error)
    if private := sorted({*lora.targets, *lora.saved} - PUBLIC_TARGETS):
        return f"names layers of no public architecture: {', '.join(private)}"
    keys = [part.partition("=")[0].strip() for part in value.split(",")]
    return "says a part of itself twice" if len(set(keys)) < len(keys) else None


# -- for pydantic: the value itself, or ValueError ---------------------------------------------------------------------------


def known_lora(text: str | None) -> str | None:
    if text is not None and (why := lora_trouble(text)):
        raise ValueError(why)
    return text


def known_sizes(shape: dict[str, Any]) -> dict[str, Any]:
    for key, value in shape.items():
        if why := size_trouble(key, value):
            raise ValueError(f"{key!r} {why}" if key not in SHAPE_KEYS else f"{key}: {why}")
    return shape


def known_knobs(knobs: dict[str, Any]) -> dict[str, Any]:
    for name, value in knobs.items():
        if why := knob_trouble(name, value):
            raise ValueError(f"{name}: {why}")
    return knobs


def known_domains(space: dict[str, list[Any]]) -> dict[str, list[Any]]:
    for name, values in space.items():
        for value in values:
            known_knobs({name: value})
    return space
