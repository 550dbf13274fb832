"""A study's attributes of any length: a database may keep at most 64 KiB in one, as MySQL's TEXT does.

A longer value is kept in pieces of its JSON, each an attribute named by what is in it, so that whoever reads in between
sees the old value or the new one whole.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import optuna

from autotune.masking import masked_data

MOST_BYTES = 60_000  # in one attribute; MySQL's TEXT holds 65,535 (Optuna's tables have no larger type)
_PIECE_CHARACTERS = MOST_BYTES // 2 - 1  # a piece is JSON again: a backslash before each quote doubles it at worst
_AS_THEY_ARE = ("fingerprint", "space")  # a study starts again with these: its command has to run
_PIECES = "autotune pieces"  # the only key of a value that stands for pieces


def set_attribute(study: optuna.Study, key: str, value: Any) -> None:
    """Store an attribute, without secrets unless a study needs them to go on."""
    if key not in _AS_THEY_ARE:
        value = masked_data(value)
    text = json.dumps(value)
    if len(text) <= MOST_BYTES:
        study.set_user_attr(key, value)
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    starts = range(0, len(text), _PIECE_CHARACTERS)
    names = [f"{key} {digest} {number}" for number in range(len(starts))]
    for name, start in zip(names, starts, strict=True):
        study.set_user_attr(name, text[start : start + _PIECE_CHARACTERS])
    study.set_user_attr(key, {_PIECES: names})


def attributes(study: optuna.Study) -> dict[str, Any]:
    """All attributes, those in pieces put together."""
    stored = study.user_attrs
    return {key: _whole(stored, value) for key, value in stored.items()}


def _whole(stored: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PIECES}:
        return json.loads("".join(stored[name] for name in value[_PIECES]))
    return value
